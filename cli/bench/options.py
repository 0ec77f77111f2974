"""The options of `bench`, and the values parsed from their lists; `checks.py` refuses mistakes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Annotated, Any, Literal, NamedTuple, get_args

from redrafter_mlx.bench.measure.questions import (
    OWN_QUESTIONS,
    Question,
    choose_questions,
    fetch_mt_bench,
    read_questions,
)
from redrafter_mlx.cli import options as opt
from redrafter_mlx.cli.flag import Flag
from redrafter_mlx.cli.options import MODEL
from redrafter_mlx.cli.ranges import each_once, parse_integers, parse_numbers, parse_words
from redrafter_mlx.config import (
    AcceptMethod,
    DType,
    SamplingParams,
    check_choice,
    check_quantize,
)
from redrafter_mlx.drafting.names import AUTO
from redrafter_mlx.errors import BadInputError

if TYPE_CHECKING:
    from redrafter_mlx.bench.measure.methods import Method
    from redrafter_mlx.bench.measure.plan import Conversation, Plan, Prepared, Thresholds
    from redrafter_mlx.engine.engine import Redrafter

_PAPER, _SHAPE, _ASK, _OUT = "Papers", "Shapes and methods", "Questions", "Output"
MOST_AT_ONCE = 256
"""Maximum number of requests that an engine decodes at once, see EngineOptions."""

_Label = Literal[DType, "4bit", "8bit"]
_QUANTIZED = {"4bit": ("auto", 4), "8bit": ("auto", 8)}


class Loading(NamedTuple):
    """One way to load the target: its `--dtype` label, and the loader's options for it."""

    label: str
    dtype: str
    quantize: int | None


