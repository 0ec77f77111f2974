"""Models that Ollama and LM Studio downloaded, by the names under which `list` shows them.

| app | files | name |
|---|---|---|
| Ollama | `manifests/HOST/SPACE/MODEL/TAG`, which name `blobs/sha256-...` | `MODEL:TAG` |
| LM Studio | `PUBLISHER/REPO/FILE.gguf` | the same |
| LM Studio | `PUBLISHER/REPO/config.json` and safetensors | `PUBLISHER/REPO` |

As in Ollama, SPACE is part of a name unless it is `library`, HOST unless it is Ollama's own.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

from redrafter_mlx.errors import DamagedFileError, UnsupportedModelError
from redrafter_mlx.runtime.files.json_file import read_object
from redrafter_mlx.weights.gguf.header import parts_of

_OLLAMA = ("~/.ollama/models", "/usr/share/ollama/.ollama/models")
_LM_STUDIO = ("~/.lmstudio/models", "~/.cache/lm-studio/models")
_LAYER = "application/vnd.ollama.image."


def other_models() -> dict[str, Path]:
    """Return every model that can be read, by name; what cannot is left out.

    A path is that of a GGUF file, of a split one the first part, or of a folder.
    """
    found = dict(_lm_studio())
    for name, manifest in _manifests():
        with contextlib.suppress(DamagedFileError, UnsupportedModelError, OSError):
            found[name] = _blob(manifest)
    return found


def find_other(name: str) -> Path | None:
    """Return the path of the model with this name; None if neither app has it.

    Raises UnsupportedModelError for an adapter of Ollama, DamagedFileError if files are missing.
    """
    manifest = dict(_manifests()).get(name)
    return dict(_lm_studio()).get(name) if manifest is None else _blob(manifest)


def _manifests() -> Iterator[tuple[str, Path]]:
    chosen = os.environ.get("OLLAMA_MODELS")
    for folder in (chosen,) if chosen else _OLLAMA:
        manifests = Path(folder).expanduser() / "manifests"
        for file in _files(manifests, "*/*/*/*"):
            host, space, model, tag = file.relative_to(manifests).parts
            above = [] if host == "registry.ollama.ai" else [host]
            above += [] if space == "library" and not above else [space]
            yield "/".join([*above, f"{model}:{tag}"]), file


def _blob(manifest: Path) -> Path:
    """Return the weights that a manifest names."""
    layers = read_object(manifest).get("layers")
    digests: dict[str, str] = {}
    for layer in layers if isinstance(layers, list) else []:
        if isinstance(layer, dict):
            digests[str(layer.get("mediaType")).removeprefix(_LAYER)] = str(layer.get("digest"))
    if "adapter" in digests:
        raise UnsupportedModelError(f"{manifest} has an adapter, which is not read")
    blob = manifest.parents[4] / "blobs" / digests.get("model", "").replace(":", "-")
    if not blob.is_file():
        raise DamagedFileError(f"{manifest}: the model's file, {blob}, is not here")
    return blob


def _lm_studio() -> Iterator[tuple[str, Path]]:
    for place in _LM_STUDIO:
        folder = Path(place).expanduser()
        for file in _files(folder, "*/*/*"):
            name = "/".join(file.relative_to(folder).parts)
            if file.name == "config.json":
                yield name.rpartition("/")[0], file.parent
            elif file.suffix == ".gguf" and parts_of(file)[0] == file and "mmproj" not in file.name:
                yield name, file


def _files(folder: Path, pattern: str) -> list[Path]:
    try:
        return sorted(path for path in folder.glob(pattern) if path.is_file())
    except OSError:  # another user's
        return []
