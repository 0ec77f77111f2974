"""Requests to the engine, and their answers in progress."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from redrafter_mlx.config import GenerationOptions
from redrafter_mlx.decoding.constraint import Constraint, Masks, check_forced, check_masks
from redrafter_mlx.decoding.step_result import StepResult
from redrafter_mlx.decoding.stopping import AnswerText
from redrafter_mlx.response import Response, Tally


@dataclass(frozen=True)
class Request:
    """A request for one answer.

    prompt:     token ids
    constraint: the grammar of this answer, made for it alone
    on_prefill: called in the engine's thread with the number of prompt tokens read so far, and
                their total number
    continues:  whether the answer continues the prompt's text, so that a space at its start stays
    """

    prompt: tuple[int, ...]
    options: GenerationOptions
    constraint: Constraint | None = None
    on_prefill: Callable[[int, int], None] | None = None
    continues: bool = False


class Event(NamedTuple):
    """An event for the caller: a response, or without one, the end of the answer."""

    response: Response | None
    error: Exception | None = None


Tell = Callable[[Event], None]


class Answer:
    """The answer to one request, in progress. Only the engine's thread uses it, except `cancel`.

    text:       text of the answer so far, and where it ends
    constraint: the request's constraint; its errors end this answer and no other
    tally:      set once the prompt is being read
    error:      the error that ended it; None if there was none
    cancelled:  whether the caller has cancelled it
    """

    def __init__(self, request: Request, text: AnswerText, tell: Tell, vocab_size: int) -> None:
        self.request, self.text = request, text
        self.constraint: Constraint | None = None
        if request.constraint is not None:
            self.constraint = _Guarded(request.constraint, self, vocab_size)
        self.tally: Tally | None = None
        self.error: Exception | None = None
        self.cancelled = False
        self._tell = tell
        self._ended = False

    def cancel(self) -> None:
        """End it at the next step, or at the next chunk of its prompt. Any thread may call this."""
        self.cancelled = True

    @property
    def over(self) -> bool:
        """Whether it is cancelled, failed or complete."""
        return self.cancelled or self.error is not None or self.text.finish_reason is not None

    @property
    def tokens(self) -> list[int]:
        """The tokens whose keys and values are in its cache."""
        return [*self.request.prompt, *self.text.tokens[:-1]]

    def read(self, result: StepResult) -> bool:
        """Send the caller a step's tokens, one by one; return whether the answer is over."""
        assert self.tally is not None, "its prompt was read"
        if self.over:
            return True
        try:
            self.tally.count(result)
            for token in result.tokens:
                text = self.text.add(token)
                self._send(Event(self.tally.response(text, self.text.finish_reason)))
                if self.text.finish_reason is not None:
                    break
        except Exception as error:  # from a grammar or a tokenizer, which the caller may provide
            self.error = error
        return self.over

    def note_prefill(self, read: int, total: int) -> None:
        """Report to the caller how much of the prompt was read."""
        if self.request.on_prefill is not None:
            try:
                self.request.on_prefill(read, total)
            except Exception as error:
                self.error = error

    def end(self, error: Exception | None = None) -> None:
        """Tell the caller, once, that the answer has ended."""
        if not self._ended:
            self._ended = True
            self._send(Event(None, error or self.error))

    def _send(self, event: Event) -> None:
        try:
            self._tell(event)
        except RuntimeError:  # the caller's event loop is closed
            self.cancelled = True


class _Guarded:
    """A constraint whose errors end its own answer, and no other answer of the batch.

    What it returns is checked too: a mask of a wrong shape would end the whole step.
    """

    def __init__(self, constraint: Constraint, answer: Answer, vocab_size: int) -> None:
        self._constraint, self._answer, self._vocab_size = constraint, answer, vocab_size

    def masks(self, tokens: Sequence[int], parents: Sequence[int]) -> Masks | None:
        try:
            masks = self._constraint.masks(tokens, parents)
            check_masks(masks, len(tokens), self._vocab_size)
            return masks
        except Exception as error:
            self._answer.error = error
            return None

    def forced(self) -> Sequence[int]:
        try:
            forced = self._constraint.forced()
            check_forced(forced, self._vocab_size)
            return forced
        except Exception as error:
            self._answer.error = error
            return ()

    def advance(self, token: int) -> None:
        self._constraint.advance(token)

    @property
    def ended(self) -> bool:
        return self._constraint.ended
