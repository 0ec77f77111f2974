"""From a name to a model in memory: the target, and the drafter that belongs to it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.tokenizer_utils import TokenizerWrapper

from redrafter_mlx.config import DType, check_choice
from redrafter_mlx.drafting.checkpoint import WEIGHTS, read_config
from redrafter_mlx.drafting.prompt_lookup import join_lookup, split_lookup
from redrafter_mlx.engine.engine import Redrafter
from redrafter_mlx.errors import (
    BadInputError,
    DamagedFileError,
    MismatchError,
    ModelNotFoundError,
    RedrafterError,
)
from redrafter_mlx.runtime.paths import cache_dir
from redrafter_mlx.runtime.process import MLX_PROCESS
from redrafter_mlx.target.source import TargetSource
from redrafter_mlx.weights import SHIPPED_DRAFTERS, Progress, no_progress
from redrafter_mlx.weights.folder import load_folder
from redrafter_mlx.weights.gguf import load_gguf
from redrafter_mlx.weights.precision import check_quantize, convert
from redrafter_mlx.weights.resolve import LocalModel, resolve


@dataclass(frozen=True)
class LoadedTarget:
    """An mlx-lm model with its parameters evaluated, and its tokenizer."""

    model: nn.Module
    tokenizer: TokenizerWrapper
    source: TargetSource


def load(
    model: str | Path | None = None,
    drafter: str | Path | None = "auto",
    *,
    dtype: DType = "auto",
    quantize: int | None = None,
    offline: bool = False,
    progress: Progress | None = None,
) -> Redrafter:
    """A target with its drafter, in memory, warmed up and ready to answer.

    Args:
      drafter: a drafter's folder; "trained" takes the one that was trained for this very target;
        "lookup" drafts from the text itself; "FOLDER+lookup" does both, and so does "auto", as
        far as this machine has a drafter; None decodes plainly. Other arguments as in
        `load_target`
    Raises:
      RedrafterError: in one line, for whatever a user can cause
    """
    check_drafter(drafter)
    loaded = load_target(model, dtype=dtype, quantize=quantize, offline=offline, progress=progress)
    return draft_with(drafter, loaded)


def check_drafter(drafter: str | Path | None) -> None:
    """Raise for a folder that holds no drafter, before a target is loaded; see `read_config`."""
    own, _ = split_lookup(drafter)
    if own not in (None, "auto", "trained"):
        read_config(own)


def draft_with(drafter: str | Path | None, loaded: LoadedTarget) -> Redrafter:
    """What `load` does with a target in memory: find the drafter, and warm up."""
    own, looks_up = split_lookup(drafter)
    if own in ("auto", "trained"):
        redrafter = _draft_with_the_trained(loaded, looks_up or own == "auto")
    else:
        named = join_lookup(own) if looks_up else own
        redrafter = Redrafter(loaded.model, loaded.tokenizer, named, source=loaded.source)
    redrafter.warm_up()
    return redrafter


def _draft_with_the_trained(loaded: LoadedTarget, looks_up: bool) -> Redrafter:
    """The first drafter for this target that can be loaded, or lookup alone where that is asked.

    `drafter_note` of the result says what was passed over, and which was taken of several.
    """
    name = loaded.source.name
    folders, broken = find_drafters(loaded.source.fingerprint)
    for folder in folders:
        named = join_lookup(folder) if looks_up else folder
        try:
            redrafter = Redrafter(loaded.model, loaded.tokenizer, named, source=loaded.source)
        except DamagedFileError as error:
            broken.append(error)
            continue
        except MismatchError as error:
            broken.append(MismatchError(f"{folder}: {error}"))
            continue
        taken = f"drafts with {folder}, one of {len(folders)} for {name}"
        notes = [taken] * (len(folders) > 1) + [f"passed over: {error}" for error in broken]
        redrafter.drafter_note = "; ".join(notes) or None
        return redrafter
    remedy = f"`redrafter-mlx train --model {name} --output DIR` trains one"
    remedy += "".join(f" (passed over: {error})" for error in broken)
    if not looks_up:
        raise ModelNotFoundError(f"there is no drafter for {name}; {remedy}")
    note = f"no drafter for {name} yet, drafting by lookup; {remedy}"
    return Redrafter(
        loaded.model, loaded.tokenizer, join_lookup(None), source=loaded.source, drafter_note=note
    )


def find_drafters(fingerprint: str) -> tuple[list[Path], list[RedrafterError]]:
    """The folders of drafters for the target of that fingerprint, the one to take first.

    The user's own, in `drafters/` of our cache, come before those shipped beside the code in
    `weights/drafters/`; of several there, the one whose weights were written last comes first.

    Returns:
      the folders, and what is wrong with those that could not be looked into
    """
    found: list[Path] = []
    broken: list[RedrafterError] = []
    for shelf in (cache_dir() / "drafters", SHIPPED_DRAFTERS):
        here = []
        for folder in _inside(shelf, broken):
            try:
                if read_config(folder).target_fingerprint == fingerprint:
                    here.append((_written(folder), folder))
            except ModelNotFoundError:
                continue  # something else
            except RedrafterError as error:
                broken.append(error)
        found += [folder for _, folder in sorted(here, reverse=True)]
    return found, broken


def _inside(shelf: Path, broken: list[RedrafterError]) -> list[Path]:
    try:
        return sorted(shelf.iterdir())
    except FileNotFoundError:
        return []
    except OSError as error:
        broken.append(DamagedFileError(f"{shelf} cannot be read: {error.strerror or error}"))
        return []


def _written(folder: Path) -> float:
    """When a drafter's weights were written, in seconds since 1970."""
    path = folder / WEIGHTS
    try:
        return path.stat().st_mtime
    except OSError as error:
        raise DamagedFileError(f"{path} cannot be read: {error.strerror or error}") from error


