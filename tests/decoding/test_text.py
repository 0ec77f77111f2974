"""Where an answer ends, and which part of it can be shown."""

from __future__ import annotations

import random

import pytest

from redrafter_mlx.decoding.text import AnswerText, StopScanner


class Letters:
    """Decodes tokens that are code points; it may hold one back until more text comes."""

    def __init__(self, held: int | None = None) -> None:
        self._held, self._late = held, ""

    def add(self, token: int) -> str:
        if token == self._held:
            self._late += chr(token)
            return ""
        return self.finish() + chr(token)

    def finish(self) -> str:
        late, self._late = self._late, ""
        return late


def say(text: str, stop: tuple[str, ...] = (), max_tokens: int = 1000, held: int | None = None):  # type: ignore[no-untyped-def]
    answer = AnswerText(Letters(held), {0}, stop, max_tokens)
    pieces = []
    for c in text:
        pieces.append(answer.add(ord(c)))
        if answer.finish_reason:
            break
    return "".join(pieces), answer


@pytest.mark.parametrize("seed", range(50))
def test_stop_strings_cut_where_a_search_of_the_whole_text_would(seed: int) -> None:
    """The output is the text before the earliest stop string, however the text is split."""
    rng = random.Random(seed)
    text = "".join(rng.choice("ab") for _ in range(40))
    stop = tuple("".join(rng.choice("ab") for _ in range(rng.randrange(2, 6))) for _ in range(2))
    scanner, out = StopScanner(stop), ""
    at = 0
    while at < len(text) and scanner.found is None:
        n = rng.randrange(1, 7)
        out += scanner.feed(text[at : at + n])
        at += n
    out += scanner.flush()
    found = [text.find(s) for s in stop if text.find(s) >= 0]
    assert out == (text[: min(found)] if found else text)
    assert (scanner.found is not None) == bool(found)


def test_text_that_could_become_a_stop_string_is_held_back() -> None:
    scanner = StopScanner(["END"])
    assert scanner.feed("the E") == "the "
    assert scanner.feed("N") == ""
    assert scanner.feed("x") == "ENx"
    assert scanner.feed("EN") == ""
    assert scanner.flush() == "EN"


def test_end_of_text_ends_the_answer_and_is_not_shown() -> None:
    text, answer = say("hi\0more")
    assert (text, answer.finish_reason, answer.tokens) == ("hi", "stop", [104, 105, 0])


def test_max_tokens_cuts_exactly_there() -> None:
    text, answer = say("hello", max_tokens=3)
    assert (text, answer.finish_reason, len(answer.tokens)) == ("hel", "length", 3)


def test_end_of_text_as_the_last_allowed_token_is_a_stop() -> None:
    assert say("ab\0", max_tokens=3)[1].finish_reason == "stop"


def test_a_stop_string_keeps_the_tokens_up_to_its_end() -> None:
    text, answer = say("one STOP two", ("STOP",))
    assert (text, answer.finish_reason) == ("one ", "stop")
    assert "".join(map(chr, answer.tokens)) == "one STOP"


def test_text_that_was_held_back_is_flushed_at_the_end() -> None:
    assert say("ab", max_tokens=2, held=ord("b"))[0] == "ab"


def test_a_stop_string_that_ends_in_the_flush_still_counts() -> None:
    text, answer = say("xab", ("ab",), max_tokens=3, held=ord("b"))
    assert (text, answer.finish_reason) == ("x", "stop")
