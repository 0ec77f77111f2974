"""Many answers, one model: admits them, reads their prompts in chunks, and decodes them in batches.

One round reads a chunk of each prompt, as long as running answers can wait, and takes one step of
every batch. Chunks are submitted first. While the device computes them, the host reads the results
of each batch's previous step.
"""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass

from redrafter_mlx.autotune.tuner import Tuner
from redrafter_mlx.config import PLAIN, BeamShape, GenerationOptions
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
from redrafter_mlx.engine.prompt_reader import PromptReader, Reading
from redrafter_mlx.engine.request import Answer
from redrafter_mlx.errors import RedrafterError
from redrafter_mlx.response import Tally
from redrafter_mlx.runtime.blas import BLAS
from redrafter_mlx.runtime.wired_memory import WIRED_MEMORY
from redrafter_mlx.speculation.penalties import changes_logits
from redrafter_mlx.speculation.sampling import sequence_keys
from redrafter_mlx.target.model import Target


@dataclass(frozen=True)
class Model:
    """The target and the parts that draft for it."""

    target: Target
    drafter: Drafter | None
    lookup: Lookup | None
    tuning: Tuner | None

    def decoder(self, options: GenerationOptions, shape: BeamShape) -> Decoder:
        """Return the decoding loop of answers with these options; `shape` is the default shape."""
        return Decoder(
            self.target,
            self.drafter if options.draft else None,
            shape,
            options.sampling,
            options.prefixes,
            options.logprobs,
            self.lookup if options.draft else None,
        )


@dataclass(frozen=True)
class Job:
    """An answer, and the shape of its drafts; None if the shape is chosen step by step."""

    answer: Answer
    shape: BeamShape | None


