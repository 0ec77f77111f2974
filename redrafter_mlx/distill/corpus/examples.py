"""Batches from a corpus, in an order that depends on a seed alone."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import mlx.core as mx
import numpy as np

from redrafter_mlx.distill.corpus.extras import Extras
from redrafter_mlx.distill.corpus.shards import Text, load_shard
from redrafter_mlx.distill.training.loss import Batch
from redrafter_mlx.errors import BadInputError


@dataclass(frozen=True)
class Places:
    """Texts laid end to end; a place is one answer token behind which is drafted.

    Shapes:
      states: [M, C], roots: [M] int32, labels: [M, T] int32, valid: [M, T] bool
      own:    [M] bool, whether the labels are what the target says; see Text
      text:   [M] int32, which text a place is in
      root_at: [M] int32, where its root stands in that text, prompt included
    """

    states: np.ndarray
    roots: np.ndarray
    labels: np.ndarray
    valid: np.ndarray
    own: np.ndarray
    text: np.ndarray
    root_at: np.ndarray

    def __len__(self) -> int:
        return len(self.roots)

    def batch(self, start: int, size: int) -> Batch:
        """The places from `start` on; behind the last place, invalid ones."""
        T = self.labels.shape[1]
        rows = np.minimum(np.arange(start, start + size + T), len(self) - 1)
        inside = np.arange(start, start + size) < len(self)
        at = rows[:size]
        return Batch(
            mx.array(self.states[rows]),
            mx.array(self.roots[at]),
            mx.array(self.labels[at]),
            mx.array(self.valid[at] & inside[:, None]),
            mx.array(self.own[at]),
        )


def places(texts: Sequence[Text], length: int) -> Places:
    """Roots and the `length` labels behind each, of texts in the given order.

    Of the text  I am fine <end>  with length 2:

        root   labels
        I      am    fine
        am     fine  <end>
        fine   <end> -
        <end>  -     -
    """
    roots, labels, valid = [], [], []
    for text in texts:
        if text.labels is not None:
            roots.append(text.labels[:, 0])
            labels.append(text.labels[:, 1 : length + 1])
            valid.append(np.ones((len(text.labels), length), bool))
            continue
        A = len(text.answer)
        ahead = np.arange(A)[:, None] + np.arange(1, length + 1)[None]
        roots.append(text.answer)
        labels.append(text.answer[np.minimum(ahead, A - 1)])
        valid.append(ahead < A)
    answers = [len(text.answer) for text in texts]
    return Places(
        _states(texts),
        np.concatenate(roots),
        np.concatenate(labels).astype(np.int32),
        np.concatenate(valid),
        np.repeat([text.own for text in texts], answers),
        np.repeat(np.arange(len(texts), dtype=np.int32), answers),
        np.concatenate([len(t.prompt) + np.arange(len(t.answer)) for t in texts]).astype(np.int32),
    )


def _states(texts: Sequence[Text]) -> np.ndarray:
    """[M, C]: what context layers read, where the texts have it, and the last hidden state.

    Laid into place text by text: these are nearly all that is in memory.
    """
    wide = sum(part.shape[1] for part in _parts(texts[0]))
    whole = np.empty((sum(len(text.states) for text in texts), wide), texts[0].states.dtype)
    at = 0
    for text in texts:
        end = at + len(text.states)
        np.concatenate(_parts(text), axis=1, out=whole[at:end])
        at = end
    return whole


def _parts(text: Text) -> list[np.ndarray]:
    return [text.states] if text.contexts is None else [text.contexts, text.states]


@dataclass(frozen=True)
class Examples:
    """The shards that are learnt from, read a few at a time.

    extras: what is read with them
    length: T, labels behind each root
    size:   P, places in a batch
    memory: bytes of hidden states held at once: as they are read, and laid end to end
    """

    shards: tuple[Path, ...]
    extras: Extras
    length: int
    size: int
    memory: int
    seed: int

    def epoch(self, number: int, skip: int = 0) -> Iterator[Batch]:
        """The batches of one pass, each time in another order; `skip` leaves out the first ones."""
        at = 0
        for group, paths in enumerate(self._groups(number)):
            texts = [text for path in paths for text in self.extras.load(path)]
            if not texts:
                continue
            random.Random(f"{self.seed} {number} {group}").shuffle(texts)
            laid = places(texts, self.length)
            del texts
            for start in range(0, len(laid) - self.size + 1, self.size):
                at += 1
                if at > skip:
                    yield laid.batch(start, self.size)
            del laid

    def _groups(self, number: int) -> list[list[Path]]:
        """The shards in this pass's order, as many together as memory allows."""
        order = list(self.shards)
        random.Random(f"{self.seed} {number}").shuffle(order)
        groups: list[list[Path]] = [[]]
        room = share = self.memory // 2  # the other half is for the same, laid end to end
        for path in order:
            size = sum(file.stat().st_size for file in (path, *self.extras.files(path)))
            if groups[-1] and size > room:
                groups.append([])
                room = share
            groups[-1].append(path)
            room -= size
        return groups


def count_tokens(shards: Sequence[Path], vocab_size: int) -> np.ndarray:
    """[V] int64: how often each token is a label."""
    counts = np.zeros(vocab_size, np.int64)
    for path in shards:
        for text in load_shard(path).texts:
            said = text.answer if text.labels is None else text.labels
            counts += np.bincount(said.reshape(-1), minlength=vocab_size)
    return counts


def choose_vocabulary(counts: np.ndarray, size: int) -> np.ndarray:
    """The `size` most frequent tokens, in order of their ids.

    Raises BadInputError for more tokens than the vocabulary has.
    """
    if size > len(counts):
        raise BadInputError(
            f"--draft-vocab is {size}; the target's vocabulary has {len(counts)} tokens"
        )
    return np.sort(np.argsort(-counts, kind="stable")[:size]).astype(np.int32)


def covered(counts: np.ndarray, tokens: np.ndarray) -> float:
    """The share of a text's tokens, counted in `counts` [V], that are among `tokens`."""
    return float(counts[tokens].sum() / max(1, counts.sum()))
