"""Batched decoding: sequences that share each step, and join or leave between steps.

A step is built, submitted, and its results are read. `Order` says how these three follow one
another from one step to the next; the plain loop, which waits, is the reference of the others.
"""

from __future__ import annotations

from collections import abc
from collections.abc import Mapping
from dataclasses import replace
from typing import NamedTuple

import mlx.core as mx

from redrafter_mlx.config import PLAIN, BeamShape
from redrafter_mlx.decoding.proposal import Policy, Proposal
from redrafter_mlx.decoding.rows import join_states, take_states, with_copies
from redrafter_mlx.decoding.sequence import Sequence
from redrafter_mlx.decoding.sequence_cache import SequenceCache, SequenceSnapshot
from redrafter_mlx.decoding.state import DecodeState, Drafts
from redrafter_mlx.decoding.step import Decoder
from redrafter_mlx.decoding.step_clock import Order, StepClock
from redrafter_mlx.decoding.step_result import StepOutput, read_report
from redrafter_mlx.drafting.interface import Drafter
from redrafter_mlx.response import StepResult
from redrafter_mlx.speculation.tree import TokenTree
from redrafter_mlx.target_model.cache_slots import round_up
from redrafter_mlx.target_model.kv_cache import CAPACITY_STEP, SPARE_STEP, planned_capacity

_CLEAR_EVERY = 256
"""Number of steps after which unused memory is returned to the system, as in mlx-lm's loop."""


class Advanced(NamedTuple):
    """The outcome of one step of a batch.

    results: the step's result of each row in it; of rows that joined, their prompt's result
    ended:   rows that have left the batch, with their caches, ready to be kept
    """

    results: dict[Sequence, StepResult]
    ended: list[tuple[Sequence, SequenceCache]]


class _Part(NamedTuple):
    """Rows that share one state and whose last results are unread.

    unread: maximum number of tokens that those results add to the committed text
    """

    rows: list[Sequence]
    state: DecodeState
    output: StepOutput
    unread: int


class _Next(NamedTuple):
    """The next step of some rows, built but not submitted, and the trees that it verifies."""

    rows: list[Sequence]
    verified: TokenTree
    state: DecodeState
    output: StepOutput


