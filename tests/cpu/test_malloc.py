"""The arrays of each step lie in memory that the process has; large ones are given back."""

from __future__ import annotations

import platform

import pytest
from fresh_process import python

from redrafter_mlx.runtime.device import backend

pytestmark = pytest.mark.skipif(
    platform.libc_ver()[0] != "glibc" or backend() != "cpu",
    reason="arrays are allocated by glibc on Linux CPUs only",
)

EVALUATE = """
import os, resource, threading
import redrafter_mlx
import mlx.core as mx

def faults():
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt

def resident():
    return int(open("/proc/self/statm").read().split()[1]) * os.sysconf("SC_PAGE_SIZE")

def evaluate(times, megabytes=20, arrays=4):
    for _ in range(times):
        mx.eval([mx.full((megabytes * 250_000,), value) for value in range(arrays)])

def faults_per_evaluation():
    evaluate(5)
    before = faults()
    evaluate(30)
    return (faults() - before) / 30

def in_a_thread(function):
    found = []
    thread = threading.Thread(target=lambda: (found.append(function()), mx.clear_streams()))
    thread.start()
    thread.join()
    return found[0]
"""
PAGES = 4 * 20_000_000 / 4096
"""Pages of the arrays of one evaluation."""


@pytest.mark.parametrize("how", ["faults_per_evaluation()", "in_a_thread(faults_per_evaluation)"])
def test_evaluations_reuse_the_pages_of_freed_arrays(how: str) -> None:
    assert float(python(f"{EVALUATE}print({how})")) < 0.05 * PAGES
    given_back = "glibc.malloc.mmap_threshold=1000000"  # every array is a mapping of its own
    assert float(python(f"{EVALUATE}print({how})", GLIBC_TUNABLES=given_back)) > 0.5 * PAGES


def test_memory_of_large_arrays_is_given_back() -> None:
    code = """
evaluate(1)
before = resident()
evaluate(1, megabytes=60, arrays=12)
print(resident() - before)
"""
    assert int(python(EVALUATE + code)) < 50_000_000
