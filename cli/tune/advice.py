"""The last part of `tune`: what each kind of drafter would gain here, and its command."""

from __future__ import annotations

import shlex
from dataclasses import dataclass

from redrafter_mlx.cli.expected_speed import LOOKUP, NOTHING, TRAINED, expected_speed, published
from redrafter_mlx.engine.engine import Redrafter
from redrafter_mlx.target_model.fingerprint import nbytes_of
from redrafter_mlx.tuning.cost import LENGTHS, CostModel
from redrafter_mlx.weights.fit.model_size import bits_of_drafter, quantised_bits
from redrafter_mlx.weights.fit.needs import stored_model
from redrafter_mlx.weights.known_drafters import known_drafters


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
    raw: whether the commands are for plain text, without chat template
    """
    name = _name(loaded)
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
    """Format the table of ways."""
    lines = [
        "expected speedups, from the times above and the usual acceptance of each kind of drafter",
        f"{'':<20} {'tokens/step':>11} {'tok/s':>8} {'speedup':>8}",
    ]
    for way in ways:
        speed = f"{way.tokens_per_second:>8.1f} {way.speedup:>7.2f}x"
        lines.append(f"{way.way:<20} {way.tokens_per_step:>11.2f} {speed}  {way.command}")
    return "\n".join(lines)


def _name(loaded: Redrafter) -> str:
    return loaded.source.name if loaded.source else loaded.target.model_type
