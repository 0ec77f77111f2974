"""A tiny model served with a key, and a model whose answers a test writes, served without one."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from scripted import Scripted
from serving import KEY, ready, tiny_redrafter

from redrafter_mlx.engine.engine import Redrafter


@pytest.fixture(scope="module")
def model() -> Redrafter:
    return tiny_redrafter()


@pytest.fixture(scope="module")
def url(model: Redrafter) -> Iterator[str]:
    with ready(model, api_key=KEY, max_body=1) as url:
        yield url


@pytest.fixture(scope="module")
def writer() -> Scripted:
    return Scripted()


@pytest.fixture(scope="module")
def written(writer: Scripted) -> Iterator[str]:
    with ready(writer) as url:
        yield url
