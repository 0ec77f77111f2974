"""Tools, formats and reasoning: requests planned for a tiny model, and the parts of its answers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any

from mlx_lm.tokenizer_utils import TokenizerWrapper
from mlx_lm.tool_parsers import json_tools
from tiny import CHAT_TEMPLATE, byte_tokenizer, marked_tokenizer, random_drafter, random_model

from redrafter_mlx.engine.engine import Redrafter
from redrafter_mlx.errors import BadInputError
from redrafter_mlx.structured.grammar import Grammars
from redrafter_mlx.structured.plan import OutputPlan, plan_output
from redrafter_mlx.weights.text.markup import JSON_CALLS, Delta, Markup, OutputParser

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
    return marked_tokenizer(json_tools, template, MARKS, special)


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
