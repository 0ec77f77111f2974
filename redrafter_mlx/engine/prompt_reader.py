"""Reading the prompts of newcomers, in chunks that running answers can wait for."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

from redrafter_mlx.config import BeamShape
from redrafter_mlx.decoding.loop import Decoder
from redrafter_mlx.decoding.prefill import Prefill
from redrafter_mlx.decoding.row import Row
from redrafter_mlx.engine.group import Group
from redrafter_mlx.engine.request import Answer
from redrafter_mlx.errors import RedrafterError
from redrafter_mlx.runtime.blas import BLAS

_ALONE = 512
"""Tokens of prompts that are read in a round while nothing is being decoded."""

_LEAST = 32
"""The same in every machine's worst case, and before it is known how fast it reads."""


@dataclass(eq=False)
class Reading:
    """An answer whose prompt is being read.

    shape: of its first drafts
    """

    answer: Answer
    group: Group
    decoder: Decoder
    prefill: Prefill
    row: Row
    shape: BeamShape


@dataclass(frozen=True)
class Chunks:
    """What was submitted in one round.

    read:   the answers of whose prompts it is
    tokens: of all of them
    began:  when, on the host's clock
    """

    read: Sequence[Reading]
    tokens: int
    began: float


class PromptReader:
    """The prompts that are being read.

    reading: whose they are, oldest first
    """

    def __init__(self, prefill_seconds: float) -> None:
        """`prefill_seconds`: how long running answers wait in a round, at most."""
        self.reading: list[Reading] = []
        self._seconds = prefill_seconds
        self._speed = 0.0  # tokens a second, 0 before it was measured
        self._oldest_next = False

    def read(self, alone: bool) -> Chunks:
        """Submit a chunk of each prompt, as far as the round's tokens go."""
        began, room = time.perf_counter(), _ALONE if alone else self._affordable
        read: list[Reading] = []
        tokens = 0
        if self.reading:
            BLAS.use_all_cores()
        while tokens < room and (reading := self._next(read)) is not None:
            size = min(room - tokens, reading.prefill.left)
            try:
                reading.prefill.read(size)
            except RedrafterError as error:
                reading.answer.error = error
            tokens += size
            read.append(reading)
        return Chunks(read, tokens, began)

    def finished(self, chunks: Chunks) -> list[Reading]:
        """Measure a round; the answers whose prompts it ended are handed over, and reported."""
        sound = [reading for reading in chunks.read if reading.answer.error is None]
        unfinished = [reading for reading in sound if reading.prefill.left]
        for reading in unfinished:
            reading.prefill.wait()
        if unfinished and chunks.tokens >= _LEAST:
            self._speed = chunks.tokens / (time.perf_counter() - chunks.began)
        for reading in sound:
            prefill = reading.prefill
            reading.answer.note_prefill(prefill.position, len(reading.answer.request.prompt))
        ended = [reading for reading in sound if not reading.prefill.left]
        self.reading = [reading for reading in self.reading if reading not in ended]
        return ended

    @property
    def _affordable(self) -> int:
        """Tokens that running answers can wait for."""
        tokens = int(self._speed * self._seconds)
        return max(_LEAST, min(1 << tokens.bit_length() >> 1, _ALONE))

    def _next(self, read: Sequence[Reading]) -> Reading | None:
        """Whose prompt is read on, of those not in `read`: the shortest, and in turn the oldest.

        So a short prompt waits for one chunk of a long one, which is not overtaken for ever.
        """
        left = [reading for reading in self.reading if reading not in read]
        if not left:
            return None
        shortest = min(left, key=lambda reading: reading.prefill.left)
        chosen = left[0] if self._oldest_next else shortest
        self._oldest_next = chosen is not left[0]
        return chosen
