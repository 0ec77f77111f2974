"""What the engine reckons that answers need of memory."""

from __future__ import annotations

import mlx.nn as nn
import pytest
from engines import LONG, failing, make, tokens_of
from tiny import byte_tokenizer

from redrafter_mlx.config import GenerationOptions
from redrafter_mlx.drafting.draft_model import DraftModel
from redrafter_mlx.drafting.untrained.ngram import Lookup
from redrafter_mlx.engine.request import Request
from redrafter_mlx.errors import EngineFailedError


def test_memory_is_reserved_for_a_drafters_cache_whatever_answered_last(model: nn.Module) -> None:
    """A draft model of the target's size doubles the bytes of a position."""
    redrafter = make(model, DraftModel(model, byte_tokenizer()))
    budget = redrafter.core.scheduler.memory
    of_target = budget.needed(1000)
    redrafter.generate([1, 2, 3], max_tokens=3)
    drafted = budget.needed(1000)
    assert drafted > 1.5 * of_target
    redrafter.generate([1, 2, 3], max_tokens=3, draft=False)
    assert budget.needed(1000) == drafted
    redrafter.close()


def test_memory_is_reserved_for_the_index_of_a_text(model: nn.Module) -> None:
    """Of those that run, too: the host keeps it, where MLX does not count."""
    plain, indexing = (make(model, each).core.scheduler.memory for each in (None, "lookup"))
    assert indexing.needed(1000) - plain.needed(1000) == 1000 * Lookup.bytes_per_token
    both = indexing.needed(1000, [500]) - plain.needed(1000, [500])
    assert both == 1500 * Lookup.bytes_per_token


def test_the_bytes_of_a_token_are_known_before_the_first_answer(model: nn.Module) -> None:
    redrafter = make(model, None)
    budget = redrafter.core.scheduler.memory
    known = budget.slot
    tokens_of(redrafter, LONG, max_tokens=3)
    assert budget.slot == known > 0
    redrafter.close()


def test_a_long_prompt_waits_until_all_rows_have_room_for_its_length(model: nn.Module) -> None:
    """A batch's rows are as long as the longest, and it is copied when one joins."""
    redrafter = make(model, None, prefix_bytes=0)
    redrafter.generate([1, 2], max_tokens=3)
    budget = redrafter.core.scheduler.memory
    short, long = (Request(tuple(p), GenerationOptions(max_tokens=3)) for p in ([1, 2], LONG))
    S, T = (budget.slots(request) for request in (short, long))

    def bytes_of(slots: int, rows: int) -> int:
        return rows * budget.work + int(slots * budget.slot)

    assert budget.needed(T) == bytes_of(T, 1)
    assert budget.needed(T, [S] * 7, 0) == bytes_of(T + 8 * T, 8)
    assert budget.needed(S, [T], 0) == bytes_of(S + 2 * T, 2)
    assert budget.needed(S, [T], 1) == bytes_of(S + 2 * T + T, 2), "its prompt is being read"
    assert budget.slots(short, len(LONG) + 3) == T, "it has grown"
    redrafter.close()


def test_a_failed_engine_still_knows_the_bytes_of_a_token(
    model: nn.Module, monkeypatch: pytest.MonkeyPatch
) -> None:
    redrafter = make(model)
    redrafter.generate([1, 2], max_tokens=3)
    redrafter.core.scheduler.memory.slot = 9.0  # as if measured
    with monkeypatch.context() as patched:
        patched.setattr(redrafter.target, "append", failing(1, redrafter.target.append))
        with pytest.raises(EngineFailedError):
            redrafter.generate([1, 2], max_tokens=3)
    assert redrafter.core.scheduler.memory.slot == 9.0
    redrafter.close()
