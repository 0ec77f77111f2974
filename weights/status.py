"""Status of models for `list` and `show`: source, and whether the model is on disk."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass, field, replace
from pathlib import Path

from redrafter_mlx.errors import DamagedFileError, RedrafterError
from redrafter_mlx.runtime.files.json_file import read_object
from redrafter_mlx.runtime.files.paths import bytes_below, human_size
from redrafter_mlx.weights.fetching.hub import cached_repos, split_repo
from redrafter_mlx.weights.fetching.other_apps import other_models
from redrafter_mlx.weights.fetching.resolve import find_local
from redrafter_mlx.weights.files.folder import check_model, check_tokenizer
from redrafter_mlx.weights.fit.machine import planned_machine
from redrafter_mlx.weights.fit.model_size import StoredModel
from redrafter_mlx.weights.fit.needs import needs, stored_model
from redrafter_mlx.weights.fit.states import state_bytes
from redrafter_mlx.weights.gguf.architectures.table import ARCHITECTURES
from redrafter_mlx.weights.gguf.config import gguf_config
from redrafter_mlx.weights.gguf.header import parts_of, read_header, weight_types
from redrafter_mlx.weights.raw_model import context_length
from redrafter_mlx.weights.registry import REGISTRY
from redrafter_mlx.weights.text.chat_template import has_chat_template

_NO_TEMPLATE = "none: it cannot chat; `generate --raw` and /v1/completions continue a text"

_STATE = "{} a sequence, and at each checkpoint of a text that is kept (16 at most)"
"""The number of checkpoints is that of `decoding/cache/checkpoints.py`, which imports MLX."""


@dataclass(frozen=True)
class ModelStatus:
    """Status of one model."""

    name: str
    path: Path | None  # the file or folder on this machine, None if it is missing or incomplete
    on_disk: int | None  # size on this machine in bytes
    stored: StoredModel | None  # sizes that determine its memory use, None if unknown
    source: str | None  # "repo @ revision" on the Hub, or None for something local
    description: str = ""
    licence: str | None = None
    size: int | None = None  # bytes to download, None if unknown
    details: dict[str, str] = field(default_factory=dict)  # further facts by name


def list_models() -> list[ModelStatus]:
    """List the registry, the default model first, then other language models on this machine.

    They are those in the Hub's cache, and those of Ollama and LM Studio. No network is used.
    """
    registered = {entry.repo for entry in REGISTRY.values()}
    names = dict.fromkeys([*cached_repos(), *other_models()])
    others = [_status(name) for name in names if name not in registered]
    models = [status for status in others if status.path and _is_language_model(status.path)]
    return [*map(_status, REGISTRY), *models]


def names_on_disk() -> list[str]:
    """Return the names of the models that `list` shows and that are complete on this machine."""
    return [model.name for model in list_models() if model.path is not None]


def memory_needed(name: str, quantize: int | None, kv_bits: int | None = None) -> int:
    """Return the bytes that a model takes with a long chat; 0 if nothing on disk tells."""
    try:
        status = _status(name)
    except (RedrafterError, OSError):  # loading gives the reason
        return 0
    if status.stored is None:
        return status.on_disk or 0
    ways = needs(status.stored, planned_machine(), kv_bits=kv_bits)
    return next((way.total for way in ways if way.quantize == quantize), ways[0].total)


def show_model(name: str | Path) -> ModelStatus:
    """Return the status of one model by any name.

    Raises:
      ModelNotFoundError: nothing can have that name, or a folder holds no model
      DamagedFileError: its files cannot be a model; names the file
    """
    status = _status(str(name))
    if status.path is None:
        return status
    check_model(status.path)
    return replace(status, details=_details(status.path, status.name))


def _status(name: str) -> ModelStatus:
    entry = REGISTRY.get(name)
    local = find_local(name)
    path = local.path if local else None
    on_disk = None
    if path is not None:  # a folder of the Hub's cache holds links
        parts = [] if path.is_dir() else [part for part in parts_of(path) if part.exists()]
        on_disk = bytes_below(path, follow_links=True) + sum(p.stat().st_size for p in parts)
    if entry is not None:
        file = f"/{entry.pinned.file}" if entry.pinned else ""
        source = f"{entry.repo}{file} @ {entry.revision}"
        facts = (entry.description, entry.licence, entry.size)
        return ModelStatus(name, path, on_disk, entry.stored, source, *facts)
    stored = None
    if path is not None:
        with contextlib.suppress(DamagedFileError, OSError):  # `show_model` gives the reason
            stored = stored_model(path)
    from_hub = path is None or any(p.name.startswith("models--") for p in path.parents)
    repo = split_repo(name) if from_hub and not Path(name).exists() else None
    return ModelStatus(name, path, on_disk, stored, source=repo and " @ ".join(repo))


def _is_language_model(folder: Path) -> bool:
    """Whether a folder or a GGUF file holds a language model, which may read pictures too.

    A drafter's configuration may name such an architecture too, but comes without a tokenizer.
    """
    if folder.is_file():
        with contextlib.suppress(DamagedFileError, OSError):
            return read_header(folder).metadata.get("general.architecture") in ARCHITECTURES
        return False
    try:
        check_tokenizer(folder)
        config = read_object(folder / "config.json")
    except (FileNotFoundError, DamagedFileError):
        return False
    kinds = ["CausalLM", *(["ConditionalGeneration"] if config.get("text_config") else [])]
    named = config.get("architectures")
    return isinstance(named, list) and any(kind in str(name) for name in named for kind in kinds)


def _details(path: Path, name: str) -> dict[str, str]:
    if path.is_file():
        header = read_header(path)
        config = gguf_config(header)
        weights: object = weight_types(header)
    else:
        config = read_object(path / "config.json")
        quantization = config.get("quantization")
        bits = quantization.get("bits") if isinstance(quantization, dict) else None
        weights = f"{bits}-bit" if bits else config.get("torch_dtype") or config.get("dtype")
    template = has_chat_template(path, name)
    states = state_bytes(config)
    known = {
        "architecture": config.get("model_type"),
        "layers": config.get("num_hidden_layers"),
        "hidden size": config.get("hidden_size"),
        "vocabulary": config.get("vocab_size"),
        "context": context_length(config),
        "recurrent state": None if states is None else _STATE.format(human_size(states)),
        "weights": weights,
        "chat template": "yes" if template else _NO_TEMPLATE,
    }
    return {key: str(value) for key, value in known.items() if value is not None}
