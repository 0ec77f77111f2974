"""The models of one server by their names in requests, and the memory that they share."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import AsyncIterator, Callable, Collection, Sequence
from functools import partial

import mlx.core as mx

from redrafter_mlx.engine.thread import EngineThread
from redrafter_mlx.errors import EngineFailedError, meant
from redrafter_mlx.runtime.device import ModelLock, memory_limit
from redrafter_mlx.server.api_error import LOG, ApiError
from redrafter_mlx.server.hosting import ModelHost

_DEFAULT_NAME = "default_model"  # the name by which clients of mlx-lm's server ask for its model

_LONGEST_NAME = 200
"""Characters of a wrong name that are compared with the known ones: a request may have millions."""

_LISTED_SECONDS = 5.0  # age at which the list of the models on disk is made again


class Models:
    """The models that a server was started with, and those that requests may name.

    default: the first one, which answers requests without a name
    hosts:   those that were named so far, or listed
    thread:  computes for all of them
    """

    def __init__(
        self,
        hosts: Sequence[ModelHost],
        *,
        on_disk: Callable[[], Collection[str]] | None = None,
        offer: Callable[[str], ModelHost] | None = None,
        thread: EngineThread | None = None,
        memory_bytes: int | None = None,
    ) -> None:
        """`hosts` are loaded at the start, as far as there is room; at least one.

        on_disk: returns the names of further models, which are loaded when asked for; None if
                 there are none. Called in another thread
        offer:   makes the host of one of them
        memory_bytes: limit of all that MLX holds; None is the machine's own
        """
        self.default, self.thread = hosts[0], thread or EngineThread()
        self._user, self._unloads = ModelLock(), threading.Lock()
        self.thread.enter(self._user)  # it ends with the server, whatever is unloaded
        self.hosts = {host.name: self._shared(host) for host in hosts}
        self._started = list(self.hosts)
        self._on_disk, self._offer = on_disk, offer
        self._limit = memory_limit() if memory_bytes is None else memory_bytes
        self._changing = asyncio.Lock()  # one model is loaded at a time
        self._listed, self._listed_at = list[str](), -_LISTED_SECONDS

    @property
    def in_thread(self) -> bool:
        return any(host.in_thread for host in self.hosts.values())

    def stalled(self, seconds: float) -> bool:
        return any(host.stalled(seconds) for host in self.hosts.values())

    async def start(self) -> None:
        """Load those that the server was started with, until there is no room for the next one."""
        hosts = [self.hosts[name] for name in self._started]
        try:
            for host in hosts:
                if host is self.default or self._fits(await asyncio.to_thread(host.nbytes)):
                    await host.start()
                else:
                    host.starting = False
                    LOG.info("%s does not fit beside the others; a request loads it", host.name)
        finally:
            for host in hosts:
                host.starting = False

    def close(self) -> None:
        """Unload all, even while they are in use."""
        for host in self.hosts.values():
            host.close()
        self.thread.leave(self._user, lambda: False)

    async def find(self, name: str | None) -> ModelHost:
        """Return the model that a request names; raises ApiError if there is none."""
        if name in (None, _DEFAULT_NAME):
            return self.default
        if name not in self._started:
            known = await self._names()
            if name not in known:
                there = meant(name[:_LONGEST_NAME], known)
                if not there.startswith("did"):
                    there = f"there is: {', '.join(self._started)}; GET /v1/models lists all"
                raise ApiError(
                    404,
                    f"there is no model {name!r:.200}; {there}",
                    param="model",
                    code="model_not_found",
                )
        return self.hosts[name]

    async def all(self) -> list[ModelHost]:
        """Return all that can be had, those that the server was started with first."""
        return [self.hosts[name] for name in await self._names()]

    async def _names(self) -> list[str]:
        """Return the names of all that can be had; each has a host then."""
        if self._on_disk is None or self._offer is None:
            return self._started
        now = asyncio.get_running_loop().time()
        if now - self._listed_at >= _LISTED_SECONDS:
            self._listed = [*await asyncio.to_thread(self._on_disk)]
            self._listed_at = now
        names = list(dict.fromkeys([*self._started, *self._listed]))
        for name in names:
            if name not in self.hosts:
                self.hosts[name] = self._shared(self._offer(name))
        return names

    def _shared(self, host: ModelHost) -> ModelHost:
        host.room, host.more_room = partial(self._room, host), partial(self._more_room, host)
        host.unloads = self._unloads
        return host

    @contextlib.asynccontextmanager
    async def _room(self, host: ModelHost) -> AsyncIterator[None]:
        """Context in which a model is loaded: others were unloaded as far as that needs.

        Requests that run are answered before their model is unloaded.
        """
        async with self._changing:
            needed = await asyncio.to_thread(host.nbytes)
            while (others := self._others(host)) and not await self._has_room(needed):
                await self._unload_one(others)
            self.thread.pool.reserved = needed
            try:
                yield
            finally:
                self.thread.pool.reserved = 0
            while (others := self._others(host)) and not await self._has_room(0):
                await self._unload_one(others)  # it takes more than its files told

    async def _more_room(self, host: ModelHost) -> bool:
        """Unload another model that nobody uses; False if there is none."""
        if self._changing.locked():  # whoever loads may wait for the caller's request to end
            return False
        async with self._changing:
            return await self._unload_one([h for h in self._others(host) if not h.in_use])

    async def _has_room(self, needed: int) -> bool:
        """Drop texts of the models in memory until `needed` bytes are free; False if too few."""
        if not self._fits(needed):
            return False
        pool = self.thread.pool

        def drop() -> bool:
            return self.thread.run(lambda: pool.make_room(needed, self._limit))

        if self.thread.alive:
            with contextlib.suppress(EngineFailedError):  # the last one has left meanwhile
                return await asyncio.to_thread(drop)
        return mx.get_active_memory() + needed <= self._limit

    def _fits(self, needed: int) -> bool:
        """Whether so many bytes fit beside what is in memory but for the texts that are kept."""
        pool = self.thread.pool
        used = mx.get_active_memory() + pool.host_bytes - pool.kept_bytes
        return used + needed <= self._limit

    def _others(self, host: ModelHost) -> list[ModelHost]:
        loaded = [other for other in self.hosts.values() if other.loaded is not None]
        return [other for other in loaded if other is not host]

    async def _unload_one(self, hosts: Sequence[ModelHost]) -> bool:
        """Unload the one that was used least recently; False if there is none."""
        if not hosts:
            return False
        await min(hosts, key=lambda host: (host.in_use, host.used)).unload()
        return True
