"""The marks of reasoning and tool calls in an answer's text, and a parser that splits by them."""

from __future__ import annotations

import uuid
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from mlx_lm.generate import TextStateMachine, make_text_state_machine
from mlx_lm.tokenizer_utils import TokenizerWrapper
from mlx_lm.tool_parsers import json_tools

from redrafter_mlx.weights.text.calls.call_text import CallText, Outcome
from redrafter_mlx.weights.text.calls.form import Call, Form, Setting, ToolParser
from redrafter_mlx.weights.text.calls.forms import form_of
from redrafter_mlx.weights.text.calls.values import write

_HARMONY = ("<|channel|>", "<|message|>", "<|start|>", "<|end|>")
"""Control tokens of gpt-oss's format, in which an answer is a series of messages in channels. The
source is openai/harmony, docs/format.md; mlx-lm knows no marks for it."""

_CHANNELS = {"analysis": "reasoning", "commentary": "normal", "final": "normal"}


@dataclass(frozen=True)
class ToolCall:
    """One complete call; `arguments` is the text of a JSON object."""

    index: int
    id: str
    name: str
    arguments: str


@dataclass(frozen=True)
class Delta:
    """The next part of an answer: text, reasoning or a tool call."""

    content: str = ""
    reasoning: str = ""
    tool_call: ToolCall | None = None


@dataclass(frozen=True)
class Markup:
    """The marks of one model's text, under the names that mlx-lm's text state machine reads.

    response_transitions: the model's own states, in mlx-lm's format
    tool_parser:          reads the text between the marks of a call; None without tools
    """

    think_start: str | None = None
    think_end: str | None = None
    tool_call_start: str = ""
    tool_call_end: str = ""
    tool_parser: ToolParser | None = None
    structural_markers: Sequence[str] = ()
    response_transitions: dict[str, list[tuple[str, str]]] = field(default_factory=dict)
    initial_state: str = "normal"

    @property
    def has_thinking(self) -> bool:
        return self.think_start is not None

    @property
    def has_tool_calling(self) -> bool:
        return self.tool_parser is not None

    def without_calls(self) -> Markup:
        """Return a copy in which calls are text."""
        transitions = {
            state: [edge for edge in edges if edge[1] != "tool"]
            for state, edges in self.response_transitions.items()
        }
        return replace(self, tool_parser=None, response_transitions=transitions)

    def with_calls_of(self, other: Markup) -> Markup:
        """Return a copy with the other's marks of tool calls."""
        transitions = {
            state: [(other.tool_call_start if to == "tool" else mark, to) for mark, to in edges]
            for state, edges in self.response_transitions.items()
        }
        return replace(
            self,
            response_transitions=transitions,
            tool_call_start=other.tool_call_start,
            tool_call_end=other.tool_call_end,
            tool_parser=other.tool_parser,
        )


def markup_of(tokenizer: TokenizerWrapper, prompt: Sequence[int]) -> Markup:
    """Return the marks of a model's answers to a prompt, which may have started the reasoning.

    It has if the prompt ends with the mark; a mark before that is text of a message.
    """
    state = tokenizer.response_initial_state or "normal"
    if tokenizer.has_thinking and (at := tokenizer.rfind_think_start(prompt)) >= 0:
        rest = prompt[at + len(tokenizer.think_start_tokens) :]
        state = state if tokenizer.decode(rest).strip() else "reasoning"
    transitions = tokenizer.response_transitions
    added = getattr(tokenizer, "added_tokens_decoder", {}).values()  # a vocabulary takes 0.1 s
    if not transitions and set(_HARMONY) <= {str(token) for token in added}:
        begun = [(f"<|channel|>{name}<|message|>", to) for name, to in _CHANNELS.items()]
        between = ("<|end|>", "<|start|>assistant")
        transitions = {
            of: [*begun, *((mark, of) for mark in between)] for of in ("normal", "reasoning")
        }
    return Markup(
        think_start=tokenizer.think_start,
        think_end=tokenizer.think_end,
        tool_call_start=tokenizer.tool_call_start or "",
        tool_call_end=tokenizer.tool_call_end or "",
        tool_parser=tokenizer.tool_parser,
        structural_markers=tokenizer.structural_markers,
        response_transitions=transitions,
        initial_state=state,
    )


JSON_CALLS = Markup(
    tool_call_start=json_tools.tool_call_start,
    tool_call_end=json_tools.tool_call_end,
    tool_parser=json_tools.parse_tool_call,
)
"""`<tool_call>{"name": ..., "arguments": {...}}</tool_call>`, which many models write."""


_UNMARKED = "unmarked"  # state of the text after the opener of a call that has no start mark


def _state_machine(markup: Markup, form: Form | None) -> TextStateMachine:
    """Return mlx-lm's state machine, in which a call's mark begins a state without an end."""
    transitions = markup.response_transitions
    if form is not None and form.opener:
        begun = [*transitions.get("normal", []), (form.opener, _UNMARKED)]
        transitions = {**transitions, "normal": begun, _UNMARKED: []}
    return make_text_state_machine(
        replace(markup, tool_call_end="", response_transitions=transitions)
    )


