"""What one loading of `bench` brings into memory: a target, its drafters, a draft model."""

from __future__ import annotations

import mlx.core as mx
import mlx.nn as nn

from redrafter_mlx.bench.measure.methods import check_draft_model
from redrafter_mlx.cli import options as opt
from redrafter_mlx.cli.bench_request import Loading, Request
from redrafter_mlx.cli.progress import progress_bars
from redrafter_mlx.engine.engine import Redrafter
from redrafter_mlx.errors import BadInputError
from redrafter_mlx.loading import LoadedTarget, check_drafter, draft_with, load_target

RANDOM = "random"
"""The name of the model's drafter before it learnt anything: what useless drafts cost."""


def load_drafters(request: Request, loading: Loading) -> dict[str | None, Redrafter]:
    """The target drafted for in every way that was asked for; the key of a single one is None."""
    first, *others = [name for name in request.drafters if name != RANDOM] or ["trained"]
    for name in others:
        check_drafter(name)
    loaded = opt.load_model(request.model, first, loading.dtype, loading.quantize, request.offline)
    by_name = {first: loaded} | {name: _again(loaded, name) for name in others}
    if RANDOM in request.drafters:
        trained = (r for r in by_name.values() if r.drafter is not None)
        by_name[RANDOM] = _untrained(next(trained, None) or _again(loaded, "trained"))
    found: dict[str | None, Redrafter] = {name: by_name[name] for name in request.drafters}
    for redrafter in found.values():
        if redrafter.drafting is None and (request.widths or request.lengths):
            raise BadInputError(
                redrafter.drafter_note
                or "--beam-width and --beam-length need a drafter; there is none"
            )
    return {None: next(iter(found.values()))} if len(found) == 1 else found


def load_draft_model(request: Request, loaded: Redrafter) -> nn.Module | None:
    """mlx-lm's draft model, if one was asked for."""
    if request.draft_model is None:
        return None
    with progress_bars(f"loading {request.draft_model}") as progress:
        draft = load_target(request.draft_model, offline=request.offline, progress=progress)
    vocabulary = int(draft.model(mx.array([[0]])).shape[-1])
    check_draft_model(loaded, vocabulary, request.draft_model)
    return draft.model


def _again(loaded: Redrafter, drafter: str) -> Redrafter:
    assert loaded.source is not None, "was loaded by name"
    return draft_with(drafter, LoadedTarget(loaded.model, loaded.tokenizer, loaded.source))


def _untrained(loaded: Redrafter) -> Redrafter:
    assert loaded.drafter is not None
    drafter = loaded.drafter.untrained(loaded.target.dtype)
    redrafter = Redrafter(loaded.model, loaded.tokenizer, drafter, source=loaded.source)
    redrafter.warm_up()
    return redrafter
