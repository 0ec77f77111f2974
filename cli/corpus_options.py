"""The options of `train` that say what is learnt from."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

_CORPUS = "Corpus"

Prompts = Annotated[
    list[Path] | None,
    typer.Option(
        "--prompts",
        metavar="FILE",
        rich_help_panel=_CORPUS,
        show_default=False,
        help="Your own questions: JSONL, plain lines, MT-Bench, ShareGPT, Alpaca or OpenAI "
        "chat. The target answers them beside prompts that it writes itself. Several times for "
        "several files.",
    ),
]
Data = Annotated[
    Path | None,
    typer.Option(
        "--data",
        metavar="FILE",
        rich_help_panel=_CORPUS,
        show_default=False,
        help="Conversations with finished answers to learn from instead.",
    ),
]
Labels = Annotated[
    str,
    typer.Option(
        "--labels",
        metavar="target|data",
        rich_help_panel=_CORPUS,
        help="With --data: learn what the target would say at each place, or the answers.",
    ),
]
OwnPrompts = Annotated[
    float | None,
    typer.Option(
        "--own-prompts",
        metavar="SHARE",
        rich_help_panel=_CORPUS,
        show_default=False,
        help="Share of the prompts that the target writes itself. [default: 0.5 with "
        "--prompts, else 1]",
    ),
]
BegunPrompts = Annotated[
    float,
    typer.Option(
        "--begun-prompts",
        metavar="SHARE",
        rich_help_panel=_CORPUS,
        help="Of the prompts that the target writes, how many it writes behind an English "
        "beginning such as 'Compare' or 'Write a function that'; behind nothing it asks fewer "
        "kinds of things.",
    ),
]
Answers = Annotated[
    int | None,
    typer.Option(
        "--answers",
        metavar="1|2|3",
        rich_help_panel=_CORPUS,
        show_default=False,
        help="Answers to each prompt, the second and third behind some tokens drawn at random. "
        "[default: 3 with --prompts, else 1]",
    ),
]
Read = Annotated[
    list[Path] | None,
    typer.Option(
        "--read",
        metavar="FILE",
        rich_help_panel=_CORPUS,
        show_default=False,
        help="Texts or conversations that the target only reads: what it expects at each of their "
        "tokens is learnt, which is several times faster than answers. In the same formats; may "
        "be given several times.",
    ),
]
Without = Annotated[
    list[Path] | None,
    typer.Option(
        "--without",
        metavar="FILE",
        rich_help_panel=_CORPUS,
        show_default=False,
        help="Questions that the drafter is to be measured with: a prompt with 13 words in a row "
        "of one of them is left out, whoever wrote it. Several times for several files.",
    ),
]
LearnPrompts = Annotated[
    bool,
    typer.Option(
        "--learn-prompts/--no-learn-prompts",
        rich_help_panel=_CORPUS,
        help="Learn what the target expects along the prompts as well, which it reads anyway.",
    ),
]
AnswerTokens = Annotated[
    int,
    typer.Option(
        "--answer-tokens",
        metavar="N",
        rich_help_panel=_CORPUS,
        help="Size of the corpus. More is better: 2 million is little, 10 million a lot.",
    ),
]
CacheBytes = Annotated[
    int,
    typer.Option(
        "--cache-bytes",
        metavar="N",
        rich_help_panel=_CORPUS,
        help="The most that the corpus and its hidden states may take on disk.",
    ),
]
Workers = Annotated[
    int | None,
    typer.Option(
        "--workers",
        metavar="N",
        rich_help_panel=_CORPUS,
        show_default=False,
        help="Processes that write the corpus. [default: 1 on a GPU, one a core on a CPU]",
    ),
]
