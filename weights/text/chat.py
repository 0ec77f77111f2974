"""Encode messages as token ids, with control tokens only where the chat template puts them.

User text stays text: `<|im_end|>` inside a message is encoded as its characters, never as the
token that ends a turn.
"""

from __future__ import annotations

import inspect
import re
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from mlx_lm.tokenizer_utils import TokenizerWrapper
from transformers import PreTrainedTokenizerBase

from redrafter_mlx.errors import BadInputError
from redrafter_mlx.weights.text.markup import OutputParser, markup_of
from redrafter_mlx.weights.text.messages import (
    all_text,
    check_continued,
    check_messages,
    check_text,
)

VICUNA_TEMPLATE = """\
{{ bos_token }}\
{% if messages[0]['role'] == 'system' %}\
{% set system = messages[0]['content'] %}{% set turns = messages[1:] %}\
{% else %}\
{% set system = "A chat between a curious user and an artificial intelligence assistant. \
The assistant gives helpful, detailed, and polite answers to the user's questions." %}\
{% set turns = messages %}\
{% endif %}\
{{ system + ' ' }}\
{% for message in turns %}\
{% if (message['role'] == 'user') != (loop.index0 % 2 == 0) \
or message['role'] not in ['user', 'assistant'] %}\
{{ raise_exception('after an optional system message, user and assistant must take turns') }}\
{% endif %}\
{% if message['role'] == 'user' %}{{ 'USER: ' + message['content'] + ' ' }}\
{% else %}{{ 'ASSISTANT: ' + message['content'].strip() + eos_token }}{% endif %}\
{% endfor %}\
{% if add_generation_prompt %}{{ 'ASSISTANT:' }}{% endif %}"""
"""Chat template of Vicuna v1.1 and later, whose folders lack it: FastChat's `vicuna_v1.1`.
An answer begins with the space after "ASSISTANT:"; FastChat strips it before the next turn."""

# In transformers each call sets whether control tokens are text, as state of the tokenizer.
_TOKENIZER_LOCK = threading.RLock()
_PRIVATE = range(0xF0000, 0xFFFFE)  # a plane of Unicode for private use

_MARKUP = re.compile("<[|\uff5c].*[|\uff5c]>")
"""Text of an added token that is a control token, even if the tokenizer does not say so: DeepSeek's
distilled models have such role tokens."""


def render_chat(
    tokenizer: TokenizerWrapper,
    messages: Sequence[Mapping[str, object]],
    *,
    add_generation_prompt: bool = True,
    tools: Sequence[Mapping[str, object]] = (),
    thinking: bool | None = None,
    reasoning_effort: str | None = None,
    continue_final_message: bool = False,
    variables: Mapping[str, object] | None = None,
) -> list[int]:
    """Return the token ids of a conversation in the model's chat template.

    Messages without control tokens are encoded exactly as `apply_chat_template` encodes them.

    tools: functions that the model may call, in OpenAI's format
    thinking: whether the model should reason first; None leaves it to the template
    reasoning_effort: how much, as in OpenAI's API, for templates that know it
    continue_final_message: whether the answer goes on with the last message, the assistant's
    variables: further variables of the template
    Raises BadInputError without a chat template, and for messages that are malformed or refused.
    """
    checked = check_messages(messages)
    if not tokenizer.has_chat_template:
        raise BadInputError(
            "this model has no chat template and continues plain text alone: over HTTP with "
            "/v1/completions, by `redrafter-mlx generate --raw`, or in the library with raw=True"
        )
    options = _checked_variables(variables or {})
    options["add_generation_prompt"] = add_generation_prompt
    if continue_final_message:
        check_continued(checked[-1], add_generation_prompt)
        options["continue_final_message"] = True
    if tools:
        options["tools"] = [*tools]
    if thinking is not None:
        options["enable_thinking"] = thinking
        if _mentions(tokenizer, "thinking"):  # its name in Granite's and DeepSeek's templates
            options["thinking"] = thinking
    if reasoning_effort is not None and _mentions(tokenizer, "reasoning_effort"):
        options["reasoning_effort"] = reasoning_effort
    everything = all_text([checked, options])
    check_text(everything, "a message")
    special = _control_tokens(tokenizer)
    control = _pattern(special)
    with _TOKENIZER_LOCK:
        hidden = control is not None and control.search(everything) is not None
        if control is not None and hidden:
            checked = [_without_reasoning(message, tokenizer) for message in checked]
            hidden = control.search(all_text([checked, options])) is not None
        if control is None or not hidden:
            return [int(i) for i in _render(tokenizer, checked, options, tokenize=True)]
        try:
            (checked, options), originals = _mask([checked, options], control)
        except RecursionError:
            raise BadInputError("a message is nested too deeply") from None
        text = _render(tokenizer, checked, options, tokenize=False)
        return _encode_masked(tokenizer, str(text), control, originals, special)


