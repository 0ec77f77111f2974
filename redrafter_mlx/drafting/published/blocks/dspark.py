"""DSpark: a block drafter whose distributions are corrected by the token drafted before.

DeepSeek's DeepSpec (arXiv 2607.05147). The block is DFlash's; with h_i its row and b_i its logits
for draft i, and t the token before that draft,

    logits = b_i + w2 c,      c = w1[t]                                        (vanilla)
                              c = sigmoid(gate [h_i; w1[t]]) w1[t]             (gated)
                              c = tanh(o),  g, n, o = joint [s; w1[t]; h_i],
                              s <- sigmoid(g) s + (1 - sigmoid(g)) tanh(n)     (rnn)

So one call of the block and one small product a level give a tree in which the distribution after
each node is its own. The files' confidence head, which says how far to verify a chain, is not read:
which nodes are worth verifying follows from acceptance rates and scores.
"""

from __future__ import annotations

import copy
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
from redrafter_mlx.drafting.published.blocks.network import BlockNetwork
from redrafter_mlx.drafting.published.network_config import shape_of
from redrafter_mlx.speculation.beam_search import select
from redrafter_mlx.speculation.draft_vocabulary import DraftVocabulary
from redrafter_mlx.target_model.adapter import restricted_to
from redrafter_mlx.target_model.fingerprint import nbytes_of
from redrafter_mlx.target_model.model import Target

_HEAD = "markov_head"


@dataclass(frozen=True, kw_only=True)
class MarkovConfig(BlockConfig):
    """A block drafter's configuration, and the rank of the correction."""

    rank: int


class MarkovHead(nn.Module):
    """The correction, under its published names; which kind it is follows from its tensors."""

    def __init__(self, config: MarkovConfig) -> None:
        super().__init__()
        H, rank = config.hidden_size, config.rank
        self.rank = rank
        self.markov_w1 = nn.Embedding(config.vocab_size, rank)
        self.markov_w2 = nn.Linear(rank, config.output_size, bias=False)
        if config.has(f"{_HEAD}.gate_proj.weight"):
            self.gate_proj = nn.Linear(H + rank, rank)
        if config.has(f"{_HEAD}.joint_proj.weight"):
            self.joint_proj = nn.Linear(H + 2 * rank, 3 * rank)

    def __call__(
        self, tokens: mx.array, hidden: mx.array, state: mx.array
    ) -> tuple[mx.array, mx.array]:
        """Return the correction [B, W, V'] float32 and the next state, after tokens [B, W].

        Shapes:
          hidden: [B, 1, H], the block's row of this draft
          state:  [B, W, rank], 0 at the root
        """
        before = self.markov_w1(tokens).astype(hidden.dtype)
        row = mx.broadcast_to(hidden, (*tokens.shape, hidden.shape[-1]))
        if "gate_proj" in self:
            before = mx.sigmoid(self.gate_proj(mx.concatenate([row, before], axis=-1))) * before
        if "joint_proj" in self:
            joined = self.joint_proj(mx.concatenate([state, before, row], axis=-1))
            gate, new, out = mx.split(joined, 3, axis=-1)
            gate, before = mx.sigmoid(gate), mx.tanh(out)
            state = gate * state + (1 - gate) * mx.tanh(new)
        return self.markov_w2(before).astype(mx.float32), state


class MarkovNetwork(BlockNetwork):
    """A block network and the correction."""

    def __init__(self, config: MarkovConfig) -> None:
        super().__init__(config)
        self.markov_head = MarkovHead(config)

    @property
    def level_bytes(self) -> int:
        return nbytes_of(self.markov_head) - nbytes_of(self.markov_head.markov_w1)

    def within(self, vocabulary: DraftVocabulary) -> MarkovNetwork:
        network, head = copy.copy(self), copy.copy(self.markov_head)
        head.markov_w2 = restricted_to(head.markov_w2, vocabulary.rows)
        network.markov_head = head
        return network


class DSparkDrafter(BlockDrafter, well_formed=True):
    """A block drafter with a correction."""

    def levels_of(self, hidden: mx.array, root: mx.array, memory: Memory) -> DraftLevels:
        head = cast(MarkovNetwork, self.rows.network).markov_head
        return MarkovLevels(self.vocabulary, head, hidden, self.rows.logits(hidden), root, memory)


class MarkovLevels(DraftLevels):
    """Levels that depend on the token drafted before; see `DraftLevels`.

    Shapes:
      hidden: [B, drafts, H], logits: [B, drafts, V'] of the block; root: [B]
    """

    def __init__(
        self,
        vocabulary: DraftVocabulary,
        head: MarkovHead,
        hidden: mx.array,
        logits: mx.array,
        root: mx.array,
        memory: Memory,
    ) -> None:
        super().__init__(vocabulary)
        self._head, self._hidden, self._logits = head, hidden, logits
        self._root, self._memory, self._depth = root, memory, 0
        self._state = mx.zeros((root.shape[0], 1, head.rank), hidden.dtype)

    @property
    def memory(self) -> Memory:
        return self._memory

    def first(self) -> mx.array:
        return self._corrected(self._root[:, None])

    def following(self, parents: mx.array, tokens: mx.array) -> mx.array:
        self._depth += 1
        self._state = select(self._state, parents)
        return self._corrected(tokens)

    def _corrected(self, tokens: mx.array) -> mx.array:
        here = slice(self._depth, self._depth + 1)
        correction, self._state = self._head(tokens, self._hidden[:, here], self._state)
        return self._logits[:, here] + correction


def load_dspark(files: DrafterFiles, target: Target) -> DSparkDrafter:
    """Load the drafter, bound to its target; errors as in `Form.load`."""
    network = MarkovNetwork(read_dspark(files, target))
    vocabulary = fill_block(network, files, target)
    return DSparkDrafter(DSPARK.name, network, target, vocabulary)


def read_dspark(files: DrafterFiles, target: Target) -> MarkovConfig:
    """Read the configuration for this target, without weights; errors as in `read_block`."""
    block = read_block(files, target, first_row=0)
    return MarkovConfig(**vars(block), rank=shape_of(files, f"{_HEAD}.markov_w1.weight")[1])


DSPARK = Form(recognition.DSPARK, load_dspark)
"""DSpark of DeepSpec, speculators, SpecForge and their relatives for Qwen3-like layers."""
