"""Summaries of a server under load, as its users see it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain

import numpy as np

from redrafter_mlx.bench.measure.load_client import Answered
from redrafter_mlx.bench.measure.questions import WHOLE
from redrafter_mlx.errors import ServerError


@dataclass(frozen=True)
class ServingRow:
    """One server under one load."""

    url: str
    users: int
    answers: int
    tokens: int
    total_tps: float  # tokens per second of all users together
    user_tps: float  # tokens per second of one answer after its first token, the median
    first_token: float  # seconds, the median
    slowest_first_token: float  # the 95th percentile
    speedup: float  # total_tps over that of the first server
    same_text: float  # share of answers whose text equals the first server's
    category: str = WHOLE  # the questions' category, WHOLE for all of them


Rounds = Sequence[Sequence[Answered]]
"""A server's answers, by round of one load."""


def category_rows(
    categories: Sequence[str], by_url: Sequence[tuple[str, Rounds]]
) -> list[ServingRow]:
    """Return rows per category and server of one user's load; none if there is one category only.

    With more users, answers of several categories share the machine. `categories` are the answers'.
    """
    rows: list[ServingRow] = []
    names = dict.fromkeys(categories)
    for name in names if len(names) > 1 else ():
        chosen = [(url, _only(name, categories, rounds)) for url, rounds in by_url]
        rows += serving_rows(1, chosen, name)
    return rows


def _only(name: str, categories: Sequence[str], rounds: Rounds) -> Rounds:
    """Return each answer of a category as a round of its own, so that no other's time counts."""
    answers = zip(categories, chain(*rounds), strict=True)
    return [[answer] for category, answer in answers if category == name]


def serving_rows(
    users: int, by_url: Sequence[tuple[str, Rounds]], category: str = WHOLE
) -> list[ServingRow]:
    """Return a row per server under one load; all have answered the same questions.

    Raises ServerError if the first server counted no tokens.
    """
    baseline, of_first = by_url[0]
    first = [*chain(*of_first)]
    if not any(answer.tokens for answer in first):
        raise ServerError(f"{baseline} counted no tokens in any answer, so nothing compares to it")
    rows = []
    for url, rounds in by_url:
        answers = [*chain(*rounds)]
        waits = [a.first_token - a.began for a in answers]
        paces = [_pace(answer) for answer in answers]
        same = sum(a.text == b.text for a, b in zip(answers, first, strict=True))
        rows.append(
            ServingRow(
                url=url,
                users=users,
                answers=len(answers),
                tokens=sum(a.tokens for a in answers),
                total_tps=total_tps(rounds),
                user_tps=float(np.median(paces)),
                first_token=float(np.median(waits)),
                slowest_first_token=float(np.percentile(waits, 95)),
                speedup=total_tps(rounds) / total_tps(of_first),
                same_text=same / len(answers),
                category=category,
            )
        )
    return rows


def _pace(answer: Answered) -> float:
    """Return tokens per second after the first token; of the whole if all came at once."""
    if answer.ended > answer.first_token and answer.tokens > 1:
        return (answer.tokens - 1) / (answer.ended - answer.first_token)
    return answer.tokens / max(answer.ended - answer.began, 1e-9)


def total_tps(rounds: Rounds) -> float:
    """Return tokens per second; a round takes from its first question to its last answer's end."""
    took = sum(max(a.ended for a in each) - min(a.began for a in each) for each in rounds)
    return sum(a.tokens for a in chain(*rounds)) / max(took, 1e-9)
