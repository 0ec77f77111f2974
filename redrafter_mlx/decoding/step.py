"""One step of decoding: verify, accept, commit, draft, pack; one call of the target.

    state: cache, committed length, tree (drafted in the step before), random keys

      verify   target(tree, after the committed text)      -> hidden [B, N, C], logits [B, N, V]
      accept   choose a token at every node, walk          -> path, accepted count, bonus token
      commit   keep the path's keys and values             -> length += 1 + accepted
      draft    the drafter sees the accepted path          -> beams [B, W, L]
      pack     merge shared prefixes                       -> the next step's tree

A step is a lazy graph that reads nothing on the host. Verification and drafting are submitted
separately: the host reads what was accepted, and submits the next verification, while the drafter
still runs. So the device always has work, and the cache is updated in place, which MLX does only
when no submitted call still reads it. `pipeline` does that.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import mlx.core as mx

from redrafter_mlx.config import PLAIN, BeamShape, SamplingParams
from redrafter_mlx.decoding.acceptance import Accepted, accept_drafts, without_nan
from redrafter_mlx.decoding.cache.sequence_cache import SequenceCache
from redrafter_mlx.decoding.constraint import Constraint, allowed_tokens
from redrafter_mlx.decoding.prefill import PREFILL_CHUNK, Prefill
from redrafter_mlx.decoding.proposal import Drafted
from redrafter_mlx.decoding.report import Report, report_of
from redrafter_mlx.decoding.state import DecodeState, Drafts
from redrafter_mlx.drafting.interface import Drafter, Features, Seen
from redrafter_mlx.drafting.untrained.continuation import ContinuationSource, HostDrafter
from redrafter_mlx.speculation.accept import Acceptance
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
    host_drafters: add continuations to the drafts, such as n-gram matches of the text
    pack:       makes a tree of the drafted beams; drafts drawn for rejection are one already
    """

    target: Target
    drafter: Drafter | None
    shape: BeamShape
    sampling: SamplingParams
    logprobs: bool = False
    host_drafters: tuple[HostDrafter, ...] = ()
    pack: Pack = pack_beam

    def new_cache(self, batch: int = 1) -> SequenceCache:
        """Return an empty cache for `batch` sequences."""
        memory = () if self.drafter is None else self.drafter.empty(batch)
        return SequenceCache(self.target.new_cache(), memory, batch)

    def begin_sources(self) -> tuple[ContinuationSource, ...]:
        """Return the sources of a new text, which is empty so far."""
        return tuple(drafter.begin() for drafter in self.host_drafters)

    def start(
        self,
        cache: SequenceCache,
        start: int,
        prompts: list[list[int]],
        keys: mx.array,
        shape: BeamShape | None = None,
        constraints: Sequence[Constraint | None] = (),
    ) -> tuple[DecodeState, Report]:
        """Prefill the prompts from position `start` on and choose the first token.

        The prompts have one length; `constraints` as in `step`.
        """
        shape = shape or self.shape
        prefill = Prefill(self.target, self.drafter, cache, start, prompts, drafts=shape != PLAIN)
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
    ) -> tuple[DecodeState, Report]:
        """Choose the first token after a finished prefill; `constraints` as in `step`."""
        hidden, read, B = prefill.hidden, prefill.position, len(prompts)
        length = mx.full((B,), read, mx.int32)
        roots = Drafts.plain(mx.array([prompt[-1] for prompt in prompts], mx.int32))
        history = tuple(first_past(p, self.sampling, self.target.vocab_size) for p in prompts)
        sampling, logprobs = (self.sampling,) * B, (self.logprobs,) * B
        state = DecodeState(prefill.cache, length - 1, roots, keys, sampling, logprobs, history)
        logits = self.target.logits(hidden)
        masks = self._masks(state, constraints, hidden)
        accepted = accept_drafts(state, roots.tree, logits, masks)
        state, report = self._next(state, hidden, accepted, length, read - 1, shape)
        return state, report._replace(max_committed=0)  # the token is the root of the first tree

    def step(
        self,
        state: DecodeState,
        bound: int,
        shape: BeamShape | None = None,
        constraints: Sequence[Constraint | None] = (),
    ) -> tuple[DecodeState, Report]:
        """Call the target once; `bound` is an upper bound of the committed length.

        The trees are verified as they were drafted; `shape` is the shape of the next ones.
        `constraints` are those of the sequences, advanced to the root. Without any, the host reads
        nothing.
        """
        drafts, cache, tree = state.drafts, state.cache.target, state.drafts.tree
        hidden, logits = self.target.verify(
            tree, cache, state.length, bound, compiled=drafts.usual_size
        )
        masks = self._masks(state, constraints, logits)
        accepted = accept_drafts(state, without_nan(tree, hidden), logits, masks)
        path, n_accepted = accepted.paths.path, accepted.paths.n_accepted
        length = cache.commit(tree, path, n_accepted, state.length)
        return self._next(state, hidden, accepted, length, bound, shape or self.shape)

    @property
    def remembers(self) -> bool:
        """Whether the drafter keeps a memory of the text."""
        return self._features.every_position

    @property
    def draws(self) -> bool:
        """Whether drafts are drawn for rejection; then all rows have the same parameters."""
        return (
            self.drafter is not None
            and self.drafter.can_draw
            and self.sampling.method == "rejection"
        )

    @cached_property
    def _features(self) -> Features:
        return Features() if self.drafter is None else self.drafter.features

    def _masks(
        self, state: DecodeState, constraints: Sequence[Constraint | None], verified: mx.array
    ) -> mx.array | None:
        """Compute the trees' masks on the host while the device computes `verified`."""
        if all(constraint is None for constraint in constraints):
            return None
        mx.async_eval(verified, *state.cache.target.buffers)
        return allowed_tokens(constraints, state.drafts.tree, self.target.vocab_size)

    def _next(
        self,
        state: DecodeState,
        hidden: mx.array,
        accepted: Accepted,
        length: mx.array,
        bound: int,
        shape: BeamShape,
    ) -> tuple[DecodeState, Report]:
        """Return the state after what was accepted, with the next drafts, and the report."""
        seen = _newest_positions(state, hidden, accepted.paths, bound, self._features)
        drafts = self.draft(state, seen, shape)
        report = report_of(state, accepted)
        return replace(state, length=length, drafts=drafts, history=accepted.history), report

    def draft(self, state: DecodeState, seen: Seen, shape: BeamShape) -> Drafts:
        """Draft what the next step verifies, after the bonus tokens `seen.root`."""
        drafter, cache, keys = self.drafter, state.cache, state.keys
        if drafter is None or shape.length == 1:
            if drafter is not None and self.remembers:
                cache.show(seen, drafter, drafts=False)
            return Drafts.plain(seen.root)
        if self.remembers:
            cache.catch_up(drafter)
            cache.remembered = seen.root_position
        if caches := self._features.caches:
            read = cache.target.committed(caches, seen.root_position, seen.bound)
            seen = replace(seen, committed=read)
        if self.draws:
            drawn, cache.memory = drafter.draw(cache.memory, seen, shape, keys, self.sampling)
            made = (Drafted(shape, drawn=True),) * len(state.sampling)
            return Drafts(drawn.tree, made, drawn.log_probs)
        asked, after, V = drafter.drafted(shape), seen.root_position + 1, self.target.vocab_size
        draws = shared_draws(keys, after, state.sampling, asked.length, V)
        if draws is not None:
            seen = replace(seen, draws=draws)
        beams, cache.memory = drafter.draft(cache.memory, seen, asked)
        made = (Drafted(shape),) * len(state.sampling)
        return Drafts(
            self.pack(beams, shape.nodes),
            made,
            beams=beams,
            noise=None if draws is None else draws.noise,
        )


def _newest_positions(
    state: DecodeState, hidden: mx.array, accepted: Acceptance, bound: int, features: Features
) -> Seen:
    """Return the accepted path of a verified tree, or only its last position if that is enough.

    Shapes:
      hidden: [B, N, C], of the tree

    bound: upper bound of state.length
    """
    tree = state.drafts.tree
    end = bound + tree.max_depth + 1
    if not features.every_position:
        last = accepted.last[:, None]
        tokens = [mx.take_along_axis(tree.tokens, last, axis=1), accepted.bonus[:, None]]
        read = mx.take_along_axis(hidden, last[:, :, None], axis=1) if features.any else None
        position = state.length + accepted.n_accepted
        one = mx.ones(position.shape, mx.int32)
        return Seen(mx.concatenate(tokens, axis=1), read, position, one, end)
    path, count = accepted.path, accepted.n_accepted + 1
    read = mx.take_along_axis(hidden, path[:, :, None], axis=1) if features.any else None
    tokens = [tree.tokens[:, :1], accepted.emitted]
    return Seen(mx.concatenate(tokens, axis=1), read, state.length, count, end)
