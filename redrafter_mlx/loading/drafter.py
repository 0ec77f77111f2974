"""Finding a drafter: from its name to a drafter that can be bound to the target."""

from __future__ import annotations

import importlib.util
import os
import shlex
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import cast

from mlx_lm.tokenizer_utils import TokenizerWrapper

from redrafter_mlx.checks import check_drafter_bits, check_int, plain
from redrafter_mlx.drafting.checked import bound, check_drafter
from redrafter_mlx.drafting.combined import Combined
from redrafter_mlx.drafting.draft_model import DraftModel
from redrafter_mlx.drafting.files.drafter_files import open_files
from redrafter_mlx.drafting.files.forms import FORMS, DrafterFolder, find_form
from redrafter_mlx.drafting.files.installed import find_drafters
from redrafter_mlx.drafting.files.recognition import holds_drafter, holds_mtp
from redrafter_mlx.drafting.files.tensor_names import of_mtp_head
from redrafter_mlx.drafting.interface import Bindable, Drafter
from redrafter_mlx.drafting.names import (
    MTP,
    SUCCESSORS,
    TRAINED,
    DrafterName,
    is_class,
    model_with_head,
)
from redrafter_mlx.drafting.published.pard import MASK_KEY, Pard
from redrafter_mlx.drafting.static_trees import find_tree
from redrafter_mlx.drafting.untrained.successors import OwnSuccessors
from redrafter_mlx.errors import (
    BadInputError,
    DamagedFileError,
    MismatchError,
    ModelNotFoundError,
    UnsupportedModelError,
)
from redrafter_mlx.loading.prepared import PreparedDrafter
from redrafter_mlx.loading.supported import check_repository
from redrafter_mlx.loading.target import LoadedTarget, load_target
from redrafter_mlx.runtime.files.json_file import read_object
from redrafter_mlx.speculation.static_tree import StaticTree
from redrafter_mlx.target_model.model import Target
from redrafter_mlx.weights import Progress
from redrafter_mlx.weights.fetching.partial import resolve_part
from redrafter_mlx.weights.fetching.resolve import find_local, is_repo, resolve
from redrafter_mlx.weights.fit.model_size import bits_of_drafter
from redrafter_mlx.weights.fit.needs import stored_model
from redrafter_mlx.weights.known_drafters import KnownDrafter, known_drafters
from redrafter_mlx.weights.registry import REGISTRY


def prepare_drafter(
    drafter: DrafterName | Bindable, drafter_bits: int | None = None, draft_vocab: int | None = None
) -> PreparedDrafter:
    """Check a drafter before a target is loaded; `drafter_bits` and `draft_vocab` as in `load`.

    Raises RedrafterError for a name that is not a drafter's, or a folder that holds no drafter.
    """
    bits = cast("int | None", plain(drafter_bits))
    check_drafter_bits(bits)
    size = cast("int | None", plain(draft_vocab))
    if size is not None:
        check_int("draft_vocab", size, 1, None)
    if isinstance(drafter, DrafterName):
        tree = None if drafter.tree is None else find_tree(drafter.tree)
        parts = tuple(map(_checked, drafter.parts))
        prepared = PreparedDrafter(parts, drafter.host, drafter.auto, tree, bits, size)
    else:
        prepared = PreparedDrafter((check_drafter(drafter),), bits=bits, draft_vocab=size)
    if not all(isinstance(part, str) for part in prepared.parts):
        if bits is not None:
            raise BadInputError(
                "drafter_bits quantises a drafter that is loaded from files, not an object's "
                "weights"
            )
        if size is not None:
            raise BadInputError("draft_vocab restricts a drafter that is loaded from files")
    return prepared


