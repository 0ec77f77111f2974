"""Many answers, one model: admits them, reads their prompts in chunks, and decodes them in batches.

One round reads a chunk of one prompt at most, and takes one step of every batch. The chunk is
submitted first, and the batches' results of the step before are read while the device works on it.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass

from redrafter_mlx.autotune.tuner import Tuner
from redrafter_mlx.config import PLAIN, BeamShape
from redrafter_mlx.decoding.copies import FixedShape
from redrafter_mlx.decoding.loop import Decoder
from redrafter_mlx.decoding.prefill import Prefill
from redrafter_mlx.decoding.prefix_cache import PrefixCache
from redrafter_mlx.decoding.row import Row
from redrafter_mlx.decoding.sequence_cache import SequenceCache
from redrafter_mlx.drafting.interface import Drafter
from redrafter_mlx.drafting.prompt_lookup import Lookup, TextIndex
from redrafter_mlx.engine.group import Group, GroupKey
from redrafter_mlx.engine.memory import MemoryBudget
from redrafter_mlx.engine.options import EngineOptions
from redrafter_mlx.engine.request import Answer
from redrafter_mlx.errors import RedrafterError
from redrafter_mlx.response import Tally
from redrafter_mlx.runtime.blas import BLAS
from redrafter_mlx.runtime.wired_memory import WIRED_MEMORY
from redrafter_mlx.speculation.penalties import changes_logits
from redrafter_mlx.speculation.sampling import sequence_keys
from redrafter_mlx.target.model import Target

_CHUNK_ALONE = 512
"""Tokens of a prompt that are read at once while nothing is being decoded."""

_LEAST_CHUNK = 32
"""The same in every machine's worst case, and before it is known how fast it reads."""


@dataclass(frozen=True)
class Model:
    """What answers are decoded with."""

    target: Target
    drafter: Drafter | None
    lookup: Lookup | None
    tuning: Tuner | None


@dataclass(frozen=True)
class Job:
    """An answer, and the shape of its drafts; None if that is chosen step by step."""

    answer: Answer
    shape: BeamShape | None


@dataclass(eq=False)
class _Reading:
    """An answer whose prompt is being read.

    shape: of its first drafts
    """

    answer: Answer
    group: Group
    decoder: Decoder
    prefill: Prefill
    row: Row
    shape: BeamShape


