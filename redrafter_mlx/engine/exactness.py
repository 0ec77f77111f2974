"""The check that trees are exact, taken once for each model and setup."""

from __future__ import annotations

import contextlib
import hashlib
import inspect
import json
from pathlib import Path

from redrafter_mlx.cpu.door import SharedRotations
from redrafter_mlx.runtime.device import float32_is_exact
from redrafter_mlx.runtime.files.atomic_write import write_private_text
from redrafter_mlx.runtime.files.paths import cache_dir
from redrafter_mlx.speculation.tree import TokenTree
from redrafter_mlx.target_model.fingerprint import values_hash
from redrafter_mlx.target_model.model import Target
from redrafter_mlx.target_model.tree_check import check_trees
from redrafter_mlx.tuning.cost import setup_of

_COMPUTED_BY = tuple(
    Path(inspect.getfile(part)).parent for part in (Target, TokenTree, SharedRotations)
)
"""The folders of our code that the check runs."""


def check_once(checked: Target) -> None:
    """Run `check_trees`, unless it has passed before with the same model, machine and code.

    What passed is recorded in our cache, one setup for each model; a cache that cannot be written
    is no error. Raises as `check_trees`.
    """
    path = cache_dir() / "exact" / f"{values_hash(checked.model)}.json"
    setup = _setup(checked)
    with contextlib.suppress(OSError, ValueError):
        if json.loads(path.read_text(encoding="utf-8")) == setup:
            return
    check_trees(checked)
    with contextlib.suppress(OSError):
        write_private_text(path, json.dumps(setup), durable=False)


def _setup(checked: Target) -> dict[str, object]:
    """Return all that the result depends on, except the values of the weights."""
    digest = hashlib.sha256()
    for folder in _COMPUTED_BY:
        for file in sorted(folder.rglob("*.py")):
            digest.update(file.read_bytes())
    return {
        "setup": setup_of(checked.model, checked, "").key,
        "float32 is exact": float32_is_exact(),
        "code": digest.hexdigest(),
    }
