"""`redrafter-mlx bench`: drafted decoding against plain decoding, measured side by side."""

from __future__ import annotations

import sys
from typing import cast

import typer

from redrafter_mlx.bench.measure.questions import (
    OWN_QUESTIONS,
    Question,
    choose_questions,
    fetch_mt_bench,
    read_questions,
)
from redrafter_mlx.cli import bench_options as bo
from redrafter_mlx.cli import options as opt
from redrafter_mlx.cli.bench_request import FORMATS, Request, parse_loading
from redrafter_mlx.cli.ranges import each_once, parse_integers, parse_numbers, parse_words
from redrafter_mlx.config import AcceptMethod, Prefixes, check_choice
from redrafter_mlx.errors import BadInputError


def command(
    beam_width: bo.BeamWidth = None,
    beam_length: bo.BeamLength = None,
    max_nodes: opt.MaxNodes = None,
    prefixes: bo.Prefixes = "all",
    accept: bo.Accept = None,
    temperature: bo.Temperature = "0",
    draft_model: bo.DraftModel = None,
    num_draft_tokens: bo.NumDraftTokens = "3",
    questions: bo.Questions = None,
    mt_bench: bo.MtBench = False,
    categories: bo.Categories = None,
    limit: bo.Limit = None,
    max_tokens: opt.MaxTokens = 128,
    repeats: bo.Repeats = 3,
    warmup: bo.Warmup = 1,
    delay: bo.Delay = 0.0,
    seed: bo.Seed = 0,
    breakdown: bo.Breakdown = True,
    output: bo.Output = "table",
    plot: bo.Plot = None,
    answers: bo.Answers = None,
    compare: bo.Compare = None,
    drafter: bo.Drafters = None,
    model: opt.Model = None,
    dtype: bo.Dtype = "auto",
    offline: opt.Offline = False,
) -> None:
    """Measure plain and drafted decoding in one run, question by question, on this machine.

    Speedups are over mlx-lm's own loop in the same run. Exits 1 if our greedy tokens are not
    mlx-lm's where they must be.

    Example: redrafter-mlx bench --beam-width 1..4 --beam-length 4
    """
    if output not in FORMATS:
        raise BadInputError(f"--output is {output!r}; choose one of {', '.join(FORMATS)}")
    check_choice("--prefixes", prefixes, Prefixes)
    if compare is not None:
        from redrafter_mlx.cli.bench_output import print_comparison

        print_comparison(*compare, output)
        return
    request = Request(
        questions=tuple(_chosen(questions, mt_bench, offline, categories, limit)),
        asked_for=" and ".join([*(["MT-Bench"] if mt_bench else []), *(questions or [])])
        or "our own",
        widths=_integers("--beam-width", beam_width),
        lengths=_integers("--beam-length", beam_length),
        max_nodes=max_nodes,
        prefixes=cast(Prefixes, prefixes),
        accepts=_accepts(accept),
        temperatures=tuple(parse_numbers("--temperature", temperature)),
        draft_model=draft_model,
        draft_tokens=_draft_tokens(draft_model, num_draft_tokens),
        max_tokens=max_tokens,
        repeats=repeats,
        warmup=warmup,
        delay=delay,
        seed=seed,
        breakdown=breakdown,
        plot=plot,
        answers=answers,
        drafters=tuple(each_once(drafter or ["auto"])),
        model=model,
        loadings=tuple(parse_loading(label) for label in parse_words("--dtype", dtype)),
        offline=offline,
    )
    request.check()
    from redrafter_mlx.cli.bench_output import print_result
    from redrafter_mlx.cli.bench_session import run_session

    outcome = run_session(request)
    print_result(outcome.result, output, plot, sys.stdout)
    raise typer.Exit(outcome.status)


def _chosen(
    paths: list[str] | None,
    mt_bench: bool,
    offline: bool,
    categories: str | None,
    limit: int | None,
) -> list[Question]:
    there: list[Question] = fetch_mt_bench(offline=offline) if mt_bench else []
    for path in paths or ():
        there += read_questions(path)
    if not paths and not mt_bench:
        there = list(OWN_QUESTIONS)
    wanted = None if categories is None else parse_words("--categories", categories)
    return choose_questions(there, wanted, limit)


def _integers(name: str, text: str | None) -> tuple[int, ...]:
    return () if text is None else tuple(parse_integers(name, text))


def _draft_tokens(draft_model: str | None, text: str) -> tuple[int, ...]:
    numbers = _integers("--num-draft-tokens", text)
    if min(numbers) < 1:
        raise BadInputError("--num-draft-tokens holds 0; it must be at least 1")
    return () if draft_model is None else numbers


def _accepts(text: str | None) -> tuple[AcceptMethod, ...] | None:
    if text is None:
        return None
    words = parse_words("--accept", text)
    for word in words:
        check_choice("--accept", word, AcceptMethod)
    return cast(tuple[AcceptMethod, ...], tuple(words))
