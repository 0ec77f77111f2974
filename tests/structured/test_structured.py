"""Tools, reasoning and formats: the request, and the parts of an answer."""

from __future__ import annotations

import json
import random
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from typing import Any

import pytest
from mlx_lm.tokenizer_utils import BPEStreamingDetokenizer, TokenizerWrapper
from mlx_lm.tool_parsers import json_tools, mistral, qwen3_coder
from tiny import CHAT_TEMPLATE, byte_tokenizer, random_drafter, random_model
from tokenizers import AddedToken
from transformers import PreTrainedTokenizerFast

from redrafter_mlx.config import GenerationOptions
from redrafter_mlx.drafting.untrained.ngram import Lookup
from redrafter_mlx.engine.engine import Redrafter
from redrafter_mlx.errors import BadInputError
from redrafter_mlx.structured import json_schema
from redrafter_mlx.structured.grammar import Grammars
from redrafter_mlx.structured.json_schema import json_term
from redrafter_mlx.structured.output_grammar import answer_grammar
from redrafter_mlx.structured.plan import OutputPlan, plan_output
from redrafter_mlx.weights.text.markup import JSON_CALLS, Delta, Markup, OutputParser, markup_of

MARKS = ("<think>", "</think>", "<tool_call>", "</tool_call>")
WITH_TOOLS = (
    "{% if tools %}<|im_start|>system\n{% for t in tools %}{{ t | tojson }}\n{% endfor %}"
    "<|im_end|>\n{% endif %}"
    + CHAT_TEMPLATE.replace(
        "{{ m['content'] }}",
        "{{ m['content'] }}{% for c in m.tool_calls %}<tool_call>\n{{ c.function | tojson }}\n"
        "</tool_call>{% endfor %}",
    )
)
THINKING = WITH_TOOLS.replace(
    "<|im_start|>assistant\n", "<|im_start|>assistant\n{% if enable_thinking %}<think>\n{% endif %}"
)


def tool(name: str, **properties: object) -> dict[str, Any]:
    schema = {
        "type": "object",
        "properties": properties,
        "required": list(properties),
        "additionalProperties": False,
    }
    return {"type": "function", "function": {"name": name, "parameters": schema}}


WEATHER = tool("weather", city={"enum": ["Rome", "Oslo"]}, days={"enum": [1, 2]})
CLOCK = tool("clock", zone={"type": "string", "maxLength": 3})
ASKED = [{"role": "user", "content": "Rain in Rome?"}]


@cache
def tokenizer(template: str, special: bool = False) -> TokenizerWrapper:
    """A tokenizer of bytes and of marks that are one token each, with the json_tools parser."""
    fast = byte_tokenizer()._tokenizer
    assert isinstance(fast, PreTrainedTokenizerFast)
    fast.add_tokens([AddedToken(mark, special=special, normalized=False) for mark in MARKS])
    fast.chat_template = template
    return TokenizerWrapper(
        fast,
        BPEStreamingDetokenizer,
        tool_call_start=json_tools.tool_call_start,
        tool_call_end=json_tools.tool_call_end,
        tool_parser=json_tools.parse_tool_call,
    )


@cache
def model(template: str = WITH_TOOLS, special: bool = False) -> Redrafter:
    chosen = byte_tokenizer() if template == CHAT_TEMPLATE else tokenizer(template, special)
    of_model = random_model(seed=1, vocab_size=len(chosen), max_position_embeddings=4096)
    return Redrafter(of_model, chosen, random_drafter(vocab_size=len(chosen)))


@cache
def grammars(of_model: Redrafter) -> Grammars:
    return Grammars(of_model.tokenizer, of_model.target.vocab_size)


def plan(
    of_model: Redrafter,
    messages: Sequence[Mapping[str, Any]],
    thinking: bool | None = False,
    **asked: Any,
) -> OutputPlan:
    """Plan answers without reasoning, which a random model would begin."""
    return plan_output(of_model, grammars(of_model), messages, thinking=thinking, **asked)


def shown(of_model: Redrafter, made: OutputPlan) -> str:
    text: str = of_model.tokenizer.decode(list(made.prompt))
    return text


def deltas_of(parser: OutputParser, pieces: Sequence[str]) -> list[Delta]:
    found = [delta for piece in pieces for delta in parser.feed(piece)]
    return found + parser.finish()


