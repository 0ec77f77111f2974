"""The function for those who hold a model and a tokenizer of mlx-lm."""

from __future__ import annotations

import mlx.core as mx
import mlx.nn as nn
import pytest
from mlx_lm.generate import stream_generate as mlx_lm_stream
from tiny import byte_tokenizer, random_drafter

import redrafter_mlx
from redrafter_mlx.errors import BadInputError


def test_stream_generate_serves_those_who_hold_an_mlx_lm_pair(model: nn.Module) -> None:
    theirs = [r.token for r in mlx_lm_stream(model, byte_tokenizer(), "Hello", max_tokens=20)]
    drafter = random_drafter(vocab_size=258)
    ids = byte_tokenizer().encode("Hello")
    for given in ("Hello", mx.array(ids), ids):
        ours = redrafter_mlx.stream_generate(
            model, byte_tokenizer(), given, drafter=drafter, max_tokens=20
        )
        assert [r.token for r in ours] == theirs


def test_stream_generate_takes_mlx_lms_draft_model(model: nn.Module) -> None:
    seen: list[tuple[int, int]] = []
    given = {"draft_model": model, "num_draft_tokens": 3, "max_tokens": 20}
    theirs = [r.token for r in mlx_lm_stream(model, byte_tokenizer(), "Hello", **given)]
    ours = [
        *redrafter_mlx.stream_generate(
            model, byte_tokenizer(), "Hello", **given,
            prompt_progress_callback=lambda *read: seen.append(read),
        )
    ]  # fmt: skip
    assert [r.token for r in ours] == theirs
    assert ours[-1].tokens_per_step > 2.5
    assert seen[-1] == (5, 5)
    with pytest.raises(BadInputError, match="two drafters"):
        redrafter_mlx.stream_generate(model, byte_tokenizer(), "Hello", drafter="lookup", **given)


@pytest.mark.parametrize(
    ("name", "instead"),
    [("sampler", "temperature"), ("logits_processors", "logit_bias"), ("max_kv_size", "memory"),
     ("prompt_cache", "Redrafter"), ("prefill_step_size", "leave it out")],
)  # fmt: skip
def test_another_keyword_of_mlx_lms_is_refused_with_what_to_give_instead(
    model: nn.Module, name: str, instead: str
) -> None:
    with pytest.raises(BadInputError, match=f"no {name} here; .*{instead}"):
        redrafter_mlx.stream_generate(model, byte_tokenizer(), "Hello", **{name: 1})
