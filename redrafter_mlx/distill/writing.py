"""The target writes in batches: answers to prompts, and prompts of its own.

Rows are padded on the left in mlx-lm's batched cache, so that all of them write the same column;
a row that has ended leaves the batch once enough have. What the target's last layer says at each
token is kept beside it: a drafter learns from that, and no second pass has to compute it.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

import mlx.core as mx
import numpy as np
from mlx_lm.models.cache import BatchKVCache

from redrafter_mlx.distill.corpus import Text
from redrafter_mlx.distill.filters import loop_start
from redrafter_mlx.distill.states import check_finite, to_host
from redrafter_mlx.target import Target

_PREFILL_TOKENS = 8192
"""Tokens in one call while prompts are read, which bounds memory."""

_LEAVE_SHARE = 0.2
"""Rows leave the batch once so many of it have ended; leaving copies the cache."""

_LOOK_EVERY = 10
"""Tokens between looks whether an answer has fallen into a loop and need not go on."""

_NEAR = 0.05
"""Of the largest coordinate: how far rounding may move a hidden state, in any arithmetic."""


@dataclass(frozen=True)
class Written:
    """What the target wrote behind one prompt.

    prompt:  token ids in front of `answer`, tokens drawn at random included
    answer:  [A] int32, the likeliest token at each place; ends with an end-of-text token if `ended`
    states:  [A, C], the target's hidden states from which each of them was chosen
    before:  [len(prompt) - 1, C], the same of the prompt's tokens from its second on
    """

    prompt: list[int]
    answer: np.ndarray
    states: np.ndarray
    ended: bool
    before: np.ndarray

    def text(self, target: Target, length: int | None = None) -> Text:
        """Its first `length` tokens, to be learnt from."""
        D, states = target.hidden_size, self.states[:length]
        contexts = states[:, :-D] if target.context_layers else None
        answer = self.answer[:length]
        return Text(self.prompt, answer, states[:, -D:], contexts=contexts, before=self.before)


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
) -> list[Written]:
    """Answers to each prompt, one for each of `openings`; a prompt is read once for all of them.

    Args:
      eos: token ids that end an answer
      max_tokens: of the greedy part
      openings: how many tokens are drawn at random first, so that one prompt has many answers;
        they count as prompt. Other than 0 they need `key`
      stop_at_loops: end an answer that says the same again; see filters
    Returns:
      the first prompt's answers, then the second's, ...
    """
    if len(prompts) * len(openings) > 1 and not takes_batches(target):
        keys = mx.random.split(mx.random.key(0) if key is None else key, len(prompts))
        return [
            answer
            for prompt, own in zip(prompts, keys, strict=True)
            for opening, noise in zip(openings, mx.random.split(own, len(openings)), strict=True)
            for answer in write_answers(
                target, [prompt], eos, max_tokens,
                openings=(opening,), temperature=temperature, key=noise,
                stop_at_loops=stop_at_loops,
            )
        ]  # fmt: skip
    drawn = list(openings) * len(prompts)
    batch = _Batch(target, prompts, keep_states=True)
    batch.keep([row for row in range(len(prompts)) for _ in openings])
    limits = [n + max_tokens for n in drawn]
    rows = _write(batch, eos, limits, drawn, temperature, key, stop_at_loops)
    return [
        Written(
            prompts[i // len(openings)] + tokens[:n],
            np.array(tokens[n:], np.int32),
            check_finite(states[n:], target),
            bool(tokens) and tokens[-1] in eos,
            check_finite(np.concatenate([batch.before[i // len(openings)], states[:n]]), target),
        )
        for i, ((tokens, states), n) in enumerate(zip(rows, drawn, strict=True))
    ]


def write_turns(
    target: Target,
    prefixes: Sequence[list[int]],
    counts: Sequence[int],
    eos: Collection[int],
    max_tokens: int,
    temperature: float,
    key: mx.array,
) -> list[list[list[int]]]:
    """So many texts drawn behind each prefix: what a user would say there.

    Returns:
      for each prefix, token ids without the token that ended the text; one that did not end is
      left out
    """
    of_row = [i for i, count in enumerate(counts) for _ in range(count)]  # whose turn a row is
    if len(of_row) > 1 and not takes_batches(target):
        noises = mx.random.split(key, len(of_row))
        turns = [
            write_turns(target, [prefixes[i]], [1], eos, max_tokens, temperature, noise)[0]
            for i, noise in zip(of_row, noises, strict=True)
        ]
    else:
        batch = _Batch(target, prefixes, keep_states=False)
        batch.keep(of_row)
        total = [max_tokens] * len(of_row)
        rows = _write(batch, eos, total, total, temperature, key, stop_at_loops=True)
        turns = [[tokens[:-1]] if tokens and tokens[-1] in eos else [] for tokens, _ in rows]
    grouped: list[list[list[int]]] = [[] for _ in prefixes]
    for i, ended in zip(of_row, turns, strict=True):
        grouped[i] += [turn for turn in ended if turn]
    return grouped


def takes_batches(target: Target) -> bool:
    """Whether the model's attention takes a mask for each row; some of mlx-lm's take one for all.

    Where the batch's size happens to be that of another axis, a wrong mask goes unnoticed, so
    the results are compared with those of one row alone.
    """
    padding = [0, 1, 2, 3, 3]
    tokens = mx.array([[0] * n + list(range(1, 5 - n)) for n in padding]) % target.vocab_size
    try:
        together = target.hidden(tokens, _new_cache(target, padding))[-1, -1]
        mx.eval(together)
    except ValueError:
        return False
    alone = target.hidden(tokens[-1:, -1:], _new_cache(target, [0]))[0, -1]
    error = mx.max(mx.abs(together - alone)) / mx.max(mx.abs(alone))
    return bool((error < _NEAR).item())


def _new_cache(target: Target, padding: list[int]) -> list[BatchKVCache]:
    return [BatchKVCache(padding) for _ in range(target.n_layers)]


class _Batch:
    """Rows being written: their cache, the state behind each, and what their prompts left."""

    def __init__(self, target: Target, prompts: Sequence[list[int]], *, keep_states: bool) -> None:
        self.target = target
        self.keep_states = keep_states
        width = max(map(len, prompts))
        padding = [width - len(prompt) for prompt in prompts]
        self.cache = _new_cache(target, padding)
        padded = mx.array([[0] * n + p for n, p in zip(padding, prompts, strict=True)])
        columns = max(1, _PREFILL_TOKENS // len(prompts))
        seen = []
        for at in range(0, width, columns):
            hidden = target.hidden(padded[:, at : at + columns], self.cache)
            self.hidden = hidden[:, -1]  # [B, C]
            mx.eval(self.hidden, [c.state[:2] for c in self.cache])
            if keep_states:
                seen.append(to_host(hidden))
        self.before: list[np.ndarray] = []  # of each prompt: the states that chose its tokens
        if keep_states:
            read = np.concatenate(seen, axis=1)
            self.before = [row[n:-1] for row, n in zip(read, padding, strict=True)]

    def keep(self, rows: list[int]) -> None:
        """Go on with these rows of the batch only; a row may be named several times."""
        index = mx.array(rows)
        for layer in self.cache:
            layer.filter(index)
        self.hidden = self.hidden[index]

    def logits(self) -> mx.array:
        """[B, V] of the next token."""
        return self.target.logits(self.hidden[:, None])[:, 0]

    def append(self, chosen: mx.array) -> tuple[list[int], np.ndarray | None]:
        """Take the next token [B] of every row; returns it, and the states that it came from."""
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
    key: mx.array | None,
    stop_at_loops: bool,
) -> list[tuple[list[int], np.ndarray]]:
    """Write each row to its end, its limit or a loop.

    The first `drawn` tokens of a row are drawn at random, the others are the likeliest.
    Returns for each row its tokens and, where states are kept, [tokens, C].
    """
    tokens: list[list[int]] = [[] for _ in limits]
    states: list[list[np.ndarray]] = [[] for _ in limits]
    rows = list(range(len(limits)))  # which row each place of the batch is
    open_rows = set(rows)
    for at in range(max(limits)):
        logits = batch.logits()
        chosen = mx.argmax(logits, axis=-1)
        if any(at < drawn[row] for row in rows):
            assert key is not None
            key, noise = mx.random.split(key)
            random = mx.random.categorical(logits * (1 / temperature), key=noise)
            chosen = mx.where(mx.array([at < drawn[row] for row in rows]), random, chosen)
        took, kept = batch.append(chosen.astype(mx.int32))
        for place, row in enumerate(rows):
            if row in open_rows:
                tokens[row].append(took[place])
                if kept is not None:
                    states[row].append(kept[place])
                n = len(tokens[row])
                look = stop_at_loops and n % _LOOK_EVERY == 0
                looping = look and loop_start(tokens[row]) is not None
                if took[place] in eos or n == limits[row] or looping:
                    open_rows.discard(row)
        if not open_rows:
            break
        if len(open_rows) <= (1 - _LEAVE_SHARE) * len(rows):
            places = [place for place, row in enumerate(rows) if row in open_rows]
            batch.keep(places)
            rows = [rows[place] for place in places]
    nothing = to_host(mx.zeros((0, batch.target.context_size), batch.target.dtype))
    return [(t, np.stack(s) if s else nothing) for t, s in zip(tokens, states, strict=True)]
