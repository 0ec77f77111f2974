"""Architectures that keep, place or call something in their own way, against mlx-lm's own loop."""

from __future__ import annotations

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from batches import Decoded, finish
from decoding import run
from latent import LATENT, SPARSE
from tiny import VOCAB, byte_tokenizer, plain_tokens, random_model
from trees import assert_tree_equals_sequences

from redrafter_mlx.config import BeamShape, SamplingParams
from redrafter_mlx.decoding.pipeline import Pipeline
from redrafter_mlx.decoding.sequence import FixedPolicy
from redrafter_mlx.decoding.step import Decoder
from redrafter_mlx.drafting.draft_model import DraftModel
from redrafter_mlx.drafting.oracle import Oracle
from redrafter_mlx.drafting.untrained.ngram import Lookup
from redrafter_mlx.engine.engine import Redrafter
from redrafter_mlx.errors import UnsupportedModelError
from redrafter_mlx.target_model.model import Target
from redrafter_mlx.target_model.tree_check import check_trees

GREEDY = SamplingParams()
SHAPE = BeamShape(3, 4)


def blocks(*kinds: str) -> dict[str, object]:
    """Return layers of a nemotron-nas: with attention, a linear map in its place, or neither."""
    return {
        "num_hidden_layers": len(kinds),
        "block_configs": [
            {
                "attention": {
                    "no_op": kind == "none",
                    "replace_with_linear": kind == "linear",
                    "n_heads_in_group": 2 if kind == "attention" else None,
                },
                "ffn": {"no_op": False, "replace_with_linear": False, "ffn_mult": 1.0},
            }
            for kind in kinds
        ],
    }


OTHERS: dict[str, dict[str, object]] = {
    # grouped scores without a fused kernel, which take other row masks
    "gemma2": {"head_dim": 8, "query_pre_attn_scalar": 8.0},
    # the output layer among the layers
    "gpt_neox": {"layer_norm_eps": 1e-5, "rotary_emb_base": 10000, "rotary_pct": 0.25},
    # a backbone that is called with inputs=...
    "gptj": {"n_embd": 32, "n_head": 4, "n_layer": 2, "n_positions": 512, "rotary_dim": 4},
    "minimax": {"num_experts_per_tok": 2, "num_local_experts": 4, "shared_intermediate_size": 32,
                "rotary_dim": 4, "head_dim": 8},
    # layers without positions
    "smollm3": {"no_rope_layer_interval": 2},
    # rotary embeddings of their own
    "hunyuan_v1_dense": {"rope_scaling": {"type": "dynamic", "alpha": 50.0, "factor": 1.0}},
    # two caches for each layer
    "nanbeige": {"head_dim": 8, "num_loops": 2},
    # layers that keep no keys
    "nemotron-nas": blocks("linear", "attention", "none", "attention"),
    # latent attention, expanded in the cache, and compressed in it
    "deepseek_v2": LATENT,
    "minicpm3": {**LATENT, "dim_model_base": 16, "scale_depth": 1.4, "scale_emb": 4.0,
                 "tie_word_embeddings": True,
                 "rope_scaling": {"type": "longrope", "original_max_position_embeddings": 512,
                                  "short_factor": [1.0] * 4, "long_factor": [1.5] * 4}},
    "deepseek_v3": LATENT,
    # two attentions in a layer, and attention to those keys alone that an indexer chooses
    "longcat_flash": {**LATENT, "attention_method": "MLA", "zero_expert_type": "identity",
                      "ffn_hidden_size": 64, "moe_topk": 2, "expert_ffn_hidden_size": 32,
                      "n_routed_experts": 4, "zero_expert_num": 2, "num_layers": 2,
                      "mla_scale_q_lora": True, "mla_scale_kv_lora": True,
                      "routed_scaling_factor": 1.0, "attention_bias": False, "q_lora_rank": 8},
    "deepseek_v32": SPARSE,
    "glm_moe_dsa": SPARSE,
}  # fmt: skip


def model_of(name: str) -> nn.Module:
    return random_model(name, seed=3, **OTHERS[name])


@pytest.mark.parametrize("name", OTHERS)
def test_tree_logits_equal_sequential_logits_in_a_batch_of_different_rows(name: str) -> None:
    assert_tree_equals_sequences(model_of(name), batch=2, rtol=2e-4)