class Pipeline:
    """Sequences that are decoded together, step by step."""

    def __init__(self, decoder: Decoder, shapes: Policy) -> None:
        self._decoder, self._shapes = decoder, shapes
        self._parts: list[_Part] = []
        self._shape = PLAIN  # the latest choice
        self._awaited = False  # whether the batch is empty, and its first shape is chosen
        self._clock = StepClock()
        self._steps = 0

    @property
    def rows(self) -> list[Sequence]:
        """The sequences in the batch, the newest last."""
        return [row for part in self._parts for row in part.rows if not row.left]

    @property
    def growth(self) -> int:
        """Number of cache slots that the next step adds, those of all rows together."""
        held = [part.state.cache.target.capacity for part in self._parts]
        needed = [
            planned_capacity(
                _committed([row for row in rows if not row.left]) + unread,
                state.drafts.tree.tokens.shape[1],
            )
            for rows, state, _, unread in self._parts
        ]
        counts = [len(part.rows) for part in self._parts]
        total = sum(counts) * max([*held, *needed], default=0)
        return total - sum(n * T for n, T in zip(counts, held, strict=True))

    def first_shape(self, row: Sequence, size: int) -> BeamShape:
        """Return the shape of a joining row's first drafts.

        An empty batch chooses it once, for `size` rows like this one, whose prompts are read
        together; otherwise it is the current shape.
        """
        if not (self._parts or self._awaited):
            self._awaited = True
            self._shape = self._shapes.propose([row] * size).shape
        return self._shape

    def join(self, row: Sequence, state: DecodeState, output: StepOutput) -> None:
        """Add a sequence, which takes part from the next step on, with its prompt's results."""
        submit_verification(state, output)
        submit_drafting(state)
        self._awaited = False
        self._parts.append(_Part([row], state, output, 0))

    def abandon(self) -> list[Sequence]:
        """Drop all rows, whose state is lost because `advance` has failed; return them."""
        rows, self._parts = self.rows, []
        self._clock.skip()
        return rows

    def skip_timing(self) -> None:
        """Do not time the current step: it does not have the machine to itself."""
        self._clock.skip()

    def advance(self) -> Advanced:
        """Read what every row has emitted, and submit the next step of the rows that continue."""
        shape = self._shape = self._shapes.propose(self.rows).shape
        order, slow = self._order(), self._decoder.target.slow_calls
        stepped = [row for row in self.rows if not row.fresh]
        drafted = [part.state.drafts for part in self._parts]
        if order is Order.WAIT:
            results = self._read(self._parts, order)
            following, ended = self._after_reading(shape, results)
            self._submit_waiting(following, drafted)
        elif order is Order.BUILD_AHEAD:
            before, ahead = self._parts[0].state.cache.snapshot(), self._ahead(shape)
            self._skip_slow_calls(slow)  # the host was late to read
            results = self._read(self._parts, order)
            following, ended = self._after_reading(shape, results, (before, ahead))
            del before, ahead  # MLX would copy buffers that have a second reference
            self._submit_waiting(following, drafted)
        else:
            current = self._parts
            self._submit(self._ahead(shape))
            self._skip_slow_calls(slow)
            results = self._read(current, order)
            ended = self._ended_after_submitting()
        self._skip_slow_calls(slow)  # the next step starts late, and a new graph is slow at first
        learned = [row for row in stepped if row in results]
        self._shapes.learn(learned, [results[row] for row in learned])
        return Advanced(results, ended)

    def _order(self) -> Order:
        """Choose the order of the next step: the host waits as little as the step allows.

        The unread results change the step where rows join or leave, and where a constraint's masks
        depend on what was accepted. Nor is it built where only copies are verified now: after them
        the text goes on repeating itself, and the next copies are found only in what is read.

        A plain step that no result can change is submitted before they are read, as in mlx-lm's
        loop: no drafter keeps the device busy while the host submits, which on a GPU can take as
        long as a small model's call. If a row then ends unexpectedly, its part of the step is
        unused, not wrong.
        """
        if not self._decoder.target.builds_ahead or len(self._parts) != 1:
            return Order.WAIT
        ((rows, state, output, unread),) = self._parts
        if any(row.done or row.constraint is not None for row in rows):
            return Order.WAIT
        if not state.drafts.plain:
            return Order.BUILD_AHEAD
        if all(made.from_host for made in output.rows):
            return Order.WAIT
        certain = unread <= 1 and not any(row.ends_next() for row in rows)
        if certain and self._stays_plain(rows):
            return Order.SUBMIT_AHEAD
        return Order.BUILD_AHEAD

    def _stays_plain(self, rows: abc.Sequence[Sequence]) -> bool:
        """Whether a plain tree of these rows can be submitted before reading.

        Not where the tokens that are still unread may complete an n-gram whose copy may pay.
        """
        if not self._decoder.target.submits_ahead or self._decoder.remembers:
            return False
        constrained = any(row.constraint is not None for row in rows)
        return not constrained and not self._shapes.may_revise(rows)

    def _ahead(self, shape: BeamShape) -> _Next:
        """Build the next step before the last results are read."""
        ((rows, state, _, unread),) = self._parts
        verified = state.drafts.tree
        return _Next(rows, verified, *self._decoder.step(state, _committed(rows) + unread, shape))

    def _after_reading(
        self,
        shape: BeamShape,
        results: Mapping[Sequence, StepResult],
        built: tuple[SequenceSnapshot, _Next] | None = None,
    ) -> tuple[_Next | None, list[tuple[Sequence, SequenceCache]]]:
        """Return the next step, None if no row continues, and the rows that have ended.

        `built` is the one that was built ahead, and the cache before it. It is dropped where the
        results change it: a row ended, or copies of the text were found.
        """
        plans = self._plan_copies()
        if built is not None:
            before, ahead = built
            if not plans and not any(row.done for row in self.rows):
                return ahead, []
            self._parts[0].state.cache.restore(before)
            del before, ahead, built
        ended = _caches_of_ended(self._parts, self._decoder.drafter)
        return self._build(shape, plans, results), ended

    def _ended_after_submitting(self) -> list[tuple[Sequence, SequenceCache]]:
        """Return the rows that have ended, although the step that was submitted holds them."""
        ended = _caches_of_ended(self._parts, self._decoder.drafter)
        for row, _ in ended:
            row.left = True
        if ended:
            self.skip_timing()  # of a step with a row that is of no use
        if not self.rows:
            self._parts = []  # nobody reads the step that was submitted
        return ended

    def _skip_slow_calls(self, before: int) -> None:
        """Do not time the current step if calls were slow: the target counted `before` until it."""
        if self._decoder.target.slow_calls > before:
            self.skip_timing()

    def _build(
        self,
        shape: BeamShape,
        plans: Mapping[Sequence, Proposal],
        results: Mapping[Sequence, StepResult],
    ) -> _Next | None:
        """Build the next step of the rows that continue, after reading; None if none continues."""
        rows, states = self._continuing(plans, results)
        if not rows:
            return None
        if all(row in plans and not plans[row].draft_after for row in rows):
            shape = PLAIN
        state = join_states(states)
        constraints = [row.constraint for row in rows]
        following = self._decoder.step(state, _committed(rows), shape, constraints)
        return _Next(rows, state.drafts.tree, *following)

    def _submit_waiting(self, following: _Next | None, drafted: abc.Sequence[Drafts]) -> None:
        """Submit the next step after reading, or none; `drafted` as in `_submit`.

        A plain step that could have been submitted before is timed from now on, and without the
        drafting after it: in plain decoding there would be none, and the host would work meanwhile.
        """
        self._parts = []
        if following is None:
            return
        plain = following.verified.tokens.shape[1] == 1
        early = plain and self._stays_plain(following.rows)
        if early:
            self._clock.restart()
        self._submit(following, drafted, alone=early and not following.state.drafts.plain)

    def _submit(
        self, following: _Next, drafted: abc.Sequence[Drafts] = (), *, alone: bool = False
    ) -> None:
        """Submit the next step of all rows.

        drafted: the drafts made in the current step
        alone:   time its verification alone
        """
        rows, verified, state, output = following
        self._parts = [_Part(rows, state, output, verified.max_depth + 1)]
        submit_verification(state, output)
        if alone:
            mx.eval(output.report)
            self._clock.stop()
        submit_drafting(state, drafted if self._decoder.remembers else ())
        self._steps += 1
        if self._steps % _CLEAR_EVERY == 0:
            mx.clear_cache()

    def _read(self, parts: abc.Sequence[_Part], order: Order) -> dict[Sequence, StepResult]:
        """Read what every row has emitted, and pass it to the rows that are not done."""
        results, seconds = {}, None
        for part in parts:
            read = read_report(part.output)
            if part is parts[0]:  # the rows of the others have joined
                seconds = self._clock.read(order)
                if any(row.done for row in part.rows):
                    seconds = None  # it would be taken for a step of fewer rows
            for row, result in zip(part.rows, read, strict=True):
                if row.done:
                    continue
                results[row] = replace(result, seconds=None if row.fresh else seconds)
                row.done = row.finished(results[row])
                # The prompt's result commits no token: it emits the root of the first tree.
                row.committed += 0 if row.fresh else len(result.tokens)
                row.fresh = False
                if row.ngrams is not None:
                    row.ngrams.extend(result.tokens)
        return results

    def _plan_copies(self) -> dict[Sequence, Proposal]:
        """Plan the copies to verify next, for the rows that have any."""
        continuing = [
            (row, drafts)
            for part in self._parts
            for row, drafts in zip(part.rows, part.state.drafts.rows, strict=True)
            if not row.done
        ]
        if not continuing:
            return {}
        rows, drafts = zip(*continuing, strict=True)
        plans = self._shapes.revise(rows, drafts)
        return {row: plan for row, plan in zip(rows, plans, strict=True) if plan is not None}

    def _continuing(
        self, plans: Mapping[Sequence, Proposal], results: Mapping[Sequence, StepResult]
    ) -> tuple[list[Sequence], list[DecodeState]]:
        """Return the rows that are not done and their states, with the planned copies."""
        rows: list[Sequence] = []
        states, drafter = [], self._decoder.drafter
        for part in self._parts:
            kept = [b for b, row in enumerate(part.rows) if not row.done]
            if not kept:
                continue
            mine = [part.rows[b] for b in kept]
            slots = planned_capacity(_committed(mine), CAPACITY_STEP)  # a long text may have left
            state = take_states(part.state, kept, slots, drafter)
            if any(row in plans for row in mine):
                roots = [results[row].tokens[-1] for row in mine]
                copied = with_copies(state.drafts, [plans.get(row) for row in mine], roots)
                state = replace(state, drafts=copied)
            rows += mine
            states.append(state)
        if len(rows) < sum(len(part.rows) for part in self._parts) or len(states) > 1:
            self.skip_timing()
        if len(states) > 1 and drafter is not None:
            for state in states:
                state.cache.catch_up(drafter)
        return rows, states


