"""The forms of tool calls, by the names of mlx-lm's parsers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from mlx_lm.tool_parsers import glm47

from redrafter_mlx.weights.text.calls.form import Calls, Form, NoCallError, Setting, ToolParser
from redrafter_mlx.weights.text.calls.json_calls import JSON_LEADS, JSONForm, calls_in
from redrafter_mlx.weights.text.calls.quoted_calls import GemmaForm, PythonForm
from redrafter_mlx.weights.text.calls.tagged_calls import TaggedForm

_XTML = r"<\|open\|>{}[^<]*?"

FORMS: dict[str, Form] = {
    "json_tools": JSONForm(leads=JSON_LEADS),
    "kimi_k2": JSONForm(
        leads=("<|tool_call_begin|>functions.NAME:", "<|tool_call_begin|>NAME:", "functions.NAME:",
               "NAME:"),
        head=r"(?:<\|tool_call_begin\|>)?\s*(?P<id>(?:functions\.)?NAME:\d+)\s*"
             r"<\|tool_call_argument_begin\|>\s*",
        tail=r"\s*<\|tool_call_end\|>",
        opener="<|tool_call_begin|>",
    ),
    "mistral": JSONForm(
        leads=("NAME[", "NAME{", "[{"),
        head=r"NAME\s*(?:\[CALL_ID\]\s*(?P<id>[\w-]+)\s*)?(?:\[ARGS\])?\s*(?=\{)",
        short_ids=True,
    ),
    "qwen3_coder": TaggedForm(
        leads=("<function=NAME><parameter=", "<function=NAME></function>", *JSON_LEADS),
        opener="<function=",
        head=r"<function=\s*NAME\s*>",
        opening=r"<parameter=\s*(?P<key>[^<>\n]+?)\s*>",
        closing="</parameter>",
        ending="</function>",
        padding="\n",
    ),
    "glm47": TaggedForm(
        leads=("NAME", *JSON_LEADS),
        head="NAME",
        opening=r"<arg_key>(?P<key>[^<>]+)</arg_key>(?:\\n|\s)*<arg_value>",
        closing="</arg_value>",
        plain=glm47.parse_tool_call,
    ),
    "longcat": TaggedForm(
        leads=("NAME", *JSON_LEADS),
        head="NAME",
        opening=r"<longcat_arg_key>(?P<key>[^<>]+)</longcat_arg_key>(?:\\n|\s)*<longcat_arg_value>",
        closing="</longcat_arg_value>",
    ),
    "minimax_m2": TaggedForm(
        leads=('<invokename="NAME">', "<invokename='NAME'>", "<invokename=NAME>"),
        head=r"<invoke name=\s*[\"']?NAME[\"']?\s*>",
        opening=r"<parameter name=\s*[\"']?(?P<key>[^\"'<>]+)[\"']?\s*>",
        closing="</parameter>",
        ending="</invoke>",
    ),
    "minicpm5": TaggedForm(
        leads=('"NAME">', "'NAME'>", "NAME>"),
        head=r"\s*[\"']?NAME[\"']?\s*>",
        opening=r"<param\s+name\s*=\s*[\"']?(?P<key>[^\"'<>]+?)[\"']?\s*>",
        closing="</param>",
    ),
    "muse_spark": TaggedForm(
        leads=("<atem:invoke",),
        head=r"<atem:invoke\b[^<>]*?\bname=\"NAME\"[^<>]*>",
        opening=r"<atem:parameter\b[^<>]*?\bname=\"(?P<key>[^\"]+)\"[^<>]*>",
        closing="</atem:parameter>",
        ending="</atem:invoke>",
    ),
    "kimi_k3": TaggedForm(
        leads=("<|open|>call",),
        head=_XTML.format("call") + r"\btool=\"NAME\"[^<]*<\|sep\|>",
        opening=r"<\|open\|>argument(?=[^<]*?\btype=\"(?P<type>\w+)\"|)"
                r"[^<]*?\bkey=\"(?P<key>[^\"]*)\"[^<]*<\|sep\|>",
        closing="<|close|>argument<|sep|>",
        ending="<|close|>call<|sep|>",
        whole=(_XTML.format("json") + r"<\|sep\|>", "<|close|>json<|sep|>"),
    ),
    "pythonic": PythonForm(leads=("[NAME(", "NAME(", *JSON_LEADS)),
    "gemma4": GemmaForm(leads=("call:NAME{",), quote='<|"|>'),
    "function_gemma": GemmaForm(leads=("call:NAME{",), quote="<escape>"),
}  # fmt: skip
"""By module below `mlx_lm.tool_parsers`; `laguna` is `glm47`'s form."""


@dataclass(frozen=True, kw_only=True)
class LibraryForm(Form):
    """A form of which only a parser of mlx-lm's kind is known."""

    parser: ToolParser
    tools: Sequence[dict[str, Any]]
    leads: Sequence[str] = ("",)
    certain: bool = True

    def read(self, text: str, setting: Setting) -> Calls:
        try:
            parsed = self.parser(text, list(self.tools))
        except Exception:  # mlx-lm's parsers raise errors of any type on malformed text
            raise NoCallError from None
        return calls_in(parsed, setting), len(text)

    def completions(self, text: str) -> Sequence[str]:
        return [text]  # the parser decides


def form_of(parser: ToolParser, tools: Sequence[dict[str, Any]]) -> Form:
    """Return the form that a parser of mlx-lm reads."""
    known = FORMS.get(parser.__module__.rpartition(".")[2])
    return known or LibraryForm(parser=parser, tools=tools)
