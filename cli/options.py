"""Command-line options, each declared once: as a field of a dataclass that a command takes."""

from __future__ import annotations

import functools
import inspect
import operator
from collections.abc import Callable, Mapping
from dataclasses import MISSING, dataclass, field, fields, is_dataclass
from types import UnionType
from typing import (
    TYPE_CHECKING,
    Annotated,
    Any,
    Literal,
    Union,
    cast,
    get_args,
    get_origin,
    get_type_hints,
)

import typer

from redrafter_mlx.cli.progress import progress_bars
from redrafter_mlx.config import DType, GenerationOptions

if TYPE_CHECKING:
    from redrafter_mlx.bench.measure.questions import Question
    from redrafter_mlx.engine.engine import Redrafter
    from redrafter_mlx.engine.options import EngineOptions

MODEL, SAMPLING, DRAFTS = "Model", "Sampling", "Drafts"


@dataclass(frozen=True)
class Flag:
    """How a field appears on the command line.

    panel: the heading under which `--help` lists it; None for the first one
    names: if empty, `--beam-width` for a field `beam_width`; `--no-draft` sets `draft` to False
    variable: environment variable that gives the value if the command line does not
    """

    help: str
    metavar: str | None = None
    panel: str | None = None
    names: tuple[str, ...] = ()
    variable: str | None = None

    def option(self, name: str, default: object) -> Any:
        """Return typer's option for a field of this name."""
        default = not default if self.negated else None if default == () else default
        return typer.Option(
            default,
            *(self.names or (f"--{name.replace('_', '-')}",)),
            help=self.help,
            metavar=self.metavar,
            rich_help_panel=self.panel,
            show_default=default is not None,
            envvar=self.variable,
            show_envvar=False,
        )

    @property
    def negated(self) -> bool:
        return self.names[:1] != () and self.names[0].startswith("--no-")


def flag(default: Any, shown: Flag) -> Any:
    """Return a dataclass field that is an option."""
    return field(default=default, metadata={"flag": shown})


MAX_TOKENS = Flag("Maximum number of tokens in an answer.", "N")
MAX_NODES = Flag(
    "Maximum number of tokens verified in one model call. [default: chosen step by step]",
    "N",
    DRAFTS,
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
        "How many candidates are drafted. [default: chosen step by step]", "W", DRAFTS
    ),
    "beam_length": Flag(
        "Tokens in a candidate, the first included. [default: chosen step by step]", "L", DRAFTS
    ),
    "max_nodes": MAX_NODES,
    "accept": Flag(
        "How drafts are accepted; typical is not lossless; with rejection, copies from the text "
        "are accepted by sample. [default: greedy at temperature 0, else sample]",
        "greedy|sample|rejection|typical", DRAFTS,
    ),
    "epsilon": Flag("Typical: a draft of at least this probability is accepted.", "E", DRAFTS),
    "delta": Flag("Typical: so is one above D * exp(-entropy).", "D", DRAFTS),
}  # fmt: skip
"""The fields of GenerationOptions that are options, in the order of `--help`."""

TARGET = Flag(
    "A name that `list` shows, a Hub repository, a folder or a GGUF file. [default: smollm2-135m]",
    "NAME|REPO|PATH", MODEL, ("--model", "-m"),
)  # fmt: skip
DTYPE = Flag(
    "float16, bfloat16, float32, or auto: as stored on a GPU, float32 on a CPU.", "TYPE", MODEL
)
QUANTIZE = Flag("Quantise the weights to this many bits while loading.", "4|8", MODEL)
DRAFTER_BITS = Flag("Quantise the drafter's weights to this many bits.", "4|8", DRAFTS)
OFFLINE = Flag("Use only what is on this machine.", panel=MODEL)
QUESTIONS = Flag(
    "MT-Bench, Spec-Bench, Alpaca, JSONL or plain lines. [default: our own 16]", "FILE"
)
LIMIT = Flag("Only N of them, evenly spaced.", "N")


@dataclass(frozen=True)
class TargetOptions:
    """The target to load, and how to load it."""

    model: str | None = flag(None, TARGET)
    dtype: str = flag("auto", DTYPE)
    quantize: int | None = flag(None, QUANTIZE)
    offline: bool = flag(False, OFFLINE)


@dataclass(frozen=True)
class ModelOptions(TargetOptions):
    """The target and drafter to load, and how to load them."""

    drafter: str = flag("auto", Flag(
        "auto: prompt lookup with the trained drafter, or else a published one on this machine; "
        "trained: the drafter for this model; lookup: n-gram matches in the text so far; a "
        "drafter's folder or Hub repository; a smaller model's name; FILE.py:CLASS. A+B uses both, "
        "A+tree:NAME a static tree.",
        "auto|trained|lookup|none|NAME", DRAFTS,
    ))  # fmt: skip
    drafter_bits: int | None = flag(None, DRAFTER_BITS)


