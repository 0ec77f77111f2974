"""Statistics of copies of the text: how far they are accepted, and what their steps cost."""

from __future__ import annotations

import math
import statistics
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

LONG_MATCH = 8
"""Number of matching tokens from which a match is long. Long matches hold where short ones fail, so
each kind is trusted by itself, and only a long one is copied without a limit."""

_DECAY = 0.94
"""Share of older evidence that is left after a copy."""

_PRIOR = 1.0
"""Weight, in copies, of the assumption that copies are accepted as far as expected."""

_RENEWED = 1 / 3
"""Share of the lost trust in copies that the next text begins with again: one more is tried."""

_COST = 1.3
"""Assumed time of a step with copies, as a share of a drafted step with as many query rows: its
call is seldom compiled, and the host builds it while the device waits. Measured on two CPU cores;
then learned from steps."""

_LONG_COST, _LONG_NODES = 1.0, 9
"""The same for trees with as many nodes or more: the host's part of so long a call is small."""

_ENOUGH_COSTS, _MOST_COSTS = 3, 5
"""Minimum and maximum number of a size's last steps, whose median is its cost."""


@dataclass
class _Trust:
    """Expected and accepted copies, the last ones weighing most."""

    expected: float = _PRIOR
    accepted: float = _PRIOR

    @property
    def share(self) -> float:
        return min(self.accepted / self.expected, 1.0)


class CopyStatistics:
    """Statistics of the copies in all answers."""

    def __init__(self) -> None:
        self._trust = {"short": _Trust(), "long": _Trust()}
        # Of the last steps, and of those with trees of about one size; the median is used.
        self._costs = deque([_COST] * 3, maxlen=9)
        self._by_size: dict[int, deque[float]] = {}

    def learn(self, matched: int, expected: float, accepted: float) -> None:
        """Record a copy: the expected and the actual share of its drafts that were accepted.

        Copies count alike, however long they are: drafts after a wrong one tell nothing more.
        """
        trust = self._trust[_kind(matched)]
        trust.expected = _DECAY * trust.expected + expected
        trust.accepted = _DECAY * trust.accepted + accepted

    def learn_cost(self, nodes: int, cost: float) -> None:
        """Record the time of a step with copies as a share of a drafted step's.

        NaN is ignored, and so is what cannot be: a step that took less than its drafting.
        """
        if cost > 0:
            self._costs.append(cost)
            self._by_size.setdefault(_size(nodes), deque(maxlen=_MOST_COSTS)).append(cost)

    def trust(self, matched: int) -> float:
        """How far copies of such a match were accepted lately, as a share of what was expected.

        At most 1.
        """
        return self._trust[_kind(matched)].share

    def cost(self, nodes: int) -> float:
        """Time of a step with copies, as a share of a drafted step with as many query rows.

        A profile may be more wrong about long calls than about short ones, so each size has its
        own. Until it is known, that of all counts, but a long copy is worth a try.
        """
        if self.knows_cost(nodes):
            return statistics.median(self._by_size[_size(nodes)])
        usual = statistics.median(self._costs)
        return usual if nodes < _LONG_NODES else min(usual, _LONG_COST)

    def knows_cost(self, nodes: int) -> bool:
        """Whether enough steps with copies and about as many query rows were timed."""
        return len(self._by_size.get(_size(nodes), ())) >= _ENOUGH_COSTS

    def begin_answer(self) -> None:
        """Move part of the way back to what is assumed, for another text.

        Otherwise no evidence could bring back copies that are no longer tried.
        """
        for kind, trust in self._trust.items():
            renewed = trust.share + _RENEWED * (1 - trust.share)
            self._trust[kind] = _Trust(_PRIOR, _PRIOR * renewed)
        self._costs.append(_COST)
        for costs in self._by_size.values():
            if costs and statistics.median(costs) > _COST:
                costs.popleft()

    def to_record(self) -> dict[str, list[float]]:
        """Return a record for a file; `from_record` is the inverse."""
        trust = {kind: [one.expected, one.accepted] for kind, one in self._trust.items()}
        by_size = {str(size): [*costs] for size, costs in self._by_size.items() if costs}
        return {**trust, "costs": [*self._costs], **by_size}

    @classmethod
    def from_record(cls, record: Mapping[str, Sequence[float]]) -> CopyStatistics:
        """Read a record; raises ValueError, TypeError or KeyError for what cannot be statistics."""
        known, left = cls(), dict(record)
        if not all(0 < number < math.inf for numbers in left.values() for number in numbers):
            raise ValueError(f"{record} cannot have been measured")
        known._trust = {kind: _Trust(*left.pop(kind)) for kind in known._trust}
        known._costs = deque(left.pop("costs") or known._costs, known._costs.maxlen)
        known._by_size = {int(size): deque(costs, _MOST_COSTS) for size, costs in left.items()}
        return known


def _kind(matched: int) -> str:
    return "long" if matched >= LONG_MATCH else "short"


def _size(nodes: int) -> int:
    """Return the size of a tree, the same for all with as many nodes up to the next power of 2."""
    return (nodes - 1).bit_length()
