"""How each table of the papers is measured: the options of `bench`, and the table that is shown."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from redrafter_mlx.bench.measure.questions import Question
from redrafter_mlx.bench.papers import answer_tables as by_answer
from redrafter_mlx.bench.papers.batch_tables import batch_table
from redrafter_mlx.bench.papers.columns import Layout
from redrafter_mlx.bench.papers.evidence import Evidence
from redrafter_mlx.bench.papers.log_tables import accuracy_table
from redrafter_mlx.bench.papers.published import Published, Record, comparable, published
from redrafter_mlx.bench.show.tables import TextTable
from redrafter_mlx.errors import BadInputError, meant

QUESTION_81 = Question(
    "Compose an engaging travel blog post about a recent trip to Hawaii, highlighting cultural "
    "experiences and must-see attractions.",
    "writing",
    81,
)
"""The question of MT-Bench (Apache-2.0) that the authors timed on Macs."""

Inspects = Literal["likelihoods", "draft costs", "packed sizes"] | None

_OPTIONS = Mapping[str, object]
_MT_BENCH: _OPTIONS = {"mt_bench": True, "turns": 2, "repeats": 1}
_TRAINED: _OPTIONS = {"drafter": ("trained",)}
_FIGURES = "tok/s, speedup, tokens/step"


@dataclass(frozen=True)
class PaperProtocol:
    """How a table is measured.

    name:     value of `--paper`
    measures: requests one at a time, or concurrent requests, or nothing: training logs are read, or
              the published figures are shown alone
    table:    makes the table of the measurements, in this layout
    options:  options of `bench` by name; those of the command line take precedence
    question: the only question, unless the user names others
    drafters: number of drafters that the user must name; 0 if the options name them
    installed: whether every drafter on this machine that fits the model is measured
    speculative: whether the table also has rows of mlx-lm's speculative decoding
    inspects: what is measured in addition to time
    """

    name: str
    measures: Literal["answers", "batches", "logs", "nothing"]
    table: Callable[[Layout, Evidence, Sequence[Record]], TextTable]
    layout: Layout
    options: _OPTIONS
    question: Question | None = None
    drafters: int = 0
    installed: bool = False
    speculative: bool = False
    inspects: Inspects = None

    @property
    def published(self) -> Published:
        """The paper's own figures."""
        return published(self.name)

    def measured(self, evidence: Evidence) -> TextTable:
        """Return the table of what was measured."""
        return self.table(self.layout, evidence, comparable(self.name))


def _methods(name: str, **more: object) -> PaperProtocol:
    """Return the protocol of a table of all drafters, with these options."""
    layout = Layout("Drafters, over all questions and by category",
                    f"questions, drafter, asked, {_FIGURES}",
                    covers=("draft tokens",))  # fmt: skip
    return PaperProtocol(name, "answers", by_answer.category_table, layout, {**_MT_BENCH, **more},
                         installed=True, speculative=True)  # fmt: skip


def _batches(name: str, beside: tuple[str, ...] = (), **more: object) -> PaperProtocol:
    """Return the protocol of a table of batch sizes and beam widths, with these options."""
    layout = Layout("Requests at once by beam width",
                    "W, requests, tok/s each, total tok/s, over no drafts, tokens/step",
                    beside=beside)  # fmt: skip
    return PaperProtocol(name, "batches", batch_table, layout,
                         {**_MT_BENCH, **_TRAINED, "beam_length": "5", **more})  # fmt: skip


def _speculator(name: str, **more: object) -> PaperProtocol:
    """Return the protocol of a table of the speculators' paper, with these options."""
    layout = Layout(
        "Milliseconds a token of a request",
        "prompt tokens, requests, k, ms a token, over no drafts, tokens/step",
        "k: candidates, the beam width, 0 without drafts; timed after every request's first token",
        beside=("prompt tokens", "requests", "k"), covers=("W",),
    )  # fmt: skip
    return PaperProtocol(name, "batches", batch_table, layout, {
        **_TRAINED, "batch_size": "1,2,4", "max_tokens": 100, "ignore_eos": True, "repeats": 1,
        **more})  # fmt: skip


