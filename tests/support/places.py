"""Folders of this checkout."""

from __future__ import annotations

from pathlib import Path

SUPPORT = Path(__file__).parent
TESTS = SUPPORT.parent
ROOT = TESTS.parent
SUPPORT_PATH = [str(SUPPORT), *(str(path) for path in sorted(SUPPORT.iterdir()) if path.is_dir())]
"""Folders of the modules that tests share, for the path of their child processes."""
