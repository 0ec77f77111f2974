"""Where a target came from."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from redrafter_mlx.config import WHOLE, KVQuantization


@dataclass(frozen=True)
class TargetSource:
    """Where a target's weights came from, and what is in memory.

    name:        as the user gave it
    path:        the file or folder on disk
    fingerprint: of a GGUF file see `gguf_fingerprint`; for a folder, "sha256:..." of config.json
                 and the safetensors' names, sizes and headers
    model_type:  mlx-lm's name of the architecture
    dtype:       the arithmetic, such as "float32"
    bits:        of quantised weights in memory, None if not quantised
    kv:          how the keys and values in its caches are quantised
    licence:     as the registry or the file states it, None if neither does
    context_length: maximum tokens of prompt and answer together, None if the files state no limit
    earlier_fingerprint: the one by which older drafters name it, a GGUF file's SHA-256; None if
                 there was none, or it is not known without reading the file
    """

    name: str
    path: Path
    fingerprint: str
    model_type: str
    dtype: str
    bits: int | None
    licence: str | None
    context_length: int | None = None
    earlier_fingerprint: str | None = None
    kv: KVQuantization = WHOLE
