"""How far recurrent states are from those of mlx-lm's own loop; run manually, a table of it.

    python tests/support/by_hand/states.py [NAME ...] [--tokens 2000] [--plot FILE]

For each architecture (of `hybrids.py`) its distance after drafted decoding with trees, at eight
lengths of one text, and as a measure mlx-lm's own distance between a text that is read as a prompt
and token by token. A distance is the largest difference of two entries, in shares of the largest
entry of a state, in float32.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import support_path  # noqa: F401
from decoding import PROMPT, run
from hybrids import HYBRIDS, ONE_OF_EACH, hybrid_model
from mlx_lm.models.cache import make_prompt_cache
from tiny import VOCAB, plain_tokens

from redrafter_mlx.config import BeamShape, SamplingParams
from redrafter_mlx.decoding.step import Decoder
from redrafter_mlx.drafting.oracle import Oracle
from redrafter_mlx.target_model.cache.kv_cache import TreeCache
from redrafter_mlx.target_model.model import Target


class Distance(NamedTuple):
    """Distances from the states of mlx-lm's loop after `tokens` tokens."""

    tokens: int
    drafted: float
    as_prompt: float


def states_of(model: nn.Module, text: list[int], calls: int = 1) -> list[np.ndarray]:
    """Return the recurrent states of mlx-lm's cache after a text; the last tokens one by one."""
    cache = make_prompt_cache(model)
    model(mx.array([text[: len(text) - calls + 1]]), cache=cache)
    for token in text[len(text) - calls + 1 :]:
        model(mx.array([[token]]), cache=cache)
    parts = [part for c in cache for part in getattr(c, "caches", (c,))]
    return [np.array(a) for part in parts for a in getattr(part, "cache", ())]


def states_in(cache: TreeCache, row: int) -> list[np.ndarray]:
    """Return the recurrent states of a row of a batch."""
    return [np.array(a[row : row + 1]) for layer in cache.recurrent for a in layer.states]


def distance(got: list[np.ndarray], want: list[np.ndarray]) -> float:
    """Return the largest difference of two lists, in shares of each state's largest entry."""
    assert len(got) == len(want) > 0
    return max(float(np.abs(a - b).max() / np.abs(b).max()) for a, b in zip(got, want, strict=True))


def distances(name: str, lengths: Sequence[int], shape: BeamShape) -> Iterator[Distance]:
    """Decode with drafts that are right in some branch; the tokens must be those of the loop."""
    model = hybrid_model(name)
    text, target = PROMPT + plain_tokens(model, PROMPT, max(lengths) + 20), Target(model)
    for n in lengths:
        decoder = Decoder(target, Oracle(text, VOCAB), shape, SamplingParams())
        cache = decoder.new_cache()
        emitted, results = run(decoder, PROMPT, n, cache=cache)
        assert emitted == text[len(PROMPT) : len(PROMPT) + n]
        cache.target.flush()
        committed = len(PROMPT) - 1 + sum(len(result.tokens) for result in results)
        want = states_of(model, text[:committed], calls=committed - len(PROMPT) + 1)
        as_prompt = distance(states_of(model, text[:committed]), want)
        yield Distance(n, distance(states_in(cache.target, 0), want), as_prompt)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("names", nargs="*", choices=[*HYBRIDS, []], metavar="NAME")
    parser.add_argument("--tokens", type=int, default=2000)
    parser.add_argument("--plot", type=Path)
    given = parser.parse_args()
    lengths = [given.tokens * i // 8 for i in range(1, 9)]
    print("| |", " | ".join(f"{n:,}" for n in lengths), "| as a prompt |")
    print("|---" * 10 + "|")
    lines: dict[str, list[Distance]] = {}
    for name in given.names or ONE_OF_EACH:
        lines[name] = [*distances(name, lengths, BeamShape(3, 4))]
        shown = " | ".join(f"{one.drafted:.0e}" for one in lines[name])
        print(f"| {name} | {shown} | {max(one.as_prompt for one in lines[name]):.0e} |", flush=True)
    if given.plot is not None:
        plot(lines, given.plot)


def plot(lines: dict[str, list[Distance]], path: Path) -> None:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 5), layout="tight")
    axes = figure.subplots()
    for name, line in lines.items():
        axes.semilogy([one.tokens for one in line], [one.drafted for one in line], label=name)
    axes.set(xlabel="tokens", ylabel="distance of the states from mlx-lm's", ylim=(1e-8, 1e-3))
    axes.legend()
    figure.savefig(path)


if __name__ == "__main__":
    main()
