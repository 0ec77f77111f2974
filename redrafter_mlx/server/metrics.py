"""GET /metrics: Prometheus metrics under the names that vLLM and llama-server use."""

from __future__ import annotations

from collections.abc import Callable

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from starlette.requests import Request
from starlette.responses import Response

from redrafter_mlx.server.answers.answering import Emitted
from redrafter_mlx.server.answers.record import Record

_TYPE = "text/plain; version=0.0.4; charset=utf-8"
_SECONDS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 25, 50, 100)


class Metrics:
    """The metrics of one server, by model."""

    def __init__(self, running: Callable[[], int], waiting: Callable[[], int]) -> None:
        """Take functions that return the number of answers that run now, and that wait now."""
        self._registry = CollectorRegistry()
        for name, now in (
            ("llamacpp:requests_processing", running), ("llamacpp:requests_deferred", waiting),
            ("vllm:num_requests_running", running), ("vllm:num_requests_waiting", waiting),
        ):  # fmt: skip
            Gauge(name, name, registry=self._registry).set_function(now)
        self._prompt = self._counter("vllm:prompt_tokens")
        self._read = self._counter("llamacpp:prompt_tokens")  # without cached ones
        self._predicted = [
            self._counter(name) for name in ("vllm:generation_tokens", "llamacpp:tokens_predicted")
        ]
        self._cached = self._counter("vllm:prompt_tokens_cached")
        self._prompt_seconds = self._counter("llamacpp:prompt_seconds")
        self._predicted_seconds = self._counter("llamacpp:tokens_predicted_seconds")
        self._drafts = self._counter("vllm:spec_decode_num_drafts")
        self._drafted = self._counter("vllm:spec_decode_num_draft_tokens")
        self._accepted = self._counter("vllm:spec_decode_num_accepted_tokens")
        self._by_position = self._counter(
            "vllm:spec_decode_num_accepted_tokens_per_pos", "position"
        )
        self._succeeded = self._counter("vllm:request_success", "finished_reason")
        self._first_token = self._histogram("vllm:time_to_first_token_seconds")
        self._whole = self._histogram("vllm:e2e_request_latency_seconds")

    def step(self, model: str, emitted: Emitted) -> None:
        """Count what one step emitted."""
        if emitted.drafted:
            self._drafts.labels(model).inc()
            self._drafted.labels(model).inc(emitted.drafted)
            self._accepted.labels(model).inc(emitted.accepted)
            for position in range(emitted.accepted):
                self._by_position.labels(model, str(position)).inc()
        for counter in self._predicted:
            counter.labels(model).inc(len(emitted.responses))

    def end(self, model: str, record: Record) -> None:
        """Count an answer that has ended, or that was ended before it was complete."""
        timings, reason = record.timings, record.last.finish_reason
        self._prompt.labels(model).inc(record.last.prompt_tokens)
        self._read.labels(model).inc(timings["prompt_n"])
        self._cached.labels(model).inc(record.last.cached_tokens)
        self._prompt_seconds.labels(model).inc(timings["prompt_ms"] / 1000)
        self._predicted_seconds.labels(model).inc(timings["predicted_ms"] / 1000)
        self._succeeded.labels(model, reason or "abort").inc()
        self._first_token.labels(model).observe(record.first_token_seconds or 0.0)
        self._whole.labels(model).observe(record.seconds)

    async def response(self, _: Request) -> Response:
        """Return all metrics as text: the endpoint."""
        return Response(generate_latest(self._registry), headers={"Content-Type": _TYPE})

    def _counter(self, name: str, *labels: str) -> Counter:
        return Counter(name, name, ["model_name", *labels], registry=self._registry)

    def _histogram(self, name: str) -> Histogram:
        labels = ["model_name"]
        return Histogram(name, name, labels, registry=self._registry, buckets=_SECONDS)
