"""Reading prompts: in chunks short enough for running answers, and shared prefixes only once."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager

from redrafter_mlx.decoding.cache.prefix_cache import PrefixCache, common_prefix
from redrafter_mlx.decoding.cache.prefix_store import PrefixStore, StoredPrefix
from redrafter_mlx.decoding.cache.sequence_cache import SequenceCache
from redrafter_mlx.decoding.step import PREFILL_CHUNK
from redrafter_mlx.drafting.interface import Drafter
from redrafter_mlx.engine.request import Answer
from redrafter_mlx.errors import DrafterError, RedrafterError
from redrafter_mlx.runtime.device import backend

LOG = logging.getLogger("redrafter_mlx.engine")

_MIN_LOADED = 256
"""Minimum number of tokens that a file must hold beyond what is in memory to be loaded."""

_MIN_AWAITED = 64
"""Minimum number of tokens that are awaited of another prompt: fewer are read in one call."""

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


class Prefixes:
    """The prefixes that the answers of one model share.

    cache: texts that were read, by earlier answers or in a prompt that others wait for
    """

    def __init__(self, max_bytes: int, store: PrefixStore | None = None) -> None:
        """`store`: keeps them on disk, too."""
        self.cache, self.store = PrefixCache(max_bytes), store

    def take(self, answer: Answer) -> tuple[SequenceCache, int]:
        """Return a cache for an answer, and how many tokens of its prompt it holds."""
        request, decoder = answer.request, answer.decoder
        found = None
        if request.options.cache_prompt:
            self._load(answer)
            found = self.cache.take(request.prompt, decoder.drafter)
        cache, start = found or (decoder.new_cache(), 0)
        if cache.target.forgetful and request.options.cache_prompt:
            cache.parted = self.cache.longest_shared(request.prompt)
        return cache, start

    def touch(self, answer: Answer) -> None:
        """Drop the text that an answer needs only after all others; searched once for it."""
        if answer.request.options.cache_prompt and answer.touched != self.cache.added:
            answer.touched = self.cache.added
            self.cache.touch(answer.request.prompt, answer.decoder.drafter)

    def keep_prefill(self, answer: Answer) -> None:
        """Keep what was read of the prompt of an answer that has ended."""
        answer.prefill.wait()
        self.keep(answer, answer.prefill.cache, answer.request.prompt[: answer.prefill.position])

    def keep_answer(self, answer: Answer, cache: SequenceCache) -> None:
        """Keep the cache of an answer that has ended, whose last token was not read, or in vain."""
        text = [*answer.request.prompt, *answer.text.tokens]
        read = answer.kept_length
        if cache.target.reaches_back(answer.committed, read):
            cache.target.excess += max(answer.committed - read, 0)
        else:
            read = answer.committed
        if read <= len(text):
            self.keep(answer, cache, text[:read])

    def keep(self, answer: Answer, cache: SequenceCache, tokens: Sequence[int]) -> None:
        """Keep an answer's cache, which is not used any more, for prompts that share a prefix.

        Drafters that read no features read the tokens again if they draft for such a prompt.
        """
        drafter = answer.decoder.drafter
        if not (answer.request.options.cache_prompt and tokens):
            return
        with _only_logged():
            _catch_up(cache, drafter)
            kept = self.cache.keep(cache, tokens, drafter, len(answer.request.prompt))
            if kept is not None and self.store is not None:
                found = (kept.tokens, cache.arrays, kept.remembered, kept.prompt)
                self.store.save(StoredPrefix(*found))

    def _load(self, answer: Answer) -> None:
        """Load the text that holds most of an answer's prompt, if it is on disk alone."""
        if self.store is None:
            return
        prompt, decoder = answer.request.prompt, answer.decoder
        path, shared = self.store.longest(prompt)
        if path is None or shared - self.cache.known(prompt, decoder.drafter) < _MIN_LOADED:
            return
        if (stored := self.store.load(path)) is not None:
            cache = decoder.new_cache().holding(stored.arrays, stored.remembered)
            self.cache.restore(cache, stored.tokens, stored.remembered, stored.prompt)

    def await_prefix(self, answer: Answer, reading: Answer) -> None:
        """Let a waiting answer begin only once another's prompt is read as far as both agree.

        That is where it saves reading more than the other one found in the cache. Each pair is
        compared once.
        """
        one, other = answer.request, reading.request
        if not (one.options.cache_prompt and other.options.cache_prompt):
            return
        if answer.decoder.drafter is not reading.decoder.drafter:
            return
        # The last token of a prompt is always read for its answer.
        shared = min(common_prefix(one.prompt, other.prompt), len(one.prompt) - 1)
        shared = min(shared, len(other.prompt) - 1)
        known = reading.tally.cached
        if answer.awaited_prefix is not None:
            earlier, length = answer.awaited_prefix
            if answer.awaits_prefix or length not in earlier.stops:  # else it ended before
                known = max(known, length)
        if shared - known >= _MIN_AWAITED:
            answer.awaited_prefix = reading, shared
            reading.stops.append(shared)
            self.keep_awaited([reading])

    def keep_awaited(self, read: Iterable[Answer]) -> None:
        """Keep the prefixes that others wait for, of prompts that were read so far by now."""
        for answer in read:
            for stop in sorted(answer.stops):
                if stop <= answer.prefill.position and answer.error is None:
                    answer.stops.remove(stop)
                    with _only_logged():
                        self._keep_beginning(answer, stop)

    def _keep_beginning(self, answer: Answer, length: int) -> None:
        """Keep a copy of what was read of a prompt, up to some length, if it can be cut there."""
        tokens, drafter = answer.request.prompt[:length], answer.decoder.drafter
        cache, position = answer.prefill.cache, answer.prefill.position
        _catch_up(cache, drafter)
        if length == position:
            cache.keep_states(length)
        if cache.reusable(position, length) == length:
            self.cache.keep(cache.reused(tokens, drafter, position), tokens, drafter)


def _catch_up(cache: SequenceCache, drafter: Drafter | None) -> None:
    """Give a drafter that reads the target's features those that it missed: they are not kept."""
    if drafter is not None and drafter.features.any:
        cache.catch_up(drafter)


@contextmanager
def _only_logged() -> Iterator[None]:
    """Context in which a drafter's failure keeps a text from later prompts, and ends nothing."""
    try:
        yield
    except DrafterError as error:
        LOG.warning("a text is not kept for later prompts: %s", error)