PROTOCOLS = (
    _methods("table1"),
    PaperProtocol("table2", "answers", by_answer.drafted_table, Layout(
        "Beam shapes, and the published figures of the same shape and dtype",
        f"dtype, W, L, query rows, {_FIGURES}",
        "the authors' calls have W x L query rows, candidates unmerged; ours have one for each "
        "prefix, W(L-1)+1 at most",
        beside=("dtype", "W", "L"), apart=("machine", "target")), {
        **_TRAINED, "beam_width": "1..4", "beam_length": "2..5", "max_tokens": 200,
        "dtype": "float16,bfloat16,4bit"}, question=QUESTION_81),
    _batches("table3", ("W", "requests"), batch_size="1,2,4,8,10,20,40,80",
             beam_width="1,2,4,8,16,32,64"),
    PaperProtocol("table4", "answers", by_answer.drafted_table, Layout(
        "Drafters by their labels in training",
        "drafter, labels, texts, W, speedup, tokens/step", beside=("W", "labels")), {
        **_MT_BENCH, "beam_width": "1,2,4,16,64", "beam_length": "5"}, drafters=2),
    PaperProtocol("figure6", "answers", by_answer.drafted_table, Layout(
        "Nodes verified, merged and separately",
        f"W, L, prefixes, tokens in beams, nodes: 1%, median, 99%, saved, query rows, {_FIGURES}",
        "prefixes: separate is without merging (the root alone is shared), final the paper's "
        "merging, in calls of the nodes that 99% of the trees had in a few answers before, all "
        "also verifies prefixes that no candidate extends, in nodes that merging left free"), {
        **_MT_BENCH, **_TRAINED, "beam_width": ",".join(map(str, range(5, 71, 5))),
        "beam_length": "5", "prefixes": "separate,final,all"}, inspects="packed sizes"),
    _methods("review-table1", temperature="1", accept="rejection"),
    PaperProtocol("review-table2", "nothing", by_answer.drafted_table, Layout("", ""), {}),
    PaperProtocol("review-table3", "answers", by_answer.drafted_table, Layout(
        "One request, on all ranks of mlx.launch", f"drafter, W, L, accept, {_FIGURES}"), {
        **_MT_BENCH, **_TRAINED, "beam_width": "6", "beam_length": "5", "temperature": "1",
        "accept": "rejection"}),
    PaperProtocol("v1-table1", "answers", by_answer.whole_table, Layout(
        "Drafters, greedy and by typical acceptance",
        f"drafter or method, accept, T, size, {_FIGURES}",
        "size: the drafter's parameters", covers=("drafter",)), {
        **_MT_BENCH, "temperature": "0,0.7", "accept": "greedy,typical"}, installed=True),
    PaperProtocol("v1-table2", "answers", by_answer.whole_table, Layout(
        "Acceptance methods",
        "method, accept, T, epsilon, delta, tok/s, over greedy, tokens/step, log-likelihood, "
        "entropy, as greedy",
        "over greedy: tokens a second over those of mlx-lm's greedy answers; log-likelihood, "
        "entropy: nats a token under the target at temperature 1, means over the tokens of the "
        "answers; as greedy: tokens before the first that differs from the greedy answer, as a "
        "share", beside=("accept", "T")), {
        **_MT_BENCH, **_TRAINED, "beam_width": "2", "beam_length": "4",
        "temperature": "0,0.1,0.3,0.5,0.7,0.9", "accept": "rejection,typical",
        "epsilon": "0.09,0.3", "delta": "0.09,0.3"}, speculative=True, inspects="likelihoods"),
    PaperProtocol("v1-figure3", "logs", accuracy_table, Layout(
        "Accuracy in training", "",
        "how often the target's token is the drafter's first one, along training texts / held-out "
        "texts"), {}, drafters=1),
    PaperProtocol("v1-figure4", "answers", by_answer.correlated_table, Layout(
        "Accuracy at the last position against speed",
        f"drafter, form, learning rate, accuracy, last draft accepted, {_FIGURES}",
        "accuracy: at the last position, on held-out texts, of drafters with a training log"), {
        **_MT_BENCH, "beam_width": "15", "beam_length": "5"}, drafters=2),
    PaperProtocol("v1-figure5a", "answers", by_answer.along_table, Layout(
        "Drafts accepted along the answers",
        "drafter, tokens, steps, accepted drafts, tokens/step",
        "tokens: of the answer before the step, the first being 1"), {
        **_MT_BENCH, **_TRAINED, "beam_width": "4", "beam_length": "5", "max_tokens": 256}),
    _batches("v1-figure6a", batch_size="1,2,4,8,16,32,64", beam_width="1,4,16"),
    _speculator("speculators-table1", beam_width="1,2,4,8,16,32", beam_length="4",
                prompt_tokens="64,2048"),
    _speculator("speculators-table2", beam_width="1,2,4,8,16", beam_length="8",
                prompt_tokens="64,512"),
    PaperProtocol("assistant", "answers", by_answer.drafted_table, Layout(
        "A draft model",
        "T, accept, drafts, accepted, c, expected tokens/step, tokens/step, "
        "expected speedup, speedup",
        "accepted: a, the share of the drafts that were reached and accepted; c: a draft's seconds "
        "over those of the target's call with one query row; expected: (1 - a^(n+1)) / (1 - a) "
        "tokens a step, over 1 + n c calls (arXiv 2211.17192, theorem 3.8, which holds where a "
        "call takes no longer with more query rows)", covers=("L",)), {
        **_MT_BENCH, "beam_width": "1", "beam_length": "2..6", "temperature": "0,0.5,1",
        "accept": "greedy,rejection"}, drafters=1, inspects="draft costs"),
)  # fmt: skip


def find_protocol(name: str) -> PaperProtocol:
    """Return the protocol with this name; raises BadInputError if there is none."""
    by_name = {protocol.name: protocol for protocol in PROTOCOLS}
    if name not in by_name:
        raise BadInputError(f"--paper is {name!r}; {meant(name, by_name)}")
    return by_name[name]
