"""Options of the server, checked before anything is loaded."""

from __future__ import annotations

import ipaddress
import re
from dataclasses import dataclass
from typing import Literal

from redrafter_mlx.checks import check_choice, check_int, check_number
from redrafter_mlx.errors import BadInputError

LogLevel = Literal["debug", "info", "warning", "error"]

_HOST = re.compile(r"[^\s/:\[\]]+|\[[^\s/\[\]]+\]|[0-9a-fA-F]*:[0-9a-fA-F:.]*:[0-9a-fA-F:.]*")
"""A host's name or address, an IPv6 address with brackets or without."""

_ORIGIN = re.compile(r"[a-z][a-z0-9+.-]*://[^\s/A-Z]+")


@dataclass(frozen=True)
class ServerOptions:
    """Where the server listens, who may send requests, and how many it accepts.

    host, port:      port 0 picks any free port
    api_key:         bearer token that clients must send; required to listen beyond this machine
    allow_host:      further names of this server that requests may have in their Host header,
                     without a port
    cors_origin:     allowed origins of web pages, such as "http://localhost:3000"; "*" allows all
    max_concurrency: maximum number of answers that are generated at once
    max_queue:       maximum number of answers that wait; further requests are refused
    max_body:        maximum size of a request in megabytes
    keep_alive:      seconds that an idle connection stays open
    unload_after:    seconds without a request until a model leaves memory; None keeps it
    load_on_demand:  whether requests may name any model that is on this machine
    cache_dir, cache_bytes: where prompts that were read stay after the server has ended, and the
                     limit of that folder; as in EngineOptions
    """

    host: str = "127.0.0.1"
    port: int = 8080
    api_key: str | None = None
    allow_host: tuple[str, ...] = ()
    cors_origin: tuple[str, ...] = ()
    max_concurrency: int = 8
    max_queue: int = 32
    max_body: int = 16
    keep_alive: int = 30
    unload_after: float | None = None
    load_on_demand: bool = False
    cache_dir: str | None = None
    cache_bytes: int | None = None
    log_level: LogLevel = "info"

    def __post_init__(self) -> None:
        check_int("port", self.port, 0, 65535)
        check_int("max_concurrency", self.max_concurrency, 1, 256)
        check_int("max_queue", self.max_queue, 0, None)
        check_int("max_body", self.max_body, 1, None)
        check_int("keep_alive", self.keep_alive, 0, None)
        check_choice("log_level", self.log_level, LogLevel)
        if self.unload_after is not None:
            check_number("unload_after", self.unload_after, low=0.0, low_excluded=True)
        for name in self.allow_host:
            if not _HOST.fullmatch(name):
                raise BadInputError(
                    f"allow_host is {name!r}; give a name or an address alone, without a port"
                )
        for origin in self.cors_origin:
            if origin not in ("*", "null") and not _ORIGIN.fullmatch(origin):
                raise BadInputError(
                    f"cors_origin is {origin!r}; give it as browsers send it, such as "
                    f"http://localhost:3000, in small letters and without a path or a final slash"
                )
        if self.api_key is not None and not (self.api_key.isascii() and self.api_key.strip()):
            raise BadInputError("api_key is empty or not ASCII; give another one")
        if self.api_key is not None and self.api_key != self.api_key.strip():
            raise BadInputError(
                "api_key begins or ends with white space, which HTTP drops; give it without"
            )
        if self.api_key is None and not self.this_machine_only:
            raise BadInputError(
                f"host is {self.host}, which other machines can reach; give an api_key "
                f"(--api-key), or listen on 127.0.0.1"
            )

    @property
    def this_machine_only(self) -> bool:
        """Whether no other machine can connect."""
        try:
            return ipaddress.ip_address(self.host).is_loopback
        except ValueError:
            return self.host == "localhost"