def submit_verification(state: DecodeState, output: StepOutput) -> None:
    """Start computing what the host will read."""
    history = [past for past in state.history if past is not None]
    mx.async_eval(output.report, state.length, *history, *state.cache.target.buffers)


def submit_drafting(state: DecodeState, drafted: abc.Sequence[Drafts] = ()) -> None:
    """Start computing the drafts for the next step, after what the host will read.

    `drafted` are the previous step's drafts, from a drafter that remembers. Such a drafter writes
    its buffers in place only if its previous call has ended. The host waits for that while the
    target computes.
    """
    if drafted:
        mx.eval([drafts.tree.tokens for drafts in drafted])
    log_probs = [] if state.drafts.log_probs is None else [state.drafts.log_probs]
    mx.async_eval(*state.drafts.tree.arrays, *log_probs, *state.cache.of_drafter)


def _committed(rows: abc.Sequence[Sequence]) -> int:
    """Return the largest number of tokens that a row has in the cache."""
    return max(row.committed for row in rows)


def _caches_of_ended(
    parts: abc.Sequence[_Part], drafter: Drafter | None
) -> list[tuple[Sequence, SequenceCache]]:
    """Return the rows that are done, each with a cache for it alone.

    Copies are computed at once: until then they would hold the buffers of the whole batch.
    """
    ended = []
    for part in parts:
        for b, row in enumerate(part.rows):
            if row.done and not row.left:
                cache = part.state.cache
                if len(part.rows) > 1:
                    cache = cache.take([b], round_up(row.committed, SPARE_STEP), drafter)
                    mx.async_eval(*cache.target.buffers, *cache.of_drafter)
                ended.append((row, cache))
    return ended
