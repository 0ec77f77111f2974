"""What Vicuna's folders leave out: the prompt that it was trained on.

Vicuna v1.1 and later (v1.3 and v1.5 among them) use FastChat's conversation `vicuna_v1.1`.
"""

from __future__ import annotations

import contextlib
from pathlib import Path

from redrafter_mlx.errors import DamagedFileError
from redrafter_mlx.runtime.json_file import read_object

VICUNA_TEMPLATE = """\
{{ bos_token }}\
{% if messages[0]['role'] == 'system' %}\
{% set system = messages[0]['content'] %}{% set turns = messages[1:] %}\
{% else %}\
{% set system = "A chat between a curious user and an artificial intelligence assistant. \
The assistant gives helpful, detailed, and polite answers to the user's questions." %}\
{% set turns = messages %}\
{% endif %}\
{{ system + ' ' }}\
{% for message in turns %}\
{% if (message['role'] == 'user') != (loop.index0 % 2 == 0) \
or message['role'] not in ['user', 'assistant'] %}\
{{ raise_exception('after an optional system message, user and assistant must take turns') }}\
{% endif %}\
{% if message['role'] == 'user' %}{{ 'USER: ' + message['content'] + ' ' }}\
{% else %}{{ 'ASSISTANT: ' + message['content'] + eos_token }}{% endif %}\
{% endfor %}\
{% if add_generation_prompt %}{{ 'ASSISTANT:' }}{% endif %}"""


def is_vicuna(folder: Path, name: str) -> bool:
    """Whether a folder without a chat template is a Vicuna, by name alone.

    The name is what the user asked for, the folder's own, the Hub repository in whose cache it
    lies, or `_name_or_path` of its config.json. Weights say nothing: Vicuna's shapes are LLaMA's.
    """
    names = [name, folder.name, *(p.name for p in folder.parents if p.name.startswith("models--"))]
    with contextlib.suppress(FileNotFoundError, DamagedFileError):
        names.append(str(read_object(folder / "config.json").get("_name_or_path", "")))
    return any("vicuna" in n.lower() for n in names)
