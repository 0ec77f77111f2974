"""Where a target came from."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class TargetSource:
    """Where a target's weights came from, and what is in memory.

    name:        what the user asked for
    path:        the file or folder on disk
    fingerprint: "sha256:..." of a GGUF file; of config.json and the safetensors' names, sizes and
                 headers of a folder
    model_type:  mlx-lm's name of the architecture
    dtype:       the arithmetic, such as "float32"
    bits:        of a quantised weight in memory, None if not quantised
    licence:     as the registry or the file names it, None if neither does
    context_length: tokens of prompt and answer together, None if the files name no limit
    """

    name: str
    path: Path
    fingerprint: str
    model_type: str
    dtype: str
    bits: int | None
    licence: str | None
    context_length: int | None = None
