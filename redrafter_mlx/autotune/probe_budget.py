"""Probe budget: the time that may be spent on trying shapes that seem to promise more.

A small share of all time goes into it. It is shared by all batches of a model, so that many short
answers pay no more for probes than one long answer does. The gain of a probe is paid back, so that
a successful probe is followed by another at once.
"""

from __future__ import annotations

import math

_SHARE = 0.015
"""Share of the time that goes into the budget; with the other costs of probes, such as a change for
the worse, it is at most 2%."""

_MOST_PROBES = 3
"""Maximum number of probes that the budget can hold: one failed probe does not end a series."""


class ProbeBudget:
    """Seconds that probes may cost; at first as many as it can hold."""

    def __init__(self) -> None:
        self._seconds = math.inf

    def pays(self, price: float, step: float) -> bool:
        """Pay a probe that costs `price` seconds more than the best step's `step` seconds.

        Returns False if there is not enough; the step's share is added in any case.
        """
        self._seconds = min(self._seconds + _SHARE * step, _MOST_PROBES * max(price, 0.0))
        if self._seconds < price:
            return False
        self._seconds -= price
        return True

    def add(self, seconds: float) -> None:
        """Add what a probe gained, which is negative for a loss."""
        self._seconds += seconds

    def start_empty(self) -> None:
        """Take back the initial budget if nothing was paid from it: a probe hardly pays."""
        if self._seconds == math.inf:
            self._seconds = 0.0
