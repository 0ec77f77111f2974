"""A lower bound of the number of a prompt's tokens, without encoding it.

To encode megabytes takes a minute, after which they turn out not to fit.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence

from mlx_lm.tokenizer_utils import TokenizerWrapper
from tokenizers.normalizers import Normalizer
from transformers import PreTrainedTokenizerFast

_SPACES = str.maketrans("", "", "ĠĊĉč\u2581 \t\n\r")
"""Removes whitespace from a token, as vocabularies write it."""

_UNKNOWN = "\U000ff0f5\U00100abc"
"""Two characters that no vocabulary has: they become bytes, or one token for any unknown text."""

_COMPOSED = 3
"""Maximum factor by which Unicode's composition (NFC) shortens a text in UTF-8."""


def longest_token(tokenizer: TokenizerWrapper) -> int | None:
    """Return the maximum number of a text's bytes in a token, without whitespace.

    None if that is not known: text may be dropped, or one token may stand for any unknown text.
    """
    fast = tokenizer._tokenizer
    if not isinstance(fast, PreTrainedTokenizerFast):
        return None
    backend = fast.backend_tokenizer
    shortens = _shortens(backend.normalizer)
    if shortens is None or len(backend.encode(_UNKNOWN, add_special_tokens=False).ids) < 2:
        return None
    longest = max(len(token.translate(_SPACES).encode()) for token in tokenizer.get_vocab())
    return shortens * max(longest, 1)


def text_bytes(prompt: object) -> int:
    """Return the bytes of a prompt's text without whitespace, which tokenizers may drop.

    Of messages, only the user's are counted: a template may cut answers. None of token ids.
    """
    return sum(len("".join(text.split()).encode("utf-8", "replace")) for text in _texts(prompt))


def _texts(prompt: object) -> Iterator[str]:
    if isinstance(prompt, str):
        yield prompt
    elif isinstance(prompt, Sequence) and prompt and isinstance(prompt[0], Mapping):
        for message in prompt:
            if isinstance(message, Mapping) and message.get("role") == "user":
                content = message.get("content")
                if isinstance(content, str):
                    yield content


def _shortens(normalizer: Normalizer | None) -> int | None:
    """Return the maximum factor by which text is shortened, None if that is not known."""
    if normalizer is None:
        return 1
    described = json.loads(normalizer.__getstate__())
    factor = 1
    for step in described.get("normalizers", [described]):
        match step:
            case {"type": "NFC"}:
                factor *= _COMPOSED
            case {"type": "Prepend"}:
                pass
            case {"type": "Replace", "pattern": {"String": " "}}:
                pass
            case _:
                return None
    return factor
