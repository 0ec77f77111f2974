"""From a name to a model in memory: the target and its drafter."""

from __future__ import annotations

import importlib.util
import re
from dataclasses import dataclass
from pathlib import Path
from typing import cast

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten
from mlx_lm.tokenizer_utils import TokenizerWrapper

from redrafter_mlx.config import DType, check_choice
from redrafter_mlx.distributed.facts import facts_of
from redrafter_mlx.distributed.follower import follow
from redrafter_mlx.distributed.group import Ranks, join_ranks
from redrafter_mlx.distributed.mirror import Mirror, MirroredTarget
from redrafter_mlx.distributed.sharding import shard
from redrafter_mlx.drafting.combined import CombinedDrafters
from redrafter_mlx.drafting.draft_model import DraftModel
from redrafter_mlx.drafting.drafter_files import open_files
from redrafter_mlx.drafting.forms import FORMS, DrafterFolder, find_form, holds_drafter
from redrafter_mlx.drafting.installed import find_drafters
from redrafter_mlx.drafting.interface import Bindable, Drafter
from redrafter_mlx.drafting.prompt_lookup import split_lookup
from redrafter_mlx.drafting.published.pard import MASK_KEY, Pard
from redrafter_mlx.drafting.static_trees import AlongTree, split_tree
from redrafter_mlx.engine.engine import Redrafter
from redrafter_mlx.engine.options import EngineOptions
from redrafter_mlx.errors import (
    BadInputError,
    DamagedFileError,
    MismatchError,
    ModelNotFoundError,
    UnsupportedModelError,
)
from redrafter_mlx.runtime.json_file import read_object
from redrafter_mlx.runtime.process import MLX_PROCESS
from redrafter_mlx.speculation.static_tree import StaticTree
from redrafter_mlx.target.model import Target
from redrafter_mlx.target.source import TargetSource
from redrafter_mlx.weights import Progress, no_progress
from redrafter_mlx.weights.fit.machine import this_machine
from redrafter_mlx.weights.fit.needs import check_load
from redrafter_mlx.weights.folder import load_folder
from redrafter_mlx.weights.gguf.load import load_gguf
from redrafter_mlx.weights.known_drafters import known_drafters
from redrafter_mlx.weights.precision import check_quantize, convert, stored_bits
from redrafter_mlx.weights.quantised_cache import keep_quantised, quantised_file, use_quantised
from redrafter_mlx.weights.registry import REGISTRY
from redrafter_mlx.weights.resolve import LocalModel, find_local, is_repo, resolve

_CLASS = re.compile(r".+\.py:\w+")
"""A drafter's class in a user's own file."""

_TRAINED = "trained"
"""The name of the drafter that was trained for the target."""


@dataclass(frozen=True)
class LoadedTarget:
    """An mlx-lm model with its parameters evaluated, and its tokenizer.

    mirror: sends the target's calls to the other ranks; None if this process runs alone
    """

    model: nn.Module
    tokenizer: TokenizerWrapper
    source: TargetSource
    mirror: Mirror | None = None


