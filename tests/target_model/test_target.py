"""Trees through unmodified mlx-lm models, against one sequence at a time."""

from __future__ import annotations

import gc
from collections.abc import Callable

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from mlx.utils import tree_flatten
from tiny import ARCHITECTURES, VOCAB, random_model
from trees import assert_tree_equals_sequences

from redrafter_mlx.errors import BadInputError, BusyError, UnsupportedModelError
from redrafter_mlx.speculation.tree import TokenTree
from redrafter_mlx.target_model.cache import plans
from redrafter_mlx.target_model.fingerprint import nbytes_of
from redrafter_mlx.target_model.model import Target
from redrafter_mlx.target_model.tree_check import check_trees


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_tree_logits_equal_sequential_logits(name: str) -> None:
    assert_tree_equals_sequences(random_model(name), batch=1, rtol=1e-4)


@pytest.mark.parametrize("name", ["llama", "qwen3", "stablelm"])
def test_tree_logits_equal_sequential_logits_in_a_batch_of_different_rows(name: str) -> None:
    assert_tree_equals_sequences(random_model(name), batch=2, rtol=1e-4)


def test_quantised_tree_logits_equal_sequential_logits() -> None:
    model = random_model("llama", hidden_size=64, intermediate_size=128)
    nn.quantize(model, group_size=32, bits=4)
    assert_tree_equals_sequences(model, batch=1, rtol=1e-4)


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_the_check_at_loading_passes_for_every_supported_architecture(name: str) -> None:
    assert check_trees(Target(random_model(name))) < 1e-3


def test_the_check_at_loading_notices_a_broken_mask(monkeypatch: pytest.MonkeyPatch) -> None:
    target = Target(random_model())
    honest = Target.verify

    def blind(self: Target, tree: TokenTree, *rest: object) -> object:
        return honest(self, tree._replace(mask=mx.ones_like(tree.mask)), *rest)  # type: ignore

    monkeypatch.setattr(Target, "verify", blind)
    with pytest.raises(UnsupportedModelError, match=r"llama.*mlx_lm"):
        check_trees(target)


DAMAGES: dict[str, Callable[[TokenTree], TokenTree]] = {
    "sees siblings": lambda tree: tree._replace(mask=mx.ones_like(tree.mask)),
    "leaves one position late": lambda tree: tree._replace(
        depths=mx.where(tree.depths == 2, 3, tree.depths)
    ),
    "leaves do not see the root": lambda tree: tree._replace(
        mask=tree.mask & ~((tree.depths == 2)[:, :, None] & (mx.arange(tree.mask.shape[2]) == 0))
    ),
}


