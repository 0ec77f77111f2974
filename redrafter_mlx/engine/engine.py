"""The library's main class: a target with its drafter, answering prompts token by token."""

from __future__ import annotations

import threading
import weakref
from collections.abc import AsyncGenerator, Callable, Generator, Mapping, Sequence
from functools import cached_property, partial
from typing import NoReturn

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.tokenizer_utils import TokenizerWrapper
from transformers import PreTrainedTokenizerBase

from redrafter_mlx.config import PLAIN, BeamShape, GenerationOptions
from redrafter_mlx.decoding.constraint import Constraint
from redrafter_mlx.decoding.text import AnswerText, TokenText
from redrafter_mlx.distributed.mirror import Mirror, target_of
from redrafter_mlx.drafting.checked import bound
from redrafter_mlx.drafting.continuation import HostDrafter
from redrafter_mlx.drafting.interface import Bindable
from redrafter_mlx.engine.choices import Choices
from redrafter_mlx.engine.core import EngineCore, EngineStatus
from redrafter_mlx.engine.exactness import check_once
from redrafter_mlx.engine.memory import MemoryBudget
from redrafter_mlx.engine.options import EngineOptions
from redrafter_mlx.engine.prefixes import EarlierOnDisk, prefix_store
from redrafter_mlx.engine.prompt import Prompt, PromptEncoder, context_length_of
from redrafter_mlx.engine.request import Answer, Request
from redrafter_mlx.engine.scheduler import Scheduler
from redrafter_mlx.engine.session import Session
from redrafter_mlx.engine.thread import Cancels, Emit, Ended, EngineThread, Listener
from redrafter_mlx.errors import BadInputError
from redrafter_mlx.learning.keeper import TextKeeper
from redrafter_mlx.response import Completion, Response
from redrafter_mlx.runtime.process import MLX_PROCESS
from redrafter_mlx.target_model.model import Target
from redrafter_mlx.target_model.source import TargetSource
from redrafter_mlx.tuning.tuner import Tuner


