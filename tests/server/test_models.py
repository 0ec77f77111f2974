"""Several models on one server: each answers as if it were alone, in the memory they share."""

from __future__ import annotations

import contextlib
import gc
import json
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any
from weakref import WeakValueDictionary

import httpx2 as httpx
import mlx.core as mx
import pytest
from serving import (
    CONTEXT,
    KEY,
    AlwaysDrafting,
    figure,
    hold,
    running,
    wait_until_ready,
)
from tiny import CHAT_TEMPLATE, byte_model, byte_tokenizer
from waiting import DEADLINE, wait_for

from redrafter_mlx.drafting.untrained.ngram import Lookup
from redrafter_mlx.engine.engine import Redrafter
from redrafter_mlx.engine.options import EngineOptions
from redrafter_mlx.engine.scheduler import Scheduler
from redrafter_mlx.engine.thread import EngineThread
from redrafter_mlx.errors import DamagedFileError
from redrafter_mlx.server.hosting import ModelHost
from redrafter_mlx.server.models import Models
from redrafter_mlx.target_model.fingerprint import nbytes_of

CHAT = "/v1/chat/completions"
NAMES = ("one", "two", "three")
TEXTS = ("hello hello", "a longer question, a longer question", "x")
OTHER_TEMPLATE = CHAT_TEMPLATE.replace("{{ m['content'] }}", "{{ m['content'] | upper }}")


def tiny(
    name: str, thread: EngineThread | None = None, engine: EngineOptions | None = None
) -> Redrafter:
    """Return the model of a name: its weights and its chat template are its own.

    The weights are much larger than the caches of a few answers.
    """
    tokenizer, sizes = byte_tokenizer(), {"intermediate_size": 4096, "head_dim": 8}
    if name == "two":
        tokenizer._tokenizer.chat_template = OTHER_TEMPLATE
    model = byte_model(NAMES.index(name), max_position_embeddings=CONTEXT, **sizes)
    drafters = (Lookup(),)
    return AlwaysDrafting(model, tokenizer, host_drafters=drafters, engine=engine, thread=thread)


class Kitchen:
    """Models that are made when they are asked for.

    made:  their names, in the order in which they were loaded
    alive: those in memory, by name
    """

    def __init__(
        self,
        *names: str,
        on_disk: Sequence[str] = (),
        room: int | None = None,
        nbytes: int = 0,
        unload_after: float | None = None,
        load: Callable[[str], object] = lambda _: None,
    ) -> None:
        """`room`: bytes for all beyond what this process holds; None sets no limit.

        nbytes: that each is expected to take
        load:   called before one is made
        """
        gc.collect()  # the models of other tests
        self.thread = EngineThread()
        self.limit = None if room is None else mx.get_active_memory() + room
        self._engine = EngineOptions(memory_bytes=self.limit)
        self._before, self._nbytes, self._unload_after = load, nbytes, unload_after
        self.made: list[str] = []
        self.alive = WeakValueDictionary[str, Redrafter]()
        self.models = Models(
            [self.host(name) for name in names],
            on_disk=(lambda: on_disk) if on_disk else None,
            offer=lambda name: self.host(name, starting=False),
            thread=self.thread,
            memory_bytes=self.limit,
        )

    def host(self, name: str, *, starting: bool = True) -> ModelHost:
        def load() -> Redrafter:
            self._before(name)
            self.made.append(name)
            self.alive[name] = model = tiny(name, self.thread, self._engine)
            return model

        return ModelHost(
            name,
            load,
            unload_after=self._unload_after,
            nbytes=lambda: self._nbytes,
            starting=starting,
        )

    @contextlib.contextmanager
    def open(self, **options: object) -> Iterator[str]:
        """Run the server; yields its URL once those that it was started with are in memory."""
        with running(self.models, **options) as url:
            wait_until_ready(url)
            hosts = self.models.hosts
            wait_for(lambda: not any(host.starting for host in hosts.values()))
            yield url

    @staticmethod
    def states(url: str) -> dict[str, str]:
        data = httpx.get(f"{url}/v1/models", timeout=DEADLINE).json()["data"]
        return {entry["id"]: entry["x_redrafter"]["state"] for entry in data}


def ask(url: str, model: str | None, text: str = TEXTS[0], **asked: object) -> Any:
    messages = [{"role": "user", "content": text}]
    body = {"messages": messages, "max_tokens": 24, "temperature": 1.0, "seed": 5, **asked}
    named = {} if model is None else {"model": model}
    return httpx.post(url + CHAT, json={**body, **named}, timeout=DEADLINE)