class OutputParser:
    """Splits an answer's text into its parts as the text arrives.

    A call is returned when it is complete: at the latest when another one or the answer's end shows
    that the mark after it is not part of a value. A mark that begins no call of a known tool
    belongs to the reasoning or content around it: an answer may speak of marks. So do marks of
    reasoning after content.

    called:         whether there was a call
    ends_in_call:   whether nothing follows the last call so far
    """

    def __init__(self, markup: Markup, tools: Sequence[dict[str, Any]]) -> None:
        """`tools` are those that may be called, in OpenAI's format; without any, calls are text."""
        self._markup = markup = markup if tools else markup.without_calls()
        self._form = None if markup.tool_parser is None else form_of(markup.tool_parser, tools)
        functions = [tool["function"] for tool in tools]
        schemas = {function["name"]: function.get("parameters") or {} for function in functions}
        self._setting = Setting(markup.tool_call_start, markup.tool_call_end, schemas)
        self._marks = _state_machine(markup, self._form)
        self._machine = self._marks.make_state(markup.initial_state)
        self._state = markup.initial_state
        self._call: CallText | None = None
        self._begun_by = ""  # the mark or opener of that call
        self._trim = False
        self._ids: list[str] = []
        self.ends_in_call = False
        self._answers = False  # whether there was content
        self._quotes = False  # whether the marks of reasoning around this text are content

    @property
    def called(self) -> bool:
        return bool(self._ids)

    @property
    def reasons(self) -> bool:
        """Whether the text so far ends in the reasoning."""
        return self._state == "reasoning" and not self._quotes

    def feed(self, text: str) -> list[Delta]:
        """Return the parts that are certain after this text."""
        deltas: list[Delta] = []
        rest: str | None = text
        while rest is not None:
            if self._call is None:
                rest = self._outside(rest, deltas)
            else:
                rest = self._after(self._call.feed(rest), deltas)
        return deltas

    def finish(self, *, cut: bool = False) -> list[Delta]:
        """Return the parts held back; `cut`: the answer was cut short by its length."""
        deltas: list[Delta] = []
        while self._call is not None:
            rest = self._after(self._call.finish(cut=cut), deltas)
            deltas += self.feed(rest or "")
        self._machine, held, state = TextStateMachine.flush(self._machine)
        return deltas + self._segment(state, held)

    def _outside(self, text: str, deltas: list[Delta]) -> str | None:
        """Read text outside of calls; return what follows the mark of one, if there is one."""
        self._machine, segments = TextStateMachine.split(self._machine, text)
        for state, part in segments:
            if state in ("tool", _UNMARKED):
                assert self._form is not None
                marked = state == "tool"
                self._begun_by = self._setting.start if marked else self._form.opener
                self._call = CallText(self._form, self._setting, "" if marked else self._begun_by)
                return part
            deltas += self._segment(state, part)
        return None

    def _after(self, outcome: Outcome | None, deltas: list[Delta]) -> str | None:
        """Take what the text after a mark is, once known; return the text that follows.

        Reasoning goes on after a call in it: its own mark ends it.
        """
        if outcome is None:
            return None
        self._call = None
        if self._state not in ("normal", "reasoning") or (outcome.calls and self._quotes):
            self._state = "normal"
        self._machine = self._marks.make_state(self._state)
        if outcome.calls:
            deltas += [Delta(tool_call=self._numbered(call)) for call in outcome.calls]
            self._trim, self._quotes, self.ends_in_call = True, False, True
        else:
            deltas += self._segment(self._state, self._begun_by)
        return outcome.rest

    def _numbered(self, call: Call) -> ToolCall:
        """Return a call with the id that the model gave it, or with a new one."""
        chosen = call.id
        if not chosen or chosen in self._ids:
            new = uuid.uuid4().hex
            short = self._form is not None and self._form.short_ids
            chosen = new[:9] if short else f"call_{new[:24]}"
        self._ids.append(chosen)
        return ToolCall(len(self._ids) - 1, chosen, call.name, write(call.arguments))

    def _segment(self, state: str, text: str) -> list[Delta]:
        if state != self._state:
            mark = self._quoted_mark(state)
            self._state, self._trim = state, not mark
            text = mark + text
        if self._trim:  # white space next to a mark belongs to it
            text = text.lstrip()
            self._trim = not text
        if not text or state not in ("normal", "reasoning"):
            return []
        self.ends_in_call = self.ends_in_call and text.isspace()
        if state == "reasoning" and not self._quotes:
            return [Delta(reasoning=text)]
        self._answers = self._answers or not text.isspace()
        return [Delta(content=text)]

    def _quoted_mark(self, state: str) -> str:
        """Return the mark that led to this state if it is content, else an empty string."""
        if state == "reasoning":
            self._quotes = self._answers and self._markup.has_thinking
            return self._markup.think_start or "" if self._quotes else ""
        ended, self._quotes = self._quotes, False
        return self._markup.think_end or "" if ended and state == "normal" else ""
