"""How far the block is that is being written, for progress lines that move within it."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field


@dataclass
class BlockProgress:
    """Tokens written of a block so far, and its texts that were left out, by reason.

    Its owner counts while another thread reads: each number is right, not all of one moment.
    """

    prompt_tokens: int = 0
    answer_tokens: int = 0
    left_out: Counter[str] = field(default_factory=Counter)

    def count_prompts(self, tokens: int) -> None:
        """Count tokens of prompts that the target writes."""
        self.prompt_tokens += tokens

    def count_answers(self, tokens: int) -> None:
        """Count tokens of answers, some of which may be left out in the end."""
        self.answer_tokens += tokens

    def copy(self) -> BlockProgress:
        """Return what is counted now."""
        return BlockProgress(self.prompt_tokens, self.answer_tokens, self.left_out.copy())
