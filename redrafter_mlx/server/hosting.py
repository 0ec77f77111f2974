"""A model of the server: it is loaded, unloaded, and loaded again on request."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Literal

import mlx.core as mx

from redrafter_mlx.engine.engine import Redrafter
from redrafter_mlx.errors import UnsupportedModelError
from redrafter_mlx.server.api_error import LOG, busy
from redrafter_mlx.server.tasks import in_daemon_thread
from redrafter_mlx.structured.grammar import Grammars

_RETRY_SECONDS = 2


MoreRoom = Callable[[], Awaitable[bool]]


@dataclass(frozen=True)
class Hosted:
    """A model in memory, its name in requests, and the compiler of grammars for its tokenizer."""

    name: str
    model: Redrafter
    grammars: Grammars
    more_room: MoreRoom  # unloads another model for an answer; False if that frees nothing


class ModelHost:
    """One model under its name in requests.

    loaded:    None while the model is not in memory
    starting:  whether it is loaded at the start of the server, which has not finished yet
    failed:    whether that first loading failed, and none has succeeded since
    in_thread: whether a thread is loading it, which goes on if nobody waits any more
    used:      when the last request ended, by the event loop's clock
    room:      context in which it is loaded, which makes room for it
    more_room: as in `Hosted`
    unloads:   lets one model be unloaded at a time
    """

    def __init__(
        self,
        name: str,
        load: Callable[[], Redrafter],
        *,
        unload_after: float | None = None,
        nbytes: Callable[[], int] = lambda: 0,
        starting: bool = True,
    ) -> None:
        """`load` and `nbytes` are called in other threads.

        load:   at the start, when the model is asked for, and after each unloading
        nbytes: memory that it will take, as far as its files tell
        """
        self.name, self.nbytes, self.starting = name, nbytes, starting
        self._load = load
        self._unload_after = unload_after
        self.loaded: Hosted | None = None
        self._facts: dict[str, object] = {"drafting": None, "dtype": None}
        self._context_length: int | None = None
        self.failed = False
        self.in_thread = False
        self.used = 0.0
        self.room: Callable[[], AbstractAsyncContextManager[None]] = contextlib.nullcontext
        self.more_room: MoreRoom = _no_more_room
        self.unloads = threading.Lock()
        self._created = int(time.time())
        self._loading: asyncio.Task[Hosted] | None = None
        self._users = 0
        self._unused, self._stays = asyncio.Event(), asyncio.Event()
        self._unused.set()
        self._stays.set()
        self._idle: asyncio.TimerHandle | None = None
        self._unloading: asyncio.Task[None] | None = None

    @property
    def state(self) -> Literal["loaded", "loading", "available"]:
        if self.loaded is not None:
            return "loaded"
        return "loading" if self.starting or self._loading is not None else "available"

    @property
    def entry(self) -> dict[str, object]:
        """The model's entry in /v1/models; known facts stay in it while the model is unloaded.

        It has OpenAI's fields and Anthropic's.
        """
        own = {**self._facts, "loaded": self.loaded is not None, "state": self.state}
        return {
            "id": self.name,
            "object": "model",
            "created": self._created,
            "type": "model",
            "display_name": self.name,
            "created_at": datetime.fromtimestamp(self._created, UTC).isoformat(),
            "owned_by": "redrafter-mlx",
            "max_model_len": self._context_length,
            "x_redrafter": own,
        }

    @property
    def in_use(self) -> bool:
        """Whether requests have it, or wait for it to be loaded."""
        return self._users > 0

    def stalled(self, seconds: float) -> bool:
        """Whether there is work, without any progress for `seconds`."""
        if self.loaded is None:
            return False
        status = self.loaded.model.status
        waits = status.running + status.waiting > 0
        return waits and time.monotonic() - status.last_progress > seconds

    async def start(self) -> None:
        """Load the model for the first time; if that fails, the next request tries again."""
        try:
            await self._get()
        except Exception as error:  # cancelled, its thread still loads
            self.starting, self.failed = False, True
            LOG.error("%s cannot be loaded: %s", self.name, error)
            raise
        LOG.info("%s is ready", self.name)
        self.starting = False
        self._plan_unloading()

    @contextlib.asynccontextmanager
    async def held(self) -> AsyncIterator[Hosted]:
        """Yield the model, loaded again if it was unloaded, and keep it in memory meanwhile.

        Raises ApiError while the model is loaded for the first time, and any error of loading it.
        """
        if self.starting:
            raise busy(f"{self.name} is being loaded; ask again soon", _RETRY_SECONDS)
        while not self._stays.is_set():
            await self._stays.wait()
        self._users += 1
        self._unused.clear()
        try:
            yield await self._get()
        finally:
            self._users -= 1
            self.used = asyncio.get_running_loop().time()
            if not self._users:
                self._unused.set()
            self._plan_unloading()

    async def unload(self) -> None:
        """Unload the model once its requests have ended; later ones wait, and load it again."""
        self._stays.clear()
        try:
            await self._unused.wait()
            LOG.info("%s is unloaded; the next request loads it again", self.name)
            await asyncio.to_thread(self._unload)
        finally:
            self._stays.set()

    def close(self) -> None:
        """Unload the model, even while it is in use."""
        if self._idle is not None:
            self._idle.cancel()
        if self._loading is not None:
            self._loading.cancel()
        self._unload()

    async def _get(self) -> Hosted:
        if self.loaded is not None:
            return self.loaded
        if self._loading is None:
            self._loading = asyncio.create_task(self._bring_in())
        # All waiting requests share one loading, which continues if one of them is cancelled.
        return await asyncio.shield(self._loading)

    async def _bring_in(self) -> Hosted:
        try:
            async with self.room():
                self.loaded = await in_daemon_thread(self._load_in_thread)
        finally:
            self._loading = None
        self.failed = False
        model = self.loaded.model
        self._context_length = model.context_length
        dtype = None if model.source is None else model.source.dtype
        self._facts = {"drafting": model.drafting, "dtype": dtype}
        return self.loaded

    def _load_in_thread(self) -> Hosted:
        self.in_thread = True
        try:
            model = self._load()
            grammars = Grammars(model.tokenizer, model.target.vocab_size)
            if self.starting:  # later, no request waits for what it may not need
                _prepare(grammars)
            return Hosted(self.name, model, grammars, self.more_room)
        finally:
            self.in_thread = False
            mx.clear_streams()  # a thread that ends and still has streams may abort the process

    def _plan_unloading(self) -> None:
        if self._idle is not None:
            self._idle.cancel()
        if self._unload_after is not None and not self._users:
            loop = asyncio.get_running_loop()
            self._idle = loop.call_later(self._unload_after, self._unload_idle)

    def _unload_idle(self) -> None:
        if not self._users and self._stays.is_set() and self.loaded is not None:
            self._unloading = asyncio.create_task(self.unload())

    def _unload(self) -> None:
        # MLX locks up if the collector drops compiled functions while their thread ends.
        with self.unloads:
            loaded, self.loaded = self.loaded, None
            if loaded is not None:
                loaded.model.close()
                del loaded
                gc.collect()
                mx.clear_cache()


async def _no_more_room() -> bool:
    return False


def _prepare(grammars: Grammars) -> None:
    """Prepare for structured answers before any request: no other thread runs meanwhile."""
    try:
        grammars.check()
    except UnsupportedModelError as error:
        LOG.warning("%s", error)
