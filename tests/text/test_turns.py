"""Conversations of coding agents in chat templates that want one system message and turns."""

from __future__ import annotations

import pytest
from scripted import marked_tokenizer
from tiny import CHAT_TEMPLATE, random_model

from redrafter_mlx.engine.engine import Redrafter
from redrafter_mlx.errors import BadInputError
from redrafter_mlx.structured.grammar import Grammars
from redrafter_mlx.structured.plan import plan_output

NO = "{{ raise_exception('no') }}"
LATE_REFUSED = (
    f"{{% for m in messages[1:] %}}{{% if m.role == 'system' %}}{NO}{{% endif %}}{{% endfor %}}"
)
LATE_LEFT_OUT = CHAT_TEMPLATE.replace(
    "messages %}", "messages %}{% if m.role != 'system' or loop.first %}"
).replace("{% endfor %}", "{% endif %}{% endfor %}")
TURNS = (
    f"{{% set first = 1 if messages[0].role == 'system' else 0 %}}{{% for m in messages[first:] %}}"
    f"{{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}}{NO}{{% endif %}}{{% endfor %}}"
)
NO_SYSTEM = f"{{% if messages[0].role == 'system' %}}{NO}{{% endif %}}"
AGENTS = [
    {"role": "system", "content": "A"},
    {"role": "system", "content": "B"},
    {"role": "user", "content": "C"},
    {"role": "user", "content": "D"},
    {"role": "assistant", "content": "E"},
    {"role": "system", "content": "F"},
    {"role": "user", "content": "G"},
]
AS_GIVEN = "".join(f"<|im_start|>{m['role']}\n{m['content']}<|im_end|>\n" for m in AGENTS)
JOINED = (
    "<|im_start|>user\nC\n\nD<|im_end|>\n<|im_start|>assistant\nE<|im_end|>\n"
    "<|im_start|>user\n<system>\nF\n</system>\n\nG<|im_end|>\n"
)
SYSTEM = "<|im_start|>system\nA\n\nB<|im_end|>\n"
OF_USER = JOINED.replace("user\nC", "user\n<system>\nA\n</system>\n\n<system>\nB\n</system>\n\nC")


def rendered(template: str, messages: list[dict[str, str]] = AGENTS) -> str:
    tokenizer = marked_tokenizer("json_tools", template)
    model = Redrafter(random_model(vocab_size=len(tokenizer)), tokenizer)
    plan = plan_output(model, Grammars(tokenizer, len(tokenizer)), messages)
    text: str = tokenizer.decode(list(plan.prompt))
    return text.removesuffix("<|im_start|>assistant\n")


@pytest.mark.parametrize(
    ("template", "want"),
    [
        (CHAT_TEMPLATE, AS_GIVEN),
        (LATE_REFUSED + CHAT_TEMPLATE, SYSTEM + JOINED),
        (LATE_LEFT_OUT, SYSTEM + JOINED),
        (TURNS + CHAT_TEMPLATE, SYSTEM + JOINED),
        (NO_SYSTEM + CHAT_TEMPLATE, OF_USER),
        (NO_SYSTEM + TURNS + CHAT_TEMPLATE, OF_USER),
    ],
    ids=["as given", "late refused", "late left out", "turns", "no system", "no system, turns"],
)
def test_messages_are_joined_only_where_a_template_needs_it(template: str, want: str) -> None:
    assert rendered(template) == want


def test_what_no_template_form_accepts_is_refused_in_its_own_words() -> None:
    with pytest.raises(BadInputError, match="refuses these messages: no"):
        rendered(NO)
