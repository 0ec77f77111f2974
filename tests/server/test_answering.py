"""Answers in asyncio, without a server."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import nullcontext
from typing import cast

from redrafter_mlx.config import GenerationOptions
from redrafter_mlx.engine.engine import Redrafter
from redrafter_mlx.engine.request import Request
from redrafter_mlx.response import Response
from redrafter_mlx.server.answers.answering import Emitted, generate


class Reads:
    """A model that reads one prompt, and ends with the loop of the one who asked."""

    request: Request

    async def arespond(self, request: Request) -> AsyncGenerator[Response, None]:
        self.request = request
        await asyncio.sleep(0)
        return
        yield


async def unread(_: Emitted) -> None:
    pass


def test_progress_of_a_prompt_that_comes_after_its_loop_was_closed_is_dropped() -> None:
    """It is told in the engine's thread, whose other answers an error would end."""
    model, told = Reads(), list[int]()

    async def reading(_: int, read: int, total: int) -> None:
        told.append(total - read)

    async def ask() -> None:
        request = Request((7, 8), GenerationOptions(max_tokens=1))
        await generate(cast(Redrafter, model), [request], 0, nullcontext, unread, reading)

    asyncio.run(ask())
    assert model.request.on_prefill is not None
    model.request.on_prefill(1, 2)
    assert told == []
