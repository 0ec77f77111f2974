"""What tests share with those of grammar."""

from __future__ import annotations

from functools import cache

from tiny import byte_tokenizer

from redrafter_mlx.engine.engine import Redrafter
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


def grammars_say_what_plain_answers_say(redrafter: Redrafter) -> None:
    """Check that answers in the grammar of PERSON are the same with drafts, greedy and sampled."""
    for sampling in ({"temperature": 0.0}, {"temperature": 1.0, "seed": 3}):
        drafted, plain = (
            redrafter.generate(
                "Hi", max_tokens=60, draft=draft, constraint=grammars().json_schema(PERSON),
                **sampling,
            )
            for draft in (True, False)
        )  # fmt: skip
        assert drafted.token_ids == plain.token_ids
