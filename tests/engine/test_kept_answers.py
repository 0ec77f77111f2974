"""The engine hands answers to what keeps them, except where a request forbids it."""

from __future__ import annotations

import logging
from pathlib import Path

import httpx2 as httpx
import pytest
from serving import ready
from tiny import byte_model, byte_tokenizer
from waiting import DEADLINE

from redrafter_mlx.drafting.untrained.ngram import Lookup
from redrafter_mlx.engine.engine import Redrafter
from redrafter_mlx.learning import kept_texts
from redrafter_mlx.learning.folder import learning_dir, learning_folders
from redrafter_mlx.learning.keeper import TextKeeper, holds_secret
from redrafter_mlx.learning.kept_texts import KeptText, TextStore

PROMPT = [72, 101, 108, 108, 111]
SECRET = [[(11 * i) % 256 for i in range(30)], [(17 * i + 5) % 256 for i in range(30)]]


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("REDRAFTER_CACHE", str(tmp_path / "cache"))


def keeping(max_bytes: int = 10**6) -> Redrafter:
    tokenizer = byte_tokenizer()
    keeper = TextKeeper("tiny", "sha256:1", tokenizer.decode, max_bytes)
    return Redrafter(byte_model(seed=1), tokenizer, host_drafters=(Lookup(),), keeper=keeper)


def kept(redrafter: Redrafter) -> list[KeptText]:
    """End an engine, and return all that it has kept."""
    redrafter.close()
    assert redrafter.keeper is not None
    redrafter.keeper.close()
    return [*TextStore(redrafter.keeper.folder.texts).texts()]


def test_answers_are_kept_as_they_were_given() -> None:
    redrafter = keeping()
    assert redrafter.keeper is not None
    assert redrafter.keeper.kept == 0
    greedy = redrafter.generate(PROMPT, max_tokens=20)
    assert redrafter.keeper.kept == 1
    drawn = redrafter.generate(PROMPT[::-1], max_tokens=20, temperature=0.9, seed=3)
    texts = kept(redrafter)
    assert redrafter.keeper.kept == keeping().keeper.kept == 2  # type: ignore[union-attr]
    assert [(t.prompt, t.answer, t.temperature) for t in texts] == [
        (tuple(PROMPT), tuple(greedy.token_ids), 0.0),
        (tuple(PROMPT[::-1]), tuple(drawn.token_ids), 0.9),
    ]


def test_keeping_changes_no_token() -> None:
    plain = Redrafter(byte_model(seed=1), byte_tokenizer(), host_drafters=(Lookup(),))
    learning = keeping()
    for options in ({}, {"temperature": 1.0, "seed": 5}):
        want = plain.generate(PROMPT, max_tokens=30, **options)
        got = learning.generate(PROMPT, max_tokens=30, **options)
        assert got.token_ids == want.token_ids
    kept(learning)


def test_an_answer_that_was_cut_short_is_kept_as_far_as_it_went() -> None:
    redrafter = keeping()
    responses = redrafter.stream(PROMPT, max_tokens=200)
    taken = [next(responses).token for _ in range(12)]
    responses.close()
    (text,) = kept(redrafter)
    assert list(text.answer[:12]) == taken


@pytest.mark.parametrize("forbidden", [{"learn": False}, {"cache_prompt": False}])
def test_a_request_that_forbids_it_leaves_no_byte(forbidden: dict[str, bool]) -> None:
    redrafter = keeping()
    redrafter.warm_up()
    redrafter.generate(SECRET[0], max_tokens=20, **forbidden)
    redrafter.generate(SECRET[1], max_tokens=20)
    assert [text.prompt for text in kept(redrafter)] == [tuple(SECRET[1])]
    on_disk = b"".join(p.read_bytes() for p in learning_dir().rglob("*") if p.is_file())
    secret, told = (",".join(map(str, prompt[:5])).encode() for prompt in SECRET)
    assert secret not in on_disk
    assert told in on_disk


def test_a_server_leaves_out_requests_that_ask_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    key = "the key of this server"
    redrafter, asked = keeping(), "/v1/chat/completions"
    monkeypatch.setenv("REDRAFTER_API_KEY", key)
    with ready(redrafter, api_key=key) as url:
        for words, own in (("out", {"learn": False}), ("in", {"learn": True}), ("too", True),
                           ("kept", None), (f"told {key}", None)):  # fmt: skip
            body = {"messages": [{"role": "user", "content": words}], "max_tokens": 20}
            body |= {} if own is None else {"x_redrafter": own}
            sent = {"Authorization": f"Bearer {key}"}
            reply = httpx.post(url + asked, json=body, headers=sent, timeout=DEADLINE)
            assert reply.status_code == 200
        refused = httpx.post(
            url + asked, json={**body, "x_redrafter": {"learn": "no"}}, headers=sent,
            timeout=DEADLINE,
        )  # fmt: skip
        assert refused.status_code == 400
        assert "x_redrafter.learn" in refused.text
    decode = redrafter.tokenizer.decode
    texts = [decode(list(text.prompt)) for text in kept(redrafter)]
    assert [next(w for w in ("in", "too", "kept") if f"\n{w}<" in text) for text in texts] == [
        "in", "too", "kept",
    ]  # fmt: skip


@pytest.mark.parametrize(
    "text",
    [
        "-----BEGIN OPENSSH PRIVATE KEY-----",
        "my key is sk-abcdefghijklmnopqrstuvwx",
        "ghp_0123456789abcdefghij0123456789",
        "AKIAABCDEFGHIJKLMNOP",
        "the password is known-to-us",
    ],
)
def test_what_looks_like_a_key_is_a_secret(text: str) -> None:
    assert holds_secret(text, known=["known-to-us"])
    assert not holds_secret("sk-ip the queue, ask-me-anything-about-this-long-word", known=[""])


def test_a_full_disk_costs_no_answer_and_is_said_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(kept_texts, "free_disk", lambda _: 0)
    redrafter = keeping()
    with caplog.at_level(logging.WARNING, "redrafter_mlx.learning"):
        answers = [redrafter.generate(PROMPT, max_tokens=20) for _ in range(3)]
        assert kept(redrafter) == []
    assert len({tuple(answer.token_ids) for answer in answers}) == 1
    assert caplog.text.count("is not kept") == 1


def test_the_first_time_says_what_is_kept_and_where(caplog: pytest.LogCaptureFixture) -> None:
    for _ in range(2):
        with caplog.at_level(logging.WARNING, "redrafter_mlx.learning"):
            kept(keeping())
    (record,) = caplog.records
    (folder,) = learning_folders()
    message = record.getMessage()
    assert len(message.splitlines()) == 2
    assert str(folder.path) in message
    assert "--forget" in message
