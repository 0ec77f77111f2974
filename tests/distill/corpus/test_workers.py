"""Worker processes that write a corpus."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from dataclasses import dataclass, replace
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest
from mlx_lm.tokenizer_utils import TokenizerWrapper
from train_runs import save_folder
from waiting import DEADLINE, wait_for

from redrafter_mlx.distill.corpus.folder import CorpusGoal, CorpusJob, CorpusSize
from redrafter_mlx.distill.corpus.prompts.conversations import Conversation
from redrafter_mlx.distill.corpus.reader import Reader
from redrafter_mlx.distill.corpus.writing import workers
from redrafter_mlx.distill.corpus.writing.workers import write_corpus
from redrafter_mlx.distill.corpus.writing.writer import Writer
from redrafter_mlx.distill.job import TrainingJob
from redrafter_mlx.distill.options import WritingOptions
from redrafter_mlx.errors import RedrafterError
from redrafter_mlx.loading.target import load_target
from redrafter_mlx.runtime.files.atomic_write import atomic_write, remove_abandoned
from redrafter_mlx.target_model.model import Target

PARENT = """
import sys
from pathlib import Path
from redrafter_mlx.distill.job import TrainingJob
from redrafter_mlx.distill.corpus.folder import CorpusGoal, CorpusJob
from redrafter_mlx.distill.corpus.writing.workers import write_corpus

class Job(CorpusJob):
    def __reduce__(self):
        return exec, (sys.argv[1],)

if __name__ == "__main__":
    job = Job(TrainingJob("tiny", Path("out")), (), Path("corpus"))
    write_corpus(job, CorpusGoal(answer_tokens=1, max_bytes=1_000_000), workers=2)
