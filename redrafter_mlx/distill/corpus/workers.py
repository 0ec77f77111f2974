"""Writing a corpus into a folder, block after block, by one process or several.

MLX computes element-wise operations on one core, and only matrix products on all. So on a CPU
several processes with one core each write more than one process with all cores.
"""

from __future__ import annotations

import json
import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from multiprocessing.process import BaseProcess

import mlx.core as mx

from redrafter_mlx.distill.corpus.folder import CorpusGauge, CorpusGoal, CorpusJob, CorpusSize
from redrafter_mlx.distill.corpus.gathering import write_together
from redrafter_mlx.distill.corpus.shards import save_shard
from redrafter_mlx.distributed.group import Ranks
from redrafter_mlx.errors import RedrafterError
from redrafter_mlx.loading.target import LoadedTarget, load_target
from redrafter_mlx.runtime.atomic_write import remove_abandoned
from redrafter_mlx.runtime.blas import THREAD_VARIABLES
from redrafter_mlx.runtime.child_process import start_child
from redrafter_mlx.target.model import Target

_POLL = 1.0
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

    Args:
      workers: processes that write; a single one is this process, with its `loaded` target
      ranks: each rank is a worker, and rank 0 collects the corpus; None writes it on this one
    """
    job.folder.mkdir(parents=True, exist_ok=True)
    remove_abandoned(job.folder.rglob(".*.block-*"))
    gauge = CorpusGauge(job, goal)
    now = gauge.size()
    progress(now)
    if ranks is not None and loaded is not None:
        blocks = BlockWriter(job, loaded)
        with _reported(progress, gauge):
            write_together(ranks, job.files, blocks.write, blocks.source.blocks, gauge.enough)
    elif goal.reached(now):
        return now
    elif workers == 1 and loaded is not None:
        with _reported(progress, gauge):
            for _ in BlockWriter(job, loaded).every(0, 1):
                if gauge.enough():
                    break
    else:
        _write_in_processes(job, goal, workers, gauge, progress)
    return gauge.size()


def _write_in_processes(
    job: CorpusJob,
    goal: CorpusGoal,
    workers: int,
    gauge: CorpusGauge,
    progress: Callable[[CorpusSize], None],
) -> None:
    """Let worker processes write until there is enough, or all of them have ended.

    Raises RedrafterError if one of them fails.
    """
    with _started(job, workers) as processes:
        now = gauge.size()
        while not goal.reached(now) and any(process.exitcode != 0 for process in processes):
            time.sleep(_POLL)
            if any(process.exitcode not in (None, 0) for process in processes):
                raise RedrafterError(
                    "a writing process ended early; its message is above, and the same "
                    "command resumes where it stopped"
                )
            now = gauge.size()
            progress(now)


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
def _reported(progress: Callable[[CorpusSize], None], gauge: CorpusGauge) -> Iterator[None]:
    """Report the corpus's size from a thread, which needs no MLX, while the body writes."""
    done = threading.Event()

    def report() -> None:
        while not done.wait(_POLL):
            progress(gauge.size())

    reporter = threading.Thread(target=report, daemon=True)
    reporter.start()
    try:
        yield
    finally:
        done.set()
        reporter.join()
    progress(gauge.size())


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
