"""Imported first by scripts that are run by hand: puts the modules that tests share on the path."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parents[1]))

from places import SUPPORT_PATH

sys.path += SUPPORT_PATH
