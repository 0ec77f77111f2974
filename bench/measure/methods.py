"""The methods: two baselines, mlx-lm's own speculative decoding, and drafted decoding.

Every method gets the same prompt's token ids. Every method is timed as its caller receives tokens:
up to the first token, and from the first to the last. All other figures come from the records that
each loop gives its callers; measuring evaluates and reads nothing more.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.generate import generation_stream, stream_generate
from mlx_lm.sample_utils import make_sampler

from redrafter_mlx.config import AcceptMethod, GenerationOptions, Prefixes, SamplingParams
from redrafter_mlx.decoding.step_result import StepResult
from redrafter_mlx.engine.engine import Redrafter
from redrafter_mlx.errors import BadInputError, MismatchError

MethodName = Literal["mlx-lm", "autoregressive", "mlx-lm speculative", "redrafter"]
BASELINE: MethodName = "mlx-lm"
"""mlx-lm's own `stream_generate`: the reference for speedups and for equality of tokens."""

Clock = Callable[[], float]


@dataclass(frozen=True)
class Method:
    """One way to decode.

    drafter:      the user's name for the drafter; None if there is only one
    accept:       acceptance method; None if this is not our drafted decoding
    beam_width, beam_length: for `redrafter`; None leaves the choice to auto-tuning, or to the
                  default for this kind of machine if `automatic` is False
    max_nodes, prefixes: as in GenerationOptions
    epsilon, delta: for typical acceptance; None for its defaults, and for other methods
    draft_tokens: number of draft tokens of `mlx-lm speculative`
    """

    name: MethodName
    temperature: float = 0.0
    accept: AcceptMethod | None = None
    beam_width: int | None = None
    beam_length: int | None = None
    max_nodes: int | None = None
    draft_tokens: int | None = None
    drafter: str | None = None
    prefixes: Prefixes = "all"
    epsilon: float | None = None
    delta: float | None = None

    @property
    def ours(self) -> bool:
        return self.name in ("autoregressive", "redrafter")

    @property
    def automatic(self) -> bool:
        """Whether measured times choose the shape; those that belong to a seed are assumed."""
        open_shape = self.name == "redrafter" and None in (self.beam_width, self.beam_length)
        return open_shape and not self.options(1, 0).shape_belongs_to_seed

    def baseline(self) -> Method:
        """Return the baseline that this method's runs are paired with."""
        return Method(BASELINE, self.temperature)

    def options(self, max_tokens: int, seed: int) -> GenerationOptions:
        """Return the options for our own decoding loop."""
        default = SamplingParams()
        return GenerationOptions(
            epsilon=default.epsilon if self.epsilon is None else self.epsilon,
            delta=default.delta if self.delta is None else self.delta,
            temperature=self.temperature,
            accept=self.accept,
            max_tokens=max_tokens,
            seed=seed,
            beam_width=self.beam_width,
            beam_length=self.beam_length,
            max_nodes=self.max_nodes,
            draft=self.name == "redrafter",
            prefixes=self.prefixes,
            cache_prompt=False,
        )


class Token(NamedTuple):
    """One token as a loop yields it.

    call:   index of the target call that emitted it; the prompt's is 0
    result: result of the step that emitted it; None for mlx-lm's loops
    """

    id: int
    text: str
    call: int
    result: StepResult | None = None


@dataclass
class Run:
    """One answer, its times, and one list entry per target call after the prompt's.

    accept_lengths: tokens of the call that are part of the answer
    accepted:       drafts accepted in the call, including those after the answer's end
    nodes:          nodes verified in the call, without padding; empty for mlx-lm's loops
    query_rows:     the same with padding
    shapes:         [W, L, capacity N] of the call's drafts; empty for mlx-lm's loops
    first_token_seconds, decode_seconds: up to the first token, and from the first to the last
    peak_memory:    GB
    """

    token_ids: list[int] = field(default_factory=list)
    text: str = ""
    accept_lengths: list[int] = field(default_factory=list)
    accepted: list[int] = field(default_factory=list)
    nodes: list[int] = field(default_factory=list)
    query_rows: list[int] = field(default_factory=list)
    shapes: list[list[int]] = field(default_factory=list)
    first_token_seconds: float = 0.0
    decode_seconds: float = 0.0
    peak_memory: float = 0.0


