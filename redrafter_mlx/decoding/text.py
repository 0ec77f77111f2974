"""From tokens to the visible text, cut at end-of-text and at stop strings."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from mlx_lm.tokenizer_utils import TokenizerWrapper

from redrafter_mlx.decoding.constraint import Constraint
from redrafter_mlx.weights.text.chat import encode_text

_CHARACTER_BYTES = 4
"""Maximum number of bytes of a character in UTF-8, and so of tokens that it takes."""

_INCOMPLETE = "\N{REPLACEMENT CHARACTER}"


class TokenText:
    """Decodes tokens as they read after other text, by the tokenizer's own decoder.

    mlx-lm's streaming detokenizers decode by tables instead: they drop a space at the start, write
    NUL as another character, and fail or write "!" for ids that the tokenizer does not have.
    """

    def __init__(self, tokenizer: TokenizerWrapper) -> None:
        self._tokenizer = tokenizer
        self._before, self._skipped = encode_text(tokenizer, "a")[-1], 0
        self._skipped = len(self.of([]))

    def of(self, tokens: Sequence[int]) -> str:
        """Return the tokens' text with its leading space, which decoders drop at a text's start.

        Bytes that are not whole characters become U+FFFD; an id that the tokenizer does not have,
        as in a padded vocabulary, has no text.
        """
        text = self._tokenizer.decode([self._before, *tokens], clean_up_tokenization_spaces=False)
        return str(text)[self._skipped :]


class TextStream:
    """The text of one answer, token by token; holds back the bytes of an unfinished character."""

    def __init__(self, token_text: TokenText) -> None:
        self._text = token_text
        self._held: list[int] = []

    def add(self, token: int) -> str:
        """Add the next token; return the text that it completes."""
        self._held.append(token)
        text = self._text.of(self._held)
        if not text.endswith(_INCOMPLETE):
            self._held = []
            return text
        for start in range(1, len(self._held)):  # a decoder may give up a whole run of bytes
            tail = self._text.of(self._held[start:])
            if tail and not tail.endswith(_INCOMPLETE):
                broken, self._held = self._held[:start], []
                return self._text.of(broken) + tail
        if len(self._held) > _CHARACTER_BYTES:  # nothing can complete the first one any more
            return self._text.of([self._held.pop(0)])
        return ""

    def finish(self) -> str:
        """Return the text that is still held back, once no more tokens come."""
        held, self._held = self._held, []
        return self._text.of(held)


class StopScanner:
    """Passes text on until a stop string appears, and holds back text that could become one.

    A stop string is found wherever its characters fall: inside a token, across tokens, across
    steps. The text before it is emitted; the string itself and the text after it are not.

    found: the first stop string in the text; None if there is none so far
    """

    def __init__(self, stop: Sequence[str]) -> None:
        self._stop = tuple(stop)
        self._held = ""
        self.found: str | None = None

    def feed(self, text: str) -> str:
        """Add text; return the part of the held text that certainly precedes every stop string."""
        self._held += text
        found = [(at, s) for s in self._stop if (at := self._held.find(s)) >= 0]
        if found:
            at, self.found = min(found)
            self._held = self._held[:at]
            return self.flush()
        keep = max((_overlap(self._held, s) for s in self._stop), default=0)
        ready = self._held[: len(self._held) - keep]
        self._held = self._held[len(self._held) - keep :]
        return ready

    def flush(self) -> str:
        """Return the text that is still held back, once no more text can come."""
        ready, self._held = self._held, ""
        return ready


class AnswerText:
    """The text of one answer, and where it ends.

    tokens:        the answer's tokens, the ending token included
    finish_reason: None until the end; "stop" at end-of-text, a stop string or the end of the
                   constraint, which every token advances; "length" at max_tokens or after
                   `end_soon`
    """

    def __init__(
        self,
        decoded: TextStream,
        eos: Collection[int],
        stop: Sequence[str],
        max_tokens: int,
        constraint: Constraint | None = None,
    ) -> None:
        self._decoded = decoded
        self._eos = eos
        self._scanner = StopScanner(stop)
        self._max_tokens = max_tokens
        self._constraint = constraint
        self.tokens: list[int] = []
        self.finish_reason: str | None = None

    def add(self, token: int) -> str:
        """Add the next token; return the text that becomes certain."""
        assert self.finish_reason is None, "the answer has ended"
        self.tokens.append(token)
        if token in self._eos:
            self.finish_reason = "stop"
            return self._finish()
        if self._constraint is not None:
            self._constraint.advance(token)
        text = self._scanner.feed(self._decoded.add(token))
        if self.stop is not None:
            self.finish_reason = "stop"
        elif self._constraint is not None and self._constraint.ended:
            self.finish_reason = "stop"
            text += self._finish()
        elif len(self.tokens) == self._max_tokens:
            self.finish_reason = "length"
            text += self._finish()
        return text

    @property
    def stop(self) -> str | None:
        """The stop string that ended the answer; None if there was none."""
        return self._scanner.found

    @property
    def ends_next(self) -> bool:
        """Whether the next token is the last one, whatever it is."""
        return len(self.tokens) + 1 >= self._max_tokens

    def end_soon(self) -> None:
        """Let the next token be the last one."""
        self._max_tokens = len(self.tokens) + 1

    def _finish(self) -> str:
        """Flush the decoded text and the scanner; a stop string may still appear in that text."""
        text = self._scanner.feed(self._decoded.finish())
        if self.stop is not None:
            self.finish_reason = "stop"
            return text
        return text + self._scanner.flush()


def _overlap(text: str, stop: str) -> int:
    """Return the length of the longest proper prefix of `stop` that `text` ends with."""
    for n in range(min(len(text), len(stop) - 1), 0, -1):
        if text.endswith(stop[:n]):
            return n
    return 0
