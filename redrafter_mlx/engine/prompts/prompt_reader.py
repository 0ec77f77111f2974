"""Prefill of new answers, in chunks short enough for running answers to wait for."""

from __future__ import annotations

import time
from collections.abc import Sequence

from redrafter_mlx.decoding.prefill import PREFILL_CHUNK
from redrafter_mlx.engine.request import Answer
from redrafter_mlx.errors import RedrafterError
from redrafter_mlx.runtime.device import backend

PREFILL_SECONDS = 0.25
"""Maximum time that running answers wait in a round while prompts are read."""

_PLANNED = 0.8
"""Share of that time that a round plans to take if it goes on with a prompt: its context has grown
since the chunk by whose speed it is planned, so that it will take longer."""

MAX_TOKENS = 512
"""Prompt tokens read in a round while nothing is being decoded, or more if they take no longer than
running answers would wait; otherwise no round reads more."""

_FIRST_TOKENS, MIN_TOKENS = 32, 8
"""Number of prompt tokens read in a round until the prefill speed is measured, and the minimum
afterwards, which is for very long contexts: fewer would take hardly less time."""

MAX_INDEXED = 4096
"""Maximum number of tokens of one prompt that are indexed in a round, in about 20 milliseconds. A
round reads fewer, but a prefix that is in the cache may be longer."""


class PromptReader:
    """Reads prompts, round by round.

    reading: the answers whose prompts are being read, oldest first
    """

    def __init__(self) -> None:
        self.reading: list[Answer] = []
        self._speed = 0.0  # tokens per second, 0 until it was measured
        self._oldest_next = False
        self._began, self._tokens = 0.0, 0  # start of this round, and tokens of its chunks

    def read(self, alone: bool) -> list[Answer]:
        """Submit a chunk of each prompt, up to the round's limit of tokens; return those read."""
        if not self.reading:
            return []
        self._began, self._tokens = time.perf_counter(), 0
        room = self._room(alone)
        read: list[Answer] = []
        while self._tokens < room and (answer := self._next(read)) is not None:
            size = min(room - self._tokens, answer.prefill.left)
            if answer.stops:  # others wait for that part
                size = min(size, min(answer.stops) - answer.prefill.position)
            try:
                if size:
                    answer.prefill.read(size)
            except RedrafterError as error:
                answer.error = error
            answer.show_prompt(MAX_INDEXED)  # while the device computes
            self._tokens += size
            read.append(answer)
        if backend() == "cpu":  # MLX has waited for nearly all of it while it submitted
            self._wait(_unfinished(read))
        return read

    def end_round(self, read: Sequence[Answer], read_at: float = 0.0) -> list[Answer]:
        """Report the progress of a round; return the answers whose prompts are done.

        read_at: when the results of a step were last read, see `Pipeline.read_at`. A GPU computes
          this round's chunks after that step, so no time before it is theirs
        """
        if not read:
            return []
        self._began = max(self._began, read_at)
        unfinished = _unfinished(read)
        if backend() != "cpu":
            self._wait(unfinished)
        ended = [answer for answer in read if answer.error is None and answer.prompt_is_read]
        for answer in [*unfinished, *ended]:
            answer.note_prefill(answer.prefill.position)
        self.reading = [answer for answer in self.reading if answer not in ended]
        return ended

    def _wait(self, unfinished: Sequence[Answer]) -> None:
        """Wait for the chunks of prompts that have more of them, and measure their speed."""
        for answer in unfinished:
            answer.prefill.wait()
        if unfinished and self._tokens >= MIN_TOKENS:
            self._speed = self._tokens / (time.perf_counter() - self._began)

    def _room(self, alone: bool) -> int:
        """Return how many prompt tokens a round reads: running answers wait for them."""
        if not (alone or self._speed):
            return _FIRST_TOKENS
        goes_on = any(answer.prefill.begun for answer in self.reading)
        tokens = int(self._speed * PREFILL_SECONDS * (_PLANNED if goes_on else 1.0))
        if alone:
            return max(MAX_TOKENS, min(tokens, PREFILL_CHUNK))
        return max(MIN_TOKENS, min(tokens, MAX_TOKENS))

    def _next(self, read: Sequence[Answer]) -> Answer | None:
        """Return the next prompt to read, among those not in `read`: shortest and oldest in turn.

        So a short prompt waits for one chunk of a long one, and a long one does not wait forever.
        """
        left = [answer for answer in self.reading if answer not in read]
        if not left:
            return None
        shortest = min(left, key=lambda answer: answer.prefill.left)
        chosen = left[0] if self._oldest_next else shortest
        self._oldest_next = chosen is not left[0]
        return chosen


def _unfinished(read: Sequence[Answer]) -> list[Answer]:
    """Return the prompts that have more chunks, and no error."""
    return [one for one in read if one.prefill.left and one.error is None]
