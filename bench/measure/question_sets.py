"""Public sets of questions by name: MT-Bench and Spec-Bench are fetched on first use."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import NamedTuple

from redrafter_mlx.bench.measure.questions import Question, read_questions
from redrafter_mlx.distill.corpus.prompts.conversations import PREPARE
from redrafter_mlx.errors import BadInputError, DownloadError
from redrafter_mlx.runtime.files.atomic_write import atomic_write
from redrafter_mlx.runtime.files.paths import cache_dir

MT_BENCH = ("HuggingFaceH4/mt_bench_prompts", "raw/question.jsonl")
"""The data set on the Hub that has MT-Bench's 80 questions, and the file in it."""

SPEC_BENCH = (
    "https://raw.githubusercontent.com/hemingkx/Spec-Bench/"
    "66230f10cb0a02aced5ef3ce1e85163c16160454/data/spec_bench/question.jsonl",
    "4b6d33e79484f9841c487ee87d1cf6aa8c6066f61d5d482ff09e5a007fafdf04",
)
"""Spec-Bench's 480 questions (arXiv 2401.07851), and the file's SHA-256."""

_TIMEOUT = 10.0  # seconds


class QuestionSet(NamedTuple):
    """A public set of questions."""

    title: str  # as its authors write it
    fetch: Callable[[bool], Path]  # returns a file of them; `offline` keeps off the network


def questions_of(source: str, *, offline: bool = False) -> list[Question]:
    """Return the questions of a public set, or of a file, which has precedence.

    Raises BadInputError for a file without questions, and for SPEED-Bench; DownloadError for a set
    that cannot be fetched.
    """
    if Path(source).exists():
        return read_questions(source)
    if source not in QUESTION_SETS:
        raise BadInputError(
            f"--questions is {source}, which is no file here, nor one of {', '.join(QUESTION_SETS)}"
        )
    return read_questions(QUESTION_SETS[source].fetch(offline))


def title_of(source: str) -> str:
    """Return a set's title, or the name of a file as it is."""
    return QUESTION_SETS[source].title if source in QUESTION_SETS else source


def _mt_bench(offline: bool) -> Path:
    """Fetch from the Hub, or take the file from its cache.

    The first request is made once, without retries, so that an unreachable Hub shows in seconds.
    """
    from huggingface_hub import HfApi, hf_hub_download, try_to_load_from_cache

    repo, name = MT_BENCH
    cached = try_to_load_from_cache(repo, name, repo_type="dataset")
    if isinstance(cached, str):
        return Path(cached)
    if offline:
        raise _not_here(repo)
    try:
        HfApi().dataset_info(repo, timeout=5)
        return Path(hf_hub_download(repo, name, repo_type="dataset"))
    except Exception as error:  # the HTTP client's own classes differ between hub versions
        raise _unreachable(repo, error) from error


def _spec_bench(offline: bool) -> Path:
    from huggingface_hub import get_session

    url, sha256 = SPEC_BENCH
    path = cache_dir() / "questions" / "spec-bench.jsonl"
    if path.is_file() and hashlib.sha256(path.read_bytes()).hexdigest() == sha256:
        return path
    if offline:
        raise _not_here(url)
    try:
        answer = get_session().get(url, timeout=_TIMEOUT)
        answer.raise_for_status()
    except Exception as error:  # the HTTP client's own classes differ between hub versions
        raise _unreachable(url, error) from error
    if hashlib.sha256(answer.content).hexdigest() != sha256:
        raise DownloadError(f"{url} has the wrong SHA-256; {_REMEDY}")
    path.parent.mkdir(parents=True, exist_ok=True)
    with atomic_write(path) as partial:
        partial.write_bytes(answer.content)
    return path


def _speed_bench(_: bool) -> Path:
    raise BadInputError(
        "SPEED-Bench cannot be fetched by name: its published files have placeholders for texts "
        f"that others license; {PREPARE}"
    )


_REMEDY = "download its questions by hand and give them with --questions FILE"


def _not_here(what: str) -> DownloadError:
    return DownloadError(
        f"{what} is not on this machine, and --offline keeps off the network; {_REMEDY}"
    )


def _unreachable(what: str, error: Exception) -> DownloadError:
    reason = " ".join(str(error).split())
    return DownloadError(f"{what} cannot be fetched: {reason:.160}; {_REMEDY}")


QUESTION_SETS: Mapping[str, QuestionSet] = {
    "mt-bench": QuestionSet("MT-Bench", _mt_bench),
    "spec-bench": QuestionSet("Spec-Bench", _spec_bench),
    "speed-bench": QuestionSet("SPEED-Bench", _speed_bench),
}
