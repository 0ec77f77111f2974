"""User turns that the target writes itself, at the user's place in its chat template."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import mlx.core as mx
from mlx_lm.tokenizer_utils import TokenizerWrapper

from redrafter_mlx.distill.corpus.filters import EXCLUDED, Exclusions
from redrafter_mlx.distill.corpus.generation import write_turns
from redrafter_mlx.target.model import Target
from redrafter_mlx.weights.chat import encode_text, render_chat

_MARK = "\ue000"

_MAX_TOKENS = 64
"""Maximum number of tokens of a turn; a turn that has not ended by then is left out."""

_MIN_CHARACTERS = 8


@dataclass(frozen=True)
class TurnPrefix:
    """The turns after which new turns are drawn, how many are drawn, and their starter.

    turns: user and assistant, alternating
    """

    turns: Sequence[str]
    system: str | None
    count: int = 1
    starter: str = ""

    @property
    def messages(self) -> list[dict[str, str]]:
        """The turns as messages for a chat template."""
        head = [{"role": "system", "content": self.system}] if self.system else []
        roles = ("user", "assistant")
        return head + [{"role": roles[i % 2], "content": t} for i, t in enumerate(self.turns)]


def draw_user_turns(
    target: Target,
    tokenizer: TokenizerWrapper,
    prefixes: Sequence[TurnPrefix],
    temperature: float,
    exclude: Exclusions,
    key: mx.array,
    left_out: Counter[str],
    room: int | None = None,
) -> list[list[str]]:
    """Draw user turns for each prefix; return them with their starters.

    Duplicates and matches of `exclude` are left out and counted in `left_out`.
    """
    eos = set(tokenizer.eos_token_ids)
    starts = [_template_up_to(tokenizer, prefix) for prefix in prefixes]
    counts = [prefix.count for prefix in prefixes]
    drawn = write_turns(target, starts, counts, eos, _MAX_TOKENS, temperature, key, room)
    found: list[list[str]] = []
    seen: set[str] = set()
    for prefix, start, group in zip(prefixes, starts, drawn, strict=True):
        kept, before = [], len(tokenizer.decode(start))
        for ids in group:
            # Decoded after its prefix: alone, some tokenizers drop the space before it.
            text = (prefix.starter + tokenizer.decode(start + ids)[before:]).strip()
            if len(text) < _MIN_CHARACTERS or text in seen:
                left_out["prompt twice or empty"] += 1
            elif exclude.match(text):
                left_out[EXCLUDED] += 1
            else:
                seen.add(text)
                kept.append(text)
        left_out["prompt unfinished"] += prefix.count - len(group)
        found.append(kept)
    return found


def _template_up_to(tokenizer: TokenizerWrapper, prefix: TurnPrefix) -> list[int]:
    """Return the tokens of the chat template up to the user's next message, starter included."""
    ids = render_chat(tokenizer, [*prefix.messages, {"role": "user", "content": _MARK}])
    return encode_text(tokenizer, tokenizer.decode(ids).split(_MARK)[0] + prefix.starter)
