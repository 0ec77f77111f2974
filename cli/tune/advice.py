"""The last part of `tune`: what each kind of drafter would gain here, and its command.

The speedup to expect follows from measured times and typical acceptance rates. A chain of drafts is
assumed. A tree brings more; once there is a drafter, its shape is chosen step by step.
"""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from dataclasses import dataclass

from redrafter_mlx.config import PLAIN
from redrafter_mlx.drafting.interface import LEVEL_COST
from redrafter_mlx.engine.engine import Redrafter
from redrafter_mlx.target_model.fingerprint import nbytes_of
from redrafter_mlx.tuning.cost import LENGTHS, CostModel
from redrafter_mlx.weights.fit.model_size import bits_of_drafter, quantised_bits
from redrafter_mlx.weights.fit.needs import stored_model
from redrafter_mlx.weights.known_drafters import known_drafters

_PUBLISHED = (0.68, 0.68)
"""Assumed for an EAGLE-3 head: 2.5 tokens/step for a chain of three drafts. Its paper
(arXiv 2503.01840) reports 4 to 6 for trees of 60 nodes."""


@dataclass(frozen=True)
class Kind:
    """A kind of drafter, with its usual acceptance rates in chats."""

    # by depth, the chance that a draft is accepted if those before it were; the last one holds for
    # all further depths
    chances: tuple[float, ...]
    level_cost: float  # cost of drafting one token, as a share of the target's one-row call
    share: float = 1.0  # share of the steps that draft at all


NOTHING = Kind((0.0,), level_cost=0.0)
"""Plain decoding."""

LOOKUP = Kind((0.62, 0.8), level_cost=0.0, share=0.25)
"""1.38 tokens/step: MT-Bench and questions that ask for quotations, docs/lab/benchmarks.md."""

TRAINED = Kind((0.52, 0.56), level_cost=LEVEL_COST)
"""1.98 tokens/step at width 1 and length 4: the drafter that ships, on our questions, README.md."""


def published(drafter_bytes: int, weight_bytes: int) -> Kind:
    """Return a published head that reads `drafter_bytes` per draft; the target `weight_bytes`."""
    return Kind(_PUBLISHED, level_cost=drafter_bytes / max(1, weight_bytes))


@dataclass(frozen=True)
class ExpectedSpeed:
    """Expected speed of a kind of drafter at its best length, 1 if plain decoding is faster."""

    length: int
    tokens_per_step: float
    tokens_per_second: float
    speedup: float


def expected_speed(
    kind: Kind, costs: CostModel, context: int, lengths: Sequence[int] = (1, *LENGTHS)
) -> ExpectedSpeed:
    """Return the length with the most tokens per second after `context` tokens of text."""
    plain = costs.step(PLAIN, context)

    def of_length(length: int) -> ExpectedSpeed:
        if length == 1:
            return ExpectedSpeed(1, 1.0, 1 / plain, 1.0)
        tokens, reached = 1.0, kind.share
        for depth in range(length - 1):
            reached *= kind.chances[min(depth, len(kind.chances) - 1)]
            tokens += reached
        drafting = (length - 1) * kind.level_cost * costs.verify(1, costs.short_context)
        drafted = costs.verify(length, context) + drafting
        seconds = kind.share * drafted + (1 - kind.share) * plain
        return ExpectedSpeed(length, tokens, tokens / seconds, tokens / seconds * plain)

    return max(map(of_length, lengths), key=lambda found: found.speedup)


@dataclass(frozen=True)
class Advice:
    """One way to decode, with figures for a chain of drafts; `command` starts it."""

    way: str
    tokens_per_step: float
    tokens_per_second: float
    speedup: float
    command: str


def ways_to_draft(
    loaded: Redrafter, costs: CostModel, context: int, given: str = "", *, raw: bool = False
) -> list[Advice]:
    """Return plain decoding, lookup, a published drafter if one is known, and one trained here.

    given: options that the target was loaded with, which the commands repeat
    raw:   whether the commands are for plain text, without chat template
    """
    name = loaded.source.name if loaded.source else loaded.target.model_type
    model = shlex.quote(name) + given
    chat = f"redrafter-mlx generate {model} TEXT --raw" if raw else f"redrafter-mlx chat {model}"
    kinds = [
        ("plain decoding", NOTHING, f"{chat} --drafter none"),
        ("lookup", LOOKUP, f"{chat} --drafter lookup"),
    ]
    known = next((one for one in known_drafters(name) if one.form == "EAGLE-3"), None)
    stored = None if loaded.source is None else stored_model(loaded.source.path)
    if known is not None and stored is not None:
        command = f"redrafter-mlx pull {known.name} && {chat} --drafter {known.name}"
        nbytes = known.in_memory or stored.size.drafter_bytes
        bits = bits_of_drafter(None, None if loaded.source is None else loaded.source.bits)
        if bits is not None:
            nbytes = round(nbytes * quantised_bits(bits) / 16)
        kind = published(nbytes, nbytes_of(loaded.model))
        kinds.append((f"{known.form}, published", kind, command))
    train = f"redrafter-mlx train {model} --hours 8" + (" --raw --data FILE" if raw else "")
    kinds.append(("trained here", TRAINED, train))
    found = []
    for way, kind, command in kinds:
        best = expected_speed(kind, costs, context, (1,) if kind is NOTHING else (1, *LENGTHS))
        found.append(
            Advice(way, best.tokens_per_step, best.tokens_per_second, best.speedup, command)
        )
    return found


def describe_advice(ways: list[Advice]) -> str:
    lines = [
        "expected speedups, from the times above and the usual acceptance of each kind of drafter",
        f"{'':<20} {'tokens/step':>11} {'tok/s':>8} {'speedup':>8}",
    ]
    for way in ways:
        speed = f"{way.tokens_per_second:>8.1f} {way.speedup:>7.2f}x"
        lines.append(f"{way.way:<20} {way.tokens_per_step:>11.2f} {speed}  {way.command}")
    return "\n".join(lines)
