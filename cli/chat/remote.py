"""A conversation with a model on a server, through `POST /v1/chat/completions`."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Generator, Iterator, Mapping
from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from redrafter_mlx.bench.measure.load_client import Server
from redrafter_mlx.config import BeamShape, GenerationOptions
from redrafter_mlx.errors import BadInputError, ServerError

if TYPE_CHECKING:
    from redrafter_mlx.response import Source

_SENT = (
    "max_tokens", "temperature", "top_p", "top_k", "min_p", "repetition_penalty",
    "frequency_penalty", "presence_penalty",
)  # fmt: skip
"""Options that have the same name in a request; `_fields` maps or refuses the others."""

_BEGUN, _ENDED = "<think>\n", "\n</think>\n\n"
"""Marks to show around reasoning; servers leave them out."""


_SERVED = "default_model"
"""mlx_lm.server's name for the model that it serves, which its list may lack."""


@dataclass(frozen=True)
class RemoteToken:
    """One token of an answer; `source` is None for text without a token, and for the end."""

    text: str = ""
    source: Source | None = None
    reasoning: bool = False  # whether the text is only shown, and is not part of the conversation
    finish_reason: str | None = None
    generation_tokens: int = 0
    generation_tps: float = 0.0
    steps: int = 0
    tokens_per_step: float = 1.0
    usual_shape: BeamShape | None = None
    usual_nodes: float | None = None


@dataclass(frozen=True)
class RemoteSource:
    """The model that answers; `path` is the server's address, `dtype` is empty if not known."""

    name: str
    path: str
    dtype: str
    bits: int | None = None


@dataclass(frozen=True)
class RemoteModel:
    """A model as the server describes it."""

    source: RemoteSource
    drafting: str | None
    drafter_note: str | None = None


def connect(url: str, name: str | None, api_key: str | None) -> tuple[RemoteModel, Server]:
    """Return the named model of a server, or its only one, and a client for it.

    Raises BadInputError for an invalid URL, ServerError if the model is missing or still loading.
    """
    server = Server(url.rstrip("/"), name, api_key)
    if not urlsplit(server.url).path:
        server = replace(server, url=f"{server.url}/v1")
    entries: dict[Any, dict[str, Any]] = {entry["id"]: entry for entry in server.models()}
    if not entries:
        raise ServerError(f"{server.url} has no model; start it with one")
    ours = any(entry.get("x_redrafter") for entry in entries.values())
    if name is None and len(entries) > 1 and not ours:  # others list what they could load
        raise ServerError(f"name a model of {server.url} with --model: {', '.join(entries)}")
    name = next(iter(entries)) if name is None else name
    if name not in entries and name != _SERVED:
        raise ServerError(f"{server.url} has no model {name!r}; it has: {', '.join(entries)}")
    found = entries.get(name, {}).get("x_redrafter")
    facts: dict[str, Any] = found if isinstance(found, dict) else {}
    if facts.get("state") == "loading" and facts.get("dtype") is None:
        raise ServerError(f"{server.url} is still loading {name}; try again soon")
    source = RemoteSource(name, server.url, facts.get("dtype") or "")
    return RemoteModel(source, facts.get("drafting")), replace(server, model=name)


