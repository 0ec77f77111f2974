"""Successors: drafts are what the target says after a token, whatever came before it.

The target reads each token once, after the beginning of an answer and an ellipsis, and its
likeliest next tokens make a row of a table. Drafts follow the rows from the text's last token on:

    text     ... the boiling point of       of -> the, a, water
    drafts   the, first                     the -> first, most, same

Nothing is trained, no network is called, and nothing is read of the target. After an ellipsis it
expects the middle of a text: of the tokens of SmolLM2's answers 17% are the first of their rows. Of
rows after the beginning alone 14% are, and of rows after the text's first token 12%.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import takewhile
from pathlib import Path
from typing import cast

import mlx.core as mx
import numpy as np
from mlx_lm.tokenizer_utils import TokenizerWrapper

from redrafter_mlx.config import BeamShape
from redrafter_mlx.drafting.interface import Drafter, Memory, Seen
from redrafter_mlx.runtime.files.atomic_write import atomic_write
from redrafter_mlx.runtime.files.paths import cache_dir
from redrafter_mlx.speculation.beam_search import top_k
from redrafter_mlx.speculation.beams import Beams
from redrafter_mlx.speculation.sampling import Draws
from redrafter_mlx.speculation.tree import TokenTree
from redrafter_mlx.target_model.fingerprint import values_hash
from redrafter_mlx.target_model.model import Target
from redrafter_mlx.weights import LOG
from redrafter_mlx.weights.text.chat import encode_text, render_chat

_K = 4
"""Number of successors in a row."""

_MAX_ROWS = 1 << 14
"""Maximum number of rows. Vocabularies begin with their frequent tokens: the first 16,384 are 95%
of SmolLM2's answers to MT-Bench."""

_READ_AT_ONCE = 63
"""Number of tokens that are read in one call, for which a request may have to wait."""

_SAVED_EVERY = 16
"""Number of calls after which what is known is saved."""

_SHARE, _MAX_RATE = 0.8, 0.45
"""Acceptance rate as a share of the probability in a row, and its maximum: counted on SmolLM2's
answers to 16 of MT-Bench's questions."""

_LOWEST = -1e9
"""Stands for -inf in a sum that must not be NaN."""


