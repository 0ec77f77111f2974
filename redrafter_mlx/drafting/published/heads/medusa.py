"""Medusa: heads that each predict the token at one distance, all from one hidden state.

Cai et al. (arXiv 2401.10774, section 2.1): head k reads the final norm's output h at position t and
predicts token t + 2 + k, since the model itself predicts token t + 1. Here token t + 1 is already
known when drafting: it is the root. So head 0 drafts the token after the root. A head is

    h <- h + silu(W h + b), for each of its layers       logits = L h

The heads do not see each other's tokens, so a path's score is the sum of its tokens' own scores.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, TypeAlias

import mlx.core as mx
import mlx.nn as nn

from redrafter_mlx.drafting.files import recognition
from redrafter_mlx.drafting.files.drafter_files import (
    DrafterFiles,
    Form,
    check_pair,
    check_tokens,
    fill,
    parameters_of,
    write_drafter,
)
from redrafter_mlx.drafting.files.tensor_names import IN_MEDUSA_MODEL
from redrafter_mlx.drafting.level_drafter import HeadsDrafter, IndependentLevels, shuffled
from redrafter_mlx.drafting.recurrent import ResidualBlock
from redrafter_mlx.errors import DamagedFileError
from redrafter_mlx.speculation.draft_vocabulary import DraftVocabulary
from redrafter_mlx.target_model.fingerprint import nbytes_of
from redrafter_mlx.target_model.model import Target

Names: TypeAlias = "tuple[tuple[re.Pattern[str], str], ...]"

_OWN_NAMES: Names = (
    (re.compile(r"(\d+)\.(\d+)\.linear\.(weight|bias)"), r"heads.\1.blocks.\2.linear.\3"),
    (re.compile(r"(\d+)\.\d+\.weight"), r"heads.\1.output.weight"),
    (re.compile(r"blocks\.(\d+)\.layers\.(\d+)\.(weight|bias)"), r"heads.\1.blocks.\2.linear.\3"),
    (re.compile(r"lm_heads\.(\d+)\.weight"), r"heads.\1.output.weight"),
    (re.compile(r"lm_head\.weight"), r"output.weight"),
)
"""Maps the names of the authors and text-generation-inference, then vLLM's, to the network's."""

_AUTHORS_NAMES: Names = (
    (re.compile(r"heads\.(\d+)\.blocks\.(\d+)\.linear\.(weight|bias)"), r"\1.\2.linear.\3"),
    (re.compile(r"heads\.(\d+)\.output\.weight"), r"\1.1.weight"),
)
_VLLMS_NAMES: Names = (
    (re.compile(r"heads\.(\d+)\.blocks\.(\d+)\.linear\.(.*)"), r"blocks.\1.layers.\2.\3"),
    (re.compile(r"heads\.(\d+)\.output\.weight"), r"lm_heads.\1.weight"),
)
"""The inverse mappings, for heads with one layer."""

_BLOCK = re.compile(r"heads\.(\d+)\.blocks\.(\d+)\.")

TOKEN_MAP = "token_map"
"""vLLM's name for the tokens of the outputs, if the heads draft only some tokens."""


Outputs = Literal["own", "shared", "target"]
"""One output matrix per head, one for all heads, or the target's."""


@dataclass(frozen=True)
class MedusaConfig:
    """The configuration of the heads, from their tensors.

    heads, layers: number of heads, and of residual blocks in each
    biases:        whether blocks have biases
    output_size:   V', number of tokens that can be drafted: all, or those of a token map
    """

    hidden_size: int
    vocab_size: int
    heads: int
    layers: int
    biases: bool
    outputs: Outputs
    output_size: int


