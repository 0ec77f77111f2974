"""Answers that the target writes in batches are those of its plain decoding."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from evaluations import accepted_along
from hybrids import BY_RECURRENCE, HYBRIDS, hybrid_model
from tiny import ARCHITECTURES, byte_tokenizer, plain_tokens, random_drafter, random_model
from writing_samples import PROMPTS

from redrafter_mlx.config import BeamShape
from redrafter_mlx.distill.corpus.extras import Extras
from redrafter_mlx.distill.corpus.filters import loop_start
from redrafter_mlx.distill.corpus.writing import generation, read_prompts
from redrafter_mlx.distill.corpus.writing.generation import row_bytes, write_answers, write_turns
from redrafter_mlx.distill.evaluation.acceptance import simulate_steps
from redrafter_mlx.engine.engine import Redrafter
from redrafter_mlx.target_model.model import Target


def until_loop(tokens: list[int]) -> list[int]:
    start = loop_start(tokens)
    return tokens if start is None else tokens[:start]


@pytest.mark.parametrize("name", ["llama", "qwen3", "gemma2", *BY_RECURRENCE])
def test_batched_answers_equal_plain_decoding(name: str) -> None:
    target = Target(hybrid_model(name) if name in HYBRIDS else random_model(name))
    model = target.plain
    assert target.row_masks
    written = write_answers(target, PROMPTS, eos=[], max_tokens=30)
    for prompt, got in zip(PROMPTS, written, strict=True):
        plain = plain_tokens(model, prompt, 30)
        assert until_loop(got.answer.tolist()) == until_loop(plain)
        assert got.prompt == prompt


def test_attention_has_few_extents_while_answers_grow(monkeypatch: pytest.MonkeyPatch) -> None:
    extents: list[int] = []

    class Recorded(read_prompts.EvenCache):
        def make_mask(self, *args: Any, **kwargs: Any) -> mx.array:
            mask = super().make_mask(*args, **kwargs)
            extents.append(mask.shape[-1])
            return mask

    monkeypatch.setattr(read_prompts, "EvenCache", Recorded)
    write_answers(Target(random_model()), PROMPTS, eos=[], max_tokens=70, stop_at_loops=False)
    assert len(extents) == 71
    assert len(set(extents)) == 3


def test_stored_states_choose_the_answer() -> None:
    target = Target(random_model())
    for written in write_answers(target, PROMPTS, eos=[3], max_tokens=12):
        logits = target.logits(mx.array(written.states, mx.float32)[None])[0]
        assert mx.argmax(logits, axis=-1).tolist() == written.answer.tolist()


def test_an_answer_ends_with_its_end_token_and_the_others_go_on() -> None:
    model = random_model()
    plain = [plain_tokens(model, prompt, 20) for prompt in PROMPTS]
    end = plain[1][4]
    written = write_answers(Target(model), PROMPTS, eos=[end], max_tokens=20)
    for tokens, got in zip(plain, written, strict=True):
        stop = tokens.index(end) + 1 if end in tokens else 20
        assert got.ended == (end in tokens)
        assert until_loop(got.answer.tolist()) == until_loop(tokens[:stop])
        assert len(got.states) == len(got.answer)


@pytest.mark.parametrize("model", [random_model(), hybrid_model("qwen3_5")])
def test_an_opening_is_prompt_and_what_follows_is_the_greedy_answer_to_it(model: nn.Module) -> None:
    key = mx.random.key(3)
    written = write_answers(
        Target(model), PROMPTS, eos=[], max_tokens=10, openings=(0, 4), temperature=1.0, key=key
    )
    assert len(written) == 2 * len(PROMPTS)
    for i, got in enumerate(written):
        prompt = PROMPTS[i // 2]
        assert len(got.prompt) == len(prompt) + (0, 4)[i % 2]
        assert got.answer.tolist() == plain_tokens(model, got.prompt, 10)


def one_mask_for_all(model: nn.Module) -> nn.Module:
    """Return the model with attention that accepts only one mask for all rows."""

    class OneMask(nn.Module):
        def __init__(self, inner: nn.Module) -> None:
            super().__init__()
            self.inner = inner

        def __call__(self, x: mx.array, mask: object = None, cache: object = None) -> mx.array:
            if isinstance(mask, mx.array) and mask.size // mask.shape[-2] // mask.shape[-1] > 1:
                raise ValueError("one mask for all rows")
            out: mx.array = self.inner(x, mask=mask, cache=cache)
            return out

    for layer in model.model.layers:
        layer.self_attn = OneMask(layer.self_attn)
    return model


def test_attention_with_row_masks_in_either_form_is_read_in_batches() -> None:
    for name in ARCHITECTURES:
        assert Target(random_model(name)).row_masks, name


def test_a_model_that_takes_one_mask_for_all_rows_writes_one_row_at_a_time() -> None:
    target = Target(one_mask_for_all(random_model()))
    assert not target.row_masks
    written = write_answers(target, PROMPTS, eos=[], max_tokens=8)
    for prompt, got in zip(PROMPTS, written, strict=True):
        assert got.answer.tolist() == plain_tokens(random_model(), prompt, 8)


@pytest.mark.parametrize("at_once", [1, 2, 5])
@pytest.mark.parametrize("name", ["llama", "gemma2"])
def test_what_is_written_does_not_depend_on_the_rows_at_once(name: str, at_once: int) -> None:
    target, key = Target(random_model(name)), mx.random.key(5)
    room = at_once * row_bytes(target, 20)

    def answers(room: int | None) -> list[tuple[list[int], list[int]]]:
        written = write_answers(
            target, PROMPTS, [], 8, openings=(0, 4), key=key, room=room
        )  # fmt: skip
        for w in written:
            assert len(w.states) == len(w.answer)
            assert len(w.prompt_states) == len(w.prompt) - 1
        return [(w.prompt, w.answer.tolist()) for w in written]

    def turns(room: int | None) -> list[list[list[int]]]:
        return write_turns(target, PROMPTS, (3, 1, 2), range(0, 97, 5), 12, 1.0, key, room)

    assert answers(room) == answers(None)
    assert turns(room) == turns(None)
    assert sum(map(len, turns(None))) > 0


@pytest.mark.parametrize("changes", [{}, {"head": "tied"}, {"context_layers": (0, 1)}])
def test_simulated_steps_equal_those_of_decoding(changes: dict[str, object]) -> None:
    few = 16  # vocabulary size, so that some of a random drafter's drafts are right
    model = random_model(vocab_size=few)
    drafter = random_drafter(seed=4, vocab_size=few, **changes)
    target = Target(model)
    extras = Extras(drafter.config.context_layers)
    shape = BeamShape(3, 4)
    redrafter = Redrafter(model, byte_tokenizer(), drafter)
    seen: list[int] = []
    for prompt in PROMPTS:
        (written,) = write_answers(target, [prompt], eos=[], max_tokens=60, stop_at_loops=False)
        (text,) = extras.compute(target, [written.text(target)])
        accepted = accepted_along(drafter.bind(target), [text], shape)
        steps: dict[int, int] = {}
        tokens = []
        for response in redrafter.stream(prompt, max_tokens=60, beam_width=3, beam_length=4):
            steps.setdefault(response.steps, len(response.step.tokens) - 1)
            tokens.append(response.token)
        assert tokens[: len(text.answer)] == text.answer.tolist()
        simulated = simulate_steps(accepted, np.zeros(len(text.answer))).tolist()
        assert len(simulated) > 5
        assert simulated == [steps[i + 1] for i in range(len(simulated))]
        seen += simulated
    assert set(seen) >= {0, 1, 3}, "drafts of several lengths were accepted"


def test_a_loop_begins_where_a_run_repeats() -> None:
    assert loop_start([1, 2, 3, 4, 1, 2, 3, 9], window=3) == 4
    assert loop_start([1, 2, 3, 4, 5, 6], window=3) is None
    assert loop_start([7] * 10, window=4) == 1


def test_memory_of_earlier_tokens_is_returned_while_an_answer_is_written(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Attention needs larger arrays at each token: those of all sizes must not be kept."""
    monkeypatch.setattr(generation, "MAX_CACHED", -1)
    kept: list[int] = []
    clear = mx.clear_cache

    def counted() -> None:
        clear()
        kept.append(mx.get_cache_memory())

    monkeypatch.setattr(mx, "clear_cache", counted)
    write_answers(Target(random_model()), [[1, 2, 3]] * 4, set(), 20, stop_at_loops=False)
    assert kept == [0] * 20
