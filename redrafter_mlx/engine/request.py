"""Requests to the engine, and the sequences that answer them."""

from __future__ import annotations

import contextlib
from collections import abc
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from redrafter_mlx.config import PLAIN, BeamShape, GenerationOptions
from redrafter_mlx.decoding.constraint import Constraint, Masks, check_forced, check_masks
from redrafter_mlx.decoding.pipeline import Pipeline
from redrafter_mlx.decoding.sequence import Sequence, Status
from redrafter_mlx.decoding.step import Decoder, Prefill
from redrafter_mlx.decoding.text import AnswerText
from redrafter_mlx.learning.keeper import TextKeeper
from redrafter_mlx.response import Emit, Ended, Response, StepResult, Tally
from redrafter_mlx.speculation.sampling import changes_logits
from redrafter_mlx.speculation.tree import Pack, pack_beam

_MAX_UNREAD = 64
"""Number of responses with log-probabilities [V] that wait for their caller before it is paused."""


@dataclass(frozen=True)
class Request:
    """A request for one answer.

    prompt:     token ids
    constraint: the grammar of this answer, made for it alone
    on_prefill: called in the engine's thread with the number of prompt tokens read so far, and
                their total number
    pack:       makes trees of drafted beams; another than `pack_beam` needs a fixed shape
    """

    prompt: tuple[int, ...]
    options: GenerationOptions
    constraint: Constraint | None = None
    on_prefill: Callable[[int, int], None] | None = None
    pack: Pack = pack_beam


