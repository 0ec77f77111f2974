"""The decoding loop: verify, accept, commit, draft, pack; one call of the target a step.

    state: cache, committed length, tree (drafted in the step before), random keys

      verify   target(tree, after the committed text)      -> hidden [B, N, C], logits [B, N, V]
      accept   choose a token at every node, walk          -> path, accepted count, bonus token
      commit   keep the path's keys and values             -> length += 1 + accepted
      draft    the drafter sees the accepted path          -> beams [B, W, L]
      pack     merge shared prefixes                       -> the next step's tree

A step is a lazy graph that reads nothing on the host. Verification and drafting are submitted
apart, so that the host reads what was accepted, and submits the next verification, while the
drafter is still running: the device is never without work, and the cache is updated in place,
which MLX does only when no submitted call still reads it.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass, replace

import mlx.core as mx

from redrafter_mlx.config import PLAIN, BeamShape, Prefixes, SamplingParams
from redrafter_mlx.decoding.constraint import (
    Constraint,
    ForcedCopies,
    allowed_tokens,
    constrained,
)
from redrafter_mlx.decoding.copies import CopyPlan, FixedShape, Shapes, copy_beams, tree_of_copies
from redrafter_mlx.decoding.sequence_cache import SequenceCache, joined
from redrafter_mlx.decoding.state import (
    DecodeState,
    Drafts,
    newest_positions,
    root_alone,
)
from redrafter_mlx.decoding.step_result import StepOutput, StepResult, read_report, report_step
from redrafter_mlx.drafting.interface import Drafter, Features, Seen
from redrafter_mlx.drafting.prompt_lookup import CopySource, Lookup, TextIndex
from redrafter_mlx.runtime.blas import BLAS
from redrafter_mlx.speculation.accept import Acceptance, accept, accept_typical
from redrafter_mlx.speculation.rejection import SampledDrafts, accept_rejection
from redrafter_mlx.speculation.sampling import (
    choose,
    first_window,
    has_penalty,
    path_windows,
    penalised,
    sampled_log_probs,
)
from redrafter_mlx.speculation.tree import final_candidates, pack_beam
from redrafter_mlx.target.model import Target

_CLEAR_EVERY = 256
"""Steps between returns of unused memory to the system, as in mlx-lm's loop."""

_MOST_MISSED = 512
"""Steps, or positions of one, whose features are kept for a drafter that is parked."""


