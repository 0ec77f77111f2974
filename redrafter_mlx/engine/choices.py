"""What the options of a request mean: the shape of its drafts, its decoder and its batch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import NoneType

from redrafter_mlx.config import PLAIN, BeamShape, GenerationOptions, SamplingParams
from redrafter_mlx.decoding.pipeline import Pipeline
from redrafter_mlx.decoding.sequence import FixedPolicy, Policy
from redrafter_mlx.decoding.step import Decoder
from redrafter_mlx.drafting.interface import Drafter
from redrafter_mlx.drafting.untrained.continuation import HostDrafter
from redrafter_mlx.engine.request import Answer
from redrafter_mlx.errors import BadInputError
from redrafter_mlx.speculation.static_tree import StaticTree
from redrafter_mlx.speculation.tree import Pack, pack_beam
from redrafter_mlx.target_model.model import Target
from redrafter_mlx.tuning.policy import TunedPolicy
from redrafter_mlx.tuning.tuner import Tuner


@dataclass(frozen=True)
class Choices:
    """What can be chosen for the answers of one model; the fields as in `Redrafter`."""

    target: Target
    drafter: Drafter | None
    host_drafters: tuple[HostDrafter, ...]
    drafting: str | None
    tuning: Tuner | None

    @property
    def assumed_shape(self) -> BeamShape:
        """Best assumed shape for this kind of machine, equal in every run; PLAIN without drafts."""
        if self._tree is not None:
            return self._tree.shape
        return PLAIN if self.tuning is None else self.tuning.best_shape(by_clock=False)

    def options(
        self, options: GenerationOptions | None, overrides: Mapping[str, object]
    ) -> GenerationOptions:
        """Apply `overrides` to `options`; raises BadInputError for what this model cannot do."""
        if not isinstance(options, (GenerationOptions, NoneType)):
            raise BadInputError(f"options is {options!r:.80}; give GenerationOptions")
        chosen = (options or GenerationOptions()).updated(overrides)
        V = self.target.vocab_size
        for token, _ in chosen.logit_bias:
            if token >= V:
                raise BadInputError(f"logit_bias names token {token}; the model has {V}")
        longest = None if self.drafter is None else self.drafter.max_length
        if longest is not None and not self.host_drafters and (chosen.beam_length or 0) > longest:
            raise BadInputError(
                f"beam_length is {chosen.beam_length}; {self.drafting} drafts beams of up to "
                f"{longest}"
            )
        if self._tree is not None and chosen.draft:
            self._tree.shape_for(chosen)
        return chosen

    def shape_of(self, options: GenerationOptions, length: int = 0) -> BeamShape | None:
        """Return the beam shape of every step of an answer; None if it is chosen step by step.

        Args:
          length: number of prompt tokens
        Raises:
          BadInputError: for a shape other than that of the drafter's static tree
        """
        if not options.draft:
            return PLAIN
        if self._tree is not None:
            return self._tree.shape_for(options)
        asked = (options.beam_width, options.beam_length, options.max_nodes)
        if options.beam_width and options.beam_length:
            return BeamShape(options.beam_width, options.beam_length, options.max_nodes)
        if self.tuning is None:
            return PLAIN
        by_clock = not options.shape_belongs_to_seed
        if options.automatic and by_clock:
            return None
        return self.tuning.best_shape(
            *asked, context=length, by_clock=by_clock, method=options.method
        )

    def decoder(
        self, options: GenerationOptions, shape: BeamShape, pack: Pack = pack_beam
    ) -> Decoder:
        """Return the decoder with this model's drafts; `shape` is the default shape."""
        drafter, host = (self.drafter, self.host_drafters) if options.draft else (None, ())
        if not options.cache_prompt:
            host = tuple(one for one in host if not one.kept_bytes)
        sampling, logprobs = options.sampling, options.logprobs
        return Decoder(self.target, drafter, shape, sampling, logprobs, host, pack)

    @property
    def _tree(self) -> StaticTree | None:
        return None if self.drafter is None else self.drafter.tree


BatchKey = tuple[BeamShape | None, bool, Pack, SamplingParams | None]
"""What the answers of a batch have in common: `Answer.shape`, the option `draft`, how trees are
packed, and the sampling parameters that drafts are drawn with for rejection; None if they are not
drawn."""


class Batches:
    """The batches of one engine, each with the policy that chooses its shapes.

    pipelines: of each batch, in the order in which they began
    """

    def __init__(self, tuning: Tuner | None) -> None:
        self._tuning = tuning
        self.pipelines: dict[BatchKey, Pipeline] = {}
        self._policies: dict[BatchKey, TunedPolicy] = {}  # of batches without a fixed shape

    def batch_of(self, answer: Answer) -> Pipeline:
        """Return the batch that an answer joins, a new one if there is none yet."""
        options, decoder = answer.request.options, answer.decoder
        drawn = decoder.sampling if decoder.draws else None
        key = (answer.shape, options.draft, decoder.pack, drawn)
        if key not in self.pipelines:
            shapes: Policy = FixedPolicy(decoder.shape)
            if answer.shape is None and self._tuning is not None:
                shapes = self._policies[key] = self._tuning.policy(options.method)
            self.pipelines[key] = Pipeline(decoder, shapes)
        elif key in self._policies:
            self._policies[key].begin_answer()
        return self.pipelines[key]

    def remove_unused(self, used: Sequence[Pipeline]) -> list[TunedPolicy]:
        """Remove all batches but these; return the policies that have learned from the others."""
        empty = [key for key, batch in self.pipelines.items() if batch not in used]
        for key in empty:
            del self.pipelines[key]
        return [self._policies.pop(key) for key in empty if key in self._policies]