def encode_text(tokenizer: TokenizerWrapper, text: str) -> list[int]:
    """Return the token ids of a raw prompt, encoded as by mlx-lm's `stream_generate`.

    Control tokens in the prompt are recognised. The beginning-of-text token is prepended if the
    tokenizer adds one and the text does not start with it.

    Raises BadInputError for a string with half a surrogate pair, which is not valid text.
    """
    check_text(text, "the prompt")
    bos = tokenizer.bos_token
    with _TOKENIZER_LOCK:
        ids = tokenizer.encode(text, add_special_tokens=bos is None or not text.startswith(bos))
    return [int(i) for i in ids]


def _without_reasoning(message: dict[str, Any], tokenizer: TokenizerWrapper) -> dict[str, Any]:
    """Return a message, if it is an answer, as what it says after its reasoning.

    A template may cut that out by its marks, or refuse them, but control tokens are hidden from it.
    """
    if message["role"] != "assistant":
        return message
    parser = OutputParser(markup_of(tokenizer, []), tools=[])
    parts = [*parser.feed(message["content"]), *parser.finish()]
    return {**message, "content": "".join(part.content for part in parts)}


def _checked_variables(variables: Mapping[str, object]) -> dict[str, Any]:
    """Return a template's variables; raises BadInputError for one that has another source."""
    own = set(inspect.signature(PreTrainedTokenizerBase.apply_chat_template).parameters)
    for name in variables:
        if name in (own | {"messages"}) - {"documents"}:
            raise BadInputError(f"chat_template_kwargs.{name}: not a variable of a chat template")
    return dict(variables)


def _mentions(tokenizer: TokenizerWrapper, variable: str) -> bool:
    """Whether the text of the chat template has this variable; a renderer in Python has no text."""
    return variable in str(getattr(tokenizer, "chat_template", None) or "")


def _control_tokens(tokenizer: TokenizerWrapper) -> dict[str, bool]:
    """Return all control tokens, each with whether the tokenizer itself calls it special."""
    added = getattr(tokenizer, "added_tokens_decoder", {}).values()
    found = {str(t): bool(t.special) for t in added if t.special or _MARKUP.fullmatch(str(t))}
    return found | dict.fromkeys(map(str, tokenizer.all_special_tokens), True)


def _pattern(texts: Iterable[str]) -> re.Pattern[str] | None:
    """Return a pattern that matches any of these texts, as one group; None if there are none."""
    longest_first = sorted((t for t in texts if t), key=len, reverse=True)
    return re.compile(f"({'|'.join(map(re.escape, longest_first))})") if longest_first else None


def _render(
    tokenizer: TokenizerWrapper,
    messages: list[dict[str, Any]],
    options: dict[str, Any],
    tokenize: bool,
) -> str | list[int]:
    try:
        out: str | list[int] = tokenizer.apply_chat_template(messages, tokenize=tokenize, **options)
    except Exception as error:  # a template is a program
        text = f"the model's chat template refuses these messages: {error!s:.500}"
        raise BadInputError(text) from error
    return out


def _mask(given: list[Any], control: re.Pattern[str]) -> tuple[list[Any], dict[str, str]]:
    """Replace each control token in messages and tools by an unused private-use character.

    Only the tokens are replaced, so that a template can still strip or inspect the other text.
    """
    seen = all_text(given)
    unused = (c for c in map(chr, _PRIVATE) if c not in seen)
    characters: dict[str, str] = {}

    def hide(match: re.Match[str]) -> str:
        if match[0] not in characters:
            characters[match[0]] = _free(unused)
        return characters[match[0]]

    def hide_in(value: Any) -> Any:
        if isinstance(value, str):
            return control.sub(hide, value)
        if isinstance(value, Mapping):
            return {hide_in(key): hide_in(one) for key, one in value.items()}
        return [hide_in(one) for one in value] if isinstance(value, (list, tuple)) else value

    return hide_in(given), {character: text for text, character in characters.items()}


def _free(unused: Iterator[str]) -> str:
    for character in unused:
        return character
    raise BadInputError("the messages hold every private-use character; leave some out")


def _encode_masked(
    tokenizer: TokenizerWrapper,
    text: str,
    control: re.Pattern[str],
    originals: dict[str, str],
    special: Mapping[str, bool],
) -> list[int]:
    """Encode a rendered template; segments with hidden control tokens are encoded as plain text.

    A segment runs from one control token of the template to the next. So no merge crosses its
    ends, as none would if the hidden control tokens were ordinary words. Those that the tokenizer
    does not call special, which it would always recognise, are cut after their first character.
    """
    hidden = re.compile(f"[{''.join(originals)}]")
    cut = _free(c for c in map(chr, _PRIVATE) if c not in text and c not in originals)
    shown_as = {c: t if special[t] else t[0] + cut + t[1:] for c, t in originals.items()}
    ids: list[int] = []
    pending = ""
    for stretch in control.split(text):
        if not hidden.search(stretch):
            pending += stretch
            continue
        ids += tokenizer.encode(pending, add_special_tokens=False)
        pending = ""
        shown = hidden.sub(lambda match: shown_as[match[0]], stretch)
        for part in shown.split(cut):
            ids += tokenizer.encode(part, add_special_tokens=False, split_special_tokens=True)
    ids += tokenizer.encode(pending, add_special_tokens=False)
    return [int(i) for i in ids]