def load(
    model: str | Path | None = None,
    drafter: str | Path | Bindable | None = "auto",
    *,
    dtype: DType = "auto",
    quantize: int | None = None,
    drafter_bits: int | None = None,
    offline: bool = False,
    progress: Progress | None = None,
    engine: EngineOptions | None = None,
) -> Redrafter:
    """Load a target with its drafter, warmed up and ready to answer.

    Under `mlx.launch` all ranks share the target. Rank 0 returns it. On the other ranks this never
    returns: they repeat rank 0's calls, and end with it.

    Args:
      drafter: "trained": the drafter that was trained for this target; a drafter's folder or Hub
        repository; the name of a smaller model with the same tokenizer; "FILE.py:CLASS" or an
        object: the caller's own drafter; "lookup": copies of the text; "A+B": both;
        "A+tree:NAME": along a static tree; "auto": lookup, together with the trained drafter or
        else a published one, if there is one on this machine; None or "none" decodes plainly
      drafter_bits: quantise the drafter's weights to 4 or 8 bits; None leaves them as they are
      model, dtype, quantize, offline, progress: as in `load_target`
      engine: how many answers share the device, and how they take turns
    Raises:
      RedrafterError: in one line, for every error that a user can cause
    """
    named = parse_drafter(drafter, drafter_bits)
    ranks = join_ranks()
    loaded = load_target(
        model, dtype=dtype, quantize=quantize, offline=offline, progress=progress, ranks=ranks
    )
    if ranks is not None:
        ranks.agree(facts_of(loaded.source, drafter))
        if not ranks.leads:
            follow(loaded.model, ranks)
    return draft_with(named, loaded, offline=offline, progress=progress, engine=engine)


@dataclass(frozen=True)
class NamedDrafter:
    """The drafter that a caller names, checked as far as that is possible without a target.

    parts:    drafters, or their names; two of them draft together
    looks_up: whether prompt lookup is added
    auto:     "auto": a published drafter replaces a missing trained one, and lookup alone both
    bits:     bits that the drafters' weights are quantised to; None leaves them as they are
    tree:     a static tree to draft along; None drafts beams
    """

    parts: tuple[str | Bindable, ...]
    looks_up: bool
    auto: bool = False
    bits: int | None = None
    tree: StaticTree | None = None


def parse_drafter(
    drafter: str | Path | Bindable | None, drafter_bits: int | None = None
) -> NamedDrafter:
    """Check a drafter before a target is loaded; arguments as in `load`.

    Raises RedrafterError for a name that is not a drafter's, or a folder that holds no drafter.
    """
    check_quantize(drafter_bits, "drafter_bits")
    drafter = None if drafter == "none" else drafter
    named, tree = split_tree(drafter) if isinstance(drafter, str) else (drafter, None)
    own, looks_up = split_lookup(named)
    if own == "auto" and tree is None:
        return NamedDrafter((_TRAINED,), looks_up=True, auto=True, bits=drafter_bits)
    parts: tuple[str | Bindable, ...]
    if isinstance(own, (str, Path)):
        parts = tuple(map(_checked, _parts(own)))
    else:
        parts = () if own is None else (own,)
    if drafter_bits is not None and not all(isinstance(part, str) for part in parts):
        raise BadInputError(
            "drafter_bits quantises a drafter that is loaded from files, not an object's weights"
        )
    return NamedDrafter(parts, looks_up, bits=drafter_bits, tree=tree)


def draft_with(
    drafter: NamedDrafter,
    loaded: LoadedTarget,
    *,
    offline: bool = False,
    progress: Progress | None = None,
    engine: EngineOptions | None = None,
) -> Redrafter:
    """Find the drafter for a target in memory, and warm up: the second half of `load`."""
    parts: list[Bindable] = []
    note = None
    for part in drafter.parts:
        if part == _TRAINED:
            trained, note = _find_trained(loaded, drafter)
            parts += [] if trained is None else [trained]
        elif isinstance(part, str):
            parts.append(_open(part, drafter.bits, loaded.source, offline, progress))
        else:
            parts.append(part)
    found = CombinedDrafters(*parts) if len(parts) > 1 else next(iter(parts), None)
    if found is not None and drafter.tree is not None:
        found = AlongTree(found, drafter.tree)
    redrafter = Redrafter(
        loaded.model,
        loaded.tokenizer,
        found,
        lookup=drafter.looks_up,
        source=loaded.source,
        drafter_note=note,
        engine=engine,
        mirror=loaded.mirror,
    )
    redrafter.warm_up()
    return redrafter


