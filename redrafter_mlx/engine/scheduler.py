"""Many answers, one model: admits them, reads their prompts in chunks, and decodes them in batches.

One round reads a chunk of each prompt, as long as running answers can wait, and takes one step of
every batch. Chunks are submitted first. While the device computes them, the host reads the results
of each batch's previous step.
"""

from __future__ import annotations

import logging
import secrets
import time
from collections.abc import Sequence
from contextlib import ExitStack

import mlx.core as mx

from redrafter_mlx.config import PLAIN
from redrafter_mlx.decoding.cache.prefix_cache import PrefixCache
from redrafter_mlx.decoding.cache.prefix_store import PrefixStore
from redrafter_mlx.decoding.pipeline import Pipeline
from redrafter_mlx.decoding.sequence import Status
from redrafter_mlx.decoding.step import Prefill
from redrafter_mlx.engine.choices import Batches
from redrafter_mlx.engine.memory import MemoryBudget
from redrafter_mlx.engine.options import EngineOptions
from redrafter_mlx.engine.prompts.on_disk import EarlierOnDisk
from redrafter_mlx.engine.prompts.reading import Prefixes, PromptReader
from redrafter_mlx.engine.request import Answer
from redrafter_mlx.errors import RedrafterError
from redrafter_mlx.learning.keeper import TextKeeper
from redrafter_mlx.speculation.sampling import sequence_keys
from redrafter_mlx.target_model.model import Target
from redrafter_mlx.tuning.tuner import Tuner

LOG = logging.getLogger("redrafter_mlx.engine")

_PAUSE = 0.005
"""Seconds of a round in which every answer waits for its caller."""