class RemoteSession:
    """A conversation whose turns are kept here and all sent with each request.

    A turn is added to the conversation under the same conditions as in `Session`.
    """

    ends_between_tokens = False

    def __init__(self, server: Server, system: str | None) -> None:
        self._server = server
        self.system = system
        self.messages: list[dict[str, str]] = []

    def clear(self) -> None:
        """Remove all turns; the system message stays."""
        self.messages = []

    def stream(
        self,
        text: str,
        *,
        options: GenerationOptions,
        on_prefill: Callable[[int, int], None] | None = None,
    ) -> Generator[RemoteToken, None, None]:
        """Stream the next turn; raises BadInputError for options that a request cannot carry.

        on_prefill: called with the prompt tokens read so far and in total, if the server reports
        them
        """
        asked = {"role": "user", "content": text}
        system = [] if self.system is None else [{"role": "system", "content": self.system}]
        messages = [*system, *self.messages, asked]
        return self._turn(asked, {**_fields(options), "messages": messages}, on_prefill)

    def _turn(
        self,
        asked: dict[str, str],
        request: dict[str, Any],
        on_prefill: Callable[[int, int], None] | None,
    ) -> Generator[RemoteToken, None, None]:
        turns, answer, ended = self.messages, "", False
        last, thinking = RemoteToken(), False
        with contextlib.closing(self._server.stream(request)) as chunks:
            try:
                for chunk in chunks:
                    try:
                        prefill = _own(chunk).get("prefill")
                        read = prefill and (int(prefill["read"]), int(prefill["total"]))
                        tokens = [*_tokens(chunk, last)]
                    except (LookupError, TypeError, ValueError, AttributeError) as error:
                        raise ServerError(
                            f"{self._server.url} did not answer as OpenAI's API does: {error!r:.99}"
                        ) from error
                    if read and on_prefill is not None:
                        on_prefill(*read)
                    for token in tokens:
                        answer, last = answer + token.text * (not token.reasoning), token
                        ended = token.finish_reason is not None
                        mark = ""
                        if token.text and token.reasoning != thinking:
                            thinking = token.reasoning
                            mark = _BEGUN if thinking else _ENDED
                        yield replace(token, text=mark + token.text)
            finally:
                if ended or answer:
                    turns += [asked, {"role": "assistant", "content": answer}]


def _fields(options: GenerationOptions) -> dict[str, Any]:
    """Return the fields of a request; raises BadInputError for options that it cannot carry."""
    sent = {name: getattr(options, name) for name in _SENT}
    sent |= {"stop": list(options.stop), "x_redrafter": {"draft": options.draft}}
    if options.seed is not None:
        sent["seed"] = options.seed
    if options.thinking is not None:
        sent["chat_template_kwargs"] = {"enable_thinking": options.thinking}
    if options.repetition_penalty != 1:
        sent["repeat_penalty"] = options.repetition_penalty  # llama-server's name
    for field in fields(options):
        value = getattr(options, field.name)
        if field.name not in (*sent, "seed", "draft", "thinking") and value != field.default:
            raise BadInputError(
                f"{field.name} is {value}, which a request to a server cannot carry; leave it out"
            )
    return sent


def _own(chunk: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of a chunk that only our server sends."""
    own: dict[str, Any] = chunk.get("x_redrafter") or {}
    return own


def _valid(text: object) -> str:
    """Return a text of a server, with replacements for halves of surrogate pairs."""
    if not isinstance(text, str):
        raise TypeError(f"a text is {text!r:.40}")
    return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")


def _tokens(chunk: Mapping[str, Any], last: RemoteToken) -> Iterator[RemoteToken]:
    """Yield one step's tokens, whose texts together are the chunk's, and the end of an answer."""
    for choice in chunk.get("choices") or ():
        delta, step = choice.get("delta") or {}, _own(chunk)
        reasoning = delta.get("reasoning_content") or delta.get("reasoning")
        text, tokens = _valid(reasoning or delta.get("content") or ""), step.get("tokens", ())
        texts = [_valid(token["text"]) for token in tokens]
        if "".join(texts) != text:  # the server holds text back, or sends what it held
            texts = ["" for _ in texts[1:]] + [text]
        if text and not tokens:
            last = replace(last, text=text, source=None, reasoning=bool(reasoning))
            yield last
        for token, part in zip(tokens, texts, strict=False):
            last = RemoteToken(
                text=part,
                source=token["source"],
                reasoning=bool(reasoning),
                generation_tokens=last.generation_tokens + 1,
                generation_tps=step.get("tokens_per_second", 0.0),
                steps=step.get("step", 0),
                tokens_per_step=step.get("tokens_per_step", 1.0),
            )
            yield last
        if choice.get("finish_reason"):
            yield replace(last, text="", source=None, finish_reason=choice["finish_reason"])
