"""Drafters of one's own may draft anything: the text stays the target's."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import mlx.core as mx
import pytest
from tiny import byte_model, byte_tokenizer

from redrafter_mlx.bench.measure.packing import pack_final, pack_separately
from redrafter_mlx.config import BeamShape
from redrafter_mlx.drafting.combined import Combined
from redrafter_mlx.drafting.interface import Drafter, Memory, Seen
from redrafter_mlx.engine.engine import Redrafter
from redrafter_mlx.engine.request import Request
from redrafter_mlx.speculation.beams import Beams
from redrafter_mlx.speculation.tree import pack_beam

VOCAB = 258
PROMPT = [3, 5, 7, 3, 5, 7, 3]
SHAPE = {"beam_width": 4, "beam_length": 5}
OPTIONS: tuple[dict[str, object], ...] = (
    {"max_nodes": 4},
    {"temperature": 0.9, "seed": 3},
    {"max_nodes": 6, "repetition_penalty": 1.3, "frequency_penalty": 0.4},
    {"max_nodes": 3, "temperature": 0.9, "seed": 5, "presence_penalty": 0.5},
    {"temperature": 0.9, "seed": 3, "accept": "rejection"},
    {"pack": pack_final, "max_nodes": 7},
    {"pack": pack_separately},
)

Spoil = Callable[[mx.array, mx.array, mx.array], Beams]


class Wrong(Drafter):
    """Drafts the text to come on beam 0, other tokens beside it, then spoils what it drafted.

    The beams share prefixes of different length, so that there are branches at every depth.
    """

    def __init__(self) -> None:
        self.text: list[int] = []
        self.spoil: Spoil = Beams

    def draft(self, memory: Memory, seen: Seen, shape: BeamShape) -> tuple[Beams, Memory]:
        B, W, L = seen.root.shape[0], shape.width, shape.length
        known, depth, beam = mx.array([*self.text, *[0] * L]), mx.arange(L), mx.arange(W)[:, None]
        at = mx.minimum(seen.root_position[:, None] + depth, len(self.text))
        true = known[at][:, None]  # [B, 1, L]
        tokens = mx.where((depth > beam) & (beam > 0), (true + beam + depth) % VOCAB, true)
        tokens = mx.where(depth == 0, seen.root[:, None, None], tokens).astype(mx.int32)
        scores = mx.broadcast_to(-depth * (1.0 + 0.1 * beam), (B, W, L)).astype(mx.float32)
        parents = mx.broadcast_to(beam, (B, W, L)).astype(mx.int32)
        return self.spoil(tokens, scores, parents), memory


def where(at: object, value: float, x: mx.array) -> mx.array:
    """Put `value`, of the array's type, at an index of the array."""
    changed = mx.array(x)
    changed[at] = value
    return changed


LAST, SECOND, ROOT = (..., 0, -1), (..., 1, slice(2, None)), (..., 0)

