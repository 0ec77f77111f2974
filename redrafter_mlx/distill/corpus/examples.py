"""Training batches from a corpus, in an order that depends only on a seed."""

from __future__ import annotations

import random
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import mlx.core as mx
import numpy as np

from redrafter_mlx.distill.checked_arrays import load_arrays
from redrafter_mlx.distill.corpus.extras import Extras
from redrafter_mlx.distill.corpus.shards import (
    FORMAT,
    Text,
    naming_damage,
    outline_shard,
    summarise_shard,
)
from redrafter_mlx.distill.options import TrainOptions
from redrafter_mlx.errors import BadInputError

_HELD_OUT_POSITIONS = 6_000
"""About this many are evaluated during training; more would only take longer."""


class Batch(NamedTuple):
    """P positions of texts, laid end to end.

    Shapes:
      states: [P + T, C], the target's hidden states that chose the roots; the T states after the
              last position are used only for their probabilities
      roots:  [P] int32, the token after which drafts start
      labels: [P, T] int32, the target's tokens after the root
      valid:  [P, T] bool, False after the end of a text
      hard:   [P] bool, False where the labels are not the target's tokens
    """

    states: mx.array
    roots: mx.array
    labels: mx.array
    valid: mx.array
    hard: mx.array


@dataclass(frozen=True)
class Positions:
    """Texts laid end to end; a position is one answer token, after which drafts start.

    Shapes: as in `Batch`, for all M positions; root_at [M] int32, the root's index in its text
    """

    states: np.ndarray
    roots: np.ndarray
    labels: np.ndarray
    valid: np.ndarray
    hard: np.ndarray
    root_at: np.ndarray

    def __len__(self) -> int:
        return len(self.roots)

    def batch(self, start: int, size: int) -> Batch:
        """Return `size` positions from `start` on; positions after the last one are invalid."""
        T = self.labels.shape[1]
        rows = np.minimum(np.arange(start, start + size + T), len(self) - 1)
        inside = np.arange(start, start + size) < len(self)
        at = rows[:size]
        return Batch(
            mx.array(self.states[rows]),
            mx.array(self.roots[at]),
            mx.array(self.labels[at]),
            mx.array(self.valid[at] & inside[:, None]),
            mx.array(self.hard[at]),
        )


def lay_out(texts: Sequence[Text], length: int) -> Positions:
    """Return the roots of texts, in the given order, and the `length` labels after each root.

    The text  I am fine <end>  with length 2 gives:

        root   labels
        I      am    fine
        am     fine  <end>
        fine   <end> -
        <end>  -     -
    """
    drafts, valid = [], []  # the root and its labels; whether a label is within the text
    for text in texts:
        A = len(text.answer)
        ahead = np.arange(A)[:, None] + np.arange(length + 1)
        if text.labels is None:
            drafts.append(text.answer[np.minimum(ahead, A - 1)])
        else:
            drafts.append(text.labels[:, : length + 1])
        valid.append((ahead[:, 1:] < A) | (text.labels is not None))
    tokens = np.concatenate(drafts).astype(np.int32)
    return Positions(
        _states(texts),
        tokens[:, 0],
        tokens[:, 1:],
        np.concatenate(valid),
        np.repeat([text.hard_labels for text in texts], [len(text.answer) for text in texts]),
        np.concatenate([len(t.prompt) + np.arange(len(t.answer)) for t in texts]).astype(np.int32),
    )


def _states(texts: Sequence[Text]) -> np.ndarray:
    """Return [M, C], the states of texts; copied text by text, as they take most of the memory."""
    wide = sum(part.shape[1] for part in texts[0].parts)
    whole = np.empty((sum(len(text.states) for text in texts), wide), texts[0].states.dtype)
    at = 0
    for text in texts:
        end = at + len(text.states)
        np.concatenate(text.parts, axis=1, out=whole[at:end])
        at = end
    return whole


