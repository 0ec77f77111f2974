"""`redrafter-mlx generate`: one answer, for people, pipes and programs."""

from __future__ import annotations

import contextlib
import json
import sys
from collections.abc import Generator
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, Protocol

import typer

from redrafter_mlx.cli import options as opt
from redrafter_mlx.cli.terminal import (
    CONTEXT_IS_FULL,
    Terminal,
    check_text,
    loss_note,
    statistics_line,
)
from redrafter_mlx.cli.tune import shape_note
from redrafter_mlx.config import BeamShape, GenerationOptions
from redrafter_mlx.errors import BadInputError

if TYPE_CHECKING:
    from redrafter_mlx.response import Completion

Prompt = str | list[dict[str, str]]


class Token(Protocol):
    """What is shown of a `Response`."""

    @property
    def text(self) -> str: ...
    @property
    def prompt_tokens(self) -> int: ...
    @property
    def prompt_tps(self) -> float: ...
    @property
    def generation_tokens(self) -> int: ...
    @property
    def generation_tps(self) -> float: ...
    @property
    def peak_memory(self) -> float: ...
    @property
    def finish_reason(self) -> str | None: ...
    @property
    def steps(self) -> int: ...
    @property
    def tokens_per_step(self) -> float: ...
    @property
    def usual_shape(self) -> BeamShape | None: ...

    @property
    def usual_nodes(self) -> float | None: ...


class Model(Protocol):
    """What this command needs of a `Redrafter`."""

    @property
    def drafter_note(self) -> str | None: ...
    def stream(
        self, prompt: Prompt, *, raw: bool = False, options: GenerationOptions | None = None
    ) -> Generator[Token, None, None]: ...
    def generate(
        self, prompt: Prompt, *, raw: bool = False, options: GenerationOptions | None = None
    ) -> Completion: ...


def command(
    prompt: Annotated[
        str,
        typer.Option("--prompt", "-p", metavar="TEXT|-", help="The message; - reads stdin."),
    ],
    system: opt.System = None,
    raw: Annotated[
        bool, typer.Option("--raw", help="Continue the text as it is, without chat template.")
    ] = False,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print one JSON object: ids, text and statistics.")
    ] = False,
    max_tokens: opt.MaxTokens = GenerationOptions.max_tokens,
    stop: opt.Stop = None,
    temperature: opt.Temperature = GenerationOptions.temperature,
    top_p: opt.TopP = GenerationOptions.top_p,
    top_k: opt.TopK = GenerationOptions.top_k,
    min_p: opt.MinP = GenerationOptions.min_p,
    repetition_penalty: opt.RepetitionPenalty = GenerationOptions.repetition_penalty,
    seed: opt.Seed = None,
    drafter: opt.DrafterName = "auto",
    no_draft: opt.NoDraft = False,
    beam_width: opt.BeamWidth = None,
    beam_length: opt.BeamLength = None,
    max_nodes: opt.MaxNodes = None,
    accept: opt.Accept = None,
    epsilon: opt.Epsilon = GenerationOptions.epsilon,
    delta: opt.Delta = GenerationOptions.delta,
    model: opt.Model = None,
    dtype: opt.Dtype = "auto",
    quantize: opt.Quantize = None,
    offline: opt.Offline = False,
) -> None:
    """Answer one prompt: the text goes to stdout, the statistics to stderr.

    Example: redrafter-mlx generate -p "Why is the sky blue?" --max-tokens 60
    """
    options = opt.generation_options(
        max_tokens, temperature, top_p, top_k, min_p, seed, stop, beam_width, beam_length,
        max_nodes, accept, epsilon, delta, repetition_penalty, draft=not no_draft,
    )  # fmt: skip
    asked = read_prompt(prompt, system, raw)
    loaded = opt.load_model(model, "none" if no_draft else drafter, dtype, quantize, offline)
    terminal = Terminal.standard()
    if loaded.drafter_note:
        terminal.note(loaded.drafter_note)
    if as_json:
        print_json(loaded, asked, raw, options, terminal)
    else:
        print_answer(loaded, asked, raw, options, terminal)


def read_prompt(prompt: str, system: str | None, raw: bool) -> Prompt:
    """The prompt as the library takes it; raises BadInputError if there is nothing in it."""
    if raw and system is not None:
        raise BadInputError("--system needs the chat template; leave out --raw or --system")
    text = read_stdin() if prompt == "-" else check_text("the prompt", prompt)
    if prompt == "-" and not raw:
        text = text.rstrip("\r\n")
    if not (text if raw else text.strip()):
        where = "standard input gave nothing" if prompt == "-" else "give one with -p TEXT"
        raise BadInputError(f"the prompt is empty; {where}")
    if system is None:
        return text
    return [
        {"role": "system", "content": check_text("--system", system)},
        {"role": "user", "content": text},
    ]


def read_stdin() -> str:
    """All of standard input as UTF-8; raises BadInputError if it is something else."""
    try:
        return sys.stdin.buffer.read().decode("utf-8")
    except UnicodeDecodeError as error:
        raise BadInputError(
            f"standard input is not UTF-8 text (at byte {error.start}); convert it first"
        ) from None


def print_json(
    model: Model, prompt: Prompt, raw: bool, options: GenerationOptions, terminal: Terminal
) -> None:
    """The whole answer as one JSON object on a line; ASCII, so that it is safe to show."""
    answer = model.generate(prompt, raw=raw, options=options)
    terminal.stdout.write(json.dumps(asdict(answer)) + "\n")
    terminal.stdout.flush()


def print_answer(
    model: Model, prompt: Prompt, raw: bool, options: GenerationOptions, terminal: Terminal
) -> None:
    """The answer as it comes, and one line of statistics behind it."""
    last, end = None, ""
    with contextlib.closing(model.stream(prompt, raw=raw, options=options)) as tokens:
        try:
            for token in tokens:
                terminal.write(token.text)
                last, end = token, (token.text or end)[-1:]
        finally:
            if end != "\n":
                terminal.write("\n")
    if last is not None:
        terminal.note(_statistics(last, options))


def _statistics(last: Token, options: GenerationOptions) -> str:
    note, loss = None, loss_note(options)
    if last.finish_reason == "length":
        full = last.generation_tokens < options.max_tokens
        note = CONTEXT_IS_FULL if full else "ended by --max-tokens"
    answer = statistics_line(
        last.generation_tokens, last.generation_tps, last.tokens_per_step,
        shape_note(last.usual_shape, last.usual_nodes), loss, note,
    )  # fmt: skip
    prompt = f"prompt {last.prompt_tokens} tokens · {last.prompt_tps:.1f} tok/s"
    return f"{answer} · {prompt} · peak {last.peak_memory:.2f} GB"
