"""Published drafters by the model that they were trained for, as of 2026.

Sources: the models' pages and their authors' documents. Licence and size are None if the page does
not give them. The best drafter is first: EAGLE-3, the model's own MTP head or assistant, then block
drafters (those for Qwen3 and Llama were trained on answers without thinking alone), then older
forms; within one form heads with a draft vocabulary before those over all tokens, then safetensors
before PyTorch files.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from redrafter_mlx.runtime.files.paths import human_size
from redrafter_mlx.weights.fetching.hub import split_repo
from redrafter_mlx.weights.registry import REGISTRY


@dataclass(frozen=True)
class KnownDrafter:
    """A drafter on the Hub."""

    repo: str
    form: str  # a `Form.name`, see drafting/files/forms.py
    revision: str = "main"
    licence: str | None = None  # None if unknown
    size: int | None = None  # of its weights in bytes, None if unknown
    embedding: int = 0  # bytes in it of the target's own embedding, which is not loaded

    @property
    def in_memory(self) -> int | None:
        """Size of the weights that are loaded in bytes, None if unknown."""
        return None if self.size is None else self.size - self.embedding

    @property
    def facts(self) -> str:
        """What it is, for people: `EAGLE-3, 2.0 GB, license: apache-2.0`, as far as it is known."""
        size = None if self.size is None else human_size(self.size)
        licence = None if self.licence is None else f"license: {self.licence}"
        return ", ".join(filter(None, (self.form, size, licence)))

    @property
    def name(self) -> str:
        """The name for `pull` and `--drafter`."""
        return self.repo if self.revision == "main" else f"{self.repo}@{self.revision}"


_EAGLE3, _EAGLE, _MEDUSA, _DFLASH = "EAGLE-3", "EAGLE", "Medusa", "DFlash"
_DSPARK, _DFLASH2, _MTP, _ASSISTANT = "DSpark", "DFlash 2", "MTP", "Gemma 4 assistant"
_MLP, _PARD = "MLP speculator", "PARD"
_APACHE, _LFM = "apache-2.0", "lfm1.0"
_QWEN3_TOKEN = 2 * 151_936
"""Bytes of Qwen3's embedding in bfloat16, for each coordinate of its hidden size.