@pytest.mark.parametrize("name", OTHERS)
def test_tokens_equal_autoregression(name: str) -> None:
    model, prompt = model_of(name), [3, 5, 7]
    text = prompt + plain_tokens(model, prompt, 40)
    decoder = Decoder(Target(model), Oracle(text, VOCAB), SHAPE, GREEDY)
    emitted, results = run(decoder, prompt, 30)
    assert emitted == text[3:33]
    assert max(len(r.tokens) for r in results) == SHAPE.length


@pytest.mark.parametrize(
    "kinds", [("linear", "attention"), ("attention", "linear"), ("none", "linear", "attention")]
)
def test_layers_without_keys_may_be_anywhere_in_a_target_and_in_a_draft_model(
    kinds: tuple[str, ...],
) -> None:
    assert_answers(random_model("nemotron-nas", seed=1, vocab_size=258, **blocks(*kinds)))


@pytest.mark.parametrize("name", ["longcat_flash", "deepseek_v32"])
def test_a_model_with_two_caches_of_keys_in_a_layer_can_be_a_target_and_a_draft_model(
    name: str,
) -> None:
    assert_answers(random_model(name, seed=1, **{**OTHERS[name], "vocab_size": 258}))


def assert_answers(model: nn.Module) -> None:
    """Compare answers to a text, to cached ones, of a batch and without drafts with mlx-lm's."""
    tokenizer, prompt = byte_tokenizer(), [3, 5, 7, 11]
    text = prompt + plain_tokens(model, prompt, 24)
    redrafter = Redrafter(model, tokenizer, DraftModel(model, tokenizer))
    redrafter.check()
    shape = {"beam_width": 2, "beam_length": 3}
    for begun in (4, 4, 12):  # the later ones begin with a cached text
        answer = redrafter.stream(text[:begun], max_tokens=16, **shape)
        assert [response.token for response in answer] == text[begun : begun + 16]
    assert [*redrafter.generate(prompt, max_tokens=16, draft=False).token_ids] == text[4:20]
    prompts = [text[:4], text[:9]]
    answers: list[list[int]] = [[], []]
    for i, response in redrafter.batch(prompts, max_tokens=12, **shape):
        answers[i].append(response.token)
    assert answers == [text[4:16], text[9:21]]


@pytest.mark.parametrize("name", OTHERS)
def test_the_check_at_loading_passes(name: str) -> None:
    assert check_trees(Target(model_of(name))) < 1e-3


@pytest.mark.parametrize("kv_heads", [1, 2, 3])
def test_rows_of_a_model_with_grouped_scores_are_decoded_as_if_alone(kv_heads: int) -> None:
    """Also with as many rows as key heads, where a mask of the wrong form would fit."""
    heads = {"num_attention_heads": 6, "num_key_value_heads": kv_heads, "hidden_size": 48}
    model = random_model("gemma2", seed=3, **{**OTHERS["gemma2"], **heads})
    decoder = Decoder(Target(model), None, SHAPE, GREEDY, host_drafters=(Lookup(1),))
    rows = [Decoded(prompt, 20) for prompt in ([3, 5, 7, 3, 5], [9], [8, 8, 1])]
    batch = Pipeline(decoder, FixedPolicy(SHAPE))
    for row in rows:
        row.join(batch, decoder)
    finish(batch)
    for row in rows:
        assert row.emitted[:20] == plain_tokens(model, row.prompt, 20)


def test_an_output_layer_among_the_layers_is_the_targets() -> None:
    model = model_of("gpt_neox")
    target = Target(model)
    assert (target.vocab_size, target.hidden_size) == (VOCAB, 32)
    hidden, some = mx.random.normal((1, 3, 32)), mx.array([5, 90, 0])
    want = hidden @ model.model.embed_out.weight.T
    np.testing.assert_allclose(target.logits(hidden), want, rtol=1e-4, atol=1e-5)
    for rows in (target.output_rows(some), target.logits_of(some)):
        np.testing.assert_allclose(rows(hidden), want[..., some], rtol=1e-4, atol=1e-5)


def test_an_output_layer_that_cannot_be_taken_out_is_refused() -> None:
    changes = {"block_size": 64, "n_embd": 64, "n_head": 4, "n_kv_heads": 2, "n_layer": 2,
               "layer_norm_eps": 1e-5}  # fmt: skip
    with pytest.raises(UnsupportedModelError, match=r"lille-130m.*output layer"):
        Target(random_model("lille-130m", **changes))