def open_drafter(
    prepared: PreparedDrafter,
    loaded: LoadedTarget,
    known: Bindable | None = None,
    *,
    offline: bool = False,
    progress: Progress | None = None,
) -> tuple[Bindable | None, str | None]:
    """Open the drafter for a target in memory; `known` is what "auto" takes if there is none.

    Returns:
      the drafter, or None if only those on the host draft; a line for the user on what "auto" or
      "trained" found, None if there is nothing to say
    """
    parts: list[Bindable] = []
    note = None
    for part in prepared.parts:
        if part == TRAINED:
            trained, note = _find_trained(loaded, prepared)
            parts += [] if trained is None else [trained]
            if trained is None and known is not None:
                parts.append(known)
        elif part == MTP:
            parts.append(_own_head(loaded, prepared))
        elif isinstance(part, str) and (model := model_with_head(part)) is not None:
            path = resolve_part(model, of_mtp_head, offline=offline, progress=progress)
            parts.append(prepared.folder(path, loaded, in_model=True))
        elif isinstance(part, str):
            parts.append(_open(part, prepared, loaded, offline, progress))
        else:
            parts.append(part)
    if len(parts) == 1 and prepared.tree is None:
        return parts[0], note
    return _Opened(parts, prepared.tree) if parts else None, note


@dataclass(frozen=True)
class _Opened:
    """One drafter or two together, and the static tree to draft along if there is one."""

    parts: Sequence[Bindable]
    tree: StaticTree | None

    def bind(self, target: Target, tokenizer: TokenizerWrapper) -> Drafter:
        parts = [bound(part, target, tokenizer) for part in self.parts]
        drafter = Combined(*parts) if len(parts) > 1 else parts[0]
        return drafter if self.tree is None else drafter.along(self.tree)


def _checked(name: str) -> str | Bindable:
    """Check a drafter's name and return it, or the drafter that "FILE.py:CLASS" makes."""
    if is_class(name):
        return drafter_of_class(name)
    if name == SUCCESSORS:
        return OwnSuccessors()
    if name in (TRAINED, MTP) or model_with_head(name) is not None:
        return name
    if not _names_model(name):
        if not os.path.exists(name):  # unlike Path.exists, False for a name that is too long
            raise ModelNotFoundError(
                f"no drafter at {name}; give a drafter's folder, the name of a model that "
                f"`redrafter-mlx list` shows, a Hub repository, or FILE.py:CLASS"
            )
        find_form(open_files(name))
    return name


def _own_head(loaded: LoadedTarget, prepared: PreparedDrafter) -> DrafterFolder:
    """Return the MTP head in the target's own files; ModelNotFoundError if they hold none."""
    source = loaded.source
    if not (source.path.is_dir() and holds_mtp(source.path)):
        raise ModelNotFoundError(
            f"{source.name} brings no MTP head: its files hold no tensor mtp.*, which conversions "
            f"leave out; `redrafter-mlx drafters {shlex.quote(source.name)}` lists known drafters"
        )
    return prepared.folder(source.path, loaded, in_model=True)


def _names_model(name: str) -> bool:
    """Whether a name belongs to a language model rather than to a drafter's folder."""
    if os.path.isdir(name):
        return not holds_drafter(Path(name))
    return os.path.exists(name) or name in REGISTRY or is_repo(name)


def _open(
    name: str,
    prepared: PreparedDrafter,
    loaded: LoadedTarget,
    offline: bool,
    progress: Progress | None,
) -> Bindable:
    """Open a drafter by its name: a folder, a model's name, or a Hub repository of either.

    A language model whose weights are quantised already keeps them, unless other bits are given.
    """
    path, bits = Path(name), bits_of_drafter(prepared.bits, loaded.source.bits)
    if _names_model(name):
        path = resolve(name, offline=offline, progress=progress, check_listed=check_repository).path
        if not (path.is_dir() and holds_drafter(path)):
            if prepared.draft_vocab is not None:
                raise BadInputError(
                    f"draft_vocab is {prepared.draft_vocab}, and the draft model {name} has an "
                    f"output layer of its own; leave draft_vocab out"
                )
            stored = None if prepared.bits else stored_model(path)
            kept = stored is not None and stored.bits not in (None, bits)
            quantize = None if kept else bits
            draft = load_target(name, quantize=quantize, offline=offline, progress=progress)
            return _language_model(draft)
    return prepared.folder(path, loaded)


