"""A GGUF file gives the model and tokenizer that it was made from, or a one-line error."""

from __future__ import annotations

import hashlib
import os
import struct
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest
from tiny import random_drafter
from weights_samples import (
    F16,
    F32,
    IQ2_S,
    Q4_1,
    Q8_0,
    gguf_metadata,
    gguf_tensors,
    llama_model,
    vocabulary,
    write_gguf,
)

from redrafter_mlx.config import DType
from redrafter_mlx.drafting.files.forms import DrafterFolder
from redrafter_mlx.drafting.files.installed import list_drafters
from redrafter_mlx.drafting.recurrent import save_drafter
from redrafter_mlx.errors import (
    DamagedFileError,
    MismatchError,
    RedrafterError,
    UnsupportedModelError,
)
from redrafter_mlx.loading.target import load_target
from redrafter_mlx.target_model.model import Target
from redrafter_mlx.weights.fetching.checksum import sha256_of
from redrafter_mlx.weights.gguf.fingerprint import gguf_fingerprint
from redrafter_mlx.weights.gguf.header import read_header
from redrafter_mlx.weights.gguf.load import load_gguf
from redrafter_mlx.weights.status import show_model
from redrafter_mlx.weights.text.chat import encode_text

PROMPT = mx.array([[5, 70, 12, 200, 9, 33, 101]])


@pytest.fixture
def sample(tmp_path: Path) -> Path:
    return write_gguf(tmp_path / "m.gguf", gguf_metadata(), gguf_tensors(llama_model(), Q4_1))


@pytest.mark.parametrize("tied", [True, False])
def test_float_gguf_gives_the_logits_of_the_model_it_was_made_from(
    tmp_path: Path, tied: bool
) -> None:
    model = llama_model(tie_word_embeddings=tied)
    path = write_gguf(tmp_path / "m.gguf", gguf_metadata(), gguf_tensors(model))
    loaded = load_target(path)
    got, want = loaded.model(PROMPT), model(PROMPT)
    assert mx.abs(got - want).max().item() < 1e-4 * mx.abs(want).max().item()
    assert loaded.source.bits is None


LLAMA3 = {
    "rope_type": "llama3", "factor": 32.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}  # fmt: skip


def frequency_factors(dims: int, base: float) -> np.ndarray:
    """Return the factors by which Llama 3 extends the wavelengths, as llama.cpp writes them."""
    waves = 2 * np.pi * base ** (np.arange(0, dims, 2) / dims)
    smooth = np.clip((8192 / waves - 1) / 3, 0, 1)
    return (1 / ((1 - smooth) / 32 + smooth)).astype(np.float32)


def test_the_rope_scaling_of_llama_3_is_found_in_its_frequencies(tmp_path: Path) -> None:
    model = llama_model(rope_scaling=LLAMA3, rope_theta=500_000.0)
    factors = frequency_factors(16, 500_000.0)
    assert any(1 < factor < 32 for factor in factors)
    tensors = gguf_tensors(model)
    tensors["rope_freqs.weight"] = ((8,), F32, factors.tobytes())
    metadata = gguf_metadata(llama__rope__freq_base=500_000.0)
    loaded = load_target(write_gguf(tmp_path / "m.gguf", metadata, tensors))
    late = mx.concatenate([PROMPT] * 12, axis=1)
    got, want = loaded.model(late), model(late)
    assert mx.abs(got - want).max().item() < 1e-4 * mx.abs(want).max().item()
    tensors["rope_freqs.weight"] = ((8,), F32, np.sqrt(factors).tobytes())
    with pytest.raises(UnsupportedModelError, match=r"rope_freqs\.weight"):
        load_gguf(write_gguf(tmp_path / "m.gguf", metadata, tensors))
    tensors["rope_freqs.weight"] = ((4,), F32, factors[:4].tobytes())
    with pytest.raises(DamagedFileError, match=r"rope_freqs\.weight"):
        load_gguf(write_gguf(tmp_path / "m.gguf", metadata, tensors))


