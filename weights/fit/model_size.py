"""Size of a model in bytes, from its configuration alone."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace
from math import prod
from typing import NamedTuple

from redrafter_mlx.weights.gguf.config import gguf_config
from redrafter_mlx.weights.gguf.header import BITS, GGUFHeader
from redrafter_mlx.weights.raw_model import context_length

GROUP_SIZE = 64
"""Number of weights that share a scale and a bias, under `quantize` and in most repositories."""

_DRAFT_VOCAB = 32_000  # number of tokens in the draft vocabulary of published EAGLE-3 drafters

_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
"""Keys of config.json for the number of experts, by architecture."""

_RECURRENT = (
    *("linear_num_value_heads", "linear_attn_config", "layer_group_size"),
    *("mamba_d_state", "ssm_state_size", "state_size", "conv_L_cache"),
    *("decay_low_rank_dim", "conv1d_width", "conv_window"),  # RWKV 7, RecurrentGemma, Baichuan M1
)
"""Keys of config.json for the size of recurrent layers, by architecture."""


_UNGATED = ("gpt_neox", "nemotron", "phi", "starcoder2")
"""Architectures whose feed-forward networks have no gate."""


_PATTERNS = {
    "cohere2": 4, "exaone4": 0, "gemma3": 6, "gemma3_text": 6, "gemma3n": 0, "gemma3n_text": 0,
    "gemma4": 5, "gemma4_text": 5, "gpt_oss": 2, "llama": 0, "ministral3": 0, "mistral": 0,
    "mistral3": 0, "olmo3": 0,
}  # fmt: skip
"""Architectures whose layers keep windows in mlx-lm. If the configuration does not say which do:
all but every such one, or none for 0."""


class Windows(NamedTuple):
    """Number of layers with a sliding window, and its size."""

    layers: int
    size: int


NO_WINDOWS = Windows(0, 0)


def windows_of(config: Mapping[str, object], layers: int) -> Windows:
    """Return how many of the layers keep a window alone; none where that is not known."""
    size, kind = config.get("sliding_window"), config.get("model_type")
    if type(size) is not int or size <= 0 or kind not in _PATTERNS:
        return NO_WINDOWS
    kinds, pattern = config.get("layer_types"), config.get("sliding_window_pattern")
    if isinstance(kinds, list):
        return Windows(kinds[:layers].count("sliding_attention"), size)
    if isinstance(pattern, str) and pattern:  # such as LLLG
        return Windows(sum(pattern[i % len(pattern)] == "L" for i in range(layers)), size)
    every = pattern if type(pattern) is int else _PATTERNS[str(kind)]
    return Windows(layers - layers // every if every > 0 else 0, size)


@dataclass(frozen=True)
class ModelSize:
    """Dimensions of a decoder."""

    layers: int
    hidden: int
    intermediate: int
    heads: int  # of queries, of `head_dim` each
    kv_heads: int  # of keys and values
    head_dim: int
    vocab: int
    tied: bool = False  # whether the head is the embedding
    gated: bool = True  # whether the feed-forward network has a gate, a third matrix
    windows: Windows = NO_WINDOWS  # the layers that keep a sliding window of the text alone
    total: int = 0  # parameters of a mixture or hybrid; 0: it follows from the others
    recurrent: int = 0  # number of layers that keep a state in place of keys and values

    @property
    def mostly_embedding(self) -> bool:
        """Whether more than half of the parameters are the embedding, and the head if it has one.

        Of such a model, 4 bits change the text much more than of others.
        """
        return 2 * self.embedding_parameters > self.parameters

    @property
    def embedding_parameters(self) -> int:
        """Number of parameters of the embedding, and of the head if it has one."""
        return self.hidden * self.vocab * (1 if self.tied else 2)

    @property
    def layer_parameters(self) -> int:
        """Number of parameters in a dense layer's matrices; norms are too small to matter."""
        attention = 2 * self.hidden * self.head_dim * (self.heads + self.kv_heads)
        return attention + (3 if self.gated else 2) * self.hidden * self.intermediate

    @property
    def parameters(self) -> int:
        """Number of parameters in all matrices."""
        return self.total or self.embedding_parameters + self.layers * self.layer_parameters

    def weight_bytes(self, bits: int | None, float_bytes: int = 2) -> int:
        """Return the size of all weights, as floats or quantised to `bits`.

        float_bytes: size of a float, or of a scale and of a bias
        """
        each = 8 * float_bytes if bits is None else quantised_bits(bits, float_bytes)
        return round(self.parameters * each / 8)

    def cache_bytes(self, tokens: int, float_bytes: int = 2, kv_bits: int | None = None) -> int:
        """Return the size of the KV cache of `tokens` tokens; windows are not quantised."""
        in_windows, size = self.windows
        bits = 8 * float_bytes if kv_bits is None else quantised_bits(kv_bits, float_bytes)
        whole = (self.layers - in_windows - self.recurrent) * tokens
        windows = in_windows * min(tokens, size)
        numbers = 2 * self.kv_heads * self.head_dim
        return round(numbers * (whole * bits / 8 + windows * float_bytes))

    @property
    def drafter_bytes(self) -> int:
        """Approximate size of a published drafter: EAGLE-3's layer, features, head, in 16 bits."""
        return 2 * (self.layer_parameters + self.hidden * (3 * self.hidden + _DRAFT_VOCAB))


