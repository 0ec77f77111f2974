"""The texts that a user gives to a training run, and the key of the corpus made from them."""

from __future__ import annotations

import hashlib
import json
import random
from dataclasses import asdict, dataclass, replace

from redrafter_mlx.distill.corpus.filters import Exclusions
from redrafter_mlx.distill.corpus.prompts.conversations import Conversation, read_conversations
from redrafter_mlx.distill.corpus.shards import FORMAT
from redrafter_mlx.distill.job import TrainingJob
from redrafter_mlx.distill.options import Labels, WritingOptions
from redrafter_mlx.errors import BadInputError


@dataclass(frozen=True)
class Given:
    """The contents of a job's files.

    conversations: prompts, without the answers that a file may have for them; or, from `data`,
                   conversations with finished answers
    read:          texts that are only read, in random order; None without any
    exclude:       questions to exclude from training
    left_out:      number of conversations and texts that were excluded
    """

    conversations: tuple[Conversation, ...]
    read: tuple[Conversation, ...] | None
    exclude: Exclusions
    left_out: int


def read_given(job: TrainingJob) -> Given:
    """Read a job's files; raises BadInputError, in one line, for a file that cannot be used."""
    files = job.prompts if job.data is None else (job.data,)
    asked = [conversation for file in files for conversation in read_conversations(file)]
    if job.data is not None and not any(c.answers for c in asked):
        raise BadInputError(f"{job.data} holds no answers; for prompts alone use --prompts")
    read = [text for file in job.read for text in read_conversations(file)]
    random.Random(job.writing.seed).shuffle(read)  # each block reads some of every file
    exclude = Exclusions.read(job.exclude)
    if job.data is None:
        asked = [replace(conversation, answers=()) for conversation in asked]
    conversations, texts = exclude.filter(asked), exclude.filter(read)
    for given, kept in ((asked, conversations), (read, texts)):
        if given and not kept:
            raise BadInputError(
                "nothing is left to train on: all that was given is in the files to exclude"
            )
    left_out = len(asked) + len(read) - len(conversations) - len(texts)
    only_read = tuple(texts) if job.read else None
    return Given(tuple(conversations), only_read, exclude, left_out)


def corpus_key(
    contents: str,
    dtype: str,
    writing: WritingOptions,
    given: Given,
    labels: tuple[Labels, int] | None,
    thinking: bool | None = None,
) -> str:
    """Return a key for the corpus that these would make.

    contents: as of `contents_of`
    thinking: as of `told_to_think`; the key depends on it only where the texts do
    """
    options = asdict(writing)
    del options["thinking"]
    key: dict[str, object] = {
        "format": FORMAT,
        "target": contents,
        "dtype": dtype,
        "writing": options,
        "conversations": [asdict(conversation) for conversation in given.conversations],
        "labels": labels,
    }
    if thinking is not None:
        key["thinking"] = thinking
    if given.exclude.runs:  # they change the prompts that the target writes
        key["reserved"] = sorted(given.exclude.runs)
    return hashlib.sha256(json.dumps(key, sort_keys=True).encode()).hexdigest()[:16]
