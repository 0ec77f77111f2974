"""General texts: the target writes a few once, on subjects of all kinds.

They are mixed into what the user's drafter learns from, and show whether it forgets.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

from redrafter_mlx.distill.corpus.writing.block_progress import BlockProgress
from redrafter_mlx.distill.corpus.writing.writer import Writer
from redrafter_mlx.distill.options import WritingOptions
from redrafter_mlx.learning.folder import LearningFolder
from redrafter_mlx.learning.kept_texts import KeptText, TextStore
from redrafter_mlx.loading.target import LoadedTarget

_TEXTS, _TOKENS = 48, 96
_OPTIONS = WritingOptions(
    starter_share=1.0, batch=_TEXTS, openings=(0,), max_answer_tokens=_TOKENS, seed=67
)


@dataclass
class _Reported(BlockProgress):
    """Reports each step of writing."""

    report: Callable[[int, int], None] = lambda *_: None

    def count_prompts(self, tokens: int) -> None:
        super().count_prompts(tokens)
        self.report(0, _TEXTS * _TOKENS)

    def count_answers(self, tokens: int) -> None:
        super().count_answers(tokens)
        self.report(self.answer_tokens, _TEXTS * _TOKENS)


def general_texts(
    loaded: LoadedTarget, folder: LearningFolder, report: Callable[[int, int], None]
) -> list[KeptText]:
    """Return the general texts of a target, which are written and kept the first time.

    report: is called while they are written, with tokens so far and at most

    Without a chat template there are none: nothing says where a question would begin.
    """
    store = TextStore(folder.general)
    kept = [*store.texts()]
    if kept or not loaded.tokenizer.has_chat_template:
        return kept
    written = Writer(loaded.target, loaded.tokenizer, (), _OPTIONS).write(
        0, _Reported(report=report)
    )
    for text in written.texts:
        answer = tuple(text.answer.tolist())
        store.append(KeptText(tuple(text.prompt), answer, time=time.time()))
    return [*store.texts()]
