"""Questions that a drafter is measured with are excluded from its training data."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import mlx.core as mx
import pytest
from tiny import byte_model, byte_tokenizer, random_model

from redrafter_mlx.distill.corpus.filters import EXCLUDED, Exclusions
from redrafter_mlx.distill.corpus.prompts import user_turns
from redrafter_mlx.distill.corpus.prompts.conversations import Conversation, read_conversations
from redrafter_mlx.distill.corpus.prompts.given_texts import read_given
from redrafter_mlx.distill.corpus.shards import BlockProgress
from redrafter_mlx.distill.corpus.writing.writer import Writer
from redrafter_mlx.distill.job import TrainingJob
from redrafter_mlx.distill.options import WritingOptions
from redrafter_mlx.errors import BadInputError
from redrafter_mlx.target_model.model import Target

LONG = "Tell me how a ship can sail against the wind, and why it does not tip over."
WORDS = LONG.split()
HALF = WritingOptions(own_share=0.5)


@pytest.fixture
def excluded(tmp_path: Path) -> Exclusions:
    file = tmp_path / "questions.jsonl"
    rows = [{"turns": [LONG, "And at night?"]}, {"question": "Who?", "answer": f"It was {LONG}"}]
    file.write_text("\n".join(map(json.dumps, rows)))
    return Exclusions.of(read_conversations(file))


@pytest.mark.parametrize(
    ("text", "held"),
    [
        (LONG, True),
        (LONG.upper().replace(",", " -"), True),
        ("Please: " + " ".join(WORDS[2:15]) + " now", True),  # 13 of its words
        ("Please: " + " ".join(WORDS[2:14]) + " now", False),  # 12
        ("And at night?", True),
        ("and  at night", True),
        ("And at night, where do all the birds go that we saw by the sea today?", False),
        ("What is a ship?", False),
        ("", False),
    ],
)
def test_thirteen_words_in_a_row_or_a_whole_short_question_are_held(
    excluded: Exclusions, text: str, held: bool
) -> None:
    assert excluded.match(text) == held
    assert not Exclusions().match(text)


def test_prompts_answers_and_texts_with_an_excluded_question_are_left_out(tmp_path: Path) -> None:
    files = {
        "first.txt": ["What is a ship?", LONG],
        "second.txt": ["Why is the sea salt?"],
        "read.txt": [f"Once upon a time. {LONG}", "The sea is salt."],
        "excluded.txt": [LONG],
    }
    for name, lines in files.items():
        (tmp_path / name).write_text("\n".join(lines))
    job = TrainingJob(
        "tiny", tmp_path, prompts=(tmp_path / "first.txt", tmp_path / "second.txt"),
        read=(tmp_path / "read.txt",), exclude=(tmp_path / "excluded.txt",), writing=HALF,
    )  # fmt: skip
    given = read_given(job)
    assert [c.turns for c in given.conversations] == [
        ("What is a ship?",), ("Why is the sea salt?",),
    ]  # fmt: skip
    prompts, (text,) = (texts.texts for texts in given.read)
    assert prompts is None
    assert text.turns == ("The sea is salt.",)
    assert given.left_out == 2
    data = tmp_path / "data.jsonl"
    data.write_text(json.dumps({"prompt": "Go on", "response": LONG}))
    truth = replace(job, prompts=(), data=data, labels="data")
    with pytest.raises(BadInputError, match="exclude"):
        read_given(truth)


def test_texts_that_are_only_read_are_none_of_the_prompts(tmp_path: Path) -> None:
    """Some of the prompts are held out."""
    for name, lines in {"asked": ["one?", "two?"], "read": ["two?", "three", "one?"]}.items():
        (tmp_path / name).write_text("\n".join(lines))
    asked, read = tmp_path / "asked", tmp_path / "read"
    job = TrainingJob("tiny", tmp_path, prompts=(asked,), read=(read,), writing=HALF)
    prompts, others = read_given(job).read
    assert prompts.texts is None
    assert others.texts == (Conversation(("three",)),)
    (alone,) = read_given(replace(job, read=(asked,))).read
    assert alone == prompts


def test_each_part_of_the_texts_that_are_read_is_of_all_files(tmp_path: Path) -> None:
    files = tmp_path / "first.txt", tmp_path / "second.txt"
    for file in files:
        file.write_text("\n".join(f"{file.stem} text {i}" for i in range(50)))
    job = TrainingJob("tiny", tmp_path, read=files, learn_prompts=False)
    (given,) = read_given(job).read
    read = given.texts
    assert read is not None
    assert len(set(read)) == 100
    assert {text.turns[0].split()[0] for text in read[:20]} == {"first", "second"}
    assert read_given(job).read == (given,)


def test_the_target_answers_prompts_itself_where_a_file_has_answers(tmp_path: Path) -> None:
    file = tmp_path / "alpaca.json"
    file.write_text(json.dumps([{"instruction": "Say it", "input": "twice", "output": "It. It."}]))
    (asked,) = read_given(
        TrainingJob("tiny", tmp_path, prompts=(file,), writing=HALF)
    ).conversations
    assert asked == Conversation(("Say it\n\ntwice",))
    truth = TrainingJob("tiny", tmp_path, data=file, labels="data")
    assert read_given(truth).conversations == (replace(asked, answers=("It. It.",)),)
    writer = Writer(
        Target(byte_model()), byte_tokenizer(), [asked],
        WritingOptions(own_share=0.0, max_answer_tokens=12),
    )  # fmt: skip
    assert writer.write(0).texts


def test_an_excluded_question_that_the_target_writes_itself_is_not_asked(
    excluded: Exclusions, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokenizer = byte_tokenizer()
    written = ["What is a ship?", f"So, {LONG}", "And at night?", "Why is the sea salt?"]
    drawn = [[tokenizer.encode(text) for text in written]]
    monkeypatch.setattr(user_turns, "write_turns", lambda *_: drawn)
    progress = BlockProgress()
    user = user_turns.UserTurns(Target(random_model()), tokenizer, excluded)
    prefix = user_turns.TurnPrefix(Conversation(()), 4)
    (found,) = user.draw([prefix], 1.0, mx.random.key(0), progress)
    assert found == [written[0], written[3]]
    assert progress.left_out[EXCLUDED] == 2


@pytest.mark.parametrize(
    ("question", "around", "other"),
    [
        (
            "请用简单的话解释为什么天是蓝色的",
            "你好\u3002{}\uff0c谢谢",
            "请用简单的话解释这个故事的意思",
        ),
        (
            "क्या आप मुझे बता",
            "{}",
            # with other vowels
            "क्यी आप मुझो बती",
        ),
    ],
)
def test_questions_in_other_scripts_are_found_in_longer_texts_and_told_from_others(
    tmp_path: Path, question: str, around: str, other: str
) -> None:
    (tmp_path / "q.txt").write_text(question + "\n", encoding="utf-8")
    excluded = Exclusions.of(read_conversations(tmp_path / "q.txt"))
    assert excluded.match(around.format(question))
    assert not excluded.match(other)


def test_short_questions_of_dense_scripts_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """A question of six Chinese characters is whole; two letters are not."""
    tokenizer = byte_tokenizer()
    written = ["什么是黑洞", "Hi", "介绍一下你自己"]
    monkeypatch.setattr(
        user_turns, "write_turns", lambda *_: [[tokenizer.encode(text) for text in written]]
    )
    user = user_turns.UserTurns(Target(random_model()), tokenizer)
    (found,) = user.draw(
        [user_turns.TurnPrefix(Conversation(()), 3)], 1.0, mx.random.key(0), BlockProgress()
    )
    assert found == [written[0], written[2]]
