"""The target's hidden states along kept texts, computed anew: nothing of them is kept."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import numpy as np
from mlx_lm.tokenizer_utils import TokenizerWrapper

from redrafter_mlx.distill.corpus.extras import Extras
from redrafter_mlx.distill.corpus.hidden_states import teacher_forced_states
from redrafter_mlx.distill.corpus.shards import Shard, Text, save_shard
from redrafter_mlx.learning.kept_texts import KeptText
from redrafter_mlx.target_model.model import Target

_TOGETHER = 24
"""Texts of a shard. Within it, those that share a prefix, as turns do, are read after each other,
so that the prefix is read once."""


def read(target: Target, texts: Sequence[KeptText]) -> Iterator[Text]:
    """Yield texts with the hidden states that chose their tokens, in the order of their prompts.

    Of a text that was drawn at random, the target's probabilities are the labels: the tokens that
    were drawn say less.
    """
    ordered = sorted(texts, key=lambda text: (text.prompt, text.answer))
    states = teacher_forced_states(target, (([*t.prompt, *t.answer], 1) for t in ordered))
    for text, own in zip(ordered, states, strict=True):
        first = len(text.prompt)
        yield Text.of(
            target,
            list(text.prompt),
            np.array(text.answer, np.int32),
            own[first - 1 :],
            hard_labels=text.temperature == 0,
            prompt_states=own[: first - 1],
        )


def write_shards(
    target: Target,
    tokenizer: TokenizerWrapper,
    texts: Sequence[KeptText],
    extras: Extras,
    folder: Path,
    stop: Callable[[int], bool],
) -> tuple[list[Path], int]:
    """Read texts and write them as a corpus, until `stop`; return its shards and answer tokens.

    stop: is asked after each shard, with the number of answer tokens so far
    """
    shards, positions = list[Path](), 0
    folder.mkdir(parents=True, exist_ok=True)
    for at in range(0, len(texts), _TOGETHER):
        some = [*read(target, texts[at : at + _TOGETHER])]
        for kind in (True, False):
            own = [text for text in some if text.hard_labels is kind]
            if own:
                path = folder / f"block-{len(shards):06d}.safetensors"
                save_shard(Shard(own, {}), path, {}, target.dtype)
                extras.add(target, tokenizer, path, len(shards), own)
                shards.append(path)
                positions += sum(len(text.answer) for text in own)
        if stop(positions):
            break
    return shards, positions