@pytest.mark.parametrize("damage", DAMAGES)
@pytest.mark.parametrize("dtype", [mx.float32, mx.float16, mx.bfloat16])
def test_the_check_at_loading_notices_small_defects_in_every_precision(
    damage: str, dtype: mx.Dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = random_model("granite")  # its small logits could hide defects
    model.set_dtype(dtype)
    target = Target(model)
    assert check_trees(target) <= 4 * mx.finfo(dtype).eps + 1e-5
    honest = Target.verify

    def damaged(self: Target, tree: TokenTree, *rest: object) -> object:
        return honest(self, DAMAGES[damage](tree), *rest)  # type: ignore[arg-type]

    monkeypatch.setattr(Target, "verify", damaged)
    with pytest.raises(UnsupportedModelError, match=r"granite.*spread"):
        check_trees(target)


@pytest.mark.parametrize(
    ("name", "what"), [("chain_mask", "batch of chains"), ("attention_mask", "batch of trees")]
)
def test_the_check_at_loading_notices_defects_of_batches(
    name: str, what: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    honest = getattr(plans, name)

    def blind(tree: mx.array, *rest: object) -> mx.array:
        mask: mx.array = honest(tree, *rest)
        return mask if mask.shape[0] == 1 else mx.ones_like(mask)

    monkeypatch.setattr(plans, name, blind)
    with pytest.raises(UnsupportedModelError, match=f"llama.*a {what}'s logits"):
        check_trees(Target(random_model()))


def test_the_check_at_loading_notices_another_output_layer(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first token of an answer comes from it; the others come from the trees' own logits."""
    target = Target(random_model())
    monkeypatch.setattr(target, "logits", lambda hidden: 0.9 * hidden @ mx.ones((32, VOCAB)))
    with pytest.raises(UnsupportedModelError, match=r"llama.*a prompt's logits"):
        check_trees(target)


class Coarse(nn.Module):
    """An output layer that rounds products of `low` to `high` rows as TF32 does, but no others."""

    def __init__(self, layer: nn.Module, low: int, high: int) -> None:
        super().__init__()
        self.weight = layer.weight
        self._low, self._high = low, high

    def __call__(self, x: mx.array) -> mx.array:
        if self._low <= x.shape[1] <= self._high:
            x = mx.view(mx.view(x, mx.uint32) & 0xFFFFE000, mx.float32)
        return x @ self.weight.T


@pytest.mark.parametrize(("low", "high"), [(2, 99), (8, 8)])
def test_the_check_at_loading_passes_where_some_float32_products_are_tf32(
    low: int, high: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """CUDA multiplies some counts of rows in TF32, and others in float32."""
    monkeypatch.setattr("redrafter_mlx.target_model.tree_check.float32_is_exact", lambda: False)
    model = random_model("llama (mistral-style)")
    model.lm_head = Coarse(model.lm_head, low, high)
    assert 1e-5 < check_trees(Target(model)) < 1e-3


def test_the_check_at_loading_allows_no_tf32_where_products_are_exact(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("redrafter_mlx.target_model.tree_check.float32_is_exact", lambda: True)
    model = random_model("llama (mistral-style)")
    model.lm_head = Coarse(model.lm_head, 8, 8)
    with pytest.raises(UnsupportedModelError, match=r"llama.*a prompt's logits"):
        check_trees(Target(model))


def test_a_model_that_fails_on_trees_is_refused_with_its_own_words(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    target = Target(random_model())

    def failing(*_: object) -> None:
        raise ValueError("no positions per node")

    monkeypatch.setattr(target, "verify", failing)
    with pytest.raises(UnsupportedModelError, match=r"llama.*ValueError: no positions per node"):
        check_trees(target)


def test_a_models_own_failure_is_not_called_unsupported() -> None:
    model = random_model()
    target = Target(model)
    del model.model.layers[0].mlp.up_proj
    with pytest.raises(AttributeError, match="up_proj"):
        check_trees(target)


def test_logits_that_are_not_finite_are_named_as_such() -> None:
    model = random_model()
    model.model.norm.weight = model.model.norm.weight * float("nan")
    with pytest.raises(BadInputError, match="not finite in float32"):
        check_trees(Target(model))


def test_the_callers_model_is_left_as_it_was() -> None:
    model = random_model("qwen3")
    before = {name: id(array) for name, array in tree_flatten(model.parameters())}
    ropes = [type(layer.self_attn.rope) for layer in model.layers]
    target = Target(model)
    check_trees(target)
    assert {name: id(array) for name, array in tree_flatten(model.parameters())} == before
    assert [type(layer.self_attn.rope) for layer in model.layers] == ropes


def test_weights_are_shared_and_not_copied() -> None:
    model = random_model(hidden_size=256, intermediate_size=1024)
    before = mx.get_active_memory()
    target = Target(model)
    target.append(mx.array([[1, 2]]), target.new_cache(), 0)
    assert mx.get_active_memory() - before < nbytes_of(model) // 10


@pytest.mark.parametrize(
    ("name", "changes", "what"),
    [
        ("llama4", {"text_config": {
            "model_type": "llama4", "attention_bias": False, "attention_chunk_size": 8,
            "head_dim": 8, "hidden_size": 32, "interleave_moe_layer_step": 2, "rope_theta": 1e4,
            "intermediate_size": 64, "intermediate_size_mlp": 64, "vocab_size": VOCAB,
            "max_position_embeddings": 512, "num_attention_heads": 4, "num_key_value_heads": 2,
            "num_experts_per_tok": 1, "num_local_experts": 2, "rms_norm_eps": 1e-5,
            "rope_scaling": None, "use_qk_norm": True, "num_hidden_layers": 4}}, "chunks"),
        ("longcat_flash_ngram", {
            "ffn_hidden_size": 64, "moe_topk": 2, "expert_ffn_hidden_size": 32, "num_layers": 2,
            "n_routed_experts": 4, "zero_expert_num": 2, "q_lora_rank": 8, "kv_lora_rank": 8,
            "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 8,
            "routed_scaling_factor": 1.0, "mla_scale_q_lora": True, "mla_scale_kv_lora": True,
            "ngram_vocab_size_ratio": 3, "emb_split_num": 2, "emb_neighbor_num": 3}, "embedding"),
        ("gpt2", {"n_ctx": 64, "n_embd": 32, "n_head": 4, "n_layer": 2, "n_positions": 64,
                  "layer_norm_epsilon": 1e-5}, "rotary"),
        ("llama", {"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}}, "rotary"),
    ],
)  # fmt: skip
def test_a_model_that_cannot_share_its_state_is_refused_by_name(
    name: str, changes: dict, what: str
) -> None:
    model = random_model(name, **changes)
    with pytest.raises(UnsupportedModelError, match=f"{name}.*{what}.*mlx_lm"):
        Target(model)


def test_output_rows_are_the_models_own_output_layer() -> None:
    for name in {"llama", "llama (mistral-style)", "internlm2"} & set(ARCHITECTURES):
        model = random_model(name)
        target = Target(model)
        hidden = mx.random.normal((1, 3, target.hidden_size))
        some = mx.array([5, 90, 0])
        want = target.logits(hidden)
        np.testing.assert_allclose(target.output_rows()(hidden), want, rtol=1e-4, atol=1e-5)
        np.testing.assert_allclose(
            target.output_rows(some)(hidden), want[..., some], rtol=1e-4, atol=1e-5
        )


def test_vocabulary_and_hidden_size_are_the_models() -> None:
    target = Target(random_model("gemma"))
    assert (target.vocab_size, target.hidden_size) == (VOCAB, 32)


def test_a_target_that_is_let_go_frees_its_weights_without_a_garbage_collection() -> None:
    """Such collections are rare; a notebook would load a second model beside the first one."""
    gc.collect()
    gc.disable()
    try:
        before = mx.get_active_memory()
        model = random_model()
        mx.eval(model.parameters())
        target = Target(model)
        held = mx.get_active_memory()
        del model, target
        assert mx.get_active_memory() - before < 0.1 * (held - before)
    finally:
        gc.enable()


def test_a_device_that_fails_while_a_model_is_checked_is_one_of_our_errors(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def fail(*_: object) -> None:
        raise RuntimeError("[METAL] Command buffer execution failed: Insufficient Memory")

    monkeypatch.setattr("redrafter_mlx.target_model.tree_check.logits_of", fail)
    with pytest.raises(BusyError, match="out of memory"):
        check_trees(Target(random_model()))
