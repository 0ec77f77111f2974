"""User turns that the target writes itself, at the user's place in its chat template."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import mlx.core as mx
from mlx_lm.tokenizer_utils import TokenizerWrapper

from redrafter_mlx.distill.corpus.filters import EXCLUDED, NOTHING, Exclusions
from redrafter_mlx.distill.corpus.prompts.conversations import Conversation
from redrafter_mlx.distill.corpus.shards import BlockProgress
from redrafter_mlx.distill.corpus.writing.generation import write_turns
from redrafter_mlx.target_model.model import Target
from redrafter_mlx.weights.text.chat import encode_text, render_chat

_MARK = "\ue000"

TURN_TOKENS = 64
"""Maximum number of tokens of a turn; a turn that has not ended by then is left out."""

_MIN_BYTES = 8

UNFINISHED = "prompt unfinished"
"""The reason under which turns are counted that do not end."""


@dataclass(frozen=True)
class TurnPrefix:
    """The conversation after which user turns are drawn, how many are drawn, and their starter."""

    after: Conversation
    count: int = 1
    starter: str = ""


@dataclass(frozen=True)
class UserTurns:
    """Draws user turns with the target."""

    target: Target
    tokenizer: TokenizerWrapper
    exclude: Exclusions = NOTHING  # questions that no turn may match
    room: int | None = None  # as in `write_turns`

    def draw(
        self,
        prefixes: Sequence[TurnPrefix],
        temperature: float,
        key: mx.array,
        block: BlockProgress,
    ) -> list[list[str]]:
        """Draw turns for each prefix, with their starters; `block` counts what is left out."""
        left_out = block.left_out
        eos, counts = set(self.tokenizer.eos_token_ids), [prefix.count for prefix in prefixes]
        starts = [self._template_up_to(prefix) for prefix in prefixes]
        drawn = write_turns(
            self.target,
            starts,
            counts,
            eos,
            TURN_TOKENS,
            temperature,
            key,
            self.room,
            block.count_prompts,
        )
        found: list[list[str]] = []
        seen: set[str] = set()
        for prefix, start, group in zip(prefixes, starts, drawn, strict=True):
            kept, before = [], len(self.tokenizer.decode(start))
            for ids in group:
                # Decoded after its prefix: alone, some tokenizers drop the space before it.
                text = (prefix.starter + self.tokenizer.decode(start + ids)[before:]).strip()
                if len(text.encode()) < _MIN_BYTES or text in seen:
                    left_out["prompt twice or empty"] += 1
                elif self.exclude.match(text):
                    left_out[EXCLUDED] += 1
                else:
                    seen.add(text)
                    kept.append(text)
            left_out[UNFINISHED] += prefix.count - len(group)
            found.append(kept)
        return found

    def _template_up_to(self, prefix: TurnPrefix) -> list[int]:
        """Return the chat template's tokens up to the user's message, its starter included."""
        whole = replace(prefix.after, turns=(*prefix.after.turns, _MARK))
        ids = render_chat(self.tokenizer, whole.messages(len(prefix.after.turns)))
        opening = self.tokenizer.decode(ids).split(_MARK)[0]
        return encode_text(self.tokenizer, opening + prefix.starter)
