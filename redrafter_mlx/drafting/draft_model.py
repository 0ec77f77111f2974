"""A draft language model: a smaller model with the target's tokenizer.

Leviathan et al. (arXiv 2211.17192) and Chen et al. (arXiv 2302.01318) draft one candidate with it.
Here beam search drafts a tree, level by level, over the draft model's own cache. The first call
reads the positions committed since the last step and the root. Each further level is a call with a
query row for every beam, so a step takes L - 1 calls of the draft model. A model with a recurrent
state keeps none for each beam: every level is a call on the whole tree of drafts so far.
"""

from __future__ import annotations

import copy

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.tokenizer_utils import TokenizerWrapper

from redrafter_mlx.drafting.cached_levels import CachedDrafter, CachedLevels, chain, commit
from redrafter_mlx.drafting.interface import Features, Memory, Seen
from redrafter_mlx.drafting.level_drafter import DraftLevels
from redrafter_mlx.errors import MismatchError
from redrafter_mlx.speculation.constants import iota
from redrafter_mlx.speculation.draft_vocabulary import DraftVocabulary
from redrafter_mlx.speculation.tree import TokenTree
from redrafter_mlx.target_model.cache.kv_cache import TreeCache
from redrafter_mlx.target_model.fingerprint import nbytes_of, shapes_hash
from redrafter_mlx.target_model.model import Target


class DraftModel(CachedDrafter, well_formed=True):
    """Any mlx-lm model whose cache can hold a tree, as a drafter."""

    def __init__(
        self,
        model: nn.Module,
        tokenizer: TokenizerWrapper,
        name: str = "a draft model",
        target: Target | None = None,
    ) -> None:
        """Raise UnsupportedModelError, naming the model, for state that a tree cannot share.

        target: the model's, if it was made before
        """
        self.model = target or Target(model)
        size = self.model.vocab_size
        super().__init__(name, model, DraftVocabulary(size, size))
        self._tokenizer = tokenizer
        self._cost = 1.0

    def bind(self, target: Target, tokenizer: TokenizerWrapper) -> DraftModel:
        """Return the same model, restricted to tokens that the target has too.

        Raises MismatchError, naming the first token that differs.
        """
        bound = copy.copy(self)
        common = min(target.vocab_size, self.model.vocab_size)
        check_same_tokens(self._tokenizer, tokenizer, common, self._name)
        bound.vocabulary = DraftVocabulary(common, target.vocab_size)
        bound._cost = min(nbytes_of(self.model.model) / nbytes_of(target.model), 1.0)
        return bound

    @property
    def features(self) -> Features:
        return Features(every_position=True)

    @property
    def can_cut(self) -> bool:
        return not self.model.states

    @property
    def level_cost(self) -> float:
        return self._cost

    @property
    def timing_key(self) -> str:
        return f"draft model {self.model.model_type} {shapes_hash(self.module)}"

    def new_cache(self) -> TreeCache:
        return self.model.new_cache(whole=True)

    def append(self, seen: Seen, cache: TreeCache) -> None:
        self.model.hidden(embeddable(seen.tokens[:, :-1], self.model), cache.layers)

    def levels(self, memory: Memory, seen: Seen, drafts: int) -> DraftLevels:
        del drafts
        form = RecurrentLevels if self.model.states else DraftModelLevels
        return form(self.model, self.filled_cache(memory), seen, self.vocabulary)


