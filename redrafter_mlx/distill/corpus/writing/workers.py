"""Writing a corpus into a folder, block after block, by one process, several, or several ranks.

MLX computes element-wise operations on one core, and only matrix products on all. So on a CPU
several processes with one core each write more than one process with all cores.

A block depends only on its number, so ranks write the corpus that a single process writes. Rank 0
collects their blocks in its folder. Blocks that it has already, from an earlier run or because the
folder is shared, are neither written nor sent.
"""

from __future__ import annotations

import itertools
import json
import os
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, replace
from pathlib import Path

import mlx.core as mx

from redrafter_mlx.cpu.blas import THREAD_VARIABLES
from redrafter_mlx.distill.corpus.folder import CorpusGauge, CorpusGoal, CorpusJob, CorpusSize
from redrafter_mlx.distill.corpus.shards import BlockProgress, save_shard
from redrafter_mlx.distributed.group import Ranks
from redrafter_mlx.errors import RedrafterError
from redrafter_mlx.loading.target import LoadedTarget, load_target
from redrafter_mlx.runtime.files.atomic_write import atomic_write, remove_abandoned
from redrafter_mlx.runtime.processes.child_process import Child, Send, start_child
from redrafter_mlx.runtime.processes.environment import environment

POLL_SECONDS = 1.0
"""Seconds between checks of the folder."""


def write_corpus(
    job: CorpusJob,
    goal: CorpusGoal,
    workers: int,
    loaded: LoadedTarget | None = None,
    progress: Callable[[CorpusSize], None] = lambda _: None,
    ranks: Ranks | None = None,
) -> CorpusSize:
    """Write blocks until the corpus reaches its goal, or there are no more.

    Blocks that are already in the folder are kept. An exception (Ctrl-C is one) leaves only whole
    shards, which the next call adds to.

    workers: processes that write; a single one is this process, with its `loaded` target
    ranks:   each rank is a worker, and rank 0 collects the corpus; None writes it on this one
    """
    job.folder.mkdir(parents=True, exist_ok=True)
    remove_abandoned(job.folder.rglob(".*.block-*"))
    gauge = CorpusGauge(job, goal)
    progress(gauge.size())
    if ranks is None and gauge.enough():
        return gauge.size()
    if loaded is None or (ranks is None and workers > 1):
        _write_in_processes(job, workers, gauge, progress)
        return gauge.size()
    writer = BlockWriter(job, loaded)
    with _reported(lambda: progress(replace(gauge.size(), started=(writer.started.copy(),)))):
        if ranks is None:
            writer.write_every(0, 1, gauge.enough)
        else:
            _write_together(ranks, job, writer, gauge)
    progress(gauge.size())
    return gauge.size()


def _write_in_processes(
    job: CorpusJob, workers: int, gauge: CorpusGauge, progress: Callable[[CorpusSize], None]
) -> None:
    """Let worker processes write until there is enough or one fails (RedrafterError)."""
    started = [BlockProgress() for _ in range(workers)]
    with _started(job, workers) as children:
        while not gauge.enough() and any(child.process.exitcode != 0 for child in children):
            time.sleep(POLL_SECONDS)
            for worker, child in enumerate(children):
                try:
                    for sent in child.check():
                        started[worker] = sent
                except RedrafterError as error:
                    raise RedrafterError(
                        f"the corpus is not written to its end: {error}; the same command resumes "
                        f"where it stopped"
                    ) from None
            progress(replace(gauge.size(), started=tuple(started)))
    progress(gauge.size())


def work(send: Send, job: CorpusJob, worker: int, workers: int) -> None:
    """Write the blocks of one worker until they are all written or this process is ended."""
    wanted = job.job
    loaded = load_target(wanted.model, dtype=wanted.dtype, quantize=wanted.quantize, offline=True)
    writer = BlockWriter(job, loaded)
    with _reported(lambda: send(writer.started.copy())):
        writer.write_every(worker, workers, lambda: False)


