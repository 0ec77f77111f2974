"""The model card of a trained drafter: what it is, what it gains, and how it was made."""

from __future__ import annotations

import json
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from redrafter_mlx.distill.corpus.folder import CorpusSize
from redrafter_mlx.distill.evaluation.acceptance import DraftQuality
from redrafter_mlx.distill.evaluation.speed import TIMED_TOKENS, MeasuredRow, verdict
from redrafter_mlx.distill.forms.form import Recipe
from redrafter_mlx.distill.job import TrainingJob
from redrafter_mlx.distill.options import Labels
from redrafter_mlx.distill.report.markdown import block, code, plain, table
from redrafter_mlx.distill.report.plots import ACCURACY, LOSS
from redrafter_mlx.runtime.files.atomic_write import atomic_write
from redrafter_mlx.runtime.words import count
from redrafter_mlx.target_model.source import TargetSource
from redrafter_mlx.weights.hub_card import card_front_matter, hub_repo
from redrafter_mlx.weights.registry import REGISTRY

CARD = "README.md"


@dataclass(frozen=True)
class TrainingReport:
    """The contents of a card."""

    target: TargetSource
    job: TrainingJob
    versions: Mapping[str, str]  # by package
    machine: str  # chip and system on which the drafter was trained and measured
    corpus: CorpusSize
    recipe: Recipe
    seconds: float | None  # of training, without writing the corpus; None without a log
    quality: DraftQuality | None  # on held-out texts, None if the log was removed
    measured: Sequence[MeasuredRow]
    started_from: str | None = None  # digest of the weights that training starts from


def write_card(report: TrainingReport, folder: Path) -> Path:
    """Write README.md in the Hub's conventions, with the plots in the folder; return its path."""
    path = folder / CARD
    pictures = [name for name in (LOSS, ACCURACY) if (folder / name).exists()]
    with atomic_write(path) as partial:
        partial.write_text(render_card(report, pictures), encoding="utf-8")
    return path


def render_card(report: TrainingReport, pictures: Sequence[str] = ()) -> str:
    """Return the card's text: YAML for the Hub, then Markdown for people."""
    sections = (
        card_front_matter(report.target.name, report.target.licence),
        _what(report),
        _use(report),
        _measured(report),
        _held_out(report.quality, report.job.labels),
        _made(report),
        *(f"![{name.split('.')[0]} over the steps of training]({name})" for name in pictures),
        _limits(report),
    )
    return "\n\n".join(sections) + "\n"


def _what(report: TrainingReport) -> str:
    target = report.target
    repo = hub_repo(target.name)
    link = "" if repo is None else f" ([{repo}](https://huggingface.co/{repo}))"
    return (
        f"# A drafter for {_shown(target.name)}\n\n"
        f"{report.recipe.title} that guesses the next few words of {_shown(target.name)}{link}, "
        f"for use with redrafter-mlx. The model itself checks all guesses in one call and keeps "
        f"what it would have written, so that answers can come faster and stay the same. "
        f"The method is {report.recipe.method}.\n\n"
        f"**{verdict(report.measured)}** This machine: {plain(report.machine)}."
    )


def _use(report: TrainingReport) -> str:
    name = _public_name(report.target.name)
    quoted = json.dumps(name, ensure_ascii=False)
    return (
        "## How to use it\n\n"
        "With this folder beside you as `drafter` (`hf download` with this repository's name and "
        "`--local-dir drafter` brings it):\n\n"
        + block(f"redrafter-mlx chat {shlex.quote(name)} --drafter drafter", "sh")
        + "\n\n"
        + block(
            "import redrafter_mlx\n\n"
            f'model = redrafter_mlx.load({quoted}, drafter="drafter")\n'
            'for response in model.stream("Why is the sky blue?"):\n'
            '    print(response.text, end="", flush=True)',
            "python",
        )
    )


