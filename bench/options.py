"""The options of a measurement, and the values parsed from their lists; see `checks`."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from redrafter_mlx.bench.measure.question_sets import questions_of, title_of
from redrafter_mlx.bench.measure.questions import OWN_QUESTIONS, Question, choose_questions
from redrafter_mlx.checks import check_choice, check_quantize
from redrafter_mlx.config import AcceptMethod, DType, SamplingParams
from redrafter_mlx.drafting.names import AUTO
from redrafter_mlx.errors import BadInputError
from redrafter_mlx.runtime.ranges import each_once, parse_integers, parse_numbers, parse_words
from redrafter_mlx.weights import Progress

if TYPE_CHECKING:
    from redrafter_mlx.bench.measure.methods import Method
    from redrafter_mlx.bench.measure.plan import Conversation, Plan, Prepared, Thresholds
    from redrafter_mlx.engine.engine import Redrafter

MAX_AT_ONCE = 256
"""Maximum number of requests that an engine decodes at once, see EngineOptions."""

Label = Literal[DType, "4bit", "8bit"]
_QUANTIZED = {"4bit": ("auto", 4), "8bit": ("auto", 8)}


Activity = Callable[[str, Callable[[int, int], str] | None], AbstractContextManager[Progress]]
"""Begins an activity with this name; the function turns the done and total amounts into text."""


@contextmanager
def silent(name: str, describe: Callable[[int, int], str] | None = None) -> Iterator[Progress]:
    del name, describe
    yield lambda *_: None


class Loading(NamedTuple):
    """One way to load the target: its `--dtype` label, and the loader's options for it."""

    label: str
    dtype: DType
    quantize: int | None


