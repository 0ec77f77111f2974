"""The text of tokens inside a longer text, whole or as it grows."""

from __future__ import annotations

from collections.abc import Sequence

from mlx_lm.tokenizer_utils import TokenizerWrapper

from redrafter_mlx.weights.chat import encode_text

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
        self._before = encode_text(tokenizer, "a")[-1]
        self._skipped = len(self._decode([self._before]))

    def of(self, tokens: Sequence[int]) -> str:
        """Return the tokens' text with its leading space, which decoders drop at a text's start.

        Bytes that are not whole characters become U+FFFD; an id that the tokenizer does not have,
        as in a padded vocabulary, has no text.
        """
        return self._decode([self._before, *tokens])[self._skipped :]

    def stream(self) -> TextStream:
        """Return a stream for the text of one answer."""
        return TextStream(self)

    def _decode(self, tokens: list[int]) -> str:
        return str(self._tokenizer.decode(tokens, clean_up_tokenization_spaces=False))


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
