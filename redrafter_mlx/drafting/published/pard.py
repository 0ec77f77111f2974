"""PARD: a draft language model that drafts all its tokens in one call.

An et al. (arXiv 2504.18583): a small language model is trained further to read mask tokens in place
of unknown tokens, and to predict the token after each mask. So the call that reads the committed
positions and the root reads masks after them too. The root and each mask give one level of drafts:

    reads      ... the  sky  [mask] [mask]        sky is the root
    drafts               is   blue   today

The levels do not depend on each other's tokens. The masks' cache slots come after the root's, and
the next step overwrites them.
"""

from __future__ import annotations

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.tokenizer_utils import TokenizerWrapper

from redrafter_mlx.checks import check_int
from redrafter_mlx.drafting.cached_levels import chain, memory_of
from redrafter_mlx.drafting.draft_model import DraftModel, embeddable
from redrafter_mlx.drafting.interface import Memory, Seen
from redrafter_mlx.drafting.level_drafter import DraftLevels, IndependentLevels
from redrafter_mlx.target_model.model import Target

MASK_KEY = "pard_token"
"""Key of the mask token in config.json."""


class Pard(DraftModel, well_formed=True):
    """A PARD model; its memory is that of a draft language model."""

    def __init__(
        self,
        model: nn.Module,
        tokenizer: TokenizerWrapper,
        mask_token: int,
        name: str = "PARD",
        target: Target | None = None,
    ) -> None:
        """Raise BadInputError for a mask token that the model has no embedding for."""
        super().__init__(model, tokenizer, name, target)
        check_int(MASK_KEY, mask_token, 0, self.model.vocab_size - 1)
        self._mask_token = mask_token

    @property
    def level_cost(self) -> float:
        return 0.0  # all levels are those of one call

    @property
    def block_cost(self) -> float:
        return super().level_cost

    @property
    def timing_key(self) -> str:
        return f"PARD {super().timing_key}"

    def levels(self, memory: Memory, seen: Seen, drafts: int) -> DraftLevels:
        """Return the distributions after the root and at the masks after it.

        The memory then holds the committed positions and the root; the masks' slots are
        overwritten.
        """
        model, cache = self.model, self.filled_cache(memory)
        tokens = mx.pad(embeddable(seen.tokens, model), [(0, 0), (0, drafts - 1)])
        after_root = mx.arange(tokens.shape[1]) > seen.count[:, None]
        tokens = mx.where(after_root, self._mask_token, tokens)
        cache.plan_tree(chain(tokens), seen.position, seen.bound)
        hidden, _ = model.call(tokens, cache)
        drafted = seen.count[:, None, None] + mx.arange(drafts)[None, :, None]
        logits = model.logits(mx.take_along_axis(hidden, drafted, axis=1))
        logits = logits[..., : self.vocabulary.size].astype(mx.float32)
        each = list(mx.split(logits, drafts, axis=1))
        return IndependentLevels(self.vocabulary, each, memory_of(cache))
