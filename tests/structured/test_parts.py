"""The parts of an answer: text, reasoning and calls, however it is cut."""

from __future__ import annotations

import json
import random

import pytest
from mlx_lm.tool_parsers import mistral
from output_plans import (
    ASKED,
    CALL,
    CLOCK,
    THINKING_MARKUP,
    WEATHER,
    deltas_of,
    merged,
    model,
    plan,
    tool,
)
from tiny import byte_tokenizer
from tokenizers import AddedToken

from redrafter_mlx.weights.text.markup import Markup, OutputParser, markup_of


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("plain <tool", [("text", "plain <tool")]),
        (f"Well: {CALL}", [("text", "Well: "), ("clock", '{"zone": "UT"}')]),
        (f"{CALL}\n{CALL} so", [("clock", '{"zone": "UT"}')] * 2 + [("text", "so")]),
        (
            f"<think>\nhm <b></think>\n\nYes{CALL}",
            [("reasoning", "hm <b>"), ("text", "Yes"), ("clock", '{"zone": "UT"}')],
        ),
        ("<tool_call>{nope}</tool_call> !", [("text", "<tool_call>{nope}</tool_call> !")]),
        ("a <tool_call> b\n\nc", [("text", "a <tool_call> b\n\nc")]),
        (
            CALL.replace("UT", "a </tool_call> <tool_call>"),
            [("clock", '{"zone": "a </tool_call> <tool_call>"}')],
        ),
        (
            f'<tool_call>{{"</tool_call> {CALL}',
            [("text", '<tool_call>{"</tool_call> '), ("clock", '{"zone": "UT"}')],
        ),
        (
            "<think>in <tool_call></tool_call> tags <tool_call>{}\n</tool_call>\n"
            f"</think>\n{CALL}",
            [
                ("reasoning", "in <tool_call></tool_call> tags <tool_call>{}\n</tool_call>\n"),
                ("clock", '{"zone": "UT"}'),
            ],
        ),
        (
            "<think>a <tool_call> b\n</think>\n\nYes",
            [("reasoning", "a <tool_call> b\n"), ("text", "Yes")],
        ),
        (
            "<think>a <tool_call>{ b</think>\n\nYes",
            [("reasoning", "a <tool_call>{ b"), ("text", "Yes")],
        ),
        (CALL.replace("clock", "bomb"), [("text", CALL.replace("clock", "bomb"))]),
        (CALL.replace('{"zone": "UT"}', "[1]"), [("text", CALL.replace('{"zone": "UT"}', "[1]"))]),
        (CALL.replace('{"zone": "UT"}', '"{}"'), [("clock", "{}")]),
        (CALL[:-4], [("clock", '{"zone": "UT"}')]),
        (CALL[:-14], [("clock", '{"zone": "UT"}')]),
        (CALL[:-17], [("text", CALL[:-17])]),
        ("<think>on and on", [("reasoning", "on and on")]),
        ("Use <think> and </think>, I think", [("text", "Use <think> and </think>, I think")]),
        (
            f"<think>\nhm {CALL} so\n</think>\n\nYes",
            [
                ("reasoning", "hm "),
                ("clock", '{"zone": "UT"}'),
                ("reasoning", "so\n"),
                ("text", "Yes"),
            ],
        ),
        (
            f"a <think> b {CALL} c",
            [("text", "a <think> b "), ("clock", '{"zone": "UT"}'), ("text", "c")],
        ),
        (
            f"<think>a</think> b <think> c{CALL}",
            [("reasoning", "a"), ("text", "b <think> c"), ("clock", '{"zone": "UT"}')],
        ),
    ],
)
def test_the_parts_are_the_same_however_the_text_is_cut(
    text: str, parts: list[tuple[str, str]]
) -> None:
    """Into characters, into accepted runs with a mark inside, or not at all."""
    rng = random.Random(0)
    for pieces in (1, 2, 3, 7, len(text)):
        cuts = sorted(rng.sample(range(1, len(text)), pieces - 1))
        cut = [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]
        parser = OutputParser(THINKING_MARKUP, [WEATHER, CLOCK])
        found = deltas_of(parser, cut)
        assert merged(found) == parts
        assert parser.called == any(kind == "clock" for kind, _ in parts)
        calls = [delta.tool_call for delta in found if delta.tool_call is not None]
        assert [call.index for call in calls] == list(range(len(calls)))
        assert len({call.id for call in calls}) == len(calls)


