"""Probe budget: the time that may be spent on trying shapes that seem to promise more.

A share of all time goes into it. The gain of a probe is paid back, so that a successful probe is
followed by another at once.
"""

from __future__ import annotations

import math

_MAX_PROBES = 3
"""Maximum number of probes that the budget can hold: one failed probe does not end a series."""


class ProbeBudget:
    """Seconds that probes may cost; at first as many as it can hold."""

    def __init__(self, seconds: float = math.inf) -> None:
        self.seconds = seconds

    def pays(self, price: float, income: float) -> bool:
        """Pay a probe that costs `price` seconds more than the best step.

        Returns False if there is not enough; `income`, the step's share, is added in any case.
        """
        self.seconds = min(self.seconds + income, _MAX_PROBES * max(price, 0.0))
        if self.seconds < price:
            return False
        self.seconds -= price
        return True

    def start_empty(self) -> None:
        """Take back the initial budget if nothing was paid from it: a probe hardly pays."""
        if self.seconds == math.inf:
            self.seconds = 0.0

    def add(self, seconds: float) -> None:
        """Add what a probe gained, which is negative for a loss."""
        self.seconds += seconds
