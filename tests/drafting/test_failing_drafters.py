"""Drafters of one's own may fail: the answers that they draft for end, and no others."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import mlx.nn as nn
import pytest
from tiny import byte_model, byte_tokenizer

from redrafter_mlx.config import BeamShape
from redrafter_mlx.drafting.interface import Drafter, Features, Memory, Seen
from redrafter_mlx.drafting.level_drafter import DraftLevels, MemorylessDrafter
from redrafter_mlx.engine.engine import Redrafter
from redrafter_mlx.errors import DrafterError
from redrafter_mlx.speculation.beams import Beams
from redrafter_mlx.speculation.draft_vocabulary import DraftVocabulary

PROMPT = [3, 5, 7, 3, 5, 7, 3]
SHAPE = {"beam_width": 4, "beam_length": 5}


class Again(Drafter):
    """A drafter that repeats the root."""

    def draft(self, memory: Memory, seen: Seen, shape: BeamShape) -> tuple[Beams, Memory]:
        B, W, L = seen.root.shape[0], shape.width, shape.length
        tokens = mx.broadcast_to(seen.root[:, None, None], (B, W, L))
        return Beams(tokens, mx.zeros((B, W, L))), memory


def answer(engine: Redrafter, prompt: list[int] = PROMPT, **options: object) -> list[int]:
    return list(engine.generate(prompt, raw=True, max_tokens=20, **options).token_ids)


def longer(memory: Memory, seen: Seen) -> Memory:
    (known,) = memory
    assert isinstance(known, mx.array)
    return (mx.concatenate([known, seen.tokens[:, :-1]], axis=1),)


class Remembers(Again):
    """A drafter that remembers the tokens of all positions, and fails in one method at a time."""

    fails: str | None = None
    returns: Any = None

    @property
    def features(self) -> Features:
        return Features(every_position=True)

    def _at(self, method: str, result: object) -> Any:
        if self.fails != method:
            return result
        if self.returns is None:
            raise ZeroDivisionError(f"nothing is left\nin {method}")
        return self.returns

    def empty(self, batch: int) -> Memory:
        return self._at("empty", (mx.zeros((batch, 0), mx.int32),))

    def extend(self, memory: Memory, seen: Seen) -> Memory:
        return self._at("extend", longer(memory, seen))

    def cut(self, memory: Memory, positions: int) -> Memory:
        (known,) = memory
        assert isinstance(known, mx.array)
        return self._at("cut", (known[:, :positions],))

    def draft(self, memory: Memory, seen: Seen, shape: BeamShape) -> tuple[Beams, Memory]:
        beams, _ = super().draft(memory, seen, shape)
        return self._at("draft", (beams, longer(memory, seen)))


BEAMS = Beams(mx.zeros((1, 4, 5), mx.int32), mx.zeros((1, 4, 5)))
MEMORY = (mx.zeros((1, 3), mx.int32),)
FAILURES: dict[str, tuple[str, object, str]] = {
    "empty": ("empty", None, "ZeroDivisionError: nothing is left in empty"),
    "extend": ("extend", None, "ZeroDivisionError"),
    "cut": ("cut", None, "ZeroDivisionError"),
    "draft": ("draft", None, "ZeroDivisionError"),
    "no beams": ("draft", (None, MEMORY), "Beams"),
    "nothing": ("draft", 7, "TypeError"),
    "beams alone": ("draft", BEAMS, "tuple|unpack"),
    "wider beams": ("draft", (Beams(*[mx.zeros((1, 9, 5))] * 2), MEMORY), r"\(1, 9, 5\)"),
    "beams of more rows": ("draft", (Beams(*[mx.zeros((3, 4, 5))] * 2), MEMORY), r"\(3, 4, 5\)"),
    "one axis too few": ("draft", (Beams(*[mx.zeros((4, 5))] * 2), MEMORY), r"\(4, 5\)"),
    "tokens of floats": ("draft", (Beams(BEAMS.log_probs, BEAMS.log_probs), MEMORY), "tokens"),
    "scores of integers": ("draft", (Beams(BEAMS.tokens, BEAMS.tokens), MEMORY), "log_probs"),
    "scores of another shape": (
        "draft", (Beams(BEAMS.tokens, mx.zeros((1, 4, 4))), MEMORY), "log_probs"
    ),
    "parents of floats": ("draft", (Beams(*BEAMS[:2], BEAMS.log_probs), MEMORY), "parents"),
    "a memory of other dimensions": ("draft", (BEAMS, (mx.zeros((1, 3, 2)),)), "structure"),
    "a memory of more rows": ("extend", (mx.zeros((4, 3)),), "memory"),
    "a list as memory": ("extend", [mx.zeros((1, 3))], "tuple"),
}  # fmt: skip


@pytest.fixture
def failing() -> Remembers:
    return Remembers()


@pytest.fixture
def remembering(failing: Remembers) -> Redrafter:
    return Redrafter(byte_model(seed=1), byte_tokenizer(), failing)


@pytest.mark.parametrize("failure", FAILURES)
def test_a_drafter_that_fails_ends_only_the_answers_that_it_drafts_for(
    failure: str, failing: Remembers, remembering: Redrafter
) -> None:
    """By its name; answers without drafts go on, and so does the engine."""
    engine, (method, returns, named) = remembering, FAILURES[failure]
    tokens = answer(engine, draft=False)
    other = engine.stream(PROMPT, raw=True, max_tokens=20, draft=False)
    got = [next(other).token for _ in range(3)]
    answer(engine, **SHAPE)  # its text is kept for prompts that begin alike
    failing.fails, failing.returns = method, returns
    prompt = [*PROMPT, 9] if method == "cut" else [5, 6, 7]
    with pytest.raises(DrafterError, match=rf"Remembers.*`{method}`.*({named})") as error:
        answer(engine, prompt, **SHAPE)
    assert "\n" not in str(error.value)
    assert got + [response.token for response in other] == tokens
    assert answer(engine, draft=False) == tokens
    failing.fails = None
    assert answer(engine, **SHAPE) == tokens


def test_all_answers_of_a_batch_whose_drafter_fails_end_with_its_error(
    failing: Remembers, remembering: Redrafter
) -> None:
    engine = remembering
    begun = [engine.stream([*PROMPT, i], raw=True, max_tokens=200, **SHAPE) for i in range(3)]
    for stream in begun:
        next(stream)
    failing.fails = "draft"
    for stream in begun:
        with pytest.raises(DrafterError, match="ZeroDivisionError"):
            list(stream)
    failing.fails = None
    assert answer(engine, **SHAPE) == answer(engine, draft=False)
    assert engine.status.running == 0


def test_a_drafter_that_cannot_be_bound_is_named() -> None:
    class Unbound(Again):
        def bind(self, *_: object) -> Drafter:
            raise KeyError("head")

    class Nothing(Again):
        def bind(self, *_: object) -> Any:
            return None

    for drafter, why in ((Unbound(), "KeyError: 'head'"), (Nothing(), "NoneType")):
        with pytest.raises(DrafterError, match=f"{type(drafter).__name__}.*`bind`.*{why}"):
            Redrafter(byte_model(), byte_tokenizer(), drafter)


class Levels(DraftLevels):
    """Logits of any size and value, the same after every token."""

    def __init__(self, vocabulary: DraftVocabulary, rows: int, logits: mx.array) -> None:
        super().__init__(vocabulary)
        self._rows, self._logits = rows, logits

    def first(self) -> mx.array:
        return mx.broadcast_to(self._logits, (self._rows, 1, self._logits.size))

    def following(self, parents: mx.array, tokens: mx.array) -> mx.array:
        del parents
        return mx.broadcast_to(self._logits, (*tokens.shape, self._logits.size))


class LevelByLevel(MemorylessDrafter):
    def __init__(self, logits: mx.array, size: int, tokens: mx.array | None = None) -> None:
        super().__init__("levels", nn.Linear(2, 2), DraftVocabulary(size, 258, tokens))
        self._logits = logits

    @property
    def features(self) -> Features:
        return Features(hidden=True)

    def levels_of(self, features: mx.array, root: mx.array, drafts: int) -> DraftLevels:
        del features, drafts
        return Levels(self.vocabulary, root.shape[0], self._logits)


@pytest.mark.parametrize("size", [50, 300])
def test_logits_of_another_size_than_the_drafters_vocabulary_are_an_error(size: int) -> None:
    drafter = LevelByLevel(mx.zeros(size), 100, mx.arange(100))
    engine = Redrafter(byte_model(seed=1), byte_tokenizer(), drafter)
    with pytest.raises(DrafterError, match=rf"LevelByLevel.*`draft`.*{size}"):
        answer(engine, **SHAPE)
    assert answer(engine, draft=False)


@pytest.mark.parametrize("accept", ["sample", "rejection"])
@pytest.mark.parametrize(
    "drafter",
    [
        LevelByLevel(mx.arange(258) * 0.1, 258),
        LevelByLevel(mx.full(258, float("nan")), 258),
        LevelByLevel(mx.full(258, float("inf")), 258),
        LevelByLevel(mx.arange(100) * 0.1, 100, mx.arange(100) + 10**6),
    ],
    ids=["fine", "NaN", "infinite", "no tokens"],
)
def test_levels_of_ones_own_keep_the_text(drafter: Drafter, accept: str) -> None:
    engine = Redrafter(byte_model(seed=1), byte_tokenizer(), drafter)
    options = {"temperature": 0.9, "seed": 4, "accept": accept}
    assert answer(engine, **options, **SHAPE) == answer(engine, **options, draft=False)


def test_a_drafter_may_keep_arrays_that_were_made_in_another_thread() -> None:
    class Keeps(Again):
        def __init__(self) -> None:
            self.kept = {"scores": [-mx.arange(9).astype(mx.float32)]}

        def draft(self, memory: Memory, seen: Seen, shape: BeamShape) -> tuple[Beams, Memory]:
            beams, _ = super().draft(memory, seen, shape)
            return beams._replace(log_probs=beams.log_probs + self.kept["scores"][0][:5]), memory

    engine = Redrafter(byte_model(seed=1), byte_tokenizer(), Keeps())
    assert answer(engine, **SHAPE) == answer(engine, draft=False)
