"""The methods: two baselines, mlx-lm's own speculative decoding, and drafted decoding.

Every method gets the same prompt's token ids. Every method is timed as its caller receives tokens:
up to the first token, and from the first to the last. All other figures come from the records that
each loop gives its callers; measuring evaluates and reads nothing more.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, fields
from itertools import groupby
from typing import Literal, NamedTuple, get_args

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.generate import generation_stream, stream_generate
from mlx_lm.sample_utils import make_sampler

from redrafter_mlx.bench.measure.packing import PACKINGS, Prefixes, check_prefixes
from redrafter_mlx.config import AcceptMethod, GenerationOptions
from redrafter_mlx.engine.engine import Redrafter
from redrafter_mlx.engine.request import Request
from redrafter_mlx.errors import BadInputError, MismatchError
from redrafter_mlx.response import StepResult

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
    max_nodes:    as in GenerationOptions
    prefixes:     which prefixes of the drafted beams are verified
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
    def open_shape(self) -> bool:
        """Whether a side of the shape is left open."""
        return self.name == "redrafter" and None in (self.beam_width, self.beam_length)

    @property
    def automatic(self) -> bool:
        """Whether measured times choose the shape; those that belong to a seed are assumed."""
        return self.open_shape and not self.options(1, 0).shape_belongs_to_seed

    @property
    def order(self) -> tuple[float, int, str, str, int, int]:
        """Sort key: temperature, name, acceptance, drafter, width (automatic first), length."""
        return (
            self.temperature,
            get_args(MethodName).index(self.name),
            self.accept or "",
            self.drafter or "",
            self.beam_width or 0,
            self.beam_length or self.draft_tokens or 0,
        )

    def baseline(self) -> Method:
        """Return the baseline that this method's runs are paired with."""
        return Method(BASELINE, self.temperature)

    def options(self, max_tokens: int, seed: int) -> GenerationOptions:
        """Return the options for our own decoding loop; raises BadInputError if they conflict."""
        names = {field.name for field in fields(GenerationOptions)} & vars(self).keys()
        chosen = {name: getattr(self, name) for name in names if getattr(self, name) is not None}
        options = GenerationOptions(
            **chosen,
            max_tokens=max_tokens,
            seed=seed,
            draft=self.name == "redrafter",
            cache_prompt=False,
        )
        check_prefixes(self.prefixes, options)
        return options

    def request(
        self, redrafter: Redrafter, prompt: Sequence[int], max_tokens: int, seed: int
    ) -> Request:
        """Return the request for an answer of our own decoding loop."""
        options = redrafter.chosen_options(self.options(max_tokens, seed), {})
        return Request(tuple(redrafter.encode(prompt)), options, pack=PACKINGS[self.prefixes])


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

    token_ids: list[int]
    text: str
    accept_lengths: list[int]
    accepted: list[int]
    nodes: list[int]
    query_rows: list[int]
    shapes: list[list[int]]
    first_token_seconds: float
    decode_seconds: float
    peak_memory: float


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
            tree = None if redrafter.drafter is None else redrafter.drafter.tree
            if method.prefixes != "all" and tree is not None:
                raise BadInputError(
                    f"prefixes is {method.prefixes!r}; every node of {tree} is verified"
                )

    def run(self, method: Method, prompt: list[int], max_tokens: int, seed: int) -> Run:
        """Answer `prompt` once; the same method with the same seed gives the same answer."""
        self._first.thread.run(finish_mlx_lm)
        mx.reset_peak_memory()
        tokens: list[Token] = []
        times = [self._clock()]
        with closing(self._tokens(method, prompt, max_tokens, seed)) as found:
            for token in found:
                times.append(self._clock())
                tokens.append(token)
        calls = [[*emitted] for call, emitted in groupby(tokens, lambda token: token.call) if call]
        steps = [emitted[0].result for emitted in calls if emitted[0].result is not None]
        lengths = [len(emitted) for emitted in calls]
        return Run(
            token_ids=[token.id for token in tokens],
            text="".join(token.text for token in tokens),
            accept_lengths=lengths,
            # A call of mlx-lm yields its accepted drafts and one target token.
            accepted=[len(step.tokens) - 1 for step in steps] or [n - 1 for n in lengths],
            nodes=[step.nodes for step in steps],
            query_rows=[step.query_rows for step in steps],
            shapes=[[step.shape.width, step.shape.length, step.shape.nodes] for step in steps],
            first_token_seconds=times[1] - times[0],
            decode_seconds=times[-1] - times[1],
            peak_memory=mx.get_peak_memory() / 1e9,
        )

    def _tokens(
        self, method: Method, prompt: list[int], max_tokens: int, seed: int
    ) -> Generator[Token, None, None]:
        if method.ours:
            redrafter = self.redrafter(method)
            for response in redrafter.respond(method.request(redrafter, prompt, max_tokens, seed)):
                yield Token(response.token, response.text, response.steps, response.step)
        else:  # in the same thread as ours
            theirs = self._mlx_lm_tokens(method, prompt, max_tokens, seed)
            yield from self._first.thread.iterate(theirs)

    def _mlx_lm_tokens(
        self, method: Method, prompt: list[int], max_tokens: int, seed: int
    ) -> Generator[Token, None, None]:
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
            max_tokens=self._first.prompts.room_for(prompt, max_tokens),
            draft_model=self._draft_model if drafts else None,
            sampler=make_sampler(temp=method.temperature),
            stream=our_stream(),
            **({"num_draft_tokens": method.draft_tokens} if drafts else {}),
        ):
            yield Token(response.token, response.text, call)
            call += not response.from_draft


def check_draft_model(redrafter: Redrafter, draft_vocab_size: int, name: str) -> None:
    """Raise MismatchError unless mlx-lm's speculative decoding can pair the two models."""
    ours = redrafter.target.vocab_size
    if ours != draft_vocab_size:
        raise MismatchError(
            f"--draft-model {name} has a vocabulary of {draft_vocab_size}, the model one of "
            f"{ours}; give one with the same tokenizer"
        )


def finish_mlx_lm() -> None:
    """Wait for the step beyond the last token that mlx-lm's loop leaves running."""
    mx.synchronize(our_stream())


def our_stream() -> mx.Stream | mx.ThreadLocalStream:
    """Return the stream for mlx-lm's loop: its own on a GPU, the thread's default one on the CPU.

    A CPU stream is a thread, to which the BLAS gives workers; see `EngineThread`.
    """
    device = mx.default_device()
    if device.type == mx.DeviceType.cpu:
        return mx.default_stream(device)
    return generation_stream
