"""A report to share: one folder with the tables, the pictures, the profile, and all figures."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path

from redrafter_mlx.bench.analyse.compare import RESULT
from redrafter_mlx.bench.analyse.grid import grids
from redrafter_mlx.bench.analyse.result import Result
from redrafter_mlx.bench.show.curves import describe_curves, plot_curves
from redrafter_mlx.bench.show.plot import plot
from redrafter_mlx.bench.show.tables import header_lines, tables_of
from redrafter_mlx.distill.report.markdown import block, plain, table
from redrafter_mlx.errors import BadInputError
from redrafter_mlx.runtime.files.paths import check_writable, visible_files
from redrafter_mlx.tuning.cost import CostModel

REPORT, HEATMAP = "report.md", "heatmap.png"
_PARTIAL = ".partial"

_FILES = (REPORT, RESULT, HEATMAP, "profile*.png")  # patterns of the names of a report's files


def check_report(folder: str | Path, answers: str | None = None) -> None:
    """Raise BadInputError if a report cannot be written there beside the file of `--answers`."""
    folder = Path(folder)
    if not str(folder).strip() or folder.is_file():
        raise BadInputError(f"--report is {str(folder)!r}, which is a file; give a folder")
    there = {path.absolute() for path in visible_files(folder)} - {Path(answers or "").absolute()}
    ours = _files_in(folder.absolute()) if (folder / RESULT).is_file() else ()
    if others := sorted(there.difference(ours)):
        raise BadInputError(
            f"--report is {folder}, which holds {others[0].name}; give a folder for it alone"
        )
    if not folder.absolute().parent.is_dir():
        raise BadInputError(f"--report is {folder}; there is no folder {folder.parent}")
    check_writable(folder, "--report")


def write_report(
    folder: str | Path, result: Result, profiles: Mapping[str, CostModel], command: str
) -> Path:
    """Write the folder and replace an older report's files, and no others.

    The files are complete before the first of them appears in the folder.

    profiles: cost models by the dtype and drafter that were measured
    command:  the command line with which others can repeat the measurement
    """
    folder = Path(folder).absolute()
    partial = folder / _PARTIAL  # inside, since the folder may be on another disk than its parent
    made = not folder.exists()
    try:
        folder.mkdir(exist_ok=True)
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir()
        pictures = _draw(partial, result, profiles)
        text = _in_markdown(result, profiles, command, pictures)
        (partial / REPORT).write_text(text, encoding="utf-8")
        (partial / RESULT).write_text(json.dumps(result.to_dict()) + "\n", encoding="utf-8")
        written = {new.replace(folder / new.name) for new in sorted(partial.iterdir())}
        for old in set(_files_in(folder)) - written:
            old.unlink()
    except OSError as error:
        raise BadInputError(
            f"--report is {folder}, which cannot be written: {error.strerror or error}"
        ) from error
    finally:
        shutil.rmtree(partial, ignore_errors=True)
        if made and folder.is_dir() and not any(folder.iterdir()):  # nothing could be written
            folder.rmdir()
    return folder


def _files_in(folder: Path) -> list[Path]:
    return [path for name in _FILES for path in folder.glob(name) if path.is_file()]


def _draw(folder: Path, result: Result, profiles: Mapping[str, CostModel]) -> list[str]:
    """Draw the pictures, none without matplotlib, and return their names."""
    if find_spec("matplotlib") is None:
        return []
    names, m = [], result.machine
    if maps := grids(result.rows, min_cells=2):
        plot(maps, folder / HEATMAP, f"{m.chip} ({m.device}), mlx {m.mlx}")
        names.append(HEATMAP)
    for i, costs in enumerate(profiles.values(), 1):
        names.append("profile.png" if len(profiles) == 1 else f"profile-{i}.png")
        plot_curves(costs, folder / names[-1])
    return names


def _in_markdown(
    result: Result, profiles: Mapping[str, CostModel], command: str, pictures: list[str]
) -> str:
    machine = result.machine
    parts = [
        f"# redrafter-mlx {plain(machine.redrafter_mlx)} on {plain(machine.chip)}",
        block(command, "sh"),
        *(f"- {plain(line)}" for line in header_lines(result)),
    ]
    for shown in tables_of(result):
        cells = table([*map(plain, shown.columns)], [[*map(plain, row)] for row in shown.rows])
        parts += [f"## {plain(shown.title)}", cells, plain(shown.note)]
    parts += [f"![{name.split('.')[0]}]({name})" for name in pictures]
    for name, costs in profiles.items():
        parts += [f"## Profile: {plain(name)}", block(describe_curves(costs), "text")]
    if result.notes:
        parts += ["## Notes", *(f"- {plain(note)}" for note in result.notes)]
    parts.append(f"All figures are in [{RESULT}]({RESULT}), for `redrafter-mlx bench --compare`.")
    return "\n\n".join(filter(None, parts)) + "\n"