class DraftModelLevels(CachedLevels):
    """The draft model's distribution after one root; see `DraftLevels`.

    The nodes of all levels are in the cache after the root, and the next step overwrites them.
    """

    def __init__(
        self, model: Target, cache: TreeCache, seen: Seen, vocabulary: DraftVocabulary
    ) -> None:
        super().__init__(vocabulary, cache, seen, seen.root_position + 1, seen.bound + 1)
        self.model = model

    def first(self) -> mx.array:
        """Read positions committed since the last step; return logits [B, 1, V'] after the root."""
        seen = self._seen
        tokens = embeddable(seen.tokens, self.model)
        self._cache.plan_tree(chain(tokens), seen.position, seen.bound)
        hidden, _ = self.model.call(tokens, self._cache)
        commit(seen, self._cache, tokens.shape[1])
        at_root = mx.take_along_axis(hidden, seen.count[:, None, None], axis=1)
        return self._cut(self.model.logits(at_root))

    def following(self, parents: mx.array, tokens: mx.array) -> mx.array:
        """Return logits [B, W, V'] after tokens [B, W], which extend beams `parents` [B, W]."""
        self._plan(parents)
        _, logits = self.model.call(embeddable(tokens, self.model), self._cache)
        return self._cut(logits)

    def _cut(self, logits: mx.array) -> mx.array:
        return logits[..., : self.vocabulary.size].astype(mx.float32)


class RecurrentLevels(DraftModelLevels):
    """The levels of a draft model with a recurrent state, which is that of the committed text."""

    def __init__(
        self, model: Target, cache: TreeCache, seen: Seen, vocabulary: DraftVocabulary
    ) -> None:
        super().__init__(model, cache, seen, vocabulary)
        root = mx.zeros((seen.root.shape[0], 1), mx.int32)
        mask = mx.ones((*root.shape, 1), mx.bool_)
        self._tree = TokenTree(seen.root[:, None], root - 1, root, root, mask, 0, True)
        self._newest = 1  # number of nodes in the last level

    def following(self, parents: mx.array, tokens: mx.array) -> mx.array:
        """Read the root and all drafts again; return logits [B, W, V'] after the newest."""
        seen = self._seen
        self._tree = with_level(self._tree, self._newest, parents, tokens)
        self._newest = W = tokens.shape[1]
        self._cache.plan_tree(self._tree, seen.root_position, seen.bound)
        _, logits = self.model.call(embeddable(self._tree.tokens, self.model), self._cache)
        self._cache.pending = None  # the call committed the text, and drafts are not committed
        return self._cut(logits[:, -W:])


def with_level(tree: TokenTree, newest: int, parents: mx.array, tokens: mx.array) -> TokenTree:
    """Return the tree with a level of tokens [B, W] after the last one, of `newest` nodes.

    Shapes:
      parents: [B, W] int32, among the nodes of the last level
    """
    N, (B, W), depth = tree.tokens.shape[1], tokens.shape, tree.max_depth + 1
    parents = parents + (N - newest)
    above = mx.take_along_axis(tree.mask, parents[:, :, None], axis=1)  # [B, W, N]
    itself = mx.broadcast_to(mx.eye(W, dtype=mx.bool_), (B, W, W))
    mask = mx.concatenate([mx.pad(tree.mask, [(0, 0), (0, 0), (0, W)]),
                           mx.concatenate([above, itself], axis=2)], axis=1)  # fmt: skip
    own = mx.broadcast_to(iota(W), (B, W))
    return TokenTree(
        mx.concatenate([tree.tokens, tokens], axis=1),
        mx.concatenate([tree.parents, parents], axis=1),
        mx.concatenate([tree.depths, mx.full((B, W), depth, mx.int32)], axis=1),
        mx.concatenate([tree.beams, own], axis=1),
        mask,
        depth,
        tree.is_chain and W == 1,
    )


def check_same_tokens(
    own: TokenizerWrapper, target: TokenizerWrapper, common: int, name: str
) -> None:
    """Raise MismatchError unless both tokenizers have the same token for each id below `common`.

    Ids that one of them does not use, such as vocabulary padding, are skipped.
    """
    theirs = {i: token for token, i in target.get_vocab().items()}
    mine = {i: token for token, i in own.get_vocab().items()}
    for i in range(common):
        if i in mine and i in theirs and mine[i] != theirs[i]:
            raise MismatchError(
                f"token {i} is {mine[i]!r} in {name} and {theirs[i]!r} in the target; a draft "
                f"model must have the target's tokenizer"
            )


def embeddable(tokens: mx.array, model: Target) -> mx.array:
    """Replace tokens that the model has no embedding for with its last token."""
    return mx.minimum(tokens, model.vocab_size - 1)
