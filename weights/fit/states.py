"""Size of a sequence's recurrent state, from a model's configuration alone."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple


class _Layer(NamedTuple):
    """One recurrent layer: numbers in float32, and in the model's own precision."""

    state: int  # of the recurrence
    window: int  # of its convolution's newest inputs


def state_bytes(config: Mapping[str, object], float_bytes: int = 2) -> int | None:
    """Return the bytes of one sequence's recurrent states; None if there are none, or not known.

    They do not grow with the text. Known are Qwen3-Next and 3.5, OLMo-Hybrid, Granite 4,
    Nemotron-H, Falcon-H1 and LFM2.

    float_bytes: of the model's own numbers
    """
    text = config.get("text_config")
    config = {**config, **text} if isinstance(text, Mapping) else config

    def size(name: str) -> int:
        value = config.get(name)
        return value if type(value) is int and value > 0 else 0

    layers = size("num_hidden_layers")
    if heads := size("linear_num_value_heads"):
        key, value = size("linear_key_head_dim"), size("linear_value_head_dim")
        channels = 2 * size("linear_num_key_heads") * key + heads * value
        each = _Layer(heads * value * key, (size("linear_conv_kernel_dim") - 1) * channels)
        interval = size("full_attention_interval") or 4
        count = _named(config, "linear_attention", layers - layers // interval)
    elif heads := size("mamba_n_heads"):  # Granite 4, Falcon-H1
        each = _mamba(heads, size("mamba_d_head"), size("mamba_d_state"), size("mamba_n_groups"),
                      size("mamba_d_conv"))  # fmt: skip
        count = _named(config, "mamba", layers)
    elif heads := size("mamba_num_heads"):  # Nemotron-H
        each = _mamba(heads, size("mamba_head_dim"), size("ssm_state_size"), size("n_groups"),
                      size("conv_kernel"))  # fmt: skip
        pattern = config.get("hybrid_override_pattern")
        count = pattern.count("M") if isinstance(pattern, (str, list)) else 0
    elif width := size("conv_L_cache"):
        each = _Layer(0, (width - 1) * size("hidden_size"))
        full = config.get("full_attn_idxs")
        count = _named(config, "conv", layers - len(full) if isinstance(full, list) else 0)
    else:
        return None
    return count * (4 * each.state + float_bytes * each.window) or None


def _mamba(heads: int, head: int, state: int, groups: int, kernel: int) -> _Layer:
    channels = heads * head + 2 * groups * state
    return _Layer(heads * head * state, (kernel - 1) * channels)


def _named(config: Mapping[str, object], kind: str, otherwise: int) -> int:
    """Return how many of the layers are of a kind, if the configuration has a list of them."""
    kinds = config.get("layer_types")
    return kinds.count(kind) if isinstance(kinds, list) else otherwise
