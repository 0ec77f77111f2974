"""The server's process, which ends soon after Ctrl-C even while it is busy."""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import Callable

import uvicorn
from uvicorn.logging import DefaultFormatter

from redrafter_mlx.server.tasks import Ending

FINISH_SECONDS, END_SECONDS = 3, 1
"""Seconds in which answers may finish, and then end with an error that their clients can read."""


def log_formatter(printable: Callable[[str], str]) -> logging.Formatter:
    """Return uvicorn's formatter for messages that may quote what a client or a file says."""

    class Printable(DefaultFormatter):
        def formatMessage(self, record: logging.LogRecord) -> str:  # noqa: N802
            record.message = printable(record.message)
            return super().formatMessage(record)

    return Printable("%(levelprefix)s %(message)s")


class Server(uvicorn.Server):
    """uvicorn's server, which asks answers to end before it cuts their connections."""

    def __init__(self, config: uvicorn.Config, ending: Ending) -> None:
        super().__init__(config)
        self.config.timeout_graceful_shutdown = FINISH_SECONDS + END_SECONDS
        self._ending = ending

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        timer = asyncio.get_running_loop().call_later(FINISH_SECONDS, self._ending.begin)
        try:
            await super().shutdown(sockets)
            if self.force_exit:  # a second Ctrl-C, after which uvicorn leaves this out
                await self.lifespan.shutdown()
        finally:
            timer.cancel()