class Answer(Sequence):
    """The sequence of one request. Only the engine's thread uses it, except `cancel`.

    request:   what was asked
    text:      text of the answer so far, and where it ends
    decoder:   the decoding loop with the request's options
    shape:     shape of the drafts in every step; None if it is chosen step by step
    pipeline, prefill, first_shape: where it is decoded, its prompt, and the shape of its first
               drafts; set once it is admitted
    tally:     its statistics
    touched:   number of texts in the prefix cache when it was last searched for the prompt
    stops:     positions of its prompt up to which others wait for it to be read
    awaited_prefix: the answer that is reading a prefix of this prompt, and its length
    error:     the error that ended it; None if there was none
    cancelled: whether the caller has cancelled it
    """

    pipeline: Pipeline
    prefill: Prefill
    first_shape: BeamShape

    def __init__(
        self,
        request: Request,
        text: AnswerText,
        decoder: Decoder,
        shape: BeamShape | None,
        emit: Emit[Response],
        unread: Callable[[], int] = lambda: 0,
    ) -> None:
        """`unread` returns how many responses the caller has not taken yet."""
        self.request, self.text, self.decoder, self.shape = request, text, decoder, shape
        options, constraint = request.options, None
        if request.constraint is not None:
            constraint = _Guarded(request.constraint, self)
        super().__init__(
            self.read,
            len(request.prompt),
            decoder.begin_sources(),
            constraint,
            biased=constraint is not None or changes_logits(options),
            status=Status.WAITING,
        )
        chosen = shape is None or (options.automatic and shape != PLAIN)
        self.tally = Tally(len(request.prompt), shape_is_chosen=chosen)
        self.touched = -1
        self.stops: list[int] = []
        self.awaited_prefix: tuple[Answer, int] | None = None
        self._shown = 0  # tokens of the prompt, to its sources
        self.error: Exception | None = None
        self.cancelled = False
        self._emit, self._unread = emit, unread
        self._ended = False

    def cancel(self) -> None:
        """End it at the next step, or at the next chunk of its prompt. Any thread may call this."""
        self.cancelled = True

    @property
    def over(self) -> bool:
        """Whether it is cancelled, failed or complete."""
        return self.cancelled or self.error is not None or self.text.finish_reason is not None

    @property
    def awaited(self) -> bool:
        """Whether its caller has nothing left to read."""
        return self._unread() == 0

    @property
    def ends_next(self) -> bool:
        return self.text.ends_next

    @property
    def kept_length(self) -> int:
        # The last token was emitted, and never read.
        return len(self.request.prompt) + max(len(self.text.tokens) - 1, 0)

    @property
    def awaits_prefix(self) -> bool:
        """Whether it waits until another answer has read a prefix of its prompt."""
        if self.awaited_prefix is None:
            return False
        other, shared = self.awaited_prefix
        return other.status is Status.PREFILL and not other.over and shared in other.stops

    @property
    def prompt_is_read(self) -> bool:
        """Whether all of the prompt was read, and its sources have been shown it."""
        return not self.prefill.left and self._shown == len(self.request.prompt)

    def update_status(self) -> None:
        """Finish it if it is over; pause it while its caller is late to read log-probabilities."""
        if self.over:
            self.status = Status.FINISHED
        elif self.request.options.logprobs and self.status is not Status.PREFILL:
            late = self._unread() > _MAX_UNREAD
            self.status = Status.PAUSED if late else Status.RUNNING

    def show_prompt(self, limit: int) -> None:
        """Show the sources up to `limit` more tokens of the prompt that the target has read."""
        start, self._shown = self._shown, min(self.prefill.position, self._shown + limit)
        for source in self.sources:
            source.append(self.request.prompt[start : self._shown])

    def read(self, result: StepResult) -> bool:
        """Send the caller a step's tokens, one by one; return whether the answer is over."""
        if self.over:
            return True
        with self.catch_errors():
            self.tally.count(result)
            for token in result.tokens:
                text = self.text.add(token)
                self._send(self.tally.response(text, self.text.finish_reason, self.text.stop))
                if self.text.finish_reason is not None:
                    break
        return self.over

    def note_prefill(self, read: int) -> None:
        """Report to the caller how many tokens of the prompt were read."""
        if self.request.on_prefill is not None:
            with self.catch_errors():
                self.request.on_prefill(read, len(self.request.prompt))

    def end(self, error: Exception | None = None) -> None:
        """Emit, once, that the answer has ended."""
        if not self._ended:
            self._ended = True
            self._send(Ended(error or self.error))

    def offer_to(self, keeper: TextKeeper) -> None:
        """Let the text be kept to learn from, unless its request or an error forbids it."""
        options = self.request.options
        if options.learn and options.cache_prompt and self.error is None:
            keeper.keep(self.request.prompt, self.text.tokens, options.temperature)

    @contextlib.contextmanager
    def catch_errors(self) -> Iterator[None]:
        """End this answer, and no other of its batch, with an error of the caller's own code.

        That is a constraint, a callback, or a tokenizer.
        """
        try:
            yield
        except Exception as error:
            self.error = error

    def _send(self, event: Response | Ended) -> None:
        try:
            self._emit(event)
        except RuntimeError:  # the caller's event loop is closed
            self.cancelled = True


class _Guarded:
    """A constraint whose errors end its own answer, and no other answer of the batch.

    What it returns is checked too: a mask of a wrong shape would end the whole step.
    """

    def __init__(self, constraint: Constraint, answer: Answer) -> None:
        self._constraint, self._answer = constraint, answer
        self._vocab_size = answer.decoder.target.vocab_size

    def masks(self, tokens: abc.Sequence[int], parents: abc.Sequence[int]) -> Masks | None:
        with self._answer.catch_errors():
            masks = self._constraint.masks(tokens, parents)
            check_masks(masks, len(tokens), self._vocab_size)
            return masks
        return None

    def forced(self) -> abc.Sequence[int]:
        with self._answer.catch_errors():
            forced = self._constraint.forced()
            check_forced(forced, self._vocab_size)
            return forced
        return ()

    def advance(self, token: int) -> None:
        self._constraint.advance(token)

    @property
    def ended(self) -> bool:
        return self._constraint.ended