def _language_model(draft: LoadedTarget) -> Bindable:
    """Make a drafter of a language model; a mask token in its config.json marks a PARD model."""
    name, path = draft.source.name, draft.source.path
    config = read_object(path / "config.json") if path.is_dir() else {}
    mask = config.get(MASK_KEY)
    if mask is None:
        return DraftModel(draft.model, draft.tokenizer, name, draft.target)
    # which checks the token
    drafter = Pard(draft.model, draft.tokenizer, cast(int, mask), name, draft.target)
    if config.get("pard2"):
        drafter.note = (
            f"{name} drafts as PARD: what PARD-2 adds, the target's features, is not read"
        )
    return drafter


def drafter_of_class(name: str) -> Bindable:
    """Make a drafter of the class that "FILE.py:CLASS" names, without arguments."""
    path, _, wanted = name.rpartition(":")
    if not Path(path).is_file():
        raise ModelNotFoundError(f"no drafter at {path}; there is no such file")
    spec = importlib.util.spec_from_file_location(f"own_drafter_{Path(path).stem}", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # where dataclasses look up their annotations
    try:
        spec.loader.exec_module(module)
        made: object = getattr(module, wanted)()
    except Exception as error:  # the user's own code may raise anything
        reason = " ".join(f"{type(error).__name__}: {error}".split())
        raise BadInputError(f"{name} makes no drafter: {reason}") from error
    if not isinstance(made, Drafter):
        raise BadInputError(f"{name} makes no drafter: it does not derive from Drafter")
    return made


def loadable_forms() -> tuple[str, ...]:
    """Return the names of the forms of published drafters that can be loaded."""
    return (*(form.name for form in FORMS), "PARD")  # which is a language model


def published_drafter(model: str) -> KnownDrafter | None:
    """Return the best published drafter of a model that can be loaded; None if none is known."""
    return next((known for known in known_drafters(model) if known.form in loadable_forms()), None)


def _find_trained(
    loaded: LoadedTarget, prepared: PreparedDrafter
) -> tuple[Drafter | None, str | None]:
    """Find the first drafter for this target that is on this machine and can be loaded.

    Returns:
      the drafter, or None if "auto" finds none; a line on which drafters were skipped, and which of
      several was taken
    Raises ModelNotFoundError if there is none and one is needed.
    """
    source, target = loaded.source, loaded.target
    folders, damaged = find_drafters(source.fingerprint, source.earlier_fingerprint)
    broken = [str(error) for error in damaged]
    known = [drafter for drafter in known_drafters(source.name) if drafter.form in loadable_forms()]
    here = [drafter.name for drafter in known if prepared.auto and find_local(drafter.name)]
    if prepared.auto and source.path.is_dir() and holds_mtp(source.path):
        here.insert(0, MTP)
    for name in (*folders, *here):
        try:
            if name == MTP:
                found: Bindable = _own_head(loaded, prepared)
            else:
                found = _open(str(name), prepared, loaded, offline=True, progress=None)
            drafter = found.bind(target, loaded.tokenizer)
        except (DamagedFileError, MismatchError, UnsupportedModelError) as error:
            broken.append(f"{name}: {error}" if isinstance(error, MismatchError) else str(error))
            continue
        count = len(folders) + len(here)
        others = f", the first of {count} for {source.name}" if count > 1 else ""
        named = len(folders) > 1 or name not in folders
        passed_over = [f"passed over: {error}" for error in broken]
        notes = [f"drafts with {name}{others}"] * named + passed_over
        return drafter, "; ".join(notes) or None
    remedy = _remedy(source.name, None if here else next(iter(known), None), broken)
    if not prepared.auto:
        raise ModelNotFoundError(f"there is no drafter for {source.name}; {remedy}")
    return None, f"no drafter for {source.name} yet; {remedy}"


def _remedy(model: str, known: KnownDrafter | None, broken: list[str]) -> str:
    """Return how to get a drafter, and why those on this machine were passed over."""
    remedy = f"`redrafter-mlx train {shlex.quote(model)}` trains one"
    if known is not None:
        remedy = f"`redrafter-mlx pull {known.name}` fetches one ({known.facts}), {remedy}"
    return remedy + "".join(f" (passed over: {error})" for error in broken)
