"""IBM's MLP speculator: like Medusa's heads, but each reads the token drafted before it.

Wertheimer et al. (arXiv 2404.19124) and fms-extras' models/speculator.py. With s_0 the final norm's
output before the root and t_0 the root, for i = 0, 1, ...

    s_{i+1} = gelu(norm_i(proj_i s_i + c emb_i(t_i)))       logits = head_i s_{i+1}

The norm divides by the root mean square, without subtracting the mean, and has a scale and a shift.
c weighs embeddings so that the first state still makes up half of the last one:

    w = 0.5 ^ (0.5 / n),  c = sqrt((1 - w^2) D / 2) / w     for n heads, even if fewer are used
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import mlx.core as mx
import mlx.nn as nn

from redrafter_mlx.config import MAX_BEAM_LENGTH
from redrafter_mlx.drafting.files import recognition
from redrafter_mlx.drafting.files.drafter_files import (
    DrafterFiles,
    Form,
    check_pair,
    fill,
    parameters_of,
    write_drafter,
)
from redrafter_mlx.drafting.files.tensor_names import SPECULATOR_PREFIX
from redrafter_mlx.drafting.level_drafter import DraftLevels, HeadsDrafter, shuffled
from redrafter_mlx.speculation.beam_search import select
from redrafter_mlx.speculation.draft_vocabulary import DraftVocabulary
from redrafter_mlx.target_model.fingerprint import nbytes_of
from redrafter_mlx.target_model.model import Target

_EPS = 1e-6

_CANDIDATES = 5
"""Number of candidates, and of tokens of the first head; each later head has one token fewer, at
least 1. Other engines draft this many by default."""

_COPY_OF_TIED = re.compile(r"((emb|head|ln)\.[1-9]\d?|proj\.([2-9]|[1-3]\d))\.")
"""Names of copies: if weights are tied, files hold them once or under the name of each head."""


@dataclass(frozen=True)
class SpeculatorConfig:
    """hidden_size: of the target; inner_size: D; heads: n; other fields as in config.json."""

    hidden_size: int
    inner_size: int
    vocab_size: int
    heads: int
    tie_weights: bool
    scale_input: bool

    @property
    def embedding_weight(self) -> float:
        """c: the weight of an embedding relative to the previous state."""
        state = 0.5 ** (0.5 / self.heads)
        return math.sqrt((1 - state**2) * self.inner_size / 2) / state


class ShiftedRMSNorm(nn.Module):
    """x / sqrt(mean(x^2) + eps), scaled and shifted."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.weight = mx.ones((size,))
        self.bias = mx.zeros((size,))

    def __call__(self, x: mx.array) -> mx.array:
        return mx.fast.rms_norm(x, self.weight, _EPS) + self.bias


class SpeculatorNetwork(nn.Module):
    """The speculator's parameters under their published names; tied ones are stored once."""

    def __init__(self, config: SpeculatorConfig) -> None:
        super().__init__()
        self.config = config
        H, D, V = config.hidden_size, config.inner_size, config.vocab_size
        once = range(1 if config.tie_weights else config.heads)
        projections = min(2, config.heads) if config.tie_weights else config.heads
        self.emb = [nn.Embedding(V, D) for _ in once]
        self.proj = [nn.Linear(D if i else H, D, bias=False) for i in range(projections)]
        self.head = [nn.Linear(D, V, bias=False) for _ in once]
        self.ln = [ShiftedRMSNorm(D) for _ in once]

    def initial_state(self, hidden: mx.array) -> mx.array:
        """Map the target's hidden states [..., H] to the input of the first head."""
        if not self.config.scale_input:
            return hidden
        return mx.fast.rms_norm(hidden, None, _EPS) / math.sqrt(2)

    def advance(self, head: int, state: mx.array, tokens: mx.array) -> mx.array:
        """Return a head's state [B, W, D], from the previous head's state and tokens [B, W]."""
        i = 0 if self.config.tie_weights else head
        z = self.proj[min(head, len(self.proj) - 1)](state)
        z = z + self.config.embedding_weight * self.emb[i](tokens).astype(z.dtype)
        return nn.gelu(self.ln[i](z))

    def logits(self, head: int, state: mx.array) -> mx.array:
        """Return logits [B, W, V] float32 of one head."""
        out: mx.array = self.head[0 if self.config.tie_weights else head](state)
        return out.astype(mx.float32)