HARMONY = ("<|channel|>", "<|message|>", "<|start|>", "<|end|>")
ANALYSIS, FINAL = "<|channel|>analysis<|message|>", "<|channel|>final<|message|>"
NEXT = "<|end|><|start|>assistant"


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        (f"{FINAL}Hi", [("text", "Hi")]),
        (f"{ANALYSIS}Well.{NEXT}{FINAL}Hi", [("reasoning", "Well."), ("text", "Hi")]),
        (f"{ANALYSIS}a{NEXT}{ANALYSIS}b{NEXT}{FINAL}c", [("reasoning", "ab"), ("text", "c")]),
        (f"{ANALYSIS}on and", [("reasoning", "on and")]),
        (
            f"{ANALYSIS}a{NEXT}{FINAL.replace('final', 'commentary')}b{NEXT}{ANALYSIS}c",
            [("reasoning", "a"), ("text", "b"), ("reasoning", "c")],
        ),
    ],
)
def test_channels_of_gpt_oss_are_told_apart(text: str, parts: list[tuple[str, str]]) -> None:
    """The texts are examples of openai/harmony's docs/format.md, shortened."""
    words = byte_tokenizer()
    words.add_tokens([AddedToken(mark, special=True) for mark in HARMONY])
    markup = markup_of(words, words.encode("<|start|>assistant", add_special_tokens=False))
    for pieces in ([text], list(text)):
        assert merged(deltas_of(OutputParser(markup, []), pieces)) == parts


def test_a_model_without_a_mark_at_the_end_of_calls_ends_them_with_the_answer() -> None:
    markup = Markup(
        tool_call_start=mistral.tool_call_start,
        tool_call_end=mistral.tool_call_end,
        tool_parser=mistral.parse_tool_call,
    )
    parser = OutputParser(markup, [tool("a"), tool("b")])
    found = deltas_of(parser, ['Yes[TOOL_CALLS]a[ARGS]{"x": 1}', 'b[ARGS]{"y": "é"}'])
    assert merged(found) == [("text", "Yes"), ("a", '{"x": 1}'), ("b", '{"y": "é"}')]


def test_half_of_a_surrogate_pair_in_a_call_can_be_encoded() -> None:
    parser = OutputParser(THINKING_MARKUP, [CLOCK])
    text = CALL.replace("UT", "\\ud83d")
    (call,) = (d.tool_call for d in deltas_of(parser, [text]) if d.tool_call is not None)
    assert json.loads(call.arguments.encode()) == {"zone": "\ud83d"}


def test_text_with_marks_stays_text_where_no_tools_are_given() -> None:
    made = plan(model(), ASKED)
    assert made.constraint() is None
    assert merged(deltas_of(made.parser(), [CALL])) == [("text", CALL)]


@pytest.mark.parametrize("amount", ["1e999", "NaN", "9" * 5000], ids=["inf", "nan", "digits"])
def test_a_number_that_programs_cannot_hold_is_passed_as_text(amount: str) -> None:
    call = f'<tool_call>{{"name": "weather", "arguments": {{"amount": {amount}}}}}</tool_call>'
    parser = OutputParser(THINKING_MARKUP, [WEATHER])
    assert merged(deltas_of(parser, [call])) == [("weather", f'{{"amount": "{amount}"}}')]


def test_arguments_nested_too_deeply_are_no_call() -> None:
    nested = '{"a": %s}' % ("[" * 100_000 + "]" * 100_000)
    call = f'<tool_call>{{"name": "weather", "arguments": {nested}}}</tool_call>'
    parser = OutputParser(THINKING_MARKUP, [WEATHER])
    assert merged(deltas_of(parser, [call])) == [("text", call)]
