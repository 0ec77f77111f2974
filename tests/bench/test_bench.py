"""Measurement: what is timed, in which order, what is stored, and what is refused."""

from __future__ import annotations

import json
import os
from contextlib import AbstractContextManager
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import get_args

import mlx.core as mx
import pytest
from bench_samples import DRAFTED, PLAIN, answer, store, stored
from tiny import byte_model, byte_tokenizer, plain_tokens, random_drafter

from redrafter_mlx.bench.measure.answers import AnswersFile, answers_file
from redrafter_mlx.bench.measure.methods import Method
from redrafter_mlx.bench.measure.packing import Prefixes
from redrafter_mlx.bench.measure.plan import Plan, Prepared, list_methods, measure
from redrafter_mlx.bench.measure.questions import (
    OWN_QUESTIONS,
    Question,
    choose_questions,
    read_questions,
)
from redrafter_mlx.bench.measure.runner import Runner, check_draft_model
from redrafter_mlx.config import AcceptMethod
from redrafter_mlx.drafting.oracle import Oracle
from redrafter_mlx.engine.engine import Redrafter
from redrafter_mlx.engine.request import Request
from redrafter_mlx.errors import BadInputError, MismatchError
from redrafter_mlx.runtime.ranges import parse_integers, parse_numbers, parse_words

PROMPT = [5, 6, 7, 8]


def tiny(*, replayed: bool = False) -> Redrafter:
    """Return a tiny model; its drafts are random, or an oracle's that errs at random positions."""
    model = byte_model()
    if not replayed:
        return Redrafter(model, byte_tokenizer(), random_drafter(vocab_size=258))
    text = PROMPT + plain_tokens(model, PROMPT, 40)
    return Redrafter(model, byte_tokenizer(), Oracle(text, 258))


def plan(methods: list[Method], **changes: object) -> Plan:
    prepared = [Prepared(Question(f"q{i}", "math", i), [*PROMPT, i]) for i in (1, 2)]
    made = Plan(prepared, methods, "auto", max_tokens=6, repeats=2, warmup=0, delay=0.0, seed=3)
    return replace(made, **changes)  # type: ignore[arg-type]


# ranges


@pytest.mark.parametrize(
    ("text", "numbers"),
    [("3", [3]), ("1..4", [1, 2, 3, 4]), ("1-4", [1, 2, 3, 4]), ("1,2,4", [1, 2, 4]),
     (" 4, 2 ", [4, 2]), ("1,3..5,3", [1, 3, 4, 5]), ("2..2", [2])],
)  # fmt: skip
def test_ranges_are_read_in_every_form(text: str, numbers: list[int]) -> None:
    assert parse_integers("--beam-width", text) == numbers


@pytest.mark.parametrize(
    "text", ["", "x", "1..", "..3", "4..1", "1.5", "-1", "1,,2", "1...3", "1..99999", "1 2", "1e3"]
)
def test_bad_ranges_are_refused_in_one_line_that_names_them(text: str) -> None:
    with pytest.raises(BadInputError) as error:
        parse_integers("--beam-width", text)
    assert "--beam-width" in str(error.value)
    assert "\n" not in str(error.value)


def test_lists_of_numbers_and_words_are_read_and_checked() -> None:
    assert parse_numbers("--temperature", "0, 0.3,1,0") == [0.0, 0.3, 1.0]
    assert parse_words("--accept", "sample, typical") == ["sample", "typical"]
    for bad in ("", "a", "nan", "inf", "0,,1"):
        with pytest.raises(BadInputError, match="--temperature"):
            parse_numbers("--temperature", bad)


# questions


def test_questions_keep_their_ids_and_a_json_array_is_read(tmp_path: Path) -> None:
    file = tmp_path / "q"
    file.write_text('{"question_id": 81, "category": "math", "turns": ["a", "b"]}\n')
    assert read_questions(file) == [Question("a", "math", 81, ("b",))]
    rows = [{"instruction": "x", "input": "y"}, {"prompt": ["p", "q"]}]
    file.write_text(json.dumps(rows, indent=1))
    assert [q.text for q in read_questions(file)] == ["x\n\ny", "p"]
    file.write_text('{"prompt": "a", "id": ""}\n{"prompt": "b", "id": 0}\n')
    ids = [q.id for q in choose_questions(read_questions(file), None, None)]
    assert ids == [1, 0], "an empty id is none"
    file.write_text("[this] is a plain line\n")
    assert read_questions(file) == [Question("[this] is a plain line")]