@pytest.mark.parametrize(
    ("keys", "factor"),
    [
        ({"scale_linear": 4.0}, 4.0),
        ({"scaling.factor": 4.0}, 4.0),
        ({"scaling.factor": 2.0, "scale_linear": 4.0}, 2.0),
        ({"scaling.type": "linear", "scale_linear": 4.0}, 4.0),
        ({"scaling.type": "linear", "scaling.factor": 4.0}, 4.0),
        ({"scaling.type": "linear"}, None),
        ({"scaling.type": "none", "scale_linear": 4.0}, None),
        ({"scale_linear": 1.0}, None),
        ({"scale_linear": 0.0}, None),
        ({}, None),
    ],
)
def test_linear_rope_scaling_is_read_under_every_key_that_llama_cpp_reads(
    tmp_path: Path, keys: dict[str, object], factor: float | None
) -> None:
    scaling = None if factor is None else {"type": "linear", "factor": factor}
    model = llama_model(rope_scaling=scaling)
    metadata = gguf_metadata(**{f"llama__rope__{key}": value for key, value in keys.items()})
    loaded = load_target(write_gguf(tmp_path / "m.gguf", metadata, gguf_tensors(model)))
    late = mx.concatenate([PROMPT] * 12, axis=1)
    got, want = loaded.model(late), model(late)
    assert mx.abs(got - want).max().item() < 1e-4 * mx.abs(want).max().item()
    assert loaded.source.context_length == 128 * (factor or 1)


