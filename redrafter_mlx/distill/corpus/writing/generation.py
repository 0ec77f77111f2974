"""Batched generation with the target: answers to prompts, and the target's own prompts.

Ended rows leave the batch once enough rows have ended. The hidden state that chose each token is
kept with it, so that no second pass has to compute it.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, field

import mlx.core as mx
import numpy as np
from mlx_lm.models.cache import KVCache

from redrafter_mlx.distill.corpus.filters import loop_start
from redrafter_mlx.distill.corpus.hidden_states import check_finite, to_host
from redrafter_mlx.distill.corpus.shards import Text
from redrafter_mlx.distill.corpus.writing.read_prompts import CACHE_STEP, read_prompts
from redrafter_mlx.target_model.model import Target

_LEAVE_SHARE = 0.2
"""Share of the rows that must have ended before they leave the batch; leaving copies the cache."""

_CHECK_EVERY = 10
"""Number of tokens between checks whether an answer has fallen into a loop and can stop."""

MAX_CACHED = 2_000_000_000
"""Bytes of unused memory that MLX may keep: attention needs larger arrays at each token, and on a
GPU those of all sizes together would fill it."""

Count = Callable[[int], object]
"""Called at each step with the number of tokens that were written."""


@dataclass(frozen=True)
class Written:
    """The target's answer to one prompt."""

    prompt: list[int]  # token ids before `answer`, including tokens drawn at random
    answer: np.ndarray  # [A] int32, the likeliest tokens, if `ended` with an end-of-text token
    states: np.ndarray  # [A, C], the target's hidden states from which each of them was chosen
    ended: bool
    prompt_states: np.ndarray  # [len(prompt) - 1, C], the same for the prompt's, from the second on

    def text(self, target: Target, length: int | None = None) -> Text:
        """Return its first `length` tokens as a text to train on."""
        return Text.of(
            target,
            self.prompt,
            self.answer[:length],
            self.states[:length],
            prompt_states=self.prompt_states,
        )


