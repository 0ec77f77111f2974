"""The options that only `train` has."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

_DRAFTER, _TRAINING = "Drafter", "Training"

Output = Annotated[str, typer.Option("--output", "-o", metavar="DIR", help="The drafter's folder.")]
Rnn = Annotated[
    bool,
    typer.Option("--rnn/--no-rnn", rich_help_panel=_DRAFTER, help="The paper's recurrence."),
]
Layers = Annotated[
    int,
    typer.Option("--layers", metavar="N", rich_help_panel=_DRAFTER, help="Residual blocks."),
]
ExitDim = Annotated[
    int | None,
    typer.Option(
        "--exit-dim",
        metavar="N",
        rich_help_panel=_DRAFTER,
        show_default=False,
        help="Width of the residual blocks. [default: twice the target's hidden size]",
    ),
]
Head = Annotated[
    str,
    typer.Option(
        "--head",
        metavar="tied|own",
        rich_help_panel=_DRAFTER,
        help="The output layer: the target's, or the drafter's own as in the paper.",
    ),
]
DraftVocab = Annotated[
    str,
    typer.Option(
        "--draft-vocab",
        metavar="N|all",
        rich_help_panel=_DRAFTER,
        help="Only the N most frequent tokens can be drafted, which is faster.",
    ),
]
Context = Annotated[
    str,
    typer.Option(
        "--context",
        metavar="none|auto|I,J",
        rich_help_panel=_DRAFTER,
        help="Layers of the target, counted from 0, whose inputs the drafter reads beside its last "
        "hidden state. auto: at two thirds and nine tenths of the depth.",
    ),
]
DrafterBits = Annotated[
    int | None,
    typer.Option(
        "--drafter-bits",
        metavar="4|8",
        rich_help_panel=_DRAFTER,
        show_default=False,
        help="Quantise the drafter when saving. [default: float16]",
    ),
]
Paper = Annotated[
    bool,
    typer.Option(
        "--paper",
        rich_help_panel=_DRAFTER,
        help="The paper's own form (own head, whole vocabulary), which its code loads.",
    ),
]
Epochs = Annotated[
    float, typer.Option("--epochs", metavar="X", rich_help_panel=_TRAINING, help="Passes.")
]
DraftLength = Annotated[
    int,
    typer.Option(
        "--draft-length",
        metavar="T",
        rich_help_panel=_TRAINING,
        help="Tokens that are learnt ahead.",
    ),
]
Batch = Annotated[
    int, typer.Option("--batch", metavar="N", rich_help_panel=_TRAINING, help="Places a batch.")
]
Accumulate = Annotated[
    int,
    typer.Option("--accumulate", metavar="N", rich_help_panel=_TRAINING, help="Batches a step."),
]
Optimizer = Annotated[
    str,
    typer.Option(
        "--optimizer",
        metavar="muon|adamw",
        rich_help_panel=_TRAINING,
        help="What moves the matrices; AdamW moves the rest.",
    ),
]
LearningRate = Annotated[
    float,
    typer.Option(
        "--learning-rate",
        metavar="X",
        rich_help_panel=_TRAINING,
        help="AdamW's highest; Muon's is in proportion.",
    ),
]
FinalRate = Annotated[
    float,
    typer.Option(
        "--final-rate",
        metavar="X",
        rich_help_panel=_TRAINING,
        help="What the learning rates fall to in the end, of their highest.",
    ),
]
SoftShare = Annotated[
    float | None,
    typer.Option(
        "--soft-share",
        metavar="X",
        rich_help_panel=_TRAINING,
        show_default=False,
        help="How much of the loss is about the target's probabilities, not its choices. "
        "[default: 0.5, 0 with --data and --labels target]",
    ),
]
DepthDecay = Annotated[
    float,
    typer.Option(
        "--depth-decay",
        metavar="X",
        rich_help_panel=_TRAINING,
        help="Weight of each position beside the one before.",
    ),
]
Evaluations = Annotated[
    int,
    typer.Option(
        "--evaluations", metavar="N", rich_help_panel=_TRAINING, help="Looks at held-out text."
    ),
]
Memory = Annotated[
    int | None,
    typer.Option(
        "--memory",
        metavar="BYTES",
        rich_help_panel=_TRAINING,
        show_default=False,
        help="Most memory that writing and training take, all processes together. "
        "[default: half of the machine's]",
    ),
]
Seed = Annotated[
    int,
    typer.Option(
        "--seed",
        metavar="N",
        rich_help_panel=_TRAINING,
        help="Of the corpus and of training: another one brings other texts.",
    ),
]
StartFrom = Annotated[
    Path | None,
    typer.Option(
        "--start-from",
        metavar="DIR",
        rich_help_panel=_TRAINING,
        show_default=False,
        help="A drafter of the same form, which goes on learning from this corpus.",
    ),
]
KeepStart = Annotated[
    float,
    typer.Option(
        "--keep-start",
        metavar="SHARE",
        rich_help_panel=_TRAINING,
        help="With --start-from: the share of that drafter's weights in the one that is saved.",
    ),
]
Timed = Annotated[
    int,
    typer.Option(
        "--timed-questions",
        metavar="N",
        rich_help_panel=_TRAINING,
        help="Held-out questions for the measurement at the end; 0 leaves it out.",
    ),
]
DryRun = Annotated[
    bool, typer.Option("--dry-run", help="Print sizes and a time estimate, and do nothing.")
]
