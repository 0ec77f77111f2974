"""What matters in a drafter: one trained for every form, all with the same text, then compared.

    python -m redrafter_mlx.bench.ablation --folder DIR --questions FILE [--data FILE] -- ...

Everything behind `--` goes to every `redrafter-mlx train`; `redrafter-mlx quality` and
`redrafter-mlx bench` then measure all of them in one run each. A drafter whose folder is finished
is not trained again, and one that was interrupted goes on, so that the command can be repeated.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, TextIO, TypedDict

import typer

from redrafter_mlx.bench.report import markdown_table
from redrafter_mlx.bench.summary import WHOLE
from redrafter_mlx.bench.tables import TextTable
from redrafter_mlx.distill.card import CARD
from redrafter_mlx.drafter_files import CONFIG, WEIGHTS, load_drafter, save_drafter
from redrafter_mlx.load import load_target
from redrafter_mlx.target import Target


@dataclass(frozen=True)
class Form:
    """One row: what is different, and how `train` is told so."""

    name: str
    words: str
    options: tuple[str, ...] = ()


USUAL = Form("usual", "as by default")

CHOICES = Form(
    "choices", "learns the target's choices, not its probabilities", ("--soft-share", "0")
)

FORMS = (
    USUAL,
    Form("not-recurrent", "not recurrent", ("--no-rnn",)),
    Form("blocks-1", "1 residual block", ("--layers", "1")),
    Form("blocks-4", "4 residual blocks", ("--layers", "4")),
    Form("own-head", "an output layer of its own", ("--head", "own")),
    Form("vocabulary-4k", "4,096 tokens can be drafted", ("--draft-vocab", "4096")),
    Form("vocabulary-16k", "16,384 tokens", ("--draft-vocab", "16384")),
    Form("vocabulary-all", "all tokens", ("--draft-vocab", "all")),
    Form("last-state", "reads the last hidden state alone", ("--context", "none")),
    Form("borrow", "borrows two layers", ("--borrow", "auto")),
    CHOICES,
    Form("answers", "learns from the answers alone", ("--no-learn-prompts",)),
)

UNTRAINED = Form("untrained", "has learnt nothing")

GIVEN = (
    Form("given-distilled", "given answers, the target's words", ("--labels", "target")),
    Form("given-truth", "given answers as they stand", ("--labels", "data")),
)
"""Equal in text and passes; both learn choices alone."""

CHOICES_ALONE = (CHOICES, *GIVEN)
"""Texts that are only read have nothing for them."""


class Quality(TypedDict):
    """A drafter of `redrafter-mlx quality --json`, by beam width as text where it is a mapping."""

    name: str
    tokens_per_step: dict[str, float]
    top1: list[float]
    draft_seconds: dict[str, float]


class Speed(TypedDict):
    """A row of `redrafter-mlx bench -o json`."""

    drafter: str | None
    method: str
    category: str
    tps: dict[str, float]
    speedup: dict[str, float]


def main(
    folder: Annotated[Path, typer.Option(help="Where the drafters are kept.")],
    questions: Annotated[Path, typer.Option(help="What they are compared on.")],
    train: Annotated[list[str], typer.Argument(help="Options of every `train`.")],
    model: Annotated[str, typer.Option(help="The target.")] = "smollm2-135m",
    data: Annotated[
        Path | None, typer.Option(help="Given answers, for two rows that learn from them.")
    ] = None,
    only: Annotated[str | None, typer.Option(help="Train these rows, and measure nothing.")] = None,
    timed: Annotated[int, typer.Option(help="Questions that decoding is timed on.")] = 8,
    beam_length: Annotated[
        int | None,
        typer.Option(help="Time one beam of so many tokens, not the shapes chosen by themselves."),
    ] = None,
) -> None:
    """Train a drafter of every form, compare them, and print the table as Markdown."""
    given = GIVEN if data is not None else ()
    wanted = [f for f in (*FORMS, *given) if only is None or f.name in only.split(",")]
    for form in wanted:
        common = train if form not in CHOICES_ALONE else _without(train, "--read")
        arguments = [*common, *form.options]
        if form in given:
            assert data is not None
            arguments = [*_without(arguments, "--prompts", "--own-prompts"),
                         "--data", str(data), "--soft-share", "0"]  # fmt: skip
        _train(model, folder / form.name, arguments)
    if only is not None:
        return
    _untrained(model, folder)
    forms = [*FORMS, UNTRAINED, *given]
    folders = [str(folder / form.name) for form in forms]
    said = ["--model", model, "--questions", str(questions)]
    quality: list[Quality] = json.loads(_printed("quality", *folders, *said, "--json"))["drafters"]
    drafters = [part for path in folders for part in ("--drafter", path)]
    one_beam = (
        () if beam_length is None else ("--beam-width", "1", "--beam-length", f"{beam_length}")
    )
    how = ["--limit", str(timed), "--max-tokens", "64", "-r", "1", "--no-breakdown", "-o", "json"]
    measured = _printed("bench", *drafters, *said, *one_beam, *how)
    speed: list[Speed] = json.loads(measured)["rows"]
    print(markdown_table(table(forms, folder, quality, speed)))


def table(
    forms: Sequence[Form],
    folder: Path,
    quality: Sequence[Quality],
    speed: Sequence[Speed],
) -> TextTable:
    """A row for each form, from what `quality` and `bench` printed."""
    found = {drafter["name"]: drafter for drafter in quality}
    timed = {row["drafter"]: row for row in speed
             if row["category"] == WHOLE and row["method"] == "redrafter"}  # fmt: skip
    rows = []
    for form in forms:
        path = folder / form.name
        mine, bench = found[str(path)], timed[str(path)]
        rows.append(
            (
                form.words,
                f"{(path / WEIGHTS).stat().st_size / 1e6:.1f}",
                *(f"{mine['tokens_per_step'][str(w)]:.2f}" for w in (1, 2, 3, 4)),
                " ".join(f"{x:.0%}" for x in mine["top1"]),
                *(f"{mine['draft_seconds'][str(w)] * 1e3:.0f}" for w in (1, 4)),
                f"{bench['tps']['median']:.1f}",
                f"{bench['speedup']['median']:.2f}x",
            )
        )
    return TextTable(
        "What matters",
        ("drafter", "MB", "W 1", "2", "3", "4", "right at position 1, 2, ...",
         "drafting, W 1 (ms)", "W 4 (ms)", "tokens/s", "speedup"),
        tuple(rows),
    )  # fmt: skip


def _train(model: str, folder: Path, options: Sequence[str]) -> None:
    """Train one drafter, unless it is finished; the card is the last of its files."""
    if (folder / CARD).exists():
        return
    _run("train", "--model", model, "--output", str(folder), *options, "--timed-questions", "0",
         stdout=sys.stderr)  # fmt: skip


def _untrained(model: str, folder: Path) -> None:
    """The usual drafter before it learnt anything."""
    path = folder / UNTRAINED.name
    if not (path / CONFIG).exists():
        target = Target(load_target(model, offline=True).model)
        save_drafter(load_drafter(folder / USUAL.name, target).untrained(target.dtype), path)


def _without(options: Sequence[str], *names: str) -> list[str]:
    """The options less those named and their values."""
    kept = list(options)
    for name in names:
        while name in kept:
            at = kept.index(name)
            del kept[at : at + 2]
    return kept


def _printed(*arguments: str) -> str:
    """What a command prints as its last line."""
    return _run(*arguments, stdout=subprocess.PIPE).splitlines()[-1]


def _run(*arguments: str, stdout: int | TextIO) -> str:
    command = [sys.executable, "-m", "redrafter_mlx.cli.main", *arguments]
    done = subprocess.run(command, stdout=stdout, text=True, check=False)
    if done.returncode:
        raise typer.Exit(done.returncode)
    return done.stdout or ""


if __name__ == "__main__":
    typer.run(main)
