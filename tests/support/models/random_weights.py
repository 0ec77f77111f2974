"""Modules of PyTorch with random weights."""

from __future__ import annotations

import importlib


def randomise(model) -> None:  # type: ignore[no-untyped-def]
    torch = importlib.import_module("torch")
    for name, parameter in model.named_parameters():
        if parameter.ndim == 1 and "norm" in name:
            parameter.data = torch.rand_like(parameter) + 0.5
        else:
            parameter.data = torch.randn_like(parameter) * 1.5 * parameter.shape[-1] ** -0.5
