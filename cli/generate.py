"""`redrafter-mlx generate`: one answer, for people, pipes and programs."""

from __future__ import annotations

import contextlib
import json
import sys
from collections import Counter
from dataclasses import asdict, replace
from typing import TYPE_CHECKING, Annotated

import typer

from redrafter_mlx.cli import options as opt
from redrafter_mlx.cli.flag import Flag
from redrafter_mlx.cli.progress import PrefillLine, progress_bars
from redrafter_mlx.cli.terminal import (
    CONTEXT_IS_FULL,
    Terminal,
    loss_note,
    shape_note,
    shares_line,
    statistics_line,
)
from redrafter_mlx.config import GenerationOptions
from redrafter_mlx.drafting.names import NONE
from redrafter_mlx.errors import BadInputError
from redrafter_mlx.runtime.words import count

if TYPE_CHECKING:
    from redrafter_mlx.engine.engine import Redrafter
    from redrafter_mlx.response import Source

Prompt = str | list[dict[str, str]]


@opt.with_options
def command(
    *,
    prompt: Annotated[
        str | None,
        Flag("The message; - reads stdin.", "TEXT|-", names=("--prompt", "-p"), argument="TEXT"),
    ] = None,
    system: opt.System = None,
    raw: Annotated[bool, Flag("Continue the text as it is, without chat template.")] = False,
    as_json: Annotated[
        bool, Flag("Print one JSON object: ids, text and statistics.", names=("--json",))
    ] = False,
    generation: GenerationOptions,
    loading: opt.ModelOptions,
) -> None:
    """Answer one prompt: the text goes to stdout, the statistics to stderr.

    A single argument is the model; -p gives the message to the default one.

    Example: redrafter-mlx generate qwen3-8b "Why is the sky blue?" --max-tokens 60
    """
    if prompt is None:  # stdin is not read unasked: an inherited pipe may never end
        model = loading.model
        named = "" if model is None else f"{model!r:.200} is taken as the model, and "
        raise typer.BadParameter(
            f"{named}there is no message; give MODEL TEXT, or -p TEXT for the default model, "
            f"or -p - to read standard input",
            param_hint="TEXT",
        )
    if raw and generation.thinking is not None:
        raise BadInputError("--thinking needs the chat template; leave out --raw or --thinking")
    asked = read_prompt(prompt, system, raw)
    loading = loading if generation.draft else replace(loading, drafter=NONE)
    loaded = opt.load_model(  # only one answer will come
        loading, warm_up=False, chat_or=None if raw else "give --raw to continue plain text"
    )
    if loaded.untried:
        with progress_bars("trying the drafter, once for it and this machine"):
            loaded.try_drafter()
    terminal = Terminal.standard()
    if loaded.drafter_note:
        terminal.note(loaded.drafter_note)
    if as_json:
        answer = loaded.generate(asked, raw=raw, options=generation)
        print(json.dumps(asdict(answer)), flush=True)  # ASCII, so that it is safe to show
    else:
        print_answer(loaded, asked, raw, generation, terminal)


def read_prompt(prompt: str, system: str | None, raw: bool) -> Prompt:
    """Return the prompt as the library takes it; BadInputError if it is empty, or not UTF-8."""
    if raw and system is not None:
        raise BadInputError("--system needs the chat template; leave out --raw or --system")
    text = prompt
    if prompt == "-":
        try:
            text = sys.stdin.buffer.read().decode("utf-8-sig")
        except UnicodeDecodeError as error:
            raise BadInputError(
                f"standard input is not UTF-8 text (at byte {error.start}); convert it first"
            ) from None
        text = text if raw else text.rstrip("\r\n")
    if not (text if raw else text.strip()):
        where = "standard input gave nothing" if prompt == "-" else "give one with -p TEXT"
        raise BadInputError(f"the prompt is empty; {where}")
    if system is None:
        return text
    return [{"role": "system", "content": system}, {"role": "user", "content": text}]


def print_answer(
    model: Redrafter, prompt: Prompt, raw: bool, options: GenerationOptions, terminal: Terminal
) -> None:
    """Stream the answer to stdout, then print one line of statistics to stderr."""
    last, end = None, ""
    sources: Counter[Source] = Counter()
    with (
        PrefillLine(terminal.stderr) as line,
        contextlib.closing(
            model.stream(prompt, raw=raw, options=options, on_prefill=line.update)
        ) as tokens,
    ):
        try:
            for token in tokens:
                line.erase()
                terminal.write(token.text)
                sources[token.source] += 1
                last, end = token, (token.text or end)[-1:]
        finally:
            if end != "\n":
                terminal.write("\n")
    if last is None:
        return
    note = None
    if last.finish_reason == "length":
        full = last.generation_tokens < options.max_tokens
        note = CONTEXT_IS_FULL if full else "ended by --max-tokens"
    read = f"prompt {count(last.prompt_tokens, 'token')} · {last.prompt_tps:.1f} tok/s"
    memory = f"peak {last.peak_memory:.2f} GB"
    rates = (last.generation_tokens, last.generation_tps, last.tokens_per_step)
    steps = (last.usual_shape, last.usual_nodes, last.tokens_per_step)
    shape = shape_note(*steps, shares_line(sources))
    terminal.note(statistics_line(*rates, shape, loss_note(options), note, read, memory))
