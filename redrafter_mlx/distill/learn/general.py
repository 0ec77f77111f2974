"""General texts: the target writes a few once, on subjects of all kinds.

They are mixed into what the user's drafter learns from, and show whether it forgets.
"""

from __future__ import annotations

import time

from redrafter_mlx.distill.corpus.writer import Writer
from redrafter_mlx.distill.options import WritingOptions
from redrafter_mlx.learning.folder import LearningFolder
from redrafter_mlx.learning.kept_texts import KeptText, TextStore
from redrafter_mlx.loading.target import LoadedTarget

_TEXTS = 72
_OPTIONS = WritingOptions(
    starter_share=1.0, batch=_TEXTS, openings=(0,), max_answer_tokens=96, seed=67
)


def general_texts(loaded: LoadedTarget, folder: LearningFolder) -> list[KeptText]:
    """Return the general texts of a target, which are written and kept the first time.

    Without a chat template there are none: nothing says where a question would begin.
    """
    store = TextStore(folder.general)
    kept = [*store.texts()]
    if kept or not loaded.tokenizer.has_chat_template:
        return kept
    written = Writer(loaded.target, loaded.tokenizer, (), _OPTIONS).write(0)
    for text in written.texts:
        answer = tuple(text.answer.tolist())
        store.append(KeptText(tuple(text.prompt), answer, time=time.time()))
    return [*store.texts()]


def are_written(folder: LearningFolder) -> bool:
    return TextStore(folder.general).count() > 0