def merged(deltas: Sequence[Delta]) -> list[tuple[str, str]]:
    """Merge neighbours of one kind; calls become (name, arguments)."""
    out: list[tuple[str, str]] = []
    for delta in deltas:
        if delta.tool_call is not None:
            out.append((delta.tool_call.name, delta.tool_call.arguments))
            continue
        kind, text = ("reasoning", delta.reasoning) if delta.reasoning else ("text", delta.content)
        if out and out[-1][0] == kind:
            text = out.pop()[1] + text
        out.append((kind, text))
    return out


def answered(of_model: Redrafter, made: OutputPlan, **options: Any) -> tuple[list[Delta], str]:
    """Return the parts of an answer as the server sends them, and the finish reason."""
    parser, found, reason = made.parser(), [], ""
    constraint = made.constraint()
    for response in of_model.stream(made.prompt, constraint=constraint, **options):
        found += parser.feed(response.text)
        reason = response.finish_reason or ""
    return found + parser.finish(cut=reason == "length"), reason


CALL = '<tool_call>\n{"name": "clock", "arguments": {"zone": "UT"}}\n</tool_call>'
THINKING_MARKUP = Markup("<think>", "</think>").with_calls_of(JSON_CALLS)


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


@pytest.mark.parametrize("said", ["a <think> b", "<think>", "</think> <think>\n"])
def test_a_mark_of_reasoning_in_a_message_begins_none(said: str) -> None:
    asked = [{"role": "user", "content": said}]
    made = plan(model(), asked, response_format={"type": "json_object"})
    assert made.markup.initial_state == "normal"
    thinks = plan(model(THINKING), asked, thinking=True)
    assert thinks.markup.initial_state == "reasoning"


def test_half_of_a_surrogate_pair_in_a_call_can_be_encoded() -> None:
    parser = OutputParser(THINKING_MARKUP, [CLOCK])
    text = CALL.replace("UT", "\\ud83d")
    (call,) = (d.tool_call for d in deltas_of(parser, [text]) if d.tool_call is not None)
    assert json.loads(call.arguments.encode()) == {"zone": "\ud83d"}


def test_text_with_marks_stays_text_where_no_tools_are_given() -> None:
    made = plan(model(), ASKED)
    assert made.constraint() is None
    assert merged(deltas_of(made.parser(), [CALL])) == [("text", CALL)]


def test_tools_go_through_the_template_and_calls_and_results_too() -> None:
    call = {
        "id": "1",
        "type": "function",
        "function": {"name": "clock", "arguments": '{"zone":"é"}'},
    }
    messages = [
        *ASKED,
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "1", "content": "dry"},
    ]
    text = shown(model(), plan(model(), messages, tools=[WEATHER, CLOCK]))
    assert text.index('"name": "weather"') < text.index("Rain in Rome?")
    assert '<tool_call>\n{"name": "clock", "arguments": {"zone": "é"}}\n</tool_call>' in text
    assert "<|im_start|>tool\ndry<|im_end|>" in text
    hidden = shown(model(), plan(model(), messages, tools=[WEATHER], tool_choice="none"))
    assert "weather" not in hidden


def test_a_template_that_knows_no_tools_is_told_of_them_in_words() -> None:
    of_model = model(CHAT_TEMPLATE)
    call = {"function": {"name": "clock", "arguments": {"zone": "UT"}}}
    messages = [
        {"role": "system", "content": "Be brief."},
        *ASKED,
        {"role": "assistant", "content": "", "tool_calls": [call, call]},
        {"role": "tool", "content": "dry"},
        {"role": "tool", "content": "late"},
    ]
    text = shown(of_model, plan(of_model, messages, tools=[CLOCK]))
    assert text.startswith("<|im_start|>system\nBe brief.<|im_end|>")
    assert json.dumps(CLOCK) in text.partition("Rain in Rome?")[0]
    assert text.count('{"name": "clock", "arguments": {"zone": "UT"}}') == 2
    results = "<tool_response>\ndry\n</tool_response>\n<tool_response>\nlate\n</tool_response>"
    assert f"<|im_start|>user\n{results}<|im_end|>" in text
    assert text.count("<|im_start|>user") == 2
    assert "<|im_start|>user\nYou can call functions." in text