class Runner:
    """Runs methods one at a time, with one loaded model.

    redrafters: by the `drafter` of their methods; the first one also decodes without drafts
    """

    def __init__(
        self,
        redrafters: Mapping[str | None, Redrafter],
        draft_model: nn.Module | None = None,
        clock: Clock = time.perf_counter,
    ) -> None:
        self._redrafters = dict(redrafters)
        self._first = next(iter(self._redrafters.values()))
        self._draft_model = draft_model
        self._clock = clock

    def redrafter(self, method: Method) -> Redrafter:
        """Return the redrafter that runs one of our own methods."""
        return self._redrafters[method.drafter] if method.name == "redrafter" else self._first

    def check(self, methods: Sequence[Method], max_tokens: int) -> None:
        """Raise BadInputError for a method that this model or its drafter does not support."""
        for method in methods:
            if not method.ours:
                continue
            redrafter = self.redrafter(method)
            redrafter.chosen_options(method.options(max_tokens, 0), {})
            if method.name == "redrafter" and redrafter.drafting is None:
                raise BadInputError(redrafter.drafter_note or "there is no drafter to measure")

    def run(self, method: Method, prompt: list[int], max_tokens: int, seed: int) -> Run:
        """Answer `prompt` once; the same method with the same seed gives the same answer."""
        mx.synchronize(our_stream())  # mlx-lm's loop leaves a step beyond the last token running
        mx.reset_peak_memory()
        run, texts, lengths, call = Run(), [], [0], 0
        tokens = self._tokens(method, prompt, max_tokens, seed)
        began = first = last = self._clock()
        for token in tokens:
            last = self._clock()
            if not run.token_ids:
                first = last
            if token.call != call:
                call = token.call
                lengths.append(0)
                if token.result is not None:
                    _note_step(run, token.result)
            lengths[-1] += 1
            run.token_ids.append(token.id)
            texts.append(token.text)
        run.text = "".join(texts)
        run.accept_lengths = lengths[1:]
        if not run.shapes:  # a call of mlx-lm yields its accepted drafts and one target token
            run.accepted = [n - 1 for n in run.accept_lengths]
        run.first_token_seconds = first - began
        run.decode_seconds = last - first
        run.peak_memory = mx.get_peak_memory() / 1e9
        return run

    def _tokens(
        self, method: Method, prompt: list[int], max_tokens: int, seed: int
    ) -> Iterator[Token]:
        if method.ours:
            options = method.options(max_tokens, seed)
            for response in self.redrafter(method).stream(prompt, options=options):
                yield Token(response.token, response.text, response.steps, response.step)
            return
        # A token of mlx-lm that is not from a draft is the last one of its target call. Its
        # speculative loop already drafts before the first call. That call's tokens are treated as
        # the prompt's, because they arrive together with the first token.
        mx.random.seed(seed)
        drafts = method.name == "mlx-lm speculative"
        call = 0
        for response in stream_generate(
            self._first.target.plain,
            self._first.tokenizer,
            prompt,
            max_tokens=self._first.room_for(prompt, max_tokens),
            draft_model=self._draft_model if drafts else None,
            sampler=make_sampler(temp=method.temperature),
            stream=our_stream(),
            **({"num_draft_tokens": method.draft_tokens} if drafts else {}),
        ):
            yield Token(response.token, response.text, call)
            call += not response.from_draft


def _note_step(run: Run, result: StepResult) -> None:
    run.accepted.append(len(result.tokens) - 1)
    run.nodes.append(result.nodes)
    run.query_rows.append(result.query_rows)
    run.shapes.append([result.shape.width, result.shape.length, result.shape.nodes])


def check_draft_model(redrafter: Redrafter, draft_vocab_size: int, name: str) -> None:
    """Raise MismatchError unless mlx-lm's speculative decoding can pair the two models."""
    ours = redrafter.target.vocab_size
    if ours != draft_vocab_size:
        raise MismatchError(
            f"--draft-model {name} has a vocabulary of {draft_vocab_size}, the model one of "
            f"{ours}; give one with the same tokenizer"
        )


def our_stream() -> mx.Stream | mx.ThreadLocalStream:
    """Return the stream for mlx-lm's loop: its own on a GPU, this thread's default one on the CPU.

    A CPU stream is a thread, and the BLAS gives a pool of workers to every thread that calls it. So
    on the CPU it is one that exists already; the engine's thread has another.
    """
    device = mx.default_device()
    if device.type == mx.DeviceType.cpu:
        return mx.default_stream(device)
    return generation_stream
