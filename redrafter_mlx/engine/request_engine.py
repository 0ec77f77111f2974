"""A target with its drafter, answering requests: prompts that are token ids, with their options."""

from __future__ import annotations

import threading
import weakref
from collections.abc import AsyncGenerator, Callable, Generator, Sequence
from functools import cached_property, partial
from typing import NoReturn

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.tokenizer_utils import TokenizerWrapper
from transformers import PreTrainedTokenizerBase

from redrafter_mlx.config import PLAIN, BeamShape, GenerationOptions
from redrafter_mlx.decoding.text import AnswerText, TextStream, TokenText
from redrafter_mlx.distributed.mirror import Mirror, target_of
from redrafter_mlx.drafting.checked import bound
from redrafter_mlx.drafting.interface import Bindable
from redrafter_mlx.drafting.untrained.continuation import HostDrafter
from redrafter_mlx.engine.choices import Choices
from redrafter_mlx.engine.core import EngineCore, EngineStatus
from redrafter_mlx.engine.exactness import check_once
from redrafter_mlx.engine.memory import MemoryBudget
from redrafter_mlx.engine.options import EngineOptions
from redrafter_mlx.engine.prompts.on_disk import EarlierOnDisk, prefix_store
from redrafter_mlx.engine.prompts.prompt import PromptEncoder, context_length_of
from redrafter_mlx.engine.request import Answer, Request
from redrafter_mlx.engine.scheduler import Scheduler
from redrafter_mlx.engine.thread import Cancels, EngineThread, Listener
from redrafter_mlx.errors import BadInputError
from redrafter_mlx.learning.keeper import TextKeeper
from redrafter_mlx.response import Emit, Ended, Response
from redrafter_mlx.runtime.device import MLX_PROCESS, ModelLock
from redrafter_mlx.target_model.model import Target
from redrafter_mlx.target_model.source import TargetSource
from redrafter_mlx.tuning.tuner import Tuner