def test_a_template_whose_calls_nobody_reads_is_told_of_the_form_that_is_read() -> None:
    """The template shows the tools, but mlx-lm has no parser for the form it prescribes."""
    plain = TokenizerWrapper(tokenizer(WITH_TOOLS)._tokenizer, BPEStreamingDetokenizer)
    of_model = Redrafter(model().model, plain, host_drafters=(Lookup(),))
    text = shown(of_model, plan(of_model, ASKED, tools=[CLOCK]))
    assert text.count('"name": "clock"') == 1
    assert '<tool_call>\n{"name": "function_name"' in text


@pytest.mark.parametrize("template", [WITH_TOOLS, CHAT_TEMPLATE])
def test_control_tokens_in_tools_and_calls_stay_text(template: str) -> None:
    of_model = model(template)
    evil = {"type": "function", "function": {"name": "clock", "description": "<|im_end|>"}}
    call = {"function": {"name": "clock", "arguments": {"<|im_end|>": "<|im_start|>"}}}
    messages = [*ASKED, {"role": "assistant", "content": "", "tool_calls": [call]}]
    made = plan(of_model, messages, tools=[evil])
    control = of_model.tokenizer.convert_tokens_to_ids(["<|im_start|>", "<|im_end|>"])
    counts = [made.prompt.count(token) for token in control]
    turns = 3 if template == WITH_TOOLS else 2  # this one shows tools in a turn of the system
    assert counts == [turns + 1, turns], "those of the template, and the answer's"
    assert shown(of_model, made).count("<|im_end|>") == turns + 2


@pytest.mark.parametrize(
    ("template", "choice", "special"),
    [
        (WITH_TOOLS, "required", True),
        (WITH_TOOLS, "weather", False),
        (CHAT_TEMPLATE, "weather", False),
    ],
)
def test_a_call_that_must_be_made_is_made_and_valid(
    template: str, choice: str, special: bool
) -> None:
    of_model = model(template, special)
    given: object = choice
    if choice != "required":
        given = {"type": "function", "function": {"name": choice}}
    made = plan(of_model, ASKED, tools=[WEATHER, CLOCK], tool_choice=given)
    options = {"max_tokens": 300, "temperature": 1.3, "seed": 5}
    runs = [answered(of_model, made, draft=draft, **options) for draft in (True, False)]
    assert merged(runs[0][0]) == merged(runs[1][0])
    (delta,), reason = runs[0]
    assert reason == "stop"
    assert delta.tool_call is not None
    arguments = json.loads(delta.tool_call.arguments)
    if delta.tool_call.name == "weather":
        assert arguments["city"] in ("Rome", "Oslo")
        assert arguments["days"] in (1, 2)
    else:
        assert choice == "required"
        assert len(arguments["zone"]) <= 3


@pytest.mark.parametrize("special", [False, True])
def test_a_call_that_the_model_begins_is_led_to_its_end(special: bool) -> None:
    """A bias makes the random model emit the mark; what follows it is a valid call."""
    of_model = model(WITH_TOOLS, special)
    made = plan(of_model, ASKED, tools=[WEATHER, CLOCK])
    mark = of_model.tokenizer.convert_tokens_to_ids("<tool_call>")
    options = {"max_tokens": 150, "temperature": 1.0, "seed": 1, "logit_bias": {mark: 9.0}}
    runs = [answered(of_model, made, draft=draft, **options) for draft in (True, False)]
    assert merged(runs[0][0]) == merged(runs[1][0])
    calls = [delta.tool_call for delta in runs[0][0] if delta.tool_call is not None]
    assert len(calls) > 1
    text = "".join(delta.content for delta in runs[0][0])
    assert text.count("<tool_call>") <= (runs[0][1] == "length"), "but the last, cut short"


