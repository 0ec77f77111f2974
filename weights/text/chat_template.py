"""Whether a model has a chat template, from its files alone: before anything is loaded."""

from __future__ import annotations

import contextlib
from pathlib import Path

from redrafter_mlx.errors import BadInputError, DamagedFileError
from redrafter_mlx.runtime.files.json_file import read_object
from redrafter_mlx.weights.gguf.header import read_header

_FILES = ("chat_template.jinja", "additional_chat_templates", "tekken.json")
"""Files that hold a template, or a tokenizer that renders messages by itself (Mistral's)."""

_KEYS = ("chat_template", "chat_template_type")
"""Keys of tokenizer_config.json: a template, or the name of one of mlx-lm's."""

_IN_MLX_LM = ("muse_spark",)  # architectures whose template comes with mlx-lm


def has_chat_template(path: Path, name: str) -> bool:
    """Whether the tokenizer of a model on this machine will have a chat template.

    path: a folder or a GGUF file
    name: what the user called it
    Raises DamagedFileError, naming the file, for settings that cannot be read.
    """
    if path.is_file():
        return isinstance(read_header(path).metadata.get("tokenizer.chat_template"), str)
    if any((path / file).exists() for file in _FILES):
        return True
    settings = _settings(path / "tokenizer_config.json")
    if any(settings.get(key) for key in _KEYS):
        return True
    return _settings(path / "config.json").get("model_type") in _IN_MLX_LM or is_vicuna(path, name)


def require_chat_template(path: Path, name: str, instead: str) -> None:
    """Raise BadInputError, with the advice `instead`, for a model without one."""
    if not has_chat_template(path, name):
        raise BadInputError(f"{name} has no chat template; {instead}")


def is_vicuna(folder: Path, name: str) -> bool:
    """Whether a folder without a chat template holds a Vicuna, judged by name alone.

    The names are the one given by the user, the folder's, that of the Hub repository whose cache
    holds it, and `_name_or_path` in config.json. Vicuna's weights have the same shapes as LLaMA's.
    """
    names = [name, folder.name, *(p.name for p in folder.parents if p.name.startswith("models--"))]
    with contextlib.suppress(DamagedFileError):
        names.append(str(_settings(folder / "config.json").get("_name_or_path", "")))
    return any("vicuna" in n.lower() for n in names)


def _settings(file: Path) -> dict[str, object]:
    return read_object(file) if file.exists() else {}
