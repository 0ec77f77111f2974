"""The base of all schemas of requests: strict JSON objects that collect unknown fields."""

from __future__ import annotations

import codecs
from collections.abc import Iterator
from typing import ClassVar, TypeVar

from pydantic import BaseModel, ConfigDict, ValidationError, model_validator

from redrafter_mlx.server.api_error import ApiError

_UNION_MEMBERS = ("str", "list[int]", "dict[str,any]", "list[dict[str,any]]")
"""Words that pydantic adds to the location of an error inside a union."""


_Parsed = TypeVar("_Parsed", bound="Schema")


class Schema(BaseModel):
    """A JSON object; null means that a field is left out, and unknown fields are collected."""

    model_config = ConfigDict(strict=True, extra="allow", allow_inf_nan=False, frozen=True)

    open_ended: ClassVar[bool] = False
    """Whether unknown fields have a reader, such as a chat template."""

    @model_validator(mode="before")
    @classmethod
    def _without_nulls(cls, given: object) -> object:
        if not isinstance(given, dict):
            return given
        return {name: value for name, value in given.items() if value is not None}

    @classmethod
    def parse(cls: type[_Parsed], body: bytes) -> _Parsed:
        """Parse a request from a body; raises ApiError naming the first wrong field."""
        try:
            return cls.model_validate_json(body.removeprefix(codecs.BOM_UTF8))
        except ValidationError as error:
            first = error.errors(include_url=False, include_context=False, include_input=False)[0]
            where = (str(part) for part in first["loc"])
            param = ".".join(p for p in where if p not in _UNION_MEMBERS) or None
            message = first["msg"].removeprefix("Value error, ")
            raise ApiError(400, f"{param or 'the body'}: {message}", param=param) from None

    def unread(self) -> Iterator[str]:
        """Yield the names of the fields that were sent and have no reader."""
        yield from () if self.open_ended else self.model_extra or {}
        for name in type(self).model_fields:
            value = getattr(self, name)
            if isinstance(value, Schema):
                yield from (f"{name}.{inside}" for inside in value.unread())
