"""`bench serve`: concurrent users, what they see, and servers that misbehave."""

from __future__ import annotations

import json
import os
import signal
import threading
import time
from functools import partial
from itertools import chain

import pytest
from command_line import CommandLine
from serving import ready, tiny_redrafter
from streams import answering, chunk, streamed

from redrafter_mlx.bench.analyse.serving import category_rows, serving_rows, total_tps
from redrafter_mlx.bench.measure.load_client import (
    Answered,
    Load,
    Server,
    ask,
    measure_in_turn,
    measure_load,
)
from redrafter_mlx.bench.measure.questions import OWN_QUESTIONS
from redrafter_mlx.cli import main
from redrafter_mlx.errors import ServerError

USAGE = {"choices": [], "usage": {"completion_tokens": 3}}


def echo(body: dict[str, object]) -> tuple[int, str]:
    (message,) = body["messages"]  # type: ignore[misc]
    return 200, streamed(chunk(None), chunk("you said "), chunk(message["content"]), USAGE)


def test_as_many_users_ask_at_once_and_each_question_is_asked_once() -> None:
    """All four users wait for each other in the server."""
    together = threading.Barrier(4, timeout=20)
    asked: list[object] = []

    def answer(body: dict[str, object]) -> tuple[int, str]:
        together.wait()
        asked.append(body["messages"][0]["content"])  # type: ignore[index]
        return echo(body)

    questions = [f"q{i}" for i in range(8)]
    with answering(answer) as url:
        answers = measure_load(Server(url), Load(questions, 4, 5))
    assert sorted(asked) == questions  # type: ignore[type-var]
    assert [a.text for a in answers] == [f"you said {q}" for q in questions]
    for a in answers:
        assert a.began < a.first_token <= a.ended
        assert a.tokens == 3


def test_servers_take_turns_every_four_questions_of_a_user() -> None:
    asked: list[str] = []

    def answer(name: str, body: dict[str, object]) -> tuple[int, str]:
        asked.append(name)
        return echo(body)

    questions = [f"q{i}" for i in range(17)]
    with answering(partial(answer, "a")) as one, answering(partial(answer, "b")) as two:
        servers = Server(one), Server(two)
        measured = measure_in_turn(servers, Load(questions, 2, 5))
        (alone,) = measure_in_turn(servers[:1], Load(questions, 2, 5))
    assert "".join(asked[:34]) == 8 * "a" + 8 * "b" + 9 * "b" + 9 * "a"
    assert [len(each) for each in alone] == [17]
    for rounds in measured:
        assert [a.text for a in chain(*rounds)] == [f"you said {q}" for q in questions]


@pytest.mark.parametrize(
    ("status", "text", "named"),
    [
        (503, '{"error": "loading"}', "503"),
        (200, streamed(chunk("half"), end=False), "broke"),
        (200, streamed(chunk("uncounted")), "usage"),
        (200, "data: {no JSON\n\n", "OpenAI's API"),
        (200, streamed({"choices": [{"index": 0, "delta": {"content": ["a"]}}]}), "OpenAI's API"),
        (200, streamed({"choices": [{"index": 0}]}), "usage"),
        (200, streamed({"choices": [], "usage": {"total_tokens": 3}}), "usage"),
    ],
)
def test_a_server_that_does_not_answer_is_named_and_ends_the_load(
    status: int, text: str, named: str
) -> None:
    with answering(lambda _: (status, text)) as url, pytest.raises(ServerError) as raised:
        measure_load(Server(url), Load(["a", "b", "c"], 2, 5))
    assert url in str(raised.value)
    assert named in str(raised.value)
    assert "\n" not in str(raised.value)


def test_ctrl_c_ends_a_load_with_the_answers_that_run() -> None:
    asked: list[object] = []

    def answer(body: dict[str, object]) -> tuple[int, str]:
        asked.append(body)
        if len(asked) == 2:
            os.kill(os.getpid(), signal.SIGINT)
        time.sleep(0.1)
        return echo(body)

    with answering(answer) as url, pytest.raises(KeyboardInterrupt):
        measure_load(Server(url), Load([f"q{i}" for i in range(50)], 1, 5))
    assert len(asked) < 10


def test_reasoning_is_part_of_an_answer_and_its_time() -> None:
    thought = {"choices": [{"index": 0, "delta": {"reasoning_content": "Hm"}}]}
    other = {"choices": [{"index": 0, "delta": {"reasoning": ", yes"}}]}
    with answering(lambda _: (200, streamed(thought, other, USAGE))) as url:
        answer = ask(Server(url), "q", 5)
    assert answer.text == "Hm, yes"
    assert answer.first_token < answer.ended


def test_figures_of_a_load_are_those_of_its_answers() -> None:
    fast = [Answered("x", 10, 0.0, 1.0, 4.0), Answered("y", 5, 1.0, 1.5, 2.0)]
    slow = [Answered("x", 10, 0.0, 2.0, 8.0), Answered("z", 5, 0.0, 1.0, 6.0)]
    assert total_tps([fast]) == 15 / 4
    later = [Answered("x", 10, 100.0, 101.0, 108.0)]
    assert total_tps([fast, later]) == 25 / (4 + 8), "the time between two rounds is another's"
    one, two = serving_rows(2, [("a", [fast]), ("b", [slow])])
    assert (one.speedup, one.same_text, two.speedup, two.same_text) == (1.0, 1.0, 0.5, 0.5)
    assert (one.user_tps, one.first_token) == ((9 / 3 + 4 / 0.5) / 2, 0.75)
    assert (two.tokens, two.answers, two.users) == (15, 2, 2)


