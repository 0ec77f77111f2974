"""`redrafter-mlx train`: a drafter for any model, trained on this machine."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Annotated

import typer

from redrafter_mlx.cli import options as opt
from redrafter_mlx.errors import BadInputError

_CORPUS, _DRAFTER, _TRAINING, _MODEL = "Corpus", "Drafter", "Training", "Model"
_NUMBER = re.compile(r"[0-9]{1,9}")

Output = Annotated[str, typer.Option("--output", "-o", metavar="DIR", help="The drafter's folder.")]
Config = Annotated[
    Path | None,
    typer.Option(
        "--config", metavar="FILE", show_default=False,
        help="An options file, such as the train.toml that is written beside each drafter. "
        "Options of the command win over it.",
    ),
]  # fmt: skip
Prompts = Annotated[
    list[Path] | None,
    typer.Option(
        "--prompts", metavar="FILE", rich_help_panel=_CORPUS, show_default=False,
        help="Your own questions: JSONL, plain lines, MT-Bench, ShareGPT, Alpaca or OpenAI "
        "chat. The target answers them beside prompts that it writes itself. Several times for "
        "several files.",
    ),
]  # fmt: skip
Data = Annotated[
    Path | None,
    typer.Option(
        "--data", metavar="FILE", rich_help_panel=_CORPUS, show_default=False,
        help="Conversations with finished answers to train on instead.",
    ),
]  # fmt: skip
Labels = Annotated[
    str | None,
    typer.Option(
        "--labels", metavar="target|data", rich_help_panel=_CORPUS, show_default=False,
        help="With --data: train on what the target would answer at each position, or on the "
        "answers. [default: target]",
    ),
]  # fmt: skip
AnswerTokens = Annotated[
    int | None,
    typer.Option(
        "--answer-tokens", metavar="N", rich_help_panel=_CORPUS, show_default=False,
        help="Size of the corpus: 2 million is little, 10 million a lot. [default: 2000000]",
    ),
]  # fmt: skip
Layers = Annotated[
    int | None,
    typer.Option(
        "--layers", metavar="N", rich_help_panel=_DRAFTER, show_default=False,
        help="Residual blocks. [default: 2]",
    ),
]  # fmt: skip
DraftVocab = Annotated[
    str | None,
    typer.Option(
        "--draft-vocab", metavar="N|all", rich_help_panel=_DRAFTER, show_default=False,
        help="Only the N most frequent tokens can be drafted, which is faster. [default: 8192]",
    ),
]  # fmt: skip
DraftLength = Annotated[
    int | None,
    typer.Option(
        "--draft-length", metavar="T", rich_help_panel=_DRAFTER, show_default=False,
        help="Tokens that it is trained to draft in a row. [default: 5]",
    ),
]  # fmt: skip
Epochs = Annotated[
    float | None,
    typer.Option(
        "--epochs", metavar="X", rich_help_panel=_TRAINING, show_default=False,
        help="Passes over the corpus. [default: 4]",
    ),
]  # fmt: skip
StartFrom = Annotated[
    Path | None,
    typer.Option(
        "--start-from", metavar="DIR", rich_help_panel=_TRAINING, show_default=False,
        help="A drafter of the same form, which is trained further on this corpus.",
    ),
]  # fmt: skip
Seed = Annotated[
    int | None,
    typer.Option(
        "--seed", metavar="N", rich_help_panel=_TRAINING, show_default=False,
        help="Of the corpus and of training: another one brings other texts. [default: 0]",
    ),
]  # fmt: skip
Memory = Annotated[
    int | None,
    typer.Option(
        "--memory", metavar="BYTES", rich_help_panel=_TRAINING, show_default=False,
        help="Most memory that writing and training take, all processes together. "
        "[default: half of the machine's]",
    ),
]  # fmt: skip
DryRun = Annotated[
    bool, typer.Option("--dry-run", help="Print sizes and a time estimate, and do nothing.")
]
Dtype = Annotated[
    str | None,
    typer.Option(
        "--dtype", metavar="TYPE", rich_help_panel=_MODEL, show_default=False,
        help="float16, bfloat16, float32, or auto: as stored on a GPU, float32 on a CPU. "
        "[default: auto]",
    ),
]  # fmt: skip


@opt.with_options
def command(
    *,
    output: Output,
    config: Config = None,
    prompts: Prompts = None,
    data: Data = None,
    labels: Labels = None,
    answer_tokens: AnswerTokens = None,
    layers: Layers = None,
    draft_vocab: DraftVocab = None,
    draft_length: DraftLength = None,
    epochs: Epochs = None,
    start_from: StartFrom = None,
    seed: Seed = None,
    memory: Memory = None,
    dry_run: DryRun = False,
    dtype: Dtype = None,
    target: Annotated[opt.TargetOptions, ("model", "quantize", "offline")],
) -> None:
    """Train a drafter for a model, on text that the model writes itself.

    Ctrl-C saves and stops; the same command resumes where it stopped. At the end the drafter is
    timed beside plain decoding, and a line says whether it is faster on this machine. All options
    are written to train.toml beside the drafter; --config repeats or changes a run.
    """
    from redrafter_mlx.cli.train_screen import run_training
    from redrafter_mlx.distill.options_file import make_job, read_options

    if not output.strip():
        raise BadInputError("--output is empty; give a folder")
    given = {"model": "smollm2-135m", **({} if config is None else read_options(config))}
    for key, value in {
        "model": target.model or None,
        "prompts": [str(path) for path in prompts or ()] or None,
        "data": None if data is None else str(data),
        "labels": labels,
        "answer_tokens": answer_tokens,
        "drafter.layers": layers,
        "drafter.draft_vocab": None if draft_vocab is None else _vocabulary(draft_vocab),
        "training.draft_length": draft_length,
        "training.epochs": epochs,
        "start_from": None if start_from is None else str(start_from),
        "writing.seed": seed,
        "training.seed": seed,
        "memory": memory,
        "dtype": dtype,
        "quantize": target.quantize,
    }.items():
        if value is not None:
            table, _, name = key.rpartition(".")
            part = given.setdefault(table, {}) if table else given
            if isinstance(part, dict):
                part[name] = value
    run_training(make_job(given, Path(output), offline=target.offline), dry_run=dry_run)


def _vocabulary(given: str) -> int | str:
    if given != "all" and (not _NUMBER.fullmatch(given) or int(given) < 1):
        raise BadInputError(f"--draft-vocab is {given}; give a number of tokens, or all")
    return given if given == "all" else int(given)
