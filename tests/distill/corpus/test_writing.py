"""Batched generation of the corpus by the target, against its plain decoding."""

from __future__ import annotations

from itertools import chain
from pathlib import Path
from typing import Any, get_args

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from backends import frees_at_once
from evaluations import accepted_along
from hybrids import BY_RECURRENCE, HYBRIDS, hybrid_model
from tiny import (
    ARCHITECTURES,
    byte_model,
    byte_tokenizer,
    plain_tokens,
    random_drafter,
    random_model,
)
from train_runs import refuse_system_messages

from redrafter_mlx.config import BeamShape
from redrafter_mlx.distill.corpus import reader as reader_module
from redrafter_mlx.distill.corpus.extras import Extras
from redrafter_mlx.distill.corpus.filters import NOTHING, loop_start
from redrafter_mlx.distill.corpus.folder import CorpusGoal, CorpusSize
from redrafter_mlx.distill.corpus.prompts.conversations import Conversation, read_conversations
from redrafter_mlx.distill.corpus.prompts.given_texts import Given, corpus_key
from redrafter_mlx.distill.corpus.prompts.prompt_starters import PROMPT_STARTERS, draw_starters
from redrafter_mlx.distill.corpus.prompts.user_turns import TurnPrefix, UserTurns
from redrafter_mlx.distill.corpus.reader import Reader, continuations
from redrafter_mlx.distill.corpus.shards import Shard, Text, load_shard, save_shard, summarise_shard
from redrafter_mlx.distill.corpus.writing import generation, read_prompts
from redrafter_mlx.distill.corpus.writing.block_progress import BlockProgress
from redrafter_mlx.distill.corpus.writing.generation import (
    Written,
    row_bytes,
    write_answers,
    write_turns,
)
from redrafter_mlx.distill.corpus.writing.writer import Writer
from redrafter_mlx.distill.evaluation.acceptance import simulate_steps
from redrafter_mlx.distill.job import TrainingJob
from redrafter_mlx.distill.options import OPENINGS, Labels, TrainOptions, WritingOptions
from redrafter_mlx.engine.engine import Redrafter
from redrafter_mlx.errors import BadInputError, DamagedFileError
from redrafter_mlx.target_model.model import Target

PROMPTS = [[5, 6, 7], [8, 9, 10, 11, 12, 13, 14], [15]]


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
def test_an_opening_is_prompt_and_what_follows_is_the_greedy_answer_to_it(
    model: nn.Module,
) -> None:
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


def test_drawn_turns_repeat_with_their_key_and_differ_between_rows() -> None:
    target = Target(random_model())
    ends = range(15)
    draw = [write_turns(target, [[1, 2]], [6], ends, 12, 2.0, mx.random.key(k)) for k in (1, 1, 2)]
    assert draw[0] == draw[1] != draw[2]
    assert len({tuple(turn) for turn in draw[0][0]}) == len(draw[0][0]) > 1
    assert not any(token in ends for turn in draw[0][0] for token in turn)


@pytest.mark.parametrize("name", ["llama", "gemma2"])
def test_turns_drawn_together_go_on_from_their_own_prefix(name: str) -> None:
    """At a temperature near 0, so that plain decoding gives the expected turns."""
    model = random_model(name)
    counts = [3, 0, 2]
    plain = [plain_tokens(model, prompt, 20) for prompt in PROMPTS]
    ends = {tokens[5] for tokens in plain}
    drawn = write_turns(Target(model), PROMPTS, counts, ends, 20, 1e-4, mx.random.key(5))
    for tokens, count, turns in zip(plain, counts, drawn, strict=True):
        stop = next(i for i, token in enumerate(tokens) if token in ends)
        assert turns == ([tokens[:stop]] if stop else []) * count


def test_prompts_continue_their_starters_and_each_starter_comes_in_turn() -> None:
    tokenizer, target = byte_tokenizer(), Target(byte_model())
    twice = draw_starters(2 * len(PROMPT_STARTERS), "seed")
    assert set(twice) == set(PROMPT_STARTERS)
    assert set(twice.values()) == {2}
    assert draw_starters(9, "a") == draw_starters(9, "a") != draw_starters(9, "b")
    said = Conversation(("hi",), ("ho",), "be brief")
    openings = [TurnPrefix(Conversation(()), 40, "Compare"), TurnPrefix(said, 20)]
    block = BlockProgress()
    begun, free = UserTurns(target, tokenizer).draw(openings, 5.0, mx.random.key(0), block)
    assert all(turn.startswith("Compare") for turn in begun)
    assert not any(turn.startswith("Compare") for turn in free)
    assert len(begun) + len(free) + block.left_out.total() == 60
    assert begun


