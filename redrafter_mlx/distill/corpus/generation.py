"""Batched generation with the target: answers to prompts, and the target's own prompts.

Rows are padded on the left in mlx-lm's batched cache, so that all of them write the same cache
slot. Ended rows leave the batch once enough rows have ended. The hidden state that chose each token
is kept with it, so that no second pass has to compute it.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import mlx.core as mx
import numpy as np
from mlx_lm.models.cache import BatchKVCache

from redrafter_mlx.distill.corpus.batch_cache import batch_cache, row_bytes
from redrafter_mlx.distill.corpus.filters import loop_start
from redrafter_mlx.distill.corpus.hidden_states import check_finite, to_host
from redrafter_mlx.distill.corpus.shards import Text
from redrafter_mlx.target.model import Target

_PREFILL_TOKENS = 8192
"""Maximum number of tokens in one prefill call, which bounds memory."""

_LEAVE_SHARE = 0.2
"""Share of the rows that must have ended before they leave the batch; leaving copies the cache."""

_CHECK_EVERY = 10
"""Number of tokens between checks whether an answer has fallen into a loop and can stop."""


@dataclass(frozen=True)
class Written:
    """The target's answer to one prompt.

    prompt:  token ids before `answer`, including tokens drawn at random
    answer:  [A] int32, the likeliest token at each position; ends with an end-of-text token if
             `ended`
    states:  [A, C], the target's hidden states from which each of them was chosen
    prompt_states: [len(prompt) - 1, C], the same for the prompt's tokens from the second on
    """

    prompt: list[int]
    answer: np.ndarray
    states: np.ndarray
    ended: bool
    prompt_states: np.ndarray

    def text(self, target: Target, length: int | None = None) -> Text:
        """Return its first `length` tokens as a text to train on."""
        return Text.of(
            target,
            self.prompt,
            self.answer[:length],
            self.states[:length],
            prompt_states=self.prompt_states,
        )


def write_answers(
    target: Target,
    prompts: Sequence[list[int]],
    eos: Collection[int],
    max_tokens: int,
    *,
    openings: Sequence[int] = (0,),
    temperature: float = 1.0,
    key: mx.array | None = None,
    stop_at_loops: bool = True,
    room: int | None = None,
) -> list[Written]:
    """Write answers to each prompt, one for each of `openings`.

    Args:
      eos: token ids that end an answer
      max_tokens: maximum number of tokens of the greedy part
      openings: number of tokens drawn at random first, so that one prompt has many answers; they
        become part of the prompt. Numbers above 0 need `key`
      stop_at_loops: whether to end an answer that repeats itself; see filters
      room: bytes for the rows of a batch, None for all rows at once. The answers do not depend on
        it, except for rounding
    Returns:
      the first prompt's answers, then the second's, ...
    """
    of_row = [i for i in range(len(prompts)) for _ in openings]
    drawn = list(openings) * len(prompts)
    keys = mx.random.split(mx.random.key(0) if key is None else key, len(of_row))
    answers = []
    for begin, some in _batches(
        target, prompts, of_row, max_tokens + max(openings), room, keep_states=True
    ):
        n_drawn = drawn[some]
        limits = [n + max_tokens for n in n_drawn]
        rows = _write(begin(), eos, limits, n_drawn, temperature, keys[some], stop_at_loops)
        for i, row, n in zip(of_row[some], rows, n_drawn, strict=True):
            answers.append(
                Written(
                    prompts[i] + row.tokens[:n],
                    np.array(row.tokens[n:], np.int32),
                    check_finite(row.states[n:], target),
                    bool(row.tokens) and row.tokens[-1] in eos,
                    check_finite(np.concatenate([row.before, row.states[:n]]), target),
                )
            )
    return answers


def write_turns(
    target: Target,
    prefixes: Sequence[list[int]],
    counts: Sequence[int],
    eos: Collection[int],
    max_tokens: int,
    temperature: float,
    key: mx.array,
    room: int | None = None,
) -> list[list[list[int]]]:
    """Draw `counts[i]` texts after prefix i, as a user would write them there.

    room: as in `write_answers`

    Returns:
      for each prefix, the token ids of its texts without the token that ended the text; a text
      that did not end is left out
    """
    of_row = [i for i, count in enumerate(counts) for _ in range(count)]
    keys = mx.random.split(key, len(of_row))
    grouped: list[list[list[int]]] = [[] for _ in prefixes]
    for begin, some in _batches(target, prefixes, of_row, max_tokens, room, keep_states=False):
        total = [max_tokens] * len(of_row[some])
        rows = _write(begin(), eos, total, total, temperature, keys[some], stop_at_loops=True)
        for i, row in zip(of_row[some], rows, strict=True):
            if len(row.tokens) > 1 and row.tokens[-1] in eos:
                grouped[i].append(row.tokens[:-1])
    return grouped


def _batches(
    target: Target,
    prompts: Sequence[list[int]],
    of_row: Sequence[int],
    tokens: int,
    room: int | None,
    *,
    keep_states: bool,
) -> Iterator[tuple[Callable[[], _Batch], slice]]:
    """Yield batches of the rows that continue the prompts `of_row` (ascending) by `tokens` tokens.

    Each batch is a function that prefills it, and the rows that it holds, as many as `room` allows.
    A prompt is read once for all its rows in a batch. The caller must drop a batch before it
    prefills the next one: two of them would not fit.
    """
    kind, size = batch_cache(target), len(of_row)
    if kind is None:
        kind, size = BatchKVCache, 1
    elif room is not None:
        size = max(1, room // row_bytes(target, max(map(len, prompts)) + tokens))
    for at in range(0, len(of_row), size):
        rows = of_row[at : at + size]
        own = sorted(set(rows))
        read, index = [prompts[i] for i in own], [own.index(i) for i in rows]
        yield (
            partial(_Batch, target, kind, read, index, keep_states=keep_states),
            slice(at, at + size),
        )


class _Row(NamedTuple):
    """A row that was written: its tokens and, if states are kept, the states that chose them [A, C]
    and its prompt's tokens [P - 1, C]."""

    tokens: list[int]
    states: np.ndarray
    before: np.ndarray


