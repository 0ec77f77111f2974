"""Turns a prompt of any kind into token ids."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

import mlx.nn as nn
from mlx_lm.tokenizer_utils import TokenizerWrapper

from redrafter_mlx.errors import BadInputError
from redrafter_mlx.runtime.plain import plain
from redrafter_mlx.target_model.source import TargetSource
from redrafter_mlx.weights.chat import encode_text, render_chat
from redrafter_mlx.weights.raw_model import context_length

Message = Mapping[str, object]


class TokenArray(Protocol):
    """An array of token ids, [P] or [1, P]: NumPy's, MLX's or another library's."""

    def tolist(self) -> object: ...


Prompt = str | Sequence[Message] | Sequence[int] | TokenArray


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
    if max(ids) >= vocab_size:  # MLX would read whatever lies behind its embeddings
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