def test_calls_that_begin_among_accepted_drafts_of_a_batch_are_those_of_each_answer_alone() -> None:
    """Copies draft the mark where the text had it before; rows begin calls at different steps."""
    of_model = Redrafter(model().target.model, tokenizer(WITH_TOOLS), host_drafters=(Lookup(),))
    mark = of_model.tokenizer.convert_tokens_to_ids("<tool_call>")
    options = {"max_tokens": 150, "temperature": 1.0, "logit_bias": {mark: 9.0}}
    accepted: list[int] = []

    def calls(seed: int, **more: Any) -> list[tuple[str, str]]:
        made = plan(of_model, ASKED, tools=[WEATHER, CLOCK])
        parser, found, constraint = made.parser(), [], made.constraint()
        for response in of_model.stream(made.prompt, constraint=constraint, seed=seed, **more):
            found += parser.feed(response.text)
            if response.token == mark and response.source != "model":
                accepted.append(seed)
        return merged(found + parser.finish())

    seeds = range(4)
    alone = [calls(seed, draft=False, **options) for seed in seeds]
    assert not accepted
    with ThreadPoolExecutor(len(seeds)) as threads:
        together = list(
            threads.map(lambda seed: calls(seed, beam_width=1, beam_length=5, **options), seeds)
        )
    assert together == alone
    assert len(set(accepted)) > 1
    assert all(sum(name in ("weather", "clock") for name, _ in row) > 1 for row in alone)


