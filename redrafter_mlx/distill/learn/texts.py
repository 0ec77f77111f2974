"""The texts of a run: which are learned from and judged on, general ones, and their states."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from mlx_lm.tokenizer_utils import TokenizerWrapper

from redrafter_mlx.distill.corpus.extras import Extras
from redrafter_mlx.distill.corpus.filters import MIN_ANSWER, loop_start
from redrafter_mlx.distill.corpus.hidden_states import teacher_forced_states
from redrafter_mlx.distill.corpus.shards import BlockProgress, Shard, Text, save_shard
from redrafter_mlx.distill.corpus.writing.writer import Writer
from redrafter_mlx.distill.options import WritingOptions
from redrafter_mlx.learning.folder import LearningFolder
from redrafter_mlx.learning.kept_texts import KeptText, TextStore
from redrafter_mlx.loading.target import LoadedTarget
from redrafter_mlx.target_model.model import Target

_ONE_IN = 8  # one of the user's prompts in this many is for judging, never for training

_TEXTS, _TOKENS = 48, 96

_OPTIONS = WritingOptions(
    starter_share=1.0, batch=_TEXTS, openings=(0,), max_answer_tokens=_TOKENS, seed=67
)

_TOGETHER = 24
"""Texts of a shard. Within it, those that share a prefix, as turns do, are read after each other,
so that the prefix is read once."""


@dataclass(frozen=True)
class Split:
    """Texts by their use, the newest first."""

    training: list[KeptText]
    held_out: list[KeptText]

    @property
    def newest(self) -> float:
        """The time of the newest text, 0 without any."""
        return max((text.time for text in (*self.training, *self.held_out)), default=0.0)

    def __len__(self) -> int:
        return len(self.training) + len(self.held_out)


def split(texts: Iterable[KeptText], one_in: int = _ONE_IN) -> Split:
    """Divide texts by the digests of their prompts, each text once, cut where it begins to loop.

    A prompt is on the same side in every run, so that none is trained on and judged with later. Of
    a few texts, the prompt with the smallest digest is held out.
    """
    usable = dict.fromkeys(filter(None, map(_cut, texts)))
    newest_first = sorted(usable, key=lambda text: -text.time)
    digests = {text.prompt: _digest(text.prompt) for text in newest_first}
    smallest = min(digests.values(), default=0)
    sides: tuple[list[KeptText], list[KeptText]] = [], []
    for text in newest_first:
        digest = digests[text.prompt]
        sides[digest % one_in == 0 or digest == smallest].append(text)
    return Split(*sides)


def interleaved(first: Sequence[KeptText], second: Sequence[KeptText]) -> list[KeptText]:
    """Return all texts, each of both in its order, so that any beginning has its share of both."""
    placed = [
        ((at + 1) / len(texts), text) for texts in (first, second) for at, text in enumerate(texts)
    ]
    return [text for _, text in sorted(placed, key=lambda pair: pair[0])]


def up_to(texts: Sequence[KeptText], positions: int) -> list[KeptText]:
    """Return the first texts, of about so many answer tokens together; at least one if any."""
    found = list[KeptText]()
    for text in texts:
        if positions <= 0:
            break
        found.append(text)
        positions -= len(text.answer)
    return found


def _cut(text: KeptText) -> KeptText | None:
    end = loop_start(text.answer)
    answer = text.answer[:end]
    return replace(text, answer=answer) if len(answer) >= MIN_ANSWER else None


def _digest(prompt: Sequence[int]) -> int:
    return int.from_bytes(hashlib.sha256(np.array(prompt, np.int64).tobytes()).digest()[:8], "big")


@dataclass
class _Reported(BlockProgress):
    """Reports each step of writing."""

    report: Callable[[int, int], None] = lambda *_: None

    def count_prompts(self, tokens: int) -> None:
        super().count_prompts(tokens)
        self.report(0, _TEXTS * _TOKENS)

    def count_answers(self, tokens: int) -> None:
        super().count_answers(tokens)
        self.report(self.answer_tokens, _TEXTS * _TOKENS)


def general_texts(
    loaded: LoadedTarget, folder: LearningFolder, report: Callable[[int, int], None]
) -> list[KeptText]:
    """Return the general texts of a target, which are written and kept the first time.

    Without a chat template there are none: nothing says where a question would begin.

    report: is called while they are written, with tokens so far and at most
    """
    store = TextStore(folder.general)
    kept = [*store.texts()]
    if kept or not loaded.tokenizer.has_chat_template:
        return kept
    written = Writer(loaded.target, loaded.tokenizer, (), _OPTIONS).write(
        0, _Reported(report=report)
    )
    for text in written.texts:
        answer = tuple(text.answer.tolist())
        store.append(KeptText(tuple(text.prompt), answer, time=time.time()))
    return [*store.texts()]


def read(target: Target, texts: Sequence[KeptText]) -> Iterator[Text]:
    """Yield texts with the hidden states that chose their tokens, in the order of their prompts.

    Of a text that was drawn at random, the target's probabilities are the labels: the tokens that
    were drawn say less.
    """
    ordered = sorted(texts, key=lambda text: (text.prompt, text.answer))
    states = teacher_forced_states(target, (([*t.prompt, *t.answer], 1) for t in ordered))
    for text, own in zip(ordered, states, strict=True):
        first = len(text.prompt)
        yield Text.of(
            target,
            list(text.prompt),
            np.array(text.answer, np.int32),
            own[first - 1 :],
            hard_labels=text.temperature == 0,
            prompt_states=own[: first - 1],
        )


def write_shards(
    target: Target,
    tokenizer: TokenizerWrapper,
    texts: Sequence[KeptText],
    extras: Extras,
    folder: Path,
    stop: Callable[[int], bool],
) -> tuple[list[Path], int]:
    """Read texts and write them as a corpus, until `stop(answer tokens)` after a shard."""
    shards, positions = list[Path](), 0
    folder.mkdir(parents=True, exist_ok=True)
    for at in range(0, len(texts), _TOGETHER):
        some = [*read(target, texts[at : at + _TOGETHER])]
        for kind in (True, False):
            own = [text for text in some if text.hard_labels is kind]
            if own:
                path = folder / f"block-{len(shards):06d}.safetensors"
                save_shard(Shard(own, {}), path, {}, target.dtype)
                extras.add(target, tokenizer, path, len(shards), own)
                shards.append(path)
                positions += sum(len(text.answer) for text in own)
        if stop(positions):
            break
    return shards, positions
