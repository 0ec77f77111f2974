"""Exclusions from training: loops, short answers, and questions that drafters are measured with.

The greedy answers of a small model fall into loops that anything predicts. In a corpus, they would
make a drafter look better than it is on text that people ask for. So an answer is cut where it
begins to repeat itself.

Decontamination: two texts that share 13 words in a row are treated as the same, as for GPT-3's
training data (Brown et al., arXiv 2005.14165, appendix C).
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from redrafter_mlx.distill.corpus.prompts.conversations import Conversation

LOOP_WINDOW = 20
"""An answer that repeats this many tokens has fallen into a loop."""

MIN_ANSWER = 4
"""Minimum number of tokens of an answer that is trained on."""

WORDS = 13
"""Number of words in a row that two texts do not share by chance."""

_WITHOUT_SPACES = re.compile(
    "[\u0e00-\u0eff\u1000-\u109f\u1780-\u17ff\u3040-\u30ff\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff"
    "\uff66-\uff9d\U00020000-\U0003ffff]"
)
"""Characters of scripts that are written without spaces, each of which counts as a word: Thai, Lao,
Burmese, Khmer, Japanese and Chinese."""

EXCLUDED = "excluded"
"""The reason under which texts that match an exclusion are counted."""

REFUSED = "prompt refused by the chat template"
"""The reason under which prompts are counted that a chat template cannot render."""


def loop_start(tokens: Sequence[int], window: int = LOOP_WINDOW) -> int | None:
    """Return the start of the first run of `window` tokens that occurred before, or None."""
    seen: dict[tuple[int, ...], int] = {}
    for i in range(len(tokens) - window + 1):
        run = tuple(tokens[i : i + window])
        if run in seen:
            return i
        seen[run] = i
    return None


@dataclass(frozen=True)
class Exclusions:
    """Questions to exclude from training, with their answers if a file has them."""

    # every run of WORDS words, lower case with single spaces; a shorter text is one run
    runs: frozenset[str] = frozenset()

    @classmethod
    def of(cls, conversations: Iterable[Conversation]) -> Exclusions:
        """Exclude the turns and answers of conversations."""
        texts = [text for c in conversations for text in (*c.turns, *c.answers)]
        return cls(frozenset(run for text in texts for run in _runs(text)))

    def match(self, text: str) -> bool:
        """Whether a text shares a run with one of the questions."""
        return bool(self.runs) and any(run in self.runs for run in _runs(text))

    def filter(self, conversations: Sequence[Conversation]) -> list[Conversation]:
        """Return the conversations that share no run with the questions."""
        return [c for c in conversations if not any(map(self.match, (*c.turns, *c.answers)))]


NOTHING = Exclusions()


def _runs(text: str) -> Iterable[str]:
    words = _words(text.lower())
    count = max(1, len(words) - WORDS + 1) if words else 0
    return (" ".join(words[i : i + WORDS]) for i in range(count))


def _words(text: str) -> list[str]:
    if text.isascii():
        return re.findall(r"\w+", text)
    spaced = _WITHOUT_SPACES.sub(r" \g<0> ", text)
    # Vowel signs of Indic scripts are marks, which \w does not match.
    in_words = (c.isalnum() or c == "_" or unicodedata.category(c)[0] == "M" for c in spaced)
    return "".join(c if kept else " " for c, kept in zip(spaced, in_words, strict=True)).split()
