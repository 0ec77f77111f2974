"""Drafts that the target cannot compute: the text is that of plain decoding, and of mlx-lm."""

from __future__ import annotations

import math

import mlx.core as mx
import mlx.nn as nn
import pytest
from hybrids import HYBRIDS
from mlx.utils import tree_map
from tiny import byte_tokenizer, plain_tokens, random_model

from redrafter_mlx.config import BeamShape
from redrafter_mlx.drafting.interface import Drafter, Memory, Seen
from redrafter_mlx.engine.engine import Redrafter
from redrafter_mlx.speculation.beams import Beams

VOCAB, BAD, N = 258, 200, 30
SHORT, LONG = [3, 5, 7, 3], [(7 * i + 3) % 199 for i in range(150)]
YARN = {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}
LATENT: dict[str, object] = {
    "num_key_value_heads": 4, "kv_lora_rank": 8, "q_lora_rank": 8, "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8, "v_head_dim": 8, "n_routed_experts": None, "rope_scaling": YARN,
}  # fmt: skip
MODELS: dict[str, dict[str, object]] = {
    "llama": {"tie_word_embeddings": False},
    # scores without a fused kernel
    "gemma2": {"head_dim": 8, "query_pre_attn_scalar": 8.0},
    # sliding windows
    "olmo3": {
        "head_dim": 8,
        "sliding_window": 16,
        "layer_types": ["sliding_attention", "full_attention"],
    },
    # masks that are added to scores, and keys that are values
    "deepseek_v3": LATENT,
    "deepseek_v2": LATENT,
    # the experts of each position
    "qwen3_moe": {},
    # a recurrent state
    "qwen3_5": HYBRIDS["qwen3_5"],
}


class Guesses(Drafter):
    """Drafts the text to come, and the bad token in its place from one position on, in turn."""

    def __init__(self) -> None:
        self.text: list[int] = []

    def draft(self, memory: Memory, seen: Seen, shape: BeamShape) -> tuple[Beams, Memory]:
        B, W, L = seen.root.shape[0], shape.width, shape.length
        depth, beam, position = mx.arange(L), mx.arange(W)[:, None], seen.root_position
        known = mx.array([*self.text, *[0] * L])[
            mx.minimum(position[:, None] + depth, len(self.text))
        ]
        begins = 1 + (position[:, None, None] + beam) % (L + 1)
        tokens = mx.where(depth >= begins, BAD, known[:, None])
        tokens = mx.where(depth == 0, seen.root[:, None, None], tokens)
        return Beams(tokens, mx.broadcast_to(-depth.astype(mx.float32), (B, W, L))), memory


class OneBadRow(nn.Embedding):
    """An embedding with one bad row, and a good one where it is the output layer."""

    row = math.nan

    def __call__(self, tokens: mx.array) -> mx.array:
        bad = mx.array(self.row, self.weight.dtype)
        return mx.where(tokens[..., None] == BAD, bad, super().__call__(tokens))

    def as_linear(self, x: mx.array) -> mx.array:
        return super().as_linear(x) * (mx.arange(VOCAB) != BAD)


def broken(name: str, row: float, dtype: mx.Dtype = mx.float32) -> nn.Module:
    """Return a model whose embedding of a token, which it does not choose, is filled with `row`.

    In float16 a row of large numbers overflows in the first layers.
    """
    model = random_model(name, seed=1, vocab_size=VOCAB, **MODELS[name])
    if "lm_head" in model:
        head = model.lm_head.weight
        model.lm_head.weight = mx.where(mx.arange(VOCAB)[:, None] == BAD, 0, head)
    model.update(tree_map(lambda a: a.astype(dtype), model.parameters()))
    if dtype == mx.float16:
        down = model.layers[0].mlp.down_proj
        down.weight = 100 * down.weight
    table = model.model.embed_tokens
    table.__class__, table.row = OneBadRow, row
    mx.eval(model.parameters())
    return model


class OverflowsAt(nn.Module):
    """A projection that overflows in some columns for one input."""

    def __init__(self, inner: nn.Module, at: mx.array, columns: slice) -> None:
        super().__init__()
        self.inner, self.at, self.columns = inner, at, columns

    def __call__(self, x: mx.array) -> mx.array:
        out, far = self.inner(x), mx.max(mx.abs(x - self.at), axis=-1, keepdims=True)
        columns = mx.arange(out.shape[-1])
        inside = (columns >= self.columns.start) & (columns < self.columns.stop)
        return mx.where((far < 1e-5) & inside, math.inf, out)


CASES = [
    *((name, math.nan, mx.float32) for name in MODELS),
    ("llama", math.inf, mx.float32),
    ("llama", math.nan, mx.float16),
    ("llama", 65504.0, mx.float16),
]


