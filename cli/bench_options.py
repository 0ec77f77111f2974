"""The options that only `bench` has."""

from __future__ import annotations

from typing import Annotated

import typer

from redrafter_mlx.cli.bench_request import FORMATS

_SHAPE, _ASK, _OUT, _MODEL = "Shapes and methods", "Questions", "Output", "Model"

BeamWidth = Annotated[
    str | None,
    typer.Option(
        "--beam-width", metavar="W", rich_help_panel=_SHAPE, show_default=False,
        help="Candidates: 3, 1..4, 1-4 or 1,2,4. [default: the automatic shape]",
    ),
]  # fmt: skip
BeamLength = Annotated[
    str | None,
    typer.Option(
        "--beam-length", metavar="L", rich_help_panel=_SHAPE, show_default=False,
        help="Tokens in a candidate, the first included; as --beam-width.",
    ),
]  # fmt: skip
Prefixes = Annotated[
    str,
    typer.Option(
        "--prefixes", metavar="all|final", rich_help_panel=_SHAPE,
        help="Verify all prefixes that the beam search kept, or those of its final candidates "
        "alone, as the paper does: how many nodes merging leaves then is its figure 6.",
    ),
]  # fmt: skip
Accept = Annotated[
    str | None,
    typer.Option(
        "--accept", metavar="METHOD,...", rich_help_panel=_SHAPE, show_default=False,
        help="greedy, sample, rejection, typical; several are measured in turn. "
        "[default: greedy at temperature 0, else sample]",
    ),
]  # fmt: skip
Temperature = Annotated[
    str,
    typer.Option(
        "--temperature", metavar="T,...", rich_help_panel=_SHAPE,
        help="One or several, such as 0,0.7,1.",
    ),
]  # fmt: skip
DraftModel = Annotated[
    str | None,
    typer.Option(
        "--draft-model", metavar="NAME|REPO|PATH", rich_help_panel=_SHAPE, show_default=False,
        help="Also measure mlx-lm's own speculative decoding with this model.",
    ),
]  # fmt: skip
NumDraftTokens = Annotated[
    str,
    typer.Option(
        "--num-draft-tokens", metavar="N", rich_help_panel=_SHAPE,
        help="Drafts a call with --draft-model; as --beam-width.",
    ),
]  # fmt: skip
Questions = Annotated[
    list[str] | None,
    typer.Option(
        "--questions", metavar="FILE", rich_help_panel=_ASK, show_default=False,
        help="MT-Bench, Spec-Bench, Alpaca, JSONL or plain lines; may be given several times. "
        "[default: our own 16]",
    ),
]  # fmt: skip
MtBench = Annotated[
    bool,
    typer.Option(
        "--mt-bench", rich_help_panel=_ASK, help="MT-Bench's 80 questions, from the Hub."
    ),
]  # fmt: skip
Drafters = Annotated[
    list[str] | None,
    typer.Option(
        "--drafter", metavar="auto|trained|lookup|random|none|PATH", rich_help_panel=_MODEL,
        show_default=False,
        help="As in generate; random is the model's drafter before it learnt anything. Given "
        "several times, all are measured in turn. [default: auto]",
    ),
]  # fmt: skip
Categories = Annotated[
    str | None,
    typer.Option(
        "--categories", metavar="NAME,...", rich_help_panel=_ASK, show_default=False,
        help="Only these.",
    ),
]  # fmt: skip
Limit = Annotated[
    int | None,
    typer.Option(
        "--limit", metavar="N", rich_help_panel=_ASK, show_default=False,
        help="Only N of them, evenly spaced.",
    ),
]  # fmt: skip
Repeats = Annotated[
    int, typer.Option("--repeats", "-r", metavar="N", help="Answers of each by each method.")
]  # fmt: skip
Warmup = Annotated[
    int, typer.Option("--warmup", metavar="N", help="Answers by each method before timing.")
]  # fmt: skip
Delay = Annotated[
    float, typer.Option("--delay", metavar="S", help="Seconds of rest before each answer.")
]  # fmt: skip
Breakdown = Annotated[
    bool,
    typer.Option("--breakdown/--no-breakdown", help="Measure what a step is made of, too."),
]  # fmt: skip
Output = Annotated[
    str,
    typer.Option("--output", "-o", metavar="|".join(FORMATS), rich_help_panel=_OUT,
                 help="On standard output; with json its last line is one object."),
]  # fmt: skip
Plot = Annotated[
    str | None,
    typer.Option(
        "--plot", metavar="FILE.png", rich_help_panel=_OUT, show_default=False,
        help="The heatmap, tokens/step and speedup as a picture.",
    ),
]  # fmt: skip
Answers = Annotated[
    str | None,
    typer.Option(
        "--answers", metavar="FILE", rich_help_panel=_OUT, show_default=False,
        help="Every answer as a JSON line, in Spec-Bench's form. If the file is there, "
        "the run goes on where it ends.",
    ),
]  # fmt: skip
Compare = Annotated[
    tuple[str, str] | None,
    typer.Option(
        "--compare", metavar="A.json B.json", rich_help_panel=_OUT, show_default=False,
        help="Measure nothing; compare two results of -o json.",
    ),
]  # fmt: skip
Dtype = Annotated[
    str,
    typer.Option(
        "--dtype", metavar="TYPE,...", rich_help_panel=_MODEL,
        help="auto, float16, bfloat16, float32, 4bit, 8bit; several are loaded in turn.",
    ),
]  # fmt: skip
Seed = Annotated[int, typer.Option("--seed", metavar="N", help="Of sampled answers.")]
