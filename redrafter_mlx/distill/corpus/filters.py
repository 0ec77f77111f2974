"""What is not trained on: loops, short answers, and the questions that drafters are measured with.

The greedy answers of a small model fall into loops that anything predicts. Trained on, they would
make a drafter look better than it is on text that people ask for; so an answer is cut where it
begins to repeat itself.

Two texts that share 13 words in a row count as the same, as in the decontamination of GPT-3's
training data (Brown et al., arXiv 2005.14165, appendix C).
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from redrafter_mlx.distill.corpus.conversations import Conversation, read_conversations

LOOP_WINDOW = 20
"""An answer that repeats so many tokens has fallen into a loop."""

MIN_ANSWER = 4
"""Tokens that an answer must have to be trained on."""

WORDS = 13
"""In a row, which two texts do not share by chance."""

EXCLUDED = "excluded"
"""The reason that a text is counted under that matches an exclusion."""


def loop_start(tokens: Sequence[int], window: int = LOOP_WINDOW) -> int | None:
    """Where the first run of `window` tokens begins that occurred before; None if none does."""
    seen: dict[tuple[int, ...], int] = {}
    for i in range(len(tokens) - window + 1):
        run = tuple(tokens[i : i + window])
        if run in seen:
            return i
        seen[run] = i
    return None


@dataclass(frozen=True)
class Exclusions:
    """Questions that nothing is trained on, with their answers where a file has them.

    runs: every WORDS words in a row, lower case with single spaces; of a shorter text, the whole
    """

    runs: frozenset[str] = frozenset()

    @classmethod
    def read(cls, paths: Iterable[Path]) -> Exclusions:
        """Raises BadInputError, naming the file and the line, for what holds no questions."""
        conversations = [c for path in paths for c in read_conversations(path)]
        texts = [text for c in conversations for text in (*c.turns, *c.answers)]
        return cls(frozenset(run for text in texts for run in _runs(text)))

    def match(self, text: str) -> bool:
        """Whether a text shares a run with one of the questions, or is one of the short ones."""
        return bool(self.runs) and any(run in self.runs for run in _runs(text))

    def filter(self, conversations: Sequence[Conversation]) -> list[Conversation]:
        """Those that share nothing with the questions."""
        return [c for c in conversations if not any(map(self.match, (*c.turns, *c.answers)))]


NOTHING = Exclusions()


def _runs(text: str) -> Iterable[str]:
    words = re.findall(r"\w+", text.lower())
    count = max(1, len(words) - WORDS + 1) if words else 0
    return (" ".join(words[i : i + WORDS]) for i in range(count))