The sizes of RedHatAI's heads for Qwen3 follow from their tensors: a layer of the target's own
dimensions whose attention reads twice its hidden size, fc [H, 3H], 32,000 rows of output layer,
both vocabulary tables, and this embedding. Those of block drafters do too: five layers of the
target's own dimensions, and fc [H, 5H]; in DeepSpec's also the target's embedding, its output layer
and the correction's two matrices of rank 256.
"""
_SMALL_ASSISTANT = 156_000_000
"""Bytes of the assistants of E2B and E4B in bfloat16: of 78 million parameters each."""


def _assistants(model: str, size: int | None = None) -> tuple[KnownDrafter, ...]:
    """Return Google's assistant of a Gemma 4, and MLX's conversion of it."""
    names = f"google/{model}-assistant", f"mlx-community/{model}-assistant-bf16"
    return tuple(KnownDrafter(name, _ASSISTANT, licence=_APACHE, size=size) for name in names)


_PARD_LLAMA = KnownDrafter("amd/PARD-Llama-3.2-1B", _PARD)
_PARD_QWEN = KnownDrafter("amd/PARD-Qwen3-0.6B", _PARD)

KNOWN_DRAFTERS: dict[str, tuple[KnownDrafter, ...]] = {
    "llama-3.1-8b-instruct": (
        KnownDrafter("RedHatAI/Llama-3.1-8B-Instruct-speculator.eagle3", _EAGLE3),
        KnownDrafter("lmsys/SGLang-EAGLE3-Llama-3.1-8B-Instruct-SpecForge", _EAGLE3),
        KnownDrafter("yuhuili/EAGLE3-LLaMA3.1-Instruct-8B", _EAGLE3),
        KnownDrafter("z-lab/LLaMA3.1-8B-Instruct-DFlash-UltraChat", _DFLASH, size=2_348_810_240),
        _PARD_LLAMA,
    ),
    "llama-3-8b-instruct": (
        KnownDrafter("yuhuili/EAGLE-LLaMA3-Instruct-8B", _EAGLE, size=1_550_000_000),
        KnownDrafter("ibm-ai-platform/llama3-8b-accelerator", _MLP, size=6_390_000_000),
    ),
    "llama-3-70b-instruct": (
        KnownDrafter("yuhuili/EAGLE-LLaMA3-Instruct-70B", _EAGLE, licence=_APACHE),
    ),
    "llama-3.2-3b-instruct": (
        KnownDrafter("thoughtworks/Llama-3.2-3B-Instruct-Eagle3", _EAGLE3),
        _PARD_LLAMA,
    ),
    "llama-3.3-70b-instruct": (
        KnownDrafter("RedHatAI/Llama-3.3-70B-Instruct-speculator.eagle3", _EAGLE3),
        KnownDrafter("lmsys/SGLang-EAGLE3-Llama-3.3-70B-Instruct-SpecForge", _EAGLE3),
        KnownDrafter("yuhuili/EAGLE3-LLaMA3.3-Instruct-70B", _EAGLE3, size=3_152_458_398),
        _PARD_LLAMA,
    ),
    "deepseek-r1-distill-llama-8b": (
        KnownDrafter("yuhuili/EAGLE3-DeepSeek-R1-Distill-LLaMA-8B", _EAGLE3),
    ),
    "qwen3-1.7b": (
        KnownDrafter("AngelSlim/Qwen3-1.7B_eagle3", _EAGLE3, size=274_132_734),
        _PARD_QWEN,
    ),
    "qwen3-4b": (
        KnownDrafter("AngelSlim/Qwen3-4B_eagle3", _EAGLE3),
        KnownDrafter("deepseek-ai/eagle3_qwen3_4b_ttt7", _EAGLE3),
        KnownDrafter("RedHatAI/Qwen3-4B-speculator.dspark", _DSPARK),
        KnownDrafter("deepseek-ai/dspark_qwen3_4b_block7", _DSPARK, size=2_786_197_504,
                     embedding=2 * _QWEN3_TOKEN * 2560),
        KnownDrafter("z-lab/Qwen3-4B-DFlash-b16", _DFLASH, size=1_074_790_400),
        _PARD_QWEN,
    ),
    "qwen3-8b": (
        KnownDrafter("RedHatAI/Qwen3-8B-speculator.eagle3", _EAGLE3, size=2_044_116_968,
                     embedding=_QWEN3_TOKEN * 4096),
        KnownDrafter("AngelSlim/Qwen3-8B_eagle3", _EAGLE3),
        KnownDrafter("deepseek-ai/eagle3_qwen3_8b_ttt7", _EAGLE3),
        KnownDrafter("mgoin/Qwen3-8B-speculator.dspark", _DSPARK),
        KnownDrafter("deepseek-ai/dspark_qwen3_8b_block7", _DSPARK, size=4_742_053_888,
                     embedding=2 * _QWEN3_TOKEN * 4096),
        KnownDrafter("Dogacel/Qwen3-8B-DSpark", _DSPARK),
        KnownDrafter("z-lab/Qwen3-8B-DFlash-b16", _DFLASH, size=2_097_152_000),
        KnownDrafter("JetSpec/jetspec-qwen3-8b", _DFLASH, size=2_097_152_000),
        _PARD_QWEN,
    ),
    "qwen3-14b": (
        KnownDrafter("RedHatAI/Qwen3-14B-speculator.eagle3", _EAGLE3, size=2_775_244_776,
                     embedding=_QWEN3_TOKEN * 5120),
        KnownDrafter("AngelSlim/Qwen3-14B_eagle3", _EAGLE3),
        KnownDrafter("deepseek-ai/eagle3_qwen3_14b_ttt7", _EAGLE3),
        KnownDrafter("deepseek-ai/dspark_qwen3_14b_block7", _DSPARK, size=6_832_390_144,
                     embedding=2 * _QWEN3_TOKEN * 5120),
        _PARD_QWEN,
    ),
    "qwen3-32b": (
        KnownDrafter("RedHatAI/Qwen3-32B-speculator.eagle3", _EAGLE3, size=3_121_274_856,
                     embedding=_QWEN3_TOKEN * 5120),
        KnownDrafter("AngelSlim/Qwen3-32B_eagle3", _EAGLE3),
        KnownDrafter("deepseek-ai/dspark_qwen3_32b_block7", _DSPARK, size=8_405_254_144,
                     embedding=2 * _QWEN3_TOKEN * 5120),
        _PARD_QWEN,
    ),
    "qwen3-30b-a3b": (KnownDrafter("JetSpec/jetspec-qwen3-30b-a3b", _DFLASH),),
    "qwen3-coder-30b-a3b-instruct": (KnownDrafter("z-lab/Qwen3-Coder-30B-A3B-DFlash", _DFLASH),),
    "qwen3-coder-next": (KnownDrafter("z-lab/Qwen3-Coder-Next-DFlash", _DFLASH),),
    "qwen3.5-4b": (
        KnownDrafter("mlx-community/Qwen3.5-4B-MTP-4bit", _MTP),
        KnownDrafter("z-lab/Qwen3.5-4B-DFlash", _DFLASH),
    ),
    "qwen3.5-9b": (
        KnownDrafter("mlx-community/Qwen3.5-9B-MTP-4bit", _MTP),
        KnownDrafter("z-lab/Qwen3.5-9B-DFlash", _DFLASH),
    ),
    "qwen3.5-27b": (KnownDrafter("z-lab/Qwen3.5-27B-DFlash", _DFLASH),),
    "qwen3.5-35b-a3b": (KnownDrafter("z-lab/Qwen3.5-35B-A3B-DFlash", _DFLASH),),
    "qwen3.6-27b": (
        KnownDrafter("mlx-community/Qwen3.6-27B-MTP-4bit", _MTP),
        KnownDrafter("mlx-community/Qwen3.6-27B-MTP-bf16", _MTP, size=849_398_784),
        KnownDrafter("satgeze/Qwen3.6-27B-DSpark", _DSPARK),
        KnownDrafter("z-lab/Qwen3.6-27B-DFlash", _DFLASH),
    ),
    "qwen3.6-35b-a3b": (
        KnownDrafter("mlx-community/Qwen3.6-35B-A3B-MTP-4bit", _MTP),
        KnownDrafter("mlx-community/Qwen3.6-35B-A3B-MTP-5bit", _MTP),
        KnownDrafter("RedHatAI/Qwen3.6-35B-A3B-speculator.dspark", _DSPARK),
        KnownDrafter("z-lab/Qwen3.6-35B-A3B-DFlash", _DFLASH),
        KnownDrafter("JetSpec/jetspec-Qwen3.6-35B-A3B", _DFLASH),
    ),
    "qwen3.8-27b": (
        KnownDrafter("mlx-community/Qwen3.8-27B-MTP-4bit", _MTP),
        KnownDrafter("mlx-community/Qwen3.8-27B-MTP-8bit", _MTP),
        KnownDrafter("seabit-ai/Qwen3.8-27B-MTP-draft", _MTP),
        KnownDrafter("z-lab/Qwen3.8-27B-DFlash2", _DFLASH2),
        KnownDrafter("incoai/Qwen3.8-27B-DFlash2", _DFLASH2),
        KnownDrafter("RedHatAI/Qwen3.8-27B-speculator.dspark", _DSPARK),
    ),
    "lfm2.5-1.2b-instruct": (
        KnownDrafter("LiquidAI/LFM2.5-1.2B-Instruct-DSpark", _DSPARK, licence=_LFM),
    ),
    "lfm2.5-2.6b": (KnownDrafter("LiquidAI/LFM2.5-2.6B-DSpark", _DSPARK, licence=_LFM),),
    "lfm2.5-8b-a1b": (KnownDrafter("LiquidAI/LFM2.5-8B-A1B-DSpark", _DSPARK, licence=_LFM),),
    "nvidia-nemotron-3.5-lightning-30b-a3b": (
        KnownDrafter("mlx-community/NVIDIA-Nemotron-3.5-Lightning-30B-A3B-DSpark-bf16", _DSPARK),
    ),
    "minicpm5-2b": (KnownDrafter("openbmb/MiniCPM5-2B-DSpark", _DSPARK),),
    "nanbeige4.2-3b": (KnownDrafter("Nanbeige/Nanbeige4.2-3B-DSpark", _DSPARK),),
    "ornith-1.0-9b": (KnownDrafter("stanleyphoong/Ornith-1.0-9B-DSpark", _DSPARK),),
    "gpt-oss-20b": (
        KnownDrafter("z-lab/gpt-oss-20b-DFlash", _DFLASH),
        KnownDrafter("JetSpec/jetspec-gpt-oss-20b", _DFLASH),
    ),
    "gpt-oss-120b": (KnownDrafter("z-lab/gpt-oss-120b-DFlash", _DFLASH),),
    "gemma-4-e2b-it": _assistants("gemma-4-E2B-it", _SMALL_ASSISTANT),
    "gemma-4-e4b-it": _assistants("gemma-4-E4B-it", _SMALL_ASSISTANT),
    "gemma-4-12b-it": (
        *_assistants("gemma-4-12B-it"),
        KnownDrafter("z-lab/gemma4-12B-it-DFlash", _DFLASH),
    ),
    "gemma-4-26b-a4b-it": (
        *_assistants("gemma-4-26B-A4B-it"),
        KnownDrafter("makora-ai/gemma4-26b-a4b-dspark", _DSPARK),
        KnownDrafter("z-lab/gemma-4-26B-A4B-it-DFlash", _DFLASH),
        KnownDrafter("JetSpec/jetspec-gemma4-26B-A4B0-it", _DFLASH),
    ),
    "gemma-4-31b-it": (
        *_assistants("gemma-4-31B-it"),
        KnownDrafter("z-lab/gemma-4-31B-it-DFlash", _DFLASH),
    ),
    "qwen2-7b-instruct": (
        KnownDrafter("yuhuili/EAGLE-Qwen2-7B-Instruct", _EAGLE, licence=_APACHE),
    ),
    "llama-2-7b-chat": (
        KnownDrafter("yuhuili/EAGLE-llama2-chat-7B", _EAGLE, licence=_APACHE),
    ),
    "llama-2-13b-chat": (
        KnownDrafter("yuhuili/EAGLE-llama2-chat-13B", _EAGLE, licence=_APACHE),
    ),
    "vicuna-7b-v1.3": (
        KnownDrafter("yuhuili/EAGLE-Vicuna-7B-v1.3", _EAGLE, licence=_APACHE),
        KnownDrafter("FasterDecoding/medusa-vicuna-7b-v1.3", _MEDUSA, revision="refs/pr/1",
                     size=1_480_000_000),
    ),
    "vicuna-13b-v1.3": (
        KnownDrafter("yuhuili/EAGLE3-Vicuna1.3-13B", _EAGLE3, licence=_APACHE,
                     size=1_280_000_000),
        KnownDrafter("yuhuili/EAGLE-Vicuna-13B-v1.3", _EAGLE),
    ),
    "vicuna-33b-v1.3": (KnownDrafter("yuhuili/EAGLE-Vicuna-33B-v1.3", _EAGLE),),
}  # fmt: skip
"""Drafters by the model's own name in lower case; see `family`."""

