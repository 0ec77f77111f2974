"""What is measured: two baselines, mlx-lm's own speculative decoding, and drafted decoding.

Every method answers the same prompt's token ids and is timed the same way, token by token as a
caller gets them: up to the first token, and from there to the last. What else is said of a run
comes from the records that each loop gives its callers; nothing is evaluated or read for it.
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

from redrafter_mlx.config import AcceptMethod, BeamShape, GenerationOptions, Prefixes
from redrafter_mlx.engine.engine import Redrafter
from redrafter_mlx.errors import BadInputError, MismatchError

MethodName = Literal["mlx-lm", "autoregressive", "mlx-lm speculative", "redrafter"]
BASELINE: MethodName = "mlx-lm"
"""What speedups and equality of tokens refer to: mlx-lm's own `stream_generate`."""

Clock = Callable[[], float]


@dataclass(frozen=True)
class Method:
    """One way to decode.

    drafter:     which of several drafters, by the name it was asked for; None if there is one
    accept:      how drafts are accepted; None where nothing is drafted by us
    beam_width, beam_length: of `redrafter`; None leaves it to what promises most here
    max_nodes, prefixes: as in GenerationOptions
    draft_tokens: of `mlx-lm speculative`
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

    @property
    def ours(self) -> bool:
        return self.name in ("autoregressive", "redrafter")

    @property
    def automatic(self) -> bool:
        return self.name == "redrafter" and None in (self.beam_width, self.beam_length)

    def baseline(self) -> Method:
        """The baseline that this method's runs are paired with."""
        return Method(BASELINE, self.temperature)

    def options(self, max_tokens: int, seed: int) -> GenerationOptions:
        """What our own loop is asked for."""
        return GenerationOptions(
            temperature=self.temperature,
            accept=self.accept,
            max_tokens=max_tokens,
            seed=seed,
            beam_width=self.beam_width,
            beam_length=self.beam_length,
            max_nodes=self.max_nodes,
            draft=self.name == "redrafter",
            prefixes=self.prefixes,
        )


class Piece(NamedTuple):
    """One token as a loop gives it.

    step: counts target calls, the one that reads the prompt being 0
    accepted, nodes, rows: of the step, drafts accepted, nodes verified, and nodes with padding; -1
      where the loop does not say
    shape: the step's tree was drafted with it; None where there is none
    """

    token: int
    text: str
    step: int
    accepted: int
    nodes: int
    rows: int
    shape: BeamShape | None = None


@dataclass
class Run:
    """One answer and how long it took.

    accept_lengths: tokens of each target call after the prompt's that are part of the answer
    accepted:       drafts accepted in each of them, those behind the answer's end included
    nodes:          nodes of each verified tree that were not padding; empty where unknown
    rows:           nodes of each tree with its padding; empty where unknown
    shapes:         [W, L, capacity N] that each of them was drafted with; empty where unknown
    """

    token_ids: list[int] = field(default_factory=list)
    text: str = ""
    accept_lengths: list[int] = field(default_factory=list)
    accepted: list[int] = field(default_factory=list)
    nodes: list[int] = field(default_factory=list)
    rows: list[int] = field(default_factory=list)
    shapes: list[list[int]] = field(default_factory=list)
    first_token_seconds: float = 0.0
    decode_seconds: float = 0.0
    peak_memory: float = 0.0


