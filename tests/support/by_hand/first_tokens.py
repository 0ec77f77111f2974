"""Times to the first token of an agent's requests, with a server that this script starts.

Usage: python tests/support/by_hand/first_tokens.py MODEL TOKENS [--raw]

The requests are Claude Code's in form: streams of the Messages API, whose prompt begins with the
same system text of about TOKENS tokens. That is the documentation of this repository. With --raw,
for a model without a chat template, they are the same texts as streams of /v1/completions. The last
line is JSON.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path

import httpx2 as httpx
import support_path  # noqa: F401
from places import ROOT

FORM = re.compile(r"http://127\.0\.0\.1:\d+")
QUESTIONS = ("What is a tree?", "What is a beam?", "Who may ask?", "What is a drafter?")
MAX_TOKENS = 32
_PART = 10_000
RAW = "--raw" in sys.argv[3:]
Messages = list[dict[str, str]]


@dataclass(frozen=True)
class Asked:
    """One request: seconds to the first token, prompt tokens, those not read again, and the text.

    at_once: number of requests that were sent at the same time, of which this one was the slowest
    """

    name: str
    seconds: float
    prompt: int
    cached: int
    text: str
    at_once: int = 1


@contextlib.contextmanager
def served(model: str, cache: Path) -> Iterator[str]:
    """Run a server that keeps prompts in `cache`; yields its URL once the model is in memory."""
    line = ["serve", model, "--port", "0", "--cache-dir", str(cache), "--log-level", "error"]
    command = [sys.executable, "-m", "redrafter_mlx.cli.main", *line]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        try:
            found = None
            while found is None:
                found = FORM.search(process.stderr.readline())
            while httpx.get(f"{found[0]}/health", timeout=600).status_code != 200:
                time.sleep(0.1)
            yield found[0]
        finally:
            process.terminate()  # it writes what it keeps before it ends


def system_text(url: str, tokens: int) -> str:
    """Return a text of about so many tokens: documents, cut where that many are reached.

    A part of it, of a few thousand tokens, tells how long the tokens are.
    """
    text = "\n\n".join(path.read_text("utf-8") for path in sorted(ROOT.glob("docs/*/*.md")))
    part = text[len(text) // 2 :][:_PART]
    return text[: tokens * _PART // count(url, part)]


def count(url: str, system: str) -> int:
    if RAW:
        body: dict[str, object] = {"prompt": system, "max_tokens": 1}
        found = httpx.post(f"{url}/v1/completions", json=body, timeout=600).json()
        return int(found["usage"]["prompt_tokens"])
    body = {"system": system, "messages": [{"role": "user", "content": QUESTIONS[0]}]}
    found = httpx.post(f"{url}/v1/messages/count_tokens", json=body, timeout=600).json()
    return int(found["input_tokens"])


def request(system: str, messages: Messages) -> tuple[str, dict[str, object]]:
    """Return the path and the body of a request."""
    body: dict[str, object] = {"max_tokens": MAX_TOKENS, "stream": True}
    if not RAW:
        return "/v1/messages", {**body, "system": system, "messages": messages}
    spoken = [f"{message['role']}: {message['content']}" for message in messages]
    prompt = "\n\n".join([system, *spoken, "assistant:"])
    return "/v1/completions", {**body, "prompt": prompt, "stream_options": {"include_usage": True}}


def ask(url: str, name: str, system: str, messages: Messages) -> Asked:
    """Send one request, and time its first token."""
    path, body = request(system, messages)
    began, first, text, usage = time.perf_counter(), 0.0, "", {}
    with httpx.stream("POST", f"{url}{path}", json=body, timeout=3600) as response:
        for line in response.iter_lines():
            event = json.loads(line[6:]) if line.startswith("data: {") else {}
            piece = event.get("delta", {}).get("text", "")
            piece += "".join(choice["text"] for choice in event.get("choices", ()))
            first = first or (time.perf_counter() if piece else 0.0)
            text += piece
            usage = event.get("usage") or usage
    if RAW:
        prompt, cached = usage["prompt_tokens"], usage["prompt_tokens_details"]["cached_tokens"]
    else:
        cached = usage["cache_read_input_tokens"]
        prompt = usage["input_tokens"] + cached
    return Asked(name, first - began, prompt, cached, text)


def turn(*texts: str) -> Messages:
    """Return the messages of a conversation that the user began."""
    roles = ("user", "assistant")
    return [{"role": roles[i % 2], "content": text} for i, text in enumerate(texts)]


def conversation(url: str, system: str, when: str) -> Sequence[Asked]:
    """Ask the first turn and, when it is answered, the second one."""
    first = ask(url, f"first turn, {when}", system, turn("Read the rules."))
    again = turn("Read the rules.", first.text, "Go on.")
    return first, ask(url, f"second turn, {when}", system, again)


def at_once(url: str, system: str, when: str) -> Asked:
    """Ask four questions at once; return the one whose first token came last."""
    with ThreadPoolExecutor(len(QUESTIONS)) as pool:
        asked = pool.map(lambda text: ask(url, when, system, turn(text)), QUESTIONS)
        last = max(asked, key=lambda one: one.seconds)
    return Asked(**{**asdict(last), "name": f"four side requests, {when}", "at_once": 4})


def main() -> None:
    model, tokens = sys.argv[1], int(sys.argv[2])
    measured: list[Asked] = []
    with tempfile.TemporaryDirectory() as folder:
        one, other = Path(folder, "one"), Path(folder, "other")
        with served(model, one) as url:
            system = system_text(url, tokens)
            measured += conversation(url, system, "cold")
            measured.append(ask(url, "another first turn, warm", system, turn("Hello.")))
            measured.append(at_once(url, system, "warm"))
        with served(model, one) as url:
            measured += conversation(url, system, "after a restart")
        with served(model, other) as url:
            measured.append(at_once(url, system, "cold"))
    print("| request | prompt | not read again | first token |\n|---|---|---|---|")
    for one_asked in measured:
        counts = f"{one_asked.prompt:,} | {one_asked.cached:,}"
        print(f"| {one_asked.name} | {counts} | {one_asked.seconds:.2f} s |")
    load = [round(number, 1) for number in os.getloadavg()]
    asked = [asdict(one_asked) for one_asked in measured]
    print(json.dumps({"model": model, "load": load, "asked": asked}))


if __name__ == "__main__":
    main()