class RequestEngine:
    """The parts of a `Redrafter`, and how its thread answers requests.

    drafter_note: one line on the choice of a drafter: that there is none and what drafts instead,
                  which of several was taken, and which were skipped; None if it was unambiguous
    prompts:      encodes prompts that fit
    choices:      what the options of a request mean here
    drafter:      drafts on the device; None without a drafter
    host_drafters: add continuations to the drafts, such as copies of the text
    drafting:     the names of all, for people and records; None for plain decoding
    tuning:       auto-tuning: cost model and acceptance statistics; None for plain decoding and
                  for a static tree, where no shape is chosen
    keeper:       keeps the answers, see `load`; None keeps none
    """

    def __init__(
        self,
        model: nn.Module,
        tokenizer: TokenizerWrapper | PreTrainedTokenizerBase,
        drafter: Bindable | None = None,
        *,
        host_drafters: Sequence[HostDrafter] = (),
        source: TargetSource | None = None,
        drafter_note: str | None = None,
        engine: EngineOptions | None = None,
        target: Target | None = None,
        mirror: Mirror | None = None,
        thread: EngineThread | None = None,
        keeper: TextKeeper | None = None,
        prepare: Callable[[], float] | None = None,
    ) -> None:
        """`load` finds drafters by name; here they are objects.

        target: the model's, if it was made before; `Target(model, kv_bits=8)` quantises caches
        mirror: sends the target's calls to the other ranks; None if there are none
        thread: computes for other engines, too; by default this one has a thread of its own
        keeper: keeps the answers, for a drafter to learn from
        prepare: does a part of what is to be done while no answer runs, in the engine's thread, and
          returns the share that is done

        Raises UnsupportedModelError or MismatchError if model and drafter do not fit together,
        and ForkedProcessError after a fork.
        """
        MLX_PROCESS.check()
        wrapped = isinstance(tokenizer, TokenizerWrapper)
        self.tokenizer = tokenizer if wrapped else TokenizerWrapper(tokenizer)
        self.source = source
        self.model = model
        mx.eval(model.state)  # private arrays too: another thread could not evaluate them
        self.mirror = mirror
        target = target or target_of(model, mirror)
        self.drafter = None if drafter is None else bound(drafter, target, self.tokenizer)
        self.host_drafters = tuple(host_drafters)
        labels = [] if self.drafter is None else [self.drafter.label]
        labels += [one.name for one in self.host_drafters]
        self.drafting = " and ".join(labels) or None
        notes = [drafter_note, None if self.drafter is None else self.drafter.note]
        self.drafter_note = "; ".join(note for note in notes if note) or None
        self.target = (
            target if self.drafter is None else target.reading(self.drafter.features.layers)
        )
        self.tuning: Tuner | None = None
        if self.drafting is not None and (self.drafter is None or self.drafter.tree is None):
            self.tuning = Tuner(model, self.target, self.drafter)
        parts = self.target, self.drafter, self.host_drafters, self.drafting, self.tuning
        self.choices = Choices(*parts)
        self.limits = engine or EngineOptions()
        self.thread = thread or EngineThread()
        modules = () if self.drafter is None else self.drafter.modules
        self._memory = MemoryBudget(
            self.target,
            self.limits,
            modules,
            host_bytes=sum(one.bytes_per_token for one in self.host_drafters),
            kept_bytes=sum(one.kept_bytes for one in self.host_drafters),
            pool=self.thread.pool,
        )
        self.thread.pool.reserved = 0  # its weights are in memory now
        self.prompts = PromptEncoder(
            self.tokenizer, target.vocab_size, context_length_of(model, source), self._memory
        )
        store = prefix_store(self.limits, self.target, self.drafter)
        earlier = EarlierOnDisk(self.limits, self.target, self.host_drafters)
        self.keeper = keeper
        scheduler = partial(
            Scheduler,
            self.target,
            self.tuning,
            self.limits,
            self._memory,
            store,
            keeper,
            earlier,
        )
        idle = prepare and partial(_locked, self.target.lock, prepare)
        self.core = EngineCore(scheduler, self.target.lock, self.thread, idle)
        weakref.finalize(self, self.core.close)

    @property
    def status(self) -> EngineStatus:
        return self.core.status

    @property
    def context_length(self) -> int | None:
        """Maximum number of tokens of prompt and answer together; None without a limit."""
        return self.prompts.context_length

    def close(self) -> None:
        """Stop the engine; running answers end with EngineFailedError. May be called again."""
        self.core.close()

    @property
    def beam_shape(self) -> BeamShape:
        """Best assumed shape for this kind of machine, equal in every run; PLAIN without drafts."""
        return self.choices.assumed_shape

    def check(self) -> None:
        """Check that tree verification is exact for this model, see `check_once`.

        Raises UnsupportedModelError if it is not.
        """

        def check() -> None:
            with self.target.lock:
                # With caches of whole numbers: what is checked is the model's attention to trees.
                packed = self.target.packing is not None
                check_once(target_of(self.model, self.mirror) if packed else self.target)

        self.thread.run(check)

    def measure(self, done: Callable[[float], None] | None = None) -> None:
        """Measure what the choice of shapes needs, where answers are computed; see `Tuner`.

        Answers wait meanwhile. Interrupting it ends it at the next measurement.
        """
        tuning, interrupted = self.tuning, threading.Event()
        if tuning is None:
            return

        def report(share: float) -> None:
            if interrupted.is_set():
                raise KeyboardInterrupt
            if done is not None:
                done(share)

        self.thread.run(lambda: tuning.measure(report), interrupted)

    def fits(self, prompts: Sequence[Sequence[int]], options: GenerationOptions) -> bool:
        """Whether answers to all these prompts [tokens] fit in memory at once; none runs."""
        shape = self.choices.shape_of(options, len(prompts[0])) or self.beam_shape
        return self._memory.fits([Request(tuple(ids), options) for ids in prompts], shape.nodes)

    def respond(self, request: Request) -> Generator[Response, None, None]:
        """Yield the responses to one request."""
        return self.thread.listen(partial(self._begin, request))

    def arespond(self, request: Request) -> AsyncGenerator[Response, None]:
        """`respond` for asyncio."""
        return self.thread.alisten(partial(self._begin, request))

    def respond_all(
        self, requests: Sequence[Request]
    ) -> Generator[tuple[int, Response], None, None]:
        """Yield the responses to many requests, each with its request's index; see `batch`."""

        def begin(listener: Listener[tuple[int, Response]], cancels: Cancels) -> None:
            answers = [
                self._answer(request, _with_index(i, listener), lambda: listener.unread)
                for i, request in enumerate(requests)
            ]
            self.core.submit(answers, cancels)

        return self.thread.listen(begin)

    @cached_property
    def token_text(self) -> TokenText:
        """Decodes tokens; made once, since another thread may be encoding a long prompt."""
        return TokenText(self.tokenizer)

    def __reduce__(self) -> NoReturn:
        """Refuse to be pickled or copied."""
        raise BadInputError(
            "a model is neither pickled nor copied: it has a thread and a device's memory; load it "
            "in each process, and share one object between threads"
        )

    def _begin(self, request: Request, listener: Listener[Response], cancels: Cancels) -> None:
        self.core.submit([self._answer(request, listener, lambda: listener.unread)], cancels)

    def _answer(self, request: Request, emit: Emit[Response], unread: Callable[[], int]) -> Answer:
        """Return the answer to a request, not begun."""
        options, prompt = request.options, request.prompt
        decoded, eos = TextStream(self.token_text), self.tokenizer.eos_token_ids
        room = self.prompts.room_for(prompt, options.max_tokens)
        shape = self.choices.shape_of(options, len(prompt))
        text = AnswerText(decoded, eos, options.stop, room, request.constraint)
        decoder = self.choices.decoder(options, shape or PLAIN, request.pack)
        return Answer(request, text, decoder, shape, emit, unread)


def _with_index(i: int, emit: Emit[tuple[int, Response]]) -> Emit[Response]:
    """Return what emits each response together with its prompt's index."""
    return lambda event: emit(event if isinstance(event, Ended) else (i, event))


def _locked(lock: ModelLock, part: Callable[[], float]) -> float:
    with lock:
        return part()
