"""MTP heads' logits against mlx-vlm's module, on random weights.

Run with `-m parity`; skipped without mlx-vlm (PyPI).
"""

from __future__ import annotations

import importlib
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest
from drafter_laws import logits_along
from hybrids import hybrid_model
from mtp_samples import (
    VOCAB,
    load,
    nemotron,
    random_head,
    random_nemotron_head,
    with_single_experts,
    write_head,
)
from tiny import HIDDEN

from redrafter_mlx.target_model.model import Target

pytestmark = pytest.mark.parity

P = 11
"""Positions of the text; the root follows."""

PATH = [7, 201]


@pytest.mark.parametrize("name", ["qwen3_5", "qwen3_5_moe"])
def test_logits_of_three_levels_equal_mlx_vlms(name: str, tmp_path: Path) -> None:
    module = "mlx_vlm.speculative.drafters.qwen3_5_mtp"
    theirs = pytest.importorskip(module, reason="pip install --no-deps mlx-vlm")
    model = hybrid_model(name, vocab_size=VOCAB)
    tensors = random_head(model)
    head = theirs.Model(theirs.ModelConfig.from_dict({"text_config": text_config(model.args)}))
    head.load_weights(list(tensors.items()))
    rng = np.random.default_rng(0)
    text = rng.integers(0, VOCAB, P + 1).tolist()
    hidden = rng.normal(size=(P, HIDDEN)).astype(np.float32)

    head.reset(model)
    row = head._forward_tokens(mx.array([text[1:]]), mx.array(hidden[None]), mx.int32)[:, -1:]
    rows = [row]
    for token in PATH:
        rows.append(head._forward_tokens(mx.array([[token]]), rows[-1], mx.int32))
    want = np.array(head._lm_head_fn(mx.concatenate(rows, axis=1))[0])

    drafter = load(write_head(tmp_path / "d", tensors), Target(model))
    got = np.array(logits_along(drafter, text, hidden, PATH))
    worst = np.abs(got - want).max() / want.std()
    print(f"{worst:.1e} of the logits' spread")
    assert worst < 1e-4


def test_logits_of_nemotrons_head_equal_mlx_vlms(tmp_path: Path) -> None:
    module = "mlx_vlm.speculative.drafters.nemotron_h_mtp"
    theirs = pytest.importorskip(module, reason="pip install --no-deps mlx-vlm")
    model = nemotron()
    tensors = with_single_experts(random_nemotron_head(model))
    text_of = {
        **vars(model.args), "num_nextn_predict_layers": 1, "mtp_hybrid_override_pattern": "*E",
    }  # fmt: skip
    head = theirs.Model(theirs.ModelConfig.from_dict({"text_config": text_of}))
    head.load_weights([*head.sanitize(dict(tensors)).items()])
    rng = np.random.default_rng(0)
    text = rng.integers(0, VOCAB, P + 1).tolist()
    hidden = rng.normal(size=(P, HIDDEN)).astype(np.float32)
    cache, embed = head.make_cache(), model.backbone.embeddings
    row, _ = head._forward_hidden(embed(mx.array([text[1:]])), mx.array(hidden[None]), None, cache)
    rows = [row[:, -1:]]
    for token in PATH:
        row, _ = head._forward_hidden(embed(mx.array([[token]])), rows[-1], None, cache)
        rows.append(row)
    want = np.array(model.lm_head(mx.concatenate(rows, axis=1))[0])
    drafter = load(write_head(tmp_path / "d", tensors), Target(model))
    got = np.array(logits_along(drafter, text, hidden, PATH))
    worst = np.abs(got - want).max() / want.std()
    print(f"{worst:.1e} of the logits' spread")
    assert worst < 1e-4


def text_config(args: object) -> dict[str, object]:
    """Return the model's configuration for mlx-vlm, which wants some keys spelled out."""
    inner = importlib.import_module("mlx_lm.models.qwen3_5").TextModelArgs
    given = dict(args.text_config)  # type: ignore[attr-defined]
    text = inner.from_dict(given)
    return {**given, "rope_parameters": text.rope_parameters, "mtp_num_hidden_layers": 1}
