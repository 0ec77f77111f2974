"""Processes that write a corpus."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from redrafter_mlx.distill.blocks import WritingOptions
from redrafter_mlx.distill.given import Given, corpus_key
from redrafter_mlx.distill.reserved import NOTHING
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


def test_a_corpus_without_beginnings_keeps_the_name_that_it_had_before_there_were_any() -> None:
    """So that texts which were written then are found; another temperature changes none of them."""
    given = Given((), None, NOTHING, 0)
    plain = WritingOptions(begun_share=0.0)

    def name(writing: WritingOptions) -> str:
        return corpus_key("sha256:0", "float32", writing, given, None)

    assert name(plain) == name(replace(plain, begun_temperature=0.5)) == "33dd7921f254fd65"
    assert name(plain) != name(WritingOptions()) != name(WritingOptions(begun_temperature=0.5))