class Scheduler:
    """Schedules the answers of one model. Only the engine's thread uses it."""

    def __init__(self, model: Model, options: EngineOptions, memory: MemoryBudget) -> None:
        self._model, self._options, self._memory = model, options, memory
        self._prefixes = PrefixCache(self._memory.prefix_bytes)
        self._open: set[Answer] = set()  # all that have not been told of their end
        self._waiting: list[Job] = []
        self._prompts = PromptReader(options.prefill_seconds)
        self._groups: dict[GroupKey, Group] = {}
        self._answers: dict[Row, Answer] = {}
        self._wired: ExitStack | None = None

    @property
    def waiting(self) -> int:
        """Number of answers that are not admitted yet."""
        return len(self._waiting)

    @property
    def running(self) -> int:
        """Number of answers that were admitted and are not over."""
        return len(self._prompts.reading) + len(self._answers)

    @property
    def idle(self) -> bool:
        return not self._waiting and not self.running

    def add(self, job: Job) -> None:
        """Queue an answer; it begins when there is room."""
        self._open.add(job.answer)
        self._waiting.append(job)

    def work(self) -> None:
        """Run one round, and tell the caller of every answer that it ended."""
        if self._wired is None:
            self._wired = ExitStack()
            self._wired.enter_context(WIRED_MEMORY.held())
        with self._model.target.lock:
            over = self._drop() + self._admit()
            chunks = self._prompts.read(alone=not self._answers)
            over += self._advance(paused=bool(chunks.read))
            for reading in self._prompts.end_round(chunks):
                self._start(reading)
        self._close_round(over)

    def fail(self, error: Exception) -> None:
        """End every answer with an error; the scheduler cannot be used afterwards."""
        for answer in self._open:
            answer.end(error)
        for group in self._groups.values():
            group.abandon()
        if self._wired is not None:
            self._wired.close()

    def _drop(self) -> list[Answer]:
        """Drop and return the answers that ended before their first token."""
        over = [job.answer for job in self._waiting if job.answer.over]
        self._waiting = [job for job in self._waiting if not job.answer.over]
        for reading in [reading for reading in self._prompts.reading if reading.answer.over]:
            self._prompts.reading.remove(reading)
            over.append(reading.answer)
            if reading.answer.error is None:
                reading.prefill.wait()
                self._keep(reading.answer, reading.decoder, reading.prefill.cache,
                           reading.answer.request.prompt[: reading.prefill.position])  # fmt: skip
        return over

    def _admit(self) -> list[Answer]:
        """Start the prefill of answers for which there is room; return those that are refused."""
        self._memory.make_room(0, self._prefixes)  # running answers have grown
        while self._waiting and self.running < self._options.max_batch:
            answer = self._waiting[0].answer
            unread = [reading.answer.request for reading in self._prompts.reading]
            others = [*(one.request for one in self._answers.values()), *unread]
            if not self._memory.has_room(answer.request, others, len(unread), self._prefixes):
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
        decoder = model.decoder(options, job.shape or PLAIN)
        key = GroupKey.of(options, job.shape, model.drafter)
        group = self._groups.get(key)
        if group is None:
            group = Group(decoder, job.shape, model.tuning, options.method)
            self._groups[key] = group
        else:
            group.begin_answer()
        row = Row(
            answer.read,
            len(prompt),
            None if decoder.lookup is None else TextIndex(decoder.lookup, ()),
            answer.constraint,
            learns=answer.constraint is None and not changes_logits(options),
        )
        others = min(self.running + len(self._waiting), self._options.max_batch - 1)
        shape = group.batch.first_shape(row, 1 + others)
        found = self._prefixes.take(prompt, decoder.drafter) if options.cache_prompt else None
        cache, start = found or (decoder.new_cache(), 0)
        parked = shape == PLAIN
        prefill = Prefill(model.target, decoder.drafter, cache, start, [prompt], parked)
        answer.tally = Tally(len(prompt), start, automatic=group.automatic)
        self._prompts.reading.append(Reading(answer, group, decoder, prefill, row, shape))

    def _start(self, reading: Reading) -> None:
        """Choose the first token of an answer, and add the answer to its batch."""
        answer, options = reading.answer, reading.answer.request.options
        seed = secrets.randbits(63) if options.seed is None else options.seed
        keys, prompt = sequence_keys(seed), answer.request.prompt
        try:
            state, output = reading.decoder.first(
                reading.prefill, [prompt], keys, reading.shape, [answer.constraint]
            )
        except RedrafterError as error:
            answer.error = error
            self._prompts.reading.append(reading)  # to be dropped
            return
        reading.group.batch.join(reading.row, state, output)
        self._answers[reading.row] = answer
        self._memory.learn(reading.prefill.cache)

    def _advance(self, paused: bool) -> list[Answer]:
        """Take a step of every batch; return the answers that are over."""
        over = []
        groups = [group for group in self._groups.values() if group.batch.rows]
        for group in groups:
            for row in group.batch.rows:
                row.done = self._answers[row].over
            advanced = group.advance()
            if paused or len(groups) > 1:
                group.batch.skip_timing()
            for row, cache in advanced.ended:
                answer = self._answers.pop(row)
                over.append(answer)
                if answer.error is None:
                    self._keep(answer, group.decoder, cache, answer.tokens)
        return over

    def _keep(
        self, answer: Answer, decoder: Decoder, cache: SequenceCache, tokens: Sequence[int]
    ) -> None:
        """Keep an answer's cache for prompts that share a prefix with it.

        A drafter that reads the target's features is given those that it missed, for they are not
        kept. Others read the tokens again if they draft for such a prompt.
        """
        if answer.request.options.cache_prompt and tokens:
            if decoder.drafter is not None and decoder.drafter.features.any:
                cache.catch_up(decoder.drafter)
            cache.flush()
            self._prefixes.keep(cache, tokens, decoder.drafter)

    def _close_round(self, over: Sequence[Answer]) -> None:
        """Record and remove empty groups, and tell the callers of the answers that are over.

        A measurement comes last, so that no caller waits for it.
        """
        used = {id(reading.group) for reading in self._prompts.reading}
        empty = {
            key: group
            for key, group in self._groups.items()
            if not group.batch.rows and id(group) not in used
        }
        for key, group in empty.items():
            del self._groups[key]
            group.record()
        if self.idle and self._wired is not None:
            self._wired.close()
            self._wired = None
        if self.idle:
            BLAS.use_all_cores()  # whatever computes next in this process expects them
        for answer in over:
            answer.end()
            self._open.discard(answer)
        if self.idle:
            for group in empty.values():
                group.measure()