@dataclass(frozen=True)
class Decoder:
    """A target and its drafter, with the choice of tokens fixed.

    drafter:    None decodes auto-regressively, the same loop with a tree of one node
    shape:      of the drafts where nothing else is said
    prefixes:   of the beams that are packed; drafts that are drawn for rejection are always whole
    logprobs:   whether results hold the log-probabilities that each token was chosen from
    lookup:     adds copies of the text to the drafts; None leaves them out
    """

    target: Target
    drafter: Drafter | None
    shape: BeamShape
    sampling: SamplingParams
    prefixes: Prefixes = "all"
    logprobs: bool = False
    lookup: Lookup | None = None

    def new_cache(self, batch: int = 1) -> SequenceCache:
        """An empty cache for so many sequences."""
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
        """Read the prompts' tokens from position `start` on and choose the first token.

        Prompts of a batch may differ in length; shorter ones are padded on the right.
        `constraints` as in `step`.
        """
        shape = shape or self.shape
        fresh = [prompt[start:] for prompt in prompts]
        width = max(map(len, fresh))
        padded = mx.array([row + [0] * (width + 1 - len(row)) for row in fresh], mx.int32)

        def read(at: int, hidden: mx.array) -> None:
            """Show a chunk to the drafter: all positions whose next token is in the prompt."""
            P = hidden.shape[1]
            count = [min(max(len(row) - 1 - at, 0), P) for row in fresh]
            if self._remembers and any(count):
                seen = Seen(
                    padded[:, at : at + P + 1],
                    hidden if self._features.any else None,
                    mx.full((len(fresh),), start + at, mx.int32),
                    mx.array(count, mx.int32),
                    start + at + P,
                    start + at,
                )
                self._show(cache, seen, parked=shape == PLAIN)
                mx.async_eval(cache.of_drafter)  # or its graph would hold each chunk's features

        last = [len(row) - 1 for row in fresh]
        hidden = self.target.prefill(padded[:, :width], cache.target, start, last, read)
        length = mx.array([len(prompt) for prompt in prompts], mx.int32)
        only = root_alone(mx.array([prompt[-1] for prompt in prompts], mx.int32))
        history = None
        if has_penalty(self.sampling):
            size = self.sampling.repetition_context
            history = mx.array([first_window(p[:-1] or p, size) for p in prompts], mx.int32)
        logits = self.target.logits(hidden)
        before = DecodeState(cache, length - 1, Drafts(only, PLAIN), keys, history)
        masks = self._masks(before, constraints, hidden)
        accepted, history, logits = self._judge(before, logits, masks)
        seen = newest_positions(before, hidden, accepted, start + width - 1, self._features)
        drafts = self._draft(cache, seen, keys, shape)
        state = DecodeState(cache, length, drafts, keys, history)
        return state, report_step(only, PLAIN, accepted, logits if self.logprobs else None)

    def step(
        self,
        state: DecodeState,
        bound: int,
        shape: BeamShape | None = None,
        constraints: Sequence[Constraint | None] = (),
    ) -> tuple[DecodeState, StepOutput]:
        """One call of the target; `bound` is the most that the committed length can be.

        The tree is verified as it was drafted; `shape` is that of the next one. `constraints`, of
        each batch row, have advanced to the root; without any, nothing is read.
        """
        verified, cache, keys = state.drafts, state.cache, state.keys
        tree = verified.tree
        hidden, logits = self.target.verify(
            tree, cache.target, state.length, bound, compiled=verified.copied is None
        )
        masks = self._masks(state, constraints, logits)
        accepted, history, logits = self._judge(state, logits, masks)
        length = cache.target.commit(tree, accepted.path, accepted.n_accepted, state.length)
        seen = newest_positions(state, hidden, accepted, bound, self._features)
        drafts = self._draft(cache, seen, keys, shape or self.shape)
        following = DecodeState(cache, length, drafts, keys, history)
        shown = logits if self.logprobs else None
        return following, report_step(tree, verified.shape, accepted, shown, verified.copied)

    def run(
        self,
        cache: SequenceCache,
        start: int,
        prompt: list[int],
        keys: mx.array,
        finished: Callable[[StepResult], bool],
        shapes: Shapes | None = None,
        constraint: Constraint | None = None,
    ) -> Generator[StepResult, None, None]:
        """Decode one sequence, `start` of whose prompt's tokens are in the cache already.

        Gives the prompt's result first, then one a step, until `finished`. The graph of the next
        step is built while the device works on this one, and submitted once this one's result is
        read and `finished` has not ended the answer: nothing is computed after its end. Nothing
        is held across a yield; closing the iterator leaves the cache ready for `flush`.

        `shapes` chooses the shape of each step's drafts from the results read by then; without it
        all have the decoder's own. `finished` advances the `constraint`. Its masks follow from
        what a step accepted, so the next step is built after that was read.
        """
        shapes = shapes or FixedShape(self.shape)
        index = None if self.lookup is None else TextIndex(self.lookup, prompt)
        source: CopySource | None = index
        if constraint is not None:
            source = ForcedCopies(constraint, index)
        constraints = () if constraint is None else (constraint,)
        with BLAS.threads_by_rows():
            shape = shapes.next_shape(len(prompt))
            with self.target.lock:
                state, output = self.start(cache, start, [prompt], keys, shape, constraints)
                _submit(state, output)
            rows, unread, steps = len(prompt), 0, 0
            read_at = math.nan
            while True:
                shape = shapes.next_shape(rows)
                with self.target.lock:
                    before, drafted = None, state.drafts
                    if constraint is None:
                        before = cache.snapshot()
                        following, next_output = self.step(state, rows + unread, shape)
                    (result,), now = read_report(output), time.perf_counter()
                    result, read_at = replace(result, seconds=now - read_at), now
                    done = finished(result)
                    plan = None
                    if index is not None and not done:
                        index.extend(result.tokens)
                    if source is not None and not done:
                        plan = shapes.plan_copies(
                            source, drafted.shape, drawn=drafted.log_probs is not None
                        )
                    if before is not None and (done or plan is not None):
                        cache.restore(before)
                    if plan is not None:
                        state = self._with_copies(state, plan, result.tokens[-1])
                        shape = shape if plan.draft_after else PLAIN
                    if not done and (plan is not None or constraint is not None):
                        known = rows + (len(result.tokens) if steps else 0)
                        following, next_output = self.step(state, known, shape, constraints)
                    del before  # a second reference to the buffers would have them copied
                    if not done:
                        BLAS.prepare_for(state.drafts.tree.tokens.shape[1])
                        _submit(following, next_output, drafted if self._remembers else None)
                    del drafted
                if steps:
                    shapes.learn(result)
                yield result
                if done:
                    return
                # The prompt's result adds no row: its token is the root of the first tree.
                rows += len(result.tokens) if steps else 0
                unread = state.drafts.tree.max_depth + 1
                state, output = following, next_output
                steps += 1
                if steps % _CLEAR_EVERY == 0:
                    mx.clear_cache()

    def _with_copies(self, state: DecodeState, plan: CopyPlan, root: int) -> DecodeState:
        """The state whose next tree holds copies of the text."""
        copies = copy_beams([plan.copies], [root], plan.shape)
        drafted = state.drafts.beams if plan.joined else None
        tree, copied = tree_of_copies(copies, plan.shape, drafted)
        return replace(state, drafts=Drafts(tree, plan.shape, copied=copied))

    def _masks(
        self, state: DecodeState, constraints: Sequence[Constraint | None], verified: mx.array
    ) -> mx.array | None:
        """The masks of a tree, made on the host while the device computes `verified`."""
        if all(constraint is None for constraint in constraints):
            return None
        mx.async_eval(verified, *state.cache.target.buffers)
        return allowed_tokens(constraints, state.drafts.tree, self.target.vocab_size)

    def _judge(
        self, state: DecodeState, logits: mx.array, masks: mx.array | None
    ) -> tuple[Acceptance, mx.array | None, mx.array]:
        """The accepted path, the history after it, and the logits that were chosen from."""
        tree, params, position = state.drafts.tree, self.sampling, state.length + 1
        windows = None if state.history is None else path_windows(state.history, tree)
        logits = constrained(penalised(logits, windows, params), masks)
        if params.method == "rejection" and state.drafts.log_probs is not None:
            accepted = accept_rejection(
                SampledDrafts(tree, state.drafts.log_probs),
                sampled_log_probs(logits, params),
                position,
                state.keys,
                state.drafts.shape.width,
            )
        else:
            choices = choose(logits, tree.depths, position, state.keys, params, tree.max_depth)
            if params.method == "typical":
                log_probs = sampled_log_probs(logits, params)
                accepted = accept_typical(tree, log_probs, choices, params.epsilon, params.delta)
            else:
                accepted = accept(tree, choices)
        if windows is not None:
            windows = mx.take_along_axis(windows, accepted.last[:, None, None], axis=1)[:, 0]
        return accepted, windows, logits

    @property
    def _features(self) -> Features:
        return Features() if self.drafter is None else self.drafter.features

    @property
    def _remembers(self) -> bool:
        return self._features.every_position

    def _show(self, cache: SequenceCache, seen: Seen, parked: bool) -> None:
        """Let the drafter remember committed positions, now or when it drafts again.

        The target's features are large: before many are kept for a parked drafter, it reads them.
        """
        cache.missed += (seen,)
        many = max(len(cache.missed), seen.tokens.shape[1]) >= _MOST_MISSED
        if not parked or (many and self._features.any):
            self._catch_up(cache)

    def _catch_up(self, cache: SequenceCache) -> None:
        """Give the drafter what it missed."""
        assert self.drafter is not None
        for seen in joined(cache.missed):
            cache.memory = self.drafter.extend(cache.memory, seen)
            cache.remembered = seen.root_position
        cache.missed = ()

    def _draft(self, cache: SequenceCache, seen: Seen, keys: mx.array, shape: BeamShape) -> Drafts:
        """What to verify in the next step, after the bonus token `seen.root`."""
        drafter, params = self.drafter, self.sampling
        if drafter is None or shape.length == 1:
            if self._remembers:
                self._show(cache, seen, parked=True)
            return Drafts(root_alone(seen.root), PLAIN)
        if self._remembers:
            self._catch_up(cache)
            cache.remembered = seen.root_position
        if params.method == "rejection" and drafter.can_draw:
            drawn, cache.memory = drafter.draw(cache.memory, seen, shape, keys, params)
            return Drafts(drawn.tree, shape, drawn.log_probs)
        beams, cache.memory = drafter.draft(cache.memory, seen, shape)
        if self.prefixes == "final":
            beams = final_candidates(beams)
        return Drafts(pack_beam(beams, shape.nodes), shape, beams=beams)


def _submit(state: DecodeState, output: StepOutput, drafted: Drafts | None = None) -> None:
    """Start computing: first what the host will read, then the drafts for the next step.

    `drafted` are the drafts of the step before, of a drafter that remembers. It writes into its
    buffers in place only when its last call has ended; the host waits for that while the target
    computes.
    """
    cache = state.cache
    history = [] if state.history is None else [state.history]
    mx.async_eval(output.report, state.length, *history, *cache.target.buffers)
    if drafted is not None:
        mx.eval(drafted.tree.tokens)
    tree, log_probs = state.drafts.tree, state.drafts.log_probs
    arrays = [tree.tokens, tree.parents, tree.depths, tree.beams, tree.mask]
    mx.async_eval(*arrays, *([] if log_probs is None else [log_probs]), *cache.of_drafter)