class Successors(Drafter, well_formed=True):
    """Drafts from a table of successors, as far as it is known when this is made.

    It has no memory, reads nothing of the target, and calls no network.
    """

    name = "successors"
    level_cost = 0.01
    max_width = _K
    timing_key = "successors"

    def __init__(self, table: SuccessorTable) -> None:
        rates = np.minimum(_SHARE * np.exp(table.log_probs[: table.known]), _MAX_RATE)
        unknown = [(0, 1), (0, 0)]  # a last row, for the tokens without one
        self._tokens = mx.array(np.pad(table.tokens[: table.known], unknown))
        self._log_probs = mx.array(np.pad(np.log(rates), unknown, constant_values=-math.inf))
        mx.eval(self._tokens, self._log_probs)  # another thread drafts, and could not evaluate them

    def draft(self, memory: Memory, seen: Seen, shape: BeamShape) -> tuple[Beams, Memory]:
        """Return the W likeliest prefixes of each length, by the table."""
        shape, root = self.drafted(shape), seen.root
        B, W = root.shape[0], shape.width
        tokens = [mx.broadcast_to(root[:, None], (B, W))]
        scores, parents = [mx.zeros((B, W))], [mx.zeros((B, W), mx.int32)]
        last, above = root[:, None], scores[0][:, :1]
        for level in range(shape.length - 1):
            row = mx.minimum(last, self._tokens.shape[0] - 1)
            found, log_probs = self._tokens[row], self._log_probs[row]  # [B, X, K]
            if seen.draws is not None:
                log_probs = _with_noise(log_probs, found, seen.draws, level)
            total = (above[:, :, None] + log_probs).reshape(B, -1)
            above, index = top_k(total, W)
            last = mx.take_along_axis(found.reshape(B, -1), index, axis=1)
            tokens.append(last)
            scores.append(above)
            parents.append(index // _K)
        found, log_probs, origins = (mx.stack(x, axis=2) for x in (tokens, scores, parents))
        return Beams(found, log_probs, origins, distinct=True), memory


def _with_noise(log_probs: mx.array, tokens: mx.array, draws: Draws, level: int) -> mx.array:
    """Return the log-probabilities given the noise that the target will draw with."""
    noise = mx.take_along_axis(draws.noise[:, level], tokens.reshape(tokens.shape[0], -1), axis=1)
    drawn = log_probs / draws.temperature[:, None, None] + noise.reshape(tokens.shape)
    largest = mx.logsumexp(mx.maximum(drawn, _LOWEST), axis=-1, keepdims=True)
    return mx.minimum(drawn - largest, 0.0) + math.log(_MAX_RATE)


class SuccessorTable:
    """The target's likeliest next tokens after each of its first tokens.

    Shapes:
      tokens:    [R, K] int32, the likeliest first
      log_probs: [R, K] float32
    known: number of rows that were read so far, from 0 on
    """

    def __init__(self, target: Target, beginning: Sequence[int], path: Path | None = None) -> None:
        """Takes over what is kept in `path`, where what is read is kept.

        beginning: what every token is read after; tokens that the target lacks are left out
        """
        rows = min(target.vocab_size, _MAX_ROWS)
        self.tokens = np.zeros((rows, _K), np.int32)
        self.log_probs = np.full((rows, _K), -math.inf, np.float32)
        self.known = 0
        known = [token for token in beginning if token < target.vocab_size]
        self._target, self._beginning, self._path = target, known or [0], path
        self._load()

    @property
    def complete(self) -> bool:
        return self.known == len(self.tokens)

    def grow(self) -> float:
        """Read some more rows, in one call of the target; return the share that is known."""
        if not self.complete:
            first = self.known
            last = min(first + _READ_AT_ONCE, len(self.tokens))
            with self._target.in_use():
                values, tokens = self._read(range(first, last))
            self.tokens[first:last], self.log_probs[first:last] = tokens, values
            self.known = last
            if self.complete or first // _READ_AT_ONCE % _SAVED_EVERY == _SAVED_EVERY - 1:
                self._save()
        return self.known / len(self.tokens)

    def _read(self, tokens: Sequence[int]) -> tuple[np.ndarray, np.ndarray]:
        """Return log-probabilities and tokens [P, K] after each of the tokens, all in one tree."""
        *before, root = self._beginning
        N, cache = len(tokens) + 1, self._target.new_cache()
        if before:
            self._target.append(mx.array([before]), cache, 0)
        children = mx.arange(N)[None] > 0
        tree = TokenTree(
            mx.array([[root, *tokens]], mx.int32),
            mx.where(children, 0, -1),
            children.astype(mx.int32),
            mx.maximum(mx.arange(N)[None] - 1, 0),
            (mx.eye(N) > 0)[None] | ~children[:, None],
            1,
            False,
        )
        start = mx.array([len(before)], mx.int32)
        logits = self._target.verify(tree, cache, start, len(before), compiled=False)[1]
        logits = logits[0, 1:].astype(mx.float32)
        values, index = top_k(logits, min(_K, logits.shape[1]))
        log_probs = values - mx.logsumexp(logits, axis=-1, keepdims=True)
        mx.eval(log_probs, index)
        return np.array(log_probs), np.array(index)

    def _load(self) -> int:
        """Take over what is kept, and return its number of rows.

        A file that is damaged, or of another beginning, counts as none.
        """
        if self._path is None:
            return 0
        with contextlib.suppress(Exception):  # a damaged file may hold anything
            with np.load(self._path, allow_pickle=False) as kept:
                tokens, log_probs = kept["tokens"], kept["log_probs"]
                fits = kept["beginning"].tolist() == self._beginning
            n = len(tokens)
            fits &= tokens.shape == log_probs.shape == (n, _K) and n <= len(self.tokens)
            fits &= tokens.dtype == np.int32 and log_probs.dtype == np.float32
            fits &= bool(((tokens >= 0) & (tokens < self._target.vocab_size)).all())
            if fits and bool((log_probs <= 0).all()):
                if n > self.known:
                    self.tokens[:n], self.log_probs[:n] = tokens, log_probs
                    self.known = n
                return n
        return 0

    def _save(self) -> None:
        """Keep what is known, unless another process has kept as much."""
        if self._path is None or self._load() >= self.known:
            return
        with contextlib.suppress(OSError):  # a cache that cannot be written is no error
            self._path.parent.mkdir(parents=True, exist_ok=True)
            with atomic_write(self._path, durable=False) as partial:
                tokens, log_probs = self.tokens[: self.known], self.log_probs[: self.known]
                np.savez(partial, tokens=tokens, log_probs=log_probs, beginning=self._beginning)


def table_of(target: Target, tokenizer: TokenizerWrapper) -> SuccessorTable:
    """Return the table of a model, with what is kept of it in our cache folder."""
    path = cache_dir() / "successors" / f"{values_hash(target.model)}.npz"
    return SuccessorTable(target, beginning_of_answers(tokenizer), path)


@dataclass(frozen=True)
class OwnSuccessors:
    """Becomes the successors of a target: those in a table, or without one all of them.

    What is not kept of all is read then, which takes as long as a prompt of 16,384 tokens.
    """

    table: SuccessorTable | None = None

    def bind(self, target: Target, tokenizer: TokenizerWrapper) -> Successors:
        table = self.table or table_of(target, tokenizer)
        if self.table is None and not table.complete:
            LOG.warning("reading what the model says after single tokens, which is done once")
        while self.table is None and not table.complete:
            with target.lock:
                table.grow()
        return Successors(table)


def beginning_of_answers(tokenizer: TokenizerWrapper) -> list[int]:
    """Return a prompt's first token, what is between a user's words and the answer, and "...".

    Many models attend to the first token wherever they are.
    """
    found = encode_text(tokenizer, "")[:1]
    if tokenizer.has_chat_template:
        with contextlib.suppress(Exception):  # a template may refuse anything
            a, b = (render_chat(tokenizer, [{"role": "user", "content": word}]) for word in "AB")
            pairs = zip(reversed(a[1:]), reversed(b[1:]), strict=False)
            after = [*takewhile(lambda pair: pair[0] == pair[1], pairs)]
            found = [a[0], *(token for token, _ in reversed(after))]
    return found + cast("list[int]", tokenizer.encode("...", add_special_tokens=False))
