"""`redrafter-mlx pull`, `list`, `show` and `drafters`: known models, drafters and their files."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from redrafter_mlx.cli import options as opt
from redrafter_mlx.cli.flag import Flag
from redrafter_mlx.cli.models.facts import (
    drafter_facts,
    memory_facts,
    size_text,
    source_facts,
    unsupported,
)
from redrafter_mlx.cli.progress import progress_bars
from redrafter_mlx.cli.terminal import console, sanitise
from redrafter_mlx.errors import BadInputError, ModelNotFoundError, RedrafterError

if TYPE_CHECKING:
    from redrafter_mlx.weights.fit.machine import Machine
    from redrafter_mlx.weights.status import ModelStatus

_WIDEST = 10_000  # columns that no table needs

Name = Annotated[
    str, typer.Argument(metavar="NAME|REPO|PATH", help="As in --model.", show_default=False)
]


@opt.with_options
def pull(*, name: Name, target: Annotated[opt.TargetOptions, ("offline",)]) -> None:
    """Download a model or a published drafter and check it; prints its path.

    REPO may name a revision: org/name@revision. After an interruption, files that are complete
    are not downloaded again.
    """
    print(sanitise(str(fetch(name, offline=target.offline))))


def fetch(name: str, *, offline: bool = False) -> Path:
    with progress_bars(f"pulling {name}") as progress:
        from redrafter_mlx.loading.supported import check_repository
        from redrafter_mlx.weights.fetching.resolve import pull as download

        local = download(
            name,
            offline=offline,
            progress=progress,
            advise=lambda line: print(sanitise(line), file=sys.stderr),
            check_listed=check_repository,
        )
        _check_files(local.path)
    return local.path


def list_all() -> None:
    """List the named models: size, whether each is on disk and fits in memory, and its drafters.

    Models of Ollama and LM Studio are listed, too. `show` has the details of one. Any Hub
    repository or folder that mlx-lm loads works as well.
    """
    with progress_bars("looking"):
        from redrafter_mlx.weights.fit.machine import planned_machine
        from redrafter_mlx.weights.status import list_models

        known, machine = list_models(), planned_machine()
        rows = [
            (
                model.name,
                "yes" if model.path else "no",
                size_text(model.on_disk or model.size),
                _fits(model, machine),
                _drafters(model),
                model.licence or "",
            )
            for model in known
        ]
    print_table(("NAME", "ON DISK", "SIZE", "FITS", "DRAFTERS", "LICENSE"), rows)


@opt.with_options
def drafters(name: Name, as_json: opt.Json = False) -> None:
    """List the drafters of a model: yours, ours, and published ones that are known to fit it.

    `pull` fetches one. Without --drafter, the first that is on this machine is used.
    """
    with progress_bars(f"looking for drafters of {name}") as progress:
        from redrafter_mlx.drafting.files.installed import list_drafters
        from redrafter_mlx.weights.known_drafters import head_in_original

        try:
            listed, missing = list_drafters(name, progress), None
        except ModelNotFoundError as error:  # or a drafter in files of other names
            listed, missing = [], error
        itself = {} if listed else drafter_facts(name)
    if itself:
        target = itself["target"]
        ask = "name its target instead" if not target else (
            f"its target's drafters are listed by `redrafter-mlx drafters {target}`")  # fmt: skip
        raise BadInputError(f"{name} is a drafter itself; {ask}")
    if missing is not None:
        raise missing
    if as_json:
        rows = [
            {
                "name": one.name, "form": one.form, "license": one.licence, "size": one.size,
                "path": one.path and str(one.path),
            }
            for one in listed
        ]  # fmt: skip
        print(json.dumps({"model": name, "drafters": rows}))
        return
    head = head_in_original(name)
    if head is not None:
        print(f"an MTP head, for which a part of the original files is fetched: --drafter {head}")
    if not listed:
        if head is None:
            print(f"no drafter is known for {name}; `redrafter-mlx train` trains one")
        return
    print_table(
        ("NAME", "FORM", "ON DISK", "SIZE", "LICENSE"),
        [
            (
                _from_home(one.name),
                one.form,
                "yes" if one.path else "no",
                size_text(one.size) or "unknown",
                one.licence or "unknown",
            )
            for one in listed
        ],
    )


@opt.with_options
def show(
    name: Name,
    context: Annotated[int, Flag("Tokens that are to fit in memory.", "N", minimum=1)] = 8192,
) -> None:
    """Show one model: source, license, size, path, architecture, and whether it fits in memory.

    Of a drafter, its form and its target. Uses no network.
    """
    with progress_bars(f"looking at {name}"):
        from redrafter_mlx.weights.fit.machine import planned_machine
        from redrafter_mlx.weights.status import show_model

        facts: Mapping[str, str | None] = drafter_facts(name)
        if not facts:
            model, machine = show_model(name), planned_machine()
            why_not = unsupported(model)
            memory = {} if why_not else memory_facts(model, machine, context)
            facts = {**source_facts(model), **memory, "unsupported": why_not}
    known = {label: " ".join(value.split()) for label, value in facts.items() if value}
    width = max(map(len, known))
    for label, value in known.items():
        print(sanitise(f"{label:<{width}}  {value}"))


def _check_files(path: Path) -> None:
    """Raise RedrafterError unless the files are a model's, or a drafter's of a known form."""
    from redrafter_mlx.drafting.files.recognition import (
        form_of,
        holds_drafter,
        is_drafter,
        read_drafter_config,
    )
    from redrafter_mlx.weights.files.folder import check_model
    from redrafter_mlx.weights.files.tensors import open_tensors

    if path.is_dir() and holds_drafter(path):
        config, names = read_drafter_config(path), open_tensors(path).shapes
        if is_drafter(config, names):
            form_of(path, config, names)
            return
    check_model(path)


def _fits(model: ModelStatus, machine: Machine) -> str:
    """Return `yes`, the option with which a model fits, `no`, or `unknown`."""
    from redrafter_mlx.weights.fit.needs import needs

    if model.stored is None:
        return "unknown"
    fitting = [way for way in needs(model.stored, machine) if way.fits(machine)]
    if not fitting:
        return "no"
    return "yes" if fitting[0].quantize is None else fitting[0].option


def _drafters(model: ModelStatus) -> str:
    """List the forms of a model's drafters, local ones first: `ReDrafter (here), EAGLE-3`."""
    from redrafter_mlx.drafting.files.installed import list_drafters

    try:
        listed = list_drafters(model.name)
    except RedrafterError:  # `drafters` reports the damage
        return "unknown"
    here = [f"{one.form} (here)" for one in listed if one.path]
    return ", ".join(dict.fromkeys([*here, *(one.form for one in listed if not one.path)]))


def print_table(titles: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Print a table at its full width: in a narrow terminal lines run on, and no cell is lost."""
    from rich.markup import escape
    from rich.table import Table

    table = Table(box=None, pad_edge=False, header_style="bold")
    for title in titles:
        table.add_column(title)
    for row in rows:
        table.add_row(*(escape(sanitise(cell)) for cell in row))
    screen = console()
    screen.width = screen.measure(table, options=screen.options.update(width=_WIDEST)).maximum
    screen.print(table)


def _from_home(name: str) -> str:
    """Return a path below the home folder as `~/...`, anything else as it is."""
    home = os.path.expanduser("~/")
    return f"~/{name.removeprefix(home)}" if name.startswith(home) else name
