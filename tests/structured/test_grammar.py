"""Grammars: JSON for any supported schema, and a clear error for any other."""

from __future__ import annotations

import json
import random
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from grammar_samples import PERSON, grammars
from hybrids import hybrid_model
from llguidance import LLMatcher
from llguidance.hf import from_tokenizer
from mlx_lm.generate import generate_step
from tiny import byte_model, byte_tokenizer, random_drafter

from redrafter_mlx.drafting.untrained.ngram import Lookup
from redrafter_mlx.engine.engine import Redrafter
from redrafter_mlx.errors import BadInputError
from redrafter_mlx.structured.grammar import GrammarConstraint, Grammars
from redrafter_mlx.weights.text.spm import BYTE, CONTROL, NORMAL, UNKNOWN, Pieces, spm_tokenizer

PROMPT = [72, 101, 108]


@cache
def model(drafted: bool = True) -> Redrafter:
    drafter = random_drafter(vocab_size=258) if drafted else None
    return Redrafter(
        byte_model(seed=1), byte_tokenizer(), drafter, host_drafters=() if drafted else (Lookup(),)
    )


def ids(text: str) -> list[int]:
    found: list[int] = byte_tokenizer().encode(text, add_special_tokens=False)
    return found


def allowed(mask: np.ndarray) -> str:
    """Return the allowed characters, with `$` for the end of the text."""
    bits = np.unpackbits(mask.view(np.uint8), bitorder="little")
    tokens = [t for t in np.flatnonzero(bits).tolist() if t < 256]
    end = "$" if bits[byte_tokenizer().eos_token_id] else ""
    return "".join(sorted(byte_tokenizer().decode(tokens))) + end


def is_person(text: str) -> bool:
    """Check an answer in plain Python, without the library that made it."""
    value: Any = json.loads(text)
    return (
        list(value) == ["name", "kind", "ages"]
        and isinstance(value["name"], str)
        and len(value["name"]) <= 6
        and value["kind"] in ("cat", "dog")
        and len(value["ages"]) <= 3
        and set(value["ages"]) <= {1, 2}
    )


@pytest.mark.parametrize("drafted", [False, True])
@pytest.mark.parametrize(
    "options",
    [
        {"temperature": 0.0},
        {"temperature": 1.5, "seed": 3},
        {"temperature": 0.0, "beam_width": 3, "beam_length": 4},
        {"temperature": 1.5, "seed": 3, "beam_width": 2, "beam_length": 5},
    ],
)
def test_an_answer_matches_its_schema_and_is_the_same_without_drafts(
    drafted: bool, options: dict[str, Any]
) -> None:
    answers = [
        model(drafted).generate(
            PROMPT, max_tokens=400, draft=draft, constraint=grammars().json_schema(PERSON),
            **options,
        )
        for draft in (True, False)
    ]  # fmt: skip
    assert answers[0].token_ids == answers[1].token_ids
    assert answers[0].finish_reason == "stop"
    assert is_person(answers[0].text)
    assert answers[0].steps < answers[1].steps, "what is forced is drafted"


@pytest.mark.parametrize("temperature", [0.0, 1.5])
def test_a_target_with_recurrent_states_keeps_to_the_schema(temperature: float) -> None:
    hybrid = hybrid_model("qwen3_5", vocab_size=258, max_position_embeddings=4096)
    redrafter = Redrafter(hybrid, byte_tokenizer(), random_drafter(vocab_size=258))
    answers = [
        redrafter.generate(
            PROMPT, max_tokens=400, constraint=grammars().json_schema(PERSON), draft=draft,
            temperature=temperature, seed=3, beam_width=2, beam_length=4,
        )
        for draft in (True, False)
    ]  # fmt: skip
    assert answers[0].token_ids == answers[1].token_ids
    assert is_person(answers[0].text)