def text_of(answer: Any) -> str:
    assert answer.status_code == 200, answer.text
    return str(answer.json()["choices"][0]["message"]["content"])


@pytest.fixture(scope="module")
def alone() -> dict[tuple[str, str], str]:
    """What each model answers to each text, alone and without drafts."""
    texts = {}
    for name in NAMES:
        model = tiny(name)
        for text in TEXTS:
            given = model.generate(text, max_tokens=24, temperature=1.0, seed=5, draft=False)
            texts[name, text] = given.text
        model.close()
    return texts


@pytest.fixture(scope="module")
def weights() -> int:
    """Bytes of one model's weights."""
    return nbytes_of(tiny("one").model)


def ask_all(url: str, times: int) -> list[tuple[tuple[str, str], Any]]:
    """Ask all models all texts at once, several times."""
    asked = [(name, text) for _ in range(times) for text in TEXTS for name in NAMES]
    with ThreadPoolExecutor(len(asked)) as pool:
        return list(zip(asked, pool.map(lambda each: ask(url, *each), asked), strict=True))


def test_each_of_several_models_answers_as_if_alone(alone: dict[tuple[str, str], str]) -> None:
    """At the same time, in one thread: neither tokens, templates nor metrics are mixed up."""
    kitchen = Kitchen(*NAMES)
    with kitchen.open() as url:
        assert kitchen.states(url) == dict.fromkeys(NAMES, "loaded")
        answers = ask_all(url, times=2)
        assert {text_of(answer) == alone[asked] for asked, answer in answers} == {True}
        lines = httpx.get(f"{url}/metrics").text.splitlines()
        for name in NAMES:
            used = [a.json()["usage"]["completion_tokens"] for (n, _), a in answers if n == name]
            counted = f'vllm:generation_tokens_total{{model_name="{name}"}} {float(sum(used))}'
            assert counted in lines
        assert {answer.json()["model"] for _, answer in answers} == {*NAMES}
        assert (
            text_of(ask(url, None)) == text_of(ask(url, "default_model")) == alone["one", TEXTS[0]]
        )


def test_a_text_is_cached_for_its_own_model_alone() -> None:
    text = "tell me of the river that runs through the town " * 8
    with Kitchen("one", "three").open() as url:
        used = [ask(url, name, text).json()["usage"] for name in ("one", "three", "one", "three")]
    cached = [one["prompt_tokens_details"]["cached_tokens"] for one in used]
    assert cached[:2] == [0, 0]
    assert min(cached[2:]) > 300


