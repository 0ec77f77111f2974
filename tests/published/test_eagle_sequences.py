"""Batches of whole texts for EAGLE: training positions, their contexts, and attention masks."""

from __future__ import annotations

import mlx.core as mx
import numpy as np
from eagle_files import random_text
from tiny import HIDDEN

from redrafter_mlx.distill.forms.eagle_sequences import (
    UnrolledCache,
    group_lengths,
    grouped,
    pad_together,
)


def test_a_row_attends_to_true_rows_up_to_its_own_and_to_its_own_guesses() -> None:
    cache, row = UnrolledCache(), mx.zeros((1, 1, 3, 4))
    for depth in range(3):
        cache.begin(depth)
        cache.update_and_fetch(row, row)
    drawn = """
        1 0 0   1 0 0   1 0 0
        1 1 0   0 1 0   0 1 0
        1 1 1   0 0 1   0 0 1
    """
    want = [[bit == "1" for bit in line.split()] for line in drawn.strip().splitlines()]
    np.testing.assert_array_equal(cache.make_mask(3), want)
    assert cache.offset == 2, "each guess stands one position further"


def test_labels_follow_the_root_and_end_with_the_text() -> None:
    text = random_text(3, 4, 2, seed=0)
    tokens = [*text.prompt, *text.answer.tolist()]
    batch = pad_together([text, random_text(2, 9, 2, seed=1)], 2, HIDDEN, prompts=False)
    S = batch.features.shape[1]
    mine = [r for r in range(len(batch.rows)) if batch.rows[r].item() < S]
    assert batch.rows[mx.array(mine)].tolist() == [2, 3, 4, 5], "the roots are answer tokens"
    np.testing.assert_array_equal(batch.valid[mx.array(mine)], [[1, 1], [1, 1], [1, 0], [0, 0]])
    for row in mine:
        i = batch.rows[row].item()
        for depth in range(2):
            if batch.valid[row, depth].item():
                assert batch.labels[row, depth].item() == tokens[i + 2 + depth]
    assert all(batch.hard.tolist())


def test_drafts_within_a_prompt_have_soft_labels_alone() -> None:
    batch = pad_together([random_text(4, 3, 2, seed=0)], 1, HIDDEN, prompts=True)
    assert batch.rows.tolist() == [0, 1, 2, 3, 4, 5]
    assert batch.hard.tolist() == [False, False, True, True, True, True]
    read = pad_together([random_text(4, 3, 2, seed=0, hard=False)], 1, HIDDEN, prompts=True)
    assert not any(read.hard.tolist())


def test_a_pass_has_every_text_once_in_an_order_of_its_seed() -> None:
    texts = [random_text(2 + n % 5, 3 + n % 17, 0, seed=n) for n in range(60)]
    texts.append(random_text(1, 1, 0, seed=99))
    first, again, other = (grouped(texts, 64, seed) for seed in ("a", "a", "b"))
    ids = [[id(text) for text in group] for group in first]
    once = [text for group in ids for text in group]
    assert sorted(once) == sorted(id(text) for text in texts[:-1]), "too short for a draft"
    assert ids == [[id(text) for text in group] for group in again]
    assert ids != [[id(text) for text in group] for group in other]
    for group in first:
        assert sum(len(text.answer) for text in group) <= 64
        assert max(len(text.prompt) + len(text.answer) for text in group) * len(group) <= 128
    lengths = [(len(text.prompt), len(text.answer)) for text in texts]
    assert [[id(texts[i]) for i in some] for some in group_lengths(lengths, 64, "a")] == ids