_WITH_HEADS = {
    "qwen3.5-27b": "Qwen/Qwen3.5-27B",
    "qwen3.5-35b-a3b": "Qwen/Qwen3.5-35B-A3B",
    "qwen3-next-80b-a3b-instruct": "Qwen/Qwen3-Next-80B-A3B-Instruct",
    "glm-4.7-flash": "zai-org/GLM-4.7-Flash",
}
"""Original repositories with a multi-token head that no repository of its own holds."""

_CONVERSION = re.compile(
    r"(-((mixed-(\d-)*)?\d-?bits?|gs\d+|mxfp\d|nvfp\d|q\d(_\w+)?|bf16|fp16|f16|f32"
    r"|mlx|dwq|awq|gptq|hf|unsloth|bnb|fp8|gguf|ud|\d{6,}))+$"
)
"""Words that publishers of conversions append to a model's name; `mixed` has several sizes."""

_SNAPSHOT = re.compile(r"models--.+?--([^/]+)/snapshots/[^/]+$")
"""End of the path of a repository's files in the Hub's cache."""

_GGUF = re.compile(r"([-.](i?q\d\w*|bf16|f16|f32))?\.gguf$")
"""End of a GGUF file's name: the type of most of its weights, and the suffix."""


def known_drafters(model: str) -> tuple[KnownDrafter, ...]:
    """Return the published drafters of a model by its name, the best first.

    The name of a conversion, such as mlx-community/Meta-Llama-3.1-8B-Instruct-4bit or a GGUF file,
    is treated as the name of the converted model.
    """
    return KNOWN_DRAFTERS.get(family(model), ())


def head_in_original(model: str) -> str | None:
    """Return the `--drafter` for the head in a model's original files, which MLX's copies lack.

    None if it has none, or a published one that is smaller to fetch.
    """
    original = _WITH_HEADS.get(family(model))
    return None if original is None or hub_name(model) == original else f"mtp:{original}"


def family(model: str) -> str:
    """Return a model's own name in lower case, from a repository, path or registry name."""
    path = hub_name(REGISTRY[model].repo if model in REGISTRY else model).rstrip("/")
    cached = _SNAPSHOT.search(path)
    name = cached[1] if cached else path.rsplit("/", 1)[-1].split("@")[0]
    return _CONVERSION.sub("", _GGUF.sub("", name.lower())).removeprefix("meta-")


def hub_name(model: str) -> str:
    """Return a repository's name without its revision, and any other name as it is."""
    repo = split_repo(model)
    return model if repo is None else repo[0]
