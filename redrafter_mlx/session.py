"""A conversation: messages, and the keys and values that make the next turn quick to read."""

from __future__ import annotations

from collections.abc import Generator

from redrafter_mlx.config import GenerationOptions
from redrafter_mlx.errors import BadInputError
from redrafter_mlx.generate import Redrafter
from redrafter_mlx.memory import PrefixMemory
from redrafter_mlx.response import Response


class Session:
    """Turns of one conversation; only what changed since the last turn is read again.

    system:   the system message, or None for the template's own default
    messages: the turns so far, `role` "user" or "assistant"; may be replaced as a whole
    """

    def __init__(self, redrafter: Redrafter, system: str | None = None) -> None:
        self._redrafter = redrafter
        self._memory = PrefixMemory()
        self.system = system
        self.messages: list[dict[str, str]] = []

    def stream(
        self, text: str, *, options: GenerationOptions | None = None, **overrides: object
    ) -> Generator[Response, None, None]:
        """The next turn, one response a token.

        The user's message joins the conversation with the first token, the answer when it ends;
        closed early or interrupted, with what was said until then.

        Raises:
          BadInputError: at once, for options or a text that cannot be used; nothing is changed
        """
        if not text.strip():
            raise BadInputError("the message is empty; write something")
        chosen = self._redrafter.chosen_options(options, overrides)
        asked = {"role": "user", "content": text}
        system = [] if self.system is None else [{"role": "system", "content": self.system}]
        prompt = self._redrafter.encode([*system, *self.messages, asked])
        return self._turn(asked, prompt, chosen)

    def clear(self) -> None:
        """Forget all turns; the system message stays."""
        self.messages = []
        self._memory.clear()

    def _turn(
        self, asked: dict[str, str], prompt: list[int], options: GenerationOptions
    ) -> Generator[Response, None, None]:
        said: list[str] = []
        turns = self.messages
        responses = self._redrafter.respond(prompt, options, self._memory)
        try:
            for response in responses:
                said.append(response.text)
                yield response
        finally:
            responses.close()
            turns += [asked, {"role": "assistant", "content": "".join(said)}]
