"""What is kept, what was learned, and what a run has brought, in words."""

from __future__ import annotations

import time
from pathlib import Path

from redrafter_mlx.cli.terminal import one_line
from redrafter_mlx.errors import DamagedFileError
from redrafter_mlx.learning.folder import LearningFolder
from redrafter_mlx.learning.kept_texts import TextStore
from redrafter_mlx.learning.versions import LearningRun, history, in_use
from redrafter_mlx.runtime.files.paths import human_size
from redrafter_mlx.runtime.words import count


def status(folder: LearningFolder) -> list[str]:
    store = TextStore(folder.texts)
    times = [text.time for text in store.texts()]
    lines, newest, used = [], 0.0, "none yet"
    try:
        if (current := in_use(folder)) is not None:
            newest, used = current.newest, f"version {current.name}"
    except DamagedFileError as error:
        used = f"none: {one_line(str(error))}"
    new = sum(time > newest for time in times)
    lines = [
        one_line(folder.model),
        f"  answers kept     {len(times)} ({human_size(store.nbytes)}), {new} of them new",
        f"  learned drafter  {used}",
    ]
    lines += [f"  {describe_run(run)}" for run in history(folder)]
    return [*lines, f"  folder           {folder.path} ({human_size(folder.nbytes)})"]


def summary(folder: LearningFolder) -> str:
    """Return how far along a model's drafter is, in a few words."""
    brought = [run for run in history(folder) if run.version is not None]
    kept = f"{count(TextStore(folder.texts).count(), 'answer')} kept"
    if not folder.current.exists() or not brought:
        return f"{kept}, none learned from yet"
    return f"{kept}, learned drafter: {_change((brought[0].own[0], brought[-1].own[1]))}"


def describe_run(run: LearningRun) -> str:
    """Describe a run in one line: when it was, of how much, and what it brought."""
    parts = [
        time.strftime("%Y-%m-%d %H:%M", time.localtime(run.time)),
        f"{count(run.answers, 'answer')}, {count(run.steps, 'step')}",
        f"yours {_change(run.own)}",
    ]
    parts += [] if run.general is None else [f"general {_change(run.general)}"]
    kept = "the drafter stayed" if run.version is None else f"version {run.version}"
    return "; ".join([*parts, kept])


def describe_result(run: LearningRun, model: str) -> list[str]:
    lines = [
        f"{one_line(model)}: {count(run.steps, 'step')} in {run.seconds:.0f} s, "
        f"{count(run.answers, 'answer')} kept",
        f"  your answers   {_change(run.own)}, on some that it did not learn from",
    ]
    if run.general is not None:
        lines.append(f"  general texts  {_change(run.general)}")
    if run.version is None:
        return [*lines, "this is no better, so the drafter stays as it was"]
    use = f"version {run.version} is used from the next start on"
    return [*lines, f"{use}; `redrafter-mlx learn --undo` goes back"]


def plot(folder: LearningFolder) -> Path:
    """Draw tokens/step over the number of kept answers; raises as `draw_history`."""
    from redrafter_mlx.distill.report.plots import draw_history

    path = folder.path / "learning.png"
    draw_history(history(folder), folder.model, path)
    return path


def _change(pair: tuple[float, float]) -> str:
    before, after = pair
    return f"{before:.2f} -> {after:.2f} tokens/step ({after / before - 1:+.1%})"
