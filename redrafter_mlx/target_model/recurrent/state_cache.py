"""One layer's recurrent state, with the interface that mlx-lm's mixers use."""

from __future__ import annotations

from collections.abc import Sequence

import mlx.core as mx

from redrafter_mlx.target_model.cache.plans import LayerPlan, TreePlan
from redrafter_mlx.target_model.recurrent.interface import AcceptedPath, Recurrence, Tape, TreeNodes

Recurrences = tuple[Recurrence | None, ...]
"""By index of a layer's states, what computes it; None if that is not known yet."""

States = tuple[tuple[mx.array, ...], ...]
"""By layer with a recurrent state, all its states."""


class StateCache:
    """One layer's states, with the members that a mixer uses of mlx-lm's `ArraysCache`.

    In prompts and calls on single tokens, the mixer computes the next states itself, as always. In
    calls on trees, the recurrences record their tapes here, and the next call commits a path.

    states: windows of convolutions and states of recurrences; None before the first call
    tapes:  of the last tree, by index of the state; None after another call
    recurrences: by index of the state, in the order in which the mixer calls them
    """

    lengths = None  # no row is padded

    def __init__(self, recurrences: Recurrences) -> None:
        self.plan: LayerPlan | None = None
        self.offset: int | mx.array = 0  # which no mixer reads
        self.recurrences = [*recurrences]
        self.states: list[mx.array | None] = [None] * len(recurrences)
        self.tapes: list[Tape | None] = [None] * len(recurrences)
        self._accepted: AcceptedPath | None = None  # which this call is to commit first
        self._next = 0  # index of the state whose recurrence records next

    def __getitem__(self, index: int) -> mx.array | None:
        """Return a state; IndexError after the last one ends unpacking."""
        if self._accepted is not None:
            self.commit(self._accepted)
        return self.states[index]

    def __setitem__(self, index: int, state: mx.array | None) -> None:
        """Set a state, unless a tree was read; a pipeline sets one that is there in either case."""
        if self.nodes is None or self.states[index] is None:
            self.states[index] = state

    def make_mask(self, n: int) -> None:
        """Return no mask: all positions of a call are read."""

    def advance(self, n: int) -> None:
        """Positions are not counted."""

    @property
    def nodes(self) -> TreeNodes | None:
        """The tree of this call; None if the mixer computes the next states itself."""
        return self.plan.nodes if isinstance(self.plan, TreePlan) else None

    def record(self, recurrence: Recurrence, tape: Tape) -> None:
        """Keep the tape of the next state's recurrence."""
        self.recurrences[self._next] = recurrence
        self.tapes[self._next] = tape
        self._next += 1

    def begin(self, plan: LayerPlan) -> None:
        """Begin a call, whose plan is set."""
        self._next = 0
        self._accepted = plan.accepted if isinstance(plan, TreePlan) else None

    def commit(self, accepted: AcceptedPath) -> None:
        """Replace the states by those after the accepted path, and drop the tapes."""
        for i, (recurrence, tape) in enumerate(zip(self.recurrences, self.tapes, strict=True)):
            state = self.states[i]
            if recurrence is not None and tape is not None and state is not None:
                self.states[i] = recurrence.commit(state, tape, accepted)
        self.tapes, self._accepted = [None] * len(self.tapes), None

    @property
    def buffers(self) -> tuple[object, ...]:
        return (*self.states, *self.tapes)

    @buffers.setter
    def buffers(self, given: Sequence[object]) -> None:
        n = len(self.states)
        self.states, self.tapes = [*given[:n]], [*given[n:]]  # type: ignore[list-item]

    @property
    def arrays(self) -> list[mx.array]:
        """All arrays that it holds."""
        held = [a for a in self.states if a is not None]
        return held + [a for tape in self.tapes if tape is not None for a in tape]

    @property
    def used(self) -> bool:
        """Whether calls have used it."""
        return any(a is not None for a in (*self.states, *self.tapes))

    def after(self, array: mx.array) -> None:
        """Make the buffers depend on the array."""
        self.states = [None if a is None else mx.depends(a, array) for a in self.states]

    @property
    def state(self) -> tuple[mx.array, ...]:
        """All states."""
        return tuple(a for a in self.states if a is not None)

    @state.setter
    def state(self, state: tuple[mx.array, ...]) -> None:
        self.states = [*state]

    def take(self, index: mx.array, slots: int | None) -> tuple[object, ...]:
        """Return the buffers of some batch rows of a flushed cache."""
        del slots
        return (*(None if a is None else a[index] for a in self.states), *self.tapes)

    def shared(self, slots: int) -> tuple[object, ...]:
        """Return the buffers; they are valid only for the whole text."""
        del slots
        return self.buffers

    def joined(self, others: Sequence[StateCache]) -> tuple[object, ...]:
        """Return the buffers of several flushed caches' batch rows."""
        parts = zip(*(cache.states for cache in (self, *others)), strict=True)
        states = [mx.concatenate([a for a in part if a is not None]) for part in parts]
        return (*states, *self.tapes)

    def trim(self, slots: int) -> None:
        """Compute the states."""
        del slots
        self.states = [None if a is None else mx.contiguous(a) for a in self.states]

    def trimmed_bytes(self, slots: int) -> int:
        """Return the bytes that `trim` leaves."""
        del slots
        return sum(a.nbytes for a in self.states if a is not None)