@dataclass(frozen=True)
class BenchOptions:
    """What is measured: options by the names that `redrafter-mlx bench --help` explains.

    Lists are text, such as "1..4" or "1,2,4" for whole numbers and "0,0.7" for others. None leaves
    an option out.
    """

    beam_width: str | None = None
    beam_length: str | None = None
    max_nodes: int | None = None
    prefixes: str = "all"
    accept: str | None = None
    temperature: str = "0"
    epsilon: str | None = None
    delta: str | None = None
    batch_size: str | None = None
    draft_model: str | None = None
    num_draft_tokens: str | None = None
    questions: tuple[str, ...] = ()
    categories: str | None = None
    limit: int | None = None
    raw: bool = False
    prompt_tokens: str | None = None
    max_tokens: int = 128
    ignore_eos: bool = False
    repeats: int = 3
    warmup: int = 1
    delay: float = 0.0
    seed: int = 0
    answers: str | None = None
    drafter: tuple[str, ...] = ()
    drafter_bits: int | None = None
    draft_vocab: int | None = None
    model: str | None = None
    dtype: str = "auto"
    quantize: int | None = None
    kv_bits: int | None = None
    quantized_kv_start: int = 0
    offline: bool = False
    only: tuple[Question, ...] = ()
    """Questions used if no option gives any."""
    turns: int = 1
    """Turns of each conversation that are asked."""

    @cached_property
    def batch_sizes(self) -> list[int]:
        return _integers("--batch-size", self.batch_size)

    @cached_property
    def widths(self) -> list[int]:
        return _integers("--beam-width", self.beam_width)

    @cached_property
    def lengths(self) -> list[int]:
        return _integers("--beam-length", self.beam_length)

    @property
    def drafters(self) -> list[str]:
        return each_once(self.drafter or [AUTO])

    @cached_property
    def loadings(self) -> list[Loading]:
        check_quantize(self.quantize)
        named = self.dtype
        if self.quantize is not None:
            if named != "auto":
                raise BadInputError(
                    f"--quantize {self.quantize} is --dtype {self.quantize}bit, and --dtype is "
                    f"{named} already; give one of them"
                )
            named = f"{self.quantize}bit"
        labels = _choices("--dtype", named, Label)
        return [Loading(label, *_QUANTIZED.get(label, (label, None))) for label in labels]

    @cached_property
    def chosen(self) -> list[Question]:
        """The questions of all given sets and files, filtered by category and limit."""
        found: list[Question] = []
        for source in self.questions:
            found += questions_of(source, offline=self.offline)
        wanted = None if self.categories is None else parse_words("--categories", self.categories)
        return choose_questions(found or self.only or OWN_QUESTIONS, wanted, self.limit)

    @cached_property
    def prompts(self) -> int:
        """Number of prompts: a question's later turns are prompts of their own."""
        return sum(len(question.turns[: self.turns]) for question in self.chosen)

    @property
    def asked_for(self) -> str:
        """Description of where the questions come from."""
        named = [title_of(source) for source in each_once(self.questions)]
        if not named and self.only:
            return f"question {self.only[0].id}"
        later = f", {self.turns} turns of each" if self.prompts > len(self.chosen) else ""
        plain = ", as plain text" if self.raw else ""
        return (" and ".join(named) or "our own") + later + plain

    def methods(self, drafters: Sequence[str | None]) -> list[Method]:
        """List the methods to measure: each drafter with each combination of width and length."""
        from redrafter_mlx.bench.measure.packing import Prefixes
        from redrafter_mlx.bench.measure.plan import list_methods

        shapes = [(w, length) for w in self.widths or (None,) for length in self.lengths or (None,)]
        if self.batch_sizes and shapes != [(None, None)]:
            shapes = [(None, None), *shapes]
        accepts = None
        if self.accept is not None:
            accepts = _choices("--accept", self.accept, AcceptMethod)
        return list_methods(
            dict.fromkeys(drafters, shapes),
            self.max_nodes,
            accepts,
            parse_numbers("--temperature", self.temperature),
            self._draft_tokens(),
            _choices("--prefixes", self.prefixes, Prefixes),
            self._thresholds(accepts),
            self.batch_sizes or [None],
        )

    def plan(
        self,
        dtype: str,
        methods: Sequence[Method],
        length: int | None = None,
        loaded: Redrafter | None = None,
        activity: Activity = silent,
    ) -> Plan:
        """Return the plan for one loading and one length of prompts, see `prepared`."""
        from redrafter_mlx.bench.measure.plan import Plan

        return Plan(
            questions=self.prepared(loaded, length, activity),
            methods=methods,
            dtype=dtype,
            max_tokens=self.max_tokens,
            repeats=self.repeats,
            warmup=self.warmup,
            delay=self.delay,
            seed=self.seed,
            prompt_tokens=length,
        )

    def prepared(
        self, loaded: Redrafter | None, length: int | None, activity: Activity = silent
    ) -> list[Prepared]:
        """Return the questions with their prompts, of `length` tokens; empty without a model."""
        from redrafter_mlx.bench.measure.methods import BASELINE, Method
        from redrafter_mlx.bench.measure.plan import prepared_turns, resized
        from redrafter_mlx.bench.measure.runner import Runner

        def encode(messages: Conversation) -> list[int]:
            text = "\n\n".join(message["content"] for message in messages)
            asked = text if self.raw else messages
            ids = [] if loaded is None else loaded.encode(asked, raw=self.raw)
            return ids if length is None else resized(ids, length)

        def answer(ids: list[int]) -> str:
            """Return mlx-lm's own answer to an earlier turn, the same for all methods."""
            if loaded is None:
                return ""
            return Runner({None: loaded}).run(Method(BASELINE), ids, self.max_tokens, 0).text

        room = None if loaded is None else loaded.context_length
        if room is not None and length is not None and length + self.max_tokens > room:
            raise BadInputError(
                f"--prompt-tokens {length} and --max-tokens {self.max_tokens} are more than the "
                f"model's context of {room} tokens; give less"
            )
        if loaded is None or self.prompts == len(self.chosen):
            return [*prepared_turns(self.chosen, self.turns, encode, answer)]
        found = []
        with activity("answering first turns", "{} of {}".format) as progress:
            for prepared in prepared_turns(self.chosen, self.turns, encode, answer):
                found.append(prepared)
                progress("prompts", len(found), self.prompts)
        return found

    @cached_property
    def prompt_lengths(self) -> list[int | None]:
        return [*_integers("--prompt-tokens", self.prompt_tokens, positive=True)] or [None]

    def _draft_tokens(self) -> list[int]:
        """Return the numbers of drafts of mlx-lm's speculative decoding; none without a model."""
        if self.draft_model is None and self.num_draft_tokens is not None:
            raise BadInputError("--num-draft-tokens is of --draft-model; give one")
        if self.draft_model is None:
            return []
        return _integers("--num-draft-tokens", self.num_draft_tokens or "3", positive=True)

    def _thresholds(self, accepts: Sequence[AcceptMethod] | None) -> list[Thresholds]:
        if self.epsilon is self.delta is None:
            return [(None, None)]
        if "typical" not in (accepts or ()):
            name = "--delta" if self.epsilon is None else "--epsilon"
            raise BadInputError(f"{name} is of typical acceptance; give --accept typical")
        defaults = SamplingParams()
        epsilons = parse_numbers("--epsilon", self.epsilon or str(defaults.epsilon))
        deltas = parse_numbers("--delta", self.delta or str(defaults.delta))
        return [(epsilon, delta) for epsilon in epsilons for delta in deltas]


def _integers(name: str, text: str | None, *, positive: bool = False) -> list[int]:
    numbers = [] if text is None else parse_integers(name, text)
    if positive and 0 in numbers:
        raise BadInputError(f"{name} holds 0; it must be at least 1")
    return numbers


def _choices(name: str, text: str, known: object) -> list[Any]:
    words = parse_words(name, text)
    for word in words:
        check_choice(name, word, known)
    return words