def row_bytes(target: Target, columns: int) -> int:
    """Return the bytes of a text of `columns` tokens: keys, values, logits; by shapes alone."""
    cache = target.mlx_lm_caches()
    target.hidden(mx.array([[0]]), cache)
    keys = [layer for layer in cache if isinstance(layer, KVCache)]
    of_token = sum(a[..., :1, :].nbytes for layer in keys for a in (layer.keys, layer.values))
    states = sum(layer.nbytes for layer in cache if layer not in keys)
    of_text = of_token * -(-columns // CACHE_STEP) * CACHE_STEP
    return of_text + states + 12 * target.vocab_size


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
    count: Count = lambda _: None,
) -> list[Written]:
    """Write the first prompt's answers, one for each of `openings`, then the second's, ...

    eos:      token ids that end an answer
    max_tokens: of the greedy part
    openings: numbers of tokens drawn at random first, which become part of the prompt; above 0 they
              need `key`
    stop_at_loops: whether to end an answer that repeats itself; see filters
    room:     bytes for the rows of a batch, None for all at once; but for rounding the same answers
    """
    written = _write(
        target,
        prompts,
        [_Row(i, n, n + max_tokens) for i in range(len(prompts)) for n in openings],
        eos,
        temperature,
        mx.random.key(0) if key is None else key,
        room,
        stop_at_loops,
        count,
    )
    answers = []
    for row in written:
        n, states = row.drawn, np.stack(row.states)
        answers.append(
            Written(
                prompts[row.prompt] + row.tokens[:n],
                np.array(row.tokens[n:], np.int32),
                check_finite(states[n:], target),
                row.tokens[-1] in eos,
                check_finite(np.concatenate([row.before, states[:n]]), target),
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
    count: Count = lambda _: None,
) -> list[list[list[int]]]:
    """Draw `counts[i]` texts after prefix i, as a user would write them there; see `write_answers`.

    Returns for each prefix the token ids of the texts that ended, without the token that did.
    """
    rows = [
        _Row(i, max_tokens, max_tokens, keep_states=False)
        for i, count in enumerate(counts)
        for _ in range(count)
    ]
    grouped: list[list[list[int]]] = [[] for _ in prefixes]
    written = _write(target, prefixes, rows, eos, temperature, key, room, True, count)
    for row in written:
        if len(row.tokens) > 1 and row.tokens[-1] in eos:
            grouped[row.prompt].append(row.tokens[:-1])
    return grouped


@dataclass
class _Row:
    """What is written after a prompt: tokens drawn at random, then greedy ones up to a limit."""

    prompt: int  # number of the prompt
    drawn: int  # number of tokens drawn at random
    limit: int
    keep_states: bool = True
    tokens: list[int] = field(default_factory=list)
    states: list[np.ndarray] = field(default_factory=list)  # the states [C] that chose the tokens
    # [len(prompt) - 1, C], the states that chose the prompt's tokens
    before: np.ndarray = field(default_factory=lambda: np.zeros(0))
    open: bool = True


def _write(
    target: Target,
    prompts: Sequence[list[int]],
    rows: list[_Row],
    eos: Collection[int],
    temperature: float,
    key: mx.array,
    room: int | None,
    stop_at_loops: bool,
    count: Count,
) -> Iterator[_Row]:
    """Write the rows, of which those after one prompt are neighbours, in batches; yield each row.

    A model that takes no mask for each row of a batch writes them one at a time. No name refers to
    a batch, so that it is freed before the next one: two would not fit.
    """
    keys, size = mx.random.split(key, len(rows)), len(rows)
    if not target.row_masks:
        size = 1
    elif room is not None:
        columns = max(map(len, prompts)) + max(row.limit for row in rows)
        size = min(size, max(1, room // row_bytes(target, columns)))
    while rows:
        some, rows = rows[:size], rows[size:]
        _Batch(target, prompts, some, keys[:size]).write(eos, temperature, stop_at_loops, count)
        keys = keys[size:]
        yield from some


class _Batch:
    """Rows being written, with their cache, their last states [B, C] and their keys [B, 2]."""

    def __init__(
        self, target: Target, prompts: Sequence[list[int]], rows: Sequence[_Row], keys: mx.array
    ) -> None:
        """Prefill the prompts, each of them once for all its rows."""
        self.target, self.rows, self.keys = target, list(rows), keys
        own = sorted({row.prompt for row in rows})
        read = read_prompts(target, [prompts[i] for i in own], rows[0].keep_states)
        self.cache, self.hidden = read.cache, read.hidden
        slots = [own.index(row.prompt) for row in rows]
        if slots != list(range(len(own))):
            self._take(slots)
        if rows[0].keep_states:
            for row, slot in zip(rows, slots, strict=True):
                row.before = read.states[slot]

    def _take(self, slots: list[int]) -> None:
        """Keep only these slots of the cache; a slot may be named several times."""
        index = mx.array(slots)
        for layer in self.cache:
            layer.filter(index)
        self.hidden = self.hidden[index]

    def write(
        self, eos: Collection[int], temperature: float, stop_at_loops: bool, count: Count
    ) -> None:
        """Write each row until it ends, reaches its limit or loops."""
        for at in range(max(row.limit for row in self.rows)):
            if mx.get_cache_memory() > MAX_CACHED:
                mx.clear_cache()
            logits = self.target.logits(self.hidden[:, None])[:, 0]
            chosen, drawn = mx.argmax(logits, axis=-1), [at < row.drawn for row in self.rows]
            if any(drawn):
                self.keys, noise = mx.vmap(mx.random.split)(self.keys).swapaxes(0, 1)
                random = mx.vmap(_draw)(logits * (1 / temperature), noise)
                chosen = mx.where(mx.array(drawn), random, chosen)
            before, chosen = self.hidden, chosen.astype(mx.int32)
            self.hidden = self.target.hidden(chosen[:, None], self.cache)[:, 0]
            mx.async_eval(self.hidden)
            tokens: list[int] = chosen.tolist()  # type: ignore[assignment]
            states = to_host(before) if self.rows[0].keep_states else None
            count(sum(row.open for row in self.rows))
            for slot, row in enumerate(self.rows):
                if row.open:
                    row.tokens.append(tokens[slot])
                    if states is not None:
                        row.states.append(states[slot])
                    n = len(row.tokens)
                    check = stop_at_loops and n % _CHECK_EVERY == 0
                    looping = check and loop_start(row.tokens) is not None
                    row.open = not (tokens[slot] in eos or n == row.limit or looping)
            going_on = [slot for slot, row in enumerate(self.rows) if row.open]
            if not going_on:
                break
            if len(going_on) <= (1 - _LEAVE_SHARE) * len(self.rows):
                self._take(going_on)
                self.keys = self.keys[mx.array(going_on)]
                self.rows = [self.rows[slot] for slot in going_on]


def _draw(logits: mx.array, key: mx.array) -> mx.array:
    return mx.random.categorical(logits, key=key)
