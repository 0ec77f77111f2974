"""mlx-lm's own batched decoding, run by several ranks on the tokens that rank 0 chooses."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import closing
from dataclasses import dataclass

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.generate import BatchGenerator
from mlx_lm.sample_utils import make_sampler

from redrafter_mlx.distributed.group import Ranks


@dataclass(frozen=True)
class PlainBatch:
    """Prompts that are answered in one batch, each with its maximum number of tokens."""

    prompts: list[list[int]]
    max_tokens: list[int]
    stop_tokens: list[int]
    temperature: float

    def run(
        self, model: nn.Module, stream: mx.Stream | mx.ThreadLocalStream, ranks: Ranks | None = None
    ) -> Generator[tuple[int, int], None, mx.array]:
        """Yield (prompt index, token) pairs; return the array that is computed last."""
        choose = make_sampler(temp=self.temperature)
        last = mx.zeros(())

        def choose_as_rank_0(logprobs: mx.array) -> mx.array:
            nonlocal last
            last = choose(logprobs)
            if ranks is not None:
                last = ranks.broadcast(last * int(ranks.leads))
            return last

        generator = BatchGenerator(
            model,
            stop_tokens=[[token] for token in self.stop_tokens],
            sampler=choose_as_rank_0,
            completion_batch_size=len(self.prompts),
            prefill_batch_size=len(self.prompts),
            stream=stream,
        )
        with closing(generator):
            numbers = generator.insert(self.prompts, self.max_tokens)
            rows = {number: row for row, number in enumerate(numbers)}
            while responses := generator.next_generated():
                for response in responses:
                    yield rows[response.uid], int(response.token)
        return last
