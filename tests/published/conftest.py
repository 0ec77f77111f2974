"""A target of several layers, and drafters that have learned its answers."""

from __future__ import annotations

from pathlib import Path

import mlx.nn as nn
import pytest
from eagle_samples import LAYERS
from tiny import byte_model
from trained_drafters import Trained


@pytest.fixture(scope="session")
def model() -> nn.Module:
    return byte_model(num_hidden_layers=LAYERS, tie_word_embeddings=False)


@pytest.fixture(scope="session")
def trained(model: nn.Module, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return Trained(model, tmp_path_factory.mktemp("trained"))