class Scheduler:
    """Schedules the answers of one model. Only the engine's thread uses it."""

    def __init__(
        self,
        target: Target,
        tuning: Tuner | None,
        options: EngineOptions,
        memory: MemoryBudget,
        store: PrefixStore | None = None,
        keeper: TextKeeper | None = None,
        earlier: EarlierOnDisk | None = None,
    ) -> None:
        self._target, self._tuning, self._keeper = target, tuning, keeper
        self._options, self.memory = options, memory
        self.prefixes = Prefixes(self.memory.prefix_bytes, store)
        self.earlier = earlier
        self.memory.pool.add(self)
        self._open: set[Answer] = set()  # all that have not been told of their end
        self._waiting: list[Answer] = []
        self._prompts = PromptReader()
        self._batches = Batches(tuning)
        self._running: list[Answer] = []  # that are decoded, oldest first
        self._in_use: ExitStack | None = None

    @property
    def waiting(self) -> int:
        """Number of answers that are not admitted yet."""
        return len(self._waiting)

    @property
    def running(self) -> int:
        """Number of answers that were admitted and are not over."""
        return len(self._prompts.reading) + len(self._running)

    @property
    def kept(self) -> PrefixCache:
        """Texts that are kept for later prompts."""
        return self.prefixes.cache

    @property
    def idle(self) -> bool:
        return not self._waiting and not self.running

    def add(self, answer: Answer) -> None:
        """Queue an answer; it begins when there is room, and is refused if there never can be."""
        answer.error = self.memory.refusal(answer.request)
        self._open.add(answer)
        self._waiting.append(answer)
        for other in self._prompts.reading:
            self.prefixes.await_prefix(answer, other)

    def work(self, alone: bool = True) -> None:
        """Run one round, and tell the caller of every answer that it ended.

        alone: whether no other engine computes in between, so that steps may be timed
        """
        if self._in_use is None:
            self._in_use = ExitStack()
            self._in_use.enter_context(self._target.in_use())
        all_wait = self._update_statuses()
        with self._target.lock:
            over = self._drop() + self._admit()
            # Nobody whose prompt was read waits for another chunk before the first token.
            joined = Status.PREFILL in [answer.status for answer in self._running]
            read = [] if joined else self._prompts.read(alone=not self._running)
            over += self._advance(paused=bool(read) or not alone)
            batches = self._batches.pipelines.values()
            read_at = max([batch.read_at for batch in batches], default=0.0)
            self.prefixes.keep_awaited(read)
            for answer in self._prompts.end_round(read, read_at):
                self._start(answer)
        self._close_round(over)
        if all_wait or (self._waiting and not self.running):
            time.sleep(_PAUSE)  # others may use the model, or free memory, meanwhile

    def fail(self, error: Exception) -> None:
        """End every answer with an error; the scheduler cannot be used afterwards."""
        for answer in self._open:
            answer.end(error)
        if self._in_use is not None:
            self._in_use.close()

    def _drop(self) -> list[Answer]:
        """Drop and return the answers that ended before their first token."""
        over, waiting = list[Answer](), list[Answer]()
        for answer in self._waiting:  # asked once: callers may cancel meanwhile
            (over if answer.over else waiting).append(answer)
        self._waiting = waiting
        for answer in [answer for answer in self._prompts.reading if answer.over]:
            self._prompts.reading.remove(answer)
            over.append(answer)
            if answer.error is None:
                self.prefixes.keep_prefill(answer)
        return over

    def _admit(self) -> list[Answer]:
        """Start the prefill of answers for which there is room; return those that are refused."""
        self.memory.make_room(0, self.prefixes.cache)  # running answers have grown
        refused = []
        while self._waiting and self.running < self._options.max_batch:
            answer = next((one for one in self._waiting if not one.awaits_prefix), None)
            if answer is None:
                break
            room = self._has_room(answer)
            waits = self.running or self.memory.pool.may_free(self)
            if not (room or waits):
                mx.synchronize()  # a step that was submitted ahead holds the last answer's memory
                room = self._has_room(answer)
            if room:
                self._waiting.remove(answer)
                try:
                    self._begin(answer)
                except RedrafterError as error:
                    answer.error = error
                    refused.append(answer)
                continue
            answer.error = self.memory.refusal(answer.request)  # the bytes of a slot are known now
            if answer.error is None and waits:
                break
            answer.error = answer.error or self.memory.busy(answer.request)
            self._waiting.remove(answer)
            refused.append(answer)
        return refused

    def _has_room(self, answer: Answer) -> bool:
        """Whether an answer can begin now; cached prefixes are dropped to make room.

        None is dropped in vain, and the prefix that the answer needs only after all others.
        """
        memory, request = self.memory, answer.request
        running = [memory.slots(one.request, one.committed) for one in self._running]
        unread = [memory.slots(one.request) for one in self._prompts.reading]
        needed = memory.needed(memory.slots(request), [*running, *unread], len(unread))
        excess = memory.excess(needed)
        if self.running and excess > memory.pool.kept_bytes:
            return False
        if excess > 0:
            self.prefixes.touch(answer)
        return memory.make_room(needed, self.prefixes.cache)

    def _begin(self, answer: Answer) -> None:
        answer.pipeline, answer.status = self._batches.batch_of(answer), Status.PREFILL
        others = min(self.running + len(self._waiting), self._options.max_batch - 1)
        answer.first_shape = answer.pipeline.first_shape(answer, 1 + others)
        cache, start = self.prefixes.take(answer)
        drafts = answer.first_shape != PLAIN
        drafter, prompts = answer.decoder.drafter, [answer.request.prompt]
        answer.prefill = Prefill(self._target, drafter, cache, start, prompts, drafts)
        answer.tally.start(cached=start)
        self._prompts.reading.append(answer)
        for other in self._waiting:
            self.prefixes.await_prefix(other, answer)

    def _start(self, answer: Answer) -> None:
        """Choose the first token of an answer, and add the answer to its batch."""
        options, prompt = answer.request.options, answer.request.prompt
        seed = secrets.randbits(63) if options.seed is None else options.seed
        try:
            keys, masks = sequence_keys(seed), [answer.constraint]
            first = answer.decoder.first(answer.prefill, [prompt], keys, answer.first_shape, masks)
        except RedrafterError as error:
            answer.error = error
            self._prompts.reading.append(answer)  # to be dropped
            return
        answer.pipeline.join(answer, *first)
        self._running.append(answer)
        self.memory.learn(answer.prefill.cache)
        del answer.prefill  # the batch holds its cache

    def _advance(self, paused: bool) -> list[Answer]:
        """Take a step of every batch; return the answers that are over."""
        over = []
        batches = [batch for batch in self._batches.pipelines.values() if batch.sequences]
        slots = 0
        for batch in batches:
            slots += (growth := batch.growth)
            if growth and not self.memory.can_grow(slots, self.prefixes.cache):
                self._end_longest()
        for batch in batches:
            try:
                advanced = batch.advance()
            except RedrafterError as error:
                over += self._give_up(batch, error)
                continue
            if paused or len(batches) > 1:
                batch.skip_timing()
            caches = {id(sequence): cache for sequence, cache in advanced.ended}
            for answer in [answer for answer in self._running if id(answer) in caches]:
                cache = caches[id(answer)]
                self._running.remove(answer)
                over.append(answer)
                if answer.error is None:
                    self.prefixes.keep_answer(answer, cache)
        return over

    def _update_statuses(self) -> bool:
        """Finish the answers that are over, and pause those whose callers read too slowly.

        Returns whether there is nothing to do but to wait for them. Where all would pause, they go
        on if a caller waits for another answer, which has no place: it may be their own, and read
        all of them in turn.
        """
        for answer in self._running:
            answer.update_status()
        paused = [answer for answer in self._running if answer.status is Status.PAUSED]
        if not paused or self._prompts.reading or len(paused) < len(self._running):
            return False
        if any(answer.awaited for answer in self._waiting):
            for answer in paused:
                answer.status = Status.RUNNING
            return False
        return True

    def _give_up(self, batch: Pipeline, error: RedrafterError) -> list[Answer]:
        """End the answers of a batch that cannot go on, as their drafter failed; return them."""
        batch.abandon()
        failed = [answer for answer in self._running if answer.pipeline is batch]
        self._running = [answer for answer in self._running if answer.pipeline is not batch]
        for answer in failed:
            answer.error = answer.error or (None if answer.over else error)
        return failed

    def _end_longest(self) -> None:
        """End the longest running answer with its next token: no memory is left to grow."""
        running = [a for a in self._running if a.status in (Status.RUNNING, Status.PREFILL)]
        if running:
            longest = max(running, key=lambda answer: answer.committed)
            longest.text.end_soon()
            LOG.warning("memory ran out; the longest answer ends at %d tokens", longest.committed)

    def _close_round(self, over: Sequence[Answer]) -> None:
        """Remove empty batches, and tell the callers of the answers that are over.

        What was learned is recorded afterwards, so that no caller waits for it, and the keeper gets
        the answers that may be kept. An idle engine returns unused memory to the system.
        """
        used = [answer.pipeline for answer in (*self._prompts.reading, *self._running)]
        ended = self._batches.remove_unused(used)
        idle = self.idle
        if idle and self._in_use is not None:
            self._in_use.close()
            self._in_use = None
        for answer in over:
            if self._keeper is not None:
                answer.offer_to(self._keeper)  # before the end, for a caller that counts them
            answer.end()
            self._open.discard(answer)
        if self._tuning is not None:
            for policy in ended:
                self._tuning.record(policy)
        if over and self.earlier is not None:
            self.earlier.save()
        if idle:
            mx.clear_cache()
