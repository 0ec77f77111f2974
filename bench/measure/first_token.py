"""Time to the first token of an agent's requests, which begin with the same long prompt.

`python -m redrafter_mlx.bench.measure.first_token --tokens 6000` prints a line for each case, and
JSON at the end. Each process below reads or loads the prompt anew; its model is loaded before.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from redrafter_mlx.engine.engine import Redrafter
from redrafter_mlx.engine.options import EngineOptions
from redrafter_mlx.loading.load import load

_ANSWER, _TURN, _SIDE = 16, 32, 4
"""Tokens of an answer and of a user's turn, and the number of requests that come at once."""

_TEXT = Path(__file__).parents[1] / "quoting.jsonl"

Seconds = dict[str, float]


def measure(redrafter: Redrafter, prompt: Sequence[int], *, cold: bool) -> Seconds:
    """Return the seconds to the first token of each request."""
    first = _timed(redrafter, prompt)
    second = _timed(redrafter, [*prompt, *prompt[:_TURN]])
    if not cold:
        return {"first turn, after a restart": first}
    others = [[*prompt, *prompt[n : n + _TURN]] for n in range(_SIDE)]
    found = {"first turn, cold": first, "second turn": second}
    return found | {f"the last of {_SIDE} more at once": max(_at_once(redrafter, others))}


def main() -> None:
    """Measure in one process after another: cold, restarted, and at once with nothing read."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--tokens", type=int, default=6000, help="of the prompt")
    parser.add_argument("--case", choices=("cold", "restart", "at once", "apart"))
    parser.add_argument("--cache-dir", type=Path)
    given = parser.parse_args()
    if given.case is None:
        found: Seconds = {}
        with tempfile.TemporaryDirectory() as folder:
            for case in ("cold", "restart", "at once", "apart"):
                args = ["--model", given.model, "--tokens", str(given.tokens), "--case", case]
                found |= _in_a_process([*args, "--cache-dir", folder])
        for name, seconds in found.items():
            print(f"{name:34s} {seconds:8.2f} s")
        print(json.dumps({"model": given.model, "prompt_tokens": given.tokens, "seconds": found}))
        return
    kept: Path | None = given.cache_dir if given.case in ("cold", "restart") else None
    with _loaded(given.model, kept) as redrafter:
        text = _TEXT.read_text(encoding="utf-8")
        ids = redrafter.encode(text * (1 + 8 * given.tokens // len(text)), raw=True)
        prompt = ids[: given.tokens]
        if kept is not None:
            print(json.dumps(measure(redrafter, prompt, cold=given.case == "cold")))
            return
        prompts = [[*prompt, *prompt[n : n + _TURN]] for n in range(_SIDE)]
        shared = given.case == "at once"
        if not shared:
            prompts = [[n, *one] for n, one in enumerate(prompts)]
        name = f"the last of {_SIDE} at once, cold" + ("" if shared else ", with nothing shared")
        print(json.dumps({name: max(_at_once(redrafter, prompts))}))


def _timed(redrafter: Redrafter, prompt: Sequence[int]) -> float:
    began = time.perf_counter()
    stream = redrafter.stream([*prompt], max_tokens=_ANSWER)
    next(stream)
    seconds = time.perf_counter() - began
    for _ in stream:
        pass
    return seconds


def _at_once(redrafter: Redrafter, prompts: Sequence[Sequence[int]]) -> list[float]:
    seconds: list[float] = []
    threads = [
        threading.Thread(target=lambda p=prompt: seconds.append(_timed(redrafter, p)))
        for prompt in prompts
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return seconds


@contextmanager
def _loaded(model: str, folder: Path | None) -> Iterator[Redrafter]:
    redrafter = load(model, engine=EngineOptions(cache_dir=folder))
    redrafter.generate("Hello", max_tokens=_ANSWER)
    try:
        yield redrafter
    finally:
        redrafter.close()


def _in_a_process(arguments: Sequence[str]) -> Seconds:
    command = [sys.executable, "-m", "redrafter_mlx.bench.measure.first_token", *arguments]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    found: Seconds = json.loads(done.stdout.splitlines()[-1])
    return found


if __name__ == "__main__":
    main()