class MedusaHead(nn.Module):
    """Residual blocks and, if the head has its own, the output matrix."""

    def __init__(self, config: MedusaConfig) -> None:
        super().__init__()
        D = config.hidden_size
        self.blocks = [ResidualBlock(D, config.biases) for _ in range(config.layers)]
        if config.outputs == "own":
            self.output = nn.Linear(D, config.output_size, bias=False)

    def __call__(self, hidden: mx.array) -> mx.array:
        """Map hidden states [..., D] to the input of the output matrix."""
        for block in self.blocks:
            hidden = block(hidden)
        return hidden


class MedusaNetwork(nn.Module):
    """The heads and, if they share one that is not the target's, their output matrix."""

    def __init__(self, config: MedusaConfig) -> None:
        super().__init__()
        self.config = config
        self.heads = [MedusaHead(config) for _ in range(config.heads)]
        if config.outputs == "shared":
            self.output = nn.Linear(config.hidden_size, config.output_size, bias=False)
        if config.output_size < config.vocab_size:
            self.token_map = mx.arange(config.output_size)
            self.freeze(recurse=False, keys=[TOKEN_MAP])

    @property
    def vocabulary(self) -> DraftVocabulary:
        size, vocab_size = self.config.output_size, self.config.vocab_size
        return DraftVocabulary(size, vocab_size, self.token_map if size < vocab_size else None)


class MedusaDrafter(HeadsDrafter, well_formed=True):
    """Medusa heads, with the target's output layer if they have none."""

    def __init__(
        self, network: MedusaNetwork, target: Target, vocabulary: DraftVocabulary | None = None
    ) -> None:
        """`vocabulary` are the tokens that it can draft; None is those of its files."""
        vocabulary = vocabulary or network.vocabulary
        read, heads = float(nbytes_of(network)), network.config.heads
        if network.config.outputs == "target":
            read += target.output_bytes * vocabulary.share
        super().__init__("Medusa", network, vocabulary, target, heads, read / heads)
        self._network, self._target = network, target
        self._target_output = target.output_rows(vocabulary.rows)

    @property
    def scores_all(self) -> bool:
        config = self._network.config
        return config.outputs == "target" and config.output_size == config.vocab_size

    def within(self, vocabulary: DraftVocabulary) -> MedusaDrafter:
        return MedusaDrafter(self._network, self._target, vocabulary)

    def untrained(self) -> MedusaDrafter:
        return MedusaDrafter(shuffled(self._network), self._target, self.vocabulary)

    def levels_of(self, features: mx.array, root: mx.array, drafts: int) -> IndependentLevels:
        """Run all heads at once, so that a shared output matrix is read once."""
        del root
        outputs, heads = self._network.config.outputs, self._network.heads[:drafts]
        hidden = [head(features[:, None]) for head in heads]
        if outputs == "own":
            each = [head.output(h) for head, h in zip(heads, hidden, strict=True)]
        else:
            output = self._network.output if outputs == "shared" else self._target_output
            each = list(mx.split(output(mx.concatenate(hidden, axis=1)), len(heads), axis=1))
        return IndependentLevels(self.vocabulary, [e.astype(mx.float32) for e in each])


def load_medusa(files: DrafterFiles, target: Target) -> MedusaDrafter:
    """Load the heads, bound to their target; errors as in `Form.load`."""
    config = medusa_config(files, target.hidden_size, target.vocab_size)
    stored = files.tensors.read()
    tensors = {own: stored[name] for name, own in own_names(files).items()}
    if config.output_size < config.vocab_size:
        check_tokens(stored[TOKEN_MAP], TOKEN_MAP, target.vocab_size, files.tensors.path)
        tokens = tensors[TOKEN_MAP] = stored[TOKEN_MAP].astype(mx.int32)
        for name, array in tensors.items():
            if name.endswith("output.weight") and array.shape[0] == target.vocab_size:
                tensors[name] = array[tokens]
    network = MedusaNetwork(config)
    fill(network, tensors, files, target.dtype)
    return MedusaDrafter(network, target)


