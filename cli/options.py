"""Command-line options that several commands share, and what they mean to the library."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, cast

import typer

from redrafter_mlx.cli.progress import progress_bars
from redrafter_mlx.cli.terminal import check_text
from redrafter_mlx.config import AcceptMethod, DType, GenerationOptions, check_choice
from redrafter_mlx.errors import BadInputError

if TYPE_CHECKING:
    from redrafter_mlx.engine.engine import Redrafter

_MODEL, _SAMPLING, _DRAFTS = "Model", "Sampling", "Drafts"

Model = Annotated[
    str | None,
    typer.Option(
        "--model", "-m", metavar="NAME|REPO|PATH", rich_help_panel=_MODEL, show_default=False,
        help="A name that `list` shows, a Hub repository, a folder or a GGUF file. "
        "[default: smollm2-135m]",
    ),
]  # fmt: skip
DrafterName = Annotated[
    str,
    typer.Option(
        "--drafter", metavar="auto|trained|lookup|none|PATH", rich_help_panel=_DRAFTS,
        help="The drafter's folder; trained is the one for this model, lookup drafts what "
        "followed the text's last words before. auto and PATH+lookup take both.",
    ),
]  # fmt: skip
Dtype = Annotated[
    str,
    typer.Option(
        "--dtype", metavar="TYPE", rich_help_panel=_MODEL,
        help="float16, bfloat16, float32, or auto: as stored on a GPU, float32 on a CPU.",
    ),
]  # fmt: skip
Quantize = Annotated[
    int | None,
    typer.Option(
        "--quantize", metavar="4|8", rich_help_panel=_MODEL, show_default=False,
        help="Quantise the weights to so many bits while loading.",
    ),
]  # fmt: skip
Offline = Annotated[
    bool,
    typer.Option("--offline", rich_help_panel=_MODEL, help="Use only what is on this machine."),
]
NoDraft = Annotated[
    bool,
    typer.Option(
        "--no-draft", rich_help_panel=_DRAFTS, help="Decode plainly: one token per model call."
    ),
]
BeamWidth = Annotated[
    int | None,
    typer.Option(
        "--beam-width", metavar="W", rich_help_panel=_DRAFTS, show_default=False,
        help="How many candidates are drafted. [default: chosen step by step]",
    ),
]  # fmt: skip
BeamLength = Annotated[
    int | None,
    typer.Option(
        "--beam-length", metavar="L", rich_help_panel=_DRAFTS, show_default=False,
        help="Tokens in a candidate, the first included. [default: chosen step by step]",
    ),
]  # fmt: skip
MaxNodes = Annotated[
    int | None,
    typer.Option(
        "--max-nodes", metavar="N", rich_help_panel=_DRAFTS, show_default=False,
        help="Most tokens checked in one model call. [default: chosen step by step]",
    ),
]  # fmt: skip
Questions = Annotated[
    str | None,
    typer.Option(
        "--questions", metavar="FILE", show_default=False,
        help="MT-Bench, Spec-Bench, Alpaca, JSONL or plain lines. [default: our own 16]",
    ),
]  # fmt: skip
Limit = Annotated[
    int | None,
    typer.Option("--limit", metavar="N", show_default=False, help="Only N of them, evenly spaced."),
]
MaxTokens = Annotated[
    int, typer.Option("--max-tokens", metavar="N", help="Most tokens in an answer.")
]
Temperature = Annotated[
    float,
    typer.Option(
        "--temperature", metavar="T", rich_help_panel=_SAMPLING, help="0 is the likeliest token."
    ),
]
TopP = Annotated[
    float,
    typer.Option(
        "--top-p", metavar="P", rich_help_panel=_SAMPLING, help="Keep this much probability."
    ),
]
TopK = Annotated[
    int,
    typer.Option(
        "--top-k", metavar="K", rich_help_panel=_SAMPLING, help="Keep K tokens; 0 keeps all."
    ),
]
MinP = Annotated[
    float,
    typer.Option(
        "--min-p", metavar="P", rich_help_panel=_SAMPLING,
        help="Drop tokens below P times the likeliest one's probability.",
    ),
]  # fmt: skip
Accept = Annotated[
    str | None,
    typer.Option(
        "--accept", metavar="greedy|sample|rejection|typical", rich_help_panel=_DRAFTS,
        show_default=False,
        help="How drafts are accepted; typical is not lossless; rejection of looked-up drafts "
        "is sample. "
        "[default: greedy at temperature 0, else sample]",
    ),
]  # fmt: skip
Epsilon = Annotated[
    float,
    typer.Option(
        "--epsilon", metavar="E", rich_help_panel=_DRAFTS,
        help="Typical: a draft of at least this probability is taken.",
    ),
]  # fmt: skip
Delta = Annotated[
    float,
    typer.Option(
        "--delta", metavar="D", rich_help_panel=_DRAFTS,
        help="Typical: so is one above D * exp(-entropy).",
    ),
]  # fmt: skip
RepetitionPenalty = Annotated[
    float,
    typer.Option(
        "--repetition-penalty", metavar="R", rich_help_panel=_SAMPLING,
        help="Above 1, the last 20 tokens become less likely.",
    ),
]  # fmt: skip
Seed = Annotated[
    int | None,
    typer.Option(
        "--seed", metavar="N", rich_help_panel=_SAMPLING, show_default=False,
        help="The same seed gives the same answer. [default: a fresh one]",
    ),
]  # fmt: skip
Stop = Annotated[
    list[str] | None,
    typer.Option(
        "--stop", metavar="TEXT", show_default=False,
        help="End the answer before this text; may be given several times.",
    ),
]  # fmt: skip
System = Annotated[
    str | None,
    typer.Option("--system", metavar="TEXT", show_default=False, help="The system message."),
]


def load_model(
    model: str | None, drafter: str, dtype: str, quantize: int | None, offline: bool
) -> Redrafter:
    """Load target and drafter with progress on stderr; the options' words, checked."""
    check_choice("--dtype", dtype, DType)
    if quantize not in (None, 4, 8):
        raise BadInputError(f"--quantize is {quantize}; choose 4 or 8")
    if model is not None and not model.strip():
        raise BadInputError("--model is empty; give a name that `redrafter-mlx list` shows")
    if not drafter.strip():
        raise BadInputError("--drafter is empty; give auto, trained, lookup, none or a folder")
    with progress_bars(f"loading {model or 'the model'}") as progress:
        from redrafter_mlx.loading import load

        return load(
            model,
            drafter=None if drafter == "none" else drafter,
            dtype=cast(DType, dtype),
            quantize=quantize,
            offline=offline,
            progress=progress,
        )


def generation_options(
    max_tokens: int, temperature: float, top_p: float, top_k: int, min_p: float, seed: int | None,
    stop: list[str] | None, beam_width: int | None, beam_length: int | None,
    max_nodes: int | None, accept: str | None, epsilon: float, delta: float,
    repetition_penalty: float, draft: bool,
) -> GenerationOptions:  # fmt: skip
    """The library's options; raises BadInputError in the first value that cannot be used."""
    return GenerationOptions(
        accept=cast(AcceptMethod | None, accept),
        epsilon=epsilon,
        delta=delta,
        repetition_penalty=repetition_penalty,
        max_tokens=max_tokens,
        temperature=temperature,
        top_p=top_p,
        top_k=top_k,
        min_p=min_p,
        seed=seed,
        stop=tuple(check_text("--stop", text) for text in stop or ()),
        beam_width=beam_width,
        beam_length=beam_length,
        max_nodes=max_nodes,
        draft=draft,
    )
