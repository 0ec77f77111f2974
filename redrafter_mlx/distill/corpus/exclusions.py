"""Questions that drafters are measured with, kept out of what they learn from.

Texts that have 13 words in a row in common count as the same, as in the training of GPT-3
(Brown et al., arXiv 2005.14165, appendix C).
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from redrafter_mlx.distill.corpus.conversations import Conversation, read_conversations

RUN = 13
"""Words in a row that two texts do not share by chance."""

LEFT_OUT = "kept for measuring"
"""What a prompt is counted as that is left out for this."""


@dataclass(frozen=True)
class Reserved:
    """Questions, with their answers where a file has them.

    runs: of every RUN words in a row, lower case with single spaces; of a shorter text, the whole
    """

    runs: frozenset[str] = frozenset()

    @classmethod
    def read(cls, paths: Iterable[Path]) -> Reserved:
        """Raises BadInputError, naming the file and the line, for what holds no questions."""
        return cls.of([c for path in paths for c in read_conversations(path)])

    @classmethod
    def of(cls, conversations: Iterable[Conversation]) -> Reserved:
        texts = [text for c in conversations for text in (*c.turns, *c.answers)]
        return cls(frozenset(run for text in texts for run in _runs(text)))

    def holds(self, text: str) -> bool:
        """Whether a text has a run of one of the questions, or is one of the short ones."""
        return bool(self.runs) and any(run in self.runs for run in _runs(text))

    def without(self, conversations: Sequence[Conversation]) -> list[Conversation]:
        """Those that share nothing with the questions."""
        return [c for c in conversations if not any(map(self.holds, (*c.turns, *c.answers)))]


NOTHING = Reserved()


def _runs(text: str) -> Iterable[str]:
    words = re.findall(r"\w+", text.lower())
    return (" ".join(words[i : i + RUN]) for i in range(max(1, len(words) - RUN + 1)) if words)