def medusa_config(files: DrafterFiles, hidden_size: int, vocab_size: int) -> MedusaConfig:
    """Read the configuration of heads for a target of these sizes from tensor shapes.

    The heads are counted: config.json of the authors' Vicuna-7B states 2, but its file holds 5.

    Raises MismatchError, naming both sides, for heads of another target, and DamagedFileError.
    """
    shapes = {own: files.tensors.shapes[name] for name, own in own_names(files).items()}
    matrix = shapes.get("heads.0.blocks.0.linear.weight", ())
    if len(matrix) != 2:
        raise DamagedFileError(f"{files.tensors.path} lacks the matrix of its first Medusa head")
    check_pair(matrix[1], hidden_size, "hidden size")
    V = vocab_size
    mapped = sum(files.tensors.shapes.get(TOKEN_MAP, ()))
    tokens_named = 0 < mapped < V  # a map of the whole vocabulary is not used, as in vLLM
    outputs = [name for name in shapes if name.endswith("output.weight")]
    for name in outputs:
        if not tokens_named or shapes[name][:1] != (mapped,):
            check_pair(sum(shapes[name][:1]), V, "vocabulary")
    blocks = [match for name in shapes if (match := _BLOCK.match(name))]
    return MedusaConfig(
        hidden_size=hidden_size,
        vocab_size=V,
        heads=len({match[1] for match in blocks}),
        layers=len({match[2] for match in blocks}),
        biases="heads.0.blocks.0.linear.bias" in shapes,
        outputs="target" if not outputs else "shared" if "output.weight" in outputs else "own",
        output_size=mapped if tokens_named else V,
    )


def save_medusa(network: MedusaNetwork, folder: Path, record: Mapping[str, object]) -> None:
    """Write the heads in half precision, in the authors' layout or, with a token map, in vLLM's.

    record: further keys of config.json
    """
    config, tensors = network.config, parameters_of(network)
    if config.output_size == config.vocab_size:
        names = {own: authors_name(own) for own in tensors}
        keys: dict[str, object] = {
            "medusa_num_heads": config.heads,
            "medusa_num_layers": config.layers,
        }
    else:
        names = {own: _renamed(own, _VLLMS_NAMES) for own in tensors}
        keys = {
            "model_type": "medusa", "architectures": ["MedusaModel"], "num_heads": config.heads,
            "num_hidden_layers": config.layers, "hidden_size": config.hidden_size,
            "vocab_size": config.vocab_size, "truncated_vocab_size": config.output_size,
            "medusa_fc_bias": config.biases,
        }  # fmt: skip
    stored = {names[own]: array for own, array in tensors.items()}
    write_drafter(folder, stored, {**keys, **record}, mx.float16)


def authors_name(own: str) -> str:
    """Return the authors' name for one of our tensors."""
    return _renamed(own, _AUTHORS_NAMES)


def own_names(files: DrafterFiles) -> dict[str, str]:
    """Return the network's own name of each of the heads' tensors; unknown names are kept.

    From a Medusa-2 model's folder, which also holds the trunk, only the heads are taken.
    """
    names = [name for name in files.tensors.shapes if name != TOKEN_MAP]
    inside = [name for name in names if IN_MEDUSA_MODEL.match(name)]
    own = {name: _own_name(IN_MEDUSA_MODEL.sub("", name)) for name in inside or names}
    if files.flag("original_lm_head", False):  # vLLM's key: one matrix, stored as the first head's
        first, shared = "heads.0.output.weight", "output.weight"
        own = {name: shared if mine == first else mine for name, mine in own.items()}
    return own


def _own_name(name: str) -> str:
    return _renamed(name, _OWN_NAMES)


def _renamed(name: str, names: Names) -> str:
    for pattern, other in names:
        if pattern.fullmatch(name):
            return pattern.sub(other, name)
    return name


MEDUSA = Form(
    recognition.MEDUSA,
    load=load_medusa,
)
"""Heads of Medusa-1 as the authors, text-generation-inference and vLLM write them, and the heads of
a Medusa-2 model, whose trunk must be the target."""
