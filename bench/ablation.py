"""What matters in a drafter: one trained for every form, all with the same text, then compared.

    python -m redrafter_mlx.bench.ablation --folder DIR --questions FILE [--data FILE] -- ...

Everything behind `--` goes to every `redrafter-mlx train`; `redrafter-mlx quality` then compares
them, and it and `redrafter-mlx bench` time all of them in one run each. A drafter whose folder is
finished is not trained again, one that was interrupted goes on, and what was found of one on the
questions is kept beside it, so that the command can be repeated.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, TextIO, TypedDict, cast

import typer

from redrafter_mlx.bench.analyse.summary import WHOLE
from redrafter_mlx.bench.show.report import markdown_table
from redrafter_mlx.bench.show.tables import TextTable
from redrafter_mlx.distill.card import CARD
from redrafter_mlx.drafting.checkpoint import CONFIG, WEIGHTS, load_drafter, save_drafter
from redrafter_mlx.loading import load_target
from redrafter_mlx.runtime.atomic_write import write_whole
from redrafter_mlx.target.model import Target


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
    only: Annotated[
        str | None,
        typer.Option(help="Train these rows and try them on the questions, but time nothing."),
    ] = None,
    timed: Annotated[int, typer.Option(help="Questions that decoding is timed on.")] = 8,
    beam_length: Annotated[
        int | None,
        typer.Option(help="Time one beam of so many tokens, not the shapes chosen by themselves."),
    ] = None,
) -> None:
    """Train a drafter of every form, compare them, and print the table as Markdown."""
    given = GIVEN if data is not None else ()
    wanted = _chosen((*FORMS, UNTRAINED, *given), only)
    said = ["--model", model, "--questions", str(questions)]
    found: list[Quality] = []
    for form in wanted:
        path = folder / form.name
        learnt = USUAL if form == UNTRAINED else form
        _train(model, folder / learnt.name, _options(learnt, train, data))
        if form == UNTRAINED:
            _untrained(model, folder)
        found.append(_quality(path, questions, said))
    if only is not None:
        return
    folders = [str(folder / form.name) for form in wanted]
    drafting: list[Quality] = json.loads(
        _printed("quality", *folders, *said, "--limit", "1", "--max-tokens", "8", "--json")
    )["drafters"]
    drafters = [part for path in folders for part in ("--drafter", path)]
    one_beam = (
        () if beam_length is None else ("--beam-width", "1", "--beam-length", f"{beam_length}")
    )
    how = ["--limit", str(timed), "--max-tokens", "64", "-r", "1", "--no-breakdown", "-o", "json"]
    measured = _printed("bench", *drafters, *said, *one_beam, *how)
    speed: list[Speed] = json.loads(measured)["rows"]
    print(markdown_table(table(wanted, folder, found, drafting, speed)))


def table(
    forms: Sequence[Form],
    folder: Path,
    quality: Sequence[Quality],
    drafting: Sequence[Quality],
    speed: Sequence[Speed],
) -> TextTable:
    """A row for each form, from what `quality` and `bench` printed.

    quality:  each drafter on all questions
    drafting: all drafters in one run, for the times of their drafts
    """
    found = {drafter["name"]: drafter for drafter in quality}
    drafts = {drafter["name"]: drafter["draft_seconds"] for drafter in drafting}
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
                *(f"{drafts[str(path)][str(w)] * 1e3:.0f}" for w in (1, 4)),
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


def _chosen(forms: Sequence[Form], only: str | None) -> list[Form]:
    """The rows named in `only`, with commas between them; all of them for None."""
    if only is None:
        return list(forms)
    known = {form.name: form for form in forms}
    unknown = [name for name in only.split(",") if name not in known]
    if unknown:
        raise typer.BadParameter(f"no row {unknown[0]!r}; choose of {', '.join(known)}")
    return [form for form in forms if form.name in only.split(",")]


def _train(model: str, folder: Path, options: Sequence[str]) -> None:
    """Train one drafter, unless it is finished; the card is the last of its files."""
    if (folder / CARD).exists():
        return
    _run("train", "--model", model, "--output", str(folder), *options, "--timed-questions", "0",
         stdout=sys.stderr)  # fmt: skip


def _options(form: Form, train: Sequence[str], data: Path | None) -> list[str]:
    """What `train` is told for a form, the common options `train` included."""
    common = train if form not in CHOICES_ALONE else _without(train, "--read")
    arguments = [*common, *form.options]
    if form not in GIVEN:
        return arguments
    assert data is not None
    return [*_without(arguments, "--prompts", "--own-prompts"),
            "--data", str(data), "--soft-share", "0"]  # fmt: skip


def _quality(path: Path, questions: Path, said: Sequence[str]) -> Quality:
    """One drafter on all questions, kept beside its folder under the questions' name."""
    kept = path.with_name(f"{path.name}-{questions.stem}.json")
    if not kept.exists():
        write_whole(kept, _printed("quality", str(path), *said, "--json"))
    (found,) = json.loads(kept.read_text(encoding="utf-8"))["drafters"]
    return cast(Quality, found)


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