def test_tokens_equal_mlx_lms_own_loop_with_a_fresh_matcher_for_each_of_them() -> None:
    """The reference matches the text from its start each time, and never rolls back."""
    vocabulary = from_tokenizer(byte_tokenizer()._tokenizer, 258)
    grammar = LLMatcher.grammar_from_json_schema(PERSON, overrides={"whitespace_pattern": " "})

    def masked(tokens: mx.array, logits: mx.array) -> mx.array:
        matcher = LLMatcher(vocabulary, grammar)
        assert matcher.consume_tokens(tokens.tolist()[len(PROMPT) :])  # type: ignore[arg-type]
        bits = np.frombuffer(matcher.compute_bitmask(), np.uint8)
        keep = np.unpackbits(bits, bitorder="little")[:258]
        return mx.where(mx.array(keep) == 1, logits, -mx.inf)

    steps = generate_step(
        mx.array(PROMPT), byte_model(seed=1), max_tokens=40, logits_processors=[masked]
    )
    want = [int(token) for token, _ in steps]
    end = byte_tokenizer().eos_token_id
    constraint = GrammarConstraint(LLMatcher(vocabulary, grammar), 258, vocabulary)
    got = model().generate(
        PROMPT, max_tokens=40, constraint=constraint, beam_width=3, beam_length=4
    )
    assert got.token_ids == want[: len(got.token_ids)]
    assert len(got.token_ids) in (40, (*want, end).index(end))


@pytest.mark.parametrize("accept", ["rejection", "typical"])
def test_every_way_to_accept_drafts_keeps_to_the_schema(accept: str) -> None:
    constraint = grammars().json_schema(PERSON)
    answer = model().generate(
        PROMPT, max_tokens=400, temperature=1.2, seed=1, accept=accept, constraint=constraint
    )
    assert is_person(answer.text)


@pytest.mark.parametrize("add_prefix", [True, False])
def test_a_sentencepiece_vocabulary_writes_json_too(add_prefix: bool) -> None:
    """With fewer pieces than the model has logits, and characters that only bytes can encode."""
    letters = ["\u2581", *map(chr, range(33, 127)), '{"', "ab", "\u2581ab"]
    texts = ["<unk>", "<s>", "</s>", *(f"<0x{i:02X}>" for i in range(256)), *letters]
    kinds = [UNKNOWN, CONTROL, CONTROL, *[BYTE] * 256, *[NORMAL] * len(letters)]
    scores = [-float(i) for i in range(len(texts))]
    tokenizer = spm_tokenizer(Pieces("m", texts, scores, kinds, 1, 2, add_prefix))
    values = ["é x", "ab ab"]
    constraint = Grammars(tokenizer, len(texts) + 5).json_schema({"enum": values})
    rng, written = random.Random(1), []
    while not constraint.ended:
        bits = np.unpackbits(constraint.masks([0], [-1])[0].view(np.uint8), bitorder="little")
        written.append(rng.choice(np.flatnonzero(bits).tolist()))
        constraint.advance(written[-1])
    assert json.loads(tokenizer.decode(written)) in values


def test_masks_follow_each_nodes_own_path() -> None:
    schema = {"type": "array", "items": {"enum": ["ab", "ac", "d"]}, "maxItems": 1}
    constraint = grammars().json_schema(schema)
    for token in ids('["'):
        constraint.advance(token)
    a, b, d, x, quote = ids('abdx"')
    #          [    a   d   x   a-b  d-"    x-a  a-b-"  padding
    tokens = [0, a, d, x, b, quote, a, quote, 0]
    parents = [-1, 0, 0, 0, 1, 2, 3, 4, -1]
    masks = constraint.masks(tokens, parents)
    shown = [allowed(mask) for mask in masks]
    assert [shown[i] for i in (0, 1, 2, 4)] == ["ad", "bc", '"', '"']
    assert set(shown[5]) == set(shown[7]) == set("]\n ")
    assert (masks[[3, 6, 8]] == -1).all(), "not in the grammar: never looked at"
    assert (constraint.masks(tokens, parents) == masks).all(), "it was put back"


def test_a_draft_beyond_a_grammars_limit_does_not_end_the_answer() -> None:
    """llguidance cannot roll back such a grammar, and a matcher that failed stays so."""
    constraint = grammars().compile('start: word "!"\nword[max_tokens=2]: /[a-z]*/')
    a, b, mark = ids("ab!")
    tokens, parents = [0, a, b, a, mark], [-1, 0, 1, 2, 0]
    masks = constraint.masks(tokens, parents)
    assert "a" in allowed(masks[0])
    assert "!" in allowed(masks[1])
    for token in (a, b):
        constraint.advance(token)
        assert "!" in allowed(constraint.masks([token, mark, a], [-1, 0, 0])[0])
    constraint.advance(mark)
    assert constraint.ended


