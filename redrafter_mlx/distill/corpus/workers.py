"""Writing a corpus into a folder, block after block, by one process or several.

MLX computes element-wise operations on one core, and only matrix products on all. So on a CPU
several processes with one core each write more than one process with all cores.
"""

from __future__ import annotations

import json
import os
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from multiprocessing.process import BaseProcess
from pathlib import Path

import mlx.core as mx
from mlx_lm.tokenizer_utils import TokenizerWrapper

from redrafter_mlx.distill.corpus.conversations import Conversation
from redrafter_mlx.distill.corpus.extras import Extras
from redrafter_mlx.distill.corpus.filters import NOTHING, Exclusions
from redrafter_mlx.distill.corpus.gathering import write_together
from redrafter_mlx.distill.corpus.reader import Reader
from redrafter_mlx.distill.corpus.shards import ShardSummary, save_shard, summarise_shard
from redrafter_mlx.distill.corpus.writer import Writer
from redrafter_mlx.distill.job import TrainingJob
from redrafter_mlx.distributed.group import Ranks
from redrafter_mlx.errors import RedrafterError
from redrafter_mlx.loading.target import LoadedTarget, load_target
from redrafter_mlx.runtime.atomic_write import remove_abandoned
from redrafter_mlx.runtime.blas import THREAD_VARIABLES
from redrafter_mlx.runtime.child_process import start_child
from redrafter_mlx.target.model import Target

_POLL = 1.0
"""Seconds between checks of the folder."""


@dataclass(frozen=True)
class CorpusJob:
    """What a worker needs: the job, its texts, and where to write.

    conversations: prompts to answer; with `job.data`, answers to read
    extras:  what is stored next to the texts
    exclude: questions that the target's own prompts must not repeat
    room:    maximum bytes for the rows of one batch in a process; None for no limit
    """

    job: TrainingJob
    conversations: tuple[Conversation, ...]
    folder: Path
    extras: Extras = field(default_factory=Extras)
    exclude: Exclusions = NOTHING
    room: int | None = None

    def source(self, target: Target, tokenizer: TokenizerWrapper) -> Writer | Reader:
        """Return what makes the blocks."""
        job, texts = self.job, self.conversations
        if job.data is None:
            return Writer(target, tokenizer, texts, job.writing, self.exclude, self.room)
        return Reader(target, tokenizer, texts, job.labels, job.training.draft_length)

    def path(self, block: int) -> Path:
        return self.folder / f"block-{block:06d}.safetensors"

    def files(self, block: int) -> list[Path]:
        """Return all files of a block."""
        return [self.path(block), *self.extras.files(self.path(block))]


@dataclass(frozen=True)
class CorpusSize:
    """Contents of a corpus: its first `blocks`, and the bytes of all files on the disk.

    blocks: without a gap, and only as many as the requested answer tokens need, so that the same
      request finds the same corpus even if more has been written
    read_tokens: tokens that are trained on, of prompts and of texts that are only read
    """

    blocks: int
    answer_tokens: int
    read_tokens: int
    texts: int
    bytes: int
    left_out: Mapping[str, int]


def write_corpus(
    job: CorpusJob,
    answer_tokens: int,
    max_bytes: int,
    workers: int,
    loaded: LoadedTarget | None = None,
    progress: Callable[[CorpusSize], None] = lambda _: None,
    least_blocks: int = 0,
    least_tokens: int = 0,
    stop: Callable[[], bool] = lambda: False,
    ranks: Ranks | None = None,
) -> CorpusSize:
    """Write blocks until the corpus holds `answer_tokens`, or takes `max_bytes` on the disk.

    It has at least `least_blocks`, unless they take more than `max_bytes`. Once it has those and
    `least_tokens`, it also ends if `stop()`.
    A single worker is this process, with its `loaded` target. With `ranks`, each rank is a worker,
    and rank 0 collects the corpus.
    Blocks that are already in the folder are kept. An exception (Ctrl-C is one) leaves only whole
    shards, which the next call adds to.
    """
    job.folder.mkdir(parents=True, exist_ok=True)
    remove_abandoned(job.folder.rglob(".*.block-*"))
    counted: dict[Path, ShardSummary] = {}

    def size() -> CorpusSize:
        return _measure(job, counted, answer_tokens, least_blocks)

    def enough(now: CorpusSize) -> bool:
        whole = now.answer_tokens >= answer_tokens and now.blocks >= least_blocks
        ended = now.blocks >= max(1, least_blocks) and now.answer_tokens >= least_tokens and stop()
        return whole or ended or now.bytes >= max_bytes

    now = size()
    progress(now)
    if ranks is not None and loaded is not None:
        blocks = BlockWriter(job, loaded)
        with _reported(progress, size):
            write_together(
                ranks, job.files, blocks.write, blocks.source.blocks, lambda: enough(size())
            )
        return size()
    if enough(now):
        return now
    if workers == 1 and loaded is not None:
        with _reported(progress, size):
            for _ in BlockWriter(job, loaded).every(0, 1):
                if enough(size()):
                    break
        return size()
    with _started(job, workers) as processes:
        while not enough(now) and any(process.exitcode != 0 for process in processes):
            time.sleep(_POLL)
            for process in processes:
                if process.exitcode not in (None, 0):
                    raise RedrafterError(
                        "a writing process ended early; its message is above, and the same "
                        "command resumes where it stopped"
                    )
            now = size()
            progress(now)
    return size()


