"""Files of prompts in their formats."""

from __future__ import annotations

import pytest

from redrafter_mlx.distill.corpus.prompts.conversations import read_conversations
from redrafter_mlx.errors import BadInputError


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
