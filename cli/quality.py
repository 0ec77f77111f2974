"""`redrafter-mlx quality`: how good drafters are, measured along the target's answers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, cast

import typer

from redrafter_mlx.cli import options as opt
from redrafter_mlx.cli.flag import Flag
from redrafter_mlx.cli.progress import describe_count, duration, progress_bars
from redrafter_mlx.cli.terminal import one_line
from redrafter_mlx.config import BeamShape, DType, GenerationOptions
from redrafter_mlx.errors import BadInputError
from redrafter_mlx.runtime.files.paths import human_size
from redrafter_mlx.runtime.ranges import each_once, parse_integers
from redrafter_mlx.runtime.words import count

if TYPE_CHECKING:
    from redrafter_mlx.distill.evaluation.questions import DrafterQuality

Measured = tuple["DrafterQuality", int, "float | None"]
"""Quality of a drafter, bytes of its weights on disk, and seconds of its training."""

_DEFAULTS = GenerationOptions(max_tokens=128)


@opt.with_options
def command(
    *,
    drafters: Annotated[
        list[Path],
        typer.Argument(metavar="DIR...", help="The drafters' folders.", show_default=False),
    ],
    asked: opt.QuestionOptions,
    raw: opt.Raw = False,
    beam_width: Annotated[str, Flag("3, 1..4, 1-4 or 1,2,4.", "RANGE")] = "1..4",
    beam_length: Annotated[int, Flag("Tokens in a candidate.", "L")] = 4,
    generation: Annotated[GenerationOptions, ("max_tokens",)] = _DEFAULTS,
    as_json: opt.Json = False,
    loading: opt.TargetOptions,
) -> None:
    """Measure drafters on questions: tokens/step, and how long drafting takes.

    The target answers all questions together and greedily. Decoding with each drafter is simulated
    along these answers: tokens/step is what decoding would give.
    """
    shapes = [BeamShape(w, beam_length) for w in parse_integers("--beam-width", beam_width)]
    if beam_length < 2:
        raise BadInputError(f"--beam-length is {beam_length}; drafts begin at 2")
    if generation.max_tokens < 8:
        raise BadInputError(f"--max-tokens is {generation.max_tokens}; give at least 8")
    chosen = asked.chosen()
    from redrafter_mlx.distill.evaluation.questions import answer_questions, quality_on
    from redrafter_mlx.distill.report.metrics import training_seconds
    from redrafter_mlx.drafting.files.drafter_files import open_files
    from redrafter_mlx.drafting.files.forms import DrafterFolder, find_form
    from redrafter_mlx.engine.prompts.prompt import prompt_tokens
    from redrafter_mlx.loading.target import load_target

    drafters = each_once(drafters)
    opened = [open_files(folder) for folder in drafters]
    for files in opened:
        find_form(files)  # refuse a wrong path before anything is loaded
    sizes = [sum(file.stat().st_size for file in files.tensors.files) for files in opened]
    trained = [training_seconds(folder) for folder in drafters]
    with progress_bars(f"answering {count(len(chosen), 'question')}") as progress:
        loaded = load_target(
            loading.model,
            dtype=cast(DType, loading.dtype),
            quantize=loading.quantize,
            offline=loading.offline,
            progress=progress,
            chat_or=None if raw else opt.RAW_INSTEAD,
        )
        target = loaded.target
        source = loaded.source
        named = {str(folder): DrafterFolder(folder, source).load(target) for folder in drafters}
        V = target.vocab_size
        prompts = [prompt_tokens(loaded.tokenizer, q.text, raw, V) for q in chosen]
        eos = set(loaded.tokenizer.eos_token_ids)
        answers = answer_questions(target, prompts, eos, generation.max_tokens)
    categories = [question.category for question in chosen]
    measured = quality_on(named, target, answers, shapes, categories)
    with progress_bars(count(len(named), "drafter"), describe_count) as progress:
        found: list[Measured] = []
        for one in zip(measured, sizes, trained, strict=True):
            found.append(one)
            progress("measured", len(found), len(named))
    result = {
        "model": source.name,
        "questions": len(chosen),
        "answer_tokens": sum(len(text.answer) for text in answers),
        "beam_length": beam_length,
        "drafters": [
            {**one.to_dict(), "bytes": size, "training_seconds": seconds}
            for one, size, seconds in found
        ],
    }
    print(json.dumps(result) if as_json else describe(found, len(chosen)))


def describe(found: list[Measured], questions: int) -> str:
    """Describe each drafter in a block: its accuracy, and tokens/step by beam width."""
    lines = [count(questions, "question")]
    for one, size, seconds in found:
        quality = one.quality
        facts = [f"{one.parameters / 1e6:.1f} million parameters", human_size(size)]
        facts += [f"beams of {one.beam_length} tokens"]
        facts += [] if seconds is None else [f"trained in {duration(seconds)}"]
        lines.append(f"{one_line(one.name)}: {', '.join(facts)}")
        lines.append("  right at position  " + " ".join(f"{x:6.1%}" for x in quality.top1))
        lines.append("  among five         " + " ".join(f"{x:6.1%}" for x in quality.top5))
        lines.append("  width   tokens/step   drafting a step   accepted 1, 2, ... drafts")
        lines += [
            f"  {width:5d}   {per_step:11.2f}   {one.draft_seconds[width] * 1e3:12.1f} ms   "
            + " ".join(f"{x:.0%}" for x in quality.accepted[width])
            for width, per_step in quality.tokens_per_step.items()
        ]
        if one.by_category:
            widths = "  ".join(f"{width:5d}" for width in quality.tokens_per_step)
            lines.append(f"  tokens/step at width  {widths}")
        lines += [
            f"    {one_line(category):<18}  " + "  ".join(f"{x:5.2f}" for x in there.values())
            for category, there in one.by_category.items()
        ]
    return "\n".join(lines)
