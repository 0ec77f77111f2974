"""A corpus in its folder: what it is made of, how large it is, and when it is large enough."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

from mlx_lm.tokenizer_utils import TokenizerWrapper

from redrafter_mlx.distill.corpus.extras import Extras
from redrafter_mlx.distill.corpus.filters import NOTHING, Exclusions
from redrafter_mlx.distill.corpus.prompts.conversations import Conversation
from redrafter_mlx.distill.corpus.prompts.user_turns import UNFINISHED
from redrafter_mlx.distill.corpus.reader import Reader
from redrafter_mlx.distill.corpus.shards import BlockProgress, summarise_shard
from redrafter_mlx.distill.corpus.writing.writer import Writer
from redrafter_mlx.distill.job import TrainingJob
from redrafter_mlx.errors import BadInputError
from redrafter_mlx.target_model.model import Target

_MIN_FILLED = 2  # minimum number of blocks with texts: to hold one out, and to train on another

MORE_EMPTY = 3
"""Blocks of given prompts or answers that may be empty, in addition to those that are needed."""


@dataclass(frozen=True)
class CorpusJob:
    """What a worker needs: the job, its texts, and where to write."""

    job: TrainingJob
    conversations: tuple[Conversation, ...]  # prompts to answer; with `job.data`, answers to read
    folder: Path
    extras: Extras = field(default_factory=Extras)  # what is stored next to the texts
    exclude: Exclusions = NOTHING  # questions that the target's own prompts must not repeat
    room: int | None = None  # maximum bytes for the rows of one batch in a process; None: no limit
    max_bytes: int = sys.maxsize  # maximum size of the corpus on disk

    def source(self, target: Target, tokenizer: TokenizerWrapper) -> Writer | Reader:
        job, texts = self.job, self.conversations
        if job.data is None:
            return Writer(target, tokenizer, texts, job.writing, self.exclude, self.room, job.raw)
        length = job.training.draft_length
        return Reader(target, tokenizer, texts, job.labels, length, raw=job.raw)

    def path(self, block: int) -> Path:
        return self.folder / f"block-{block:06d}.safetensors"

    def files(self, block: int) -> list[Path]:
        return [self.path(block), *self.extras.files(self.path(block))]


@dataclass(frozen=True)
class CorpusSize:
    """Contents of a corpus: its first `blocks`, and the bytes of all files on the disk."""

    # without a gap, and only as many as the requested answer tokens need, so that the same request
    # finds the same corpus even if more has been written
    blocks: int
    filled: int  # number of blocks that hold texts
    answer_tokens: int
    read_tokens: int  # tokens that are trained on, of prompts and of texts that are only read
    texts: int
    bytes: int
    left_out: Mapping[str, int]
    started: tuple[BlockProgress, ...] = ()  # the blocks that are being written


@dataclass(frozen=True)
class CorpusGoal:
    """When a corpus is large enough: it holds `answer_tokens`, or takes `max_bytes` on the disk."""

    answer_tokens: int
    max_bytes: int
    min_blocks: int = 0  # it has as many, unless they take more than `max_bytes`
    max_empty: int = MORE_EMPTY  # give up if as many blocks are there and none holds a text
    min_tokens: int = 0  # with these blocks and as many tokens, it is enough if `stop()`
    stop: Callable[[], bool] = lambda: False

    def reached(self, size: CorpusSize) -> bool:
        """Whether a corpus is large enough; raises BadInputError if its blocks stay empty."""
        if size.filled == 0 and size.blocks >= self.max_empty:
            first = f"first {size.blocks} blocks" if size.blocks > 1 else "first block"
            why = describe_left_out(size.left_out) or "nothing was written"
            raise BadInputError(
                f"no text to train on in the {first} of the corpus (left out: {why}); "
                f"{_advice(size.left_out)}"
            )
        if size.bytes >= self.max_bytes:
            return True
        if size.blocks < self.min_blocks or size.filled < _MIN_FILLED:
            return False
        if size.answer_tokens >= self.answer_tokens:
            return True
        return size.blocks > 0 and size.answer_tokens >= self.min_tokens and self.stop()

    def check_enough(self, size: CorpusSize, data: Path | None) -> None:
        """Raise BadInputError for a whole corpus of fewer than `min_tokens`."""
        if size.answer_tokens < self.min_tokens:
            full = size.bytes >= self.max_bytes
            left_out = describe_left_out(size.left_out)
            raise BadInputError(
                f"the corpus holds {size.answer_tokens} answer tokens in {size.bytes} bytes, too "
                f"few to train on; "
                + ("raise cache_bytes" if full else f"{data} has no more of use")
                + (f" (left out: {left_out})" if left_out else "")
            )


def describe_left_out(left_out: Mapping[str, int]) -> str:
    """Return text such as `40 prompt unfinished, 3 answer too short`."""
    return ", ".join(f"{n:,} {why}" for why, n in sorted(left_out.items()))


def _advice(left_out: Mapping[str, int]) -> str:
    """Return what to do if everything is left out, by the most frequent reason."""
    if max(left_out, key=left_out.__getitem__, default="") == UNFINISHED:
        return (
            "this model does not end the prompts that it writes, as models before instruction "
            "tuning do not; give plain texts: --data FILE --raw, or --prompts FILE --raw"
        )
    return "give other prompts or limits of their length"


class CorpusGauge:
    """Measures a corpus on disk while it grows; every shard is read only once."""

    def __init__(self, job: CorpusJob, goal: CorpusGoal) -> None:
        self._job, self._goal = job, goal
        self._summary = cache(summarise_shard)

    def enough(self) -> bool:
        return self._goal.reached(self.size())

    def size(self) -> CorpusSize:
        """Return what the corpus holds now, up to the goal's answer tokens."""
        job, goal = self._job, self._goal
        blocks = filled = tokens = read = texts = 0
        left_out: Counter[str] = Counter()
        while (
            tokens < goal.answer_tokens or blocks < goal.min_blocks or filled < _MIN_FILLED
        ) and all(path.exists() for path in job.files(blocks)):
            shard = self._summary(job.path(blocks))
            tokens, texts = tokens + shard.answer_tokens, texts + shard.texts
            filled += shard.texts > 0
            left_out.update(shard.left_out)
            for texts_read in job.extras.read:
                read += self._summary(texts_read.path(job.path(blocks))).answer_tokens
            blocks += 1
        there = [
            int(path.stem.split("-")[1])
            for path in job.folder.glob(f"block-{'[0-9]' * 6}.safetensors")
        ]
        files = [path for block in there for path in job.files(block)]
        on_disk = sum(path.stat().st_size for path in files if path.exists())
        return CorpusSize(blocks, filled, tokens, read, texts, on_disk, left_out)