def test_quantised_file_asked_for_as_it_is_stays_quantised_on_a_cpu(
    sample: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("redrafter_mlx.weights.precision.backend", lambda: "cpu")
    dense, kept = load_target(sample), load_target(sample, quantize=4)
    assert (dense.source.bits, kept.source.bits) == (None, 4)
    assert dense.source.dtype == kept.source.dtype == "float32"
    assert "scales" in kept.model.layers[0].mlp.up_proj
    np.testing.assert_allclose(dense.model(PROMPT), kept.model(PROMPT), atol=1e-4)


@pytest.mark.parametrize("dtype", ["auto", "float16", "bfloat16", "float32"])
def test_quantised_file_stays_so_on_a_gpu(
    sample: Path, monkeypatch: pytest.MonkeyPatch, dtype: DType
) -> None:
    """The rules of a GPU are applied on this machine; the file's scales are float16."""
    monkeypatch.setattr("redrafter_mlx.weights.precision.backend", lambda: "cuda")
    loaded = load_target(sample, dtype=dtype)
    want = "float16" if dtype == "auto" else dtype
    assert (loaded.source.bits, loaded.source.dtype) == (4, want)
    assert str(loaded.model(PROMPT).dtype) == f"mlx.core.{want}"


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_dtype_asked_for_is_the_dtype_of_the_logits(sample: Path, dtype: DType) -> None:
    loaded = load_target(sample, dtype=dtype)
    assert loaded.source.dtype == dtype
    assert str(loaded.model(PROMPT).dtype) == f"mlx.core.{dtype}"


def test_a_fingerprint_is_of_the_contents_and_reads_few_of_them(sample: Path) -> None:
    """Of the metadata, of every tensor, and of no name or time."""
    before = load_target(sample).source.fingerprint
    again = sample.rename(sample.with_name("other.gguf"))
    os.utime(again, (1, 1))
    assert load_target(again).source.fingerprint == before
    found, header = {before}, read_header(again)
    for tensor in header.tensors.values():
        data = bytearray(again.read_bytes())
        data[tensor.start + tensor.nbytes // 2] ^= 1
        sample.write_bytes(data)
        found.add(gguf_fingerprint(read_header(sample)))
    tensors = gguf_tensors(llama_model(), Q4_1)
    write_gguf(sample, gguf_metadata(general__name="another"), tensors)
    found.add(gguf_fingerprint(read_header(sample)))
    assert len(found) == len(header.tensors) + 2


def test_a_drafter_that_names_the_checksum_of_a_whole_file_is_found(
    sample: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As trained before; a large file's checksum is remembered from then."""
    monkeypatch.setenv("REDRAFTER_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr("redrafter_mlx.weights.fetching.checksum.WORTH_REMEMBERING", 1000)
    whole = sha256_of(sample)
    target = load_target(sample)
    assert target.source.earlier_fingerprint == f"sha256:{whole}" != target.source.fingerprint
    sizes = {"hidden_size": 64, "vocab_size": 267}
    folders = {
        name: tmp_path / "cache" / "drafters" / name for name in ("earlier", "new", "other")
    }  # fmt: skip
    fingerprints = (f"sha256:{whole}", target.source.fingerprint, "sha256:of another")
    for folder, fingerprint in zip(folders.values(), fingerprints, strict=True):
        save_drafter(random_drafter(**sizes, target_fingerprint=fingerprint), folder)
    listed = {one.name for one in list_drafters(str(sample))}
    assert listed == {str(folders["earlier"]), str(folders["new"])}
    bound = Target(target.model)
    for name in ("earlier", "new"):
        assert DrafterFolder(folders[name], target.source).load(bound).name
    with pytest.raises(MismatchError, match="of another"):
        DrafterFolder(folders["other"], target.source).load(bound)


def test_a_large_file_is_not_read_to_be_hashed(
    sample: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("REDRAFTER_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr("redrafter_mlx.weights.fetching.checksum.WORTH_REMEMBERING", 1000)
    assert load_target(sample).source.earlier_fingerprint is None
    assert not (tmp_path / "cache" / "checksums").exists()
    digest = hashlib.sha256(sample.read_bytes()).hexdigest()
    blob = tmp_path / "models--org--name" / "blobs" / digest  # whose name says it
    blob.parent.mkdir(parents=True)
    sample.rename(blob)
    sample.symlink_to(blob)
    assert load_target(sample).source.earlier_fingerprint == f"sha256:{digest}"


def test_no_cut_of_a_gguf_file_is_taken_for_a_whole_one(sample: Path) -> None:
    data = sample.read_bytes()
    for length in [*range(0, 600, 37), *range(600, len(data) - 32, len(data) // 40)]:
        sample.write_bytes(data[:length])
        with pytest.raises(DamagedFileError, match=r"m\.gguf") as caught:
            load_gguf(sample)
        assert "\n" not in str(caught.value)


def test_no_changed_byte_of_the_header_escapes_as_a_traceback(sample: Path) -> None:
    data = bytearray(sample.read_bytes())
    for at in range(4, 900, 13):
        changed = bytearray(data)
        changed[at] ^= 0xFF
        sample.write_bytes(changed)
        try:
            load_gguf(sample)
        except RedrafterError as error:
            assert "\n" not in str(error)  # noqa: PT017


def test_arrays_within_arrays_cannot_exhaust_the_stack(tmp_path: Path) -> None:
    path, array = tmp_path / "m.gguf", 9
    nested = struct.pack("<IQ", array, 1) * 20_000
    entry = struct.pack("<Q1sI", 1, b"k", array) + nested
    path.write_bytes(b"GGUF" + struct.pack("<IQQ", 3, 0, 1) + entry)
    with pytest.raises(DamagedFileError, match="metadata type 9"):
        read_header(path)


def _changed(tmp_path: Path, change: str) -> Path:
    tensors, metadata = gguf_tensors(llama_model(), F16), gguf_metadata()
    name = "blk.1.attn_k.weight"
    shape, kind, data = tensors[name]
    if change == "missing":
        del tensors[name]
    elif change == "shape":
        tensors[name] = ((shape[0] // 2, shape[1]), kind, data[: len(data) // 2])
    elif change == "extra":
        tensors["blk.1.attn_k_norm.weight"] = ((4,), F32, bytes(16))
    elif change == "bias":
        tensors["blk.1.attn_k.bias"] = ((4,), F32, bytes(16))
    elif change == "third layer":
        tensors["blk.2.attn_k.weight"] = tensors[name]
    elif change == "norm":
        tensors["output_norm.weight"] = ((64,), Q8_0, bytes(68))
    elif change == "type":
        tensors["token_embd.weight"] = ((267, 256), IQ2_S, bytes(267 * 82))
        metadata["llama.embedding_length"] = 256
        metadata["llama.attention.key_length"] = 16
    return write_gguf(tmp_path / "m.gguf", metadata, tensors)


@pytest.mark.parametrize(
    ("change", "error", "words"),
    [
        ("missing", DamagedFileError, r"m\.gguf.*Missing.*layers\.1\.self_attn\.k_proj\.weight"),
        ("shape", DamagedFileError, r"m\.gguf.*\(16, 64\) for.*layers\.1\.self_attn\.k_proj"),
        ("extra", UnsupportedModelError, r"m\.gguf.*blk\.1\.attn_k_norm\.weight, which no"),
        ("bias", UnsupportedModelError, r"m\.gguf.*blk\.1\.attn_k\.bias, which no plain llama"),
        ("third layer", DamagedFileError, r"m\.gguf.*not in.*layers\.2\.self_attn\.k_proj"),
        ("norm", DamagedFileError, r"m\.gguf.*RMSNorm"),
        ("type", UnsupportedModelError, r"m\.gguf.*token_embd\.weight is IQ2_S"),
    ],
)
def test_wrong_tensor_is_named(
    tmp_path: Path, change: str, error: type[Exception], words: str
) -> None:
    with pytest.raises(error, match=words):
        load_gguf(_changed(tmp_path, change))


@pytest.mark.parametrize(
    ("key", "value", "words"),
    [
        ("general__architecture", "mamba", "mamba.*only llama, mistral3, qwen2"),
        ("tokenizer__ggml__pre", "falcon", "'falcon'.*smollm"),
        ("tokenizer__ggml__model", "bert", "kind bert"),
        ("tokenizer__ggml__tokens", None, "lacks tokenizer.ggml.tokens"),
        ("tokenizer__ggml__merges", ["h ee"], "merges"),
        ("llama__block_count", None, "lacks llama.block_count"),
        ("llama__block_count", 10**9, "1000000000 layers"),
        ("llama__rope__scaling__type", "dynamic", "dynamic rope scaling"),
        ("llama__rope__scaling__type", "yarn", "yarn.*factor"),
    ],
)
def test_unusable_metadata_is_named(tmp_path: Path, key: str, value: object, words: str) -> None:
    tensors = gguf_tensors(llama_model(), F16)
    path = write_gguf(tmp_path / "m.gguf", gguf_metadata(**{key: value}), tensors)
    with pytest.raises(RedrafterError, match=words):
        load_gguf(path).read_tokenizer()


def split_files(folder: Path, kind: int = F16) -> tuple[list[Path], Path]:
    """Write a model as three parts and as one file; only the first part holds metadata."""
    whole = gguf_tensors(llama_model(), kind)
    parts = [folder / f"m-0000{i + 1}-of-00003.gguf" for i in range(3)]
    for i, part in enumerate(parts):
        numbers = {"split.no": i, "split.count": 3}
        metadata = {**gguf_metadata(), **numbers} if i == 0 else numbers
        write_gguf(part, metadata, dict([*whole.items()][i::3]))
    return parts, write_gguf(folder / "m.gguf", {**gguf_metadata(), "split.count": 1}, whole)


@pytest.mark.parametrize("named", [0, 2])
def test_a_split_file_is_the_model_that_one_file_would_be(tmp_path: Path, named: int) -> None:
    parts, whole = split_files(tmp_path)
    loaded, want = load_target(parts[named]), load_target(whole)
    assert mx.array_equal(loaded.model(PROMPT), want.model(PROMPT)).item()
    assert encode_text(loaded.tokenizer, "hello") == encode_text(want.tokenizer, "hello")
    assert show_model(parts[named]).on_disk == sum(part.stat().st_size for part in parts)
    before = loaded.source.fingerprint
    assert load_target(parts[1]).source.fingerprint == before
    tensor = next(t for t in read_header(parts[0]).tensors.values() if t.path == parts[2])
    data = bytearray(parts[2].read_bytes())
    data[tensor.start + tensor.nbytes // 2] ^= 1
    parts[2].write_bytes(data)
    assert gguf_fingerprint(read_header(parts[0])) != before


def test_a_split_file_that_is_not_whole_is_named(tmp_path: Path) -> None:
    parts, _ = split_files(tmp_path)
    renamed = parts[0].with_name("first.gguf")
    renamed.write_bytes(parts[0].read_bytes())
    with pytest.raises(DamagedFileError, match=r"first\.gguf is one of 3 parts"):
        load_gguf(renamed)
    second = parts[1].read_bytes()
    parts[1].unlink()
    with pytest.raises(DamagedFileError, match=r"m-00002-of-00003\.gguf is not here"):
        load_gguf(parts[2])
    parts[1].write_bytes(parts[2].read_bytes())
    with pytest.raises(DamagedFileError, match="not part 2 of 3"):
        load_gguf(parts[0])
    parts[1].write_bytes(second)
    load_gguf(parts[0])


def test_every_token_that_ends_an_answer_is_known(sample: Path) -> None:
    tokenizer = load_gguf(sample).read_tokenizer()
    tokens = vocabulary()
    ends = {tokens.index("<|im_end|>"), tokens.index("<|endoftext|>")}
    assert set(tokenizer.eos_token_ids) == ends


def test_calls_of_tools_are_read_as_the_template_writes_them(tmp_path: Path) -> None:
    template = "{% for t in tools %}{{ t }}{% endfor %}<tool_call>{{ tool_call.name }}</tool_call>"
    metadata = gguf_metadata(tokenizer__chat_template=template)
    path = write_gguf(tmp_path / "m.gguf", metadata, gguf_tensors(llama_model()))
    tokenizer = load_gguf(path).read_tokenizer()
    assert (tokenizer.tool_call_start, tokenizer.tool_call_end) == ("<tool_call>", "</tool_call>")
    call = tokenizer.tool_parser('{"name": "f", "arguments": {"x": 1}}', None)
    assert call == {"name": "f", "arguments": {"x": 1}}


def test_streamed_text_is_the_decoded_text(sample: Path) -> None:
    tokenizer = load_gguf(sample).read_tokenizer()
    for text in ["hello world", "日本語 👩\u200d👩\u200d👧 x", "a\n\n  b"]:
        detokenizer = tokenizer.detokenizer
        for token in encode_text(tokenizer, text):
            detokenizer.add_token(token)
        detokenizer.finalize()
        assert detokenizer.text == text
