"""Prefill of new answers, in chunks short enough for running answers to wait for."""

from __future__ import annotations

import time
from collections import abc
from dataclasses import dataclass

from redrafter_mlx.config import BeamShape
from redrafter_mlx.decoding.pipeline import Pipeline
from redrafter_mlx.decoding.prefill import PREFILL_CHUNK, Prefill
from redrafter_mlx.decoding.sequence import Sequence
from redrafter_mlx.engine.request import Answer
from redrafter_mlx.errors import RedrafterError
from redrafter_mlx.runtime.device import backend

_PREFILL_SECONDS = 0.25
"""Maximum time that running answers wait in a round while prompts are read."""

_PLANNED = 0.8
"""Share of that time that a round plans to take if it goes on with a prompt: its context has grown
since the chunk by whose speed it is planned, so that it will take longer."""

_MOST_TOKENS = 512
"""Prompt tokens read in a round while nothing is being decoded, or more if they take no longer than
running answers would wait; otherwise no round reads more."""

_FIRST_TOKENS, _LEAST_TOKENS = 32, 8
"""Number of prompt tokens read in a round until the prefill speed is measured, and the minimum
afterwards, which is for very long contexts: fewer would take hardly less time."""

_MOST_INDEXED = 4096
"""Maximum number of tokens of one prompt that are indexed in a round, in about 20 milliseconds. A
round reads fewer, but a prefix that is in the cache may be longer."""


@dataclass(eq=False)
class Reading:
    """An answer whose prompt is being read: by the target and, for prompt lookup, into an index.

    shape: shape of its first drafts
    """

    answer: Answer
    batch: Pipeline
    prefill: Prefill
    row: Sequence
    shape: BeamShape

    @property
    def done(self) -> bool:
        """Whether all of the prompt was read, and indexed for prompt lookup."""
        index = self.row.ngrams
        indexed = index is None or len(index.tokens) == len(self.answer.request.prompt)
        return not self.prefill.left and indexed

    def index_text(self) -> None:
        """Index more of the prompt, as far as the target has read it."""
        index = self.row.ngrams
        if index is not None:
            start = len(index.tokens)
            end = min(self.prefill.position, start + _MOST_INDEXED)
            index.append(self.answer.request.prompt[start:end])


class PromptReader:
    """Reads prompts, round by round.

    reading: the answers whose prompts are being read, oldest first
    """

    def __init__(self) -> None:
        self.reading: list[Reading] = []
        self._speed = 0.0  # tokens per second, 0 until it was measured
        self._oldest_next = False
        self._began, self._tokens = 0.0, 0  # start of this round, and tokens of its chunks

    def read(self, alone: bool) -> list[Reading]:
        """Submit a chunk of each prompt, up to the round's limit of tokens; return those read."""
        self._began, self._tokens = time.perf_counter(), 0
        room = self._room(alone)
        read: list[Reading] = []
        while self._tokens < room and (reading := self._next(read)) is not None:
            size = min(room - self._tokens, reading.prefill.left)
            try:
                if size:
                    reading.prefill.read(size)
            except RedrafterError as error:
                reading.answer.error = error
            reading.index_text()  # while the device computes
            self._tokens += size
            read.append(reading)
        if backend() == "cpu":  # MLX has waited for nearly all of it while it submitted
            self._wait(_unfinished(read))
        return read

    def end_round(self, read: abc.Sequence[Reading]) -> list[Reading]:
        """Report the progress of a round; return the answers whose prompts are done."""
        unfinished = _unfinished(read)
        if backend() != "cpu":
            self._wait(unfinished)
        ended = [reading for reading in read if reading.answer.error is None and reading.done]
        for reading in [*unfinished, *ended]:
            reading.answer.note_prefill(reading.prefill.position)
        self.reading = [reading for reading in self.reading if reading not in ended]
        return ended

    def _wait(self, unfinished: abc.Sequence[Reading]) -> None:
        """Wait for the chunks of prompts that have more of them, and measure their speed."""
        for reading in unfinished:
            reading.prefill.wait()
        if unfinished and self._tokens >= _LEAST_TOKENS:
            self._speed = self._tokens / (time.perf_counter() - self._began)

    def _room(self, alone: bool) -> int:
        """Return how many prompt tokens a round reads: running answers wait for them."""
        if not (alone or self._speed):
            return _FIRST_TOKENS
        goes_on = any(reading.prefill.begun for reading in self.reading)
        tokens = int(self._speed * _PREFILL_SECONDS * (_PLANNED if goes_on else 1.0))
        if alone:
            return max(_MOST_TOKENS, min(tokens, PREFILL_CHUNK))
        return max(_LEAST_TOKENS, min(tokens, _MOST_TOKENS))

    def _next(self, read: abc.Sequence[Reading]) -> Reading | None:
        """Return the next prompt to read, among those not in `read`: shortest and oldest in turn.

        So a short prompt waits for one chunk of a long one, and a long one does not wait forever.
        """
        left = [reading for reading in self.reading if reading not in read]
        if not left:
            return None
        shortest = min(left, key=lambda reading: reading.prefill.left)
        chosen = left[0] if self._oldest_next else shortest
        self._oldest_next = chosen is not left[0]
        return chosen


def _unfinished(read: abc.Sequence[Reading]) -> list[Reading]:
    """Return the prompts that have more chunks, and no error."""
    return [one for one in read if one.prefill.left and one.answer.error is None]