TOKENS: dict[str, Callable[[mx.array], mx.array]] = {
    "beyond the vocabulary": partial(where, LAST, VOCAB + 5),
    "all beyond the vocabulary": lambda t: t + VOCAB,
    "the largest number": partial(where, SECOND, 2**31 - 1),
    "negative": partial(where, SECOND, -1),
    "the smallest number": lambda t: where(LAST, -(2**31), t),
    "of 64 bits": lambda t: t.astype(mx.int64) + 2**32 * (mx.arange(5) > 2).astype(mx.int64),
    "without a sign": lambda t: where(SECOND, 4_000_000_000, t.astype(mx.uint32)),
    "of 8 bits": lambda t: t.astype(mx.int8),
    "another root": lambda t: where(ROOT, 9, t),
    "several roots": lambda t: t + (mx.arange(5) == 0) * mx.arange(4)[:, None],
    "a root beyond the vocabulary": partial(where, ROOT, 2**31 - 1),
    "all the same": lambda t: mx.broadcast_to(t[:, :1], t.shape),
    "zero": mx.zeros_like,
}
SCORES: dict[str, Callable[[mx.array], mx.array]] = {
    "of each token alone": lambda s: mx.where(mx.arange(5) % 2 == 0, -0.1, -3.0) + 0 * s,
    "rising": lambda s: -10 - s,
    "NaN": partial(where, (...,), float("nan")),
    "NaN at the root": partial(where, ROOT, float("nan")),
    "NaN at one": partial(where, (..., 0, 2), float("nan")),
    "infinite": partial(where, SECOND, float("inf")),
    "positive": lambda s: 5 - s,
    "nothing": partial(where, (...,), -float("inf")),
    "no root": partial(where, ROOT, -float("inf")),
    "a child of nothing": partial(where, (..., slice(0, 2), 2), -float("inf")),
    "an unlikely root": partial(where, ROOT, -50.0),
    "equal": mx.zeros_like,
    "in half precision": lambda s: s.astype(mx.float16),
    "better for the later of equal prefixes": lambda s: s + mx.arange(4)[:, None] * 0.5,
}
PARENTS: dict[str, Callable[[mx.array], mx.array]] = {
    "beyond the beams": lambda p: p + 4,
    "far beyond the beams": partial(where, SECOND, 2**30),
    "negative": partial(where, SECOND, -3),
    "other beams": lambda p: 3 - p,
    "of 64 bits": lambda p: where(SECOND, 2**40, p.astype(mx.int64)),
    "the first": mx.zeros_like,
}
KINDS: dict[str, Spoil] = {
    **{f"tokens: {n}": lambda t, s, p, f=f: Beams(f(t), s, p) for n, f in TOKENS.items()},
    **{f"scores: {n}": lambda t, s, p, f=f: Beams(t, f(s), p) for n, f in SCORES.items()},
    **{f"parents: {n}": lambda t, s, p, f=f: Beams(t, s, f(p)) for n, f in PARENTS.items()},
    "candidates without parents": lambda t, s, _: Beams(t, s),
    "equal prefixes, called distinct": lambda t, s, p: Beams(t, s, p, distinct=True),
    "fewer beams": lambda t, s, p: Beams(t[:, :2], s[:, :2], p[:, :2]),
    "shorter beams": lambda t, s, p: Beams(t[..., :2], s[..., :2], p[..., :2]),
    "roots alone": lambda t, s, p: Beams(t[..., :1], s[..., :1], p[..., :1]),
    "everything": lambda t, s, p: Beams(t * 10**6, s * float("nan"), p * 10**6 - 7),
}


@pytest.fixture(scope="module")
def wrong() -> Wrong:
    return Wrong()


@pytest.fixture(scope="module")
def engine(wrong: Wrong) -> Redrafter:
    return Redrafter(byte_model(seed=1), byte_tokenizer(), wrong)


@pytest.fixture(scope="module")
def plain(engine: Redrafter) -> list[list[int]]:
    """The tokens of plain decoding with each of `OPTIONS`."""
    return [answer(engine, draft=False, **options) for options in OPTIONS]


def answer(engine: Redrafter, prompt: list[int] = PROMPT, **options: object) -> list[int]:
    pack = options.pop("pack", pack_beam)
    chosen = engine.chosen_options(None, {"max_tokens": 20, "cache_prompt": False, **options})
    return [r.token for r in engine.respond(Request(tuple(prompt), chosen, pack=pack))]


@pytest.mark.parametrize("kind", KINDS)
def test_the_text_stays_the_targets_for_any_drafts(
    kind: str, wrong: Wrong, engine: Redrafter, plain: list[list[int]]
) -> None:
    wrong.spoil = KINDS[kind]
    for options, tokens in zip(OPTIONS, plain, strict=True):
        wrong.text = PROMPT + tokens
        assert answer(engine, **SHAPE, **options) == tokens, options


def test_right_drafts_are_accepted_whole(
    wrong: Wrong, engine: Redrafter, plain: list[list[int]]
) -> None:
    wrong.spoil, wrong.text = Beams, PROMPT + plain[0]
    found = engine.generate(PROMPT, raw=True, max_tokens=20, cache_prompt=False, **SHAPE)
    assert found.tokens_per_step > 4


@pytest.mark.parametrize("kind", ["tokens: beyond the vocabulary", "parents: beyond the beams"])
def test_of_two_drafters_each_may_be_wrong(kind: str) -> None:
    one, other = Wrong(), Wrong()
    engine = Redrafter(byte_model(seed=1), byte_tokenizer(), Combined(one, other))
    tokens = answer(engine, draft=False)
    one.text = other.text = PROMPT + tokens
    other.spoil = KINDS[kind]
    assert answer(engine, max_nodes=5, **SHAPE) == tokens
    one.spoil = KINDS[kind]
    assert answer(engine, **SHAPE) == tokens