@pytest.mark.parametrize(
    "changes",
    [{}, {"head": "tied"}, {"context_layers": (0, 1)}],
)
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


def options(**changes: object) -> WritingOptions:
    return WritingOptions(**{"batch": 6, "max_answer_tokens": 12, **changes})  # type: ignore[arg-type]


def test_blocks_depend_on_their_number_alone() -> None:
    tokenizer, target = byte_tokenizer(), Target(byte_model())
    prompts = [Conversation((f"prompt {i}",)) for i in range(7)]
    writer = Writer(target, tokenizer, prompts, options(own_share=0.5))
    backwards = {b: writer.write(b) for b in (5, 4, 0)}
    for b in (0, 4, 5):
        again = writer.write(b)
        assert [t.prompt for t in again.texts] == [t.prompt for t in backwards[b].texts]
        assert all(
            np.array_equal(x.answer, y.answer)
            for x, y in zip(again.texts, backwards[b].texts, strict=True)
        )


def test_given_prompts_are_all_asked_before_any_is_asked_again() -> None:
    tokenizer, target = byte_tokenizer(), Target(byte_model())
    prompts = [Conversation((f"prompt {i}",)) for i in range(5)]
    writer = Writer(target, tokenizer, prompts, options(own_share=0.0, openings=OPENINGS))
    asked = [
        {i for i in range(5) for t in writer.write(b).texts if f"prompt {i}<" in decode(t)}
        for b in range(6)
    ]

    assert set().union(*asked[:3]) == set(range(5))
    assert asked[0] == asked[3]  # the second round, with other openings
    assert not asked[0] & asked[1]
    assert [writer.has_new_prompts(b) for b in range(6)] == [True] * 3 + [False] * 3


def decode(text: Text) -> str:
    return str(byte_tokenizer().decode(text.prompt))


def test_later_turns_follow_the_answers_to_the_earlier_ones() -> None:
    tokenizer, target = byte_tokenizer(), Target(byte_model())
    given = Conversation(("first", "second"), ("an answer",), "be brief")
    writer = Writer(target, tokenizer, [given], options(own_share=0.0, batch=1, openings=(0,)))
    (text,) = writer.write(0).texts
    assert decode(text) == (
        "<|im_start|>system\nbe brief<|im_end|>\n<|im_start|>user\nfirst<|im_end|>\n"
        "<|im_start|>assistant\nan answer<|im_end|>\n<|im_start|>user\nsecond<|im_end|>\n"
        "<|im_start|>assistant\n"
    )


def test_a_shard_comes_back_as_it_was_written(tmp_path) -> None:  # type: ignore[no-untyped-def]
    rng = np.random.default_rng(0)
    texts = [
        Text([1, 2, 3], np.array([4, 5], np.int32), rng.normal(size=(2, 4)).astype(np.float16)),
        Text([9], np.array([7], np.int32), rng.normal(size=(1, 4)).astype(np.float16)),
    ]
    path = tmp_path / "block-000000.safetensors"
    save_shard(Shard(texts, {"answer too short": 2}), path, {"seed": "0"})
    back = load_shard(path)
    assert [t.prompt for t in back.texts] == [[1, 2, 3], [9]]
    for mine, theirs in zip(texts, back.texts, strict=True):
        assert np.array_equal(mine.answer, theirs.answer)
        assert np.array_equal(mine.states, theirs.states)
    summary = summarise_shard(path)
    assert (summary.answer_tokens, summary.texts, summary.left_out) == (3, 2, back.left_out)
    assert [p.name for p in tmp_path.iterdir()] == [path.name]


def test_a_shard_cut_short_is_refused_by_name(tmp_path) -> None:  # type: ignore[no-untyped-def]
    path = tmp_path / "block-000000.safetensors"
    text = Text([1], np.array([4], np.int32), np.zeros((1, 4), np.float16))
    save_shard(Shard([text], {}), path, {})
    path.write_bytes(path.read_bytes()[:-3])
    for read in (load_shard, summarise_shard):
        with pytest.raises(DamagedFileError, match="block-000000"):
            read(path)