def test_a_category_of_one_users_questions_is_timed_by_its_own_answers() -> None:
    """The second question of three belongs to another category, and takes ten seconds."""
    rounds = [
        [Answered("x", 10, 0.0, 1.0, 2.0), Answered("y", 10, 2.0, 3.0, 12.0)],
        [Answered("z", 10, 50.0, 51.0, 53.0)],
    ]
    math, coding = category_rows(["math", "coding", "math"], [("a", rounds)])
    assert (math.category, math.answers, math.total_tps) == ("math", 2, 20 / 5)
    assert (coding.category, coding.answers, coding.total_tps) == ("coding", 1, 10 / 10)
    assert category_rows(["math", "math", "math"], [("a", rounds)]) == []


def test_servers_are_asked_for_the_temperature(capsys: pytest.CaptureFixture[str]) -> None:
    asked: list[object] = []

    def answer(body: dict[str, object]) -> tuple[int, str]:
        asked.append(body["temperature"])
        return echo(body)

    with answering(answer) as url:
        line = ["bench", "serve", "--url", url, "--users", "1,2", "--limit", "2", "--json"]
        assert main.run([*line, "--temperature", "0.7"]) == 0
    assert asked[1:] == [0.7] * 4, "all but the question that warms a server up"
    rows = json.loads(capsys.readouterr().out.splitlines()[-1])["rows"]
    assert [(row["users"], row["category"]) for row in rows] == [
        (1, "all"), (1, "writing"), (1, "coding"), (2, "all"),
    ]  # fmt: skip


def test_a_baseline_that_counts_no_tokens_is_named() -> None:
    with pytest.raises(ServerError, match="silent counted no tokens"):
        serving_rows(1, [("silent", [[Answered("", 0, 0.0, 1.0, 1.0)]])])


def test_our_server_under_load_says_what_the_library_says(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with ready(tiny_redrafter()) as url:
        said = ask(Server(f"{url}/v1"), "Name a fruit.", 12)
        addresses = ["--url", f"{url}/v1", "--url", f"{url}/v1"]
        line = ["bench", "serve", *addresses, "--users", "1,3", "--limit", "3", "--json"]
        assert main.run([*line, "--max-tokens", "6"]) == 0
    assert said.text == tiny_redrafter().generate("Name a fruit.", max_tokens=12).text
    rows = json.loads(capsys.readouterr().out.splitlines()[-1])["rows"]
    whole = [row for row in rows if row["category"] == "all"]
    assert [row["users"] for row in whole] == [1, 1, 3, 3]
    assert all(row["same_text"] == 1.0 and row["answers"] == 3 for row in whole)
    assert all(0 < row["tokens"] <= 18 for row in rows)


def test_the_table_compares_servers_and_questions_differ_from_load_to_load(
    capsys: pytest.CaptureFixture[str],
) -> None:
    asked: set[object] = set()

    def answer(body: dict[str, object]) -> tuple[int, str]:
        assert body["model"] == "big"
        asked.add(body["messages"][0]["content"])  # type: ignore[index]
        return echo(body)

    with answering(answer) as one, answering(answer) as two:
        line = ["bench", "serve", "--url", one, "--url", two, "--users", "1..2"]
        assert main.run([*line, "--server-model", "big"]) == 0
    out = capsys.readouterr().out
    assert one in out
    assert two in out
    assert "100%" in out
    assert len(asked) == 1 + 2 * len(OWN_QUESTIONS)
    with answering(answer) as one:
        assert main.run(["bench", "serve", "--url", one, "--server-model", "big"]) == 0
    assert len(asked) == 1 + 5 * len(OWN_QUESTIONS), "a second run finds none in a server's cache"


@pytest.mark.parametrize(("end", "status"), [(KeyboardInterrupt(), 130), (ServerError("full"), 1)])
def test_loads_that_were_measured_are_printed_after_ctrl_c_or_an_error(
    end: BaseException,
    status: int,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def measured(server: Server, load: Load) -> list[Answered]:
        if load.users == 2:
            raise end
        return measure_load(server, load)

    monkeypatch.setattr("redrafter_mlx.bench.measure.load_client.measure_load", measured)
    with answering(echo) as url:
        line = ["bench", "serve", "--url", url, "--users", "1,2", "--json"]
        assert main.run(line) == status
    found = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert {row["users"] for row in found["rows"]} == {1}
    assert found["interrupted"] == (status == 130)


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        ((), "--url"),
        (("--url", "localhost:8080"), "localhost:8080"),
        (("--url", "http://127.0.0.1:9/v1"), "127.0.0.1:9"),
        (("--url", "http://local host/v1"), "no server's URL"),
        (("--url", "http://x/v1", "--users", "0"), "--users"),
        (("--url", "http://x/v1", "--users", "many"), "--users"),
        (("--url", "http://x/v1", "--users", "1,32"), "--users holds 32"),
        (("--url", "http://x/v1", "--max-tokens", "1"), "--max-tokens"),
        (("--url", "http://x/v1", "--temperature", "-1"), "--temperature"),
    ],
)
def test_bad_options_are_refused_in_one_line(
    arguments: tuple[str, ...], named: str, cli: CommandLine
) -> None:
    assert named in cli.error("bench", "serve", *arguments)


def test_options_of_bench_itself_are_refused_for_serve(cli: CommandLine) -> None:
    assert "after `serve`" in cli.error("bench", "--limit", "3", "serve")
    assert "--url" in cli.error("bench", "--limit", "3", "serve", "--url", "http://x/v1", status=2)