def test_a_tokenizer_may_have_more_tokens_than_the_model() -> None:
    constraint = Grammars(byte_tokenizer(), 224).json_schema({"type": "integer"})
    masks = constraint.masks([0, ids("1")[0]], [-1, 0])
    assert masks.shape == (2, 224 // 32)
    whole = grammars().json_schema({"type": "integer"}).masks([0, ids("1")[0]], [-1, 0])
    assert (masks == whole[:, : 224 // 32]).all()


def test_a_draft_of_the_end_of_the_text_is_not_looked_behind() -> None:
    constraint = grammars().json_schema({"type": "integer"})
    constraint.advance(ids("1")[0])
    end = byte_tokenizer().eos_token_id
    masks = constraint.masks([0, end, ids("2")[0]], [-1, 0, 0])
    assert [allowed(masks[i]) for i in (0, 2)] == ["0123456789$"] * 2
    assert (masks[1] == -1).all()


def test_what_is_forced_is_the_only_continuation() -> None:
    constraint = grammars().json_schema({"const": "hello"})
    assert list(constraint.forced()) == ids('"hello"')
    for token in ids('"hello"'):
        assert not constraint.ended
        constraint.advance(token)
    assert constraint.ended


@pytest.mark.parametrize("temperature", [0.0, 1.2])
def test_grammars_penalties_and_neither_in_one_batch_are_each_as_alone(temperature: float) -> None:
    """One of them fails because its schema has no end; the others are unaffected."""
    endless = {"$ref": "#/$defs/x", "$defs": {"x": {"$ref": "#/$defs/x"}}}
    asked: list[dict[str, Any]] = [
        {"schema": PERSON},
        {"frequency_penalty": 0.7, "presence_penalty": 0.2},
        {"schema": {"type": "array", "items": {"enum": [7, True]}, "maxItems": 9}},
        {},
        {"schema": endless},
        {"repetition_penalty": 1.3, "frequency_penalty": 1.0, "schema": PERSON},
    ]

    def answer(number: int) -> list[int] | None:
        options = dict(asked[number], seed=number, temperature=temperature, max_tokens=70)
        schema = options.pop("schema", None)
        constraint = None if schema is None else grammars().json_schema(schema)
        try:
            return model().generate([*PROMPT, number], constraint=constraint, **options).token_ids
        except BadInputError:
            return None

    alone = [answer(number) for number in range(len(asked))]
    assert [number for number, tokens in enumerate(alone) if tokens is None] == [4]
    with ThreadPoolExecutor(len(asked)) as pool:
        for order in (range(len(asked)), reversed(range(len(asked)))):
            order = list(order)
            assert [alone[n] for n in order] == list(pool.map(answer, order))


A: dict[str, Any] = {"type": "object", "properties": {"a": {"type": "integer"}}}
B: dict[str, Any] = {"type": "object", "properties": {"b": {"type": "integer"}}}
ABC: dict[str, Any] = {"type": "object", "properties": {n: {"type": "integer"} for n in "abc"}}


@pytest.mark.parametrize(
    ("schema", "named"),
    [
        ({"type": "foo"}, "foo"),
        ({"$ref": "#/nowhere"}, "nowhere"),
        ({"type": "string", "pattern": "a(?=b)"}, "regex"),
        ({"not": {}}, "not"),
        ({"type": "string", "minLength": 5, "maxLength": 2}, "minLength"),
        ({"type": "array", "uniqueItems": True}, "uniqueItems"),
        ({"type": {"a": 1}}, "type"),
        ({"enum": [float("nan")]}, "JSON schema"),
        ({"enum": [b"x"]}, "JSON schema"),
        ({**A, "minProperties": 2}, "0 to 1 properties, not 2"),
        ({**A, "minProperties": 2, "additionalProperties": True}, "min/maxProperties"),
    ],
)
def test_a_schema_that_cannot_be_used_is_refused_by_name(
    schema: dict[str, object], named: str
) -> None:
    with pytest.raises(BadInputError, match=named) as error:
        grammars().json_schema(schema)
    assert "\n" not in str(error.value)


def matches(schema: dict[str, Any], text: str) -> bool:
    """Whether an answer may be this text, to its end."""
    constraint = grammars().json_schema(schema)
    try:
        for token in ids(text):
            constraint.advance(token)
    except BadInputError:
        return False
    return "$" in allowed(constraint.masks([0], [-1])[0])


@pytest.mark.parametrize(
    ("schema", "text", "is_match"),
    [
        (A, '{"a": 1}', True),
        (A, '{"b": 1}', False),
        (A, '{"a": 1, "b": 1}', False),
        ({**A, "additionalProperties": True}, '{"a": 1, "b": 1}', True),
        ({**A, "additionalProperties": None}, '{"a": 1, "b": 1}', False),
        ({"type": "object", "properties": {}}, '{"b": 1}', False),
        ({"type": "object"}, '{"b": 1}', True),
        ({"type": "array", "items": A}, '[{"b": 1}]', False),
        ({"type": "array", "items": A}, '[{"a": 1}]', True),
        ({"$ref": "#/$defs/a", "$defs": {"a": A}}, '{"b": 1}', False),
        ({"anyOf": [A, B]}, '{"b": 1}', True),
        ({"anyOf": [A, B]}, '{"a": 1, "b": 1}', False),
        # properties that are counted
        ({**ABC, "minProperties": 2}, '{"a": 1, "c": 1}', True),
        ({**ABC, "minProperties": 2}, '{"a": 1, "b": 1, "c": 1}', True),
        ({**ABC, "minProperties": 2}, '{"b": 1}', False),
        ({**ABC, "minProperties": 2, "required": ["c"]}, '{"b": 1, "c": 1}', True),
        ({**ABC, "minProperties": 2, "required": ["c"]}, '{"a": 1, "b": 1}', False),
        ({**ABC, "minProperties": 2, "maxProperties": 2}, '{"a": 1, "c": 1}', True),
        ({**ABC, "minProperties": 2, "maxProperties": 2}, '{"a": 1, "b": 1, "c": 1}', False),
        ({**ABC, "maxProperties": 2}, '{}', True),
        ({**ABC, "maxProperties": 2}, '{"a": 1, "b": 1, "c": 1}', False),
        ({"type": "array", "items": {**ABC, "minProperties": 2}}, '[{"b": 1}]', False),
        # an object in parts
        ({"allOf": [A, B]}, '{"a": 1, "b": 1}', True),
        ({**A, "anyOf": [B]}, '{"a": 1, "b": 1}', True),
        ({**A, "$ref": "#/$defs/b", "$defs": {"b": B}}, '{"a": 1, "b": 1}', True),
        ({"required": ["b"], "$ref": "#/$defs/a", "$defs": {"a": A}}, '{"a": 1, "b": 1}', True),
        ({"required": ["b"], "$ref": "#/$defs/a", "$defs": {"a": A}}, '{"a": 1}', False),
        ({"required": ["c"], "anyOf": [A, B]}, '{"a": 1, "c": 1}', True),
        # names and values that look like keywords
        ({"properties": {"properties": A}, "type": "object"}, '{"properties": {"a": 1}}', True),
        ({"properties": {"allOf": A}, "type": "object"}, '{"b": 1}', False),
        ({"const": {"properties": {}, "format": "odd", "$schema": None}},
         '{"properties": {}, "format": "odd", "$schema": null}', True),
    ],
)  # fmt: skip
def test_an_object_has_only_its_properties_if_others_are_not_allowed(
    schema: dict[str, Any], text: str, is_match: bool
) -> None:
    before = json.dumps(schema)
    assert matches(schema, text) == is_match
    assert json.dumps(schema) == before


@pytest.mark.parametrize(
    ("schema", "text"),
    [
        ({"type": "string", "format": "password"}, '"x"'),
        ({"type": "object", "propertyNames": {"type": "string"}}, '{"x": 1}'),
        ({"type": "object", "required": None, "properties": None}, '{"x": 1}'),
        ({"$schema": "odd", "type": "integer"}, "1"),
        ({"const": None}, "null"),
    ],
)
def test_keywords_that_restrict_nothing_are_ignored(schema: dict[str, Any], text: str) -> None:
    assert matches(schema, text)
    assert not matches(schema, "[]")
    assert not matches({"type": "string", "format": "date"}, '"x"')


def test_a_schema_of_any_depth_is_taken_or_refused() -> None:
    schema: dict[str, object] = {"type": "integer"}
    for _ in range(5_000):
        schema = {"type": "array", "items": schema}
    with pytest.raises(BadInputError, match="JSON schema"):
        grammars().json_schema(schema)


def test_a_schema_that_no_text_can_match_is_an_error() -> None:
    endless = {"$ref": "#/$defs/x", "$defs": {"x": {"$ref": "#/$defs/x"}}}
    with pytest.raises(BadInputError, match="grammar"):
        model().generate(PROMPT, max_tokens=20, constraint=grammars().json_schema(endless))


def test_white_space_is_bounded() -> None:
    """Otherwise a model that prefers white space would never end."""
    constraint = grammars().json_schema({"type": "object"})
    for token in ids('{"a":\n' + 20 * " "):
        constraint.advance(token)
    assert not set(allowed(constraint.masks([0], [-1])[0])) & set(" \n\t\r")


def test_two_answers_of_one_schema_do_not_meet() -> None:
    first, second = (grammars().json_schema({"type": "integer"}) for _ in range(2))
    first.advance(ids("1")[0])
    assert "-" in allowed(second.masks([0], [-1])[0])
    assert "-" not in allowed(first.masks([0], [-1])[0])


ID = {"type": "integer", "minimum": 0, "maximum": 99}
ENDS_AT_A_COMMA = {
    "type": "object",
    "properties": {"id": ID},
    "required": ["id"],
    "additionalProperties": False,
    "patternProperties": {"^id$": ID},
}
"""After a comma, white space may follow, and then nothing: the one name is there already."""


def outcome(**options: Any) -> tuple[str, str]:
    """Return the text of an answer, and its finish reason or its error."""
    text, end = "", byte_tokenizer().eos_token_id
    bias = {ids(",")[0]: 9.0, ids(" ")[0]: -20.0, end: 6.0}
    constraint = grammars().json_schema(ENDS_AT_A_COMMA)
    try:
        for response in model().stream(
            PROMPT, constraint=constraint, max_tokens=60, logit_bias=bias, **options
        ):
            text += response.text
        assert response.finish_reason is not None
        return text, response.finish_reason
    except BadInputError as error:
        return text, str(error)


@pytest.mark.parametrize("seed", range(6))
def test_a_dead_end_is_the_same_error_with_drafts_and_without(seed: int) -> None:
    wanted = outcome(draft=False, temperature=1.0, seed=seed)
    assert wanted[1] != "stop" or json.loads(wanted[0])
    for shape in ({}, {"beam_width": 1, "beam_length": 5}, {"beam_width": 3, "beam_length": 4}):
        got = outcome(temperature=1.0, seed=seed, **shape)
        assert got[1] != "stop" or json.loads(got[0])
        assert (got[0], "cannot be continued" in got[1]) == (
            wanted[0], "cannot be continued" in wanted[1]
        )  # fmt: skip


def test_a_grammar_has_ended_only_where_the_text_may_end() -> None:
    constraint = grammars().json_schema(ENDS_AT_A_COMMA)
    for token in ids('{"id": 1,\n' + " " * 20):
        constraint.advance(token)
        assert not constraint.ended
    with pytest.raises(BadInputError, match="no token of this model can follow"):
        constraint.masks([0], [-1])
    assert not constraint.ended


def test_a_dead_end_among_drafts_does_not_offer_the_end_of_the_text() -> None:
    constraint, end = grammars().json_schema(ENDS_AT_A_COMMA), byte_tokenizer().eos_token_id
    for token in ids('{"id": 1,\n' + " " * 19):
        constraint.advance(token)
    mask = constraint.masks([0, ids(" ")[0]], [-1, 0])[1]
    assert mask.any()
    assert not mask.view(np.uint32)[end // 32] >> (end % 32) & 1