def test_categories_and_limit_choose_and_refuse() -> None:
    chosen = choose_questions(OWN_QUESTIONS, ["math", "stem"], 3)
    assert [(q.category, q.id) for q in chosen] == [("math", 7), ("math", 8), ("stem", 13)]
    spread = choose_questions(OWN_QUESTIONS, None, 8)
    assert len({q.category for q in spread}) == 8
    assert choose_questions(OWN_QUESTIONS, None, 99) == choose_questions(OWN_QUESTIONS, None, None)
    with pytest.raises(BadInputError, match="'maths'; there are: coding, "):
        choose_questions(OWN_QUESTIONS, ["maths"], None)
    with pytest.raises(BadInputError, match="--limit is 0"):
        choose_questions(OWN_QUESTIONS, None, 0)
    with pytest.raises(BadInputError, match="1 occurs twice"):
        choose_questions([Question("a", "", 1), Question("b", "", 1)], None, None)


# methods


def test_methods_are_shapes_times_temperatures_times_what_fits() -> None:
    methods = list_methods({None: [(1, 2), (2, 2)]}, None, ("sample", "typical"), (0.0, 0.5), ())
    drafted = [(m.temperature, m.accept, m.beam_width) for m in methods if m.name == "redrafter"]
    assert drafted == [(0.0, "greedy", 1), (0.0, "greedy", 2), (0.5, "sample", 1),
                       (0.5, "sample", 2), (0.5, "typical", 1), (0.5, "typical", 2)]  # fmt: skip
    plain = [(m.name, m.temperature) for m in methods if m.name != "redrafter"]
    assert plain == [("mlx-lm", 0.0), ("autoregressive", 0.0), ("mlx-lm", 0.5),
                     ("autoregressive", 0.5)]  # fmt: skip


def test_a_shape_that_belongs_to_the_seed_is_not_chosen_by_measured_times() -> None:
    found = {accept: Method("redrafter", 0.5, accept).automatic
             for accept in get_args(AcceptMethod) if accept != "greedy"}  # fmt: skip
    assert found == {"sample": True, "rejection": False, "typical": False}
    assert Method("redrafter", accept="greedy", beam_width=2).automatic
    assert not DRAFTED.automatic


def test_the_automatic_shape_beside_others_is_not_combined_with_prefixes_of_fixed_shapes() -> None:
    shapes = {None: [(None, None), (2, 3)]}
    methods = list_methods(shapes, None, None, (0.0,), (), ("all", "final"))
    assert [(m.beam_width, m.prefixes) for m in methods[2:]] == [
        (None, "all"), (2, "all"), (2, "final")
    ]  # fmt: skip
    with pytest.raises(BadInputError, match="fixed shape"):
        list_methods({None: [(None, None)]}, None, None, (0.0,), (), ("final",))


def test_answers_of_several_packings_at_once_are_each_packed_in_their_own_way() -> None:
    model = byte_model()
    redrafter = Redrafter(model, byte_tokenizer(), random_drafter(seed=5, vocab_size=258))
    methods = [Method("redrafter", 0, "greedy", 3, 4, prefixes=p) for p in get_args(Prefixes)]
    requests = [method.request(redrafter, [3, 5, 7], 40, 0) for method in methods]

    def verified(requests: list[Request]) -> list[list[int]]:
        nodes: list[list[int]] = [[] for _ in requests]
        for i, response in redrafter.respond_all(requests):
            if response.step is not None:
                nodes[i].append(response.step.nodes)
        return nodes

    alone = [verified([request])[0] for request in requests]
    assert verified(requests) == alone
    everything, final, separate = map(max, alone)
    assert everything == separate == 3 * 3 + 1
    assert min(alone[1]) < final


def test_every_drafter_has_its_own_shapes() -> None:
    methods = list_methods({"a": [(1, 2)], "b": [(1, 3), (2, 3)]}, None, None, (0.0,), ())
    drafted = [(m.drafter, m.beam_width, m.beam_length) for m in methods if m.name == "redrafter"]
    assert drafted == [("a", 1, 2), ("b", 1, 3), ("b", 2, 3)]
    assert [m.drafter for m in methods if m.name != "redrafter"] == [None, None]


@pytest.mark.parametrize(
    ("shape", "accepts", "temperature"),
    [((1, 2), ("typical",), 0.0), ((1, 2), ("greedy",), 0.5), ((0, 2), None, 0.0),
     ((1, 99), None, 0.0), ((1, 2), None, -1.0)],
)  # fmt: skip
def test_impossible_methods_are_refused(
    shape: tuple[int, int], accepts: tuple[str, ...] | None, temperature: float
) -> None:
    with pytest.raises(BadInputError):
        list_methods({None: [shape]}, None, accepts, (temperature,), ())  # type: ignore[arg-type]


