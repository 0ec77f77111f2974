"""Prompts and kinds of blocks that are held out."""

from __future__ import annotations

from itertools import chain

import pytest
from tiny import byte_model, byte_tokenizer
from writing_samples import decode, options

from redrafter_mlx.distill.corpus.prompts.conversations import Conversation
from redrafter_mlx.distill.corpus.prompts.user_turns import TurnPrefix, UserTurns
from redrafter_mlx.distill.corpus.writing.writer import Writer
from redrafter_mlx.target_model.model import Target


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
