"""DFlash 2: DFlash with convolutions along the block, and a selector of each draft's candidates.

Inco AI and z-lab, 2026. Around each attention and each MLP, rows are convolved with those before
them in the block. With u_t the normed row t, f the layer, and W and D kernels, of which D is
computed from u_t for groups of channels,

    y_t = sum_o (W_0o + D_0o(u_t)) u_{t-o}      z = f(y)
    out_t = sum_o (W_1o + D_1o(u_t)) z_{t-o}

The selector scores the K likeliest tokens b of each draft, given the token a before it and the row
h of the draft:

    score(b | a) = logit(b) + sum_r A[a]_r (P h)_r B[b]_r

So each node of a tree has a distribution of its own over the same K tokens.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import cast

import mlx.core as mx
import mlx.nn as nn

from redrafter_mlx.drafting.files import recognition
from redrafter_mlx.drafting.files.drafter_files import DrafterFiles, Form
from redrafter_mlx.drafting.interface import Memory
from redrafter_mlx.drafting.level_drafter import DraftLevels
from redrafter_mlx.drafting.published.blocks.config import BlockConfig, read_block
from redrafter_mlx.drafting.published.blocks.dflash import BlockDrafter, fill_block
from redrafter_mlx.drafting.published.blocks.network import BlockLayer, BlockNetwork
from redrafter_mlx.drafting.published.network_config import flattened, shape_of
from redrafter_mlx.speculation.beam_search import top_k
from redrafter_mlx.speculation.draft_vocabulary import DraftVocabulary
from redrafter_mlx.target_model.cache.layer_cache import AttentionCache
from redrafter_mlx.target_model.model import Target


@dataclass(frozen=True, kw_only=True)
class SelectorConfig(BlockConfig):
    """A block drafter's configuration, and what DFlash 2 adds.

    taps:       number of rows that a convolution reads, its own included
    group:      number of channels that share a computed kernel
    rank:       of the selector
    candidates: K, number of tokens that it chooses among
    """

    taps: int
    group: int
    rank: int
    candidates: int


class Convolution(nn.Module):
    """A layer's convolutions before and after it, with kernels computed from its input."""

    def __init__(self, config: SelectorConfig) -> None:
        super().__init__()
        H, taps = config.hidden_size, config.taps
        self._taps, self._group = taps, config.group
        self.base_kernel = mx.zeros((2, taps, H))
        self.kernel_projection = nn.Linear(H, 2 * taps * (H // config.group), bias=False)

    def around(self, layer: Callable[[mx.array], mx.array], x: mx.array) -> mx.array:
        """Return a layer's output, convolved, of rows [B, n, H] that are convolved first."""
        computed = self.kernel_projection(x).reshape(*x.shape[:2], 2, self._taps, -1)
        kernels = self.base_kernel + mx.repeat(computed, self._group, axis=-1)
        return _convolved(layer(_convolved(x, kernels[:, :, 0])), kernels[:, :, 1])


def _convolved(x: mx.array, kernels: mx.array) -> mx.array:
    """Convolve rows [B, n, H] with kernels [B, n, taps, H]; rows before the block are 0."""
    n, taps = x.shape[1], kernels.shape[2]
    padded = mx.pad(x, [(0, 0), (taps - 1, 0), (0, 0)])
    rows = [padded[:, taps - 1 - tap : taps - 1 - tap + n] for tap in range(taps)]
    return sum((kernels[:, :, tap] * row for tap, row in enumerate(rows)), mx.array(0, x.dtype))


class ConvolvedLayer(BlockLayer):
    """A block's layer between convolutions."""

    def __init__(self, config: SelectorConfig, name: str) -> None:
        super().__init__(config, name)
        self.attention_conv = Convolution(config)
        self.mlp_conv = Convolution(config)

    def __call__(
        self, x: mx.array, context: mx.array, mask: mx.array, cache: AttentionCache
    ) -> mx.array:
        def attention(inner: mx.array) -> mx.array:
            return self.attention(inner, context, mask, cache)

        x = x + self.attention_conv.around(attention, self.input_layernorm(x))
        return x + self.mlp_conv.around(self.mlp, self.post_attention_layernorm(x))


class Selector(nn.Module):
    """Scores of candidates, under their published names."""

    def __init__(self, config: SelectorConfig) -> None:
        super().__init__()
        self.candidates = config.candidates
        self.predecessor_codebook = mx.zeros((config.vocab_size, config.rank))
        self.successor_codebook = mx.zeros((config.vocab_size, config.rank))
        self.hidden_projection = nn.Linear(config.hidden_size, config.rank, bias=False)


class DFlash2Network(BlockNetwork):
    """A block network with convolutions, and the selector."""

    def __init__(self, config: SelectorConfig) -> None:
        super().__init__(config, lambda name: ConvolvedLayer(config, name))
        self.candidate_selector = Selector(config)


class DFlash2Drafter(BlockDrafter, well_formed=True):
    """A block drafter with a selector."""

    def levels_of(self, hidden: mx.array, root: mx.array, memory: Memory) -> DraftLevels:
        selector = cast(DFlash2Network, self.rows.network).candidate_selector
        logits = self.rows.logits(hidden)
        return SelectorLevels(self.vocabulary, selector, hidden, logits, root, memory)


class SelectorLevels(DraftLevels):
    """Levels of K candidates each, whose scores depend on the token before; see `DraftLevels`.

    Shapes:
      hidden: [B, drafts, H], logits: [B, drafts, V'] of the block; root: [B]
    """

    def __init__(
        self,
        vocabulary: DraftVocabulary,
        selector: Selector,
        hidden: mx.array,
        logits: mx.array,
        root: mx.array,
        memory: Memory,
    ) -> None:
        super().__init__(vocabulary)
        B, n, V = logits.shape
        K = min(selector.candidates, V)
        best, outputs = top_k(logits.reshape(B * n, V), K)
        self._best, self._outputs = best.reshape(B, n, K), outputs.reshape(B, n, K)
        self._selector, self._rows = selector, selector.hidden_projection(hidden)
        self._root, self._memory, self._depth = root, memory, 0

    @property
    def memory(self) -> Memory:
        return self._memory

    def first(self) -> mx.array:
        return self._scored(self._root[:, None])

    def following(self, parents: mx.array, tokens: mx.array) -> mx.array:
        del parents
        self._depth += 1
        return self._scored(tokens)

    def _scored(self, before: mx.array) -> mx.array:
        """Return the scores [B, W, V'] after tokens [B, W]; -inf for all but the candidates."""
        outputs, best = self._outputs[:, self._depth], self._best[:, self._depth]  # [B, K]
        tokens = self.vocabulary.to_tokens(outputs)
        row = self._rows[:, self._depth, None]  # [B, 1, rank]
        context = self._selector.predecessor_codebook[before] * row
        edges = context @ self._selector.successor_codebook[tokens].swapaxes(1, 2)
        scores = best[:, None] + edges.astype(mx.float32)  # [B, W, K]
        index = mx.broadcast_to(outputs[:, None], scores.shape)
        everything = mx.full((*before.shape, self.vocabulary.size), -mx.inf)
        return mx.put_along_axis(everything, index, scores, axis=2)


def load_dflash2(files: DrafterFiles, target: Target) -> DFlash2Drafter:
    """Load the drafter, bound to its target; errors as in `Form.load`."""
    block = read_block(files, target, first_row=1, windows_causal=False)
    keys = flattened(files)
    config = SelectorConfig(
        **vars(block),
        taps=keys.integer("conv_kernel_size", 2, maximum=block.rows),
        group=keys.integer("conv_group_size", 16, maximum=block.hidden_size),
        rank=shape_of(files, "candidate_selector.predecessor_codebook")[1],
        candidates=keys.integer("selector_top_k", 16),
    )
    if config.hidden_size % config.group:
        raise keys.bad_value("conv_group_size", f"a divisor of {config.hidden_size}")
    network = DFlash2Network(config)
    vocabulary = fill_block(network, files, target)
    return DFlash2Drafter(DFLASH2.name, network, target, vocabulary)


DFLASH2 = Form(recognition.DFLASH2, load_dflash2)
"""DFlash 2 of its authors, and of speculators."""