@dataclass(frozen=True)
class BenchOptions:
    """What is measured, and how the result is presented."""

    # fmt: off
    paper: Annotated[str | None, Flag(
        "Measure what a table of the papers measures, and print the published figures beside it; "
        "other options win over the table's own. See docs/papers.md.", "TABLE", _PAPER)] = None
    beam_width: Annotated[str | None, Flag(
        "Candidates: 3, 1..4, 1-4 or 1,2,4. [default: the automatic shape]", "W", _SHAPE)] = None
    beam_length: Annotated[str | None, Flag(
        "Tokens in a candidate, the first included; as --beam-width.", "L", _SHAPE)] = None
    max_nodes: Annotated[int | None, Flag(opt.MAX_NODES.help, "N", _SHAPE)] = None
    prefixes: Annotated[str, Flag(
        "Verify all prefixes that the beam search kept; final: only those of its final candidates, "
        "as the paper does; separate: those unmerged. Several are measured in turn.",
        "all|final|separate,...", _SHAPE)] = "all"
    accept: Annotated[str | None, Flag(
        "greedy, sample, rejection, typical; several are measured in turn. "
        "[default: greedy at temperature 0, else sample]", "METHOD,...", _SHAPE)] = None
    temperature: Annotated[str, Flag("One or several, such as 0,0.7,1.", "T,...", _SHAPE)] = "0"
    epsilon: Annotated[str | None, Flag(
        "Typical: a draft of at least this probability is accepted; one or several.", "E,...",
        _SHAPE)] = None
    delta: Annotated[str | None, Flag(
        "Typical: so is one above D * exp(-entropy); each with every --epsilon.", "D,...",
        _SHAPE)] = None
    batch_size: Annotated[str | None, Flag(
        "Requests at once, such as 1,2,4,8: with drafts and without, beside mlx-lm's own batches.",
        "B,...", _SHAPE)] = None
    draft_model: Annotated[str | None, Flag(
        "Also measure mlx-lm's own speculative decoding with this model.", "NAME|REPO|PATH",
        _SHAPE)] = None
    num_draft_tokens: Annotated[str | None, Flag(
        "Drafts a call with --draft-model; as --beam-width. [default: 3]", "N", _SHAPE)] = None
    questions: Annotated[tuple[str, ...], Flag(
        "MT-Bench, Spec-Bench, Alpaca, ShareGPT, OpenAI chat, JSONL or plain lines; may be given "
        "several times. [default: our own 16]", "FILE", _ASK)] = ()
    mt_bench: Annotated[bool, Flag("MT-Bench's 80 questions, from the Hub.", panel=_ASK)] = False
    categories: Annotated[str | None, Flag("Only these.", "NAME,...", _ASK)] = None
    limit: Annotated[int | None, Flag(opt.LIMIT.help, "N", _ASK)] = None
    raw: Annotated[bool, Flag(
        "Ask the questions as plain text, without chat template.", panel=_ASK)] = False
    prompt_tokens: Annotated[str | None, Flag(
        "Repeat or cut each prompt to exactly N tokens.", "N", _ASK)] = None
    max_tokens: Annotated[int, opt.MAX_TOKENS] = 128
    ignore_eos: Annotated[bool, Flag("Answers of exactly --max-tokens tokens.", panel=_ASK)] = False
    repeats: Annotated[int, Flag(
        "Answers to each question by each method.", "N", names=("--repeats", "-r"))] = 3
    warmup: Annotated[int, Flag(
        "Answers by each method before timing; 0 measures no costs of this machine before, either.",
        "N")] = 1
    delay: Annotated[float, Flag("Seconds of rest before each answer.", "S")] = 0.0
    seed: Annotated[int, Flag("Of sampled answers.", "N")] = 0
    json: Annotated[bool, Flag("Print one JSON object, on the last line.", panel=_OUT)] = False
    plot: Annotated[str | None, Flag(
        "The heatmap, tokens/step and speedup as a picture.", "FILE.png", _OUT)] = None
    answers: Annotated[str | None, Flag(
        "Every answer as a JSON line, in Spec-Bench's form. If the file is there, the run resumes "
        "where it ends.", "FILE", _OUT)] = None
    report: Annotated[str | None, Flag(
        "A folder to share: tables, pictures, the profile, machine, versions and command.", "DIR",
        _OUT, ("--report", "--output", "-o"))] = None
    compare: Annotated[tuple[str, str] | None, Flag(
        "Measure nothing; compare two results of --json, or two folders of --report.", "A B",
        _OUT)] = None
    drafter: Annotated[tuple[str, ...], Flag(
        "As in generate; random is the first of them, or else the trained one, with its weights "
        "shuffled. Given several times, all are measured in turn. [default: auto]",
        "auto|trained|lookup|random|none|PATH", MODEL)] = ()
    drafter_bits: Annotated[int | None, Flag(opt.DRAFTER_BITS.help, "4|8|16", MODEL)] = None
    model: Annotated[str | None, opt.TARGET] = None
    dtype: Annotated[str, Flag(
        f"{', '.join(get_args(_Label))}; several are loaded in turn.", "TYPE,...", MODEL)] = "auto"
    quantize: Annotated[int | None, Flag("4 is --dtype 4bit, and 8 is 8bit.", "4|8", MODEL)] = None
    offline: Annotated[bool, opt.OFFLINE] = False
    # fmt: on
    only: tuple[Question, ...] = ()
    """Questions used if no option gives any; not an option itself."""
    turns: int = 1
    """Turns of each conversation that are asked; not an option itself."""

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
        labels = _choices("--dtype", named, _Label)
        return [Loading(label, *_QUANTIZED.get(label, (label, None))) for label in labels]

    @cached_property
    def chosen(self) -> list[Question]:
        """The questions of MT-Bench and of all given files, filtered by category and limit."""
        found: list[Question] = fetch_mt_bench(offline=self.offline) if self.mt_bench else []
        for path in self.questions:
            found += read_questions(path)
        wanted = None if self.categories is None else parse_words("--categories", self.categories)
        return choose_questions(found or self.only or OWN_QUESTIONS, wanted, self.limit)

    @cached_property
    def prompts(self) -> int:
        """Number of prompts: a question's later turns are prompts of their own."""
        return sum(len(question.turns[: self.turns]) for question in self.chosen)

    @property
    def asked_for(self) -> str:
        """Description of where the questions come from."""
        named = [*(["MT-Bench"] if self.mt_bench else []), *self.questions]
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
    ) -> Plan:
        """Return the plan for one loading and one length of prompts, see `prepared`."""
        from redrafter_mlx.bench.measure.plan import Plan

        return Plan(
            questions=self.prepared(loaded, length),
            methods=methods,
            dtype=dtype,
            max_tokens=self.max_tokens,
            repeats=self.repeats,
            warmup=self.warmup,
            delay=self.delay,
            seed=self.seed,
            prompt_tokens=length,
        )

    def prepared(self, loaded: Redrafter | None, length: int | None) -> list[Prepared]:
        """Return the questions with their encoded prompts, which are empty without a model.

        length: number of tokens to which every prompt is repeated or cut; None leaves it unchanged
        """
        from redrafter_mlx.bench.measure.methods import BASELINE, Method
        from redrafter_mlx.bench.measure.plan import prepared_turns, resized
        from redrafter_mlx.bench.measure.runner import Runner
        from redrafter_mlx.cli.progress import describe_count, progress_bars

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
        with progress_bars("answering first turns", describe_count) as progress:
            for prepared in prepared_turns(self.chosen, self.turns, encode, answer):
                found.append(prepared)
                progress("prompts", len(found), self.prompts)
        return found

    @cached_property
    def prompt_lengths(self) -> list[int | None]:
        """The lengths of `prepared` prompts that are measured in turn."""
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
