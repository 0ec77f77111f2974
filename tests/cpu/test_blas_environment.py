"""The BLAS and the environment of its process."""

from __future__ import annotations

import json
import sys

import pytest
from fresh_process import python

from redrafter_mlx.runtime.device import backend

PRODUCT = """
import ctypes, json
import redrafter_mlx
import mlx.core as mx

def environment():
    entries = ctypes.POINTER(ctypes.c_char_p).in_dll(ctypes.CDLL(None), "environ")
    found = []
    while entries[len(found)]:
        found.append(entries[len(found)].decode(errors="replace"))
    return found

before = environment()
product = mx.ones((64, 512)) @ mx.ones((512, 64))
mx.eval(product)
print(json.dumps([before, environment()]))
"""


@pytest.mark.skipif(sys.platform != "linux" or backend() != "cpu", reason="BLAS of Linux CPUs")
def test_the_first_product_leaves_the_environment_as_it_is() -> None:
    # It is computed in MLX's thread. Were a variable set there while another thread starts a
    # compiler for a kernel, that could read the environment's old memory: "popen() failed".
    before, after = json.loads(python(PRODUCT))
    assert before
    assert after == before
