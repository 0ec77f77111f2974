"""Runs methods and times them, for any number of requests at once.

Every method gets the same prompts' token ids. Every method is timed as its caller receives tokens:
up to the moment when every request has its first token, so that a batch has its full size from the
start, and from then to each request's last token. All other figures come from the records that each
loop gives its callers; measuring evaluates and reads nothing more.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from itertools import groupby
from typing import NamedTuple

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.generate import generation_stream, stream_generate
from mlx_lm.sample_utils import make_sampler

from redrafter_mlx.bench.measure.methods import Method
from redrafter_mlx.distributed.plain_batch import PlainBatch
from redrafter_mlx.engine.engine import Redrafter
from redrafter_mlx.errors import BadInputError, EngineFailedError, MismatchError, out_of_memory
from redrafter_mlx.response import StepResult
from redrafter_mlx.target_model.cache.plain import plain_caches

Clock = Callable[[], float]


class Token(NamedTuple):
    """One token as a loop yields it."""

    row: int  # index of the prompt that it answers
    id: int
    text: str | None  # None in mlx-lm's own batches, which decode none
    call: int  # index of the target call that emitted it; the prompt's is 0
    result: StepResult | None = None  # result of the step that emitted it; None for mlx-lm's loops


@dataclass
class Run:
    """One answer, its times, and one list entry per target call after the prompt's."""

    token_ids: list[int]
    text: str
    accept_lengths: list[int]  # tokens of the call that are part of the answer
    accepted: list[int]  # drafts accepted in the call, including those after the answer's end
    nodes: list[int]  # nodes verified in the call, without padding; empty for mlx-lm's loops
    query_rows: list[int]  # the same with padding
    shapes: list[list[int]]  # [W, L, capacity N] of the call's drafts; empty for mlx-lm's loops
    first_token_seconds: float  # up to the first token of every request of the batch
    decode_seconds: float  # from then to the answer's last token
    timed_tokens: int  # number of tokens in `decode_seconds`
    peak_memory: float  # GB
    out_of_memory: bool = False  # the batch does not fit; there is no answer


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
        """Answer one prompt; the same method with the same seed gives the same answer."""
        (run,) = self.run_together(method, [prompt], max_tokens, [seed])
        return run

    def run_if_it_fits(
        self, method: Method, prompts: Sequence[list[int]], max_tokens: int, seeds: Sequence[int]
    ) -> list[Run]:
        """Do as `run_together`; a batch that does not fit in memory gives runs that say so."""
        options, too_large = method.options(max_tokens, 0), Run(
            [], "", [], [], [], [], [], 0.0, 0.0, 0, 0.0, out_of_memory=True
        )  # fmt: skip
        if method.batch_size is None:
            return self.run_together(method, prompts, max_tokens, seeds)
        if not self.redrafter(method).fits([*prompts], options):
            return [too_large] * len(prompts)
        try:
            return self.run_together(method, prompts, max_tokens, seeds)
        except (MemoryError, RuntimeError, EngineFailedError) as error:
            if not out_of_memory(error):
                raise
            return [too_large] * len(prompts)

    def run_together(
        self, method: Method, prompts: Sequence[list[int]], max_tokens: int, seeds: Sequence[int]
    ) -> list[Run]:
        """Answer the prompts at once, with a seed each; mlx-lm's batch has the first for all."""
        # mlx-lm's loop leaves the step beyond its last token running.
        self._first.thread.run(lambda: mx.synchronize(our_stream()))
        mx.reset_peak_memory()
        tokens: list[list[Token]] = [[] for _ in prompts]
        times: list[list[float]] = [[] for _ in prompts]
        began = self._clock()
        with closing(self._tokens(method, prompts, max_tokens, seeds)) as found:
            for token in found:
                times[token.row].append(self._clock())
                tokens[token.row].append(token)
        full, peak = max(row[0] for row in times), mx.get_peak_memory() / 1e9
        return [self._run_of(*row, began, full, peak) for row in zip(tokens, times, strict=True)]

    def _run_of(
        self, tokens: list[Token], times: list[float], began: float, full: float, peak: float
    ) -> Run:
        """Return the run of one request of a batch that had every first token at `full`."""
        calls = [[*emitted] for call, emitted in groupby(tokens, lambda token: token.call) if call]
        steps = [emitted[0].result for emitted in calls if emitted[0].result is not None]
        lengths = [len(emitted) for emitted in calls]
        tokenizer = self._first.tokenizer
        rest = [t.id for t in tokens if t.text is None and t.id not in tokenizer.eos_token_ids]
        return Run(
            token_ids=[token.id for token in tokens],
            text="".join(token.text or "" for token in tokens) + tokenizer.decode(rest),
            accept_lengths=lengths,
            # A call of mlx-lm yields its accepted drafts and one target token.
            accepted=[len(step.tokens) - 1 for step in steps] or [n - 1 for n in lengths],
            nodes=[step.nodes for step in steps],
            query_rows=[step.query_rows for step in steps],
            shapes=[[step.shape.width, step.shape.length, step.shape.nodes] for step in steps],
            first_token_seconds=full - began,
            decode_seconds=max(times[-1] - full, 0.0),
            timed_tokens=sum(at > full for at in times),
            peak_memory=peak,
        )

    def _tokens(
        self, method: Method, prompts: Sequence[list[int]], max_tokens: int, seeds: Sequence[int]
    ) -> Generator[Token, None, None]:
        if method.ours:
            redrafter = self.redrafter(method)
            requests = [
                method.request(redrafter, prompt, max_tokens, seed)
                for prompt, seed in zip(prompts, seeds, strict=True)
            ]
            for row, response in redrafter.respond_all(requests):
                yield Token(row, response.token, response.text, response.steps, response.step)
            return
        if method.batch_size is None:
            theirs = self._mlx_lm_tokens(method, prompts[0], max_tokens, seeds[0])
        else:
            theirs = self._mlx_lm_batch(method, prompts, max_tokens, seeds[0])
        yield from self._first.thread.iterate(theirs)  # in the same thread as ours

    def _mlx_lm_tokens(
        self, method: Method, prompt: list[int], max_tokens: int, seed: int
    ) -> Generator[Token, None, None]:
        # A token of mlx-lm that is not from a draft is the last one of its target call. Its
        # speculative loop already drafts before the first call. That call's tokens are treated as
        # the prompt's, because they arrive together with the first token.
        mx.random.seed(seed)
        drafts = method.name == "mlx-lm speculative"
        packing, plain = self._first.target.packing, self._first.target.plain
        caches = {} if drafts or packing is None else {"prompt_cache": plain_caches(plain, packing)}
        call = 0
        for response in stream_generate(
            plain,
            self._first.tokenizer,
            prompt,
            max_tokens=self._first.prompts.room_for(prompt, max_tokens),
            draft_model=self._draft_model if drafts else None,
            sampler=make_sampler(temp=method.temperature),
            stream=our_stream(),
            **caches,
            **({"num_draft_tokens": method.draft_tokens} if drafts else {}),
        ):
            yield Token(0, response.token, response.text, call)
            call += not response.from_draft

    def _mlx_lm_batch(
        self, method: Method, prompts: Sequence[list[int]], max_tokens: int, seed: int
    ) -> Generator[Token, None, None]:
        mx.random.seed(seed)
        model, mirror, stream = self._first.model, self._first.mirror, our_stream()
        stop = [*self._first.tokenizer.eos_token_ids]
        limits = [self._first.prompts.room_for(prompt, max_tokens) for prompt in prompts]
        batch = PlainBatch([*prompts], limits, stop, method.temperature)
        run = batch.run(model, stream) if mirror is None else mirror.run(batch, model, stream)
        calls = [0] * len(prompts)
        for row, token in run:
            yield Token(row, token, None, calls[row])
            calls[row] += 1


def check_draft_model(redrafter: Redrafter, draft_vocab_size: int, name: str) -> None:
    """Raise MismatchError unless mlx-lm's speculative decoding can pair the two models."""
    ours = redrafter.target.vocab_size
    if ours != draft_vocab_size:
        raise MismatchError(
            f"--draft-model {name} has a vocabulary of {draft_vocab_size}, the model one of "
            f"{ours}; give one with the same tokenizer"
        )


def our_stream() -> mx.Stream | mx.ThreadLocalStream:
    """Return the stream for mlx-lm's loop: its own on a GPU, the thread's default one on the CPU.

    A CPU stream is a thread, to which the BLAS gives workers; see `EngineThread`.
    """
    device = mx.default_device()
    if device.type == mx.DeviceType.cpu:
        return mx.default_stream(device)
    return generation_stream