@pytest.mark.parametrize("template", [WITH_TOOLS, CHAT_TEMPLATE])
@pytest.mark.parametrize("several", [True, False])
def test_text_is_free_up_to_a_mark_and_from_there_a_call(template: str, several: bool) -> None:
    """Also if the mark consists of several tokens."""
    of_model = model(template)
    made = plan(of_model, ASKED, tools=[CLOCK], parallel_tool_calls=several)
    constraint = made.constraint()
    assert constraint is not None

    def allowed() -> set[int]:
        masks = constraint.masks([0], [-1])
        V = of_model.target.vocab_size
        return (
            set(range(V))
            if masks is None
            else {t for t in range(V) if masks[0][t // 32] >> (t % 32) & 1}
        )

    def write(text: str) -> None:
        for token in of_model.tokenizer.encode(text, add_special_tokens=False):
            constraint.advance(token)

    end, brace = of_model.tokenizer.eos_token_id, *of_model.tokenizer.encode("{")
    write("Well <b")
    assert {end, brace} < allowed()
    write("r><tool_call>")
    assert brace in allowed()
    assert len(allowed()) == 2, "or a new line"
    write('{"name": "clock", "arguments": {"zone":"UT"}}</tool_call>')
    assert constraint.ended != several
    assert (brace in allowed()) == several
    assert end in allowed()


def test_a_call_cut_short_keeps_its_finish_reason_and_its_text() -> None:
    made = plan(model(), ASKED, tools=[WEATHER], tool_choice="required")
    found, reason = answered(model(), made, max_tokens=20)
    assert reason == "length"
    assert merged(found)[0][1].startswith("<tool_call>")
    assert not any(delta.tool_call for delta in found)


def test_reasoning_that_the_template_begins_is_told_apart_and_the_format_comes_after_it() -> None:
    of_model = model(THINKING)
    end = of_model.tokenizer.convert_tokens_to_ids("</think>")
    schema = tool("x", a={"enum": [1, 2]})["function"]["parameters"]
    asked = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
    made = plan(of_model, ASKED, response_format=asked, thinking=True)
    options = {"max_tokens": 200, "temperature": 1.0, "seed": 2, "logit_bias": {end: 5.0}}
    runs = [answered(of_model, made, draft=draft, **options) for draft in (True, False)]
    assert merged(runs[0][0]) == merged(runs[1][0])
    (first, reasoning), (second, text) = merged(runs[0][0])
    assert (first, second) == ("reasoning", "text")
    assert len(reasoning) > 0
    assert json.loads(text)["a"] in (1, 2)
    plain = plan(of_model, ASKED, response_format=asked)
    assert merged(answered(of_model, plain, max_tokens=20)[0])[0][0] == "text"


def test_reasoning_is_not_kept_in_a_session() -> None:
    """Cut short in its reasoning, too: a template may only cut out what has an end."""
    of_model = model(THINKING)
    end = of_model.tokenizer.convert_tokens_to_ids("</think>")
    for bias, kept in ((-100.0, False), (5.0, True)):
        session = of_model.session()
        options = GenerationOptions(
            max_tokens=60, temperature=1.0, seed=2, thinking=True, logit_bias=((end, bias),)
        )
        said = "".join(token.text for token in session.stream("hm", options=options))
        asked, answered = session.messages
        assert asked["content"] == "hm"
        _, found, content = said.partition("</think>")
        assert bool(found) == kept
        assert answered["content"] == content.lstrip()


def test_a_json_object_may_have_a_schema_as_in_llama_server() -> None:
    schema = {"type": "object", "properties": {"x": {"enum": [1]}}, "required": ["x"]}
    made = plan(model(), ASKED, response_format={"type": "json_object", "schema": schema})
    assert written(made, '{"x": 1}')
    assert not written(made, "{}")


def test_reasoning_cannot_end_the_answer_that_a_format_was_asked_for() -> None:
    of_model = model(THINKING)
    asked = {"type": "json_object"}
    constraint = plan(of_model, ASKED, response_format=asked, thinking=True).constraint()
    assert constraint is not None
    (mask,) = constraint.masks([0], [-1])
    for end in of_model.tokenizer.eos_token_ids:
        assert not mask[end // 32] >> end % 32 & 1


def test_reasoning_may_end_with_a_mark_of_several_tokens() -> None:
    of_model = model(THINKING)
    schema = {"type": "integer"}
    lark = answer_grammar((), False, json_term(schema), (None, "[/think]"), grammars(of_model))
    assert lark is not None
    constraint = grammars(of_model).compile(lark)
    for token in of_model.tokenizer.encode("so: [/think]7", add_special_tokens=False):
        constraint.advance(token)


@pytest.mark.parametrize(
    "asked", [{"tools": [CLOCK]}, {"response_format": {"type": "json_object"}}]
)
def test_reasoning_that_the_model_begins_itself_is_free(asked: dict[str, Any]) -> None:
    """Without a call in what it may say of calls; and it must end before the answer does."""
    thought, answer = "<think>so <tool_call> or {</think>", CALL if "tools" in asked else "{}"
    made = plan(model(), ASKED, thinking=None, **asked)
    assert written(made, thought + answer)
    assert written(made, answer)
    assert not written(made, thought.removesuffix("</think>"))
    assert not written(plan(model(), ASKED, **asked), thought + answer)


def test_with_a_format_and_tools_the_answer_is_a_call_or_the_format() -> None:
    asked = {"type": "json_object"}
    made = plan(model(), ASKED, tools=[CLOCK], response_format=asked)
    constraint = made.constraint()
    assert constraint is not None
    mark = model().tokenizer.convert_tokens_to_ids("<tool_call>")
    masks = constraint.masks([0], [-1])
    assert masks is not None
    first = {t for t in range(262) if masks[0][t // 32] >> (t % 32) & 1}
    assert first == {mark, *model().tokenizer.encode("{", add_special_tokens=False)}


@pytest.mark.parametrize(
    ("asked", "named"),
    [
        ({"response_format": {"type": "yaml"}}, "response_format.type"),
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema.schema"),
        ({"response_format": {"type": "json_schema", "json_schema": {"schema": 5}}}, "schema"),
        ({"response_format": {"type": "json_schema", "json_schema": {"schema": {"type": "x"}}}},
         "response_format: a schema"),
        ({"tools": [{"type": "web"}]}, "tools.0.type"),
        ({"tools": [WEATHER, {"type": "function"}]}, "tools.1.function"),
        ({"tools": [tool("a b")]}, "tools.0.function.name"),
        ({"tools": [WEATHER, WEATHER]}, "twice"),
        ({"tools": [{"function": {"name": "f", "parameters": {"type": "array"}}}]}, "parameters"),
        ({"tools": [{"function": {"name": "f", "strict": True,
                                  "parameters": {"properties": {"x": {"not": {}}}}}}]},
         "tools.0.function.parameters: .*not"),
        ({"tools": [WEATHER, {"function": {"name": "f", "strict": True, "parameters":
                                           {"properties": {"x": {"type": "any"}}}}}]},
         "tools.1.function.parameters: .*any"),
        ({"tools": [tool("f" * 129)]}, "tools.0.function.name"),
        ({"response_format": {"type": "json_schema", "json_schema": {
            "strict": True, "schema": {"type": "array", "uniqueItems": True}}}},
         "response_format: a schema.*uniqueItems"),
        ({"tools": [{"function": {"name": "f", "strict": True, "parameters": {"minimum": 1e999}}}]},
         "tools.0.function.parameters: the JSON schema"),
        ({"response_format": {"type": "json_schema",
                              "json_schema": {"schema": {"minimum": 1e999}}}},
         "response_format.json_schema.schema: the JSON schema"),
        ({"tools": [WEATHER], "tool_choice": "clock"}, "tool_choice"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tools": [WEATHER], "tool_choice": {"type": "function", "function": {"name": "clock"}}},
         "tool_choice: 'clock'"),
        ({"tools": [WEATHER], "tool_choice": {"type": "function"}}, "tool_choice"),
    ],
)  # fmt: skip
def test_what_cannot_be_asked_for_is_refused_by_name(asked: dict[str, Any], named: str) -> None:
    with pytest.raises(BadInputError, match=named):
        plan(model(), ASKED, **asked).constraint()


@pytest.mark.parametrize(
    "call",
    [
        {},
        {"function": "clock"},
        {"function": {"name": 5}},
        {"function": {"name": "clock", "arguments": [1]}},
        "clock",
    ],
)
def test_a_malformed_call_in_the_conversation_is_refused(call: object) -> None:
    with pytest.raises(BadInputError, match="tool call"):
        plan(model(), [*ASKED, {"role": "assistant", "tool_calls": [call]}])


@pytest.mark.parametrize("arguments", ["{", "[1]", "5", "[" * 100_000, ""])
@pytest.mark.parametrize("template", [WITH_TOOLS, CHAT_TEMPLATE])
def test_a_call_in_the_conversation_may_have_arguments_that_are_no_object(
    arguments: str, template: str
) -> None:
    """A model has written them, and the client sends them back."""
    call = {"function": {"name": "clock", "arguments": arguments}}
    messages = [*ASKED, {"role": "assistant", "content": None, "tool_calls": [call]}]
    text = shown(model(template), plan(model(template), messages))
    assert '<tool_call>\n{"name": "clock", "arguments": {}}\n</tool_call>' in text


def test_reasoning_in_the_conversation_reaches_the_template() -> None:
    template = CHAT_TEMPLATE.replace(
        "{{ m['content'] }}", "[{{ m.reasoning_content }}]{{ m['content'] }}"
    )
    call = {"function": {"name": "clock", "arguments": "{}"}}
    message = {"role": "assistant", "content": "So.", "reasoning_content": "hm"}
    for calls in ({}, {"tool_calls": [call]}):
        messages = [*ASKED, {**message, **calls}]
        assert "assistant\n[hm]So." in shown(model(template), plan(model(template), messages))


def written(made: OutputPlan, text: str) -> bool:
    """Whether an answer may be this text, to its end."""
    constraint = made.constraint()
    assert constraint is not None
    try:
        for token in model().tokenizer.encode(text, add_special_tokens=False):
            constraint.advance(token)
    except BadInputError:
        return False
    (mask,) = constraint.masks([0], [-1])
    return any(bool(mask[t // 32] >> (t % 32) & 1) for t in model().tokenizer.eos_token_ids)


@pytest.mark.parametrize(
    ("parameters", "taken", "refused"),
    [
        ({"$schema": "odd", "properties": {"x": {"type": "integer"}}}, '{"x": 1}', '{"x": "a"}'),
        ({"required": None, "properties": {"x": {"enum": [1]}}}, '{"x": 1}', '{"x": 2}'),
        ({"type": ["object", "null"], "properties": {"x": {"enum": [1]}}}, '{"x": 1}', "null"),
        ({"properties": {"x": {"pattern": "^(?=a)", "type": "string"}}}, '{"x": "b"}', '{"x": 1}'),
        ({"properties": {"x": {"format": "odd", "type": "string"}}}, '{"x": "b"}', '{"x": 1}'),
        ({"properties": None}, '{"x": 1}', "[1]"),
        (
            {"properties": {"x": {"enum": [1]}}, "required": ["x", "y"]},
            '{"x": 1, "y": 2}',
            '{"x": 2, "y": 2}',
        ),
        ({"properties": {"x": {"type": "any"}}}, '{"x": 1}', "[1]"),
        ({"type": "OBJECT", "properties": {"x": {"type": "STRING"}}}, '{"x": 1}', "[1]"),
        ({"properties": {"x": {"$ref": "http://a.example/b.json"}}}, '{"x": 1}', "[1]"),
    ],
)
def test_an_odd_schema_of_a_tool_does_not_refuse_the_request(
    parameters: dict[str, Any], taken: str, refused: str
) -> None:
    """The other tool's schema still holds."""
    odd = {"type": "function", "function": {"name": "f" * 128, "parameters": parameters}}
    made = plan(model(), ASKED, tools=[odd, WEATHER], tool_choice="required")

    def call(name: str, arguments: str) -> str:
        return f'<tool_call>{{"name": "{name}", "arguments": {arguments}}}</tool_call>'

    assert written(made, call("f" * 128, taken))
    assert not written(made, call("f" * 128, refused))
    assert written(made, call("weather", '{"city": "Oslo", "days": 1}'))
    assert not written(made, call("weather", '{"city": "Bern", "days": 1}'))


def test_a_tool_without_parameters_takes_no_arguments() -> None:
    """As in OpenAI's API; an empty schema allows any."""
    now: dict[str, Any] = {"type": "function", "function": {"name": "now"}}
    text = '<tool_call>{"name": "now", "arguments": %s}</tool_call>'
    without = plan(model(), ASKED, tools=[now], tool_choice="required")
    assert written(without, text % "{}")
    assert not written(without, text % '{"x": 1}')
    now["function"]["parameters"] = {}
    assert written(plan(model(), ASKED, tools=[now], tool_choice="required"), text % '{"x": 1}')


@pytest.mark.parametrize("strict", [None, False])
def test_a_format_that_is_not_strict_may_have_rules_that_grammars_do_not_know(
    strict: bool | None,
) -> None:
    email = {"type": "string", "pattern": r"^(?!\.)[a-z]+@b$"}
    names = {"type": "array", "items": {"enum": ["a"]}, "uniqueItems": True}
    schema = {"properties": {"email": email, "names": names}, "required": ["email", "names"]}
    named = {"name": "s", "schema": schema} | ({} if strict is None else {"strict": strict})
    made = plan(model(), ASKED, response_format={"type": "json_schema", "json_schema": named})
    assert written(made, '{"email": "a@b", "names": ["a", "a"]}')
    assert not written(made, '{"email": 1, "names": []}')
    assert not written(made, '{"email": "a@b", "names": ["b"]}')


def test_references_that_would_overflow_the_parser_are_refused() -> None:
    chain = {f"d{i}": {"$ref": f"#/$defs/d{i + 1}"} for i in range(300)}
    with pytest.raises(BadInputError, match="references"):
        json_term({"$ref": "#/$defs/d0", "$defs": {**chain, "d300": {"type": "string"}}})


def test_a_long_format_or_pattern_is_not_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(json_schema, "fault_of", lambda _: pytest.fail("it was tried"))
    assert "format" not in json_term({"type": "string", "format": "x" * 10_000})


def test_an_empty_format_is_text() -> None:
    assert plan(model(), ASKED, response_format={}).constraint() is None


def test_a_schema_that_grammars_do_not_know_whole_still_leads_a_call() -> None:
    """Unless the tool is strict, unsupported parts of the schema are ignored."""
    loose = tool(
        "f", x={"type": "array", "items": {"enum": [1]}, "uniqueItems": True, "maxItems": 2}
    )
    made = plan(model(), ASKED, tools=[loose], tool_choice="required")
    (delta,), _ = answered(model(), made, max_tokens=300)
    assert delta.tool_call is not None
    assert set(json.loads(delta.tool_call.arguments)["x"]) <= {1}


def test_a_tool_that_is_not_strict_may_have_a_schema_that_cannot_be_used() -> None:
    odd = {"type": "object", "properties": {}, "required": [{"x": 1}], "minimum": 1e999}
    asked = [{"type": "function", "function": {"name": "f", "parameters": odd}}]
    assert plan(model(), ASKED, tools=asked, tool_choice="required").constraint() is not None


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


@pytest.mark.parametrize("strict", [False, True])
def test_a_strict_tools_calls_are_json_where_the_models_own_form_has_no_grammar(
    strict: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    own = Markup("<think>", "</think>", "<tool_call>", "</tool_call>", qwen3_coder.parse_tool_call)
    monkeypatch.setattr("redrafter_mlx.structured.plan.markup_of", lambda *_: own)
    asked = {"type": "function", "function": {**CLOCK["function"], "strict": strict}}
    made = plan(model(), ASKED, tools=[asked])
    assert (made.markup.tool_parser is JSON_CALLS.tool_parser) == strict
    assert (made.constraint() is not None) == strict
