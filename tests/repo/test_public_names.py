"""A public name is what `__all__` and the documentation state, independent of import order."""

from __future__ import annotations

import pkgutil
import subprocess
import sys
from pathlib import Path

import pytest
from weights_samples import gguf_metadata, gguf_tensors, llama_model, write_gguf

import redrafter_mlx

CHECK = """
import importlib, inspect, pkgutil, redrafter_mlx

FUNCTIONS = {"load", "stream_generate", "verify"}

def import_all(reverse):
    names = []
    for package in ("redrafter_mlx", *(f"redrafter_mlx.{p}" for p in ("bench", "cli", "weights"))):
        path = importlib.import_module(package).__path__
        names += [m.name for m in pkgutil.walk_packages(path, package + ".")]
    assert {"redrafter_mlx.loading.load", "redrafter_mlx.bench.show.plot"} <= {*names}
    for name in sorted(names, reverse=reverse):
        importlib.import_module(name)

def check():
    for name in redrafter_mlx.__all__:
        by_attribute = getattr(redrafter_mlx, name)
        scope = {}
        exec(f"from redrafter_mlx import {name}", scope)
        assert by_attribute is scope[name], name
        assert not inspect.ismodule(by_attribute), name
        if name in FUNCTIONS:
            assert inspect.isfunction(by_attribute) and by_attribute.__name__ == name, name
        elif name != "BLAS":
            assert inspect.isclass(by_attribute) and by_attribute.__name__ == name, name
"""


def _python(code: str, *arguments: str) -> None:
    done = subprocess.run(
        [sys.executable, "-c", code, *arguments], capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("before", ["", "import_all(False)", "import_all(True)", "check()"])
def test_every_public_name_is_the_documented_object_whatever_was_imported_before(
    before: str,
) -> None:
    _python(f"{CHECK}\n{before}\ncheck()\nimport_all(False)\ncheck()")


def test_no_module_bears_the_name_of_something_public() -> None:
    modules = {module.name for module in pkgutil.iter_modules(redrafter_mlx.__path__)}
    assert not modules & set(redrafter_mlx.__all__)


def test_load_opens_more_than_once_and_in_another_thread(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "m.gguf", gguf_metadata(), gguf_tensors(llama_model()))
    code = """
import sys, threading, redrafter_mlx
import mlx.core as mx
from redrafter_mlx import load

def answer(load):
    model = load(sys.argv[1], drafter="lookup")
    return model.generate([5, 6], max_tokens=4, draft=False).token_ids

answers = [answer(redrafter_mlx.load), answer(redrafter_mlx.load), answer(load)]
def in_a_thread():
    answers.append(answer(redrafter_mlx.load))
    # Where a thread that called MLX and the process end together, MLX aborts without this.
    mx.clear_streams()

thread = threading.Thread(target=in_a_thread)
thread.start()
thread.join()
assert len(answers) == 4 and answers.count(answers[0]) == 4, answers
"""
    _python(code, str(path))