def _parts(drafter: str | Path) -> list[str]:
    """Return the drafters' names in "A" or "A+B"; a name that exists on disk is not split."""
    name = str(drafter)
    names = [name] if Path(name).exists() else name.split("+")
    if len(names) > 2 or not all(names):
        raise BadInputError(f"drafter is {name!r}; name one drafter, or two as A+B")
    return names


def _checked(name: str) -> str | Bindable:
    """Check a drafter's name and return it, or the drafter that "FILE.py:CLASS" makes."""
    if name == "auto":
        raise BadInputError(
            f"auto is {_TRAINED}+lookup, and two drafters at most draft together; "
            f"name {_TRAINED} and the other one"
        )
    if _CLASS.fullmatch(name):
        return _from_file(name)
    if name != _TRAINED and not _names_model(name):
        if not Path(name).exists():
            raise ModelNotFoundError(
                f"no drafter at {name}; give a drafter's folder, the name of a model that "
                f"`redrafter-mlx list` shows, a Hub repository, or FILE.py:CLASS"
            )
        find_form(open_files(name))
    return name


def _names_model(name: str) -> bool:
    """Whether a name belongs to a language model rather than to a drafter's folder."""
    path = Path(name)
    if path.is_dir():
        return not holds_drafter(path)
    return path.exists() or name in REGISTRY or is_repo(name)


def _open(
    name: str, bits: int | None, target: TargetSource, offline: bool, progress: Progress | None
) -> Bindable:
    """Open a drafter by its name: a folder, a model's name, or a Hub repository of either."""
    path = Path(name)
    if _names_model(name):
        path = resolve(name, offline=offline, progress=progress).path
        if not (path.is_dir() and holds_drafter(path)):
            draft = load_target(name, quantize=bits, offline=offline, progress=progress)
            return _language_model(draft)
    return DrafterFolder(path, target.name, target.fingerprint, bits)


def _language_model(draft: LoadedTarget) -> Bindable:
    """Make a drafter of a language model; a mask token in its config.json marks a PARD model."""
    name, path = draft.source.name, draft.source.path
    mask = read_object(path / "config.json").get(MASK_KEY) if path.is_dir() else None
    if mask is None:
        return DraftModel(draft.model, draft.tokenizer, name)
    return Pard(draft.model, draft.tokenizer, cast(int, mask), name)  # which checks it