def test_every_greedy_method_emits_mlx_lms_tokens() -> None:
    redrafter = tiny(replayed=True)
    want = plain_tokens(redrafter.model, PROMPT, 30)
    runner = Runner({None: redrafter}, draft_model=byte_model(seed=1))
    for method in (PLAIN, Method("autoregressive"), DRAFTED,
                   Method("mlx-lm speculative", draft_tokens=3)):  # fmt: skip
        assert runner.run(method, PROMPT, 30, 0).token_ids == want, method


def test_a_run_counts_target_calls_as_the_loop_reports_them() -> None:
    redrafter = tiny(replayed=True)
    run = Runner({None: redrafter}).run(DRAFTED, PROMPT, 30, 0)
    whole = redrafter.generate(PROMPT, max_tokens=30, beam_width=2, beam_length=4)
    assert len(run.accept_lengths) == len(run.nodes) == len(run.accepted) == whole.steps
    assert sum(run.accept_lengths) / len(run.accept_lengths) == whole.tokens_per_step > 1
    assert 1 + sum(run.accept_lengths) == len(run.token_ids)
    assert run.shapes == [[2, 4, 7]] * whole.steps
    assert set(run.query_rows) == {7}
    assert 4 <= min(run.nodes) < max(run.nodes) == 7, "some replayed candidates share a prefix"
    lengths = zip(run.accept_lengths, run.accepted, strict=True)
    cut = [length - 1 - drafts for length, drafts in lengths]
    assert cut[:-1] == [0] * (len(cut) - 1)
    assert cut[-1] <= 0


def test_mlx_lms_speculative_calls_are_counted_behind_the_prompts() -> None:
    """With the target itself as draft model every draft is right: k + 1 tokens per call."""
    redrafter = tiny()
    runner = Runner({None: redrafter}, draft_model=redrafter.model)
    run = runner.run(Method("mlx-lm speculative", draft_tokens=2), PROMPT, 12, 0)
    assert len(run.token_ids) == 12
    assert run.accept_lengths == [3, 3, 3]
    assert run.accepted == [2, 2, 2]


def test_a_draft_model_of_another_vocabulary_is_refused() -> None:
    with pytest.raises(MismatchError, match=r"97.*258"):
        check_draft_model(tiny(), 97, "other")


def test_the_first_token_is_timed_apart_from_the_rest() -> None:
    ticks = iter(range(100))
    run = Runner({None: tiny()}, clock=lambda: float(next(ticks))).run(PLAIN, PROMPT, 5, 0)
    # The clock is read once before the first token, and once as each token arrives.
    assert (run.first_token_seconds, run.decode_seconds) == (1.0, 4.0)
    assert sum(run.accept_lengths) == 4


def test_a_seed_gives_every_method_its_own_answer_again() -> None:
    runner = Runner({None: tiny()})
    for method in (Method("mlx-lm", 0.9), Method("redrafter", 0.9, "typical", 2, 3)):
        answers = [runner.run(method, PROMPT, 12, seed).token_ids for seed in (4, 4, 5)]
        assert answers[0] == answers[1] != answers[2]


# the order of measurement


def test_methods_are_interleaved_question_by_question_and_take_turns_at_being_first() -> None:
    methods = [PLAIN, Method("autoregressive"), DRAFTED]
    order = list(plan(methods).order())
    assert len(order) == plan(methods).size == 12
    blocks = [order[i : i + 3] for i in range(0, 12, 3)]
    rounds = [((1,), 0), ((2,), 0), ((1,), 1), ((2,), 1)]
    assert [(block[0].group, block[0].repeat) for block in blocks] == rounds
    for block in blocks:
        assert {case.method for case in block} == set(methods)
        assert len({(case.group, case.repeat) for case in block}) == 1
    assert [methods.index(block[0].method) for block in blocks] == [0, 1, 1, 2]


def test_a_run_resumes_where_its_file_ends(tmp_path: Path) -> None:
    runner, made = Runner({None: tiny()}), plan([PLAIN, DRAFTED])
    whole = [*chain(*measure(made, runner))]
    path = tmp_path / "answers.jsonl"
    store(path, *whole[:5])
    before = stored(path, "auto")
    assert before == whole[:5]
    done, missing = made.split(before)
    assert done == before
    rest = [*chain(*measure(made, runner, missing))]
    assert [a.key for a in before + rest] == [a.key for a in whole]
    assert [a.run.token_ids for a in rest] == [a.run.token_ids for a in whole[5:]]


def test_warm_up_and_rest_are_not_answers() -> None:
    rested: list[float] = []
    made = plan([PLAIN, DRAFTED], warmup=2, delay=0.5)
    assert len(list(measure(made, Runner({None: tiny()}), sleep=rested.append))) == made.size
    assert rested == [0.5] * made.size