class _Batch:
    """Rows being written: their cache, each row's last state, and their prompts' states."""

    def __init__(
        self,
        target: Target,
        kind: type[BatchKVCache],
        prompts: Sequence[list[int]],
        rows: list[int],
        *,
        keep_states: bool,
    ) -> None:
        """Prefill the prompts; row i of the batch continues prompt rows[i]."""
        self.target = target
        self.keep_states = keep_states
        width = max(map(len, prompts))
        padding = [width - len(prompt) for prompt in prompts]
        self.cache = [kind(padding) for _ in range(target.n_layers)]
        padded = mx.array([[0] * n + p for n, p in zip(padding, prompts, strict=True)])
        columns = max(1, _PREFILL_TOKENS // len(prompts))
        seen = []
        for at in range(0, width, columns):
            hidden = target.hidden(padded[:, at : at + columns], self.cache)
            self.hidden = hidden[:, -1]  # [B, C]
            mx.eval(self.hidden, [c.state[:2] for c in self.cache])
            if keep_states:
                seen.append(to_host(hidden))
        if rows != list(range(len(prompts))):
            self.keep(rows)
        # For each row, the states that chose its prompt's tokens.
        self.before = [np.zeros(0)] * len(rows)
        if keep_states:
            read = np.concatenate(seen, axis=1)
            self.before = [read[row, padding[row] : -1] for row in rows]

    def keep(self, rows: list[int]) -> None:
        """Keep only these rows of the batch; a row may be named several times."""
        index = mx.array(rows)
        for layer in self.cache:
            layer.filter(index)
        self.hidden = self.hidden[index]

    def logits(self) -> mx.array:
        """Return the logits [B, V] of the next token."""
        return self.target.logits(self.hidden[:, None])[:, 0]

    def append(self, chosen: mx.array) -> tuple[list[int], np.ndarray | None]:
        """Append the next token [B] of every row; return it, and the states that chose it."""
        before = self.hidden
        self.hidden = self.target.hidden(chosen[:, None], self.cache)[:, 0]
        mx.async_eval(self.hidden)
        tokens: list[int] = chosen.tolist()  # type: ignore[assignment]
        return tokens, to_host(before) if self.keep_states else None


def _write(
    batch: _Batch,
    eos: Collection[int],
    limits: list[int],
    drawn: list[int],
    temperature: float,
    keys: mx.array,
    stop_at_loops: bool,
) -> list[_Row]:
    """Write each row until it ends, reaches its limit or loops.

    The first `drawn` tokens of a row are drawn at random with the row's key of `keys` [B, 2]; the
    others are greedy.
    """
    tokens: list[list[int]] = [[] for _ in limits]
    states: list[list[np.ndarray]] = [[] for _ in limits]
    rows = list(range(len(limits)))  # the row in each slot of the batch
    open_rows = set(rows)
    for at in range(max(limits)):
        logits = batch.logits()
        chosen = mx.argmax(logits, axis=-1)
        if any(at < drawn[row] for row in rows):
            keys, noise = mx.vmap(mx.random.split)(keys).swapaxes(0, 1)
            random = mx.vmap(_draw)(logits * (1 / temperature), noise)
            chosen = mx.where(mx.array([at < drawn[row] for row in rows]), random, chosen)
        took, kept = batch.append(chosen.astype(mx.int32))
        for slot, row in enumerate(rows):
            if row in open_rows:
                tokens[row].append(took[slot])
                if kept is not None:
                    states[row].append(kept[slot])
                n = len(tokens[row])
                check = stop_at_loops and n % _CHECK_EVERY == 0
                looping = check and loop_start(tokens[row]) is not None
                if took[slot] in eos or n == limits[row] or looping:
                    open_rows.discard(row)
        if not open_rows:
            break
        if len(open_rows) <= (1 - _LEAVE_SHARE) * len(rows):
            slots = [slot for slot, row in enumerate(rows) if row in open_rows]
            batch.keep(slots)
            keys = keys[mx.array(slots)]
            rows = [rows[slot] for slot in slots]
    nothing = to_host(mx.zeros((0, batch.target.context_size), batch.target.dtype))
    return [
        _Row(own, np.stack(kept) if kept else nothing, before)
        for own, kept, before in zip(tokens, states, batch.before, strict=True)
    ]


def _draw(logits: mx.array, key: mx.array) -> mx.array:
    """Draw a token from one row's logits [V]."""
    return mx.random.categorical(logits, key=key)
