"""Medusa: heads that each predict the token at one distance, all from one hidden state.

Cai et al. (arXiv 2401.10774, section 2.1): head k reads the final norm's output h at position t and
predicts token t + 2 + k, since the model itself predicts t + 1. Here that one is known when drafts
are made, as the root, so head 0 drafts the token after the root. A head is

    h <- h + silu(W h + b), for each of its layers       logits = L h

The heads do not see each other's tokens, so a path's score is the sum of its tokens' own.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

import mlx.core as mx
import mlx.nn as nn

from redrafter_mlx.drafting.draft_vocabulary import DraftVocabulary
from redrafter_mlx.drafting.drafter_files import (
    DrafterFiles,
    Form,
    check_pair,
    check_tokens,
    fill,
)
from redrafter_mlx.drafting.level_drafter import HeadsDrafter, IndependentLevels
from redrafter_mlx.drafting.recurrent import ResidualBlock
from redrafter_mlx.errors import DamagedFileError
from redrafter_mlx.target.adapter import find_head
from redrafter_mlx.target.fingerprint import nbytes_of, shapes_hash
from redrafter_mlx.target.model import Target

_IN_MODEL = re.compile(r"^medusa_heads?\.")
"""Before the heads' names in a Medusa-2 model, whose trunk's tensors stand beside them."""

_NAMES = (
    (re.compile(r"(\d+)\.(\d+)\.linear\.(weight|bias)"), r"heads.\1.blocks.\2.linear.\3"),
    (re.compile(r"(\d+)\.\d+\.weight"), r"heads.\1.output.weight"),
    (re.compile(r"blocks\.(\d+)\.layers\.(\d+)\.(weight|bias)"), r"heads.\1.blocks.\2.linear.\3"),
    (re.compile(r"lm_heads\.(\d+)\.weight"), r"heads.\1.output.weight"),
    (re.compile(r"lm_head\.weight"), r"output.weight"),
)
"""The authors' and text-generation-inference's names, then vLLM's, as the network's own."""

_BLOCK = re.compile(r"heads\.(\d+)\.blocks\.(\d+)\.")

_TOKEN_MAP = "token_map"
"""vLLM's: the token of each output, where the heads draft only some."""


@dataclass(frozen=True)
class MedusaConfig:
    """What the tensors say of the heads.

    heads, layers: heads, and residual blocks in each
    biases:        whether blocks have them
    outputs:       `own`: a matrix in each head; `shared`: one for all; `target`: the target's
    output_size:   V', how many tokens can be drafted
    """

    hidden_size: int
    heads: int
    layers: int
    biases: bool
    outputs: str
    output_size: int


class MedusaHead(nn.Module):
    """Residual blocks and, if it has one of its own, the output matrix."""

    def __init__(self, config: MedusaConfig) -> None:
        super().__init__()
        D = config.hidden_size
        self.blocks = [ResidualBlock(D, config.biases) for _ in range(config.layers)]
        if config.outputs == "own":
            self.output = nn.Linear(D, config.output_size, bias=False)

    def __call__(self, hidden: mx.array) -> mx.array:
        """Hidden states [..., D] as its output matrix reads them."""
        for block in self.blocks:
            hidden = block(hidden)
        return hidden


class MedusaNetwork(nn.Module):
    """The heads and, if they share one that is not the target's, the output matrix."""

    def __init__(self, config: MedusaConfig) -> None:
        super().__init__()
        self.config = config
        self.heads = [MedusaHead(config) for _ in range(config.heads)]
        if config.outputs == "shared":
            self.output = nn.Linear(config.hidden_size, config.output_size, bias=False)


class MedusaDrafter(HeadsDrafter):
    """Medusa heads with their target's output layer, where they have none."""

    def __init__(self, network: MedusaNetwork, target: Target, vocabulary: DraftVocabulary) -> None:
        read, heads = nbytes_of(network), network.config.heads
        if network.config.outputs == "target":
            read += nbytes_of(find_head(target.model) or target.embedding)
        super().__init__(target, vocabulary, heads, read / heads)
        self._network = network
        self._target_output = target.output_rows(vocabulary.tokens)

    @property
    def name(self) -> str:
        return "Medusa"

    @property
    def module(self) -> MedusaNetwork:
        return self._network

    @property
    def timing_key(self) -> str:
        return f"Medusa {shapes_hash(self._network)}"

    def levels_of(self, features: mx.array, root: mx.array, drafts: int) -> IndependentLevels:
        """All heads at once, so that an output matrix which they share is read once."""
        del root
        outputs, heads = self._network.config.outputs, self._network.heads[:drafts]
        hidden = [head(features[:, None]) for head in heads]
        if outputs == "own":
            each = [head.output(h) for head, h in zip(heads, hidden, strict=True)]
            logits = mx.concatenate(each, axis=1)
        else:
            output = self._network.output if outputs == "shared" else self._target_output
            logits = output(mx.concatenate(hidden, axis=1))
        return IndependentLevels(self._vocabulary, logits.astype(mx.float32))


