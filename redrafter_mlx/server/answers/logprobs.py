"""Tokens and their log-probabilities in OpenAI's form, as several of its endpoints report them."""

from __future__ import annotations

from redrafter_mlx.server.answers.answering import Emitted, TokenLogprob
from redrafter_mlx.server.answers.sse import Json
from redrafter_mlx.server.hosting import Hosted


def token_text(hosted: Hosted, token: int) -> str:
    return hosted.model.token_text.of([token])


def token_bytes(hosted: Hosted, token: int, text: str) -> bytes | None:
    """Return the bytes of a token with this text; None if they cannot be known."""
    if "\N{REPLACEMENT CHARACTER}" not in text:
        return text.encode()
    return hosted.grammars.bytes_of(token)  # it is part of a character


def entries(hosted: Hosted, emitted: Emitted) -> list[Json]:
    """Return an entry for each token that a step emitted; none if none were requested."""
    if emitted.logprobs is None:
        return []
    pairs = zip(emitted.responses, emitted.logprobs, strict=True)
    return [_entry(hosted, response.token, read) for response, read in pairs]


def _entry(hosted: Hosted, token: int, read: TokenLogprob) -> Json:
    likeliest = [_token(hosted, other, value) for other, value in read.likeliest]
    return {**_token(hosted, token, read.value), "top_logprobs": likeliest}


def _token(hosted: Hosted, token: int, value: float) -> Json:
    text = token_text(hosted, token)
    raw = token_bytes(hosted, token, text)
    return {"token": text, "logprob": value, "bytes": None if raw is None else list(raw)}
