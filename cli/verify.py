"""`redrafter-mlx verify`: a report on whether the output is exact."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import TYPE_CHECKING, Annotated

import typer

from redrafter_mlx.cli import options as opt
from redrafter_mlx.cli.progress import describe_count, progress_bars
from redrafter_mlx.cli.terminal import one_line
from redrafter_mlx.config import GenerationOptions
from redrafter_mlx.drafting.names import parse
from redrafter_mlx.runtime.words import count

if TYPE_CHECKING:
    from redrafter_mlx.verification import VerificationReport

_DEFAULTS = GenerationOptions(max_tokens=128)
_GENERATION = ("max_tokens", "beam_width", "beam_length", "max_nodes")


@opt.with_options
def command(
    *,
    asked: opt.QuestionOptions,
    raw: opt.Raw = False,
    as_json: opt.Json = False,
    generation: Annotated[GenerationOptions, _GENERATION] = _DEFAULTS,
    loading: opt.ModelOptions,
) -> None:
    """Compare drafted decoding with mlx-lm's own loop, token by token.

    All steps have one shape: the given one, or the likeliest for this kind of machine.

    Exits 0 if all tokens agree, or if every difference is explained by rounding. Where auto finds
    no drafter, an oracle drafts mlx-lm's answer with random errors, so that drafts of every length
    are accepted.
    """
    chosen = asked.chosen()
    loaded = opt.load_model(loading, chat_or=None if raw else opt.RAW_INSTEAD)
    from redrafter_mlx.verification import verify

    with progress_bars(f"comparing {count(len(chosen), 'answer')}", describe_count) as progress:
        report = verify(
            loaded,
            [loaded.encode(question.text, raw=raw) for question in chosen],
            max_tokens=generation.max_tokens,
            shape=loaded.choices.shape_of(generation) or loaded.beam_shape,
            oracle=parse(loading.drafter).auto and not (loaded.drafter and loaded.drafter.modules),
            done=lambda n: progress("questions", n, len(chosen)),
        )
    decode = loaded.tokenizer.decode
    print(json.dumps(report.to_dict()) if as_json else describe(report, decode))
    raise typer.Exit(0 if report.explained else 1)


def describe(report: VerificationReport, decode: Callable[[list[int]], str]) -> str:
    weights = f", {report.bits}-bit weights" if report.bits else ""
    weights += f", {report.kv_packing}" if report.kv_packing else ""
    drafts = "mlx-lm's own answers, with errors" if report.drafter == "oracle" else report.drafter
    lines = [
        f"{report.model}, {report.dtype}{weights}; drafts from {drafts}; "
        f"W {report.beam_width}, L {report.beam_length}, N {report.nodes:.3g}",
        f"{report.agreeing} of {count(report.tokens, 'token')} agree with mlx-lm's own loop, "
        f"{count(report.questions, 'question')}, {report.tokens_per_step:.2f} tokens/step",
    ]
    for d in report.differences:
        expected, got = (one_line(repr(decode([token]))) for token in (d.expected, d.got))
        why = "explained by rounding" if d.explained else "NOT explained by rounding"
        lines.append(
            f"question {d.question + 1}, token {d.position + 1}: {expected} ({d.expected}) became "
            f"{got} ({d.got}); margin "
            f"{d.margin:.2g} nats, rounding moves {d.noise:.2g}: {why}"
        )
    if report.kv_packing:
        lines.append(
            f"{report.kv_packing} make another target, with drafts or without: "
            f"{report.kv_agreeing} tokens of mlx-lm's are also those of whole ones"
        )
    if report.exact:
        lines.append("exact: every token agrees")
    elif report.explained:
        lines.append("exact up to rounding: every difference is a near-tie")
    else:
        lines.append("NOT exact: some difference is not a near-tie; please report it")
    return "\n".join(lines)
