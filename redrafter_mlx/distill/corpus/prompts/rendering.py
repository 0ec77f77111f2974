"""Conversations as token ids: in the target's chat template, or as plain text.

Plain text is used as it is: system message, turns and answers one after the other, with nothing
between them. So a model without a chat template can be trained for.
"""

from __future__ import annotations

from mlx_lm.tokenizer_utils import TokenizerWrapper

from redrafter_mlx.decoding.cache.prefix_cache import common_prefix
from redrafter_mlx.distill.corpus.prompts.conversations import Conversation
from redrafter_mlx.weights.text.chat import encode_text, render_chat

_MAX_START = 32  # maximum number of tokens of a plain text that are its prompt


def conversation_ids(
    tokenizer: TokenizerWrapper,
    conversation: Conversation,
    turn: int,
    *,
    answered: bool = False,
    raw: bool = False,
    thinking: bool | None = None,
) -> list[int]:
    """Return a conversation up to user turn `turn`, to be continued, or with its answer if any.

    Raises BadInputError if there is no chat template, or if it refuses the conversation.
    """
    messages = conversation.messages(turn, answered=answered)
    if raw:
        return encode_text(tokenizer, "".join(message["content"] for message in messages))
    return render_chat(tokenizer, messages, add_generation_prompt=not answered, thinking=thinking)


def split_plain(prompt: list[int], whole: list[int]) -> tuple[list[int], list[int]]:
    """Return a plain text as prompt and answer.

    A text without an answer is an answer to its own first tokens. A token may cross the end of a
    prompt; it is the answer's.
    """
    at = common_prefix(prompt, whole)
    if at == len(whole):
        at = min(_MAX_START, len(whole) // 4)
    return whole[: max(1, at)], whole[max(1, at) :]
