"""Published static trees by name, and trees in a file."""

from __future__ import annotations

import json
import os
from pathlib import Path

from redrafter_mlx.errors import BadInputError, DamagedFileError
from redrafter_mlx.speculation.static_tree import StaticTree

_PUBLISHED = {
    "medusa_mc_sim_7b_63": """
        0 1 2 3 4 5 6 7 8 9 00 01 02 03 04 05 06 07 08 09 10 11 12 13 14 15 16 20 21 22
        30 31 40 50 60 70 80 90 000 001 002 003 004 005 006 007 008 009 010 011 012 020
        021 030 040 050 060 070 100 101 200 0000 0001""",
    "medusa_vicuna_7b_stage1": """
        0 1 2 3 4 5 6 7 8 9 00 01 02 03 04 05 06 07 08 09 10 11 12 13 14 15 16 20 21 22
        23 30 31 32 40 41 50 51 60 70 80 90 000 001 002 003 004 005 006 007 008 010 011
        012 020 021 030 040 050 100 101 200 0000""",
    "medusa_vicuna_7b_stage2": """
        0 1 2 3 4 5 6 7 8 9 00 01 02 03 04 05 06 07 08 09 10 11 12 13 14 20 21 30 31 40
        50 60 70 000 001 002 003 004 005 006 007 008 010 011 012 013 020 021 030 040 050
        100 101 102 110 200 0000 0001 0002 0003 0010 0020 0100""",
    "medusa_vicuna_13b_stage1": """
        0 1 2 3 4 5 6 7 8 9 00 01 02 03 04 05 06 07 08 09 10 11 12 13 14 15 16 20 21 22
        23 30 31 40 41 50 60 70 80 000 001 002 003 004 005 006 007 008 009 010 011 012
        013 020 021 030 040 050 100 101 110 200 0000""",
    "medusa_vicuna_13b_stage2": """
        0 1 2 3 4 5 6 7 8 9 00 01 02 03 04 05 06 07 08 09 10 11 12 13 20 21 30 40 50 000
        001 002 003 004 005 006 007 008 009 010 011 012 013 020 021 030 040 050 100 101
        102 110 200 300 0000 0001 0002 0003 0010 0011 0020 0100 1000""",
    "medusa_vicuna_33b_stage1": """
        0 1 2 3 4 5 6 7 8 9 00 01 02 03 04 05 06 07 08 09 10 11 12 13 14 15 16 17 20 21
        22 23 24 30 31 32 40 41 50 51 60 70 80 90 000 001 002 003 004 005 006 007 008
        010 011 012 020 021 030 040 100 101 200""",
    "medusa_vicuna_33b_stage2": """
        0 1 2 3 4 5 6 7 8 9 00 01 02 03 04 05 06 07 08 09 10 11 12 13 14 20 21 22 30 31
        40 50 60 70 000 001 002 003 004 005 006 007 008 009 010 011 012 013 020 021 030
        040 050 100 101 102 110 200 0000 0001 0002 0010 0100""",
    "medusa_zephyr_stage2": """
        0 1 2 3 4 5 6 7 8 9 00 01 02 03 04 05 06 07 08 09 10 11 12 13 14 15 20 21 22 23
        30 31 40 41 50 60 70 000 001 002 003 004 005 006 007 008 009 010 011 012 013 020
        021 030 040 050 100 101 110 200 0000 0001 0010""",
    "eagle_mc_sim_7b_63": """
        0 1 2 3 00 01 02 10 11 20 21 30 000 001 002 010 011 020 021 100 0000 0001 0002
        00000 00001""",
}
"""Each word is a path, with one digit per rank. The sources are FasterDecoding/Medusa,
medusa/model/medusa_choices.py, and SafeAILab/EAGLE, eagle/model/choices.py; mc_sim_7b_63 is the
default of both."""


def find_tree(name: str) -> StaticTree:
    """Return a published tree by name, or the paths in a JSON file: [[0], [1], [0, 0]]."""
    if name in _PUBLISHED:
        paths = [tuple(map(int, path)) for path in _PUBLISHED[name].split()]
        return StaticTree(tuple(paths), name)
    path = Path(os.path.expanduser(name))
    if not path.is_file():
        raise BadInputError(
            f"there is no tree {name!r}; name one of {', '.join(_PUBLISHED)}, or a JSON file"
        )
    return StaticTree(_read_paths(path), name)


def _read_paths(path: Path) -> tuple[tuple[int, ...], ...]:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise DamagedFileError(f"{path} cannot be read: {error}") from None
    if not isinstance(content, list) or not all(isinstance(each, list) for each in content):
        raise DamagedFileError(f"{path} holds no list of lists of ranks")
    return tuple(map(tuple, content))
