"""The server's process, which ends soon after Ctrl-C even while it is busy."""

from __future__ import annotations

import asyncio
import socket

import uvicorn

from redrafter_mlx.server.tasks import Ending

_FINISH, _END = 3, 1
"""Seconds in which answers may finish, and then end with an error that their clients can read."""


class Server(uvicorn.Server):
    """uvicorn's server, which asks answers to end before it cuts their connections."""

    def __init__(self, config: uvicorn.Config, ending: Ending) -> None:
        super().__init__(config)
        self.config.timeout_graceful_shutdown = _FINISH + _END
        self._ending = ending

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        timer = asyncio.get_running_loop().call_later(_FINISH, self._ending.begin)
        try:
            await super().shutdown(sockets)
        finally:
            timer.cancel()
