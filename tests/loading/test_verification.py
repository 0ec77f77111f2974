"""The verification report: accepts exact output, explains rounding, and reports defects."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import mlx.core as mx
import mlx.nn as nn
import pytest
from tiny import byte_model, byte_tokenizer, random_drafter

from redrafter_mlx.bench.measure.questions import (
    OWN_QUESTIONS,
    Question,
    choose_questions,
    read_questions,
)
from redrafter_mlx.cli import main
from redrafter_mlx.cli import options as cli_options
from redrafter_mlx.config import BeamShape
from redrafter_mlx.distill.corpus.prompts.conversations import read_conversations
from redrafter_mlx.drafting.recurrent import RecurrentNetwork
from redrafter_mlx.drafting.untrained.ngram import Lookup
from redrafter_mlx.engine.engine import Redrafter
from redrafter_mlx.errors import BadInputError
from redrafter_mlx.speculation.sampling import log_softmax
from redrafter_mlx.target_model import sequential
from redrafter_mlx.target_model.cache import kv_cache, plans
from redrafter_mlx.verification import Difference, verify

PROMPTS = [[i, 2 * i + 1, 7, i % 5] for i in range(1, 9)]
SHAPE = BeamShape(3, 4)


def make(drafter: RecurrentNetwork | None = None) -> Redrafter:
    return Redrafter(byte_model(seed=1), byte_tokenizer(), drafter)


@pytest.mark.parametrize("drafter", [None, random_drafter(vocab_size=258)])
def test_float32_is_exact(drafter: RecurrentNetwork | None) -> None:
    seen: list[int] = []
    report = verify(make(drafter), PROMPTS, max_tokens=30, shape=SHAPE, done=seen.append)
    assert report.exact
    assert report.explained
    assert report.tokens == report.agreeing == 30 * len(PROMPTS)
    assert report.drafter == ("oracle" if drafter is None else "drafter")
    assert seen == list(range(1, 9))
    assert report.nodes == 10 if drafter is not None else 4 < report.nodes < 10
    assert drafter is not None or report.tokens_per_step > 1.5, "the oracle is accepted often"


def test_prompt_lookup_is_exact_and_the_oracle_can_replace_it() -> None:
    redrafter = Redrafter(byte_model(seed=1), byte_tokenizer(), host_drafters=(Lookup(),))
    for oracle, drafter in ((False, "lookup"), (True, "oracle")):
        report = verify(redrafter, PROMPTS, max_tokens=30, shape=SHAPE, oracle=oracle)
        assert report.exact
        assert report.drafter == drafter
        assert report.tokens_per_step > 1, "some drafts are accepted"


def test_differences_by_rounding_are_found_and_explained(monkeypatch: pytest.MonkeyPatch) -> None:
    """Calls of several rows round coarsely here, as real kernels do finely."""
    redrafter = make()
    kind = type(redrafter.model)
    honest = kind.__call__

    def coarse(self: nn.Module, inputs: mx.array, *args: object, **kwargs: object) -> mx.array:
        logits: mx.array = honest(self, inputs, *args, **kwargs)
        return logits if logits.shape[1] == 1 else mx.round(logits * 8) / 8

    monkeypatch.setattr(kind, "__call__", coarse)
    prompts = [[i, i + 1, 3] for i in range(12)]
    report = verify(redrafter, prompts, max_tokens=20, shape=SHAPE)
    assert report.differences
    assert report.explained
    assert report.agreeing < report.tokens
    for d in report.differences:
        assert 0 <= d.margin <= 2 * d.noise


def test_a_broken_mask_is_not_explained(monkeypatch: pytest.MonkeyPatch) -> None:
    honest = plans.attention_mask

    def everything(tree_mask: mx.array, length: mx.array, extent: int) -> mx.array:
        return honest(mx.ones_like(tree_mask), length, extent)

    monkeypatch.setattr(plans, "attention_mask", everything)
    report = verify(make(), PROMPTS, max_tokens=30, shape=SHAPE)
    assert not report.exact
    assert not report.explained


def test_a_wrongly_committed_path_is_not_explained(monkeypatch: pytest.MonkeyPatch) -> None:
    honest = kv_cache.TreeCache.commit

    def forgets(self: kv_cache.TreeCache, *args: object) -> mx.array:
        length = honest(self, *args)  # type: ignore[arg-type]
        if self.pending is not None:
            self.pending = replace(self.pending, path=mx.sort(self.pending.path, axis=1))
        return length

    monkeypatch.setattr(kv_cache.TreeCache, "commit", forgets)
    assert not verify(make(), PROMPTS, max_tokens=30, shape=SHAPE).explained


def test_a_margin_is_explained_up_to_twice_the_noise() -> None:
    near = Difference(0, 3, 1, 2, margin=0.02, noise=0.01)
    assert near.explained
    assert not replace(near, margin=0.021).explained


def cli(monkeypatch: pytest.MonkeyPatch, line: str) -> int:
    monkeypatch.setattr(cli_options, "load_model", lambda *_, **__: make())
    return main.run(line.split())


def test_the_command_prints_a_record_and_exits_1_where_a_difference_is_not_explained(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    line = "verify --limit 4 --max-tokens 24 --beam-width 3 --beam-length 4"
    assert cli(monkeypatch, line + " --json") == 0
    record = json.loads(capsys.readouterr().out)
    assert record["exact"] is True
    assert (record["tokens"], record["agreeing"], record["differences"]) == (96, 96, [])
    assert cli(monkeypatch, line) == 0
    assert "exact: every token agrees" in capsys.readouterr().out

    honest = plans.attention_mask
    monkeypatch.setattr(
        plans, "attention_mask", lambda mask, *rest: honest(mx.ones_like(mask), *rest)
    )
    assert cli(monkeypatch, line) == 1
    assert "NOT explained by rounding" in capsys.readouterr().out


def test_bad_question_files_are_one_line(tmp_path: Path) -> None:
    file = tmp_path / "q.jsonl"
    cases = [
        ("", "holds no question"),
        ('{"turns": []}', "line 1 holds no prompt under messages, "),
        ('{"turns": ["a"]}\n{', "line 2 is not JSON"),
        ('{"turns": ["a"]}\n[1]', "line 2 holds neither text nor"),
    ]
    for text, message in cases:
        file.write_text(text)
        with pytest.raises(BadInputError, match=message):
            read_questions(file)
    with pytest.raises(BadInputError, match=r"nothing cannot be read: No such file"):
        read_questions(tmp_path / "nothing")
    file.write_bytes(b"\xff\xfe")
    with pytest.raises(BadInputError, match="not UTF-8"):
        read_questions(file)


def test_questions_of_every_common_form_are_read(tmp_path: Path) -> None:
    file = tmp_path / "q"
    file.write_text('{"turns": ["a", "b"], "category": "math"}\n\n{"prompt": "c"}\n')
    got = read_questions(file)
    assert [(q.text, q.category) for q in got] == [("a", "math"), ("c", "")]
    file.write_text(
        '{"instruction": "Sum up", "input": "a text"}\n{"instruction": "x", "input": ""}'
    )
    assert [q.text for q in read_questions(file)] == ["Sum up\n\na text", "x"]
    said = [("gpt", "no question"), ("human", "hi"), ("gpt", "yo"), ("human", "what?")]
    rows = [
        {"id": f"{skip}", "conversations": [{"from": r, "value": v} for r, v in said[skip:]]}
        for skip in (0, 1)
    ]
    file.write_text("\n".join(map(json.dumps, rows)))
    assert read_questions(file) == [Question("hi", id="1", later=("what?",))], (
        "one begins without a question"
    )
    asked = [{"role": "system", "content": "s"}, {"role": "user", "content": "u"}]
    file.write_text(json.dumps([{"messages": asked, "category": "math"}]))
    assert read_questions(file) == [Question("u", "math")]
    file.write_text("one\n\n two \n")
    assert [q.text for q in read_questions(file)] == ["one", "two"]


def test_unicode_line_separators_and_a_byte_order_mark_do_not_change_questions(
    tmp_path: Path,
) -> None:
    file = tmp_path / "q.jsonl"
    file.write_text('\ufeff{"prompt": "a\u2028b"}\r\n{"prompt": "c"}\r\n', encoding="utf-8")
    assert [q.text for q in read_questions(file)] == ["a\u2028b", "c"]
    assert [c.turns for c in read_conversations(file)] == [("a\u2028b",), ("c",)]


def test_questions_without_a_number_get_one_that_is_free() -> None:
    asked = [Question("a", id=2), Question("b", id=1), Question("c"), Question("d", id="1")]
    assert [q.id for q in choose_questions([*asked, Question("e")], None, None)] == [
        2, 1, 3, "1", 4,
    ]  # fmt: skip


def test_our_own_questions_cover_mt_benchs_categories_twice() -> None:
    categories = [q.category for q in OWN_QUESTIONS]
    assert len(set(categories)) == 8
    assert all(categories.count(c) == 2 for c in categories)


def test_rounding_of_products_of_many_rows_is_explained_from_the_first_token_on(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As with quantised weights on Metal: one row and few rows round alike, a prompt does not."""
    honest = nn.Linear.__call__

    def coarse(self: nn.Linear, x: mx.array) -> mx.array:
        product = honest(self, x)
        return product if x.size // x.shape[-1] < 6 else mx.round(product * 64) / 64

    monkeypatch.setattr(nn.Linear, "__call__", coarse)
    prompts = [[i, 2 * i + 1, 7, i % 5, 3, 9, i + 2, 11] for i in range(1, 25)]
    report = verify(make(), prompts, max_tokens=20, shape=BeamShape(1, 4))
    assert report.differences
    assert report.explained
    assert min(difference.position for difference in report.differences) == 0


def test_a_text_is_read_alike_in_one_row_and_in_several(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sequential, "CHUNK", 4)
    monkeypatch.setattr(sequential, "LAST", 3)
    model, text = byte_model(seed=1), [(7 * i) % 250 for i in range(30)]
    whole = log_softmax(model(mx.array([text]))[0])
    for start in (1, 2, 3, 5, 20, 30):
        for rows in (1, 2, 7):
            got = sequential.sequential_log_probs(model, text, start, rows)
            assert got.shape == (30 - start + 1, 258)
            assert mx.allclose(got, whole[start - 1 :], atol=1e-5)


def test_a_prompt_may_be_text_as_everywhere_else() -> None:
    redrafter = make()
    assert verify(redrafter, ["hi"], max_tokens=3).exact
    assert verify(redrafter, ["hi"], max_tokens=3) == verify(
        redrafter, [redrafter.encode("hi")], max_tokens=3
    )
