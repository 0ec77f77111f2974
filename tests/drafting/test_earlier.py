"""Earlier texts: what followed the same tokens in another request's text."""

from __future__ import annotations

import random
import threading
import tracemalloc
from itertools import pairwise

import pytest
from tiny import byte_model, byte_tokenizer, random_drafter

from redrafter_mlx.decoding.sequence import Sequence
from redrafter_mlx.drafting.untrained.continuation import HostDrafter
from redrafter_mlx.drafting.untrained.earlier import EarlierTexts
from redrafter_mlx.drafting.untrained.ngram import Lookup
from redrafter_mlx.engine.engine import Redrafter

QUESTION = [*b"why is the sky blue?"]


def read(store: EarlierTexts, *texts: list[int]) -> None:
    for text in texts:
        store.begin().append(text)


def model(**options: object) -> Redrafter:
    host = (Lookup(), EarlierTexts())
    return Redrafter(byte_model(seed=2), byte_tokenizer(), host_drafters=host, **options)  # type: ignore[arg-type]


@pytest.mark.parametrize("seed", range(20))
def test_the_longest_match_in_another_text_is_continued(seed: int) -> None:
    """As found by a slow search of all positions of all other texts."""
    rng = random.Random(seed)
    texts = [[rng.randrange(3) for _ in range(rng.randrange(1, 60))] for _ in range(4)]
    store, mine = EarlierTexts(), [rng.randrange(3) for _ in range(20)]
    read(store, *texts)
    source = store.begin()
    source.append(mine)
    longest, after = 0, set()
    for text in texts:
        for end in range(len(text) - 1):
            n = 0
            while n <= end and n < len(mine) and text[end - n] == mine[-1 - n]:
                n += 1
            if n >= max(longest, 4):
                after = after if n == longest else set()
                longest = n
                after.add(tuple(text[end + 1 : end + 6]))
    found = source.continuations(1, 5)
    assert bool(found) == bool(after)
    assert all(one.tokens in after for one in found)


def test_of_equally_long_matches_the_most_frequent_continuation_comes_first() -> None:
    store = EarlierTexts()
    read(store, [1, 2, 3, 4, 5, 8], [1, 2, 3, 4, 6, 8], [1, 2, 3, 4, 5, 9], [1, 2, 3, 4, 7])
    source = store.begin()
    source.append([1, 2, 3, 4])
    found = source.continuations(4, 2)
    assert {one.tokens for one in found[:2]} == {(5, 8), (5, 9)}
    assert {one.tokens for one in found[2:]} == {(6, 8), (7,)}
    assert all(a.log_probs[0] > b.log_probs[0] for a, b in pairwise(found))
    assert {one.kind for one in found} == {"earlier"}


def test_a_continuation_is_found_for_some_next_token_wherever_one_is_announced() -> None:
    rng = random.Random(0)
    texts = [[rng.randrange(3) for _ in range(12)] for _ in range(3)]
    for _ in range(60):
        store, mine = EarlierTexts(), [rng.randrange(3) for _ in range(8)]
        read(store, *texts)
        source = store.begin()
        source.append(mine)
        announced, found = source.next_continuation(3), []
        store.texts.pop()
        for token in range(3):
            longer = store.begin()
            longer.append([*mine, token])
            found += longer.continuations(1, 3)
            store.texts.pop()
        best = max([one.expected for one in found], default=0.0)
        assert (announced.expected if announced else 0.0) >= best


def steps_of(host: list[HostDrafter], prompt: list[int], answer: list[int]) -> int:
    """Return the steps of an answer that is known in advance, with copies of up to 15 tokens."""
    sources = tuple(one.begin() for one in host)
    for source in sources:
        source.append(prompt)
    sequence, at, steps = Sequence(lambda _: False, 0, sources), 0, 0
    while at < len(answer):
        found, held = sequence.continuations(1, 15), 0
        if found:
            pairs = zip(found[0].tokens, answer[at:], strict=False)
            held = next((i for i, (a, b) in enumerate(pairs) if a != b), 15)
        for source in sources:
            source.extend(answer[at : at + held + 1])
        at, steps = at + held + 1, steps + 1
    return steps


