"""The texts that a user gives to a training run, and the key of the corpus made from them."""

from __future__ import annotations

import hashlib
import json
import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from mlx_lm.tokenizer_utils import TokenizerWrapper

from redrafter_mlx.distill.corpus.filters import Exclusions
from redrafter_mlx.distill.corpus.prompts.conversations import (
    Conversation,
    describe_unused,
    read_conversations,
)
from redrafter_mlx.distill.corpus.read_texts import ReadTexts
from redrafter_mlx.distill.corpus.shards import FORMAT
from redrafter_mlx.distill.job import TrainingJob
from redrafter_mlx.errors import BadInputError
from redrafter_mlx.weights.text.chat import render_chat


@dataclass(frozen=True)
class Given:
    """The contents of a job's files.

    conversations: prompts, without the answers that a file may have for them; or, from `data`,
                   conversations with finished answers
    read:          texts that are only read, in random order, without `conversations`
    exclude:       questions to exclude from training
    left_out:      number of conversations and texts that were excluded
    notes:         one line for each file of which rows are used in part or not at all
    """

    conversations: tuple[Conversation, ...]
    read: tuple[ReadTexts, ...]
    exclude: Exclusions
    left_out: int
    notes: tuple[str, ...] = ()


def read_given(job: TrainingJob) -> Given:
    """Read a job's files; raises BadInputError, in one line, for a file that cannot be used."""
    notes: list[str] = []
    asked = _read_files(job.prompts if job.data is None else (job.data,), notes)
    if job.data is None:
        asked = [replace(conversation, answers=()) for conversation in asked]
    elif not job.raw and not any(conversation.answers for conversation in asked):
        raise BadInputError(
            f"{job.data} holds no answers; for prompts alone use --prompts, for plain texts --raw"
        )
    read = _read_files(job.read, notes)
    random.Random(job.writing.seed).shuffle(read)  # each block reads some of every file
    asked = list(dict.fromkeys(asked))  # or one could be both held out and trained on
    asked_turns = {conversation.turns for conversation in asked}
    read = [text for text in read if text.turns not in asked_turns]
    exclude = Exclusions.of(_read_files(job.exclude, notes))
    conversations, texts = exclude.filter(asked), exclude.filter(read)
    for given, kept in ((asked, conversations), (read, texts)):
        if given and not kept:
            raise BadInputError(
                "nothing is left to train on: all that was given is in the files to exclude"
            )
    left_out = len(asked) + len(read) - len(conversations) - len(texts)
    only_read = [ReadTexts()] if job.learn_prompts and job.training.soft_share > 0 else []
    only_read += [ReadTexts(tuple(texts), raw=job.raw)] if texts else []
    return Given(tuple(conversations), tuple(only_read), exclude, left_out, tuple(notes))


def _read_files(files: Sequence[Path], notes: list[str]) -> list[Conversation]:
    found = []
    for file in files:
        unused = Counter[str]()
        found += read_conversations(file, unused)
        if unused:
            notes.append(describe_unused(file, unused))
    return found


def corpus_key(
    contents: str, dtype: str, job: TrainingJob, given: Given, tokenizer: TokenizerWrapper
) -> str:
    """Return a key for the corpus that these would make; `contents` as of `contents_of`."""
    writing = asdict(job.writing)
    del writing["thinking"]
    key: dict[str, object] = {
        "format": FORMAT,
        "target": contents,
        "dtype": dtype,
        "writing": writing,
        "conversations": [asdict(conversation) for conversation in given.conversations],
        "labels": job.labels if job.data else None,
    }
    if job.data and job.labels == "target":
        key["labels"] = (job.labels, job.training.draft_length)
    if job.data is None and _heeds_thinking(tokenizer, thinking=job.writing.thinking):
        key["thinking"] = job.writing.thinking
    if job.data is None and given.conversations:
        key["held out"] = "by digest"  # the prompts, which were once held out by seed
    if job.raw:
        key["raw"] = True
    if given.exclude.runs:  # they change the prompts that the target writes
        key["reserved"] = sorted(given.exclude.runs)
    return hashlib.sha256(json.dumps(key, sort_keys=True).encode()).hexdigest()[:16]


def _heeds_thinking(tokenizer: TokenizerWrapper, *, thinking: bool) -> bool:
    """Whether the chat template renders a prompt otherwise if it is told `thinking`."""
    asked = [{"role": "user", "content": "?"}]
    try:
        return render_chat(tokenizer, asked, thinking=thinking) != render_chat(tokenizer, asked)
    except BadInputError:  # the texts are left out, with this reason
        return False
