"""Connections that go through the environment's proxy, as those of urllib, curl and pip do.

`http_proxy`, `https_proxy` and `no_proxy` decide; on macOS the system's settings, if those are not
set. This machine itself is never asked through a proxy.
"""

from __future__ import annotations

from base64 import b64encode
from http.client import HTTPConnection, HTTPSConnection
from ipaddress import ip_address
from urllib.parse import SplitResult, unquote, urlsplit
from urllib.request import getproxies, proxy_bypass

from redrafter_mlx.errors import BadInputError

CONNECTIONS = {"http": HTTPConnection, "https": HTTPSConnection}


def connection_to(url: str, timeout: float) -> tuple[HTTPConnection, str, dict[str, str]]:
    """Return a connection, not open yet, and a request's target and headers for `url`."""
    parts, proxy = urlsplit(url), proxy_of(url)
    if proxy is None:
        return CONNECTIONS[parts.scheme](parts.netloc, timeout=timeout), parts.path, {}
    headers = {}
    if proxy.username is not None:
        user = f"{unquote(proxy.username)}:{unquote(proxy.password or '')}"
        headers["Proxy-Authorization"] = f"Basic {b64encode(user.encode()).decode()}"
    connection = CONNECTIONS[parts.scheme](proxy.hostname or "", proxy.port, timeout=timeout)
    if parts.scheme == "http":
        return connection, url, headers
    connection.set_tunnel(parts.hostname or "", parts.port or 443, headers)
    return connection, parts.path, {}


def proxy_of(url: str) -> SplitResult | None:
    """Return the proxy for a URL; raises BadInputError for one that does not speak HTTP."""
    parts = urlsplit(url)
    host, named = parts.hostname or "", getproxies().get(parts.scheme)
    if not named or _is_here(host) or proxy_bypass(parts.netloc):
        return None
    proxy = urlsplit(named if "://" in named else f"http://{named}")
    try:
        usable = proxy.scheme == "http" and proxy.hostname and proxy.port != 0
    except ValueError:  # a port that is no number
        usable = False
    if not usable:
        raise BadInputError(
            f"{parts.scheme}_proxy is not like http://HOST:PORT, and no other proxy is supported; "
            f"change it, or add {host} to no_proxy"
        )
    return proxy if proxy.port else proxy._replace(netloc=f"{proxy.netloc}:80")


def _is_here(host: str) -> bool:
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return host == "localhost" or host.endswith(".localhost")
