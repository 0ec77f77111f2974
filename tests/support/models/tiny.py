"""Tiny random models of real architectures, and drafters for them."""

from __future__ import annotations

import copy
import importlib
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType

import mlx.core as mx
import mlx.nn as nn
import pytest
from mlx_lm.generate import generate_step
from mlx_lm.tokenizer_utils import BPEStreamingDetokenizer, TokenizerWrapper
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from redrafter_mlx.drafting.files.forms import DrafterFolder
from redrafter_mlx.drafting.recurrent import RecurrentDrafter, RecurrentNetwork
from redrafter_mlx.drafting.recurrent_config import DrafterConfig
from redrafter_mlx.target_model.model import Target
from redrafter_mlx.target_model.source import TargetSource

VOCAB = 97
HIDDEN = 32

_COMMON = {
    "hidden_size": HIDDEN,
    "num_hidden_layers": 2,
    "intermediate_size": 64,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "rms_norm_eps": 1e-5,
    "vocab_size": VOCAB,
    "max_position_embeddings": 512,
    "rope_theta": 10000.0,
}

LLAMA3_ROPE = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}

ARCHITECTURES: dict[str, dict[str, object]] = {
    "llama": {},
    "llama (mistral-style)": {"head_dim": 16, "tie_word_embeddings": False},
    "llama (llama3 rope)": {"rope_scaling": LLAMA3_ROPE, "rope_traditional": True},
    "qwen2": {"tie_word_embeddings": True},
    "qwen3": {"head_dim": 8, "tie_word_embeddings": True},
    "phi3": {"original_max_position_embeddings": 512, "tie_word_embeddings": False},
    "gemma": {"head_dim": 8},
    "gemma2": {"head_dim": 8, "query_pre_attn_scalar": 8.0},
    "olmo2": {"head_dim": 8},
    "granite": {
        "logits_scaling": 4.0,
        "attention_multiplier": 0.35,
        "embedding_multiplier": 3.0,
        "residual_multiplier": 0.5,
        "attention_bias": False,
        "mlp_bias": False,
    },
    "stablelm": {
        "norm_eps": 1e-5,
        "layer_norm_eps": 1e-5,
        "use_qkv_bias": True,
        "partial_rotary_factor": 0.25,
    },
    "starcoder2": {"norm_epsilon": 1e-5, "tie_word_embeddings": True},
    "internlm2": {"bias": False, "tie_word_embeddings": False},
    "cohere": {"layer_norm_eps": 1e-5, "logit_scale": 0.5},
    "phi": {"layer_norm_eps": 1e-5, "partial_rotary_factor": 0.5},
    "glm4": {"head_dim": 8, "attention_bias": True, "partial_rotary_factor": 0.5},
    "exaone": {"num_layers": 2, "layer_norm_epsilon": 1e-5, "head_dim": 8},
    "helium": {"head_dim": 8, "attention_bias": False, "mlp_bias": False,
               "tie_word_embeddings": False},
    "minicpm": {"dim_model_base": 16, "scale_depth": 1.4, "scale_emb": 4.0},
    "qwen3_moe": {"head_dim": 8, "num_experts": 4, "num_experts_per_tok": 2,
                  "decoder_sparse_step": 1, "mlp_only_layers": [], "moe_intermediate_size": 32,
                  "norm_topk_prob": True, "tie_word_embeddings": False},
}  # fmt: skip


def random_model(name: str = "llama", seed: int = 0, **changes: object) -> nn.Module:
    """Return a model of an mlx-lm architecture, with weights large enough for distinct logits."""
    model_type = name.split(" ")[0]
    architecture = importlib.import_module(f"mlx_lm.models.{model_type}")
    given = {"model_type": model_type, **_COMMON, **ARCHITECTURES.get(name, {}), **changes}
    mx.random.seed(seed)
    model: nn.Module = architecture.Model(architecture.ModelArgs.from_dict(given))
    scaled = [
        (path, array * 2.0 if array.ndim > 1 else array)
        for path, array in nn.utils.tree_flatten(model.parameters())
    ]
    model.load_weights(scaled)
    mx.eval(model.parameters())
    return model


def truncated(model: nn.Module, layers: int) -> nn.Module:
    """Return the model's first layers, with its own embedding, norm and output layer."""
    less = copy.copy(model)
    less["model"] = copy.copy(model["model"])
    less["model"]["layers"] = model["model"]["layers"][:layers]
    return less


def random_drafter(seed: int = 0, **changes: object) -> RecurrentNetwork:
    """Return a drafter for `random_model` with random weights."""
    given: dict[str, object] = {
        "hidden_size": HIDDEN,
        "vocab_size": VOCAB,
        "exit_dim": 48,
        "num_draft_layers": 2,
        "rnn": True,
    }
    mx.random.seed(seed)
    drafter = RecurrentNetwork(DrafterConfig.from_dict({**given, **changes}))
    mx.eval(drafter.parameters())
    return drafter


