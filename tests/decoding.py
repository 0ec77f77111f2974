"""Decode one sequence up to a number of tokens."""

from __future__ import annotations

from constraints import Rules
from policies import decode_with

from redrafter_mlx.decoding.batch import decode
from redrafter_mlx.decoding.loop import Decoder
from redrafter_mlx.decoding.row import BatchShapes
from redrafter_mlx.decoding.sequence_cache import SequenceCache
from redrafter_mlx.decoding.step_result import StepResult
from redrafter_mlx.speculation.sampling import sequence_keys


def run(
    decoder: Decoder,
    prompt: list[int],
    n: int,
    seed: int = 0,
    *,
    shapes: BatchShapes | None = None,
    rules: Rules | None = None,
    cache: SequenceCache | None = None,
) -> tuple[list[int], list[StepResult]]:
    """Return the first `n` tokens, and the results of all steps.

    shapes: a policy that chooses the shape of each step, in place of the decoder's shape
    rules:  a constraint on the text, without a policy
    cache:  in which the text is decoded, a new one by default
    """
    emitted: list[int] = []

    def finished(result: StepResult) -> bool:
        emitted.extend(result.tokens)
        if rules is not None:
            for token in result.tokens:
                rules.advance(token)
        return len(emitted) >= n

    cache = cache or decoder.new_cache()
    if shapes is None:
        steps = decode(decoder, cache, 0, prompt, sequence_keys(seed), finished, rules)
    else:
        assert rules is None
        steps = decode_with(shapes, decoder, cache, prompt, finished, seed)
    results = list(steps)
    return emitted[:n], results