@dataclass(frozen=True)
class QuestionOptions:
    """The questions to ask."""

    questions: str | None = flag(None, QUESTIONS)
    limit: int | None = flag(None, LIMIT)

    def chosen(self) -> list[Question]:
        """Return the questions; raises BadInputError for a file without any, or a limit below 1."""
        from redrafter_mlx.bench.measure.questions import (
            OWN_QUESTIONS,
            choose_questions,
            read_questions,
        )

        asked = OWN_QUESTIONS if self.questions is None else read_questions(self.questions)
        return choose_questions(asked, None, self.limit)


Json = Annotated[bool, typer.Option("--json", help="Print one JSON object.")]
System = Annotated[
    str | None,
    typer.Option("--system", metavar="TEXT", show_default=False, help="The system message."),
]


def load_model(options: ModelOptions, engine: EngineOptions | None = None) -> Redrafter:
    """Load target and drafter with progress on stderr."""
    with progress_bars(f"loading {options.model or 'the model'}") as progress:
        from redrafter_mlx.loading.load import load

        return load(
            options.model,
            options.drafter,
            dtype=cast(DType, options.dtype),
            quantize=options.quantize,
            drafter_bits=options.drafter_bits,
            offline=options.offline,
            progress=progress,
            engine=engine,
        )


def with_options(command: Callable[..., None]) -> Callable[..., None]:
    """Give `command` the options of its dataclass parameters, for typer.

    A parameter whose type is a dataclass is replaced by one option per field that has a flag; the
    command gets an instance filled from these options. The parameter's default, if any, is an
    instance with the options' defaults. `Annotated[T, ("a", "b")]` uses only those fields, and
    `Annotated[T, {"a": Flag(...)}]` also sets their flags.
    """
    signature = inspect.signature(command, eval_str=True)
    expanded: list[inspect.Parameter] = []
    groups: dict[str, tuple[type, Mapping[str, Flag]]] = {}
    for parameter in signature.parameters.values():
        kind, *only = get_args(parameter.annotation) or (parameter.annotation,)
        if not is_dataclass(kind):
            expanded.append(parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY))
            continue
        assert isinstance(kind, type)
        if only and isinstance(only[0], Mapping):
            flags = only[0]
        else:
            flags = {n: f for n, f in flags_of(kind).items() if not only or n in only[0]}
        groups[parameter.name] = kind, flags
        base = None if parameter.default is parameter.empty else parameter.default
        expanded += _parameters(kind, flags, base)

    def run(**given: Any) -> None:
        for name, (kind, flags) in groups.items():
            filled = {n: _value(f, given.pop(n)) for n, f in flags.items()}
            given[name] = kind(**{n: v for n, v in filled.items() if v is not None})
        command(**given)

    run.__doc__ = command.__doc__
    run.__name__ = command.__name__
    run.__signature__ = signature.replace(parameters=expanded)  # type: ignore[attr-defined]
    run.__annotations__ = {p.name: p.annotation for p in expanded}
    return run


def flags_of(kind: type) -> Mapping[str, Flag]:
    """Return the flags of a dataclass's options, by field name."""
    if kind is GenerationOptions:
        return GENERATION
    return {f.name: f.metadata["flag"] for f in fields(kind) if "flag" in f.metadata}


def _parameters(
    kind: type, flags: Mapping[str, Flag], base: object | None
) -> list[inspect.Parameter]:
    hints = get_type_hints(kind)
    defaults = {f.name: f.default for f in fields(kind)}
    made = []
    for name, shown in flags.items():
        default = defaults[name] if base is None else getattr(base, name)
        assert default is not MISSING
        made.append(
            inspect.Parameter(
                name,
                inspect.Parameter.KEYWORD_ONLY,
                default=shown.option(name, default),
                annotation=_annotation(hints[name]),
            )
        )
    return made


def _annotation(hint: object) -> object:
    """Return a field's type as typer takes it: lists for tuples, `str` for a Literal."""
    if hint == tuple[str, ...]:
        return list[str] | None
    hints = get_args(hint) if get_origin(hint) in (Union, UnionType) else (hint,)
    return functools.reduce(operator.or_, (str if get_origin(h) is Literal else h for h in hints))


def _value(shown: Flag, given: object) -> object:
    """Return the value of a field for the value from the command line."""
    if isinstance(given, list):
        return tuple(given)
    return not given if shown.negated else given