class Scheduler:
    """The answers of one model. All of it belongs to the engine's thread."""

    def __init__(self, model: Model, options: EngineOptions) -> None:
        self._model, self._options = model, options
        self._memory = MemoryBudget(model.target, options)
        self._prefixes = PrefixCache(self._memory.prefix_bytes)
        self._waiting: list[Job] = []
        self._reading: list[_Reading] = []
        self._groups: dict[GroupKey, Group] = {}
        self._answers: dict[Row, Answer] = {}
        self._speed = 0.0  # prompt tokens a second, 0 before it was measured
        self._oldest_next = False
        self._wired: ExitStack | None = None

    @property
    def waiting(self) -> int:
        """Answers that were not admitted yet."""
        return len(self._waiting)

    @property
    def running(self) -> int:
        """Answers that were admitted and are not over."""
        return len(self._reading) + len(self._answers)

    @property
    def idle(self) -> bool:
        return not self._waiting and not self.running

    def add(self, job: Job) -> None:
        """Take an answer in; it begins when there is room."""
        self._waiting.append(job)

    def work(self) -> None:
        """One round; every answer that it ended has been told so."""
        if self._wired is None:
            self._wired = ExitStack()
            self._wired.enter_context(WIRED_MEMORY.held(self._model.target.model))
        with self._model.target.lock:
            over = self._drop() + self._admit()
            reading, began = self._next_reading(), time.perf_counter()
            size = 0 if reading is None else self._read_chunk(reading)
            over += self._advance(paused=reading is not None)
            if reading is not None:
                self._after_chunk(reading, size, began)
        self._settle(over)

    def fail(self, error: Exception) -> None:
        """End every answer with an error; nothing can be done with this scheduler afterwards."""
        answers = [job.answer for job in self._waiting]
        answers += [reading.answer for reading in self._reading]
        for answer in [*answers, *self._answers.values()]:
            answer.end(error)
        if self._wired is not None:
            self._wired.close()

    def _drop(self) -> list[Answer]:
        """Let go of answers that ended before they had a token."""
        over = [job.answer for job in self._waiting if job.answer.over]
        self._waiting = [job for job in self._waiting if not job.answer.over]
        for reading in [reading for reading in self._reading if reading.answer.over]:
            self._reading.remove(reading)
            over.append(reading.answer)
            if reading.answer.error is None:
                reading.prefill.wait()
                self._keep(reading.answer, reading.decoder, reading.prefill.cache,
                           reading.answer.request.prompt[: reading.prefill.position])  # fmt: skip
        return over

    def _admit(self) -> list[Answer]:
        """Begin to read the prompts for which there is room; returns answers that are refused."""
        self._memory.make_room(0, self._prefixes)  # answers grow
        while self._waiting and self.running < self._options.max_batch:
            answer = self._waiting[0].answer
            if not self._memory.has_room(answer.request, self._largest_batch, self._prefixes):
                if self.running:
                    break
                answer.error = self._memory.too_large(answer.request)
                self._waiting.pop(0)
                return [answer]
            self._begin(self._waiting.pop(0))
        return []

    def _begin(self, job: Job) -> None:
        model, answer = self._model, job.answer
        prompt, options = list(answer.request.prompt), answer.request.options
        decoder = Decoder(
            model.target,
            model.drafter if options.draft else None,
            job.shape or PLAIN,
            options.sampling,
            options.prefixes,
            options.logprobs,
            model.lookup if options.draft else None,
        )
        key = GroupKey.of(options, job.shape, model.drafter)
        group = self._groups.get(key)
        if group is None:
            group = Group(decoder, job.shape is not None, model.tuning, options.method)
            self._groups[key] = group
        row = Row(
            answer.read,
            len(prompt),
            None if decoder.lookup is None else TextIndex(decoder.lookup, prompt),
            None if job.shape is None else FixedShape(job.shape),
            answer.constraint,
            learns=answer.constraint is None and not changes_logits(options),
        )
        shape = group.batch.first_shape(row)
        found = self._prefixes.take(prompt, decoder.drafter) if options.cache_prompt else None
        cache, start = found or (decoder.new_cache(), 0)
        parked = shape == PLAIN
        prefill = Prefill(model.target, decoder.drafter, cache, start, [prompt], parked)
        answer.tally = Tally(len(prompt), start, automatic=group.automatic)
        self._reading.append(_Reading(answer, group, decoder, prefill, row, shape))

    def _next_reading(self) -> _Reading | None:
        """Whose prompt is read on: the shortest, and in turn the one that came first.

        So a short prompt waits for one chunk of a long one, which is not overtaken for ever.
        """
        if not self._reading:
            return None
        shortest = min(self._reading, key=lambda reading: reading.prefill.left)
        chosen = self._reading[0] if self._oldest_next else shortest
        self._oldest_next = chosen is not self._reading[0]
        return chosen

    def _read_chunk(self, reading: _Reading) -> int:
        """Submit a chunk of a prompt, as long as running answers can wait for; its tokens."""
        size = _CHUNK_ALONE
        if self._answers:
            affordable = int(self._speed * self._options.prefill_seconds)
            size = max(_LEAST_CHUNK, min(1 << affordable.bit_length() >> 1, _CHUNK_ALONE))
        size = min(size, reading.prefill.left)
        BLAS.use_all_cores()
        try:
            reading.prefill.read(size)
        except RedrafterError as error:
            reading.answer.error = error
        return size

    def _after_chunk(self, reading: _Reading, size: int, began: float) -> None:
        """Let the prompt's answer begin if that was all of it; else measure the chunk."""
        answer, prefill = reading.answer, reading.prefill
        if answer.error is not None:
            return
        if prefill.left:
            prefill.wait()
            self._speed = size / (time.perf_counter() - began)
        else:
            self._reading.remove(reading)
            self._start(reading)
        answer.note_prefill(prefill.position, len(answer.request.prompt))

    def _start(self, reading: _Reading) -> None:
        """Choose the first token of an answer, which joins its batch."""
        answer, options = reading.answer, reading.answer.request.options
        seed = secrets.randbits(63) if options.seed is None else options.seed
        keys, prompt = sequence_keys(seed), answer.request.prompt
        try:
            state, output = reading.decoder.first(
                reading.prefill, [prompt], keys, reading.shape, [answer.constraint]
            )
        except RedrafterError as error:
            answer.error = error
            self._reading.append(reading)  # to be dropped
            return
        reading.group.batch.join(reading.row, state, output)
        self._answers[reading.row] = answer
        self._memory.learn(reading.prefill.cache)

    def _advance(self, paused: bool) -> list[Answer]:
        """Take a step of every batch; returns the answers that are over."""
        over = []
        groups = [group for group in self._groups.values() if group.batch.rows]
        for group in groups:
            for row in group.batch.rows:
                row.done = self._answers[row].over
            advanced = group.advance()
            if paused or len(groups) > 1:
                group.batch.pause()
            for row, cache in advanced.ended:
                answer = self._answers.pop(row)
                over.append(answer)
                if answer.error is None:
                    self._keep(answer, group.decoder, cache, answer.tokens)
        return over

    def _keep(
        self, answer: Answer, decoder: Decoder, cache: SequenceCache, tokens: Sequence[int]
    ) -> None:
        """Keep what was read and written for prompts that begin alike."""
        if answer.request.options.cache_prompt and tokens:
            decoder.catch_up(cache)
            cache.flush()
            self._prefixes.keep(cache, tokens)

    def _settle(self, over: Sequence[Answer]) -> None:
        """Put away what ended answers leave, and tell them."""
        used = {id(reading.group) for reading in self._reading}
        for key, group in list(self._groups.items()):
            if not group.batch.rows and id(group) not in used:
                del self._groups[key]
                group.record(self.idle)
        if self.idle and self._wired is not None:
            self._wired.close()
            self._wired = None
        for answer in over:
            answer.end()

    @property
    def _largest_batch(self) -> int:
        """Bytes of the largest batch, which is copied when a row joins it or leaves."""
        return max((group.batch.nbytes for group in self._groups.values()), default=0)
