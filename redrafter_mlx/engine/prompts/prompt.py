"""Turns a prompt of any kind into token ids, unless it can never fit."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from typing import Protocol

import mlx.nn as nn
from mlx_lm.tokenizer_utils import TokenizerWrapper
from tokenizers.normalizers import Normalizer
from transformers import PreTrainedTokenizerFast

from redrafter_mlx.checks import plain
from redrafter_mlx.engine.memory import MemoryBudget
from redrafter_mlx.errors import BadInputError, ContextLengthError
from redrafter_mlx.target_model.source import TargetSource
from redrafter_mlx.weights.raw_model import context_length
from redrafter_mlx.weights.text.chat import encode_text, render_chat

Message = Mapping[str, object]


class TokenArray(Protocol):
    """An array of token ids, [P] or [1, P]: NumPy's, MLX's or another library's."""

    def tolist(self) -> object: ...


Prompt = str | Sequence[Message] | Sequence[int] | TokenArray


_SPACES = str.maketrans("", "", "ĠĊĉč\u2581 \t\n\r")
"""Removes whitespace from a token, as vocabularies write it."""

_UNKNOWN = "\U000ff0f5\U00100abc"
"""Two characters that no vocabulary has: they become bytes, or one token for any unknown text."""

_COMPOSED = 3
"""Maximum factor by which Unicode's composition (NFC) shortens a text in UTF-8."""


class PromptEncoder:
    """Encodes the prompts of one model.

    context_length: maximum number of tokens of prompt and answer together; None if the model names
                    no limit
    """

    def __init__(
        self,
        tokenizer: TokenizerWrapper,
        vocab_size: int,
        context_length: int | None,
        memory: MemoryBudget,
    ) -> None:
        self.context_length = context_length
        self._tokenizer, self._vocab_size, self._memory = tokenizer, vocab_size, memory

    def encode(self, prompt: Prompt, *, raw: bool, thinking: bool | None) -> list[int]:
        """Return the token ids of any kind of prompt; see `Redrafter.encode`."""
        self.check_fits(prompt)
        ids = prompt_tokens(self._tokenizer, prompt, raw, self._vocab_size, thinking)
        if self.context_length is not None and len(ids) >= self.context_length:
            raise ContextLengthError(self.context_length, len(ids))
        return ids

    def check_fits(self, prompt: Prompt) -> None:
        """Raise BadInputError for a text that can never fit, before it is encoded.

        To encode megabytes takes a minute, after which they turn out not to fit.
        """
        nbytes = text_bytes(prompt)
        max_tokens = self._memory.max_prompt
        if self.context_length is not None:
            max_tokens = min(max_tokens, self.context_length - 1)
        if nbytes <= max_tokens or self._longest_token is None:
            return
        min_tokens = -(-nbytes // self._longest_token)
        if self.context_length is not None and min_tokens >= self.context_length:
            raise ContextLengthError(self.context_length, min_tokens, exact=False)
        if (error := self._memory.refusal_of_length(min_tokens)) is not None:
            raise error

    def room_for(self, prompt: Sequence[int], max_tokens: int) -> int:
        """Return the maximum number of tokens of an answer within the model's context."""
        if self.context_length is None:
            return max_tokens
        return min(max_tokens, self.context_length - len(prompt))

    @cached_property
    def _longest_token(self) -> int | None:
        return longest_token(self._tokenizer)


def prompt_tokens(
    tokenizer: TokenizerWrapper,
    prompt: Prompt,
    raw: bool,
    vocab_size: int,
    thinking: bool | None = None,
) -> list[int]:
    """Return the token ids of a user's message, of a list of messages, or of token ids.

    Token ids are a list, or an array [P] or [1, P].

    Args:
      raw: use a string as it is, without the chat template
      thinking: as in `render_chat`; without effect on raw text and token ids
    Raises:
      BadInputError: for anything else, and for a prompt without a token
    """
    if hasattr(prompt, "tolist") and not isinstance(prompt, memoryview):
        prompt = _of_array(prompt)
    if isinstance(prompt, str):
        if raw:
            ids = encode_text(tokenizer, prompt)
        else:
            message = {"role": "user", "content": prompt}
            ids = render_chat(tokenizer, [message], thinking=thinking)
    elif not isinstance(prompt, Sequence) or isinstance(prompt, (bytes, bytearray, memoryview)):
        raise BadInputError(
            f"the prompt is of type {type(prompt).__name__}; give a string, a list of messages "
            f"or a list of token ids"
        )
    elif prompt and isinstance(prompt[0], Mapping):
        ids = render_chat(tokenizer, prompt, thinking=thinking)  # type: ignore[arg-type]
    else:
        ids = [_token_id(plain(t), vocab_size) for t in prompt]
    if not ids:
        raise BadInputError("the prompt is empty; give at least one token")
    if max(ids) >= vocab_size:  # MLX would read whatever lies after its embeddings
        raise BadInputError(f"the prompt holds token {max(ids)}; the model has {vocab_size}")
    return ids


def context_length_of(model: nn.Module, source: TargetSource | None) -> int | None:
    """Return the context length in the model's files, or in its arguments without known files."""
    if source is not None:
        return source.context_length
    return context_length(vars(model.args)) if hasattr(model, "args") else None


def _token_id(token: object, vocab_size: int) -> int:
    if isinstance(token, str):
        raise BadInputError(
            f"the prompt is a list with {token!r:.80}; give one string, or give several prompts "
            f"to batch()"
        )
    if isinstance(token, bool) or not isinstance(token, int) or not 0 <= token < vocab_size:
        raise BadInputError(
            f"prompt holds {token!r:.80}; token ids are whole, 0 to {vocab_size - 1}"
        )
    return token


def _of_array(prompt: TokenArray) -> Sequence[int]:
    """Return the members of an array [P], or of [1, P] as tokenizers make it for one text."""
    ids = prompt.tolist()
    if isinstance(ids, list) and len(ids) == 1 and isinstance(ids[0], list):
        ids = ids[0]
    if not isinstance(ids, list) or any(isinstance(each, list) for each in ids):
        shape = getattr(prompt, "shape", "unknown")
        raise BadInputError(
            f"the prompt is an array of shape {shape}; give token ids as [P] or [1, P], and "
            f"several prompts to batch()"
        )
    return ids


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