def test_a_question_that_changed_since_its_answer_is_refused() -> None:
    made = plan([PLAIN])
    done = [*chain(*measure(made, Runner({None: tiny()})))]
    other = replace(made, questions=[replace(p, prompt_ids=[1, 2]) for p in made.questions])
    with pytest.raises(BadInputError, match="question 1 was another one"):
        other.split(done)


@pytest.mark.parametrize(
    "change", [{"max_tokens": 1}, {"repeats": 0}, {"warmup": -1}, {"delay": -1.0}, {"seed": -1}]
)
def test_impossible_plans_are_refused(change: dict[str, object]) -> None:
    with pytest.raises(BadInputError, match="at least"):
        plan([PLAIN], **change)


# the answers file


def test_answers_survive_the_file_and_carry_spec_benchs_fields(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    written = [answer(DRAFTED, lengths=[2, 4, 1], nodes=[5, 7, 6]), answer(PLAIN, 2, 1)]
    store(path, *written)
    assert stored(path) == written
    row = json.loads(path.read_text().splitlines()[0])
    assert row["choices"][0] == {
        "index": 0, "turns": ["text"], "decoding_steps": [3], "new_tokens": [8],
        "wall_time": [1.25], "accept_lengths": [2, 4, 1],
    }  # fmt: skip
    assert {"question_id", "category", "answer_id", "model_id", "tstamp"} <= row.keys()
    assert row["prompt_ids"] == [7, 8]
    assert row["token_ids"] == list(range(8))


@pytest.mark.parametrize(
    ("name", "value"),
    [("max_tokens", 32), ("seed", 1), ("model_hash", "sha256:9"), ("drafts", "lookup"),
     ("mlx", "9"), ("chip", "M9"), ("arithmetic", "float16"), ("tf32", True), ("ranks", 2)],
)  # fmt: skip
def test_a_file_made_with_other_settings_is_refused(
    name: str, value: object, tmp_path: Path
) -> None:
    path = tmp_path / "a.jsonl"
    store(path, answer())
    with pytest.raises(BadInputError, match=f"was made with {name}") as error:
        stored(path, **{name: value})
    assert "\n" not in str(error.value)


def opened(path: Path) -> AbstractContextManager[AnswersFile | None]:
    return answers_file(path)


def test_two_runs_do_not_write_one_answers_file(tmp_path: Path) -> None:
    path = tmp_path / "answers.jsonl"
    with opened(path):
        with pytest.raises(BadInputError, match="another run writes"), opened(path):
            pass
        store(path, answer())
    with opened(path):
        assert len(stored(path)) == 1


def test_an_answers_file_that_nothing_was_written_to_does_not_stay(tmp_path: Path) -> None:
    with opened(tmp_path / "answers.jsonl"):
        pass
    assert not [*tmp_path.iterdir()]


def test_an_answers_file_that_is_none_is_refused_before_it_is_read(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")  # reading it would wait for a writer
    for path in (tmp_path / "pipe", tmp_path):
        with pytest.raises(BadInputError, match="which is not a file"), opened(path):
            pass
    with pytest.raises(BadInputError, match="no folder"), opened(tmp_path / "none" / "a.jsonl"):
        pass


def test_another_dtypes_answers_may_stand_beside(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    store(path, answer(dtype="float16"), arithmetic="float16")
    assert stored(path) == []
    with pytest.raises(BadInputError, match="max_tokens"):
        stored(path, max_tokens=9)


def test_half_a_last_line_is_cut_off_and_a_foreign_file_left_alone(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    store(path, answer())
    whole = path.read_text()
    path.write_text(whole + whole[:100])
    assert len(stored(path)) == 1
    assert path.read_text() == whole
    path.write_text(whole[:100])
    assert stored(path) == []
    other = json.dumps({**json.loads(whole), "category": "a\u2028b"}, ensure_ascii=False) + "\n"
    path.write_text(other)
    assert stored(path)[0].category == "a\u2028b"
    path.write_text(whole.rstrip("\n"))
    store(path, answer(repeat=1))
    assert len(stored(path)) == 2
    for foreign in ("my notes", "my notes\n", '{"a": 1}\n', whole + "my notes\n" + whole):
        path.write_text(foreign)
        with pytest.raises(BadInputError, match=r"a\.jsonl, line \d"):
            stored(path)
        assert path.read_text() == foreign


def test_peak_memory_is_each_runs_own() -> None:
    runner = Runner({None: tiny()})
    big = mx.zeros((64, 1024, 1024))
    mx.eval(big)
    del big
    before = mx.get_active_memory() / 1e9
    assert runner.run(PLAIN, PROMPT, 5, 0).peak_memory - before < 0.1
