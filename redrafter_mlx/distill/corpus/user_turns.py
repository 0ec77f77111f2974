"""User turns that the target writes itself, where its chat template lets the user speak."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import mlx.core as mx
from mlx_lm.tokenizer_utils import TokenizerWrapper

from redrafter_mlx.distill.corpus.exclusions import LEFT_OUT, Reserved
from redrafter_mlx.distill.corpus.generation import write_turns
from redrafter_mlx.target.model import Target
from redrafter_mlx.weights.chat import encode_text, render_chat

_MARK = "\ue000"

_MOST_TOKENS = 64
"""Of a turn; one that has not ended by then is left out."""

_LEAST_CHARACTERS = 8


@dataclass(frozen=True)
class Opening:
    """Where turns are drawn: what was said before, how many, and how they begin.

    said: user and assistant by turns
    """

    said: Sequence[str]
    system: str | None
    count: int = 1
    beginning: str = ""

    @property
    def messages(self) -> list[dict[str, str]]:
        """What was said, as chat templates take it."""
        head = [{"role": "system", "content": self.system}] if self.system else []
        roles = ("user", "assistant")
        return head + [{"role": roles[i % 2], "content": t} for i, t in enumerate(self.said)]


def draw_user_turns(
    target: Target,
    tokenizer: TokenizerWrapper,
    openings: Sequence[Opening],
    temperature: float,
    reserved: Reserved,
    key: mx.array,
    left_out: Counter[str],
    room: int | None = None,
) -> list[list[str]]:
    """For each opening its turns, beginnings included.

    None is there twice or is one of `reserved`; what is left out is counted in `left_out`.
    """
    eos = set(tokenizer.eos_token_ids)
    prefixes = [_template_up_to(tokenizer, opening) for opening in openings]
    counts = [opening.count for opening in openings]
    drawn = write_turns(target, prefixes, counts, eos, _MOST_TOKENS, temperature, key, room)
    found: list[list[str]] = []
    seen: set[str] = set()
    for opening, prefix, group in zip(openings, prefixes, drawn, strict=True):
        kept, before = [], len(tokenizer.decode(prefix))
        for ids in group:
            # Decoded behind its prefix: alone, some tokenizers drop the space in front of it.
            text = (opening.beginning + tokenizer.decode(prefix + ids)[before:]).strip()
            if len(text) < _LEAST_CHARACTERS or text in seen:
                left_out["prompt twice or empty"] += 1
            elif reserved.holds(text):
                left_out[LEFT_OUT] += 1
            else:
                seen.add(text)
                kept.append(text)
        left_out["prompt unfinished"] += opening.count - len(group)
        found.append(kept)
    return found


def _template_up_to(tokenizer: TokenizerWrapper, opening: Opening) -> list[int]:
    """The chat template up to where the user's next message goes on."""
    ids = render_chat(tokenizer, [*opening.messages, {"role": "user", "content": _MARK}])
    return encode_text(tokenizer, tokenizer.decode(ids).split(_MARK)[0] + opening.beginning)