@pytest.mark.parametrize(
    ("content", "turns", "answers"),
    [
        ("What is 2 + 2?\n\nWhy?\n", [("What is 2 + 2?",), ("Why?",)], [(), ()]),
        ('{"turns": ["a", "b"], "question_id": 1}', [("a", "b")], [()]),
        ('{"instruction": "Sum", "input": "text", "output": "t"}', [("Sum\n\ntext",)], [("t",)]),
        ('{"conversations": [{"from": "human", "value": "hi"}, {"from": "gpt", "value": "yo"}]}',
         [("hi",)], [("yo",)]),
        ('{"messages": [{"role": "system", "content": "s"}, {"role": "user", "content": "u"}]}',
         [("u",)], [()]),
        ('[{"prompt": "p"}, "q"]', [("p",), ("q",)], [(), ()]),
    ],
)  # fmt: skip
def test_prompt_files_are_read_in_their_formats(tmp_path, content, turns, answers) -> None:  # type: ignore[no-untyped-def]
    path = tmp_path / "prompts.jsonl"
    path.write_text(content, encoding="utf-8")
    found = read_conversations(path)
    assert [c.turns for c in found] == turns
    assert [c.answers for c in found] == answers


@pytest.mark.parametrize(
    ("content", "named"),
    [
        ("", "holds no prompts"),
        ('{"prompt": "a"}\n{"prompt": ', "line 2"),
        ('{"colour": "a"}', "line 1 holds no prompt"),
        ('{"messages": [{"role": "cat", "content": "u"}]}', "line 1 holds a message"),
    ],
)
def test_bad_prompt_files_are_refused_in_one_line(tmp_path, content: str, named: str) -> None:  # type: ignore[no-untyped-def]
    path = tmp_path / "prompts.jsonl"
    path.write_text(content, encoding="utf-8")
    with pytest.raises(BadInputError, match=named):
        read_conversations(path)
    with pytest.raises(BadInputError, match="cannot be read"):
        read_conversations(tmp_path / "nowhere.jsonl")


def test_held_out_prompts_are_never_trained_on() -> None:
    tokenizer, target = byte_tokenizer(), Target(byte_model())
    prompts = [Conversation((f"prompt {i}",)) for i in range(5)]
    writer = Writer(target, tokenizer, prompts, options(own_share=0.0, openings=(0, 2)))
    held = [b for b in range(24) if writer.held_out(b)]
    assert 0 in held
    assert 0 < len(held) < 24
    given = {b: {decode(t).split("<|im_end|>")[0] for t in writer.write(b).texts}
             for b in range(5)}  # fmt: skip
    looked_at = set().union(*(given[b] for b in given if b in held))
    learnt = set().union(*(given[b] for b in given if b not in held))
    assert looked_at
    assert learnt
    assert not looked_at & learnt


def test_prompts_are_held_out_whatever_the_seed() -> None:
    """So runs that start from each other's drafters do not train on each other's held-out ones."""
    prompts = [Conversation((f"prompt {i}",)) for i in range(335)]
    held_out, orders = [], []
    for seed, given in enumerate([prompts, prompts[::-1], prompts]):
        once = options(own_share=0.0, openings=(0,), seed=seed)
        writer = Writer(Target(byte_model()), byte_tokenizer(), given, once)
        parts = writer.order.parts
        assert sorted(chain(*parts), key=str) == sorted(prompts, key=str)
        assert len(parts) == writer.order.n_parts == 56
        held_out.append({c for i, part in enumerate(parts) for c in part if writer.held_out(i)})
        orders.append(parts)
    assert held_out[0] == held_out[1] == held_out[2]
    assert len(held_out[0]) == 12
    assert orders[0] != orders[2]


def test_of_a_few_prompts_all_are_trained_on_and_the_targets_own_are_held_out() -> None:
    """Few: they fill fewer blocks than one in which a block is held out."""
    prompts = [Conversation((f"prompt {i}",)) for i in range(5)]
    writer = Writer(Target(byte_model()), byte_tokenizer(), prompts, options(own_share=0.5))
    held = [block for block in range(400) if writer.held_out(block)]
    assert held
    assert all(writer.order.is_own(block) for block in held)
    assert len(held) == 200 // 32 + 1
    many = Writer(
        Target(byte_model()), byte_tokenizer(), prompts * 100, options(own_share=0.5, batch=4)
    )
    assert not all(many.order.is_own(block) for block in range(400) if many.held_out(block))


