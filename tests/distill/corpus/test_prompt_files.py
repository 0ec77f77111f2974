"""Files of prompts and conversations: rows are used as far as they go, plain text stays plain."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import pytest

from redrafter_mlx.distill.corpus.prompts.conversations import (
    conversation_of,
    read_conversations,
    read_rows,
)
from redrafter_mlx.distill.corpus.prompts.given_texts import read_given
from redrafter_mlx.distill.job import TrainingJob
from redrafter_mlx.errors import BadInputError


def messages(*pairs: tuple[str, object]) -> dict[str, object]:
    return {"messages": [{"role": role, "content": content} for role, content in pairs]}


GOOD = messages(("user", "u"), ("assistant", "a"))


@pytest.mark.parametrize("role", ["bing", "bard", "tool", "function_call", "observation"])
def test_a_row_is_used_up_to_a_role_that_is_not_known_and_the_rest_is_counted(
    role: str, tmp_path: Path
) -> None:
    odd = messages(("user", "q"), ("assistant", "b"), (role, "x"), ("assistant", "c"))
    only, file, unused = messages((role, "x")), tmp_path / "given.jsonl", Counter[str]()
    file.write_text("\n".join(map(json.dumps, [odd, GOOD, only])))
    found = read_conversations(file, unused)
    assert [(c.turns, c.answers) for c in found] == [(("q",), ("b",)), (("u",), ("a",))]
    assert unused.total() == 2
    assert all(repr(role) in why for why in unused)


@pytest.mark.parametrize(
    "row",
    [
        {"colour": "blue"},
        [1],
        messages(("user", None)),
        messages(("assistant", "a"), ("user", "u")),
        messages(("user", [{"type": "image_url"}])),
        {"messages": ["hello"]},
    ],
)
def test_one_row_of_no_use_refuses_no_file(row: object, tmp_path: Path) -> None:
    file, unused = tmp_path / "given.jsonl", Counter[str]()
    file.write_text("\n".join(map(json.dumps, [GOOD, row])))
    assert len(read_conversations(file, unused)) == 1
    assert unused.total() == 1


def test_a_content_in_parts_is_its_text() -> None:
    parts = [{"type": "text", "text": "one "}, {"type": "text", "text": "two"}]
    conversation = conversation_of(messages(("user", parts)), "row")
    assert conversation is not None
    assert conversation.turns == ("one two",)


def test_what_is_left_of_each_file_is_counted_in_one_line(tmp_path: Path) -> None:
    file, other = tmp_path / "given.jsonl", tmp_path / "texts.txt"
    rows = [GOOD, *[messages(("user", "v"), ("tool", "x"))] * 3]
    file.write_text("\n".join(map(json.dumps, rows)))
    other.write_text("a text\n")
    job = TrainingJob("tiny", tmp_path / "out", data=file, labels="data", exclude=(other,))
    (note,) = read_given(job).notes
    assert str(file) in note
    assert "3 with a message of the role 'tool'" in note


@pytest.mark.parametrize(
    "row",
    [
        {"prompt": "half \ud800 a pair"},
        {"instruction": "v", "output": "\udfff"},
        messages(("system", "\ud83d"), ("user", "v")),
        {"turns": ["v", "\udc00"]},
    ],
)
def test_a_row_with_half_a_surrogate_pair_is_left_out_by_name(row: object, tmp_path: Path) -> None:
    file, unused = tmp_path / "given.jsonl", Counter[str]()
    file.write_text("\n".join(map(json.dumps, [row, GOOD])))
    assert read_conversations(file, unused) == [conversation_of(GOOD, "row")]
    ((why, n),) = unused.items()
    assert "half a surrogate pair" in why
    assert n == 1


def test_a_file_without_one_usable_row_is_refused_by_its_first(tmp_path: Path) -> None:
    file = tmp_path / "given.jsonl"
    file.write_text("\n".join(map(json.dumps, [messages(("bing", "x")), {"colour": "blue"}])))
    with pytest.raises(BadInputError, match="line 1 holds a message of the role 'bing'"):
        read_conversations(file)


@pytest.mark.parametrize(
    "first",
    ["{% for x in y %} is Jinja. Why?", '["a", "b"] is a list in Python. Sort it.', '["a"', "{}"],
)
@pytest.mark.parametrize("suffix", [".txt", ""])
def test_plain_prompts_may_begin_as_json_does(first: str, suffix: str, tmp_path: Path) -> None:
    file = tmp_path / f"prompts{suffix}"
    file.write_text(f"{first}\nWho?\n")
    assert [row for _, row in read_rows(file)] == [first, "Who?"]


def test_json_is_read_under_any_name_and_refused_under_its_own_if_it_is_none(
    tmp_path: Path,
) -> None:
    plain, named = tmp_path / "prompts.txt", tmp_path / "prompts.jsonl"
    plain.write_text('{"prompt": "p"}\n{"prompt": "q"}')
    assert [c.turns for c in read_conversations(plain)] == [("p",), ("q",)]
    plain.write_text('["p", {"prompt": "q"}]')
    assert [c.turns for c in read_conversations(plain)] == [("p",), ("q",)]
    for broken in ('{"prompt": "p"', '["p", '):
        named.write_text(broken)
        with pytest.raises(BadInputError, match="is not JSON"):
            read_conversations(named)


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