def work(job: CorpusJob, worker: int, workers: int) -> None:
    """Write the blocks of one worker until they are all written or this process is ended."""
    wanted = job.job
    loaded = load_target(wanted.model, dtype=wanted.dtype, quantize=wanted.quantize, offline=True)
    for _ in BlockWriter(job, loaded).every(worker, workers):
        pass


class BlockWriter:
    """Writes blocks into the folder with a target in memory."""

    def __init__(self, job: CorpusJob, loaded: LoadedTarget) -> None:
        self._job, self._tokenizer = job, loaded.tokenizer
        self._target = Target(loaded.model).reading(job.extras.context)
        self.source = job.source(self._target, loaded.tokenizer)
        self._made = {
            "writing": json.dumps(asdict(job.job.writing)), "target": loaded.source.fingerprint
        }  # fmt: skip

    def write(self, block: int) -> None:
        """Write the missing files of a block."""
        job, source, path = self._job, self.source, self._job.path(block)
        new = source.has_new_prompts(block) and not source.held_out(block)
        written = None if path.exists() else source.write(block)
        texts = None if written is None else written.texts
        job.extras.add(self._target, self._tokenizer, path, block, texts, new_prompts=new)
        if written is not None:
            save_shard(written, path, {**self._made, "block": str(block)}, self._target.dtype)
        mx.clear_cache()

    def every(self, first: int, step: int) -> Iterator[int]:
        """Write every `step`th block in order, from `first` to the last, and yield its number."""
        block = first
        while self.source.blocks is None or block < self.source.blocks:
            self.write(block)
            yield block
            block += step


@contextmanager
def _reported(
    progress: Callable[[CorpusSize], None], size: Callable[[], CorpusSize]
) -> Iterator[None]:
    """Report the corpus's size from a thread, which needs no MLX, while the body writes."""
    done = threading.Event()

    def report() -> None:
        while not done.wait(_POLL):
            progress(size())

    reporter = threading.Thread(target=report, daemon=True)
    reporter.start()
    try:
        yield
    finally:
        done.set()
        reporter.join()
    progress(size())


@contextmanager
def _started(job: CorpusJob, workers: int) -> Iterator[list[BaseProcess]]:
    """Start worker processes, each with its share of the cores; terminate them on exit.

    Terminating them is safe at any moment, because shards are written atomically.
    """
    threads = str(max(1, (os.cpu_count() or 1) // workers))
    before = {name: os.environ.get(name) for name in THREAD_VARIABLES}
    os.environ.update({name: threads for name in THREAD_VARIABLES if workers > 1})
    processes: list[BaseProcess] = []
    try:
        for k in range(workers):
            processes.append(start_child(work, job, k, workers))
        yield processes
    finally:
        for started in processes:
            started.terminate()
        for started in processes:
            started.join()
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


def _measure(
    job: CorpusJob, counted: dict[Path, ShardSummary], wanted: int, least_blocks: int
) -> CorpusSize:
    """Measure the corpus on disk; `counted` caches the summaries of its shards."""

    def summary(path: Path) -> ShardSummary:
        if path not in counted:
            counted[path] = summarise_shard(path)
        return counted[path]

    blocks = tokens = read = texts = 0
    left_out: Counter[str] = Counter()
    while (tokens < wanted or blocks < least_blocks) and all(
        path.exists() for path in job.files(blocks)
    ):
        shard = summary(job.path(blocks))
        tokens, texts = tokens + shard.answer_tokens, texts + shard.texts
        left_out.update(shard.left_out)
        for texts_read in job.extras.read:
            read += summary(texts_read.path(job.path(blocks))).answer_tokens
        blocks += 1
    there = [int(path.stem.split("-")[1]) for path in job.folder.glob("block-*.safetensors")]
    files = [path for block in there for path in job.files(block)]
    on_disk = sum(path.stat().st_size for path in files if path.exists())
    return CorpusSize(blocks, tokens, read, texts, on_disk, left_out)
