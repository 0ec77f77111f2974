"""The server's model: it is loaded, unloaded when idle, and loaded again on request."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from datetime import UTC, datetime

import mlx.core as mx

from redrafter_mlx.engine.engine import Redrafter
from redrafter_mlx.errors import UnsupportedModelError
from redrafter_mlx.server.api_error import LOG, ApiError, busy
from redrafter_mlx.server.tasks import in_daemon_thread
from redrafter_mlx.structured.grammar import Grammars

_RETRY_SECONDS = 2

_DEFAULT_NAME = "default_model"
"""The name by which clients of mlx-lm's server ask for its model."""


@dataclass(frozen=True)
class Hosted:
    """A model in memory, its name in requests, and the compiler of grammars for its tokenizer."""

    name: str
    model: Redrafter
    grammars: Grammars


class ModelHost:
    """One model under its name in requests.

    loaded:   None while the model is not in memory
    starting: whether the first loading has not finished yet
    failed:   whether the first loading failed, and none has succeeded since
    in_thread: whether a thread is loading it, which goes on if nobody waits any more
    """

    def __init__(
        self, name: str, load: Callable[[], Redrafter], *, unload_after: float | None = None
    ) -> None:
        """`load` is called in a separate thread, at the start and after each unloading."""
        self.name = name
        self._load = load
        self._unload_after = unload_after
        self.loaded: Hosted | None = None
        self._facts: dict[str, object] = {"drafting": None, "dtype": None}
        self._context_length: int | None = None
        self.starting = True
        self.failed = False
        self.in_thread = False
        self._created = int(time.time())
        self._loading: asyncio.Task[Hosted] | None = None
        self._users = 0
        self._idle: asyncio.TimerHandle | None = None

    @property
    def entry(self) -> dict[str, object]:
        """The model's entry in /v1/models; known facts stay in it while the model is unloaded.

        It has OpenAI's fields and Anthropic's.
        """
        return {
            "id": self.name,
            "object": "model",
            "created": self._created,
            "type": "model",
            "display_name": self.name,
            "created_at": datetime.fromtimestamp(self._created, UTC).isoformat(),
            "owned_by": "redrafter-mlx",
            "max_model_len": self._context_length,
            "x_redrafter": {**self._facts, "loaded": self.loaded is not None},
        }

    def check_name(self, name: str | None) -> None:
        """Raise ApiError unless a request names this model, or none."""
        if name not in (None, _DEFAULT_NAME, self.name):
            raise ApiError(
                404,
                f"there is no model {name!r:.200}; there is: {self.name}",
                param="model",
                code="model_not_found",
            )

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
        except Exception:  # cancelled, its thread still loads
            self.starting, self.failed = False, True
            raise
        self.starting = False
        self._plan_unloading()

    @contextlib.asynccontextmanager
    async def held(self) -> AsyncIterator[Hosted]:
        """Yield the model, loaded again if it was unloaded, and keep it in memory meanwhile.

        Raises ApiError while the model is loaded for the first time.
        """
        if self.starting:
            raise busy(f"{self.name} is being loaded; ask again soon", _RETRY_SECONDS)
        self._users += 1
        try:
            yield await self._get()
        finally:
            self._users -= 1
            self._plan_unloading()

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
            return Hosted(self.name, model, grammars)
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
        if not self._users and self.loaded is not None:
            LOG.info("%s is unloaded; the next request loads it again", self.name)
            self._unload()

    def _unload(self) -> None:
        if self.loaded is None:
            return
        self.loaded.model.close()
        self.loaded = None
        gc.collect()
        mx.clear_cache()


def _prepare(grammars: Grammars) -> None:
    """Prepare for structured answers before any request: no other thread runs meanwhile."""
    try:
        grammars.check()
    except UnsupportedModelError as error:
        LOG.warning("%s", error)
