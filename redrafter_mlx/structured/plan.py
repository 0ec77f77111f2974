"""Plan how one model answers a request in the required form: prompt, grammar and parser."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from mlx_lm.tokenizer_utils import TokenizerWrapper

from redrafter_mlx.decoding.constraint import Constraint
from redrafter_mlx.engine.engine import Redrafter
from redrafter_mlx.errors import BadInputError, UnsupportedModelError
from redrafter_mlx.structured.grammar import Grammars
from redrafter_mlx.structured.json_schema import json_term
from redrafter_mlx.structured.output_grammar import answer_grammar
from redrafter_mlx.structured.thinking import BoundedThinking, ThinkingBudget
from redrafter_mlx.structured.tools import Tool, read_choice, read_tools, spelled_out
from redrafter_mlx.structured.turns import render_turns
from redrafter_mlx.weights.text.chat import render_chat
from redrafter_mlx.weights.text.markup import JSON_CALLS, Markup, OutputParser, markup_of
from redrafter_mlx.weights.text.messages import check_continued, check_messages

Messages = Sequence[Mapping[str, object]]

_PROBE = {"type": "function", "function": {"name": "probe", "parameters": {"type": "object"}}}


@dataclass(frozen=True)
class OutputPlan:
    """How one request is answered; each of its answers needs its own constraint and parser.

    prompt:  token ids
    grammar: in llguidance's Lark; None leaves the model free
    tools:   tools that may be called
    budget:  limit on the reasoning; None without one
    """

    prompt: tuple[int, ...]
    grammar: str | None
    markup: Markup
    tools: tuple[Tool, ...]
    grammars: Grammars
    budget: ThinkingBudget | None = None

    def constraint(self) -> Constraint | None:
        """Return a constraint for one answer; raises BadInputError if the grammar is unusable."""
        constraint: Constraint | None = None
        if self.grammar is not None:
            what = "tools" if self.tools else "response_format"
            constraint = self.grammars.compile(self.grammar, f"{what}: a schema")
        if self.budget is None:
            return constraint
        return BoundedThinking(self.budget, constraint, self.grammars.vocab_size)

    def parser(self) -> OutputParser:
        return OutputParser(self.markup, [dict(tool.given) for tool in self.tools])


def plan_output(
    model: Redrafter,
    grammars: Grammars,
    messages: Messages,
    *,
    response_format: Mapping[str, object] | None = None,
    tools: Sequence[Mapping[str, Any]] = (),
    tool_choice: object = None,
    parallel_tool_calls: bool = True,
    thinking: bool | None = None,
    thinking_budget: int | None = None,
    reasoning_effort: str | None = None,
    add_generation_prompt: bool = True,
    continue_final_message: bool = False,
    variables: Mapping[str, object] | None = None,
) -> OutputPlan:
    """Plan the answers to a chat request; the parameters are OpenAI's.

    Calls have the form of the model's own template, if it defines one. A required call, one of a
    strict tool in a form that has no grammar, or one that a grammar must distinguish from a JSON
    answer, is always a single call as JSON between tags.
    Otherwise `parallel_tool_calls` allows several calls; false is enforced only for JSON between
    tags.

    Args:
      thinking: whether the model should reason first; None leaves it to its template
      thinking_budget: maximum number of tokens of the reasoning, where one token marks its end
      add_generation_prompt, continue_final_message, variables: as in `render_chat`
    Raises:
      BadInputError: its message begins with the name of the wrong parameter
    """
    known = read_tools(tools)
    choice = read_choice(tool_choice, known)
    json_answer = read_format(response_format)
    shown = () if choice.mode == "none" else known
    if continue_final_message and (json_answer is not None or choice.mode == "required"):
        raise BadInputError(
            "continue_final_message: a format or a required call begins with the answer; leave one "
            "out"
        )
    render = partial(
        render_chat,
        model.tokenizer,
        thinking=thinking,
        reasoning_effort=reasoning_effort,
        add_generation_prompt=add_generation_prompt,
        continue_final_message=continue_final_message,
        variables=variables,
    )
    checked = check_messages(messages)
    if continue_final_message:
        check_continued(checked[-1], add_generation_prompt)
    model.prompts.check_fits(checked)
    prompt = model.encode(_prompt(model.tokenizer, checked, shown, render))
    markup = markup_of(model.tokenizer, prompt)
    usable = tuple(tool for tool in shown if choice.name in (None, tool.name))
    own_form = shows_tools(model.tokenizer) and choice.mode == "auto" and json_answer is None
    if markup.tool_parser is not JSON_CALLS.tool_parser:
        own_form = own_form and not any(tool.strict for tool in usable)
    if not usable:
        markup = replace(markup, tool_parser=None)
    elif not own_form:
        markup = markup.with_calls_of(JSON_CALLS)
    in_json = usable if markup.tool_parser is JSON_CALLS.tool_parser else ()
    try:
        grammar = answer_grammar(
            in_json,
            choice.mode == "required",
            json_answer,
            _reasoning(markup, thinking, grammars),
            grammars,
            several=parallel_tool_calls,
        )
        if grammar is not None:
            grammars.check()
    except UnsupportedModelError as error:
        raise BadInputError(f"{'tools' if usable else 'response_format'}: {error}") from error
    budget = _budget(markup, thinking_budget, grammars)
    return OutputPlan(tuple(prompt), grammar, markup, usable, grammars, budget)


def _budget(markup: Markup, tokens: int | None, grammars: Grammars) -> ThinkingBudget | None:
    """Return the limit on an answer's reasoning; None without one, or if the end is not a token."""
    if tokens is None or markup.think_end is None:
        return None
    end = grammars.token_of(markup.think_end)
    if end is None:
        return None
    start = None if markup.think_start is None else grammars.token_of(markup.think_start)
    return ThinkingBudget(tokens, start, end, markup.initial_state == "reasoning")


