"""A drop-in for mlx-lm's `stream_generate`."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from pathlib import Path
from typing import cast

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.tokenizer_utils import TokenizerWrapper
from transformers import PreTrainedTokenizerBase

from redrafter_mlx.config import GenerationOptions
from redrafter_mlx.decoding.constraint import Constraint
from redrafter_mlx.drafting.interface import Bindable
from redrafter_mlx.engine.engine import Redrafter
from redrafter_mlx.engine.prompt import Prompt
from redrafter_mlx.response import Response


def stream_generate(
    model: nn.Module,
    tokenizer: TokenizerWrapper | PreTrainedTokenizerBase,
    prompt: str | Sequence[int] | mx.array,
    *,
    drafter: Bindable | str | Path | None = None,
    options: GenerationOptions | None = None,
    constraint: Constraint | None = None,
    **overrides: object,
) -> Generator[Response, None, None]:
    """mlx-lm's `stream_generate` with drafts, for callers that hold its model and tokenizer.

    Each call loads the drafter and starts an engine; for several prompts keep one
    `Redrafter(model, tokenizer, drafter)`.

    Args:
      prompt: text (used as it is, as in mlx-lm) or token ids
      drafter: a drafter, the path of its folder, or "lookup"; None decodes plainly
      options: see GenerationOptions; `overrides` are its fields by name
      constraint: the grammar of this answer, made for it alone
    """
    redrafter = Redrafter(model, tokenizer, drafter)
    given = cast("Prompt", prompt.reshape(-1).tolist() if isinstance(prompt, mx.array) else prompt)
    chosen = redrafter.chosen_options(options, overrides)
    ids = redrafter.encode(given, raw=True)
    return redrafter.stream(ids, options=chosen, constraint=constraint)