def _load(files: DrafterFiles, target: Target) -> MedusaDrafter:
    own_names = _own_names(files)
    config, tokens_named = _config(files, own_names, target)
    stored = files.tensors.read()
    tensors = {own: stored[name] for name, own in own_names.items()}
    tokens = None
    if tokens_named:
        tokens = stored[_TOKEN_MAP].astype(mx.int32)
        check_tokens(stored[_TOKEN_MAP], _TOKEN_MAP, target.vocab_size, files.tensors.path)
        for name, array in tensors.items():
            if name.endswith("output.weight") and array.shape[0] == target.vocab_size:
                tensors[name] = array[tokens]
    network = MedusaNetwork(config)
    fill(network, tensors, files, target.dtype)
    vocabulary = DraftVocabulary(config.output_size, target.vocab_size, tokens)
    return MedusaDrafter(network, target, vocabulary)


def _config(
    files: DrafterFiles, own_names: Mapping[str, str], target: Target
) -> tuple[MedusaConfig, bool]:
    """What the shapes say, and whether the heads draft only the tokens of a map.

    The heads are counted: config.json of the authors' Vicuna-7B says 2, and its file holds 5.
    """
    shapes = {own: files.tensors.shapes[name] for name, own in own_names.items()}
    matrix = shapes.get("heads.0.blocks.0.linear.weight", ())
    if len(matrix) != 2:
        raise DamagedFileError(f"{files.tensors.path} lacks the matrix of its first Medusa head")
    check_pair(matrix[1], target.hidden_size, "hidden size")
    V = target.vocab_size
    mapped = sum(files.tensors.shapes.get(_TOKEN_MAP, ()))
    tokens_named = 0 < mapped < V  # a map of the whole vocabulary is not used, as in vLLM
    outputs = [name for name in shapes if name.endswith("output.weight")]
    for name in outputs:
        if not tokens_named or shapes[name][:1] != (mapped,):
            check_pair(sum(shapes[name][:1]), V, "vocabulary")
    blocks = [match for name in shapes if (match := _BLOCK.match(name))]
    config = MedusaConfig(
        hidden_size=target.hidden_size,
        heads=len({match[1] for match in blocks}),
        layers=len({match[2] for match in blocks}),
        biases="heads.0.blocks.0.linear.bias" in shapes,
        outputs="target" if not outputs else "shared" if "output.weight" in outputs else "own",
        output_size=mapped if tokens_named else V,
    )
    return config, tokens_named


def _own_names(files: DrafterFiles) -> dict[str, str]:
    """The network's own name of each tensor of the heads; others stay as they are.

    Of a Medusa-2 model's folder, which holds the trunk too, only the heads are taken.
    """
    names = [name for name in files.tensors.shapes if name != _TOKEN_MAP]
    inside = [name for name in names if _IN_MODEL.match(name)]
    own = {name: _own_name(_IN_MODEL.sub("", name)) for name in inside or names}
    if files.flag("original_lm_head", False):  # vLLM's: one matrix, stored as the first head's
        first, shared = "heads.0.output.weight", "output.weight"
        own = {name: shared if mine == first else mine for name, mine in own.items()}
    return own


def _own_name(name: str) -> str:
    for pattern, own in _NAMES:
        if pattern.fullmatch(name):
            return pattern.sub(own, name)
    return name


MEDUSA = Form(
    "Medusa",
    recognises=lambda files: any(
        _BLOCK.match(_own_name(_IN_MODEL.sub("", name))) for name in files.tensors.shapes
    ),
    load=_load,
)
"""Heads of Medusa-1 as the authors, text-generation-inference and vLLM write them, and those in a
Medusa-2 model, whose trunk must be the target."""
