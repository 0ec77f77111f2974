"""The grammar of a whole answer: reasoning, tool calls, JSON, or free text with calls in it.

Grammars are in llguidance's dialect of Lark, where `<[7]>` is token 7 and `<[^7]>` any other. A
model's marks are usually single tokens. Free text is then every other token:

    main:  (<[^7]>* call)* <[^7]>*        call:  <[7]> "\\n"? c "\\n"? <[8]>
"""

from __future__ import annotations

import json
from collections.abc import Sequence

from redrafter_mlx.structured.grammar import Grammars
from redrafter_mlx.structured.tools import Tool
from redrafter_mlx.weights.text.markup import JSON_CALLS


def answer_grammar(
    tools: Sequence[Tool],
    required: bool,
    json_answer: str | None,
    reasoning: tuple[str | None, str] | None,
    grammars: Grammars,
    *,
    several: bool = True,
) -> str | None:
    """Return the grammar of an answer; None if the answer is free.

    Args:
      tools: tools that may be called, as JSON between tags
      required: whether the answer must be one call
      json_answer: term for an answer that is not a call; None for free text
      reasoning: marks that start and end the reasoning, the first of them None if the prompt has
        started it; None if there is no reasoning. It is free, and may be left out if the model
        is to start it
      several: whether free text may hold several calls, or ends with the first
    Raises:
      BadInputError: a strict tool has a schema that cannot be used
    """
    rules = [] if json_answer is None else [f"json: {json_answer}"]
    if tools:
        rules += _call(tools, grammars)
    if required:
        rules.append("main: call")
    elif json_answer is not None:
        rules.append("main: call | json" if tools else "main: json")
    elif tools:
        rules += _text_with_calls(grammars, several)
    else:
        return None
    if reasoning is None:
        return "\n".join(["start: main", *rules])
    start, end = reasoning
    begun = "reasoning" if start is None else f"({_mark(start, grammars)} reasoning)?"
    return "\n".join([f"start: {begun} main", _up_to(end, grammars), *rules])


def _call(tools: Sequence[Tool], grammars: Grammars) -> list[str]:
    """Return the rules `call` and `body`, the latter without the mark at the start."""
    end = _mark(JSON_CALLS.tool_call_end, grammars)
    rules = [
        f"call: {_mark(JSON_CALLS.tool_call_start, grammars)} body",
        f'body: "\\n"? ({" | ".join(f"c{i}" for i in range(len(tools)))}) "\\n"? {end}',
    ]
    for i, tool in enumerate(tools):
        head = json.dumps(f'{{"name": "{tool.name}", "arguments": ')
        rules.append(f'c{i}: {head} a{i} "}}"')
        rules.append(f"a{i}: {tool.arguments_term()}")
    return rules


def _text_with_calls(grammars: Grammars, several: bool) -> list[str]:
    """Return the rules for `main`: text in which every start mark begins a call."""
    start = JSON_CALLS.tool_call_start
    token = grammars.token_of(start)
    if token is not None:
        free = f"<[^{token}]>*"
        return [f"main: ({free} call)* {free}" if several else f"main: {free} call?"]
    return [
        "main: (head body)* TEXT" if several else "main: head body | TEXT",
        f"head[lazy]: TEXT {json.dumps(start)}",
        r"TEXT: /(.|\n)*/",
    ]


def _up_to(mark: str, grammars: Grammars) -> str:
    """Return the rule `reasoning`: text up to and with a mark, and the white space after it.

    Tokens that end an answer do not end its reasoning.
    """
    token = grammars.token_of(mark)
    if token is None:
        return f"reasoning[lazy]: /(.|\\n)*/ {json.dumps(mark)}"
    others = ",".join(str(i) for i in sorted({token, *grammars.ends}))
    return f'reasoning: <[^{others}]>* <[{token}]> "\\n"? "\\n"?'


def _mark(text: str, grammars: Grammars) -> str:
    """Return a mark as a term: if it is one token, that token, which text cannot match."""
    token = grammars.token_of(text)
    return json.dumps(text) if token is None else f"<[{token}]>"