class BlockWriter:
    """Writes blocks into the folder with a target in memory.

    started: the block that is being written
    """

    def __init__(self, job: CorpusJob, loaded: LoadedTarget) -> None:
        self._job, self._tokenizer = job, loaded.tokenizer
        self._target = loaded.target.reading(job.extras.context)
        self.source, self.started = job.source(self._target, loaded.tokenizer), BlockProgress()
        self._made = {
            "writing": json.dumps(asdict(job.job.writing)), "target": loaded.source.fingerprint,
            "model": loaded.source.name,
        }  # fmt: skip

    def write(self, block: int) -> None:
        """Write the missing files of a block."""
        job, source, path = self._job, self.source, self._job.path(block)
        new = source.has_new_prompts(block) and not source.held_out(block)
        written = None if path.exists() else source.write(block, self.started)
        texts = None if written is None else written.texts
        if written is not None:  # first, so that extras are always those of the texts on disk
            save_shard(written, path, {**self._made, "block": str(block)}, self._target.dtype)
            self.started = BlockProgress()
        job.extras.add(self._target, self._tokenizer, path, block, texts, new_prompts=new)
        mx.clear_cache()

    def write_every(self, first: int, step: int, enough: Callable[[], bool]) -> None:
        """Write every `step`th block from `first` on, until there are `enough` or no more."""
        last = self.source.blocks
        blocks: Iterable[int] = itertools.count(first, step)
        for block in blocks if last is None else range(first, last, step):
            self.write(block)
            if enough():
                break


def _write_together(ranks: Ranks, job: CorpusJob, writer: BlockWriter, gauge: CorpusGauge) -> None:
    """Write a block on each rank, round after round; rank 0 collects them and says when to end."""
    last = writer.source.blocks
    for first in itertools.count(0, ranks.size):
        if _from_rank_0(ranks, [gauge.enough() or (last is not None and first >= last)])[0]:
            return
        blocks = range(first, first + ranks.size)
        missing = [
            (last is None or block < last) and not all(path.exists() for path in job.files(block))
            for block in blocks
        ]
        wanted = _from_rank_0(ranks, missing)
        if wanted[ranks.rank]:
            writer.write(blocks[ranks.rank])
        for rank in range(1, ranks.size):
            if wanted[rank]:
                _collect(ranks, rank, job.files(blocks[rank]))


def _from_rank_0(ranks: Ranks, mine: Sequence[bool]) -> list[bool]:
    return [*map(bool, ranks.broadcast_bytes(bytes(mine) if ranks.leads else b""))]


def _collect(ranks: Ranks, writer: int, files: Sequence[Path]) -> None:
    """Copy one block's files from the rank that wrote them to rank 0."""
    for path in files:
        mine = path.read_bytes() if ranks.rank == writer else b""
        received = ranks.broadcast_bytes(mine)
        if ranks.leads and not path.exists():
            path.parent.mkdir(parents=True, exist_ok=True)
            with atomic_write(path) as partial:
                partial.write_bytes(received)


@contextmanager
def _reported(report: Callable[[], None]) -> Iterator[None]:
    """Call `report` now and then from a thread; its error is raised after the body."""
    done, errors = threading.Event(), list[Exception]()

    def repeat() -> None:
        try:
            while not done.wait(POLL_SECONDS):
                report()
        except Exception as error:
            errors.append(error)

    reporter = threading.Thread(target=repeat, daemon=True)
    reporter.start()
    try:
        yield
    finally:
        done.set()
        reporter.join()
    for error in errors:
        raise error


@contextmanager
def _started(job: CorpusJob, workers: int) -> Iterator[list[Child]]:
    """Start worker processes, each with its share of the cores; on exit end them, which is safe."""
    threads = str(max(1, (os.cpu_count() or 1) // workers))
    children: list[Child] = []
    with environment({name: threads for name in THREAD_VARIABLES if workers > 1}):
        try:
            for k in range(workers):
                children.append(start_child(work, job, k, workers))
            yield children
        finally:
            for child in children:
                child.process.terminate()
            for child in children:
                child.process.join()
