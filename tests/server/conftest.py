"""A tiny model served with a key, and a model whose answers a test writes, served without one."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:  # the server is an extra, which each test file asks for
    from scripted import Scripted

    from redrafter_mlx.engine.engine import Redrafter


@pytest.fixture(scope="module")
def model() -> Redrafter:
    from serving import tiny_redrafter

    return tiny_redrafter()


@pytest.fixture(scope="module")
def url(model: Redrafter) -> Iterator[str]:
    from serving import KEY, ready

    with ready(model, api_key=KEY, max_body=1) as url:
        yield url


@pytest.fixture(scope="module")
def writer() -> Scripted:
    from scripted import Scripted

    return Scripted()


@pytest.fixture(scope="module")
def written(writer: Scripted) -> Iterator[str]:
    from serving import ready

    with ready(writer) as url:
        yield url