def test_a_second_edit_of_a_file_takes_no_more_steps_than_with_the_file_alone() -> None:
    rng, edits = random.Random(1), EarlierTexts()
    file = [rng.randrange(500) for _ in range(400)]
    first, second = [*file], [*file]
    first[50:52], second[300:301] = [600, 601, 602], [700, 701]
    lookup = Lookup()
    steps_of([lookup, edits], [900, *file, 901], first)
    alone = steps_of([lookup], [902, *file, 903], second)
    together = steps_of([lookup, edits], [902, *file, 903], second)
    assert together <= alone
    assert steps_of([lookup, edits], [904, 905], second) <= 2 * alone  # the file was not given


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_a_question_asked_again_takes_few_steps_and_gets_the_same_answer(
    temperature: float,
) -> None:
    asked = {"max_tokens": 48, "beam_width": 1, "beam_length": 8, "seed": 3}
    plain = Redrafter(byte_model(seed=2), byte_tokenizer())
    want = plain.generate(QUESTION, temperature=temperature, max_tokens=48, seed=3).token_ids
    redrafter = model()
    answers = [redrafter.generate(QUESTION, temperature=temperature, **asked) for _ in range(3)]
    assert [answer.token_ids for answer in answers] == [want] * 3
    assert answers[1].tokens_per_step > 7
    assert answers[0].steps > answers[1].steps


def test_many_threads_that_ask_at_once_get_their_answers() -> None:
    drafter, host = random_drafter(vocab_size=258), (Lookup(3), EarlierTexts(200))
    redrafter = Redrafter(byte_model(seed=2), byte_tokenizer(), drafter, host_drafters=host)
    plain = Redrafter(byte_model(seed=2), byte_tokenizer())
    prompts = [[*QUESTION, i % 3] for i in range(12)]
    want = [plain.generate(prompt, max_tokens=20).token_ids for prompt in prompts[:3]]
    found: dict[int, list[int]] = {}

    def ask(i: int) -> None:
        found[i] = redrafter.generate(prompts[i], max_tokens=20).token_ids

    threads = [threading.Thread(target=ask, args=(i,)) for i in range(len(prompts))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [found[i] for i in range(12)] == want * 4


def test_a_request_that_keeps_nothing_for_others_neither_uses_nor_keeps_texts() -> None:
    redrafter = model()
    asked = {"max_tokens": 32, "beam_width": 1, "beam_length": 8}
    steps = [redrafter.generate(QUESTION, cache_prompt=False, **asked).steps for _ in range(2)]
    assert steps[0] == steps[1]
    assert redrafter.generate(QUESTION, **asked).steps == steps[0]
    assert redrafter.generate(QUESTION, **asked).steps < steps[0]
    assert redrafter.generate(QUESTION, cache_prompt=False, **asked).steps == steps[0]


def test_texts_that_ended_take_no_more_memory_than_is_reserved() -> None:
    rng, store = random.Random(0), EarlierTexts(8000)
    tracemalloc.start()
    for _ in range(30):
        read(store, [rng.randrange(49_152) for _ in range(1000)])
    held, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert sum(len(text.tokens) for text in store.texts) <= 8000
    assert held <= store.kept_bytes


def test_memory_is_reserved_for_texts_that_ended() -> None:
    limit = {"engine": None}
    with_texts, without = (
        Redrafter(byte_model(seed=2), byte_tokenizer(), host_drafters=host, **limit)
        for host in ((Lookup(), EarlierTexts()), (Lookup(),))
    )
    held = [one.core.scheduler.memory.excess(0) for one in (with_texts, without)]
    assert held[0] - held[1] > 0