class Runner:
    """Runs methods on one loaded model, one after the other.

    redrafters: by the `drafter` of the methods that they are for; the first one also decodes
      plainly
    """

    def __init__(
        self,
        redrafters: Mapping[str | None, Redrafter],
        draft_model: nn.Module | None = None,
        clock: Clock = time.perf_counter,
    ) -> None:
        self._redrafters = dict(redrafters)
        self._first = next(iter(self._redrafters.values()))
        self.draft_model = draft_model
        self._clock = clock

    def redrafter(self, method: Method) -> Redrafter:
        """What decodes by a method of ours."""
        return self._redrafters[method.drafter] if method.name == "redrafter" else self._first

    def check(self, methods: Sequence[Method], max_tokens: int) -> None:
        """Raise BadInputError for a method that this model or drafter cannot do."""
        for method in methods:
            if not method.ours:
                continue
            redrafter = self.redrafter(method)
            redrafter.chosen_options(method.options(max_tokens, 0), {})
            if method.name == "redrafter" and redrafter.drafting is None:
                raise BadInputError(redrafter.drafter_note or "there is no drafter to measure")

    def run(self, method: Method, prompt: list[int], max_tokens: int, seed: int) -> Run:
        """Answer `prompt` once; the same seed gives the same answer of the same method."""
        mx.reset_peak_memory()
        pieces = self._pieces(method, prompt, max_tokens, seed)
        run, texts = Run(), []
        lengths, step = [0], 0
        began = self._clock()
        first = last = began
        for piece in pieces:
            last = self._clock()
            if not run.token_ids:
                first = last
            if piece.step != step:
                step = piece.step
                lengths.append(0)
                run.accepted.append(piece.accepted)
                run.nodes.append(piece.nodes)
                run.rows.append(piece.rows)
                if piece.shape is not None:
                    drafted = piece.shape
                    run.shapes.append([drafted.width, drafted.length, drafted.nodes])
            lengths[-1] += 1
            run.token_ids.append(piece.token)
            texts.append(piece.text)
        run.text = "".join(texts)
        run.accept_lengths = lengths[1:]
        if -1 in run.accepted:  # the loop names each token's source, but not what it drafted
            run.accepted = [max(n - 1, 0) for n in run.accept_lengths]
        if -1 in run.nodes:
            run.nodes, run.rows = [], []
        run.first_token_seconds = first - began
        run.decode_seconds = last - first
        run.peak_memory = mx.get_peak_memory() / 1e9
        return run

    def _pieces(
        self, method: Method, prompt: list[int], max_tokens: int, seed: int
    ) -> Iterator[Piece]:
        if method.ours:
            return _ours(self.redrafter(method), prompt, method.options(max_tokens, seed))
        mx.random.seed(seed)
        drafts = method.name == "mlx-lm speculative"
        return _mlx_lms(
            self._first,
            self.draft_model if drafts else None,
            prompt,
            max_tokens,
            method.temperature,
            method.draft_tokens,
        )


def check_draft_model(redrafter: Redrafter, draft_vocab_size: int, name: str) -> None:
    """Raise MismatchError unless mlx-lm's speculative decoding can pair the two models."""
    ours = redrafter.target.vocab_size
    if ours != draft_vocab_size:
        raise MismatchError(
            f"--draft-model {name} has a vocabulary of {draft_vocab_size}, the model one of "
            f"{ours}; give one with the same tokenizer"
        )


def _ours(redrafter: Redrafter, prompt: list[int], options: GenerationOptions) -> Iterator[Piece]:
    for response in redrafter.stream(prompt, options=options):
        made = response.step
        accepted, steps = len(made.tokens) - 1, response.steps
        yield Piece(
            response.token, response.text, steps, accepted, made.nodes, made.rows, made.shape
        )


def _mlx_lms(
    redrafter: Redrafter,
    draft_model: nn.Module | None,
    prompt: list[int],
    max_tokens: int,
    temperature: float,
    draft_tokens: int | None,
) -> Iterator[Piece]:
    """mlx-lm's loops; a token that is not from a draft is the last one of its target call.

    Its speculative loop drafts before the first target call already, so that call's tokens count
    as the prompt's: they come with the first token, in no time of their own.
    """
    more = {} if draft_model is None else {"num_draft_tokens": draft_tokens}
    step = 0
    for response in stream_generate(
        redrafter.model,
        redrafter.tokenizer,
        prompt,
        max_tokens=max_tokens,
        draft_model=draft_model,
        sampler=make_sampler(temp=temperature),
        stream=_our_stream(),
        **more,
    ):
        yield Piece(response.token, response.text, step, -1 if draft_model else 0, -1, -1)
        step += not response.from_draft


def _our_stream() -> mx.Stream | mx.ThreadLocalStream:
    """Where mlx-lm's loop computes: on its own stream; on the CPU, on the one that ours uses.

    A CPU stream is a thread, and the BLAS gives every thread that calls it a pool of workers. Two
    pools on the same cores get in each other's way and double the time of products of several
    rows, so whoever is measured would depend on who ran before.
    """
    device = mx.default_device()
    if device.type == mx.DeviceType.cpu:
        return mx.default_stream(device)
    return generation_stream
