"""What steps really take beside what the cost curves say of them.

Curves are measured in seconds, once; a machine that was busy then, or that is now, makes some
shapes dearer than others. Each step that was timed says by how much. A choice among shapes needs
no more than how they compare with plain decoding: what makes all of them slower changes nothing.
"""

from __future__ import annotations

import math

from redrafter_mlx.config import PLAIN, BeamShape

PLAIN_EVERY = 64
"""Steps between two that decode plainly, so that there is something to compare with."""

_KEPT = 0.95
"""What one more step of a shape leaves of the evidence on it."""

_DOUBT = 2.0
"""So many steps of a shape weigh as much as the curves."""

_ALIKE, _ROWS = 0.9, 3.0
"""What a step says of another shape with as many rows; how fast it fades with other numbers."""

_MOST = 1.5
"""Of the logarithm of a ratio: a step that took more than four times its time was held up."""


class SeenCosts:
    """The ratio of seconds taken to seconds expected, by shape; kept from answer to answer."""

    def __init__(self) -> None:
        self._steps: dict[BeamShape, float] = {}
        self._sums: dict[BeamShape, float] = {}
        self._since_plain = PLAIN_EVERY // 2

    @property
    def wants_plain(self) -> bool:
        """Whether the next step should decode plainly, to be compared with."""
        return self._since_plain >= PLAIN_EVERY

    def learn(self, shape: BeamShape, expected: float, taken: float) -> None:
        """Take note of a step; the first of each shape, which compiles, is passed over."""
        self._since_plain += 1
        if shape not in self._steps:
            self._steps[shape] = self._sums[shape] = 0.0
            return
        if shape == PLAIN:
            self._since_plain = 0
        if expected > 0 and taken > 0:
            ratio = min(max(math.log(taken / expected), -_MOST), _MOST)
            self._steps[shape] = _KEPT * self._steps[shape] + 1
            self._sums[shape] = _KEPT * self._sums[shape] + ratio

    def factor(self, shape: BeamShape) -> float:
        """How much dearer the shape is, beside plain decoding, than the curves say."""
        if shape == PLAIN or not self._steps.get(PLAIN):
            return 1.0
        usual = self._sums[PLAIN] / self._steps[PLAIN]
        steps = excess = 0.0
        for other, seen in self._steps.items():
            if other != PLAIN:
                weight = _alike(shape, other)
                steps += weight * seen
                excess += weight * (self._sums[other] - usual * seen)
        return math.exp(excess / (steps + _DOUBT))


def _alike(shape: BeamShape, other: BeamShape) -> float:
    if shape == other:
        return 1.0
    return _ALIKE * math.exp(-abs(shape.nodes - other.nodes) / _ROWS)
