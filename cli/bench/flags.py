"""The options of `bench` on the command line: those of a measurement, and how it is shown."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, get_args

from redrafter_mlx.bench.options import Label
from redrafter_mlx.cli import options as opt
from redrafter_mlx.cli.flag import Flag
from redrafter_mlx.cli.options import MODEL

_PAPER, _SHAPE, _ASK, _OUT = "Papers", "Shapes and methods", "Questions", "Output"

FLAGS: Mapping[str, Flag] = {
    "beam_width": Flag(
        "Candidates: 3, 1..4, 1-4 or 1,2,4. [default: the automatic shape]", "W", _SHAPE),
    "beam_length": Flag(
        "Tokens in a candidate, the first included; as --beam-width.", "L", _SHAPE),
    "max_nodes": Flag(opt.MAX_NODES.help, "N", _SHAPE),
    "prefixes": Flag(
        "Verify all prefixes that the beam search kept; final: only those of its final candidates, "
        "as the paper does; separate: those unmerged. Several are measured in turn.",
        "all|final|separate,...", _SHAPE),
    "accept": Flag(
        "greedy, sample, rejection, typical; several are measured in turn. "
        "[default: greedy at temperature 0, else sample]", "METHOD,...", _SHAPE),
    "temperature": Flag("One or several, such as 0,0.7,1.", "T,...", _SHAPE),
    "epsilon": Flag(
        "Typical: a draft of at least this probability is accepted; one or several.", "E,...",
        _SHAPE),
    "delta": Flag(
        "Typical: so is one above D * exp(-entropy); each with every --epsilon.", "D,...",
        _SHAPE),
    "batch_size": Flag(
        "Requests at once, such as 1,2,4,8: with drafts and without, beside mlx-lm's own batches.",
        "B,...", _SHAPE),
    "draft_model": Flag(
        "Also measure mlx-lm's own speculative decoding with this model.", "NAME|REPO|PATH",
        _SHAPE),
    "num_draft_tokens": Flag(
        "Drafts a call with --draft-model; as --beam-width. [default: 3]", "N", _SHAPE),
    "questions": Flag(
        "mt-bench or spec-bench, which are fetched, or a file: Alpaca, ShareGPT, OpenAI chat, "
        "JSONL or plain lines; may be given several times. [default: our own 16]", "NAME|FILE",
        _ASK),
    "categories": Flag("Only these.", "NAME,...", _ASK),
    "limit": Flag(opt.LIMIT.help, "N", _ASK),
    "raw": Flag(
        "Ask the questions as plain text, without chat template.", panel=_ASK),
    "prompt_tokens": Flag(
        "Repeat or cut each prompt to exactly N tokens.", "N", _ASK),
    "max_tokens": opt.MAX_TOKENS,
    "ignore_eos": Flag("Answers of exactly --max-tokens tokens.", panel=_ASK),
    "repeats": Flag(
        "Answers to each question by each method.", "N", names=("--repeats", "-r")),
    "warmup": Flag(
        "Answers by each method before timing; 0 measures no costs of this machine before, either.",
        "N"),
    "delay": Flag("Seconds of rest before each answer.", "S"),
    "seed": Flag("Of sampled answers.", "N"),
    "answers": Flag(
        "Every answer as a JSON line, in Spec-Bench's form. If the file is there, the run resumes "
        "where it ends.", "FILE", _OUT),
    "drafter": Flag(
        "As in generate; random is the first of them, or else the trained one, with its weights "
        "shuffled. Given several times, all are measured in turn. [default: auto]",
        "auto|trained|successors|lookup|random|none|PATH", MODEL),
    "drafter_bits": Flag(opt.DRAFTER_BITS.help, "4|8|16", MODEL),
    "draft_vocab": Flag(opt.DRAFT_VOCAB.help, "N", MODEL),
    "model": opt.TARGET,
    "dtype": Flag(
        f"{', '.join(get_args(Label))}; several are loaded in turn.", "TYPE,...", MODEL),
    "quantize": Flag("4 is --dtype 4bit, and 8 is 8bit.", "4|8", MODEL),
    "kv_bits": opt.KV_BITS,
    "quantized_kv_start": opt.KV_START,
    "offline": opt.OFFLINE,
}  # fmt: skip
"""The flags of `BenchOptions`."""


@dataclass(frozen=True)
class Output:
    """How a measurement is shown."""

    # fmt: off
    paper: Annotated[str | None, Flag(
        "Measure what a table of the papers measures, and print the published figures beside it; "
        "other options win over the table's own. See docs/lab/papers.md.", "TABLE", _PAPER)] = None
    json: Annotated[bool, Flag("Print one JSON object, on the last line.", panel=_OUT)] = False
    plot: Annotated[str | None, Flag(
        "The heatmap, tokens/step and speedup as a picture.", "FILE.png", _OUT)] = None
    report: Annotated[str | None, Flag(
        "A folder to share: tables, pictures, the profile, machine, versions and command.", "DIR",
        _OUT, ("--report", "--output", "-o"))] = None
    compare: Annotated[tuple[str, str] | None, Flag(
        "Measure nothing; compare two results of --json, or two folders of --report.", "A B",
        _OUT)] = None
    # fmt: on
