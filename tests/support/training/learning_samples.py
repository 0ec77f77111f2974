"""Kept answers for tests, and what child processes do with them."""

from __future__ import annotations

import os
import random
import signal
from pathlib import Path

from chained_target import STEP, V, chained_model
from tiny import byte_tokenizer, tiny_source
from waiting import wait_for

from redrafter_mlx.distill.learn.run import LearnOptions, learn
from redrafter_mlx.learning.folder import LearningFolder
from redrafter_mlx.learning.kept_texts import KeptText, TextStore
from redrafter_mlx.loading.target import LoadedTarget
from redrafter_mlx.target_model.source import TargetSource


def some_text(number: int, length: int = 30) -> KeptText:
    """Return a text of random tokens, whose time is its number."""
    rng = random.Random(number)
    tokens = tuple(rng.randrange(50_000) for _ in range(length))
    return KeptText(tokens[: length // 3], tokens[length // 3 :], 0.5 * (number % 2), float(number))


def append_many(folder: Path, first: int, count: int) -> None:
    store = TextStore(folder)
    for i in range(count):
        store.append(some_text(first + i))


def write_and_be_killed(folder: Path, count: int) -> None:
    append_many(folder, 0, count)
    os.kill(os.getpid(), signal.SIGKILL)


def chained_target(source: TargetSource | None = None) -> LoadedTarget:
    """Return a target whose every token follows from the one before, without a chat template."""
    tokenizer = byte_tokenizer()
    tokenizer.has_chat_template = False
    return LoadedTarget.of(chained_model(), tokenizer, source or tiny_source())


def folder_of(loaded: LoadedTarget) -> LearningFolder:
    folder = LearningFolder.of(loaded.source.fingerprint)
    folder.create(loaded.source.name, loaded.source.fingerprint)
    return folder


def keep_chains(loaded: LoadedTarget, first: int = 0, count: int = V, *, general: int = 0) -> None:
    """Keep answers of `chained_target`: each token is the one that follows.

    general: number of general texts, which are chains too
    """
    folder = folder_of(loaded)
    for store, number, at in ((TextStore(folder.texts), count, first),
                              (TextStore(folder.general), general, 100)):  # fmt: skip
        for i in range(at, at + number):
            start = 5 * i % V
            answer = tuple((start + STEP * k) % V for k in range(1, V + 1))
            store.append(KeptText((i % V, i // V % V, start), answer, 0.0, float(i + 1)))


def learn_and_die(cache: str, stage: str) -> None:
    """Learn from chains in a cache, and be killed when a stage begins."""
    os.environ["REDRAFTER_CACHE"] = cache

    def report(name: str, *_: int) -> None:
        if name == stage:
            os.kill(os.getpid(), signal.SIGKILL)

    learn(chained_target(), LearnOptions(steps=40), report)


def learn_slowly(cache: str, begun: str, let_go: str) -> None:
    """Learn from chains in a cache; create a file in the middle, and wait for another."""
    os.environ["REDRAFTER_CACHE"] = cache

    def report(name: str, *_: int) -> None:
        if name == "training":
            Path(begun).touch()
            wait_for(Path(let_go).exists)

    learn(chained_target(), LearnOptions(steps=3), report)
