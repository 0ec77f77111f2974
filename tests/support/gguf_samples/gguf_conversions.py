"""Tensors of mlx-lm's classes as llama.cpp's converter writes them in GGUF files."""

from __future__ import annotations

import numpy as np


def without_last_axis(name: str, values: np.ndarray) -> np.ndarray:
    return values[..., 0] if name.endswith("conv.weight") else values


def tiled(values: np.ndarray, before: int = 0) -> np.ndarray:
    """Put value heads, three for each of two key heads, in the order of llama.cpp: k0 k1 k0 k1."""
    heads = values[before:].reshape(2, 3, -1, *values.shape[1:]).swapaxes(0, 1)
    return np.concatenate([values[:before], heads.reshape(-1, *values.shape[1:])])


def as_state_space(name: str, values: np.ndarray) -> np.ndarray:
    """Change parameters of Mamba 2's layers; norms have a row for each group of heads."""
    if name.endswith("A_log"):
        return -np.exp(values)[:, None]
    if name.endswith(".D"):
        return values[:, None]
    if name.endswith(("mixer.norm.weight", "mamba.norm.weight")):
        return values.reshape(2 if "mixer" in name else 1, -1)
    return values[..., 0] if name.endswith("conv1d.weight") else values


def as_granite_hybrid(name: str, values: np.ndarray) -> np.ndarray | dict[str, np.ndarray]:
    if "input_linear" in name:
        stem = name.replace("shared_mlp.input_linear.weight", "mlp.shared_experts.")
        gates, others = np.split(values, 2)
        return {f"{stem}gate_proj": gates, f"{stem}up_proj": others}
    return as_state_space(name, values)


def as_nemotron(name: str, values: np.ndarray) -> np.ndarray | dict[str, np.ndarray]:
    if "switch_mlp" in name:
        stem = name.replace("backbone", "model").partition("mixer")[0]
        part = "up" if "fc1" in name else "down"
        return {f"{stem}mlp.experts.{part}_proj": values}
    return as_state_space(name, values)


def as_deepseek2(name: str, values: np.ndarray) -> np.ndarray | dict[str, np.ndarray]:
    """Part keys and values of each head, and transpose the keys."""
    if "kv_b_proj" not in name:
        return values
    heads = values.reshape(4, 32 + 16, -1)
    return {
        name.replace("kv_b_proj.weight", "k_b_proj"): heads[:, :32].swapaxes(1, 2),
        name.replace("kv_b_proj.weight", "v_b_proj"): heads[:, 32:],
    }


def as_jamba(name: str, values: np.ndarray) -> np.ndarray:
    if name.endswith("A_log"):
        return -np.exp(values)
    return values[..., 0] if name.endswith("conv1d.weight") else values


def as_kimi_linear(name: str, values: np.ndarray) -> np.ndarray:
    """Change shapes of convolutions and decays to four axes."""
    if name.endswith("A_log"):
        return -np.exp(values)
    return values[..., 0][None, :, None] if name.endswith("conv.weight") else values


def as_ling(name: str, values: np.ndarray) -> np.ndarray | dict[str, np.ndarray]:
    """Part queries, keys and values, and permute the first two."""
    if "query_key_value" not in name:
        return values
    stem = name.replace("attention.query_key_value.weight", "self_attn.")
    q, k, v = np.split(values, [64, 96])
    q, k = (x.reshape(-1, 2, 8, 64).swapaxes(1, 2).reshape(x.shape) for x in (q, k))
    return {f"{stem}q_proj": q, f"{stem}k_proj": k, f"{stem}v_proj": v}


def as_qwen35(name: str, values: np.ndarray) -> np.ndarray:
    module = name.split("linear_attn.")[-1].removesuffix(".weight")
    if module == "A_log":
        return tiled(-np.exp(values))
    if module in ("dt_bias", "in_proj_a", "in_proj_b", "in_proj_z"):
        return tiled(values)
    if module in ("in_proj_qkv", "conv1d"):
        rows = tiled(values, 2 * 2 * 32)
        return rows[..., 0] if module == "conv1d" else rows
    if module == "out_proj":
        return tiled(values.T).T
    return values[0] if module.endswith("shared_expert_gate") else values


def as_qwen3_next(name: str, values: np.ndarray) -> np.ndarray | dict[str, np.ndarray]:
    """Part the rows of each key head: queries, keys and three value heads; gates of the latter."""
    module = name.split("linear_attn.")[-1].removesuffix(".weight")
    if module == "A_log":
        return -np.exp(values)
    if module == "conv1d":
        return values[..., 0]
    if module == "in_proj_qkvz":
        heads = values.reshape(2, -1, values.shape[-1])
        q, k, v, z = (
            part.reshape(-1, values.shape[-1]) for part in np.split(heads, [32, 64, 160], axis=1)
        )
        stem = name.removesuffix("qkvz.weight")
        return {f"{stem}qkv": np.concatenate([q, k, v]), f"{stem}z": z}
    return values[0] if module.endswith("shared_expert_gate") else values
