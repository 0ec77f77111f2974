"""Gemma 4's assistants against mlx-vlm's module, on random weights.

Run with `-m parity`; skipped without mlx-vlm (PyPI).
"""

from __future__ import annotations

from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest
from assistant_samples import (
    LARGE,
    SMALL,
    VOCAB,
    by_mlx_lm,
    config_of,
    gemma,
    load,
    random_assistant,
    write_assistant,
)

from redrafter_mlx.drafting.interface import Seen
from redrafter_mlx.target_model.model import Target

pytestmark = pytest.mark.parity

P, PATH = 21, [50, 7, 201]
"""Positions of the text, more than the sliding window; the root and two drafts."""


@pytest.mark.parametrize("kind", [SMALL, LARGE])
def test_logits_of_three_levels_equal_mlx_vlms(kind: str, tmp_path: Path) -> None:
    """With centroids as E2B has, and with the whole embedding."""
    module = "mlx_vlm.speculative.drafters.gemma4_assistant"
    theirs = pytest.importorskip(module, reason="pip install --no-deps mlx-vlm")
    model, tensors = gemma(kind), random_assistant(centroids=kind == SMALL)
    text = np.random.default_rng(0).integers(0, VOCAB, P).tolist()
    hidden, caches = by_mlx_lm(model, text)
    head = theirs.Model(theirs.ModelConfig.from_dict(config_of(tensors)))
    head.load_weights([*head.sanitize(dict(tensors)).items()])
    head.bind(model)
    kinds = model.args.layer_types[: len(caches)]
    shared = {
        kind: tuple(mx.array(a[None].astype(np.float32)) for a in cache)
        for kind, cache in zip(kinds, caches, strict=True)
    }
    head.set_shared_kv(shared, P, position=P - 1, kv_valid_len=P)
    newest = mx.array(hidden[None, -1:].astype(np.float32))
    context, outputs = newest, []
    for token in PATH:
        embedded = model.model.embed_tokens(mx.array([[token]])) * model.model.embed_scale
        row = mx.concatenate([embedded, context], axis=-1)
        context, logits = head(row, shared, mx.array([[P - 1]]))
        outputs.append(logits)
    want = np.array(mx.concatenate(outputs, axis=1)[0])

    target = Target(model)
    drafter = load(write_assistant(tmp_path / "d", tensors), target)
    cache, length = target.new_cache(), mx.array([P])
    target.append(mx.array([text]), cache, 0)
    read = cache.committed(drafter.features.caches, length, P)
    tokens = mx.array([[text[-1], PATH[0]]])
    seen = Seen(tokens, newest, length - 1, length - length + 1, P, committed=read)
    levels = drafter.levels((), seen, 3)
    found = [levels.first()]
    found += [levels.following(mx.array([[0]]), mx.array([[token]])) for token in PATH[1:]]
    got = np.array(mx.concatenate(found, axis=1)[0])
    known = np.isfinite(got)  # mlx-vlm gives the others less than any of these
    for scores, scored in zip(want, known, strict=True):
        assert (scores[~scored] < scores[scored].min()).all()
    worst = np.abs(got - want)[known].max() / want[known].std()
    print(f"{worst:.1e} of the logits' spread")
    assert worst < 1e-4
