"""glibc's allocator, by which MLX's CPU backend on Linux allocates and frees every array."""

from __future__ import annotations

import ctypes
import os
import platform
import sys

_TRIM_THRESHOLD, _MMAP_THRESHOLD, _ARENA_MAX = -1, -3, -8
"""Parameters of mallopt, from glibc's <malloc.h>."""

_KEPT = 256 << 20
"""Bytes of free memory at the end of the heap that the process keeps."""

_LARGE = 32 << 20
"""Bytes from which an array is a mapping of its own, which is given back as soon as it is freed."""


def keep_freed_memory() -> None:
    """Let new arrays take the memory of freed ones, instead of memory that is new to the process.

    By default, glibc gives freed memory back at tens of megabytes, and each thread has an arena of
    small heaps that are given back one by one. So the arrays of each step lie in new pages, at the
    cost of a page fault each. Here all threads share one heap, whose free end is given back from
    `_KEPT` bytes on. Large arrays remain mappings of their own: in the heap, those of mixed sizes
    would leave gaps, a third more memory than they need, that are never given back.

    Does nothing on other systems and libraries, or if GLIBC_TUNABLES sets the allocator.
    """
    if sys.platform != "linux" or platform.libc_ver()[0] != "glibc":
        return
    if "malloc" not in os.environ.get("GLIBC_TUNABLES", ""):
        mallopt = ctypes.CDLL(None).mallopt
        mallopt(_ARENA_MAX, 1)
        mallopt(_MMAP_THRESHOLD, _LARGE)
        mallopt(_TRIM_THRESHOLD, _KEPT)
