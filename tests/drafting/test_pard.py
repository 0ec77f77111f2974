"""PARD: all drafts from one call on mask tokens, with the cache of a draft language model."""

from __future__ import annotations

import json
from pathlib import Path

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from decoding import counted
from draft_models import PROMPT, remembers_the_text, run
from mlx.utils import tree_flatten
from tiny import VOCAB, Words, byte_model, byte_tokenizer, plain_tokens, random_model, truncated

from redrafter_mlx.config import PLAIN, BeamShape, SamplingParams
from redrafter_mlx.decoding.step import Decoder
from redrafter_mlx.drafting.interface import Seen
from redrafter_mlx.drafting.published.pard import Pard
from redrafter_mlx.errors import BadInputError
from redrafter_mlx.loading.load import load
from redrafter_mlx.target_model.model import Target

GREEDY = SamplingParams()
MASK = VOCAB - 1


def pard_for(target: Target, model: nn.Module, mask: int = MASK) -> Pard:
    words = Words(target.vocab_size)
    drafter = Pard(model, words, mask).bind(target, words)  # type: ignore[arg-type]
    assert isinstance(drafter, Pard)
    return drafter


def test_each_level_is_what_the_model_says_at_its_mask() -> None:
    """Compares with mlx-lm's call on [text, root, mask, mask], as in the authors' inference code.

    A batch of two texts: the first has four new positions, the second has one.
    """
    model = random_model(num_hidden_layers=3)
    drafter = pard_for(Target(random_model(seed=1)), model)
    texts = [[5, 9, 2, 7, 30, 31, 3], [8, 1, 6, 11]]
    known, rows = [2, 2], 4
    memory = drafter.extend(
        drafter.empty(2),
        Seen(mx.array([t[:3] for t in texts]), None, mx.array([0, 0]), mx.array([2, 2]), 2, 0),
    )
    new = [text[k:] for text, k in zip(texts, known, strict=True)]
    seen = Seen(
        mx.array([row + [0] * (rows + 1 - len(row)) for row in new], mx.int32), None,
        mx.array(known), mx.array([len(row) - 1 for row in new]), max(map(len, texts)) - 1,
    )  # fmt: skip
    levels = drafter.levels(memory, seen, 3)
    parents, tokens = mx.array([[0, 0], [1, 0]]), mx.array([[4, 5], [6, 7]])
    got = [levels.first(), *(levels.following(parents, tokens) for _ in range(2))]
    for b, text in enumerate(texts):
        want = model(mx.array([[*text, MASK, MASK]]))[0, -3:]
        for level, logits in enumerate(got):
            for beam in range(logits.shape[1]):
                np.testing.assert_allclose(logits[b, beam], want[level], rtol=1e-4, atol=1e-4)


def test_a_step_is_one_call_and_leaves_the_text_to_the_target() -> None:
    model = random_model(num_hidden_layers=3)
    target = Target(model)
    drafter = pard_for(target, truncated(model, 2))
    for shape in (BeamShape(1, 4), BeamShape(3, 4), BeamShape(2, 2)):
        with counted(drafter.model, "call", "hidden") as calls:
            emitted, results, _ = run(Decoder(target, drafter, shape, GREEDY), 40)
        assert emitted == plain_tokens(model, PROMPT, 40)
        drafts = len(results) + 1  # after the prompt, after each step, and one not submitted
        assert len(calls) == 1 + drafts
        assert set(calls[2:-1]) <= {shape.length + shape.length - 1}
        assert len({len(r.tokens) for r in results}) > 1


@pytest.mark.parametrize("shapes", [(BeamShape(3, 4),), (BeamShape(1, 3), PLAIN, PLAIN)], ids=len)
def test_its_cache_holds_the_text_and_no_masks(shapes: tuple[BeamShape, ...]) -> None:
    model = random_model(num_hidden_layers=3)
    target, small = Target(model), truncated(model, 2)
    decoder = Decoder(target, pard_for(target, small), PLAIN, GREEDY)
    remembers_the_text(decoder, model, small, 25, shapes)


@pytest.mark.parametrize("accept", ["sample", "rejection"])
def test_sampled_text_is_that_of_plain_decoding_by_sample(accept: str) -> None:
    target = Target(random_model(num_hidden_layers=3))
    drafter = pard_for(target, random_model(num_hidden_layers=1))
    params = SamplingParams(1.1, top_k=30, accept=accept)  # type: ignore[arg-type]
    emitted, _, _ = run(Decoder(target, drafter, BeamShape(2, 4), params), 40)
    plain, _, _ = run(Decoder(target, None, PLAIN, params), 40)
    assert (emitted == plain) == (accept == "sample")


def write_model(folder: Path, model: nn.Module, **config: object) -> Path:
    """Write a model's folder as transformers does."""
    sizes = {k: v for k, v in vars(model.args).items() if v is not None}
    tensors = dict(tree_flatten(model.parameters()))
    mx.save_safetensors(str(folder / "model.safetensors"), tensors, {"format": "pt"})
    (folder / "config.json").write_text(json.dumps({**sizes, **config}))
    byte_tokenizer()._tokenizer.save_pretrained(folder)
    return folder


def test_a_model_whose_config_names_its_mask_loads_as_pard(tmp_path: Path) -> None:
    model = byte_model()
    (tmp_path / "target").mkdir()
    (tmp_path / "pard").mkdir()
    target = write_model(tmp_path / "target", model)
    small = byte_model(num_hidden_layers=1)
    folder = write_model(tmp_path / "pard", small, pard_token=257, spd_type="pard")
    redrafter = load(target, folder)
    assert isinstance(redrafter.drafter, Pard)
    prompt = list(b"hello")
    plain = plain_tokens(model, prompt, 20)
    assert redrafter.generate(prompt, max_tokens=20).token_ids == plain


@pytest.mark.parametrize("mask", [VOCAB, -1, "mask", True])
def test_a_mask_without_an_embedding_is_refused(mask: object) -> None:
    with pytest.raises(BadInputError, match="pard_token"):
        Pard(random_model(), Words(VOCAB), mask)  # type: ignore[arg-type]
