"""The console script's first lines: Ctrl-C ends them quietly, whatever is being imported.

Importing `redrafter_mlx` loads a BLAS, and a library must leave signals alone; so this is a package
of its own, installed as `redrafter_mlx_start`, that imports it only once Ctrl-C is minded.
"""

from __future__ import annotations

import os
import signal
import sys
from types import FrameType

_INTERRUPTED = 130


def main() -> None:
    """Run the command line; Ctrl-C at any moment is exit status 130 and no traceback."""
    before = signal.getsignal(signal.SIGINT)
    if before is signal.default_int_handler:  # else the caller had it ignored, as `nohup` does
        signal.signal(signal.SIGINT, _leave)
    from redrafter_mlx.cli.main import main as run

    try:
        signal.signal(signal.SIGINT, before)
        run()
    except KeyboardInterrupt:
        sys.exit(_INTERRUPTED)


def _leave(_: int, __: FrameType | None) -> None:
    os._exit(_INTERRUPTED)


if __name__ == "__main__":
    main()
