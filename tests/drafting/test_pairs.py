"""Two drafters together, with and without memories: answers that share texts, one by one and in
batches."""

from __future__ import annotations

from collections.abc import Callable

import mlx.core as mx
import mlx.nn as nn
import pytest
from eagle_samples import LAYERS, SAMPLES, random_tensors, write_files
from tiny import byte_model, byte_tokenizer, random_drafter, random_model

from redrafter_mlx.config import BeamShape
from redrafter_mlx.drafting.combined import Combined
from redrafter_mlx.drafting.draft_model import DraftModel
from redrafter_mlx.drafting.files.forms import DrafterFolder
from redrafter_mlx.drafting.interface import Drafter, Memory, Seen
from redrafter_mlx.drafting.published.heads.medusa import MedusaConfig, MedusaDrafter, MedusaNetwork
from redrafter_mlx.drafting.published.heads.mlp_speculator import (
    SpeculatorConfig,
    SpeculatorDrafter,
    SpeculatorNetwork,
)
from redrafter_mlx.drafting.untrained.ngram import Lookup
from redrafter_mlx.engine.engine import Redrafter
from redrafter_mlx.speculation.beams import Beams
from redrafter_mlx.target_model.model import Target

HIDDEN, VOCAB = 32, 258
TEXT = [(7 * i + 3) % 256 for i in range(40)]


class CountsItsDrafts(Drafter):
    """A drafter whose memory covers no positions: how often it drafted for this text."""

    def empty(self, batch: int) -> Memory:
        return (mx.zeros((batch, 1), mx.int32), (mx.zeros((batch, 2)),))

    def draft(self, memory: Memory, seen: Seen, shape: BeamShape) -> tuple[Beams, Memory]:
        count, (other,) = memory
        assert isinstance(count, mx.array)
        B, W, L = seen.root.shape[0], shape.width, shape.length
        tokens = seen.root[:, None, None] + count[:, :, None] * (mx.arange(L) > 0)
        tokens = mx.broadcast_to((tokens + mx.arange(W)[:, None] * (mx.arange(L) > 0)), (B, W, L))
        scores = mx.broadcast_to(-mx.arange(L).astype(mx.float32), (B, W, L))
        return Beams((tokens % VOCAB).astype(mx.int32), scores), (count + 1, (other,))


@pytest.fixture(scope="module")
def model() -> nn.Module:
    return byte_model(seed=1, num_hidden_layers=LAYERS)


@pytest.fixture(scope="module")
def parts(
    model: nn.Module, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, Callable[[], Drafter]]:
    """How to make each drafter, bound to the target."""
    target, sample = Target(model), SAMPLES["EAGLE-3, a token for each output"]
    folder = tmp_path_factory.mktemp("eagle") / "drafter"
    write_files(folder, sample, random_tensors(sample))
    mx.random.seed(3)
    heads = MedusaNetwork(MedusaConfig(HIDDEN, VOCAB, 3, 1, True, "own", VOCAB))
    network = SpeculatorNetwork(SpeculatorConfig(HIDDEN, 24, VOCAB, 3, False, False))
    small = random_model(seed=5, vocab_size=VOCAB)
    words = byte_tokenizer()
    return {
        "recurrent": lambda: random_drafter(vocab_size=VOCAB).bind(target),
        "medusa": lambda: MedusaDrafter(heads, target),
        "mlp": lambda: SpeculatorDrafter(network, target),
        "eagle": lambda: DrafterFolder(folder).bind(target, words),
        "model": lambda: DraftModel(small, words).bind(target, words),
        "own": CountsItsDrafts,
    }


PAIRS = [
    ("recurrent", "medusa"),
    ("medusa", "mlp"),
    ("mlp", "own"),
    ("eagle", "medusa"),
    ("model", "recurrent"),
    ("model", "eagle"),
    ("own", "model"),
    ("own",),
    ("recurrent",),
]


@pytest.fixture(params=PAIRS, ids="+".join)
def engine(
    request: pytest.FixtureRequest, model: nn.Module, parts: dict[str, Callable[[], Drafter]]
) -> Redrafter:
    each = [parts[name]() for name in request.param]
    drafter = Combined(*each) if len(each) > 1 else each[0]
    return Redrafter(model, byte_tokenizer(), drafter, host_drafters=(Lookup(3),))


def plain(engine: Redrafter, prompt: list[int], n: int) -> list[int]:
    found = engine.generate(prompt, raw=True, draft=False, max_tokens=n, cache_prompt=False)
    return list(found.token_ids)


@pytest.mark.parametrize("shape", [{}, {"beam_width": 3, "beam_length": 4}], ids=["auto", "3x4"])
def test_texts_that_share_a_prefix_are_answered_as_without_drafts(
    engine: Redrafter, shape: dict[str, int]
) -> None:
    """The same prompt again, the next turn, an edited message, a shorter prompt."""
    first = list(engine.generate(TEXT, raw=True, max_tokens=8, **shape).token_ids)
    assert first == plain(engine, TEXT, 8)
    edited = [*TEXT[:20], 5, *TEXT[21:]]
    for prompt in (TEXT, [*TEXT, *first, 9, 8, 7], edited, TEXT[:12], [*edited, 1], TEXT):
        found = engine.generate(prompt, raw=True, max_tokens=8, **shape)
        assert list(found.token_ids) == plain(engine, prompt, 8)


def test_answers_in_one_batch_that_share_a_prefix_are_those_without_drafts(
    engine: Redrafter,
) -> None:
    """Some begin with an empty memory, some with that of an earlier text; rows join and leave."""
    first = list(engine.generate(TEXT, raw=True, max_tokens=6).token_ids)
    prompts = [TEXT, [*TEXT, *first], [4, 5], [*TEXT[:30], 2], [*TEXT, *first, 3, 4]]
    found: list[list[int]] = [[] for _ in prompts]
    for index, response in engine.batch(
        prompts, raw=True, max_tokens=9, beam_width=2, beam_length=3
    ):
        found[index].append(response.token)
    for prompt, tokens in zip(prompts, found, strict=True):
        assert tokens == plain(engine, prompt, 9)


def test_a_conversation_goes_on_after_turns_without_drafts(engine: Redrafter) -> None:
    """The cache of a plain answer holds no memory, and the drafter's is made when it drafts."""
    with_drafts, without = engine.session(), engine.session()
    for turn, draft in enumerate((True, False, True)):
        asked = f"turn {turn}"
        got = [r.token for r in with_drafts.stream(asked, max_tokens=6, draft=draft)]
        want = [
            r.token for r in without.stream(asked, max_tokens=6, draft=False, cache_prompt=False)
        ]
        assert got == want


class AtMostTwo(CountsItsDrafts):
    """A drafter that cannot draft beams longer than 2."""

    @property
    def max_length(self) -> int:
        return 2

    def draft(self, memory: Memory, seen: Seen, shape: BeamShape) -> tuple[Beams, Memory]:
        assert shape.length <= 2
        return super().draft(memory, seen, shape)


def test_neither_drafter_of_a_pair_is_asked_for_more_than_it_can_draft(
    model: nn.Module, parts: dict[str, Callable[[], Drafter]]
) -> None:
    for pair in ((AtMostTwo(), parts["recurrent"]()), (parts["recurrent"](), AtMostTwo())):
        engine = Redrafter(model, byte_tokenizer(), Combined(*pair))
        found = engine.generate(TEXT, raw=True, max_tokens=8, beam_width=2, beam_length=4)
        assert list(found.token_ids) == plain(engine, TEXT, 8)
