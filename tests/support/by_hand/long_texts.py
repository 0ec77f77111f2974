"""A long text beside mlx-lm's own call and caches: time and memory, with no drafts.

`python tests/support/by_hand/long_texts.py MODEL --tokens 6000` reads a made-up text by
both, a chunk by one and then by the other, takes as many steps, and prints a line of JSON for each
part. With `--begin` the keys and values of so many tokens before it are zeros, and not computed.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass

import mlx.core as mx
from mlx_lm.models.cache import RotatingKVCache, make_prompt_cache

from redrafter_mlx.decoding.state import Drafts
from redrafter_mlx.decoding.step import PREFILL_CHUNK
from redrafter_mlx.loading.target import load_target
from redrafter_mlx.target_model.model import Target


@dataclass
class Spent:
    """What one of the two has taken.

    seconds, cpu_seconds: of the clock, and of all cores
    cache: bytes of keys and values at the end
    work:  maximum number of bytes beside them and the weights
    """

    seconds: float = 0.0
    cpu_seconds: float = 0.0
    cache: int = 0
    work: int = 0

    def add(self, call: Callable[[], object]) -> None:
        """Call the function, which computes, and add what it takes."""
        mx.clear_cache()
        before = mx.get_active_memory()
        mx.reset_peak_memory()
        began, cpu = time.perf_counter(), time.process_time()
        call()
        self.seconds += time.perf_counter() - began
        self.cpu_seconds += time.process_time() - cpu
        self.work = max(self.work, mx.get_peak_memory() - before)


class Both:
    """A text that is read by a target and by mlx-lm's model."""

    def __init__(self, target: Target, begin: int) -> None:
        self._target, self._model = target, target.model
        self._ours, self._theirs = target.new_cache(), make_prompt_cache(target.model)
        self.length = begin
        self._root = mx.array([0])
        mx.eval(target.model.parameters(), target.model(mx.zeros((1, 64), mx.int32)))
        if begin:  # our buffers begin as zeros
            self._fill(begin)

    def _fill(self, begin: int) -> None:
        """Fill mlx-lm's caches with zeros, as if so many tokens had been read."""
        self._model(mx.array([[0]]), cache=self._theirs)
        for cache in self._theirs:
            ring = isinstance(cache, RotatingKVCache)
            slots = min(begin, cache.max_size) if ring else begin
            cache.keys, cache.values = (
                mx.zeros((*a.shape[:2], slots, a.shape[3]), a.dtype)
                for a in (cache.keys, cache.values)
            )
            cache.offset = begin
            if ring:
                cache._idx = slots
        mx.eval([cache.state for cache in self._theirs])

    def read(self, tokens: list[int], length: int, ours: Spent, theirs: Spent) -> None:
        """Read a chunk of a text of so many tokens."""
        chunk, at = mx.array([tokens]), self.length

        def by_us() -> None:
            self._target.append(chunk, self._ours, at, length)
            mx.eval(self._ours.buffers)

        def by_them() -> None:
            self._model(chunk, cache=self._theirs)
            mx.eval([cache.state for cache in self._theirs])

        ours.add(by_us)
        theirs.add(by_them)
        self.length += len(tokens)

    def step(self, ours: Spent, theirs: Spent) -> bool:
        """Generate a token by each; return whether they agree."""
        root, length, found = self._root, mx.array([self.length]), list[mx.array]()

        def by_us() -> None:
            tree = Drafts.plain(root).tree
            _, logits = self._target.verify(tree, self._ours, length, self.length)
            none = mx.zeros((1, 1), mx.int32)
            self._ours.commit(tree, none, none[0], length)
            found.append(mx.argmax(logits[0, -1]))
            mx.eval(found, self._ours.buffers)

        def by_them() -> None:
            logits = self._model(root[None], cache=self._theirs)
            found.append(mx.argmax(logits[0, -1]))
            mx.eval(found)

        ours.add(by_us)
        theirs.add(by_them)
        self.length += 1
        self._root = found[0][None]
        return found[0].item() == found[1].item()

    def sizes(self) -> tuple[int, int]:
        """Return the bytes of both caches."""
        return self._ours.nbytes, sum(cache.nbytes for cache in self._theirs)


def main() -> None:
    """Measure one text."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model")
    parser.add_argument("--tokens", type=int, default=6000)
    parser.add_argument("--begin", type=int, default=0)
    parser.add_argument("--steps", type=int, default=16)
    given = parser.parse_args()
    target = Target(load_target(given.model).model)
    both, n = Both(target, given.begin), given.tokens
    text = [(7 * i * i + i) % min(target.vocab_size, 9973) for i in range(n)]
    with target.in_use():
        for what in ("prompt", "steps"):
            ours, theirs, same = Spent(), Spent(), 0
            if what == "prompt":
                for at in range(given.begin, n, PREFILL_CHUNK):
                    both.read(text[at : at + PREFILL_CHUNK], n, ours, theirs)
            else:
                same = sum(both.step(ours, theirs) for _ in range(given.steps))
            ours.cache, theirs.cache = both.sizes()
            facts = {"part": what, "begin": given.begin, "tokens": n, "steps": given.steps,
                     "same_tokens": same}  # fmt: skip
            print(json.dumps(facts | {"ours": asdict(ours), "mlx_lm": asdict(theirs)}), flush=True)


if __name__ == "__main__":
    main()
