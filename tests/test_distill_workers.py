"""Processes that write a corpus."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import pytest

from redrafter_mlx.distill.blocks import WritingOptions
from redrafter_mlx.distill.workers import CorpusJob, write_corpus


@dataclass(frozen=True)
class _UnsendableJob(CorpusJob):
    """What no process can be started with."""

    def __reduce__(self) -> str:
        raise OSError("no more processes")


def test_a_process_that_does_not_start_says_why(tmp_path: Path) -> None:
    job = _UnsendableJob("tiny", "float32", None, (), WritingOptions(), tmp_path / "corpus")
    with pytest.raises(OSError, match="no more processes"):
        write_corpus(job, answer_tokens=1, max_bytes=1_000_000, workers=2)
