"""The marks of reasoning and tool calls in an answer's text, and a parser that splits by them."""

from __future__ import annotations

import json
import re
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from mlx_lm.generate import TextStateMachine, make_text_state_machine
from mlx_lm.tokenizer_utils import TokenizerWrapper
from mlx_lm.tool_parsers import json_tools

from redrafter_mlx.runtime.json_file import to_json

_HARMONY = ("<|channel|>", "<|message|>", "<|start|>", "<|end|>")
"""Control tokens of gpt-oss's format, in which an answer is a series of messages in channels. The
source is openai/harmony, docs/format.md; mlx-lm knows no marks for it."""

_CHANNELS = {"analysis": "reasoning", "commentary": "normal", "final": "normal"}

ToolParser = Callable[[str, Any], Any]
"""mlx-lm's parser: from a call's text and the tools to `{"name", "arguments"}`, or a list of it."""


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

    def with_calls_of(self, other: Markup) -> Markup:
        """Return a copy with the other's marks of tool calls."""
        return replace(
            self,
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


class OutputParser:
    """Splits an answer's text into its parts as the text arrives.

    A call is returned when it is complete. A mark that begins no call of a known tool, or one that
    has no end, belongs to the reasoning or content around it: an answer may speak of marks. So do
    marks of reasoning after content.

    called: whether there was a call
    """

    def __init__(self, markup: Markup, tools: Sequence[dict[str, Any]]) -> None:
        """`tools` are those that may be called, in OpenAI's format; without any, calls are text."""
        markup = markup if tools else replace(markup, tool_parser=None)
        self._markup, self._tools = markup, list(tools)
        self._names = {tool["function"]["name"] for tool in tools}
        self._marks = make_text_state_machine(markup)
        self._marks_but_calls = make_text_state_machine(replace(markup, tool_parser=None))
        self._machine = self._marks.make_state(markup.initial_state)
        self._pieces = _pieces(markup.tool_call_end)
        self._state, self._before_call = markup.initial_state, markup.initial_state
        self._call = ""
        self._trim = False
        self._calls = 0
        self._answers = False  # whether there was content
        self._quotes = False  # whether the marks of reasoning around this text are content

    @property
    def called(self) -> bool:
        return self._calls > 0

    def feed(self, text: str) -> list[Delta]:
        """Return the parts that are certain after this text."""
        return [delta for piece in self._pieces(text) for delta in self._piece(piece)]

    def finish(self) -> list[Delta]:
        """Return the parts held back so far, at the end of the answer."""
        deltas = self._flush()
        if self._state != "tool":
            return deltas
        calls = [] if self._markup.tool_call_end else self._calls_in(self._call)
        return deltas + (calls or [*self._no_call(self._call), *self._flush()])

    def _flush(self) -> list[Delta]:
        self._machine, held, state = TextStateMachine.flush(self._machine)
        return self._segment(state, held)

    def _piece(self, text: str) -> list[Delta]:
        """Read text in which nothing follows the mark that ends a call."""
        self._machine, segments = TextStateMachine.split(self._machine, text)
        deltas = []
        for state, part in segments:
            ends_call = self._state == "tool" and state != "tool"
            deltas += self._end_of_call(state) if ends_call else self._segment(state, part)
        if self._markup.tool_parser is JSON_CALLS.tool_parser and _is_no_json(self._call):
            self._machine, held, _ = TextStateMachine.flush(self._machine)
            deltas += self._no_call(self._call + held)
        return deltas

    def _segment(self, state: str, text: str) -> list[Delta]:
        if state == "tool":
            if self._state != "tool":
                self._before_call, self._state = self._state, state
            self._call += text
            return []
        if state != self._state:
            mark = self._quoted_mark(state)
            self._state, self._trim = state, not mark
            text = mark + text
        if self._trim:  # white space next to a mark belongs to it
            text = text.lstrip()
            self._trim = not text
        if not text or state not in ("normal", "reasoning"):
            return []
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

    def _end_of_call(self, state: str) -> list[Delta]:
        """Return what the mark ends, which leads to `state` unless it is part of a call's text.

        Reasoning goes on after a call in it: its own mark ends it.
        """
        end = self._markup.tool_call_end
        if calls := self._calls_in(self._call):
            if self._before_call == "reasoning" and not self._quotes:
                state = self._before_call
                self._machine = self._marks.make_state(state)
            self._call, self._state = "", state
            self._trim, self._quotes = True, False
            return calls
        if _ends_in_string(self._call):
            self._call += end
            self._machine = self._marks.make_state("tool")
            return []
        return self._no_call(self._call + end)

    def _no_call(self, text: str) -> list[Delta]:
        """Read the mark of a call and what followed it as if there were no such mark."""
        self._state, self._call = self._before_call, ""
        machine, segments = TextStateMachine.split(
            self._marks_but_calls.make_state(self._state), self._markup.tool_call_start + text
        )
        deltas = [delta for state, part in segments for delta in self._segment(state, part)]
        _, held, state = TextStateMachine.flush(machine)
        self._machine = self._marks.make_state(state)
        return deltas + self._piece(held)

    def _calls_in(self, text: str) -> list[Delta]:
        deltas = []
        for name, arguments in self._parsed(text):
            call = ToolCall(self._calls, f"call_{uuid.uuid4().hex[:24]}", name, arguments)
            deltas.append(Delta(tool_call=call))
            self._calls += 1
        return deltas

    def _parsed(self, text: str) -> list[tuple[str, str]]:
        """Return names and arguments; none if any part is not a call of a known tool."""
        assert self._markup.tool_parser is not None
        try:
            parsed = self._markup.tool_parser(text, self._tools)
        except Exception:  # mlx-lm's parsers raise errors of any type on malformed text
            return []
        found: list[tuple[str, str]] = []
        for call in parsed if isinstance(parsed, list) else [parsed]:
            name = call.get("name") if isinstance(call, dict) else None
            arguments = call.get("arguments", {}) if isinstance(call, dict) else None
            if isinstance(arguments, str):
                arguments = _object(arguments)
            if name not in self._names or not isinstance(arguments, dict):
                return []
            try:
                found.append((str(name), to_json(arguments)))
            except (ValueError, TypeError, RecursionError):  # 1e999, or a set of Python's
                return []
        return found


def _pieces(end: str) -> Callable[[str], list[str]]:
    """Return a function that cuts a text so that nothing follows the mark `end` in a piece."""
    if not end:
        return lambda text: [text]
    last = re.escape(end[-1])
    return re.compile(f"[^{last}]*{last}|[^{last}]+").findall


def _is_no_json(call: str) -> bool:
    """Whether a call's text, as far as it goes, is no object and no list."""
    return call.lstrip()[:1] not in ("", "{", "[")


def _ends_in_string(call: str) -> bool:
    """Whether a call's text is JSON that ends within a string."""
    try:
        json.loads(call)
    except json.JSONDecodeError as error:
        return error.msg.startswith("Unterminated string") and not _is_no_json(call)
    except (ValueError, RecursionError):  # too many digits, or too many brackets
        return False
    return False


def _object(text: str) -> object:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None
