"""Line editing in a chat, with a history that several chats share."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from redrafter_mlx.runtime.files.paths import cache_dir


@contextlib.contextmanager
def line_editing(wanted: bool) -> Iterator[None]:
    """Enable line editing with a history in our cache folder, if readline is available."""
    try:
        import readline
    except ImportError:
        wanted = False
    if not wanted:
        yield
        return
    # GNU's and the BSD's library cannot read each other's files.
    kind = "_libedit" if "libedit" in (readline.__doc__ or "") else ""
    history = cache_dir() / f"chat_history{kind}"

    def read() -> int:
        with contextlib.suppress(OSError):
            readline.read_history_file(history)
        return readline.get_current_history_length()

    readline.set_history_length(1000)
    first = read() + 1
    try:
        yield
    finally:
        with contextlib.suppress(OSError):
            history.parent.mkdir(parents=True, exist_ok=True)
            history.touch(mode=0o600)
            after = readline.get_current_history_length() + 1
            lines = [readline.get_history_item(i) for i in range(first, after)]
            readline.clear_history()
            read()  # another chat may have added lines
            for line in lines:
                readline.add_history(line)
            readline.write_history_file(history)