def _reasoning(
    markup: Markup, thinking: bool | None, grammars: Grammars
) -> tuple[str | None, str] | None:
    """Return the marks of the reasoning that an answer may hold, as `answer_grammar` takes them.

    A model begins it itself only with a mark of one token: text could be mistaken for another.
    """
    start, end = markup.think_start, markup.think_end
    if end is None:
        return None
    if markup.initial_state == "reasoning":
        return None, end
    begins = start is not None and grammars.token_of(start) is not None
    return (start, end) if begins and thinking is not False else None


def format_constraint(
    grammars: Grammars, given: Mapping[str, object] | None
) -> Callable[[], Constraint | None]:
    """Return what makes the constraint of one answer that is in `response_format` from its start.

    Raises BadInputError naming the wrong field; so does a call if the grammar is unusable.
    """
    term = read_format(given)
    if term is None:
        return lambda: None
    try:
        grammars.check()
    except UnsupportedModelError as error:
        raise BadInputError(f"response_format: {error}") from error
    return partial(grammars.compile, f"start: {term}", "response_format: a schema")


def read_format(given: Mapping[str, object] | None) -> str | None:
    """Return the Lark term for the JSON that OpenAI's `response_format` asks for; None for text.

    Raises BadInputError naming the wrong field.
    """
    kind = given.get("type") if given else "text"
    if kind == "text":
        return None
    if kind == "json_object":
        schema = given.get("schema") if given else None  # llama-server's form
        usable = schema if isinstance(schema, Mapping) else {"type": "object"}
        return _term(usable, "response_format.schema", lenient=True)
    if kind != "json_schema":
        raise BadInputError(
            f"response_format.type: {kind!r:.40}; choose text, json_object or json_schema"
        )
    assert given is not None
    named = given.get("json_schema")
    schema = named.get("schema") if isinstance(named, Mapping) else None
    if not isinstance(named, Mapping) or not isinstance(schema, Mapping):
        raise BadInputError("response_format.json_schema.schema: missing; give a JSON schema")
    lenient = named.get("strict") is not True
    return _term(schema, "response_format.json_schema.schema", lenient=lenient)


def _term(schema: Mapping[str, object], path: str, *, lenient: bool) -> str:
    """Return a schema's Lark term; an error names its `path` in the request."""
    try:
        return json_term(schema, lenient=lenient)
    except BadInputError as error:
        raise BadInputError(f"{path}: {error}") from error


def shows_tools(tokenizer: TokenizerWrapper) -> bool:
    """Whether a model's chat template shows tools to it, and mlx-lm can parse its calls."""
    if not tokenizer.has_tool_calling:
        return False
    asked = [{"role": "user", "content": "?"}]
    try:
        return render_chat(tokenizer, asked, tools=[_PROBE]) != render_chat(tokenizer, asked)
    except BadInputError:
        return False


def _prompt(
    tokenizer: TokenizerWrapper,
    checked: Sequence[Mapping[str, Any]],
    tools: Sequence[Tool],
    render: Callable[..., list[int]],
) -> list[int]:
    """Return the prompt's tokens, with tools, calls and results by the template, or as text."""
    mentions_tools = tools or any(m["role"] == "tool" or m.get("tool_calls") for m in checked)
    if mentions_tools and not shows_tools(tokenizer):
        return render_turns(render, spelled_out(checked, tools))
    return render_turns(partial(render, tools=[tool.given for tool in tools]), checked)