@dataclass(frozen=True)
class Examples:
    """The shards that are trained on, read a few at a time."""

    shards: tuple[Path, ...]
    extras: Extras  # data that is loaded with the shards
    options: TrainOptions  # seed, positions in a batch, and labels after each root
    memory: int  # bytes of states held at once: texts as read, and their copy laid end to end

    def epoch(self, number: int, skip: int = 0) -> Iterator[Batch]:
        """Yield the batches of one pass, in another order each time, without the first `skip`.

        Positions that fill no batch are in the first one of the next texts; at the pass's end they
        are left out.
        """
        at, size = 0, self.options.batch
        left, first = list[Text](), 0  # texts with positions left, and where these begin
        for texts in self.texts(number):
            texts[:0] = left
            laid = lay_out(texts, self.options.draft_length)
            starts = range(first, len(laid) - size + 1, size)
            left, first = _from(texts, first + size * len(starts))
            texts.clear()
            for start in starts:
                at += 1
                if at > skip:
                    yield laid.batch(start, size)
            del laid

    @property
    def positions(self) -> int:
        return sum(summarise_shard(path).answer_tokens for path in self.shards)

    def lengths(self, epoch: int) -> Iterator[list[tuple[int, int]]]:
        """Yield the lengths of prompt and answer of the texts that are in memory together."""
        for paths in self._groups(epoch):
            outlines = [text for path in paths for text in outline_shard(path)]
            yield [(len(prompt) // np.dtype(np.int32).itemsize, n) for prompt, n in outlines]

    def texts(self, number: int) -> Iterator[list[Text]]:
        """Yield the texts of one pass in its order, as many together as memory allows."""
        for group, paths in enumerate(self._groups(number)):
            texts = [text for path in paths for text in self.extras.load(path)]
            random.Random(f"{self.options.seed} {number} {group}").shuffle(texts)
            if texts:
                yield texts

    def _groups(self, number: int) -> list[list[Path]]:
        """Return the shards in this pass's order, grouped as far as memory allows."""
        order = list(self.shards)
        random.Random(f"{self.options.seed} {number}").shuffle(order)
        groups: list[list[Path]] = [[]]
        room = share = self.memory // 2  # the other half is for the copy laid end to end
        for path in order:
            size = sum(file.stat().st_size for file in (path, *self.extras.files(path)))
            if groups[-1] and size > room:
                groups.append([])
                room = share
            groups[-1].append(path)
            room -= size
        return groups


def _from(texts: Sequence[Text], position: int) -> tuple[list[Text], int]:
    """Return copies of the texts from this position on, and its place in the first of them."""
    for i, text in enumerate(texts):
        if position < len(text.answer):
            return [text.copied() for text in texts[i:]], position
        position -= len(text.answer)
    return [], 0


def held_out_blocks(shards: Sequence[Path], held_out: Callable[[int], bool]) -> set[int]:
    """Return the blocks to hold out, of those with texts; `shards` are of the blocks 0, 1, ...

    held_out: whether the block of this number is to be. If all these are empty, the first block
      with texts is
    """
    filled = [block for block, shard in enumerate(shards) if summarise_shard(shard).texts]
    return {block for block in filled if held_out(block)} or set(filled[:1])


def hold_out(
    shards: Sequence[Path], held_out: Callable[[int], bool], extras: Extras
) -> tuple[list[Path], list[Text]]:
    """Return the shards to train on, and a sample of the texts in the held-out ones.

    The target may write a prompt again in another block. A held-out text whose prompt is trained on
    is not in the sample, unless all are. Raises BadInputError if either would be empty.
    """
    apart = held_out_blocks(shards, held_out)
    kept = [shards[block] for block in sorted(apart)]
    trained_on = [
        shard
        for block, shard in enumerate(shards)
        if block not in apart and summarise_shard(shard).texts
    ]
    asked = {prompt for shard in trained_on for prompt, _ in outline_shard(shard)}
    texts = sample_texts(kept, _HELD_OUT_POSITIONS, extras, asked)
    texts = texts or sample_texts(kept, _HELD_OUT_POSITIONS, extras)
    if not trained_on or not texts:
        raise BadInputError("the corpus is too small to hold anything out; write more of it")
    return trained_on, texts


def sample_texts(
    shards: Sequence[Path], positions: int, extras: Extras, without: Collection[bytes] = ()
) -> list[Text]:
    """Draw texts of about `positions` answer tokens from all shards, the same ones each time.

    without: prompts, as of `outline_shard`, whose texts are not drawn
    """
    found = [
        (shard, i, n)
        for shard in shards
        for i, (prompt, n) in enumerate(outline_shard(shard))
        if prompt not in without
    ]
    order, room = [], positions
    for n in np.random.default_rng(0).permutation(len(found)):
        if room > 0:
            order.append(found[n][:2])
            room -= found[n][2]
    # One shard at a time is in memory, and of it only what is drawn stays.
    texts: dict[tuple[Path, int], Text] = {}
    for shard in dict.fromkeys(shard for shard, _ in order):
        loaded = extras.load(shard)
        texts |= {key: loaded[key[1]].copied() for key in order if key[0] == shard}
    return [texts[key] for key in order]


def count_tokens(shards: Sequence[Path], vocab_size: int) -> np.ndarray:
    """Return [V] int64: how often each token is a label."""
    counts = np.zeros(vocab_size, np.int64)
    for path in shards:
        with naming_damage(path):
            arrays, _ = load_arrays(path, FORMAT, ("labels", "answers"))
            tokens = np.array(arrays["labels" if "labels" in arrays else "answers"])
        counts += np.bincount(tokens.reshape(-1), minlength=vocab_size)
    return counts
