"""Command-line options: each is a Flag, of a command's parameter or of a field of a dataclass."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, is_dataclass
from typing import TYPE_CHECKING, Annotated, Any, get_args, get_origin, get_type_hints

import typer
from typer.models import ArgumentInfo

from redrafter_mlx.bench.measure.question_sets import questions_of
from redrafter_mlx.bench.measure.questions import OWN_QUESTIONS, Question, choose_questions
from redrafter_mlx.cli.flag import POSITIONAL, Flag
from redrafter_mlx.cli.progress import progress_bars
from redrafter_mlx.config import AcceptMethod, GenerationOptions
from redrafter_mlx.drafting.names import AUTO

if TYPE_CHECKING:
    from redrafter_mlx.engine.engine import Redrafter
    from redrafter_mlx.engine.options import EngineOptions
    from redrafter_mlx.engine.thread import EngineThread

MODEL, SAMPLING, DRAFTS = "Model", "Sampling", "Drafts"

MAX_TOKENS = Flag("Maximum number of tokens in an answer.", "N")
MAX_NODES = Flag(
    "Maximum number of tokens verified in one model call. [default: automatic]", "N", DRAFTS
)

GENERATION: Mapping[str, Flag] = {
    "max_tokens": MAX_TOKENS,
    "stop": Flag("End the answer before this text; may be given several times.", "TEXT"),
    "thinking": Flag(
        "Whether a model that can reason first does. [default: its chat template's]",
        names=("--thinking/--no-thinking",),
    ),
    "temperature": Flag("0 is the likeliest token.", "T", SAMPLING),
    "top_p": Flag("Keep this much probability.", "P", SAMPLING),
    "top_k": Flag("Keep K tokens; 0 keeps all.", "K", SAMPLING),
    "min_p": Flag("Drop tokens below P times the likeliest one's probability.", "P", SAMPLING),
    "repetition_penalty": Flag("Above 1, the last 20 tokens become less likely.", "R", SAMPLING),
    "frequency_penalty": Flag("Taken from a token's logit each time it is emitted.", "F", SAMPLING),
    "presence_penalty": Flag("Taken from the logits of emitted tokens.", "P", SAMPLING),
    "seed": Flag("The same seed gives the same answer. [default: a fresh one]", "N", SAMPLING),
    "draft": Flag("Decode without drafts: one token per model call.", None, DRAFTS,
                  ("--no-draft",)),
    "beam_width": Flag(
        "How many candidates are drafted. [default: automatic]", "W", DRAFTS
    ),
    "beam_length": Flag(
        "Tokens in a candidate, the first included. [default: automatic]", "L", DRAFTS
    ),
    "max_nodes": MAX_NODES,
    "accept": Flag(
        "How drafts are accepted; typical is not lossless; with rejection, copies from the text "
        "are accepted by sample. [default: greedy at temperature 0, else sample]",
        "|".join(get_args(AcceptMethod)), DRAFTS,
    ),
    "epsilon": Flag("Typical: a draft of at least this probability is accepted.", "E", DRAFTS),
    "delta": Flag("Typical: so is one above D * exp(-entropy).", "D", DRAFTS),
}  # fmt: skip
"""The fields of GenerationOptions that are options, in the order of `--help`."""

TARGET = Flag(
    "A name that `list` shows, a Hub repository, a folder or a GGUF file. [default: smollm2-135m]",
    "NAME|REPO|PATH", MODEL, ("--model", "-m"), argument="MODEL",
)  # fmt: skip
DTYPE = Flag(
    "float16, bfloat16, float32, or auto: as stored on a GPU, float32 on a CPU.", "TYPE", MODEL
)
DRAFTER_BITS = Flag(
    "Quantise the drafter's weights to this many bits; 16 leaves them as stored. "
    "[default: the target's bits]",
    "4|8|16", DRAFTS,
)  # fmt: skip
DRAFT_VOCAB = Flag(
    "Draft only N tokens with an MTP head or another drafter that scores all of them, the most "
    "frequent ones of kept answers, then the lowest ids: faster, and the same text. [default: all]",
    "N", DRAFTS,
)  # fmt: skip
KV_BITS = Flag(
    "Quantise the keys and values of a text to this many bits: less memory, and another text.",
    "4|8", MODEL,
)  # fmt: skip
KV_START = Flag(
    "With --kv-bits: a text's first N tokens keep their keys and values as they are.",
    "N", MODEL,
)  # fmt: skip
OFFLINE = Flag("Use only what is on this machine.", panel=MODEL)
LIMIT = Flag("Only N of them, evenly spaced.", "N")


@dataclass(frozen=True)
class TargetOptions:
    """The target to load, and how to load it."""

    model: Annotated[str | None, TARGET] = None
    dtype: Annotated[str, DTYPE] = "auto"
    quantize: Annotated[int | None, Flag(
        "Quantise the weights to this many bits while loading.", "4|8", MODEL)] = None  # fmt: skip
    offline: Annotated[bool, OFFLINE] = False

    @property
    def given(self) -> str:
        """The options that change the weights, as a command repeats them: ` --quantize 4`."""
        dtype = "" if self.dtype == "auto" else f" --dtype {self.dtype}"
        return dtype + ("" if self.quantize is None else f" --quantize {self.quantize}")


@dataclass(frozen=True)
class ModelOptions(TargetOptions):
    """The target and drafter to load, and how to load them."""

    drafter: Annotated[str, Flag(
        "auto: prompt lookup and earlier texts with the trained drafter, or else a published "
        "one on this machine, or successors; trained: the drafter for this model; mtp: the head in "
        "its own files; successors: what the model says after single tokens; lookup, earlier: "
        "n-gram matches in this or in earlier texts; a drafter's folder or Hub repository; a "
        "smaller model's name; FILE.py:CLASS. A+B uses both, A+tree:NAME a static tree.",
        "auto|trained|mtp|successors|lookup|earlier|none|NAME", DRAFTS)] = AUTO  # fmt: skip
    drafter_bits: Annotated[int | None, DRAFTER_BITS] = None
    draft_vocab: Annotated[int | None, DRAFT_VOCAB] = None
    kv_bits: Annotated[int | None, KV_BITS] = None
    quantized_kv_start: Annotated[int, KV_START] = 0


@dataclass(frozen=True)
class LearningModelOptions(ModelOptions):
    """The same, where answers may be kept for the drafter to learn from."""

    learn: Annotated[bool, Flag(
        "Keep answers on this machine, for `redrafter-mlx learn` to train the drafter on.",
        panel=DRAFTS)] = False  # fmt: skip


@dataclass(frozen=True)
class QuestionOptions:
    """The questions to ask."""

    questions: Annotated[str | None, Flag(
        "mt-bench or spec-bench, which are fetched, or a file: Alpaca, ShareGPT, OpenAI chat, "
        "JSONL or plain lines. [default: our own 16]", "NAME|FILE",
    )] = None  # fmt: skip
    limit: Annotated[int | None, LIMIT] = None

    def chosen(self) -> list[Question]:
        """Return the questions; BadInputError for none or a limit below 1; DownloadError."""
        asked = OWN_QUESTIONS if self.questions is None else questions_of(self.questions)
        return choose_questions(asked, None, self.limit)


Raw = Annotated[bool, Flag("Ask the questions as plain text, without chat template.")]
RAW_INSTEAD = "give --raw to ask the questions as plain text"
"""Advice where a model without a chat template is refused, by commands that ask questions."""

Json = Annotated[bool, Flag("Print one JSON object.", names=("--json",))]
System = Annotated[str | None, Flag("The system message.", "TEXT")]


def load_model(
    options: ModelOptions,
    engine: EngineOptions | None = None,
    *,
    warm_up: bool = True,
    chat_or: str | None = None,
    thread: EngineThread | None = None,
) -> Redrafter:
    """Load target and drafter with progress on stderr; other parameters as in `load`."""
    with progress_bars(f"loading {options.model or 'the model'}") as progress:
        from redrafter_mlx.loading.load import load

        return load(
            **vars(options),
            progress=progress,
            engine=engine,
            warm_up=warm_up,
            chat_or=chat_or,
            thread=thread,
        )


def with_options(command: Callable[..., None]) -> Callable[..., None]:
    """Give `command` its options, for typer.

    A parameter that is annotated with a Flag is one option. One whose type is a dataclass is one
    option per field that is annotated so; the command gets an instance filled from these options.
    Its default, if any, is an instance with the options' defaults. `Annotated[T, ("a", "b")]` uses
    only those fields, and `Annotated[T, {"a": Flag(...)}]` also sets their flags.

    A flag with an `argument` is a positional argument as well, unless the command has arguments of
    its own; those of dataclasses come before the command's.
    """
    signature = inspect.signature(command, eval_str=True)
    expanded: list[inspect.Parameter] = []
    groups: dict[str, tuple[type, Mapping[str, Flag]]] = {}
    single: dict[str, Flag] = {}
    kinds: dict[str, object] = {}
    own_arguments = False
    for parameter in signature.parameters.values():
        name, default, empty = parameter.name, parameter.default, parameter.empty
        kind, *notes = get_args(parameter.annotation) or (parameter.annotation,)
        note = notes[0] if notes else None
        if is_dataclass(kind):
            assert isinstance(kind, type)
            flags = note if isinstance(note, Mapping) else _flags_of(kind, note)
            groups[name] = kind, flags
            hints, base = get_type_hints(kind), kind if default is empty else default
            expanded += [f.parameter(n, hints[n], getattr(base, n)) for n, f in flags.items()]
        elif isinstance(note, Flag):
            single[name], kinds[name] = note, kind
            expanded.append(note.parameter(name, kind, ... if default is empty else default))
        else:
            own_arguments |= isinstance(note, ArgumentInfo)
            expanded.append(parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY))
    flags = dict(pair for _, flags in groups.values() for pair in flags.items()) | single
    positional = {n: f for n, f in flags.items() if f.argument and not own_arguments}
    expanded = [f.positional(n) for n, f in positional.items()] + expanded

    def run(**given: Any) -> None:
        for name, flag in positional.items():
            given[name] = flag.merged(name, given.pop(name + POSITIONAL), given[name])
        for name, flag in single.items():
            given[name] = flag.value(name, kinds[name], given[name])
        for name, (kind, flags) in groups.items():
            hints = get_type_hints(kind)
            filled = {n: f.value(n, hints[n], given.pop(n)) for n, f in flags.items()}
            given[name] = kind(**{n: v for n, v in filled.items() if v is not None})
        command(**given)

    run.__doc__ = command.__doc__
    run.__name__ = command.__name__
    run.__signature__ = signature.replace(parameters=expanded)  # type: ignore[attr-defined]
    run.__annotations__ = {p.name: p.annotation for p in expanded}
    return run


def given_names(context: typer.Context) -> set[str]:
    """Return the names of the parameters that the command line or the environment sets."""
    sources = {name: context.get_parameter_source(name) for name in context.params}
    given = (name for name, source in sources.items() if source and source.name != "DEFAULT")
    return {name.removesuffix(POSITIONAL) for name in given}


def _flags_of(kind: type, only: Collection[str] | None) -> Mapping[str, Flag]:
    """Return the flags of a dataclass's options, by field name; None takes all."""
    flags = GENERATION
    if kind is not GenerationOptions:
        hints = get_type_hints(kind, include_extras=True)
        flags = {n: h.__metadata__[0] for n, h in hints.items() if get_origin(h) is Annotated}
    return {name: flag for name, flag in flags.items() if only is None or name in only}