def _measured(report: TrainingReport) -> str:
    if not report.measured:
        return "## What it gains\n\nNot measured."
    rows = [
        (
            f"{row.beam_width}", f"{row.beam_length}", f"{row.nodes}",
            f"{row.tokens_per_step:.2f}", f"{row.tokens_per_second:.1f}",
            f"{row.baseline_tokens_per_second:.1f}", f"{row.speedup:.2f}",
        )
        for row in report.measured
    ]  # fmt: skip
    heads = (
        "beam width", "beam length", "nodes", "tokens/step", "tokens/s", "tokens/s without",
        "speedup",
    )  # fmt: skip
    return (
        f"## What it gains\n\nMeasured on {plain(report.machine)}, in {_arithmetic(report)}: "
        f"{report.measured[0].questions} held-out prompts, {TIMED_TOKENS} tokens each, greedy; "
        f"medians, interleaved with plain decoding. "
        f"tokens/step is the tokens emitted for each call of the model; without a drafter it is "
        f"1.\n\n{table(heads, rows)}"
    )


def _held_out(quality: DraftQuality | None, labels: Labels) -> str:
    if quality is None:
        return "## How good its guesses are\n\nThe log of its training was removed."
    guesses = [
        (str(position), f"{first:.1%}", f"{five:.1%}")
        for position, (first, five) in enumerate(zip(quality.top1, quality.top5, strict=True), 1)
    ]
    beams = [
        (
            str(width),
            f"{per_step:.2f}",
            " ".join(f"{x:.0%}" for x in quality.accepted.get(width, ())),
        )
        for width, per_step in sorted(quality.tokens_per_step.items())
    ]
    whose = "the model's own" if labels == "target" else "the text's next"
    return (
        f"## How good its guesses are\n\nOn held-out texts: how often {whose} "
        "token is the first guess, and among the first five.\n\n"
        + table(("token ahead", "first", "first five"), guesses)
        + "\n\nWhat that comes to in decoding those texts, and the share of steps in which at "
        "least 1, 2, ... drafts were accepted.\n\n"
        + table(("beam width", "tokens/step", "steps with 1, 2, ... accepted"), beams)
    )


def _made(report: TrainingReport) -> str:
    target, corpus = report.target, report.corpus
    left_out = ", ".join(f"{n:,} {plain(why)}" for why, n in sorted(corpus.left_out.items()))
    digest = report.started_from
    start = f"a trained drafter, {code(f'sha256:{digest}')}" if digest else "random weights"
    rows = [
        ("model", f"{_shown(target.name)}, {_arithmetic(report)}"),
        ("its fingerprint", code(target.fingerprint)),
        ("its licence", plain(target.licence or "not named in its files")),
        (
            "corpus",
            f"{count(corpus.texts, 'text')}, {corpus.answer_tokens:,} answer tokens, "
            f"{corpus.read_tokens:,} tokens read",
        ),
        ("left out", left_out or "nothing"),
        ("drafter", report.recipe.description),
        ("started from", start),
        ("training time", "unknown" if report.seconds is None else _duration(report.seconds)),
        ("versions", ", ".join(f"{plain(k)} {plain(v)}" for k, v in report.versions.items())),
        ("machine", plain(report.machine)),
    ]
    return (
        "## How it was made\n\n"
        "All options are in `train.toml`; `redrafter-mlx train --config train.toml --output DIR` "
        "repeats the run.\n\n" + table(("", ""), rows)
    )


def _limits(report: TrainingReport) -> str:
    reduced = report.target.dtype != "float32" or report.target.bits is not None
    rounding = (
        " In reduced precision two tokens that are nearly tied can swap, as they can between any "
        "two kernels; `redrafter-mlx verify` shows whether that happened."
        if reduced
        else ""
    )
    return (
        "## Limits\n\n"
        "- It was trained for this very model, and is refused for another.\n"
        "- It guesses well on text like its corpus. On other text (another language, code, long "
        "tables) fewer drafts are accepted, and decoding can be slower than without it.\n"
        f"- A bad guess costs time, never a word: the output is the model's own.{rounding}\n"
        "- The speeds above are those of one machine. `redrafter-mlx bench` measures yours.\n"
        "- What the model gets wrong, it still gets wrong."
    )


def _arithmetic(report: TrainingReport) -> str:
    bits = report.target.bits
    return report.target.dtype if bits is None else f"{report.target.dtype}, {bits}-bit weights"


def _duration(seconds: float) -> str:
    minutes, whole = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    if hours:
        return f"{hours} h {minutes} min"
    return f"{minutes} min {whole} s" if minutes else f"{whole} s"


def _public_name(name: str) -> str:
    """Return a target's name, without the folders of the machine on which training ran."""
    return name if name in REGISTRY or hub_repo(name) else Path(name).name or name


def _shown(name: str) -> str:
    return code(_public_name(name))