"""
"""Writes a corpus whose workers run the code of its argument instead."""

NOTE = "import os; from pathlib import Path; Path(f'{os.getpid()}.pid').touch()\n"
SLEEP = NOTE + "import time; time.sleep(3600)"
MLX = f"""
import mlx.core as mx
x = mx.ones((4000, 4000))
mx.eval(x @ x)
{NOTE}
while True: mx.eval(x @ x @ x)
"""

GOAL = CorpusGoal(answer_tokens=250, max_bytes=10**9)
"""Of the tiny model below, whose blocks hold at most 72 answer tokens."""


@pytest.fixture
def job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> CorpusJob:
    """A corpus of small blocks, to be written with a tiny model."""
    monkeypatch.setattr("redrafter_mlx.distill.corpus.writing.workers.POLL_SECONDS", 0.05)
    model = save_folder(tmp_path / "model")
    prompts = tuple(Conversation((f"Question {i}?",)) for i in range(24))
    writing = WritingOptions(own_share=0.0, batch=6, openings=(0,), max_answer_tokens=12)
    wanted = TrainingJob(str(model), tmp_path / "out", dtype="float32", writing=writing)
    return CorpusJob(wanted, prompts, tmp_path / "corpus")


def blocks(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def test_two_processes_write_the_blocks_of_one(job: CorpusJob) -> None:
    alone = replace(job, folder=job.folder.with_name("alone"))
    loaded = load_target(job.job.model, dtype="float32", offline=True)
    one, two = write_corpus(alone, GOAL, 1, loaded), write_corpus(job, GOAL, 2)
    assert (one.blocks, one.answer_tokens) == (two.blocks, two.answer_tokens)
    assert len(blocks(alone.folder)) == one.blocks >= 4
    for path in sorted(alone.folder.iterdir()):
        want, made_by = mx.load(str(path), return_metadata=True)
        got, also_made_by = mx.load(str(job.folder / path.name), return_metadata=True)
        # A process with fewer threads rounds the products of states differently.
        sums, also = json.loads(made_by.pop("sha256")), json.loads(also_made_by.pop("sha256"))
        assert made_by == also_made_by
        assert {**sums, "states": 0} == {**also, "states": 0}
        assert want.keys() == got.keys()
        np.testing.assert_allclose(got.pop("states"), want.pop("states"), rtol=1e-4, atol=1e-5)
        assert all(mx.array_equal(got[name], tensor) for name, tensor in want.items())


def test_a_workers_error_is_one_line_and_whole_blocks_are_kept(
    job: CorpusJob, capfd: pytest.CaptureFixture[str]
) -> None:
    loaded = load_target(job.job.model, dtype="float32", offline=True)
    write_corpus(job, replace(GOAL, answer_tokens=1), 1, loaded)
    kept = blocks(job.folder)
    assert "block-000000.safetensors" in kept
    goal, weights = replace(GOAL, answer_tokens=400), Path(job.job.model) / "model.safetensors"
    whole = weights.read_bytes()
    weights.write_bytes(b"damaged")
    capfd.readouterr()
    with pytest.raises(RedrafterError, match=r"model\.safetensors.*; the same command resumes"):
        write_corpus(job, goal, 2)
    assert capfd.readouterr().err == ""
    assert blocks(job.folder) == kept
    weights.write_bytes(whole)
    assert write_corpus(job, goal, 2).answer_tokens >= 400


@pytest.mark.parametrize("workers_", [1, 2])
def test_progress_moves_within_a_block(
    workers_: int, job: CorpusJob, monkeypatch: pytest.MonkeyPatch
) -> None:
    slow = _SlowJob(**vars(job))
    seen: list[CorpusSize] = []
    loaded = load_target(job.job.model, dtype="float32", offline=True) if workers_ == 1 else None
    monkeypatch.setattr(workers, "POLL_SECONDS", 0.01)
    write_corpus(slow, replace(GOAL, answer_tokens=1), workers_, loaded, seen.append)
    first = [sum(b.answer_tokens for b in size.started) for size in seen if size.blocks == 0]
    assert len({*first}) > 2


@dataclass(frozen=True)
class _SlowJob(CorpusJob):
    """A job whose target takes a while for each token, in every process."""

    def source(self, target: Target, tokenizer: TokenizerWrapper) -> Writer | Reader:
        logits = target.logits

        def slowly(hidden: mx.array) -> mx.array:
            time.sleep(0.05)
            return logits(hidden)

        target.logits = slowly  # type: ignore[method-assign]
        workers.POLL_SECONDS = 0.01
        return super().source(target, tokenizer)


def is_running(process: int) -> bool:
    """Whether the process exists and is not just a zombie."""
    line = ["ps", "-o", "stat=", "-p", str(process)]
    state = subprocess.run(line, capture_output=True, text=True, check=False).stdout.strip()
    return bool(state) and not state.startswith("Z")


@pytest.mark.parametrize(
    ("number", "busy_with"),
    [(signal.SIGTERM, SLEEP), (signal.SIGTERM, MLX), (signal.SIGKILL, MLX)],
    ids=["SIGTERM, sleep", "SIGTERM, MLX", "SIGKILL, MLX"],
)
def test_workers_end_with_their_parent(
    number: signal.Signals, busy_with: str, tmp_path: Path
) -> None:
    (tmp_path / "parent.py").write_text(PARENT)
    parent = subprocess.Popen([sys.executable, "parent.py", busy_with], cwd=tmp_path)
    wait_for(lambda: parent.poll() is not None or len(list(tmp_path.glob("*.pid"))) == 2)
    assert parent.poll() is None
    workers = [int(path.stem) for path in tmp_path.glob("*.pid")]
    assert all(map(is_running, workers))
    parent.send_signal(number)
    parent.wait(DEADLINE)
    wait_for(lambda: not any(map(is_running, workers)))


def test_a_restart_removes_what_ended_processes_left_and_nothing_else(tmp_path: Path) -> None:
    """Another run of the same corpus, with another output, may be active."""
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait()
    abandoned, unrelated = tmp_path / f".{ended.pid}-1.block-1", tmp_path / ".block-1"
    abandoned.touch()
    unrelated.touch()
    with atomic_write(tmp_path / "block-2") as partial:
        partial.write_text("half")
        remove_abandoned(tmp_path.glob(".*"))
        assert not abandoned.exists()
        assert unrelated.exists()
    assert (tmp_path / "block-2").read_text() == "half"


@dataclass(frozen=True)
class _UnsendableJob(CorpusJob):
    """A job that cannot be pickled, so that no process can be started with it."""

    def __reduce__(self) -> str:
        raise OSError("no more processes")


def test_a_process_that_does_not_start_reports_why(tmp_path: Path) -> None:
    job = _UnsendableJob(TrainingJob("tiny", tmp_path), (), tmp_path / "corpus")
    with pytest.raises(OSError, match="no more processes"):
        write_corpus(job, CorpusGoal(answer_tokens=1, max_bytes=1_000_000), workers=2)


def test_an_error_of_the_report_is_raised_after_the_writing(
    job: CorpusJob, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It must not end as a traceback in a thread, nor end the writing, of which all is kept."""
    calls = []

    def report(size: CorpusSize) -> None:
        calls.append(size)
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(workers, "POLL_SECONDS", 0.001)
    with pytest.raises(OSError, match="No space left"):
        write_corpus(job, GOAL, workers=1, progress=report)
    assert len(calls) == 1
    monkeypatch.undo()
    assert write_corpus(job, GOAL, workers=1).answer_tokens >= 250