def test_models_that_do_not_fit_at_once_are_loaded_in_turn_and_no_request_is_lost(
    alone: dict[tuple[str, str], str], weights: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """There is room for two of three. All that MLX holds stays within the limit after each round.

    Each answer is that of its model alone, although models are unloaded between requests that
    come at once.
    """
    kitchen = Kitchen(*NAMES, room=5 * weights // 2, nbytes=weights)
    limit, honest, held = kitchen.limit, Scheduler.work, list[int]()
    assert limit is not None

    def watched(scheduler: Scheduler, alone: bool) -> None:
        honest(scheduler, alone)
        held.append(mx.get_active_memory() - limit)

    monkeypatch.setattr(Scheduler, "work", watched)
    with kitchen.open() as url:
        assert kitchen.states(url) == {"one": "loaded", "two": "loaded", "three": "available"}
        for _ in range(3):
            answers = ask_all(url, times=2)
            assert {text_of(answer) == alone[asked] for asked, answer in answers} == {True}
            states = [*kitchen.states(url).values()]
            # One alone, where the texts of the others' answers were in the way of a load.
            assert states.count("loaded") in (1, 2)
            assert states.count("available") == 3 - states.count("loaded")
        assert len(kitchen.made) >= 5
        assert figure(url, "vllm:num_requests_running") == 0
    assert max(held) <= 0


def test_models_that_leave_when_idle_lose_no_request_of_many_at_once(
    alone: dict[tuple[str, str], str], weights: int
) -> None:
    """While others are loaded, unloaded for want of memory, and answer."""
    kitchen = Kitchen(*NAMES, room=5 * weights // 2, nbytes=weights, unload_after=0.02)
    with kitchen.open(max_queue=100) as url:
        for _ in range(3):
            answers = ask_all(url, times=2)
            assert {text_of(answer) == alone[asked] for asked, answer in answers} == {True}
        wait_for(lambda: {*kitchen.states(url).values()} == {"available"})
        wait_for(lambda: not kitchen.alive)  # they are listed as available while they leave


def test_the_model_that_was_used_least_recently_is_unloaded(weights: int) -> None:
    kitchen = Kitchen(*NAMES, room=5 * weights // 2, nbytes=weights)
    with kitchen.open() as url:
        for name in ("two", "one", "three"):
            text_of(ask(url, name))
        assert kitchen.states(url) == {"one": "loaded", "two": "available", "three": "loaded"}


def test_a_model_is_unloaded_once_its_requests_have_ended(
    alone: dict[tuple[str, str], str], weights: int
) -> None:
    """Requests for it that come later wait, and are answered once it is loaded again."""
    kitchen = Kitchen("one", "two", room=3 * weights // 2, nbytes=weights)
    with kitchen.open() as url, ThreadPoolExecutor(3) as pool:
        held = hold(kitchen.alive["one"], 5)
        running = pool.submit(ask, url, "one")
        wait_for(lambda: held.paused)
        other = pool.submit(ask, url, "two")
        wait_for(lambda: kitchen.states(url)["two"] == "loading")
        later = pool.submit(ask, url, "one", TEXTS[1])
        wait_for(lambda: figure(url, "vllm:num_requests_waiting") == 2)
        assert kitchen.made == ["one"]
        held.let_go = True
        held = None  # or the model stays in memory
        assert text_of(running.result(DEADLINE)) == alone["one", TEXTS[0]]
        assert text_of(other.result(DEADLINE)) == alone["two", TEXTS[0]]
        assert text_of(later.result(DEADLINE)) == alone["one", TEXTS[1]]
    assert kitchen.made == ["one", "two", "one"]


def test_texts_that_a_model_keeps_give_way_to_another_model(weights: int) -> None:
    """Both stay in memory."""
    kitchen = Kitchen("one", "two", room=7 * weights // 2, nbytes=weights)
    with kitchen.open() as url:
        one, _ = kitchen.thread.pool.members
        letters = "abcdefghijklmnopqrstuvwxyz"
        for letter in letters:
            text_of(ask(url, "one", letter * 1800, max_tokens=1))
        full = one.kept.nbytes
        assert full > weights
        for letter in letters:
            text_of(ask(url, "two", letter * 1800, max_tokens=1))
        assert one.kept.nbytes < full // 2
        assert kitchen.states(url) == {"one": "loaded", "two": "loaded"}


def test_an_answer_for_which_memory_is_short_has_another_idle_model_unloaded(weights: int) -> None:
    """Its prompt fits beside the weights of its own model, and not beside those of both."""
    kitchen = Kitchen("one", "two", room=4 * weights, nbytes=weights)
    with kitchen.open() as url:
        mx.eval(other := mx.zeros((2 * weights - 10**5,), mx.uint8))
        answer = ask(url, "one", max_tokens=8)
        del other
        states = kitchen.states(url)
    assert answer.status_code == 200, answer.text
    assert states == {"one": "loaded", "two": "available"}


def test_requests_wait_for_one_loading_that_may_fail_and_be_tried_again() -> None:
    failing, let_go = [True], threading.Event()

    def load(name: str) -> None:
        if name == "two":
            let_go.wait(DEADLINE)
            if failing[0]:
                raise DamagedFileError("model.safetensors is damaged")

    kitchen = Kitchen("one", on_disk=["two"], load=load)
    with kitchen.open() as url, ThreadPoolExecutor(4) as pool:
        asked = [pool.submit(ask, url, "two") for _ in range(4)]
        wait_for(lambda: figure(url, "vllm:num_requests_waiting") == 4)
        assert kitchen.states(url) == {"one": "loaded", "two": "loading"}
        assert text_of(ask(url, "one"))  # meanwhile
        let_go.set()
        for future in asked:
            answer = future.result(DEADLINE)
            assert answer.status_code == 500
            assert answer.json()["error"]["message"] == "model.safetensors is damaged"
        assert httpx.get(f"{url}/health").status_code == 200
        assert kitchen.states(url)["two"] == "available"
        failing[0] = False
        assert text_of(ask(url, "two"))


def test_a_client_that_leaves_while_a_model_is_loaded_leaves_nothing_waiting() -> None:
    let_go = threading.Event()
    kitchen = Kitchen(
        "one", on_disk=["two"], load=lambda n: let_go.wait(2 * DEADLINE if n == "two" else 0)
    )
    with kitchen.open(max_concurrency=1, max_queue=1) as url:
        for _ in range(3):  # more than may wait
            with pytest.raises(httpx.ReadTimeout):
                httpx.post(url + CHAT, json={"model": "two", "messages": [
                    {"role": "user", "content": "x"}]}, timeout=0.2)  # fmt: skip
            wait_for(lambda: figure(url, "vllm:num_requests_waiting") == 0)
        let_go.set()
        assert text_of(ask(url, "two"))


PATHS = ("/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages",
         "/v1/messages/count_tokens")  # fmt: skip
BODY = {
    "messages": [{"role": "user", "content": "x"}],
    "prompt": "x",
    "input": "x",
    "max_tokens": 4,
}


def body_of(path: str, model: str) -> dict[str, object]:
    fields = {"/v1/completions": ["prompt"], "/v1/responses": ["input"]}.get(path, ["messages"])
    if path != "/v1/responses":
        fields = [*fields, "max_tokens"]
    return {"model": model, **{name: BODY[name] for name in fields}}


@pytest.mark.parametrize("path", PATHS)
def test_a_name_of_no_model_is_not_found_and_loads_nothing(path: str) -> None:
    """Not a path either, nor anything that a download would need."""
    kitchen = Kitchen("one", on_disk=["two"])
    with kitchen.open() as url:
        for name in ("tow", "/etc/passwd", "../two", "mlx-community/Qwen3-0.6B-4bit", "", "two "):
            answer = httpx.post(url + path, json=body_of(path, name), timeout=DEADLINE)
            assert answer.status_code == 404, name
            error = answer.json()["error"]
            if path.startswith("/v1/messages"):
                assert error["type"] == "not_found_error"
            else:
                assert (error["param"], error["code"]) == ("model", "model_not_found")
        assert "'two'" in httpx.post(url + path, json=body_of(path, "tow")).text
        assert kitchen.made == ["one"]
        assert (
            httpx.post(url + path, json=body_of(path, "two"), timeout=DEADLINE).status_code == 200
        )
    assert kitchen.made == ["one", "two"]


def test_a_name_of_millions_of_characters_holds_nobody_up() -> None:
    """It is compared with the known ones by its beginning."""
    kitchen = Kitchen("one", on_disk=["two"])
    with kitchen.open() as url:
        answer = httpx.post(url + CHAT, json=body_of(CHAT, "two" * 10**6), timeout=DEADLINE)
        assert answer.status_code == 404
        assert len(answer.text) < 1000


def test_the_list_has_all_that_can_be_had_and_its_state() -> None:
    with Kitchen("one", on_disk=["two", "one"]).open() as url:
        listed = httpx.get(f"{url}/v1/models").json()
        assert [entry["id"] for entry in listed["data"]] == ["one", "two"]
        assert (listed["first_id"], listed["last_id"]) == ("one", "two")
        assert httpx.get(f"{url}/v1/models/two").json()["x_redrafter"]["state"] == "available"
        assert httpx.get(f"{url}/v1/models/tow").status_code == 404
        text_of(ask(url, "two"))
        assert httpx.get(f"{url}/v1/models/two").json()["x_redrafter"]["state"] == "loaded"
    with Kitchen("one").open() as url:
        assert list(Kitchen.states(url)) == ["one"]
        assert ask(url, "two").status_code == 404


def test_nobody_loads_a_model_without_the_key_or_from_another_site() -> None:
    kitchen = Kitchen("one", on_disk=["two"])
    with kitchen.open(api_key=KEY) as url:
        key = {"Authorization": f"Bearer {KEY}"}
        for headers, status in (
            ({}, 401),
            ({**key, "Host": "evil.example"}, 403),
            ({**key, "Origin": "http://evil.example"}, 403),
        ):
            for path in PATHS:
                body = json.dumps(body_of(path, "two"))
                sent = {"Content-Type": "application/json", **headers}
                answer = httpx.post(url + path, content=body, headers=sent)
                assert answer.status_code == status
            assert httpx.get(f"{url}/v1/models", headers=headers).status_code == status
        assert kitchen.made == ["one"]


def test_a_model_that_cannot_be_loaded_at_the_start_is_reported() -> None:
    """The others serve on, if whoever runs the server wants that."""

    def load(name: str) -> None:
        if name == "two":
            raise DamagedFileError("two is damaged")

    kitchen = Kitchen("one", "two", "three", load=load)
    with kitchen.open() as url:
        assert kitchen.states(url) == {"one": "loaded", "two": "available", "three": "available"}
        assert text_of(ask(url, "three"))
        assert ask(url, "two").json()["error"]["message"] == "two is damaged"