def load_drafter(folder: Path, target: Target) -> RecurrentNetwork:
    """Return the network of the recurrent drafter in a folder."""
    drafter = DrafterFolder(folder).load(target)
    assert isinstance(drafter, RecurrentDrafter)
    return drafter.module


def plain_tokens(model: nn.Module, prompt: list[int], n: int) -> list[int]:
    """Return the tokens of mlx-lm's own greedy loop: the reference of every exactness test."""
    steps = generate_step(mx.array(prompt), model, max_tokens=n)
    return [int(token) for token, _ in steps]


CHAT_TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def byte_tokenizer() -> TokenizerWrapper:
    """Return a tokenizer of one token per byte, three control tokens, and a ChatML template."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    core = Tokenizer(models.BPE(vocab={c: i for i, c in enumerate(alphabet)}, merges=[]))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=core, eos_token="<|im_end|>", additional_special_tokens=["<|im_start|>"]
    )
    tokenizer.chat_template = CHAT_TEMPLATE
    return TokenizerWrapper(tokenizer, BPEStreamingDetokenizer)


def marked_tokenizer(
    parser: ModuleType, template: str, marks: Sequence[str] = (), special: bool = False
) -> TokenizerWrapper:
    """Return a tokenizer of bytes, and of marks of one token each, with a parser of mlx-lm."""
    fast = byte_tokenizer()._tokenizer
    fast.add_tokens([AddedToken(mark, special=special, normalized=False) for mark in marks])
    fast.chat_template = template
    return TokenizerWrapper(
        fast, BPEStreamingDetokenizer, tool_call_start=parser.tool_call_start,
        tool_call_end=parser.tool_call_end, tool_parser=parser.parse_tool_call,
    )  # fmt: skip


def byte_model(seed: int = 0, **changes: object) -> nn.Module:
    """Return a tiny model over `byte_tokenizer`'s vocabulary."""
    return random_model("llama", seed, vocab_size=258, **changes)


class Words:
    """A stand-in for a tokenizer with `size` tokens."""

    def __init__(self, size: int, **changed: int) -> None:
        self.vocabulary = {f"t{i}": i for i in range(size)} | changed

    def get_vocab(self) -> dict[str, int]:
        return self.vocabulary


def tiny_source(path: Path = Path("tiny"), fingerprint: str = "sha256:1") -> TargetSource:
    """Return the source of a tiny model, as if it had been loaded from `path`."""
    return TargetSource("tiny", path, fingerprint, "llama", "float32", None, None)


def targets_made(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Return the architectures of the targets that are made from now on."""
    made: list[str] = []
    make = Target.__init__

    def counted(target: Target, model: nn.Module, **kv: int) -> None:
        make(target, model, **kv)
        made.append(target.model_type)

    monkeypatch.setattr(Target, "__init__", counted)
    return made


WINDOW = 8
BOTH = ["sliding_attention", "full_attention"]

MINISTRAL_ROPE = {
    "rope_theta": 10000.0, "rope_type": "default", "llama_4_scaling_beta": 0.5,
    "original_max_position_embeddings": 6,
}  # fmt: skip

SLIDING: dict[str, dict[str, object]] = {
    "gemma3_text": {"head_dim": 8, "query_pre_attn_scalar": 8, "sliding_window_pattern": 2},
    "gemma4_text": {"head_dim": 8, "global_head_dim": 16, "num_hidden_layers": 4,
                    "num_kv_shared_layers": 2, "layer_types": 2 * BOTH,
                    "num_global_key_value_heads": 2, "hidden_size_per_layer_input": 4,
                    "vocab_size_per_layer_input": VOCAB, "tie_word_embeddings": True},
    "gpt_oss": {"head_dim": 8, "num_local_experts": 4, "num_experts_per_tok": 2},
    "olmo3": {"layer_types": BOTH},
    "cohere2": {"head_dim": 8, "sliding_window_pattern": 2, "logit_scale": 0.5},
    "exaone4": {"head_dim": 8, "sliding_window_pattern": "LG", "rope_scaling": None,
                "tie_word_embeddings": True},
    "ministral3": {"layer_types": BOTH, "rope_parameters": MINISTRAL_ROPE},
    "llama": {"layer_types": BOTH[::-1]},
}  # fmt: skip


def sliding_model(name: str, seed: int = 3, **changes: object) -> nn.Module:
    given = {"sliding_window": WINDOW, **SLIDING[name], **changes}
    return random_model(name, seed, **given)
