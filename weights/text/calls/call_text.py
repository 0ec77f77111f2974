"""The text after a start mark, as it arrives, until it is known to be calls or not."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Sequence
from dataclasses import dataclass

from redrafter_mlx.weights.text.calls.form import (
    Call,
    Calls,
    Form,
    NoCallError,
    Setting,
    UnfinishedError,
    checked,
    without_partial,
)


@dataclass(frozen=True)
class Outcome:
    """The calls in a text, none if it is no call, and the text that is not part of them."""

    calls: Sequence[Call]
    rest: str


class CallText:
    """The text after one start mark."""

    def __init__(self, form: Form, setting: Setting, opener: str = "") -> None:
        """`opener` is the beginning of the call, if that was in place of a start mark."""
        self._form, self._setting = form, setting
        self._text, self._opener = opener, opener
        marks = [mark for mark in (setting.start, form.opener) if mark]
        self._beginnings = re.compile("|".join(map(re.escape, marks)))
        self._begun = False  # whether it begins as a call does
        self._seen = 0  # up to here, end marks have been looked for
        self._found: Sequence[Call] = ()  # in the text up to an end mark
        self._beside = ""  # text before that mark which is not part of them
        self._after = 0  # where that mark ends

    def feed(self, text: str) -> Outcome | None:
        """Add text; return what it is, or None if that depends on what follows."""
        self._text += text
        end = self._setting.end
        if not self._begun:
            self._begun = self._form.begins(self._text, self._setting, whole=True)
            if not self._begun and not self._form.begins(self._text, self._setting):
                return self._no_call()
        while not self._settled():
            at = self._text.find(end, self._seen) if end else -1
            if at < 0:
                self._seen = max(self._seen, len(self._text) - len(end) + 1)
                return None
            self._seen = at + len(end)
            try:
                self._found, until = self._read(self._text[:at], lacking=1)
            except UnfinishedError:
                continue
            except NoCallError:
                if not self._found:
                    return self._no_call()
                continue
            self._beside, self._after = self._text[until:at], self._seen
        return self._outcome()

    def finish(self, *, cut: bool) -> Outcome:
        """Return what the text is, at the end of an answer, which may be `cut` in a value."""
        if self._found:
            return self._outcome()
        text = self._text.rstrip().removesuffix(self._setting.end)
        text = without_partial(text, self._setting.end, min_length=1)
        try:
            try:
                calls, until = self._read(text, lacking=0 if cut else 2, ended=True)
            except UnfinishedError as error:
                if error.before is None:
                    return self._no_call()
                calls, until = self._checked(error.before)
                return Outcome(calls, self._text[until:])
        except NoCallError:
            return self._no_call()
        return Outcome(calls, self._text[until:] if until < len(text) else "")

    def _read(self, text: str, lacking: int, ended: bool = False) -> Calls:
        """Read calls that may lack closing marks, in so many of the likeliest ways.

        ended: whether the text has no end mark, which only some forms can do without
        """
        try:
            found = self._checked(self._form.read(text, self._setting))
            if not ended or self._form.closes:
                return found
            if lacking:
                return self._with_arguments(found)
            raise NoCallError
        except (NoCallError, UnfinishedError) as error:
            in_value = self._form.certain and isinstance(error, UnfinishedError)
            for whole in [] if in_value else self._form.completions(text)[:lacking]:
                with contextlib.suppress(NoCallError, UnfinishedError):
                    found = self._checked(self._form.read(whole, self._setting))
                    calls, until = self._with_arguments(found)
                    return calls, min(until, len(text))
            raise error

    def _with_arguments(self, found: Calls) -> Calls:
        """Return calls that lacked closing marks; raises NoCallError if they lack arguments too."""
        schemas = self._setting.schemas
        if any(schemas[c.name].get("properties") and not c.arguments for c in found[0]):
            raise NoCallError
        return found

    def _checked(self, found: Calls) -> Calls:
        calls, until = found
        return [checked(call, self._setting.schemas[call.name]) for call in calls], until

    def _settled(self) -> bool:
        """Whether no further text can be part of the calls found: another one begins first."""
        if not self._found or self._form.certain:
            return bool(self._found)
        end = self._text.find(self._setting.end, self._seen)
        for begun in self._beginnings.finditer(
            self._text, self._after, end if end >= 0 else len(self._text)
        ):
            at = begun.start() if begun[0] == self._form.opener else begun.end()
            if self._form.begins(self._text[at:], self._setting, whole=True):
                return True
        return False

    def _no_call(self) -> Outcome:
        return Outcome((), self._text[len(self._opener) :])

    def _outcome(self) -> Outcome:
        return Outcome(self._found, self._beside + self._text[self._after :])
