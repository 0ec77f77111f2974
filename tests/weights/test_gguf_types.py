"""Every supported block type of GGUF gives the numbers of the `gguf` package's own reader."""

from __future__ import annotations

from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest
from weights_samples import gguf_metadata, gguf_tensors, llama_model, write_gguf

from redrafter_mlx.loading.target import load_target
from redrafter_mlx.weights.gguf.header import BITS, READABLE, read_header
from redrafter_mlx.weights.gguf.tensors import GROUP_SIZE, read_tensors

gguf = pytest.importorskip("gguf")

# Byte offsets of the float16 scales in a block.
SCALES = {
    "Q4_0": [0], "Q4_1": [0, 2], "Q5_0": [0], "Q5_1": [0, 2], "Q8_0": [0], "Q4_K": [0, 2],
    "Q5_K": [0, 2], "Q6_K": [208],
}  # fmt: skip


def random_blocks(kind: str, weights: int) -> tuple[int, bytes]:
    """Return GGUF's number of a type, and random codes with random finite scales."""
    draw = np.random.default_rng(7)
    number = gguf.GGMLQuantizationType[kind]
    held, size = gguf.GGML_QUANT_SIZES[number]
    if kind == "F32":
        return int(number), draw.normal(size=weights).astype(np.float32).tobytes()
    if kind in ("F16", "BF16"):
        values = draw.normal(size=weights).astype(np.float32)
        half = values.astype(np.float16) if kind == "F16" else values.view(np.uint16)[1::2]
        return int(number), half.tobytes()
    blocks = draw.integers(0, 256, (weights // held, size), np.uint8)
    if kind == "MXFP4":  # the first byte is an exponent
        blocks[:, 0] = draw.integers(100, 150, len(blocks))
        return int(number), blocks.tobytes()
    for at in SCALES[kind]:
        scale = draw.normal(size=(len(blocks), 1)).astype(np.float16)
        blocks[:, at : at + 2] = scale.view(np.uint8)
    return int(number), blocks.tobytes()


def judged(kind: str, data: bytes) -> np.ndarray:
    """Return the numbers that the `gguf` package reads, in float32."""
    if kind == "F32":
        return np.frombuffer(data, np.float32)
    if kind == "F16":
        return np.frombuffer(data, np.float16).astype(np.float32)
    blocks = np.frombuffer(data, np.uint8)[None]
    return gguf.quants.dequantize(blocks, gguf.GGMLQuantizationType[kind]).reshape(-1)


@pytest.mark.parametrize("kind", READABLE)
def test_a_tensor_of_every_type_is_bit_for_bit_that_of_the_gguf_package(
    tmp_path: Path, kind: str
) -> None:
    number, data = random_blocks(kind, 5 * 768)
    path = write_gguf(tmp_path / "m.gguf", gguf_metadata(), {"t.weight": ((5, 768), number, data)})
    arrays = read_tensors(read_header(path).tensors)
    got = arrays["t.weight"]
    if kind == "MXFP4":
        got = mx.dequantize(got, arrays["t.scales"], None, GROUP_SIZE, 4, "mxfp4")
    elif kind in BITS:
        scales, biases = (arrays[f"t.{p}"].astype(mx.float32) for p in ("scales", "biases"))
        got = mx.dequantize(got, scales, biases, GROUP_SIZE, BITS[kind])
    np.testing.assert_array_equal(np.array(got.astype(mx.float32)).reshape(-1), judged(kind, data))


def test_a_model_of_mixed_types_is_loaded_with_the_numbers_of_its_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The mix is that of Q4_K_M: most matrices Q4_K, some Q6_K, norms float32."""
    monkeypatch.setattr("redrafter_mlx.weights.precision.backend", lambda: "cpu")
    changes = {"hidden_size": 256, "intermediate_size": 512}
    tensors = gguf_tensors(llama_model(**changes))
    of = {"attn_v": "Q6_K", "ffn_down": "Q6_K", "ffn_up": "Q5_K", "token_embd": "Q4_K"}
    for name, (shape, _, _) in list(tensors.items()):
        if len(shape) == 2:
            kind = of.get(name.split(".")[-2], "Q4_K")
            number, data = random_blocks(kind, shape[0] * shape[1])
            tensors[name] = (shape, number, data)
    metadata = gguf_metadata(llama__embedding_length=256, llama__feed_forward_length=512)
    loaded = load_target(write_gguf(tmp_path / "m.gguf", metadata, tensors))
    layer = loaded.model.layers[1]
    for name, module in (
        ("blk.1.ffn_up", layer.mlp.up_proj),
        ("blk.1.attn_v", layer.self_attn.v_proj),
        ("token_embd", loaded.model.model.embed_tokens),
    ):
        shape, number, data = tensors[f"{name}.weight"]
        want = judged(gguf.GGMLQuantizationType(number).name, data).reshape(shape)
        assert module.weight.dtype == mx.float32
        np.testing.assert_array_equal(np.array(module.weight), want, err_msg=name)
