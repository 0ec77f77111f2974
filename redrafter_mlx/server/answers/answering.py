"""Generate one request's answers together, step by step, independently of any API."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np

from redrafter_mlx.engine.engine import Redrafter
from redrafter_mlx.engine.request import Request
from redrafter_mlx.errors import BusyError
from redrafter_mlx.response import Response
from redrafter_mlx.server.admission import Turn
from redrafter_mlx.server.tasks import race, together


@dataclass(frozen=True)
class TokenLogprob:
    """Log-probabilities of a token and of the likeliest tokens, best first."""

    value: float
    likeliest: tuple[tuple[int, float], ...]


@dataclass(frozen=True)
class Emitted:
    """What one call of the target emitted for one answer.

    drafted, accepted: number of draft tokens that the call verified, and of those emitted, fewer
      than the call accepted if the answer ends among them
    """

    answer: int  # its index among the request's answers
    responses: Sequence[Response]  # one per token, at least one
    logprobs: Sequence[TokenLogprob] | None = None  # one per token, if requested

    @property
    def last(self) -> Response:
        return self.responses[-1]

    @property
    def by_token(self) -> Iterator[Emitted]:
        """The same, token by token; only for what is counted by token."""
        for i, response in enumerate(self.responses):
            logprobs = None if self.logprobs is None else self.logprobs[i : i + 1]
            yield Emitted(self.answer, [response], logprobs)

    @property
    def text(self) -> str:
        return "".join(r.text for r in self.responses)

    @property
    def drafted(self) -> int:
        return self.last.step.nodes - 1

    @property
    def accepted(self) -> int:
        return sum(response.source != "model" for response in self.responses)


_MIN_LOGPROB = -9999.0  # reported for tokens of probability 0, as OpenAI does: JSON has no infinity

Deliver = Callable[[Emitted], Awaitable[None]]
Reading = Callable[[int, int, int], Awaitable[None]]
"""Takes an answer's index, and the numbers of its prompt tokens read so far and in total."""


async def generate(
    model: Redrafter,
    requests: Sequence[Request],
    alternatives: int,
    turn: Turn,
    deliver: Deliver,
    reading: Reading | None = None,
    more_room: Callable[[], Awaitable[bool]] | None = None,
) -> None:
    """Generate the answers to all requests, each in its turn, and deliver what each step emits.

    Only small records wait for a slow client: log-probabilities of the whole vocabulary are reduced
    as they come. Cancellation ends the answers at their next step. The first answer that fails ends
    the others.

    alternatives: number of likeliest tokens to report with each token that has log-probabilities
    reading:      called with the progress of prefill
    more_room:    called if an answer that has not begun finds too little memory; whether to try
    again
    """
    loop, chunks = asyncio.get_running_loop(), asyncio.Queue[tuple[int, int, int]]()

    async def run(number: int, request: Request) -> None:
        emitted = asyncio.Queue[Emitted | None]()
        await together(take(number, request, emitted), hand_on(emitted))

    async def hand_on(emitted: asyncio.Queue[Emitted | None]) -> None:
        while (step := await emitted.get()) is not None:
            await deliver(step)

    async def take(number: int, request: Request, emitted: asyncio.Queue[Emitted | None]) -> None:
        def on_prefill(read: int, total: int) -> None:
            with contextlib.suppress(RuntimeError):  # the loop is closed: others' answers go on
                loop.call_soon_threadsafe(chunks.put_nowait, (number, read, total))

        async with turn():
            request = replace(request, on_prefill=None if reading is None else on_prefill)
            async with contextlib.aclosing(respond(request)) as responses:
                step: list[Response] = []
                async for response in responses:
                    step.append(response)
                    whole = response.index + 1 == len(response.step.tokens)
                    if whole or response.finish_reason is not None:
                        logprobs = None
                        if request.options.logprobs:
                            logprobs = await asyncio.to_thread(_read, step, alternatives)
                            step = [  # without arrays of the whole vocabulary
                                replace(r, step=replace(r.step, log_probs=None)) for r in step
                            ]
                        emitted.put_nowait(Emitted(number, step, logprobs))
                        step = []
        emitted.put_nowait(None)

    async def respond(request: Request) -> AsyncGenerator[Response, None]:
        begun = False
        try:
            async with contextlib.aclosing(model.arespond(request)) as responses:
                async for response in responses:
                    begun = True
                    yield response
            return
        except BusyError:
            if begun or more_room is None or not await more_room():
                raise
        async with contextlib.aclosing(respond(request)) as responses:
            async for response in responses:
                yield response

    async def tell() -> None:
        while reading is not None:
            await reading(*await chunks.get())
        await asyncio.Event().wait()

    await race(together(*(run(*each) for each in enumerate(requests))), tell())


def _read(step: Sequence[Response], alternatives: int) -> list[TokenLogprob]:
    """Read the log-probabilities of a step's tokens from the device."""
    read = []
    for response in step:
        values = np.maximum(np.array(response.logprobs), _MIN_LOGPROB)  # [V]
        best = np.argpartition(-values, alternatives)[:alternatives]
        best = best[np.lexsort((best, -values[best]))]
        likeliest = tuple((int(token), float(values[token])) for token in best)
        read.append(TokenLogprob(float(values[response.token]), likeliest))
    return read
