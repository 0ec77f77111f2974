"""`redrafter-mlx train`: a drafter for any model, trained on this machine."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, cast

import typer

from redrafter_mlx.cli import options as opt
from redrafter_mlx.config import DType, check_choice
from redrafter_mlx.errors import BadInputError

_CORPUS, _DRAFTER, _TRAINING = "Corpus", "Drafter", "Training"


def command(
    output: Annotated[
        Path, typer.Option("--output", "-o", metavar="DIR", help="The drafter's folder.")
    ],
    model: opt.Model = None,
    prompts: Annotated[
        Path | None,
        typer.Option(
            "--prompts",
            metavar="FILE",
            rich_help_panel=_CORPUS,
            show_default=False,
            help="Your own questions: JSONL, plain lines, MT-Bench, ShareGPT, Alpaca or OpenAI "
            "chat. The target answers them beside prompts that it writes itself.",
        ),
    ] = None,
    data: Annotated[
        Path | None,
        typer.Option(
            "--data",
            metavar="FILE",
            rich_help_panel=_CORPUS,
            show_default=False,
            help="Conversations with finished answers to learn from instead.",
        ),
    ] = None,
    labels: Annotated[
        str,
        typer.Option(
            "--labels",
            metavar="target|data",
            rich_help_panel=_CORPUS,
            help="With --data: learn what the target would say at each place, or the answers.",
        ),
    ] = "target",
    own_prompts: Annotated[
        float | None,
        typer.Option(
            "--own-prompts",
            metavar="SHARE",
            rich_help_panel=_CORPUS,
            show_default=False,
            help="Share of the prompts that the target writes itself. [default: 0.5 with "
            "--prompts, else 1]",
        ),
    ] = None,
    answer_tokens: Annotated[
        int,
        typer.Option(
            "--answer-tokens",
            metavar="N",
            rich_help_panel=_CORPUS,
            help="Size of the corpus. More is better: 2 million is little, 10 million a lot.",
        ),
    ] = 2_000_000,
    cache_bytes: Annotated[
        int,
        typer.Option(
            "--cache-bytes",
            metavar="N",
            rich_help_panel=_CORPUS,
            help="The most that the corpus and its hidden states may take on disk.",
        ),
    ] = 20_000_000_000,
    workers: Annotated[
        int | None,
        typer.Option(
            "--workers",
            metavar="N",
            rich_help_panel=_CORPUS,
            show_default=False,
            help="Processes that write the corpus. [default: 1 on a GPU, one a core on a CPU]",
        ),
    ] = None,
    rnn: Annotated[
        bool,
        typer.Option("--rnn/--no-rnn", rich_help_panel=_DRAFTER, help="The paper's recurrence."),
    ] = True,
    layers: Annotated[
        int,
        typer.Option("--layers", metavar="N", rich_help_panel=_DRAFTER, help="Residual blocks."),
    ] = 2,
    exit_dim: Annotated[
        int | None,
        typer.Option(
            "--exit-dim",
            metavar="N",
            rich_help_panel=_DRAFTER,
            show_default=False,
            help="Width of the residual blocks. [default: twice the target's hidden size]",
        ),
    ] = None,
    head: Annotated[
        str,
        typer.Option(
            "--head",
            metavar="tied|own",
            rich_help_panel=_DRAFTER,
            help="The output layer: the target's, or the drafter's own as in the paper.",
        ),
    ] = "tied",
    draft_vocab: Annotated[
        str,
        typer.Option(
            "--draft-vocab",
            metavar="N|all",
            rich_help_panel=_DRAFTER,
            help="Only the N most frequent tokens can be drafted, which is faster.",
        ),
    ] = "8192",
    borrow: Annotated[
        str,
        typer.Option(
            "--borrow",
            metavar="none|auto|I,J",
            rich_help_panel=_DRAFTER,
            help="Layers of the target, counted from 0, that the drafter looks back over the text "
            "with: better guesses, dearer drafting. auto: the last, and one at four fifths of the "
            "depth.",
        ),
    ] = "none",
    drafter_bits: Annotated[
        int | None,
        typer.Option(
            "--drafter-bits",
            metavar="4|8",
            rich_help_panel=_DRAFTER,
            show_default=False,
            help="Quantise the drafter when saving. [default: float16]",
        ),
    ] = None,
    paper: Annotated[
        bool,
        typer.Option(
            "--paper",
            rich_help_panel=_DRAFTER,
            help="The paper's own form (own head, whole vocabulary), which its code loads.",
        ),
    ] = False,
    epochs: Annotated[
        float, typer.Option("--epochs", metavar="X", rich_help_panel=_TRAINING, help="Passes.")
    ] = 2.0,
    draft_length: Annotated[
        int,
        typer.Option(
            "--draft-length",
            metavar="T",
            rich_help_panel=_TRAINING,
            help="Tokens that are learnt ahead.",
        ),
    ] = 5,
    batch: Annotated[
        int, typer.Option("--batch", metavar="N", rich_help_panel=_TRAINING, help="Places a batch.")
    ] = 1024,
    accumulate: Annotated[
        int,
        typer.Option(
            "--accumulate", metavar="N", rich_help_panel=_TRAINING, help="Batches a step."
        ),
    ] = 1,
    learning_rate: Annotated[
        float, typer.Option("--learning-rate", metavar="X", rich_help_panel=_TRAINING)
    ] = 1e-3,
    soft_share: Annotated[
        float | None,
        typer.Option(
            "--soft-share",
            metavar="X",
            rich_help_panel=_TRAINING,
            show_default=False,
            help="How much of the loss is about the target's probabilities, not its choices. "
            "[default: 0.5, 0 with --data and --labels target]",
        ),
    ] = None,
    depth_decay: Annotated[
        float,
        typer.Option(
            "--depth-decay",
            metavar="X",
            rich_help_panel=_TRAINING,
            help="Weight of each position beside the one before.",
        ),
    ] = 0.8,
    evaluations: Annotated[
        int,
        typer.Option(
            "--evaluations", metavar="N", rich_help_panel=_TRAINING, help="Looks at held-out text."
        ),
    ] = 10,
    memory_bytes: Annotated[
        int,
        typer.Option(
            "--memory-bytes",
            metavar="N",
            rich_help_panel=_TRAINING,
            help="Most hidden states in memory at once.",
        ),
    ] = 4_000_000_000,
    seed: Annotated[int, typer.Option("--seed", metavar="N", rich_help_panel=_TRAINING)] = 0,
    timed: Annotated[
        int,
        typer.Option(
            "--timed-questions",
            metavar="N",
            rich_help_panel=_TRAINING,
            help="Held-out questions for the measurement at the end; 0 leaves it out.",
        ),
    ] = 8,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Print sizes and a time estimate, and do nothing.")
    ] = False,
    dtype: opt.Dtype = "auto",
    quantize: opt.Quantize = None,
    offline: opt.Offline = False,
) -> None:
    """Train a drafter for a model, from text that the model writes itself.

    Ctrl-C saves and stops; the same command goes on where it stopped. At the end the drafter is
    timed beside plain decoding, and a line says whether it is faster on this machine.
    """
    from redrafter_mlx.cli.train_screen import run_training
    from redrafter_mlx.distill.blocks import WritingOptions
    from redrafter_mlx.distill.job import DrafterForm, TrainingJob
    from redrafter_mlx.distill.options import TrainOptions
    from redrafter_mlx.distill.reading import Labels
    from redrafter_mlx.drafter_config import Head

    check_choice("--dtype", dtype, DType)
    check_choice("--head", head, Head)
    check_choice("--labels", labels, Labels)
    if own_prompts is None:
        own_prompts = 0.5 if prompts else 1.0
    form = DrafterForm(
        rnn, layers, exit_dim, cast(Head, head), _vocabulary(draft_vocab), _layers(borrow)
    )
    if paper:
        form = DrafterForm(rnn, layers, exit_dim, "own", None, ())
    if soft_share is None:
        soft_share = 0.0 if data is not None and labels == "target" else 0.5
    job = TrainingJob(
        model=model or "smollm2-135m",
        output=output,
        dtype=cast(DType, dtype),
        quantize=quantize,
        offline=offline,
        prompts=prompts,
        data=data,
        labels=cast(Labels, labels),
        answer_tokens=answer_tokens,
        cache_bytes=cache_bytes,
        workers=workers,
        writing=WritingOptions(own_share=own_prompts, seed=seed),
        form=form,
        training=TrainOptions(
            draft_length=draft_length,
            epochs=epochs,
            batch=batch,
            accumulate=accumulate,
            learning_rate=learning_rate,
            soft_share=soft_share,
            depth_decay=depth_decay,
            evaluations=evaluations,
            memory_bytes=memory_bytes,
            seed=seed,
        ),
        timed=timed,
        bits=drafter_bits,
    )
    run_training(job, dry_run=dry_run)


def _vocabulary(given: str) -> int | None:
    if given == "all":
        return None
    if not given.isdigit() or int(given) < 1:
        raise BadInputError(f"--draft-vocab is {given}; give a number of tokens, or all")
    return int(given)


def _layers(given: str) -> tuple[int, ...] | None:
    if given == "auto":
        return None
    if given == "none":
        return ()
    if not all(part.strip().isdigit() for part in given.split(",")):
        raise BadInputError(f"--borrow is {given}; give none, auto, or layers such as 24,29")
    return tuple(sorted({int(part) for part in given.split(",")}))
