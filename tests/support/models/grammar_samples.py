"""What tests share with those of grammar."""

from __future__ import annotations

from functools import cache

from tiny import byte_tokenizer

from redrafter_mlx.structured.grammar import Grammars

PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 6},
        "kind": {"enum": ["cat", "dog"]},
        "ages": {"type": "array", "items": {"enum": [1, 2]}, "maxItems": 3},
    },
    "required": ["name", "kind", "ages"],
    "additionalProperties": False,
}


@cache
def grammars() -> Grammars:
    return Grammars(byte_tokenizer(), 258)
