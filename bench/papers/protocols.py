"""How each table of the papers is measured: the options of `bench`, and what makes the table."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Literal

from redrafter_mlx.bench.measure.questions import Question
from redrafter_mlx.bench.papers import answer_tables as by_answer
from redrafter_mlx.bench.papers import batch_tables as by_batch
from redrafter_mlx.bench.papers import log_tables as by_log
from redrafter_mlx.bench.papers.evidence import Evidence
from redrafter_mlx.bench.papers.published import Published, published
from redrafter_mlx.bench.show.tables import TextTable
from redrafter_mlx.errors import BadInputError, meant

QUESTION_81 = Question(
    "Compose an engaging travel blog post about a recent trip to Hawaii, highlighting cultural "
    "experiences and must-see attractions.",
    "writing",
    81,
)
"""The question of MT-Bench (Apache-2.0) that the authors timed on Macs."""

_MT_BENCH: Mapping[str, object] = {"mt_bench": True, "repeats": 1}
_TRAINED: Mapping[str, object] = {"drafter": ("trained",)}


@dataclass(frozen=True)
class PaperProtocol:
    """How a table is measured.

    name:     value of `--paper`
    measures: requests one at a time, or concurrent requests, or nothing: training logs are read
    tables:   makes the tables from the measurements
    options:  options of `bench` by name; those of the command line take precedence
    question: the only question, unless the user names others
    drafters: number of drafters that the user must name; 0 if the options name them
    installed: whether every drafter on this machine that fits the model is measured
    speculative: whether the table also has rows of mlx-lm's speculative decoding
    inspects: what is measured in addition to time
    """

    name: str
    measures: Literal["answers", "batches", "logs"]
    tables: Callable[[Evidence], list[TextTable]]
    options: Mapping[str, object]
    question: Question | None = None
    drafters: int = 0
    installed: bool = False
    speculative: bool = False
    inspects: Literal["likelihoods", "draft costs"] | None = None

    @property
    def published(self) -> Published:
        """The paper's own figures."""
        return published(self.name)


PROTOCOLS = (
    PaperProtocol("table1", "answers", by_answer.method_tables, _MT_BENCH, installed=True,
                  speculative=True),
    PaperProtocol("table2", "answers", by_answer.shape_tables, {
        **_TRAINED, "beam_width": "1..4", "beam_length": "2..5", "max_tokens": 200,
        "dtype": "float16,bfloat16,4bit"}, question=QUESTION_81),
    PaperProtocol("table3", "batches", by_batch.batch_tables, {
        **_MT_BENCH, **_TRAINED, "batch_size": "1,2,4,8", "beam_width": "1,2,4,8",
        "beam_length": "5"}),
    PaperProtocol("table4", "answers", by_answer.label_tables, {
        **_MT_BENCH, "beam_width": "1,2,4,8,16", "beam_length": "5"}, drafters=2),
    PaperProtocol("figure6", "answers", by_answer.merging_tables, {
        **_MT_BENCH, **_TRAINED, "beam_width": ",".join(map(str, range(5, 71, 5))),
        "beam_length": "5", "prefixes": "separate,final,all"}),
    PaperProtocol("v1-figure3", "logs", by_log.accuracy_tables, {}, drafters=1),
    PaperProtocol("v1-figure4", "answers", by_answer.rate_tables, {
        **_MT_BENCH, "beam_width": "4", "beam_length": "5"}, drafters=2),
    PaperProtocol("v1-figure5a", "answers", by_answer.along_tables, {
        **_MT_BENCH, **_TRAINED, "beam_width": "4", "beam_length": "5", "max_tokens": 256}),
    PaperProtocol("v1-figure6a", "answers", by_answer.accepted_tables, {
        **_MT_BENCH, **_TRAINED, "beam_width": "1,2,4,8", "beam_length": "5", "max_tokens": 256}),
    PaperProtocol("v1-table2", "answers", by_answer.acceptance_tables, {
        **_MT_BENCH, **_TRAINED, "beam_width": "2", "beam_length": "4",
        "temperature": "0,0.3,0.7,1", "accept": "rejection,typical", "epsilon": "0.09,0.2",
        "delta": "0.3,0.6"}, speculative=True, inspects="likelihoods"),
    PaperProtocol("speculators-table1", "batches", by_batch.latency_tables, {
        **_TRAINED, "batch_size": "1,2,4", "beam_width": "1,2,4", "beam_length": "4",
        "max_tokens": 100, "ignore_eos": True, "repeats": 1, "prompt_tokens": "64,2048"}),
    PaperProtocol("assistant", "answers", by_answer.draft_model_tables, {
        **_MT_BENCH, "beam_width": "1", "beam_length": "2..6", "temperature": "0,0.5,1",
        "accept": "greedy,rejection"}, drafters=1, inspects="draft costs"),
)  # fmt: skip


def find_protocol(name: str) -> PaperProtocol:
    """Return the protocol with this name; raises BadInputError if there is none."""
    by_name = {protocol.name: protocol for protocol in PROTOCOLS}
    if name not in by_name:
        raise BadInputError(f"--paper is {name!r}; {meant(name, by_name)}")
    return by_name[name]