@pytest.mark.parametrize("shape", [(1, 4), (3, 5)], ids=str)
@pytest.mark.parametrize(("name", "row", "dtype"), CASES, ids=str)
def test_a_draft_that_is_not_finite_changes_nothing(
    name: str, row: float, dtype: mx.Dtype, shape: tuple[int, int]
) -> None:
    model, drafter = broken(name, row, dtype), Guesses()
    engine = Redrafter(model, byte_tokenizer(), drafter)
    for prompt in (SHORT, LONG):
        tokens = plain_tokens(model, prompt, N)
        assert not {0, BAD} & {*tokens}
        drafter.text = prompt + tokens
        found = engine.generate(
            prompt, raw=True, max_tokens=N, beam_width=shape[0], beam_length=shape[1]
        )
        assert list(found.token_ids) == tokens[: len(found.token_ids)]
        assert found.tokens_per_step > 1.3


def test_other_sequences_and_later_texts_are_not_changed_either() -> None:
    """In one batch, in a cache that a later prompt shares, and after drafting has ended."""
    model, drafter = broken("llama", math.nan), Guesses()
    engine = Redrafter(model, byte_tokenizer(), drafter)
    prompts = [SHORT, LONG, [*SHORT, 9], LONG[:40]]
    expected = [plain_tokens(model, prompt, N) for prompt in prompts]
    drafter.text = SHORT + expected[0]
    found: list[list[int]] = [[] for _ in prompts]
    for i, response in engine.batch(prompts, raw=True, max_tokens=N, beam_width=3, beam_length=4):
        found[i].append(response.token)
    for got, want in zip(found, expected, strict=True):
        assert got == want[: len(got)]
    for prompt, tokens in zip(prompts, expected, strict=True):
        longer = [*prompt, *tokens[:10]]
        again = engine.generate(longer, raw=True, max_tokens=10, draft=False)
        assert list(again.token_ids) == tokens[10 : 10 + len(again.token_ids)]


@pytest.mark.parametrize("shape", [(1, 4), (3, 5)], ids=str)
@pytest.mark.parametrize("row", [math.nan, math.inf])
def test_if_the_target_chooses_such_a_token_the_text_is_still_that_of_plain_decoding(
    row: float, shape: tuple[int, int]
) -> None:
    """It is token 0 from there on, in mlx-lm as well, whether or not the token was drafted."""
    model, drafter = broken("llama", row), Guesses()
    engine = Redrafter(model, byte_tokenizer(), drafter)
    fine = plain_tokens(model, SHORT, N)
    table = model.model.embed_tokens
    for at in range(8, 16):
        if fine[at] in (*SHORT, *fine[:at]):
            continue
        table.weight = mx.where(mx.arange(VOCAB)[:, None] == fine[at], row, table.weight)
        tokens = plain_tokens(model, SHORT, N)
        assert tokens == fine[: at + 1] + [0] * (N - at - 1)
        engine = Redrafter(model, byte_tokenizer(), drafter)
        drafter.text = SHORT + tokens
        found = engine.generate(
            SHORT, raw=True, max_tokens=N, beam_width=shape[0], beam_length=shape[1]
        )
        assert list(found.token_ids) == tokens
        return
    pytest.fail("no token came for the first time")


UNTIED = {"tie_word_embeddings": False}
WRITES = {
    "keys of the delta rule": ("qwen3_5", "linear_attn", "in_proj_qkv", slice(16, 32)),
    "values of the delta rule": ("qwen3_5", "linear_attn", "in_proj_qkv", slice(32, 56)),
    "writes of a state space": ("mamba2", "mixer", "in_proj", slice(128, 140)),
    "values of a fixed decay": ("bailing_hybrid", "attention", "query_key_value", slice(64, 96)),
}


@pytest.mark.parametrize("case", WRITES)
def test_no_draft_is_accepted_if_a_recurrent_layer_overflows_at_it(case: str) -> None:
    """Other nodes read 0 in its place, and so would the text after it."""
    name, layer, projection, columns = WRITES[case]
    model = random_model(name, seed=1, **{**HYBRIDS[name], "vocab_size": VOCAB, **UNTIED})
    drafter = Guesses()
    fine = plain_tokens(model, SHORT, N)
    at = next(i for i in range(8, N) if fine[i] not in (*SHORT, *fine[:i]))
    first = model.layers[0]
    norm = first["input_layernorm" if "input_layernorm" in first else "norm"]
    mixer, seen = first[layer], norm(embedded(model, fine[at]))
    mixer[projection] = OverflowsAt(mixer[projection], seen, columns)
    tokens = plain_tokens(model, SHORT, N)
    assert tokens[: at + 1] == fine[: at + 1]
    assert tokens != fine
    engine = Redrafter(model, byte_tokenizer(), drafter)
    drafter.text = SHORT + tokens
    found = engine.generate(SHORT, raw=True, max_tokens=N, beam_width=3, beam_length=5)
    assert list(found.token_ids) == tokens


def embedded(model: nn.Module, token: int) -> mx.array:
    tables = (module for _, module in model.named_modules() if isinstance(module, nn.Embedding))
    return next(tables)(mx.array(token))