def test_held_out_blocks_are_of_all_kinds(monkeypatch: pytest.MonkeyPatch) -> None:
    """With starters and without, with a system message and without, of one turn and of two."""
    kinds: list[tuple[bool, bool]] = []
    target, followed = Target(byte_model()), []

    def turns(_: UserTurns, prefixes: list[TurnPrefix], *__: object) -> list[list[str]]:
        kinds.append((bool(prefixes[0].starter), prefixes[0].after.system is not None))
        return [["a turn"] for _ in prefixes]

    monkeypatch.setattr(UserTurns, "draw", turns)
    monkeypatch.setattr(Writer, "converse", lambda *_: followed.append(False) or [])
    monkeypatch.setattr(Writer, "with_follow_ups", lambda *_: followed.append(True) or [])
    writer = Writer(target, byte_tokenizer(), [], options(own_share=1.0, starter_share=0.75))
    held = [block for block in range(32 * 32) if writer.held_out(block)]
    for block in held:
        writer.write(block)
    for found in (*zip(*kinds, strict=True), followed):
        assert {*found} == {True, False}


def test_a_template_that_refuses_system_messages_gets_none() -> None:
    tokenizer = byte_tokenizer()
    refuse_system_messages(tokenizer)
    given = [Conversation(("one",)), Conversation(("two",), system="be kind")]
    writer = Writer(Target(byte_model()), tokenizer, given, options(own_share=0.5))
    assert not writer.takes_system
    for block in range(1, 12, 2):
        writer.write(block)
    shard = writer.write(0)
    assert shard.texts
    assert shard.left_out["prompt refused by the chat template"] == 1


@pytest.mark.parametrize(("ends_in_opening", "said"), [(False, "abc"), (True, "a")])
def test_a_later_turn_follows_the_whole_answer_before_it(
    monkeypatch: pytest.MonkeyPatch, ends_in_opening: bool, said: str
) -> None:
    """Its opening too, which is stored with the prompt, and not the mark of its end as text."""
    model, tokenizer = byte_model(), byte_tokenizer()
    end = tokenizer.encode("<|im_end|>", add_special_tokens=False)[0]

    def answered(target: Target, prompts: list[list[int]], *_: object, **__: object) -> object:
        answer = np.array([*tokenizer.encode("bc", add_special_tokens=False), end], np.int32)
        opening = tokenizer.encode("a", add_special_tokens=False)
        states = np.zeros((3, target.hidden_size), np.float32)
        if ends_in_opening:
            return [Written([*p, *opening, end], answer[:0], states, True, states) for p in prompts]
        return [Written([*p, *opening], answer, states, True, states[:1]) for p in prompts]

    monkeypatch.setattr("redrafter_mlx.distill.corpus.writing.writer.write_answers", answered)
    given = [Conversation(("first", "second"))]
    writer = Writer(Target(model), tokenizer, given, options(own_share=0.0, openings=(1,)))
    shown: list[list[dict[str, str]]] = []
    render = Writer.render
    monkeypatch.setattr(
        Writer,
        "render",
        lambda self, of, turn: shown.append(of.messages(turn)) or render(self, of, turn),
    )
    writer.write(0)
    assert [m["content"] for m in shown[-1]] == ["first", said, "second"]


def test_a_corpus_whose_blocks_stay_empty_is_given_up() -> None:
    goal = CorpusGoal(1000, 10**9, min_blocks=2, max_empty=5)
    left = {"prompt too long": 12}
    assert not goal.reached(CorpusSize(4, 0, 0, 0, 0, 100, left))
    with pytest.raises(BadInputError, match="12 prompt too long"):
        goal.reached(CorpusSize(5, 0, 0, 0, 0, 100, left))
    assert not goal.reached(CorpusSize(50, 1, 10, 0, 1, 100, left))


def test_a_corpus_has_a_block_to_train_on_and_one_to_hold_out() -> None:
    goal = CorpusGoal(1000, 10**9, min_blocks=2)
    assert not goal.reached(CorpusSize(2, 1, 5000, 0, 9, 100, {"text too long": 32}))
    assert goal.reached(CorpusSize(3, 2, 5000, 0, 9, 100, {"text too long": 32}))


@pytest.mark.parametrize("name", ["llama", "gemma2"])
def test_target_labels_are_its_greedy_continuations_of_the_given_text(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reader_module, "FORKS", 2)
    model = random_model(name)
    target = Target(model)
    tokens, first = [5, 6, 7, 20, 21, 22, 23, 24], 3
    got = continuations(target, tokens, first, length=3)
    want = [plain_tokens(model, tokens[: first + j], 4) for j in range(len(tokens) - first)]
    assert got.tolist() == want


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


