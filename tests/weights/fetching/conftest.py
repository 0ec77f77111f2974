"""The Hub as a small server on this machine, or as one that refuses every connection."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest
from fake_hub import hub as hub
from fake_hub import isolate


@pytest.fixture
def no_hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Use a Hub that refuses every connection."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{probe.getsockname()[1]}"
    isolate(tmp_path, monkeypatch, url)
