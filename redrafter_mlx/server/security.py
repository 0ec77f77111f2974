"""Access control: Host and Origin headers, the API key, and what the page at / may load."""

from __future__ import annotations

import base64
import hashlib
import ipaddress
import re
import secrets

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from redrafter_mlx.server.api_error import ApiError
from redrafter_mlx.server.error_response import error_response
from redrafter_mlx.server.options import ServerOptions

_OPEN = ("/", "/health")
"""Paths that need no key: they reveal nothing, and supervisors and browsers send none."""

_LOCAL_DOMAINS = (".internal", ".localhost")
"""Reserved names, which no site on the Internet has, such as Docker's host.docker.internal."""

_INLINE = re.compile(r"<(script|style)>(.*?)</\1>", re.DOTALL)


class Guard:
    """ASGI middleware that refuses requests not meant for this server.

    - If the server is for this machine only, a Host header must be an address, this machine's
      name, or a reserved or an allowed name. This refuses a page of another site whose name was
      pointed at 127.0.0.1 (DNS rebinding); an address cannot be pointed elsewhere. Browsers always
      send the header; a probe may leave it out.
    - A browser's Origin header must be this server's own or an allowed one. Otherwise a page of
      another site could send a request, even without reading the answer.
    - With a key, everything except / and /health needs it.
    """

    def __init__(self, app: ASGIApp, options: ServerOptions) -> None:
        self._app = app
        self._hosts = None
        if options.this_machine_only:
            self._hosts = {"localhost", *(name.lower() for name in options.allow_host)}
        self._origins = options.cors_origin
        self._key = None if options.api_key is None else options.api_key.encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or (refusal := self._refusal(scope)) is None:
            await self._app(scope, receive, send)
        else:
            await error_response(scope, refusal)(scope, receive, send)

    def _refusal(self, scope: Scope) -> ApiError | None:
        headers = Headers(scope=scope)
        host = headers.get("host", "").lower()
        if "host" in headers and not self._knows(re.sub(r":\d+$", "", host).rstrip(".")):
            return ApiError(
                403,
                f"the Host header is {host!r:.80}; ask this server as localhost, or start it with "
                f"--allow-host",
            )
        origin = headers.get("origin")
        if origin is not None and not self._allows(origin, host):
            return ApiError(
                403, f"web pages from {origin!r:.80} may not ask; --cors-origin allows an origin"
            )
        if self._key is None or scope["path"] in _OPEN or scope["method"] == "OPTIONS":
            return None
        scheme, _, given = headers.get("authorization", "").partition(" ")
        keys = [headers.get("x-api-key", ""), given if scheme.lower() == "bearer" else ""]
        if any(secrets.compare_digest(key.encode(), self._key) for key in keys):
            return None
        return ApiError(
            401,
            "the API key is missing or wrong; send it as `Authorization: Bearer KEY`, or as "
            "`x-api-key: KEY`",
            code="invalid_api_key",
            headers={"WWW-Authenticate": "Bearer"},
        )

    def _knows(self, name: str) -> bool:
        return (
            self._hosts is None
            or name in self._hosts
            or name.endswith(_LOCAL_DOMAINS)
            or _is_address(name)
        )

    def _allows(self, origin: str, host: str) -> bool:
        own = origin.lower() in (f"http://{host}", f"https://{host}")
        return own or "*" in self._origins or origin in self._origins


def _is_address(name: str) -> bool:
    try:
        ipaddress.ip_address(name[1:-1] if name[:1] == "[" and name[-1:] == "]" else name)
    except ValueError:
        return False
    return True


def content_security_policy(page: str) -> str:
    """Return the header that limits a page to this server and to the page's own inline code."""
    sources = {"script": ["'self'"], "style": ["'self'"]}
    for kind, text in _INLINE.findall(page):
        digest = base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
        sources[kind].append(f"'sha256-{digest}'")
    parts = [f"{kind}-src {' '.join(found)}" for kind, found in sources.items()]
    fixed = (
        "default-src 'self'",
        "base-uri 'none'",
        "form-action 'none'",
        "frame-ancestors 'none'",
        "img-src data:",  # the page's empty icon
        "require-trusted-types-for 'script'",  # the page's code cannot turn text into HTML
    )
    return "; ".join([*fixed, *parts])
