"""The library's main class: a target with its drafter, answering prompts token by token."""

from __future__ import annotations

import contextlib
import time
from collections.abc import AsyncGenerator, Callable, Generator, Mapping, Sequence

from redrafter_mlx.config import PLAIN, GenerationOptions
from redrafter_mlx.decoding.constraint import Constraint
from redrafter_mlx.engine.prompts.prompt import Prompt
from redrafter_mlx.engine.request import Request
from redrafter_mlx.engine.request_engine import RequestEngine
from redrafter_mlx.engine.session import Session
from redrafter_mlx.errors import BadInputError
from redrafter_mlx.response import Completion, Response

_QUESTION, _SECONDS = "How do rainbows form?", 10.0
"""The question with whose answer a drafter is tried, and how long that may take."""


class Redrafter(RequestEngine):
    """A target, its tokenizer and its drafter. Made by `load` or from an mlx-lm pair.

    Any number of threads may call it. One thread, the engine's, computes all answers; those that
    run at the same time are decoded in batches.
    """

    @property
    def untried(self) -> bool:
        """Whether the next text begins with a trial of the drafter, see `try_drafter`."""
        return self.tuning is not None and bool(self.tuning.trial)

    def warm_up(self) -> None:
        """Run every kernel once: those of a drafted step, and those of a plain one.

        Answers begin with either, and mix them. The first time, see `try_drafter`.
        """
        if self.try_drafter():
            return
        shape, plain = self.beam_shape, 4
        if shape != PLAIN:
            W, L = shape.width, shape.length
            self.generate([0], max_tokens=2, beam_width=W, beam_length=L, cache_prompt=False)
            plain = 2
        self.generate([0], max_tokens=plain, draft=False, cache_prompt=False)

    def try_drafter(self) -> bool:
        """Answer a question for a few steps, plain and drafted ones, if this was never done.

        What they take and what is accepted is kept for a model, a drafter and a machine, so that
        the first answer drafts as later ones do. Returns whether it was done now.
        """
        if self.tuning is None or not self.tuning.trial:
            return False
        end = time.perf_counter() + _SECONDS
        steps, prompt = len(self.tuning.trial), [0]
        with contextlib.suppress(BadInputError):  # where its template or its context refuses it
            prompt = self.encode(_QUESTION, raw=not self.tokenizer.has_chat_template)
        tokens = self.stream(prompt, max_tokens=8 * steps, cache_prompt=False)
        with contextlib.closing(tokens):
            for token in tokens:
                if token.steps >= steps or time.perf_counter() > end:
                    break
        return True

    def measure(self, done: Callable[[float], None] | None = None) -> None:
        """Measure what the choice of shapes needs, where answers are computed; see `Tuner`.

        Answers wait meanwhile. Interrupting it ends it at the next measurement.
        """
        super().measure(done)
        self.try_drafter()

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

    def chosen_options(
        self, options: GenerationOptions | None, overrides: Mapping[str, object]
    ) -> GenerationOptions:
        """Apply `overrides` to `options`; raises BadInputError for what this model cannot do."""
        return self.choices.options(options, overrides)

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