@dataclass(frozen=True)
class StoredModel:
    """A model as its files hold it."""

    size: ModelSize
    bits: int | None  # of its quantised weights, None for floats
    nbytes: int  # size of the weights as stored
    context: int | None = None  # maximum number of tokens, prompt and answer; None if unknown

    def planned(self, context: int) -> int:
        """Return the number of tokens to plan for: `context`, or all that the model can have."""
        return context if self.context is None else min(context, self.context)


def quantised_bits(bits: int, float_bytes: int = 2) -> float:
    """Return the bits that a quantised weight takes with its share of the scale and the bias."""
    return bits + 2 * 8 * float_bytes / GROUP_SIZE


def bits_of_drafter(asked: int | None, target: int | None) -> int | None:
    """Return the bits (4, 8, None: as stored) for a drafter: those asked for, or the target's."""
    if asked is None:
        return None if target is None else 4 if target <= 4 else 8
    return None if asked == 16 else asked


def of_config(config: Mapping[str, object], nbytes: int) -> StoredModel | None:
    """Return a model's sizes, from config.json; None if it is not a dense decoder's.

    nbytes: size of the weight files
    """

    text = config.get("text_config")  # of a model that reads pictures too
    config = {**config, **text} if isinstance(text, Mapping) else config

    def whole(name: str, default: int = 0) -> int:
        value = config.get(name)
        return value if isinstance(value, int) and value > 0 else default

    heads = whole("num_attention_heads")
    if not heads or any(config.get(name) not in (None, 0, 1) for name in _EXPERTS):
        return None
    if any(config.get(name) for name in _RECURRENT):
        return None
    size = ModelSize(
        layers=whole("num_hidden_layers"),
        hidden=whole("hidden_size"),
        intermediate=whole("intermediate_size"),
        heads=heads,
        kv_heads=whole("num_key_value_heads", heads),
        head_dim=whole("head_dim", whole("hidden_size") // heads),
        vocab=whole("vocab_size"),
        tied=config.get("tie_word_embeddings", True) is True,  # transformers leaves it out if so
        gated=config.get("model_type") not in _UNGATED,
        windows=windows_of(config, whole("num_hidden_layers")),
    )
    if not all((size.layers, size.hidden, size.intermediate, size.vocab)):
        return None
    quantization = config.get("quantization") or config.get("quantization_config")
    bits = quantization.get("bits") if isinstance(quantization, dict) else None
    bits = bits if isinstance(bits, int) else None
    return StoredModel(size, bits, nbytes, context_length(config))


def of_gguf(header: GGUFHeader) -> StoredModel | None:
    """Return a model's sizes, from a GGUF file's header; None if it is not a dense decoder's."""
    nbytes, quantised = 0, Counter[int]()
    for tensor in header.tensors.values():
        count, bits = prod(tensor.shape), BITS.get(tensor.type)
        if bits is not None:
            quantised[bits] += count
        nbytes += count * (32 if tensor.type == "F32" else 16 if bits is None else bits + 1) // 8
    known = of_config(gguf_config(header), nbytes)
    if known is None or not quantised:
        return known
    return replace(known, bits=quantised.most_common(1)[0][0])
