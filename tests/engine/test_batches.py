"""Many answers share their steps, each as if it were alone."""

from __future__ import annotations

from collections import abc
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from engines import ENDLESS, PROMPTS, Build, Calls, tokens_of
from tiny import random_drafter
from waiting import wait_for

from redrafter_mlx.decoding.sequence import Proposal, Sequence
from redrafter_mlx.engine.engine import Redrafter
from redrafter_mlx.errors import BadInputError
from redrafter_mlx.tuning.policy import TunedPolicy


def test_answers_of_many_threads_share_their_steps(redrafter: Redrafter) -> None:
    want = [tokens_of(redrafter, p, max_tokens=40) for p in PROMPTS]
    calls = Calls(redrafter)
    with ThreadPoolExecutor(6) as pool:
        got = list(pool.map(lambda p: tokens_of(redrafter, p, max_tokens=40), PROMPTS))
    assert got == want
    assert max(calls.of("step")) > 1


EACH_ITS_OWN: list[dict[str, object]] = [
    {},
    {"temperature": 0.8, "seed": 3},
    {"temperature": 1.2, "top_k": 20, "seed": 3, "logprobs": True},
    {"repetition_penalty": 1.3, "max_tokens": 7},
    {"draft": False, "temperature": 0.8, "seed": 9},
    {"beam_width": 3, "beam_length": 4, "temperature": 1.0, "accept": "rejection", "seed": 5},
    {"beam_width": 2, "beam_length": 3},
    {"temperature": 0.9, "accept": "typical", "beam_width": 2, "beam_length": 3, "seed": 8},
]


def test_a_request_gets_the_same_text_alone_and_among_others(redrafter: Redrafter) -> None:
    """Seeds, filters, penalties, shapes and acceptance methods, all at once."""
    each = [{"max_tokens": 30, **options} for options in EACH_ITS_OWN]
    want = [tokens_of(redrafter, [5, 6, 7], **options) for options in each]
    with ThreadPoolExecutor(8) as pool:
        futures = [pool.submit(tokens_of, redrafter, [5, 6, 7], **options) for options in each]
        assert [future.result() for future in futures] == want


def test_stop_strings_and_ends_cut_each_row_of_a_batch_where_they_would_alone(
    build: Build, redrafter: Redrafter
) -> None:
    text = build(None).generate([72, 101], max_tokens=40).text
    each = [{"stop": text[i : i + 2], "max_tokens": 40} for i in (3, 9, 17)]
    each += [{"max_tokens": n} for n in (1, 2, 5)]
    want = [redrafter.generate([72, 101], **options) for options in each]  # type: ignore[arg-type]
    with ThreadPoolExecutor(6) as pool:
        futures = [pool.submit(redrafter.generate, [72, 101], **options) for options in each]
        for future, alone in zip(futures, want, strict=True):
            got = future.result()
            assert (got.text, got.token_ids) == (alone.text, alone.token_ids)
            assert got.finish_reason == alone.finish_reason


def test_batch_answers_many_prompts_at_once(redrafter: Redrafter) -> None:
    want = [tokens_of(redrafter, p, max_tokens=20) for p in PROMPTS]
    got: list[list[int]] = [[] for _ in PROMPTS]
    for i, response in redrafter.batch(PROMPTS, max_tokens=20):
        got[i].append(response.token)
    assert got == want
    with pytest.raises(BadInputError, match="prompt"):
        redrafter.batch([[1], []])
    assert list(redrafter.batch([])) == []


def test_requests_that_come_together_begin_with_the_shape_of_their_batch(
    redrafter: Redrafter, monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes: list[int] = []
    choose = TunedPolicy.propose

    def counted(policy: TunedPolicy, rows: abc.Sequence[Sequence]) -> Proposal:
        sizes.append(len(rows))
        return choose(policy, rows)

    monkeypatch.setattr(TunedPolicy, "propose", counted)
    for _ in redrafter.batch(PROMPTS[:3], max_tokens=1):
        pass
    assert sizes[0] == 3


def test_without_drafts_the_drafter_is_never_called(build: Build) -> None:
    drafter = random_drafter(vocab_size=258)
    redrafter = build(drafter)
    assert redrafter.drafter is not None

    def called(*_: object) -> None:
        raise AssertionError("the drafter was called")

    for name in ("draft", "extend", "draw"):
        setattr(redrafter.drafter, name, called)
    assert len(list(redrafter.batch(PROMPTS, max_tokens=8, draft=False))) == 48


def test_answers_beyond_the_limit_wait_for_their_turn(build: Build) -> None:
    redrafter = build(None, max_batch=2)
    calls = Calls(redrafter)
    got: list[list[int]] = [[] for _ in PROMPTS]
    for i, response in redrafter.batch(PROMPTS, max_tokens=15):
        got[i].append(response.token)
    assert max(calls.of("step")) == 2
    assert got == [tokens_of(redrafter, p, max_tokens=15) for p in PROMPTS]


def test_graphs_are_bounded_over_fifty_requests(
    build: Build, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("redrafter_mlx.target_model.compiled.MAX_GRAPHS", 10)
    redrafter = build("lookup")
    rng = np.random.default_rng(0)
    prompts = [rng.integers(0, 9, rng.integers(1, 60)).tolist() for _ in range(50)]
    assert {i for i, _ in redrafter.batch(prompts, max_tokens=4)} == set(range(50))
    assert len(redrafter.target.call.graphs) <= 10


def test_status_counts_what_runs_and_what_waits(build: Build) -> None:
    redrafter = build(None, max_batch=1)
    began = redrafter.status.last_progress
    first, second = (redrafter.stream(p, max_tokens=ENDLESS) for p in PROMPTS[:2])
    next(first)
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(next, second)
        wait_for(lambda: redrafter.status.waiting == 1)
        assert not waiting.done()
        assert redrafter.status.running == 1
        first.close()
        waiting.result(30)
    assert redrafter.status.last_progress > began
    second.close()
    assert (redrafter.status.running, redrafter.status.waiting) == (0, 0)
