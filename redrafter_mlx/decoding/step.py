"""One step of decoding: verify, accept, commit, draft, pack; and the prefill before the first.

    state: cache, committed length, tree (drafted in the step before), random keys

      verify   target(tree, after the committed text)      -> hidden [B, N, C], logits [B, N, V]
      accept   choose a token at every node, walk          -> path, accepted count, bonus token
      commit   keep the path's keys and values             -> length += 1 + accepted
      draft    the drafter sees the accepted path          -> beams [B, W, L]
      pack     merge shared prefixes                       -> the next step's tree

A step is one call of the target, and a lazy graph that reads nothing on the host. Verification and
drafting are submitted separately: the host reads what was accepted, and submits the next
verification, while the drafter still runs. So the device always has work, and the cache is updated
in place, which MLX does only when no submitted call still reads it. `pipeline` does that.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import mlx.core as mx

from redrafter_mlx.config import PLAIN, BeamShape, SamplingParams
from redrafter_mlx.decoding.acceptance import (
    Accepted,
    Report,
    accept_drafts,
    newest_positions,
    report_of,
    without_nan,
)
from redrafter_mlx.decoding.cache.checkpoints import stops
from redrafter_mlx.decoding.cache.sequence_cache import SequenceCache
from redrafter_mlx.decoding.constraint import Constraint, allowed_tokens
from redrafter_mlx.decoding.sequence import Drafted
from redrafter_mlx.decoding.state import DecodeState, Drafts
from redrafter_mlx.drafting.interface import Drafter, Features, Seen
from redrafter_mlx.drafting.untrained.continuation import ContinuationSource, HostDrafter
from redrafter_mlx.speculation.sampling import first_past, shared_draws
from redrafter_mlx.speculation.tree import Pack, pack_beam
from redrafter_mlx.target_model.model import Target

PREFILL_CHUNK = 2048
"""Prompt tokens per call, as in mlx-lm."""


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

    @cached_property
    def remembers(self) -> bool:
        """Whether the drafter keeps a memory of the text."""
        return self._features.every_position

    @property
    def draws(self) -> bool:
        """Whether drafts are drawn for rejection; then all rows have the same parameters."""
        if self.drafter is None or self.sampling.method != "rejection":
            return False
        return self.drafter.can_draw

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
        seen = newest_positions(state, hidden, accepted.paths, bound, self._features)
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


class Prefill:
    """The prefill of a batch of prompts of one length, from position `start` on, in chunks.

    Other answers are decoded between the chunks.

    Shapes:
      hidden: [B, 1, C], hidden states at the prompts' last token, once all of it is read

    left:     number of unread tokens of a prompt
    position: position of the first unread token
    """

    hidden: mx.array

    def __init__(
        self,
        target: Target,
        drafter: Drafter | None,
        cache: SequenceCache,
        start: int,
        prompts: Sequence[Sequence[int]],
        drafts: bool = True,
    ) -> None:
        """`drafts`: whether it drafts after the prompt; otherwise the drafter may read it later."""
        self._target, self._drafter, self._drafts = target, drafter, drafts
        self._start, self._length = start, len(prompts[0])
        self._tokens = mx.array([[*prompt[start:], 0] for prompt in prompts], mx.int32)
        self.cache, self.position, self.left = cache, start, self._length - start
        forgetful, parted = cache.target.forgetful, cache.parted
        window = 0 if target.states else max(target.windows.values(), default=0)
        keeps = forgetful and parted is not None
        self._stops = stops(start, self._length, parted or 0, window) if keeps else []

    @property
    def begun(self) -> bool:
        """Whether a part of the prompts was read."""
        return self.position > self._start

    def read(self, max_tokens: int) -> None:
        """Submit the next chunk, at most `max_tokens`, up to the next checkpoint."""
        at, P = self.position - self._start, min(max_tokens, self.left)
        if self._stops:
            P = min(P, self._stops[0] - self.position)
        hidden = self._target.append(
            self._tokens[:, at : at + P], self.cache.target, self.position, self._length
        )
        self._show(at, hidden)
        self.position += P
        self.left -= P
        if self.position in self._stops:
            self._stops.remove(self.position)
            self.cache.keep_states(self.position)
        last = []
        if not self.left:  # those of earlier chunks are not computed
            self.hidden = hidden[:, -1:]
            last = [self.hidden]
        mx.async_eval(*self.cache.target.buffers, *last, *self.cache.of_drafter)

    def wait(self) -> None:
        """Wait until the chunks read so far are computed, and free their working memory."""
        mx.eval(self.cache.target.buffers, self.cache.of_drafter)
        mx.clear_cache()

    def _show(self, at: int, hidden: mx.array) -> None:
        """Show a chunk to the drafter: all positions whose next token is in the prompt."""
        features = Features() if self._drafter is None else self._drafter.features
        B, P, _ = hidden.shape
        count = min(self.left - 1, P)
        if self._drafter is None or not features.every_position or not count:
            return
        seen = Seen(
            self._tokens[:, at : at + count + 1],
            hidden[:, :count] if features.any else None,
            mx.full((B,), self.position, mx.int32),
            mx.full((B,), count, mx.int32),
            self._length,
            self.position,
        )
        self.cache.show(seen, self._drafter, drafts=self._drafts)