def load_target(
    name: str | Path | None = None,
    *,
    dtype: DType = "auto",
    quantize: int | None = None,
    offline: bool = False,
    progress: Progress | None = None,
) -> LoadedTarget:
    """Bring a target into memory, fetching its files first where they are not here.

    Args:
      name: of the registry, a Hub repository, a folder or a GGUF file; None is the default model
      dtype: the arithmetic, see weights/precision.py; auto is as stored on a GPU and float32 on
        a CPU
      quantize: 4 or 8 bits; a model that is quantised to as many already stays as it is
      offline: use what is on this machine
      progress: told of downloads and of checksums
    Raises:
      RedrafterError: in one line: no such model, cannot be fetched, damaged, or not supported
    """
    MLX_PROCESS.check()
    check_choice("dtype", dtype, DType)
    check_quantize(quantize)
    local = resolve(name, offline=offline, progress=progress)
    try:
        return _load(local, dtype, quantize, progress or no_progress)
    except DamagedFileError as error:
        if local.remedy is None:
            raise
        raise DamagedFileError(f"{error}; run: {local.remedy}") from error
    except OSError as error:
        raise DamagedFileError(f"{local.path} cannot be read: {error.strerror or error}") from error


def _load(
    local: LocalModel, dtype: DType, quantize: int | None, progress: Progress
) -> LoadedTarget:
    if local.path.is_file():
        raw = load_gguf(local.path, progress)
    else:
        raw = load_folder(local.path, local.name)
    precision = convert(raw.model, dtype, quantize, raw.stored)
    try:
        mx.eval(raw.model.parameters())
    except RuntimeError as error:
        reason = " ".join(str(error).split())
        raise BadInputError(f"{local.name} cannot be brought into memory: {reason}") from error
    source = TargetSource(
        name=local.name,
        path=local.path,
        fingerprint=raw.fingerprint,
        model_type=raw.model_type,
        dtype=precision.dtype,
        bits=precision.bits,
        licence=local.entry.licence if local.entry else raw.licence,
        context_length=raw.context_length,
    )
    return LoadedTarget(raw.model, raw.tokenizer, source)
