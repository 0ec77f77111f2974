"""What people ask, as text to learn from: the target reads each prompt on its way to the answer.

What stands in a prompt is not what the target would have said, so its tokens are no labels. But at
each of them the target has its own expectation of the next, and that is learnt (paper, section
3.5: distillation along the ground truth). Reading is several times faster than writing, and what
people ask is more varied than what a small model answers.

The prompts of a shard lie in a shard of the same form, in the folder `prompts` beside it; it is
empty where the prompts are those of earlier shards again, or are held out.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from redrafter_mlx.distill.along import states_along
from redrafter_mlx.distill.corpus import Text
from redrafter_mlx.distill.filters import MIN_ANSWER
from redrafter_mlx.memory import common_prefix
from redrafter_mlx.target import Target


def prompts_path(shard: Path) -> Path:
    """Where the prompts of a shard lie."""
    return shard.parent / "prompts" / shard.name


def read_prompts(target: Target, texts: Sequence[Text]) -> list[Text]:
    """The prompts of texts as texts, without what an earlier one of them begins with.

    Returns:
      texts whose `prompt` is the part that is not new (at least one token) and whose `answer` is
      the rest of a prompt
    """
    known: list[list[int]] = []
    found: list[tuple[list[int], int]] = []
    for text in texts:
        new = max([1, *(common_prefix(other, text.prompt) for other in known)])
        if len(text.prompt) - new >= MIN_ANSWER:
            found.append((text.prompt, new))
        known.append(text.prompt + text.answer.tolist())
    D = target.hidden_size
    return [
        Text(
            tokens[:new],
            np.array(tokens[new:], np.int32),
            states[:, -D:],
            contexts=states[:, :-D] if target.context_layers else None,
            own=False,
        )
        for (tokens, new), states in zip(found, states_along(target, found), strict=True)
    ]
