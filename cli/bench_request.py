"""What one `bench` is asked for, checked."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from redrafter_mlx.bench.measure.questions import Question
from redrafter_mlx.config import AcceptMethod, DType, Prefixes, check_choice
from redrafter_mlx.errors import BadInputError

if TYPE_CHECKING:
    from redrafter_mlx.bench.measure.methods import Method
    from redrafter_mlx.bench.measure.plan import Plan
    from redrafter_mlx.engine.engine import Redrafter

FORMATS = ("table", "json")

_QUANTIZED = {"4bit": 4, "8bit": 8}


class Loading(NamedTuple):
    """One way to load the target: its label, and what it means to the loader."""

    label: str
    dtype: str
    quantize: int | None


def parse_loading(label: str) -> Loading:
    """`float16`, `4bit`, ...; raises BadInputError for what is neither."""
    if label in _QUANTIZED:
        return Loading(label, "auto", _QUANTIZED[label])
    try:
        check_choice("--dtype", label, DType)
    except BadInputError as error:
        raise BadInputError(f"{error}, {', '.join(_QUANTIZED)}") from None
    return Loading(label, label, None)


@dataclass(frozen=True)
class Request:
    """What the command line asks for; see the options' help."""

    questions: tuple[Question, ...]
    asked_for: str
    widths: tuple[int, ...]
    lengths: tuple[int, ...]
    max_nodes: int | None
    prefixes: Prefixes
    accepts: tuple[AcceptMethod, ...] | None
    temperatures: tuple[float, ...]
    draft_model: str | None
    draft_tokens: tuple[int, ...]
    max_tokens: int
    repeats: int
    warmup: int
    delay: float
    seed: int
    breakdown: bool
    plot: str | None
    answers: str | None
    drafters: tuple[str, ...]
    model: str | None
    loadings: tuple[Loading, ...]
    offline: bool

    def check(self) -> None:
        """Refuse, before a model is loaded, whatever can be seen to be wrong without one."""
        from redrafter_mlx.bench.show.plot import check_plot

        self.plan("", self.methods([None]))
        if self.plot is not None:
            check_plot(self.plot)
        if "none" in self.drafters:
            if self.widths or self.lengths:
                raise BadInputError(
                    "--beam-width and --beam-length need a drafter; --drafter is none"
                )
            if len(self.drafters) > 1:
                raise BadInputError(
                    "--drafter none beside others measures nothing more, for plain decoding is "
                    "always measured; leave it out"
                )

    def methods(self, drafters: Sequence[str | None]) -> list[Method]:
        """What to measure by each drafter: every width with every length that was asked for."""
        from redrafter_mlx.bench.measure.plan import list_methods

        widths, lengths = self.widths or (None,), self.lengths or (None,)
        shapes = [(width, length) for width in widths for length in lengths]
        return list_methods(
            dict.fromkeys(drafters, shapes),
            self.max_nodes, self.accepts, self.temperatures, self.draft_tokens, self.prefixes,
        )  # fmt: skip

    def plan(self, dtype: str, methods: Sequence[Method], loaded: Redrafter | None = None) -> Plan:
        """The plan for one loading; without a model the prompts are left empty."""
        from redrafter_mlx.bench.measure.plan import Plan, Prepared

        def encode(question: Question) -> list[int]:
            message = {"role": "user", "content": question.text}
            return [] if loaded is None else loaded.encode([message])

        return Plan(
            questions=[Prepared(q, encode(q)) for q in self.questions],
            methods=methods,
            dtype=dtype,
            max_tokens=self.max_tokens,
            repeats=self.repeats,
            warmup=self.warmup,
            delay=self.delay,
            seed=self.seed,
        )