@frees_at_once
def test_target_labels_hold_the_keys_and_values_of_a_text_once() -> None:
    target = Target(random_model(num_attention_heads=16, num_key_value_heads=16, head_dim=64))
    tokens, length = [i % 90 for i in range(400)], 5
    cache = target.new_cache()
    target.append(mx.array([tokens]), cache, 0)
    once = sum(b.nbytes for b in cache.buffers)
    mx.eval(cache.buffers)
    del cache
    mx.reset_peak_memory()
    before = mx.get_active_memory()
    continuations(target, tokens, 200, length)
    assert mx.get_peak_memory() - before < 5 * once


def test_given_answers_are_read_with_their_end_and_the_states_in_front() -> None:
    target, tokenizer = Target(byte_model()), byte_tokenizer()
    given = Conversation(("first", "second"), ("an answer", "another"))
    reader = Reader(target, tokenizer, [given], "data", 3)
    one, two = reader.write(0).texts
    assert tokenizer.decode(one.answer.tolist()) == "an answer<|im_end|>"
    assert tokenizer.decode(two.answer.tolist()) == "another<|im_end|>"
    assert decode(two).endswith("an answer<|im_end|>\n<|im_start|>user\nsecond<|im_end|>\n"
                                "<|im_start|>assistant\n")  # fmt: skip
    tokens = two.prompt + two.answer.tolist()
    whole = target.hidden(mx.array([tokens]), [None] * target.n_layers)[0]
    np.testing.assert_allclose(
        two.states, np.array(whole[len(two.prompt) - 1 : -1]), rtol=2e-3, atol=2e-3
    )
    assert two.labels is None


def test_given_answers_are_counted_as_they_are_read() -> None:
    given = [
        Conversation(("first", "second"), ("an answer", "another")),
        Conversation(("short",), ("",)),
        Conversation(("long",), ("x" * 300,)),
        Conversation(("last",), ("an end",)),
    ]
    reader = Reader(Target(byte_model()), byte_tokenizer(), given, "data", 3, max_tokens=200)
    shard = reader.write(0)
    assert set(shard.left_out) == {"answer too short", "text too long"}
    read = sum(len(text.answer) for text in shard.texts)
    assert reader.count_tokens(1_000) == read
    assert reader.count_tokens(read - 1) == read - 1


def test_given_conversations_that_the_template_refuses_are_left_out() -> None:
    tokenizer = byte_tokenizer()
    refuse_system_messages(tokenizer)
    given = [Conversation(("one",), ("an answer",), system) for system in (None, "be kind")]
    shard = Reader(Target(byte_model()), tokenizer, given, "data", 3).write(0)
    assert [decode(text) for text in shard.texts] == [
        "<|im_start|>user\none<|im_end|>\n<|im_start|>assistant\n"
    ]
    assert shard.left_out == {"prompt refused by the chat template": 1}


THINKS = "{% if enable_thinking %}<think>{% endif %}"
"""End of a chat template; mlx-lm tells it to think by default only if `<think>` is a token."""


@pytest.mark.parametrize("thinking", [False, True])
def test_a_target_that_can_think_first_does_so_only_if_asked(thinking: bool) -> None:
    tokenizer, target = byte_tokenizer(), Target(byte_model())
    tokenizer.chat_template += THINKS
    prompts = [Conversation(("prompt",))]
    told = options(own_share=0.0, openings=(0,), thinking=thinking)
    (text,) = Writer(target, tokenizer, prompts, told).write(0).texts
    assert decode(text).endswith("assistant\n<think>") is thinking


def test_a_corpus_has_another_key_only_if_its_target_is_told_otherwise() -> None:
    plain, thinks = byte_tokenizer(), byte_tokenizer()
    thinks.chat_template += THINKS
    keys = {
        (name, thinking): corpus_key(
            "target",
            "float32",
            TrainingJob("any", Path("out"), writing=options(thinking=thinking)),
            Given((), (), NOTHING, 0),
            tokenizer,
        )
        for name, tokenizer in (("plain", plain), ("thinks", thinks))
        for thinking in (False, True)
    }
    assert keys["plain", False] == keys["plain", True] == keys["thinks", False]
    assert keys["thinks", False] != keys["thinks", True]


def test_the_length_of_drafts_is_in_the_key_of_a_corpus_only_where_it_is_read() -> None:
    keys = {
        (labels, length): corpus_key(
            "target",
            "float32",
            TrainingJob(
                "any", Path("out"), data=Path("data"), labels=labels,
                training=TrainOptions(draft_length=length, soft_share=0.0),
            ),
            Given((), (), NOTHING, 0),
            byte_tokenizer(),
        )
        for labels in get_args(Labels)
        for length in (3, 5)
    }  # fmt: skip
    assert keys["data", 3] == keys["data", 5]
    assert len(set(keys.values())) == 3
