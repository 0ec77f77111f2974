"""Writes tests/slow.txt, the tests that `make check` leaves out, from a run's measured times.

Usage: python -m pytest -q -n 2 --durations=0 --durations-min=0.05 > times.txt
       python tests/support/by_hand/slow_tests.py times.txt

A test with all its cases and what they set up counts as one. The fastest stay, as many as take
SECONDS together; most of them show in no line of a run, as they take no time.
"""

from __future__ import annotations

import re
import sys
from bisect import bisect_right
from collections import Counter
from itertools import accumulate
from pathlib import Path

import support_path  # noqa: F401
from places import ROOT

SECONDS = 40.0

_LINE = re.compile(r"([\d.]+)s (?:call|setup|teardown) +(tests/\S+?::[^\[\s]+)")


def main() -> None:
    seconds = Counter[str]()
    for line in Path(sys.argv[1]).read_text(encoding="utf-8").splitlines():
        if match := _LINE.match(line):
            seconds[match[2]] += float(match[1])
    slowest_last = seconds.most_common()[::-1]
    together = [*accumulate(taken for _, taken in slowest_last)]
    slow = sorted(name for name, _ in slowest_last[bisect_right(together, SECONDS) :])
    (ROOT / "tests" / "slow.txt").write_text("".join(f"{name}\n" for name in slow), "utf-8")
    print(f"{len(slow)} of {len(seconds)} tests are slow; all take {seconds.total():.0f} s")


if __name__ == "__main__":
    main()