class SpeculatorDrafter(HeadsDrafter, well_formed=True):
    """An MLP speculator: it reads only the newest hidden state and has no memory."""

    def __init__(self, network: SpeculatorNetwork, target: Target) -> None:
        V, heads = network.config.vocab_size, network.config.heads
        # Embeddings are left out: only one of their rows per beam is read.
        read = nbytes_of(network) - sum(nbytes_of(table) for table in network.emb)
        levels = 1 if network.config.tie_weights else heads
        vocabulary = DraftVocabulary(V, V)
        super().__init__("MLP speculator", network, vocabulary, target, heads, read / levels)
        self._network, self._target = network, target

    def untrained(self) -> SpeculatorDrafter:
        return SpeculatorDrafter(shuffled(self._network), self._target)

    def levels_of(self, features: mx.array, root: mx.array, drafts: int) -> SpeculatorLevels:
        del drafts
        return SpeculatorLevels(self._network, self.vocabulary, features, root)


class SpeculatorLevels(DraftLevels):
    """A state for each beam, passed from head to head; see `DraftLevels`."""

    def __init__(
        self,
        network: SpeculatorNetwork,
        vocabulary: DraftVocabulary,
        hidden: mx.array,
        root: mx.array,
    ) -> None:
        super().__init__(vocabulary)
        self._network, self._root = network, root
        self._state = network.initial_state(hidden[:, None])
        self._head = 0

    def first(self) -> mx.array:
        self._state = self._network.advance(0, self._state, self._root[:, None])
        return self._network.logits(0, self._state)

    def following(self, parents: mx.array, tokens: mx.array) -> mx.array:
        self._head += 1
        state = select(self._state, parents)
        self._state = self._network.advance(self._head, state, tokens)
        return self._network.logits(self._head, self._state)


def load_speculator(files: DrafterFiles, target: Target) -> SpeculatorDrafter:
    """Load the speculator, bound to its target; errors as in `Form.load`."""
    config = speculator_config(files)
    check_pair(config.hidden_size, target.hidden_size, "hidden size")
    check_pair(config.vocab_size, target.vocab_size, "vocabulary")
    tensors = files.read(lambda name: name.removeprefix(SPECULATOR_PREFIX))
    if config.tie_weights:
        tensors = {n: a for n, a in tensors.items() if not _COPY_OF_TIED.match(n)}
    network = SpeculatorNetwork(config)
    fill(network, tensors, files, target.dtype)
    return SpeculatorDrafter(network, target)


def save_speculator(network: SpeculatorNetwork, folder: Path, record: Mapping[str, object]) -> None:
    """Write the speculator in half precision, in fms-extras' layout for transformers.

    record: further keys of config.json
    """
    config = network.config
    keys = {
        "model_type": "mlp_speculator", "architectures": ["MLPSpeculatorPreTrainedModel"],
        "vocab_size": config.vocab_size, "emb_dim": config.hidden_size,
        "inner_dim": config.inner_size, "n_predict": config.heads, "n_candidates": _CANDIDATES,
        "top_k_tokens_per_head": [max(1, _CANDIDATES - head) for head in range(config.heads)],
        "tie_weights": config.tie_weights, "scale_input": config.scale_input,
    }  # fmt: skip
    tensors = {SPECULATOR_PREFIX + name: array for name, array in parameters_of(network).items()}
    write_drafter(folder, tensors, {**keys, **record}, mx.float16)


def speculator_config(files: DrafterFiles) -> SpeculatorConfig:
    """Read config.json; raises DamagedFileError naming a key."""
    hidden_size = files.integer("emb_dim")
    return SpeculatorConfig(
        hidden_size=hidden_size,
        inner_size=files.integer("inner_dim", 0, minimum=0) or hidden_size,
        vocab_size=files.integer("vocab_size"),
        heads=files.integer("n_predict", maximum=MAX_BEAM_LENGTH - 1),
        tie_weights=files.flag("tie_weights", False),
        scale_input=files.flag("scale_input", False),
    )


MLP_SPECULATOR = Form(
    recognition.MLP_SPECULATOR,
    load=load_speculator,
)
"""fms-extras' own files, and those for transformers, whose tensor names have a prefix."""