def _from_file(name: str) -> Bindable:
    """Make a drafter of the class that "FILE.py:CLASS" names, without arguments."""
    path, _, wanted = name.rpartition(":")
    spec = importlib.util.spec_from_file_location(Path(path).stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
        made: object = getattr(module, wanted)()
    except FileNotFoundError:
        raise ModelNotFoundError(f"no drafter at {path}; there is no such file") from None
    except Exception as error:  # the user's own code may raise anything
        reason = " ".join(f"{type(error).__name__}: {error}".split())
        raise BadInputError(f"{name} makes no drafter: {reason}") from error
    if not isinstance(made, Drafter):
        raise BadInputError(f"{name} makes no drafter: it does not derive from Drafter")
    return made


def loadable_forms() -> tuple[str, ...]:
    """Return the names of the forms of published drafters that can be loaded."""
    return (*(form.name for form in FORMS), "PARD")  # which is a language model


def _find_trained(loaded: LoadedTarget, wanted: NamedDrafter) -> tuple[Drafter | None, str | None]:
    """Find the first drafter for this target that is on this machine and can be loaded.

    Returns:
      the drafter, or None if "auto" finds none; a line on which drafters were skipped, and which of
      several was taken
    Raises ModelNotFoundError if there is none and one is needed.
    """
    source = loaded.source
    target = _target(loaded)
    folders, broken = find_drafters(source.fingerprint)
    known = [drafter for drafter in known_drafters(source.name) if drafter.form in loadable_forms()]
    here = [drafter for drafter in known if wanted.auto and find_local(drafter.name)]
    for name in (*folders, *(drafter.name for drafter in here)):
        try:
            found = _open(str(name), wanted.bits, source, offline=True, progress=None)
            drafter = found.bind(target, loaded.tokenizer)
        except (DamagedFileError, UnsupportedModelError) as error:
            broken.append(error)
            continue
        except MismatchError as error:
            broken.append(MismatchError(f"{name}: {error}"))
            continue
        several = len(folders) > 1 or name not in folders
        taken = f"drafts with {name}, one of {len(folders) + len(here)} for {source.name}"
        notes = [taken] * several + [f"passed over: {error}" for error in broken]
        return drafter, "; ".join(notes) or None
    remedy = f"`redrafter-mlx train --model {source.name} --output DIR` trains one"
    if known and not here:
        remedy = f"`redrafter-mlx pull {known[0].name}` fetches one ({known[0].form}), {remedy}"
    remedy += "".join(f" (passed over: {error})" for error in broken)
    if not wanted.auto:
        raise ModelNotFoundError(f"there is no drafter for {source.name}; {remedy}")
    return None, f"no drafter for {source.name} yet, drafting by lookup; {remedy}"


def _target(loaded: LoadedTarget) -> Target:
    """Return the target that drafters bind to."""
    if loaded.mirror is None:
        return Target(loaded.model)
    return MirroredTarget(loaded.model, loaded.mirror)


def load_target(
    name: str | Path | None = None,
    *,
    dtype: DType = "auto",
    quantize: int | None = None,
    offline: bool = False,
    progress: Progress | None = None,
    ranks: Ranks | None = None,
) -> LoadedTarget:
    """Load a target, downloading its files first if they are missing.

    Args:
      name: a registry name, a Hub repository, a folder or a GGUF file; None is the default model
      dtype: the arithmetic, see weights/precision.py; auto is as stored on a GPU and float32 on
        a CPU
      quantize: 4 or 8 bits; a model that is already quantised to that many stays as it is
      offline: use only files on this machine
      progress: reports downloads and checksums
      ranks: the ranks that share the target; None keeps all of it in this process
    Raises:
      RedrafterError: in one line: no such model, cannot be fetched, damaged, or not supported
    """
    MLX_PROCESS.check()
    check_choice("dtype", dtype, DType)
    check_quantize(quantize)
    local = resolve(name, offline=offline, progress=progress)
    try:
        return _load(local, dtype, quantize, progress or no_progress, ranks)
    except DamagedFileError as error:
        if local.remedy is None:
            raise
        raise DamagedFileError(f"{error}; run: {local.remedy}") from error
    except OSError as error:
        raise DamagedFileError(f"{local.path} cannot be read: {error.strerror or error}") from error


def _load(
    local: LocalModel,
    dtype: DType,
    quantize: int | None,
    progress: Progress,
    ranks: Ranks | None,
) -> LoadedTarget:
    if local.path.is_file():
        raw = load_gguf(local.path, progress)
    else:
        raw = load_folder(local.path, local.name)
    quantises = quantize is not None and stored_bits(raw.model) is None
    precision = convert(raw.model, dtype, quantize, raw.stored)
    kept = quantised_file(raw.fingerprint, precision)
    is_kept = quantises and use_quantised(raw.model, kept)
    sharing = None if ranks is None else shard(raw.model, raw.model_type, ranks.group)
    arrays = dict(tree_flatten(raw.model.parameters())).values()
    check_load(local.name, local.path, sum(array.nbytes for array in arrays), this_machine())
    try:
        mx.eval(raw.model.parameters())
    except RuntimeError as error:
        reason = " ".join(str(error).split())
        raise BadInputError(f"{local.name} cannot be brought into memory: {reason}") from error
    if quantises and not is_kept and ranks is None:
        keep_quantised(raw.model, kept)
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
    mirror = None
    if ranks is not None and sharing is not None and ranks.leads:
        mirror = Mirror(ranks, sharing)
    return LoadedTarget(raw.model, raw.tokenizer, source, mirror)