class Redrafter:
    """A target, its tokenizer and its drafter. Made by `load` or from an mlx-lm pair.

    Any number of threads may call it. One thread, the engine's, computes all answers; those that
    run at the same time are decoded in batches.

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
        self.core = EngineCore(scheduler, self.target.lock, self.thread, prepare)
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

    @property
    def costs_assumed(self) -> bool:
        """Whether shapes are chosen by costs of which some are not measured on this machine."""
        return self.tuning is not None and self.tuning.costs.assumed

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

    def warm_up(self) -> None:
        """Run every kernel once: those of a drafted step, and those of a plain one.

        Answers begin with either, and mix them.
        """
        shape, plain = self.beam_shape, 4
        if shape != PLAIN:
            W, L = shape.width, shape.length
            self.generate([0], max_tokens=2, beam_width=W, beam_length=L, cache_prompt=False)
            plain = 2
        self.generate([0], max_tokens=plain, draft=False, cache_prompt=False)

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

    def stream(
        self,
        prompt: Prompt,
        *,
        raw: bool = False,
        options: GenerationOptions | None = None,
        constraint: Constraint | None = None,
        on_prefill: Callable[[int, int], None] | None = None,
        **overrides: object,
    ) -> Generator[Response, None, None]:
        """Answer a prompt, one response per token.

        The request starts when the first response is requested. The answer ends with the finish
        reason "length" at `max_tokens`, at the end of the model's context, or if memory runs out;
        the log says so then. Closing the generator
        ends it at the next step, or at the next chunk of its prompt.

        Args:
          prompt: a user's message, a list of messages with `role` and `content`, or token ids
          raw: continue the prompt: a string is used as it is, without the chat template
          options: see GenerationOptions; `overrides` are its fields by name
          constraint: the grammar of this answer, made for it alone
          on_prefill: called in the engine's thread with the number of prompt tokens read so far,
            and their total number
        Raises:
          BadInputError: at once for unusable options or prompt; later if the constraint allows no
            token, or if the prompt can never fit into memory
          BusyError: with the first response, if the prompt does not fit into memory now
          EngineFailedError: if the engine failed or was closed; a failed engine restarts with the
            next request
        """
        chosen = self.chosen_options(options, overrides)
        return self.respond(self._request(prompt, chosen, raw, constraint, on_prefill))

    def generate(
        self,
        prompt: Prompt,
        *,
        raw: bool = False,
        options: GenerationOptions | None = None,
        constraint: Constraint | None = None,
        **overrides: object,
    ) -> Completion:
        """Return the whole answer at once; as `stream`, without `on_prefill`."""
        request = self._request(prompt, self.chosen_options(options, overrides), raw, constraint)
        return Completion.of(list(request.prompt), list(self.respond(request)))

    def astream(
        self,
        prompt: Prompt,
        *,
        raw: bool = False,
        options: GenerationOptions | None = None,
        constraint: Constraint | None = None,
        on_prefill: Callable[[int, int], None] | None = None,
        **overrides: object,
    ) -> AsyncGenerator[Response, None]:
        """`stream` for asyncio; cancelling it ends the answer at its next step."""
        chosen = self.chosen_options(options, overrides)
        return self.arespond(self._request(prompt, chosen, raw, constraint, on_prefill))

    def batch(
        self,
        prompts: Sequence[Prompt],
        *,
        raw: bool = False,
        options: GenerationOptions | None = None,
        **overrides: object,
    ) -> Generator[tuple[int, Response], None, None]:
        """Answer many prompts at once; yield each response with the index of its prompt.

        `raw`, options and errors as in `stream`; the first error ends all answers. Closing the
        iterator ends them too.
        """
        if isinstance(prompts, str):
            raise BadInputError("prompts is a string; give a list of prompts")
        chosen = self.chosen_options(options, overrides)
        return self.respond_all([self._request(prompt, chosen, raw) for prompt in prompts])

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

    def __reduce__(self) -> NoReturn:
        """Refuse to be pickled or copied."""
        raise BadInputError(
            "a model is neither pickled nor copied: it has a thread and a device's memory; load it "
            "in each process, and share one object between threads"
        )

    def session(self, system: str | None = None) -> Session:
        """Return a conversation that keeps its KV cache from turn to turn."""
        return Session(self, system)

    def encode(
        self, prompt: Prompt, *, raw: bool = False, thinking: bool | None = None
    ) -> list[int]:
        """Return the token ids of any kind of prompt; `thinking` as in GenerationOptions.

        Raises BadInputError if there are none, or if the model's context has no room left for an
        answer.
        """
        return self.prompts.encode(prompt, raw=raw, thinking=thinking)

    @cached_property
    def token_text(self) -> TokenText:
        """Decodes tokens; made once, since another thread may be encoding a long prompt."""
        return TokenText(self.tokenizer)

    def chosen_options(
        self, options: GenerationOptions | None, overrides: Mapping[str, object]
    ) -> GenerationOptions:
        """Apply `overrides` to `options`; raises BadInputError for what this model cannot do."""
        return self.choices.options(options, overrides)

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

    def _request(
        self,
        prompt: Prompt,
        options: GenerationOptions,
        raw: bool,
        constraint: Constraint | None = None,
        on_prefill: Callable[[int, int], None] | None = None,
    ) -> Request:
        """Return a request for one answer; raises BadInputError for an unusable prompt."""
        ids = self.encode(prompt, raw=raw, thinking=options.thinking)
        return Request(tuple(ids), options, constraint, on_prefill)

    def _begin(self, request: Request, listener: Listener[Response], cancels: Cancels) -> None:
        self.core.submit([self._answer(request, listener, lambda: listener.unread)], cancels)

    def _answer(self, request: Request, emit: Emit[Response], unread: Callable[[], int]) -> Answer:
        """Return the answer to a request, not begun."""
        options, prompt = request.options, request.prompt
        decoded, eos = self.token_text.stream(), self.tokenizer.eos_token_ids
        room = self.prompts.room_for(prompt, options.max_tokens)
        shape = self.choices.shape_of(options, len(prompt))
        text = AnswerText(decoded, eos, options.stop, room, request.constraint)
        decoder = self.choices.decoder(options, shape or PLAIN, request.pack)
        return Answer(request, text, decoder, shape, emit, unread)


def _with_index(i: int, emit: Emit[tuple[int, Response]]) -> Emit[Response]:
    """Return what emits each response together with its prompt's index."""
    return lambda event: emit(event if isinstance(event, Ended) else (i, event))
