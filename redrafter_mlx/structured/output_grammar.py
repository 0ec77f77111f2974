"""The grammar of a whole answer: reasoning, tool calls, JSON, or free text with calls in it.

Grammars are in llguidance's dialect of Lark, where `<[7]>` is token 7 and `<[^7]>` any other. A
model's marks are usually single tokens. Free text is then every other token:

    main:  (<[^7]>* call)* <[^7]>*        call:  <[7]> "\\n"? c "\\n"? <[8]>
"""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Mapping, Sequence

from redrafter_mlx.structured.grammar import json_term
from redrafter_mlx.structured.markup import JSON_CALLS
from redrafter_mlx.structured.tools import Tool

TokenOf = Callable[[str], int | None]
"""Returns the single token for a text; None if the text takes several tokens."""


def answer_grammar(
    tools: Sequence[Tool],
    required: bool,
    schema: Mapping[str, object] | None,
    reasoning_end: str | None,
    token_of: TokenOf,
    ends: Collection[int],
    *,
    several: bool = True,
) -> str | None:
    """Return the grammar of an answer; None if the answer is free.

    Args:
      tools: tools that may be called, as JSON between tags
      required: whether the answer must be one call
      schema: JSON schema of an answer that is not a call
      reasoning_end: mark that ends the reasoning, if the prompt started it
      ends: tokens that end an answer; reasoning cannot
      several: whether free text may hold several calls, or ends with the first
    """
    rules = [] if schema is None else [f"json: {json_term(schema)}"]
    if tools:
        rules += _call(tools, token_of)
    if required:
        rules.append("main: call")
    elif schema is not None:
        rules.append("main: call | json" if tools else "main: json")
    elif tools:
        rules += _text_with_calls(token_of, several)
    else:
        return None
    if reasoning_end is None:
        return "\n".join(["start: main", *rules])
    return "\n".join(["start: reasoning main", *_up_to(reasoning_end, token_of, ends), *rules])


def _call(tools: Sequence[Tool], token_of: TokenOf) -> list[str]:
    """Return the rules `call` and `body`, the latter without the mark at the start."""
    end = _mark(JSON_CALLS.tool_call_end, token_of)
    rules = [
        f"call: {_mark(JSON_CALLS.tool_call_start, token_of)} body",
        f'body: "\\n"? ({" | ".join(f"c{i}" for i in range(len(tools)))}) "\\n"? {end}',
    ]
    for i, tool in enumerate(tools):
        head = json.dumps(f'{{"name": "{tool.name}", "arguments": ')
        rules.append(f'c{i}: {head} a{i} "}}"')
        rules.append(f"a{i}: {json_term(tool.schema, lenient=not tool.strict)}")
    return rules


def _text_with_calls(token_of: TokenOf, several: bool) -> list[str]:
    """Return the rules for `main`: text in which every start mark begins a call."""
    start = JSON_CALLS.tool_call_start
    token = token_of(start)
    if token is not None:
        free = f"<[^{token}]>*"
        return [f"main: ({free} call)* {free}" if several else f"main: {free} call?"]
    return [
        "main: (head body)* TEXT" if several else "main: head body | TEXT",
        f"head[lazy]: TEXT {json.dumps(start)}",
        r"TEXT: /(.|\n)*/",
    ]


def _up_to(mark: str, token_of: TokenOf, ends: Collection[int]) -> list[str]:
    """Return the rule `reasoning`: text up to and with a mark, and the white space after it."""
    token = token_of(mark)
    if token is None:
        return [f"reasoning[lazy]: /(.|\\n)*/ {json.dumps(mark)}"]
    others = ",".join(str(i) for i in sorted({token, *ends}))
    return [f'reasoning: <[^{others}]>* <[{token}]> "\\n"? "\\n"?']


def _mark(text: str, token_of: TokenOf) -> str:
    """Return a mark as a term: if it is one token, that token, which text cannot match."""
    token = token_of(text)
    return json.dumps(text) if token is None else f"<[{token}]>"
