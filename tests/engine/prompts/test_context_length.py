"""Prompt and answer end at the model's maximum context length."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
from tiny import byte_model, byte_tokenizer, random_drafter
from weights_samples import gguf_metadata, gguf_tensors, llama_model, write_gguf

from redrafter_mlx.engine.engine import Redrafter
from redrafter_mlx.errors import BadInputError, DamagedFileError
from redrafter_mlx.loading.load import load
from redrafter_mlx.weights.raw_model import context_length

CONTEXT = 40
DRAFTS = [{"draft": False}, {"beam_width": 2, "beam_length": 4}, {"temperature": 1.0, "seed": 3}]


@pytest.fixture(scope="module")
def redrafter() -> Redrafter:
    model = byte_model(seed=1, max_position_embeddings=CONTEXT)
    return Redrafter(model, byte_tokenizer(), random_drafter(vocab_size=258))


@pytest.mark.parametrize("options", DRAFTS)
@pytest.mark.parametrize("prompt", [1, 30, CONTEXT - 2, CONTEXT - 1])
def test_an_answer_fills_the_context_and_ends_by_length(
    redrafter: Redrafter, options: dict[str, object], prompt: int
) -> None:
    answer = redrafter.generate([72] * prompt, max_tokens=1000, **options)
    assert answer.finish_reason == "length"
    assert prompt + len(answer.token_ids) == CONTEXT
    limited = redrafter.generate([72] * prompt, max_tokens=CONTEXT - prompt, **options)
    assert limited.token_ids == answer.token_ids


def test_a_prompt_that_leaves_no_room_is_refused_at_once(redrafter: Redrafter) -> None:
    for length in (CONTEXT, CONTEXT + 1, 5000):
        with pytest.raises(
            BadInputError, match=rf"length is {CONTEXT} tokens.* {length};"
        ) as caught:
            redrafter.stream([72] * length)
        assert "\n" not in str(caught.value)


def test_a_turn_that_leaves_no_room_is_refused_and_changes_nothing(redrafter: Redrafter) -> None:
    session = redrafter.session()
    with pytest.raises(BadInputError, match=str(CONTEXT)):
        session.stream("x" * 100)
    assert session.messages == []


def test_a_model_that_names_no_limit_has_none() -> None:
    model = byte_model(seed=1, max_position_embeddings=None)
    redrafter = Redrafter(model, byte_tokenizer())
    assert redrafter.context_length is None
    assert len(redrafter.generate([72], max_tokens=60).token_ids) == 60


def test_the_length_in_a_gguf_file_is_known(tmp_path: Path) -> None:
    metadata = gguf_metadata(llama__context_length=50)
    path = write_gguf(tmp_path / "m.gguf", metadata, gguf_tensors(llama_model()))
    loaded = load(path, drafter="lookup")
    assert loaded.source is not None
    assert loaded.source.context_length == loaded.context_length == 50
    with pytest.raises(BadInputError, match="50"):
        loaded.stream([5] * 50)


@pytest.mark.parametrize(
    ("config", "length"),
    [
        ({}, None),
        ({"max_position_embeddings": None}, None),
        ({"max_position_embeddings": "many"}, None),
        ({"max_position_embeddings": 0}, None),
        ({"max_position_embeddings": 2048}, 2048),
        ({"max_position_embeddings": 2048, "rope_scaling": None}, 2048),
        # Vicuna 7B v1.5 16k
        ({"max_position_embeddings": 4096, "rope_scaling": {"type": "linear", "factor": 4.0}},
         16384),
        # Llama 3.1
        ({"max_position_embeddings": 131072,
          "rope_scaling": {"rope_type": "llama3", "factor": 8.0,
                           "original_max_position_embeddings": 8192}}, 131072),
        # Qwen 2.5 and 3 with YaRN enabled as their cards describe
        ({"max_position_embeddings": 32768,
          "rope_scaling": {"type": "yarn", "factor": 4.0,
                           "original_max_position_embeddings": 32768}}, 131072),
        ({"max_position_embeddings": 40960,
          "rope_scaling": {"rope_type": "yarn", "factor": 4.0,
                           "original_max_position_embeddings": 32768}}, 131072),
        # as transformers 5 writes it
        ({"max_position_embeddings": 32768,
          "rope_parameters": {"rope_type": "yarn", "rope_theta": 1e6, "factor": 4.0,
                              "original_max_position_embeddings": 32768}}, 131072),
        ({"max_position_embeddings": 4096,
          "rope_parameters": {"rope_type": "linear", "rope_theta": 1e4, "factor": 4.0}}, 16384),
        ({"max_position_embeddings": 4096,
          "rope_parameters": {"rope_type": "default", "rope_theta": 1e4}}, 4096),
        ({"max_position_embeddings": 4096,
          "rope_parameters": {"full_attention": {"rope_type": "linear", "factor": 8.0}}}, 4096),
        # Phi 3
        ({"max_position_embeddings": 131072,
          "rope_scaling": {"type": "longrope", "long_factor": [1.0]}}, 131072),
        # Mistral 3 and Qwen3-VL: around a language model
        ({"model_type": "mistral3", "text_config": {"max_position_embeddings": 32768}}, 32768),
        ({"text_config": {"max_position_embeddings": 4096,
                          "rope_parameters": {"rope_type": "linear", "factor": 4.0}}}, 16384),
        ({"text_config": {}}, None),
        ({"text_config": "llama"}, None),
    ],
)  # fmt: skip
def test_rope_scaling_counts_where_it_goes_beyond_the_config(
    config: dict[str, object], length: int | None
) -> None:
    assert context_length(config) == length


@pytest.mark.parametrize(
    "factor", [math.inf, math.nan, 1e308, 10**400], ids=["inf", "nan", "float", "int"]
)
def test_a_rope_scaling_without_end_is_damage(factor: float) -> None:
    scaling = {"type": "linear", "factor": factor}
    with pytest.raises(DamagedFileError, match="a rope scaling with") as caught:
        context_length({"max_position_embeddings": 8192, "rope_scaling": scaling})
    assert len(str(caught.value)) < 100
