"""A conversation: its messages, turn by turn."""

from __future__ import annotations

import threading
from collections.abc import Callable, Generator, Mapping
from typing import Protocol

from mlx_lm.tokenizer_utils import TokenizerWrapper

from redrafter_mlx.config import GenerationOptions
from redrafter_mlx.engine.prompts.prompt import Prompt
from redrafter_mlx.engine.request import Request
from redrafter_mlx.errors import BadInputError
from redrafter_mlx.response import Response
from redrafter_mlx.weights.text.markup import OutputParser, markup_of


class Engine(Protocol):
    """The part of the engine that a session uses."""

    @property
    def tokenizer(self) -> TokenizerWrapper: ...

    def chosen_options(
        self, options: GenerationOptions | None, overrides: Mapping[str, object]
    ) -> GenerationOptions: ...

    def encode(self, prompt: Prompt, *, thinking: bool | None = None) -> list[int]: ...

    def respond(self, request: Request) -> Generator[Response, None, None]: ...


class Session:
    """One conversation; the engine keeps the cache of earlier turns, and reads only new text.

    Any thread may use it. One turn is answered at a time; a second one is refused meanwhile.

    system:   the system message; None uses the template's default
    messages: the turns so far, `role` "user" or "assistant"; the list may be replaced
    ends_between_tokens: whether an answer should be ended between two tokens, for its cache's sake
    """

    ends_between_tokens = True

    def __init__(self, engine: Engine, system: str | None = None) -> None:
        self._engine = engine
        self._answering = threading.Lock()
        self.system = system
        self.messages: list[dict[str, str]] = []

    def stream(
        self,
        text: str,
        *,
        options: GenerationOptions | None = None,
        on_prefill: Callable[[int, int], None] | None = None,
        **overrides: object,
    ) -> Generator[Response, None, None]:
        """Answer the next turn, one response per token.

        The turn starts when its first response is requested; its prompt holds the turns that have
        ended by then. The message and its answer join the conversation when the answer ends. If the
        answer is closed early or interrupted, the text so far joins; without any text, nothing
        joins. Nor does reasoning: a template may only cut out what has an end.

        Args:
          on_prefill: called in the engine's thread with the number of prompt tokens read so far,
            earlier turns included, and their total number
        Raises:
          BadInputError: at once for an unusable text or options; at the first response if another
            turn is being answered. The conversation stays as it was
        """
        if not isinstance(text, str):
            raise BadInputError(f"the message is {text!r:.80}; give a string")
        if not text.strip():
            raise BadInputError("the message is empty; write something")
        chosen = self._engine.chosen_options(options, overrides)
        asked = {"role": "user", "content": text}
        self._prompt(asked, chosen)
        return self._turn(asked, chosen, on_prefill)

    def clear(self) -> None:
        """Forget all turns; the system message stays."""
        self.messages = []

    def _prompt(self, asked: dict[str, str], options: GenerationOptions) -> list[int]:
        """Return the token ids of the conversation so far and the message `asked`."""
        system = [] if self.system is None else [{"role": "system", "content": self.system}]
        return self._engine.encode([*system, *self.messages, asked], thinking=options.thinking)

    def _turn(
        self,
        asked: dict[str, str],
        options: GenerationOptions,
        on_prefill: Callable[[int, int], None] | None,
    ) -> Generator[Response, None, None]:
        if not self._answering.acquire(blocking=False):
            raise BadInputError(
                "another turn of this session is being answered; read it to its end or close it"
            )
        try:
            turns, answer, last = self.messages, "", None
            prompt = tuple(self._prompt(asked, options))
            parser = OutputParser(markup_of(self._engine.tokenizer, prompt), tools=[])
            request = Request(prompt, options, on_prefill=on_prefill)
            responses = self._engine.respond(request)
            try:
                for response in responses:
                    answer += "".join(delta.content for delta in parser.feed(response.text))
                    if response.finish_reason is None:
                        yield response
                    else:
                        last = response
            finally:
                responses.close()
                answer += "".join(delta.content for delta in parser.finish())
                if last is not None or answer:
                    turns += [asked, {"role": "assistant", "content": answer}]
        finally:
            self._answering.release()
        if last is not None:
            yield last  # the next turn may begin when its finish reason is read
