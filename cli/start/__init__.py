"""Entry point of the console script: Ctrl-C exits quietly, even during imports.

Importing `redrafter_mlx` loads a BLAS, and a library must leave signals alone. This is therefore a
separate package, installed as `redrafter_mlx_start`, which handles Ctrl-C before it imports it.
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
    if before is signal.default_int_handler:  # else the caller ignores it, as `nohup` does
        signal.signal(signal.SIGINT, _leave)
    from redrafter_mlx.cli.main import main as run

    try:
        signal.signal(signal.SIGINT, before)
        run()
    except KeyboardInterrupt:
        sys.exit(_INTERRUPTED)
    finally:
        if before is signal.default_int_handler:  # else Python's shutdown shows a traceback
            signal.signal(signal.SIGINT, _leave)


def _leave(_: int, __: FrameType | None) -> None:
    os._exit(_INTERRUPTED)


if __name__ == "__main__":
    main()
