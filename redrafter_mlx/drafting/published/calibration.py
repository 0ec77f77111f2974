"""Calibrates a published drafter on first use, because errors in its files raise no error.

Layers off by one, another rotary base, a norm in the wrong place: these only lower the acceptance
rate. So on first use, the drafter drafts along a few built-in answers, as do the other
readings of its files that its form declares. The best reading is used, and stored for next time.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TypeAlias, TypeVar, cast

import mlx.core as mx
from mlx_lm.tokenizer_utils import TokenizerWrapper

from redrafter_mlx.config import BeamShape
from redrafter_mlx.drafting.interface import Drafter, Seen
from redrafter_mlx.runtime.files.atomic_write import write_private_text
from redrafter_mlx.runtime.files.paths import cache_dir
from redrafter_mlx.target_model.model import Target
from redrafter_mlx.weights.files.tensors import StoredTensors
from redrafter_mlx.weights.text.chat import encode_text, render_chat

AS_STORED = "as its files say"

_MIN_GAIN = 0.05
"""How much higher the mean of its `Acceptance` another reading must have, to exclude chance."""

_LOW_ACCEPTANCE = 0.3
"""Acceptance rate of first drafts below which the user gets a note. EAGLE-3 heads guess 60 to 80%
of the next tokens; wrong layers gave 1 to 10% (vLLM issues 43671 and 50170)."""

ANSWERS = (
    (
        "What is a lighthouse for?",
        "A lighthouse is a tower with a bright light at the top. It helps sailors find their way "
        "at night and in bad weather. The light shows where the coast is, and warns ships of rocks "
        "and shallow water. Each lighthouse has its own pattern of flashes, so that a sailor can "
        "tell which one it is.",
    ),
    (
        "Write a Python function that adds up the even numbers in a list.",
        "Here is a function that adds up the even numbers in a list:\n\n```python\n"
        "def sum_even(numbers):\n    total = 0\n    for number in numbers:\n"
        "        if number % 2 == 0:\n            total += number\n    return total\n```\n\n"
        "It goes through the list, checks whether each number is even, and adds it to the total.",
    ),
)
"""Questions and plain answers; half of the tokens of each pair are read before the first guess."""

_D = TypeVar("_D", bound=Drafter)

Acceptance: TypeAlias = "tuple[float, float]"
"""Shares of positions whose first draft is right, and whose first two are."""


def calibrated(
    drafter: _D, target: Target, tokenizer: TokenizerWrapper, files: StoredTensors, key: str
) -> _D:
    """Return the drafter, or the reading of its files with a clearly higher acceptance rate.

    key: identifies what the results depend on besides weights: the target, and config.json
    """
    readings = {AS_STORED: drafter, **cast("Mapping[str, _D]", drafter.readings())}
    if len(readings) == 1:
        return drafter
    path = _path(files, key)
    accepted = _stored(path, readings)
    if accepted is None:
        texts = [encoded(tokenizer, *pair, target.vocab_size) for pair in ANSWERS]
        with target.lock:
            accepted = {name: acceptance(d, target, texts) for name, d in readings.items()}
        with contextlib.suppress(OSError):  # a cache that cannot be written is no error
            write_private_text(path, json.dumps(accepted))
    chosen = readings[best_reading(accepted)]
    chosen.note = _note(accepted, drafter.name)
    return chosen


def best_reading(accepted: Mapping[str, Acceptance]) -> str:
    """Return the reading to draft with: another one must be clearly better than the files' own."""
    best = max(accepted, key=lambda reading: sum(accepted[reading]))
    gain = sum(accepted[best]) - sum(accepted[AS_STORED])
    return best if gain / 2 >= _MIN_GAIN else AS_STORED


def acceptance(drafter: Drafter, target: Target, texts: list[list[int]]) -> Acceptance:
    """Return the acceptance at the positions in the second half of each text.

    A draft is right if it is the target's likeliest token. The target's choice after the first
    draft is known only where the text goes on with it; elsewhere a second draft is wrong.
    """
    reading, caches = target.reading(drafter.features.layers), drafter.features.caches
    right, shape = [], BeamShape(1, 3)
    for text in texts:
        tokens = mx.array([text])
        cache = reading.new_cache()
        hidden = reading.append(tokens, cache, 0)
        choices = mx.argmax(reading.logits(hidden), axis=-1)
        features = hidden if drafter.features.any else None
        half = len(text) // 2
        memory = drafter.extend(drafter.empty(1), _seen(tokens, features, 0, half))
        for at in range(half, len(text) - 2):
            seen = _seen(tokens, features, at, 1)
            if caches:
                read = cache.committed(caches, seen.root_position, seen.bound)
                seen = replace(seen, committed=read)
            beams, memory = drafter.draft(memory, seen, shape)
            first, second = beams.tokens[0, 0, 1:] == choices[0, at + 1 : at + 3]
            followed = choices[0, at + 1] == tokens[0, at + 2]
            right.append(mx.stack([first, first & second & followed]))
    shares = cast("list[float]", mx.mean(mx.stack(right), axis=0).tolist())
    return shares[0], shares[1]


def _note(accepted: Mapping[str, Acceptance], name: str) -> str | None:
    """Return one line for the user; None if there is nothing to report."""
    reading = best_reading(accepted)
    (best, both), (stored, stored_both) = accepted[reading], accepted[AS_STORED]
    if best < _LOW_ACCEPTANCE:
        return (
            f"{name} guesses {best:.0%} of the next tokens where 60% is usual: it was made for "
            f"another model, or its files do not say how it reads this one"
        )
    if reading == AS_STORED:
        return None
    return (
        f"{name} is read with {reading}: it then guesses {best:.0%} of the next tokens and "
        f"{both:.0%} of the next two, {stored:.0%} and {stored_both:.0%} {AS_STORED}"
    )


def _seen(tokens: mx.array, features: mx.array | None, at: int, count: int) -> Seen:
    """Return `count` positions of one text from `at` on."""
    return Seen(
        tokens[:, at : at + count + 1].astype(mx.int32),
        None if features is None else features[:, at : at + count],
        mx.array([at]),
        mx.array([count]),
        at + count,
        at if at == 0 else None,
    )


def encoded(tokenizer: TokenizerWrapper, question: str, answer: str, vocab_size: int) -> list[int]:
    if tokenizer.has_chat_template:
        before = render_chat(tokenizer, [{"role": "user", "content": question}])
        ids = before + tokenizer.encode(answer, add_special_tokens=False)
    else:
        ids = encode_text(tokenizer, f"{question}\n\n{answer}")
    return [min(i, vocab_size - 1) for i in ids]


def _path(files: StoredTensors, key: str) -> Path:
    """Return the path of a calibration, for this target and the current state of the files."""
    stats = [(str(f.resolve()), f.stat().st_size, f.stat().st_mtime_ns) for f in files.files]
    digest = hashlib.sha256(json.dumps([key, stats]).encode()).hexdigest()
    return cache_dir() / "calibration" / f"{digest[:32]}.json"


def _stored(path: Path, readings: Mapping[str, Drafter]) -> Mapping[str, Acceptance] | None:
    """Return the stored acceptance rates; None if there are none, or those of other readings."""
    try:
        stored = json.loads(path.read_text(encoding="utf-8"))
        accepted = {str(name): (float(one), float(two)) for name, (one, two) in stored.items()}
        shares = [share for both in accepted.values() for share in both]
    except Exception:  # a damaged file may hold anything
        return None
    if not all(0 <= share <= 1 for share in shares):
        return None
    return accepted if accepted.keys() == readings.keys() else None
