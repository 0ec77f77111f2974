"""Prompts that come at once and begin alike: what they share is read once."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import mlx.core as mx
import mlx.nn as nn
import pytest
from eagle_files import TRAINED, load
from eagle_samples import LAYERS, random_tensors, write_files
from tiny import byte_model, byte_tokenizer, random_drafter, truncated
from waiting import wait_for

from redrafter_mlx.decoding.cache.prefix_cache import PrefixCache
from redrafter_mlx.drafting.draft_model import DraftModel
from redrafter_mlx.drafting.untrained.ngram import Lookup
from redrafter_mlx.engine.engine import Redrafter
from redrafter_mlx.errors import DrafterError
from redrafter_mlx.response import Completion
from redrafter_mlx.target_model.cache.kv_cache import TreeCache
from redrafter_mlx.target_model.model import Target

SHARED = [(7 * i + 3) % 256 for i in range(300)]
PROMPTS = [[*SHARED, 1, n, 5] for n in range(4)]
"""They share a token after the shared ones, too."""


@pytest.fixture(scope="module")
def model() -> nn.Module:
    return byte_model(
        num_hidden_layers=LAYERS, tie_word_embeddings=False, max_position_embeddings=10**5
    )


@pytest.fixture
def read(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The number of prompt tokens of every call."""
    sizes = list[int]()
    honest: Callable[..., mx.array] = Target.append

    def append(
        target: Target, tokens: mx.array, cache: TreeCache, start: int, length: int = 0
    ) -> mx.array:
        sizes.append(tokens.size)
        return honest(target, tokens, cache, start, length)

    monkeypatch.setattr(Target, "append", append)
    return sizes


DRAFTERS = ("none", "own and lookup", "draft model", "EAGLE-3")


@pytest.fixture(params=DRAFTERS)
def redrafter(
    model: nn.Module, request: pytest.FixtureRequest, tmp_path: Path
) -> Iterator[Redrafter]:
    drafter: object = None
    if request.param == "own and lookup":
        drafter = random_drafter(vocab_size=258)
    elif request.param == "draft model":
        drafter = DraftModel(truncated(model, 1), byte_tokenizer())
    elif request.param == "EAGLE-3":
        sample = TRAINED["EAGLE-3"]
        folder = write_files(tmp_path / "eagle", sample, random_tensors(sample))
        drafter = load(folder, Target(model))
    host = (Lookup(3),) if request.param == "own and lookup" else ()
    made = Redrafter(
        model, byte_tokenizer(), drafter, host_drafters=host  # type: ignore[arg-type]
    )  # fmt: skip
    yield made
    made.close()


def answers(redrafter: Redrafter, prompts: list[list[int]], **options: object) -> list[list[int]]:
    found: list[list[int]] = [[] for _ in prompts]
    for i, response in redrafter.batch(prompts, **options):  # type: ignore[arg-type]
        found[i].append(response.token)
    return found


def test_a_prefix_of_prompts_that_come_at_once_is_read_once(
    redrafter: Redrafter, read: list[int]
) -> None:
    alone = [
        redrafter.generate(prompt, max_tokens=8, cache_prompt=False).token_ids for prompt in PROMPTS
    ]
    read.clear()
    assert answers(redrafter, PROMPTS, max_tokens=8) == alone
    assert sum(read) <= len(SHARED) + 4 * len(PROMPTS), "the prefix, and a few tokens of each"


def test_without_the_prefix_cache_each_prompt_is_read_whole(
    model: nn.Module, read: list[int]
) -> None:
    redrafter = Redrafter(model, byte_tokenizer())
    answers(redrafter, PROMPTS, max_tokens=2, cache_prompt=False)
    assert sum(read) == sum(map(len, PROMPTS))
    redrafter.close()


@pytest.fixture
def short_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Prompts are read 64 tokens at a time."""
    monkeypatch.setattr("redrafter_mlx.engine.prompts.reading.MAX_TOKENS", 64)
    monkeypatch.setattr("redrafter_mlx.engine.prompts.reading.PREFILL_SECONDS", 1e-6)


@pytest.fixture
def plain(model: nn.Module) -> Iterator[Redrafter]:
    made = Redrafter(model, byte_tokenizer())
    yield made
    made.close()


@pytest.mark.usefixtures("short_chunks")
@pytest.mark.parametrize("after", [64, 256, 310], ids=["before", "near", "past"])
def test_a_prompt_that_comes_while_another_is_read_shares_what_both_begin_with(
    plain: Redrafter, read: list[int], after: int
) -> None:
    """Whether the other one has read the shared part by then or not."""
    first = [*SHARED, *range(200)]
    second = [*SHARED, 9, 9, 9]
    want = plain.generate(second, max_tokens=5, cache_prompt=False).token_ids
    read.clear()
    with ThreadPoolExecutor(1) as pool:
        begun = list[Future[Completion]]()

        def begin(done: int, total: int) -> None:
            del total
            if done >= after and not begun:
                begun.append(pool.submit(plain.generate, second, max_tokens=5))
                wait_for(lambda: not plain.core.submitted.empty())

        assert len(list(plain.stream(first, max_tokens=2, on_prefill=begin))) == 2
        assert begun[0].result().token_ids == want
    assert sum(read) == len(first) + 3


@pytest.mark.usefixtures("short_chunks")
def test_when_the_answer_that_reads_fails_one_of_the_others_reads_for_all(
    plain: Redrafter, read: list[int]
) -> None:
    """One of them reads what both share, and the other one waits for that."""
    want = plain.generate(PROMPTS[1], max_tokens=5, cache_prompt=False).token_ids
    read.clear()
    with ThreadPoolExecutor(2) as pool:
        others = list[Future[Completion]]()

        def begin(done: int, total: int) -> None:
            del total
            if done >= 128 and not others:
                others.extend(pool.submit(plain.generate, PROMPTS[1], max_tokens=5) for _ in "ab")
                wait_for(lambda: plain.core.submitted.qsize() == 2)
                raise InterruptedError

        with pytest.raises(InterruptedError):
            list(plain.stream(PROMPTS[0], max_tokens=2, on_prefill=begin))
        assert [other.result().token_ids for other in others] == [want, want]
    assert sum(read) <= 192 + len(SHARED) + 10


@pytest.mark.usefixtures("short_chunks")
def test_a_prompt_that_begins_otherwise_does_not_wait(plain: Redrafter) -> None:
    ended = list[str]()
    with ThreadPoolExecutor(1) as pool:
        others = list[Future[Completion]]()

        def begin(done: int, total: int) -> None:
            del done
            if not others:
                others.append(pool.submit(plain.generate, [7, 8, 9], max_tokens=1))
                others[0].add_done_callback(lambda _: ended.append("short"))
                wait_for(lambda: not plain.core.submitted.empty())
            elif total == 1000 and "short" in ended:
                ended.append("still reading")

        list(plain.stream([5] * 1000, max_tokens=1, on_prefill=begin))
        others[0].result()
    assert ended[:2] == ["short", "still reading"]


def test_a_drafter_that_fails_while_a_prefix_is_kept_ends_no_answer(
    plain: Redrafter, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The prompts are read apart then."""
    want = answers(plain, PROMPTS, max_tokens=4, cache_prompt=False)

    def fail(*given: object) -> None:
        raise DrafterError(f"it cannot keep {len(given)} things")

    monkeypatch.setattr(PrefixCache, "keep", fail)
    assert answers(plain, PROMPTS, max_tokens=4) == want
