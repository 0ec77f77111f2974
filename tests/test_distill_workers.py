"""Worker processes that write a corpus."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import pytest

from redrafter_mlx.distill.corpus.folder import CorpusGoal, CorpusJob
from redrafter_mlx.distill.corpus.workers import write_corpus
from redrafter_mlx.distill.job import TrainingJob
from redrafter_mlx.runtime.atomic_write import atomic_write, remove_abandoned

PARENT = """
import sys
from pathlib import Path
from redrafter_mlx.distill.job import TrainingJob
from redrafter_mlx.distill.corpus.folder import CorpusGoal, CorpusJob
from redrafter_mlx.distill.corpus.workers import write_corpus

class Job(CorpusJob):
    def __reduce__(self):
        return exec, (sys.argv[1],)

if __name__ == "__main__":
    job = Job(TrainingJob("tiny", Path("out")), (), Path("corpus"))
    write_corpus(job, CorpusGoal(answer_tokens=1, max_bytes=1_000_000), workers=2)
"""
"""Writes a corpus whose workers run the code of its argument instead."""

SLEEP = "import time; time.sleep(60)"
MLX = "import mlx.core as mx; x = mx.ones((4000, 4000))\nwhile True: mx.eval(x @ x @ x)"


def is_running(process: int) -> bool:
    """Whether the process exists and is not just a zombie."""
    line = ["ps", "-o", "stat=", "-p", str(process)]
    state = subprocess.run(line, capture_output=True, text=True, check=False).stdout.strip()
    return bool(state) and not state.startswith("Z")


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
@pytest.mark.parametrize("busy_with", [SLEEP, MLX], ids=["sleep", "MLX"])
def test_workers_end_within_a_second_of_their_parent(
    number: signal.Signals, busy_with: str, tmp_path: Path
) -> None:
    (tmp_path / "parent.py").write_text(PARENT)
    noted = "import os; from pathlib import Path; Path(f'{os.getpid()}.pid').touch()\n"
    parent = subprocess.Popen([sys.executable, "parent.py", noted + busy_with], cwd=tmp_path)
    begun = time.monotonic()
    while len(workers := [int(path.stem) for path in tmp_path.glob("*.pid")]) < 2:
        assert time.monotonic() < begun + 60
        assert parent.poll() is None
        time.sleep(0.1)
    time.sleep(1)
    assert all(map(is_running, workers))
    parent.send_signal(number)
    parent.wait()
    ended = time.monotonic()
    while any(map(is_running, workers)):
        assert time.monotonic() < ended + 2, "a second, and another if the machine is busy"
        time.sleep(0.05)


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
