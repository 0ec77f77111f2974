"""The decoding loop: verify, accept, commit, draft, pack; one call of the target per step.

    state: cache, committed length, tree (drafted in the step before), random keys

      verify   target(tree, after the committed text)      -> hidden [B, N, C], logits [B, N, V]
      accept   choose a token at every node, walk          -> path, accepted count, bonus token
      commit   keep the path's keys and values             -> length += 1 + accepted
      draft    the drafter sees the accepted path          -> beams [B, W, L]
      pack     merge shared prefixes                       -> the next step's tree

A step is a lazy graph that reads nothing on the host. Verification and drafting are submitted
separately: the host reads what was accepted, and submits the next verification, while the drafter
still runs. So the device always has work, and the cache is updated in place, which MLX does only
when no submitted call still reads it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import mlx.core as mx

from redrafter_mlx.config import PLAIN, BeamShape, SamplingParams
from redrafter_mlx.decoding.constraint import Constraint, allowed_tokens
from redrafter_mlx.decoding.prefill import PREFILL_CHUNK, Prefill
from redrafter_mlx.decoding.proposal import Drafted
from redrafter_mlx.decoding.sequence_cache import SequenceCache
from redrafter_mlx.decoding.state import (
    DecodeState,
    Drafts,
    RowOptions,
    newest_positions,
    root_alone,
)
from redrafter_mlx.decoding.step_result import StepOutput, report_step
from redrafter_mlx.decoding.verdict import Verdict, computable, judge
from redrafter_mlx.drafting.interface import Drafter, Features, Seen
from redrafter_mlx.drafting.ngram import Lookup
from redrafter_mlx.speculation.penalties import first_past
from redrafter_mlx.speculation.sampling import shared_draws
from redrafter_mlx.speculation.tree import Pack, pack_beam
from redrafter_mlx.target_model.model import Target


@dataclass(frozen=True)
class Decoder:
    """A target and its drafter, with fixed sampling parameters.

    drafter:    None decodes plainly: the same loop with a tree of one node
    shape:      default shape of the drafts
    logprobs:   whether results hold the log-probabilities that each token was chosen from
    lookup:     adds copies of the text to the drafts; None adds none
    pack:       makes a tree of the drafted beams; drafts drawn for rejection are one already
    """

    target: Target
    drafter: Drafter | None
    shape: BeamShape
    sampling: SamplingParams
    logprobs: bool = False
    lookup: Lookup | None = None
    pack: Pack = pack_beam

    def new_cache(self, batch: int = 1) -> SequenceCache:
        """Return an empty cache for `batch` sequences."""
        memory = () if self.drafter is None else self.drafter.empty(batch)
        return SequenceCache(self.target.new_cache(), memory, batch)

    def start(
        self,
        cache: SequenceCache,
        start: int,
        prompts: list[list[int]],
        keys: mx.array,
        shape: BeamShape | None = None,
        constraints: Sequence[Constraint | None] = (),
    ) -> tuple[DecodeState, StepOutput]:
        """Prefill the prompts from position `start` on and choose the first token.

        The prompts have one length; `constraints` as in `step`.
        """
        shape = shape or self.shape
        prefill = Prefill(self.target, self.drafter, cache, start, prompts, parked=shape == PLAIN)
        while prefill.left:
            prefill.read(PREFILL_CHUNK)
            if prefill.left:
                prefill.wait()
        return self.first(prefill, prompts, keys, shape, constraints)

    def first(
        self,
        prefill: Prefill,
        prompts: Sequence[Sequence[int]],
        keys: mx.array,
        shape: BeamShape,
        constraints: Sequence[Constraint | None] = (),
    ) -> tuple[DecodeState, StepOutput]:
        """Choose the first token after a finished prefill; `constraints` as in `step`."""
        hidden, read = prefill.hidden, prefill.position
        length = mx.full((len(prompts),), read, mx.int32)
        only = root_alone(mx.array([prompt[-1] for prompt in prompts], mx.int32))
        options = (RowOptions(self.sampling, self.logprobs),) * len(prompts)
        V = self.target.vocab_size
        history = tuple(first_past(prompt, self.sampling, V) for prompt in prompts)
        plain = Drafts(only, (Drafted(PLAIN),) * len(prompts))
        before = DecodeState(prefill.cache, length - 1, plain, keys, options, history)
        verdict = judge(
            before, self.target.logits(hidden), self._masks(before, constraints, hidden)
        )
        return self._following(before, hidden, verdict, length, read - 1, shape)

    def step(
        self,
        state: DecodeState,
        bound: int,
        shape: BeamShape | None = None,
        constraints: Sequence[Constraint | None] = (),
    ) -> tuple[DecodeState, StepOutput]:
        """Call the target once; `bound` is an upper bound of the committed length.

        The trees are verified as they were drafted; `shape` is the shape of the next ones.
        `constraints` are those of the batch rows, advanced to the root. Without any, the host reads
        nothing.
        """
        drafts, target = state.drafts, state.cache.target
        hidden, logits = self.target.verify(
            drafts.tree, target, state.length, bound, compiled=drafts.usual_size
        )
        masks = self._masks(state, constraints, logits)
        verdict = judge(computable(state, hidden), logits, masks)
        path, n_accepted = verdict.accepted.path, verdict.accepted.n_accepted
        length = target.commit(drafts.tree, path, n_accepted, state.length)
        return self._following(state, hidden, verdict, length, bound, shape or self.shape)

    @property
    def remembers(self) -> bool:
        """Whether the drafter keeps a memory of the text."""
        return self._features.every_position

    def _following(
        self,
        state: DecodeState,
        hidden: mx.array,
        verdict: Verdict,
        length: mx.array,
        bound: int,
        shape: BeamShape,
    ) -> tuple[DecodeState, StepOutput]:
        """Return the state after a verdict, with the drafts for the next step, and the report."""
        accepted, history, logits = verdict
        seen = newest_positions(state, hidden, accepted, bound, self._features)
        rows = [options.sampling for options in state.options]
        drafts = self._draft(state.cache, seen, state.keys, rows, shape)
        following = DecodeState(state.cache, length, drafts, state.keys, state.options, history)
        shown = tuple(options.logprobs for options in state.options)
        return following, report_step(state.drafts, accepted, logits, shown)

    def _masks(
        self, state: DecodeState, constraints: Sequence[Constraint | None], verified: mx.array
    ) -> mx.array | None:
        """Compute the trees' masks on the host while the device computes `verified`."""
        if all(constraint is None for constraint in constraints):
            return None
        mx.async_eval(verified, *state.cache.target.buffers)
        return allowed_tokens(constraints, state.drafts.tree, self.target.vocab_size)

    @property
    def _features(self) -> Features:
        return Features() if self.drafter is None else self.drafter.features

    def _draft(
        self,
        cache: SequenceCache,
        seen: Seen,
        keys: mx.array,
        rows: Sequence[SamplingParams],
        shape: BeamShape,
    ) -> Drafts:
        """Draft what the next step verifies, after the bonus tokens `seen.root`.

        `rows` are the batch rows' parameters.
        """
        drafter, B = self.drafter, keys.shape[0]
        if drafter is None or shape.length == 1:
            if drafter is not None and self.remembers:
                cache.show(seen, drafter, parked=True)
            return Drafts(root_alone(seen.root), (Drafted(PLAIN),) * B)
        if self.remembers:
            cache.catch_up(drafter)
            cache.remembered = seen.root_position
        if self.draws:
            drawn, cache.memory = drafter.draw(cache.memory, seen, shape, keys, self.sampling)
            return Drafts(drawn.tree, (Drafted(shape, drawn=True),) * B, drawn.log_probs)
        asked, V = drafter.drafted(shape), self.target.vocab_size
        draws = shared_draws(keys, seen.root_position + 1, rows, asked.length, V)
        noise = None
        if draws is not None:
            seen, noise = replace(seen, draws=draws), draws.noise
        beams, cache.memory = drafter.draft(cache.memory, seen, asked)
        tree = self.pack(beams, shape.nodes)
        return Drafts(tree, (Drafted(shape),) * B, beams=beams, noise=noise)

    @property
    def draws(self) -> bool:
        """Whether drafts are drawn for rejection; then all rows have the same parameters."""
        return (
            self.drafter is not None
            and self.drafter.can_draw
            and self.sampling.method == "rejection"
        )
