"""What reading a model's files gives, whichever their format."""

from __future__ import annotations

from dataclasses import dataclass

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.tokenizer_utils import TokenizerWrapper


@dataclass(frozen=True)
class RawModel:
    """A model as it is stored, its weights not evaluated yet.

    model_type:  mlx-lm's name of the architecture
    fingerprint: "sha256:..." of what was read, see TargetSource
    context_length: in tokens, see context.py; None if the files name none
    stored:      the arithmetic that `auto` means on a GPU; None leaves every array as it is
    """

    model: nn.Module
    tokenizer: TokenizerWrapper
    model_type: str
    fingerprint: str
    context_length: int | None
    stored: mx.Dtype | None = None
    licence: str | None = None
