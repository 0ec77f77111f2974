"""A soak test of the server, run manually: every answer must equal `generate` without drafts.

    redrafter-mlx serve --port 8090
    locust -f tests/support/by_hand/locustfile.py --headless -u 8 -r 8 -t 10m -H http://127.0.0.1:8090

Users ask short and long questions, greedily and with seeds, streamed and whole; one in five leaves
in the middle. It fails if an answer has no end or another text.
"""

from __future__ import annotations

import json
import random

from locust import HttpUser, between, events, task

import redrafter_mlx  # the BLAS first

SHORT = ("Why is the sky blue?", "Write a haiku about rivers.", "Count to ten.", "What is 12 x 13?")
LONG = " ".join(f"Fox {i} jumps over dog {i + 1}." for i in range(120)) + " Summarise."
CASES = [(text, seed, t) for text in SHORT for seed in range(3) for t in (0.0, 0.8)]
TOKENS = 32

expected: dict[tuple[str, int, float], str] = {}


@events.init.add_listener
def generate(**_: object) -> None:
    """Return the texts that the server must give."""
    model = redrafter_mlx.load(drafter="none")
    for text, seed, temperature in [*CASES, (LONG, 0, 0.0)]:
        messages = [{"role": "user", "content": text}]
        answer = model.generate(messages, max_tokens=TOKENS, seed=seed, temperature=temperature)
        expected[text, seed, temperature] = answer.text
    model.close()


class Reader(HttpUser):
    """A user who asks, reads, and asks again."""

    wait_time = between(0, 0.3)

    @task(6)
    def reads_a_whole_answer(self) -> None:
        self._ask_whole(*random.choice(CASES))

    @task(2)
    def asks_at_length(self) -> None:
        self._ask_whole(LONG, 0, 0.0)

    @task(4)
    def reads_a_stream(self) -> None:
        case, text, ended = random.choice(CASES), "", False
        with self._post("stream", *case, stream=True) as response:
            for line in response.iter_lines():
                data = line.removeprefix(b"data: ")
                if data == b"[DONE]":
                    ended = True
                elif data:
                    for choice in json.loads(data)["choices"]:
                        text += choice["delta"].get("content") or ""
            if not ended or text != expected[case]:
                response.failure(f"another text: {text!r}" if ended else "no end")

    @task(3)
    def leaves(self) -> None:
        with self._post("leaves", random.choice([*SHORT, LONG]), 0, 0.0, stream=True) as response:
            for _ in zip(range(random.randrange(12)), response.iter_lines(), strict=False):
                pass
            response.close()

    def _ask_whole(self, text: str, seed: int, temperature: float) -> None:
        with self._post("whole", text, seed, temperature) as response:
            told = response.json()["choices"][0]["message"]["content"] if response.ok else ""
            if told != expected[text, seed, temperature]:
                response.failure(f"another text: {told!r}" if response.ok else response.text)

    def _post(self, name: str, text: str, seed: int, temperature: float, *, stream: bool = False):
        body = {
            "messages": [{"role": "user", "content": text}],
            "max_tokens": TOKENS,
            "seed": seed,
            "temperature": temperature,
            "stream": stream,
        }
        path = "/v1/chat/completions"
        return self.client.post(path, json=body, name=name, stream=stream, catch_response=True)
