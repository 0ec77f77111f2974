"""A drop-in for mlx-lm's `stream_generate`."""

from __future__ import annotations

from collections.abc import Callable, Generator
from pathlib import Path

import mlx.nn as nn
from mlx_lm.tokenizer_utils import TokenizerWrapper
from transformers import PreTrainedTokenizerBase

from redrafter_mlx.checks import plain
from redrafter_mlx.config import GenerationOptions, KVQuantization
from redrafter_mlx.decoding.constraint import Constraint
from redrafter_mlx.drafting.draft_model import DraftModel
from redrafter_mlx.drafting.files.forms import DrafterFolder
from redrafter_mlx.drafting.interface import Bindable
from redrafter_mlx.drafting.names import parse
from redrafter_mlx.drafting.untrained.continuation import HostDrafter
from redrafter_mlx.drafting.untrained.host_drafters import host_drafters
from redrafter_mlx.engine.engine import Redrafter
from redrafter_mlx.engine.prompts.prompt import Prompt
from redrafter_mlx.errors import BadInputError
from redrafter_mlx.response import Response
from redrafter_mlx.target_model.model import Target

_INSTEAD = {
    "sampler": "give temperature, top_p, top_k and min_p",
    "logits_processors": "give repetition_penalty, logit_bias, or a constraint",
    "prompt_cache": "keep one `Redrafter`, which keeps the caches of earlier texts",
    "max_kv_size": "caches are not cut; `EngineOptions(memory_bytes=...)` limits a `Redrafter`",
    "prefill_step_size": "leave it out: a prompt is read in chunks of about 2,048 tokens",
    "kv_group_size": "leave it out: with kv_bits, groups are of 64 numbers, or of 32",
    "input_embeddings": "give text or token ids",
    "stream": "leave it out: the engine has a thread and a stream of its own",
}
"""What to do about mlx-lm's other keywords."""


def stream_generate(
    model: nn.Module,
    tokenizer: TokenizerWrapper | PreTrainedTokenizerBase,
    prompt: Prompt,
    *,
    drafter: Bindable | str | Path | None = None,
    draft_model: nn.Module | None = None,
    num_draft_tokens: int | None = None,
    kv_bits: int | None = None,
    quantized_kv_start: int = 0,
    prompt_progress_callback: Callable[[int, int], None] | None = None,
    options: GenerationOptions | None = None,
    constraint: Constraint | None = None,
    **overrides: object,
) -> Generator[Response, None, None]:
    """mlx-lm's `stream_generate` with drafts, for callers that hold its model and tokenizer.

    Each call loads the drafter and starts an engine; for several prompts keep one
    `Redrafter(model, tokenizer, drafter)`.

    Args:
      prompt: text (used as it is, as in mlx-lm) or token ids, as a list or an array
      drafter: a drafter, the path of its folder, or "lookup"; None decodes plainly
      draft_model: as in mlx-lm: a smaller mlx-lm model with the same tokenizer, as the drafter
      num_draft_tokens: as in mlx-lm: drafts of one beam in every step; None chooses the shape
      kv_bits: as in mlx-lm, 4 or 8
      quantized_kv_start: number of the text's first positions that stay as they are; mlx-lm
        quantises these, too, once a text is so long, in the chunk of the prompt that reaches it
      prompt_progress_callback: as in mlx-lm, in the engine's thread
      options: see GenerationOptions; `overrides` are its fields by name
      constraint: the grammar of this answer, made for it alone
    Raises:
      BadInputError: for unusable options, and mlx-lm's other keywords, with what to give instead
    """
    for name in overrides:
        if name in _INSTEAD:
            raise BadInputError(f"stream_generate takes no {name} here; {_INSTEAD[name]}")
    wrapped = tokenizer if isinstance(tokenizer, TokenizerWrapper) else TokenizerWrapper(tokenizer)
    if draft_model is not None:
        if drafter is not None:
            raise BadInputError("drafter and draft_model are two drafters; give one of them")
        drafter = DraftModel(draft_model, wrapped)
    drafts = plain(num_draft_tokens)
    if isinstance(drafts, int) and drafter is not None:  # mlx-lm, too, ignores it without a model
        overrides = {"beam_width": 1, "beam_length": drafts + 1, **overrides}
    host: tuple[HostDrafter, ...] = ()
    if isinstance(drafter, (str, Path)):
        drafter, host = _opened(drafter)
    target = Target(model, **vars(KVQuantization(kv_bits, quantized_kv_start)))
    redrafter = Redrafter(model, wrapped, drafter, host_drafters=host, target=target)
    chosen = redrafter.chosen_options(options, overrides)
    ids = redrafter.encode(prompt, raw=True)
    return redrafter.stream(
        ids, options=chosen, constraint=constraint, on_prefill=prompt_progress_callback
    )


def _opened(name: str | Path) -> tuple[Bindable | None, tuple[HostDrafter, ...]]:
    """Return the drafter in a folder, None without one, and those on the host."""
    named = parse(name)
    if named.auto or named.tree or len(named.parts) > 1:
        raise BadInputError(
            f"drafter is {str(name)!r}; give a drafter, its folder or lookup, or `load` the model"
        )
    folder = next(iter(named.parts), None)
    host = host_drafters(named.host, beside=folder is not None)
    return None if folder is None else DrafterFolder(Path(folder)), host
