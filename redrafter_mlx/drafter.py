"""The drafter: a small recurrent head that guesses ahead from the target's last hidden state.

Paper, section 3.1: s' = silu(W e + U s + b) over the target's own token embeddings, then residual
blocks over [context, s'] and an output layer. Parameter names are those of the paper's code, so
a folder of its weights loads as it is.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, fields, replace
from typing import Literal

import mlx.core as mx
import mlx.nn as nn

from redrafter_mlx.beam import beam_search
from redrafter_mlx.borrow import BorrowedLayers, LookBack
from redrafter_mlx.config import (
    DEFAULT_BEAM_SHAPE,
    BeamShape,
    SamplingParams,
    check_choice,
    refuse_unknown_keys,
)
from redrafter_mlx.errors import BadInputError, MismatchError
from redrafter_mlx.proposer import DraftInput
from redrafter_mlx.rejection import SampledDrafts, draw_drafts
from redrafter_mlx.target import Target
from redrafter_mlx.tree import Beams

Head = Literal["own", "tied"]

_TRANSFORMERS_KEYS = (
    "_name_or_path",
    "architectures",
    "auto_map",
    "dtype",
    "model_type",
    "torch_dtype",
    "transformers_version",
)
"""Bookkeeping that transformers writes beside the paper's keys; it says nothing of the drafter."""


@dataclass(frozen=True)
class DrafterConfig:
    """What a drafter's `config.json` says; the first six keys are the paper's.

    hidden_size:      D of the target
    vocab_size:       V of the target
    exit_dim:         width of the residual blocks; other than 2 D, an input projection leads there
    num_draft_layers: residual blocks
    rnn:              False replaces the recurrence by s' = s + e
    num_lookback_tokens: kept for the paper's code, unused
    head:             `own` output matrix, or `tied` to the target's; behind the blocks then stand
                      an output projection, where exit_dim is not D, and a norm
    borrowed_layers: layers of the target, counted from 0, between the output projection and the
                      norm of a tied head; see borrow.py
    borrowed_scale:  what the output projection is multiplied by in front of them
    draft_vocab_size: only so many tokens can be drafted; None drafts all
    bits, group_size: quantisation of the stored weights, None if not quantised
    target, target_fingerprint: what it was trained for
    beam_width, beam_length, max_nodes: the shape to use when none is asked for
    """

    hidden_size: int
    vocab_size: int
    exit_dim: int
    num_draft_layers: int
    rnn: bool = True
    num_lookback_tokens: int = 0
    head: Head = "own"
    borrowed_layers: tuple[int, ...] = ()
    borrowed_scale: float = 1.0
    draft_vocab_size: int | None = None
    bits: int | None = None
    group_size: int | None = None
    target: str | None = None
    target_fingerprint: str | None = None
    beam_width: int = DEFAULT_BEAM_SHAPE.width
    beam_length: int = DEFAULT_BEAM_SHAPE.length
    max_nodes: int | None = None

    def __post_init__(self) -> None:
        for name in ("hidden_size", "vocab_size", "exit_dim"):
            if not _is_int(getattr(self, name)) or getattr(self, name) < 1:
                raise BadInputError(f"{name} is {getattr(self, name)!r}; it must be above 0")
        if not _is_int(self.num_draft_layers) or self.num_draft_layers < 0:
            raise BadInputError(
                f"num_draft_layers is {self.num_draft_layers!r}; it must be 0 or more"
            )
        if not isinstance(self.rnn, bool):
            raise BadInputError(f"rnn is {self.rnn!r}; it must be true or false")
        check_choice("head", self.head, Head)
        layers = self.borrowed_layers
        if not all(_is_int(i) and i >= 0 for i in layers) or sorted(set(layers)) != list(layers):
            raise BadInputError(
                f"borrowed_layers is {list(layers)!r}; it must be rising numbers of layers"
            )
        if not self.borrowed_scale > 0:
            raise BadInputError(f"borrowed_scale is {self.borrowed_scale!r}; it must be above 0")
        if layers and self.head != "tied":
            raise BadInputError(
                f"head is {self.head!r}; a drafter with borrowed_layers needs a tied one"
            )
        size = self.draft_vocab_size
        if size is not None and not (_is_int(size) and 1 <= size <= self.vocab_size):
            raise BadInputError(f"draft_vocab_size is {size!r}; at most vocab_size fits")
        if (self.bits is None) != (self.group_size is None):
            raise BadInputError("bits and group_size go together; one of them is missing")
        _ = self.beam_shape

    @classmethod
    def from_dict(cls, given: Mapping[str, object]) -> DrafterConfig:
        """Raises BadInputError for a missing or unknown key, naming it."""
        known = [f.name for f in fields(cls)]
        own = {k: v for k, v in given.items() if k not in _TRANSFORMERS_KEYS}
        refuse_unknown_keys(own, known, "drafter key")
        for required in ("hidden_size", "vocab_size", "exit_dim", "num_draft_layers", "rnn"):
            if required not in own:
                raise BadInputError(f"drafter key {required!r} is missing")
        layers = own.get("borrowed_layers", ())
        if not isinstance(layers, (list, tuple)):
            raise BadInputError(f"borrowed_layers is {layers!r}; it must be a list")
        return cls(**{**own, "borrowed_layers": tuple(layers)})  # type: ignore[arg-type]

    def to_dict(self) -> dict[str, object]:
        """The keys to store; extensions that are not used are left out."""
        stored = {"model_type": "recurrent_drafting_drafter", **asdict(self)}
        stored["borrowed_layers"] = list(self.borrowed_layers) or None
        stored["borrowed_scale"] = self.borrowed_scale if self.borrowed_layers else None
        return {k: v for k, v in stored.items() if v is not None}

    @property
    def output_size(self) -> int:
        """V', how many tokens can be drafted."""
        return self.vocab_size if self.draft_vocab_size is None else self.draft_vocab_size

    @property
    def beam_shape(self) -> BeamShape:
        return BeamShape(self.beam_width, self.beam_length, self.max_nodes)


class ResidualBlock(nn.Module):
    """x + silu(linear(x)) over [..., E]."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.linear = nn.Linear(size, size)

    def __call__(self, x: mx.array) -> mx.array:
        return x + nn.silu(self.linear(x))


class Drafter(nn.Module):
    """The drafter's own parameters; `bind` joins them with a target's tables."""

    def __init__(self, config: DrafterConfig) -> None:
        super().__init__()
        self.config = config
        D, E = config.hidden_size, config.exit_dim
        if 2 * D != E:
            self.input_proj = nn.Linear(2 * D, E)
        blocks: list[nn.Module] = [ResidualBlock(E) for _ in range(config.num_draft_layers)]
        if config.head == "own":
            blocks.append(nn.Linear(E, config.output_size, bias=False))
        else:
            if E != D:
                self.output_proj = nn.Linear(E, D, bias=False)
            self.output_norm = nn.RMSNorm(D)
        self.lm_head = blocks
        if config.rnn:
            self.rnn_u = nn.Linear(D, D)
            self.rnn_w = nn.Linear(D, D, bias=False)
        if config.draft_vocab_size is not None:
            self.draft_vocab = mx.arange(config.draft_vocab_size)
            self.freeze(recurse=False, keys=["draft_vocab"])

    def advance(self, state: mx.array, embedding: mx.array) -> mx.array:
        """The next recurrent state, from the last one and the last token's embedding [..., D]."""
        if not self.config.rnn:
            return state + embedding
        return nn.silu(self.rnn_w(embedding) + self.rnn_u(state))

    def features(
        self,
        context: mx.array,
        state: mx.array,
        borrowed: Callable[[mx.array], mx.array] | None = None,
    ) -> mx.array:
        """What the output layer reads: [..., D] twice -> [..., E], [..., D] for a tied head.

        borrowed: the target's layers between output projection and norm
        """
        x = mx.concatenate([context, state], axis=-1)
        if 2 * self.config.hidden_size != self.config.exit_dim:
            x = self.input_proj(x)
        for block in self.lm_head[: self.config.num_draft_layers]:
            x = block(x)
        if self.config.head == "own":
            return x
        if self.config.exit_dim != self.config.hidden_size:
            x = self.output_proj(x)
        if borrowed is not None:
            x = borrowed(x * self.config.borrowed_scale)
        normed: mx.array = self.output_norm(x)
        return normed

    def bind(self, target: Target) -> BoundDrafter:
        """This drafter with the target's embedding and, if tied, its output layer.

        Raises MismatchError when hidden size or vocabulary differ.
        """
        check_target(self.config, target.hidden_size, target.vocab_size)
        tokens = self.draft_vocab if self.config.draft_vocab_size is not None else None
        head = target.output_rows(tokens) if self.config.head == "tied" else self.lm_head[-1]
        layers = self.config.borrowed_layers
        borrowed = target.borrow(layers) if layers else None
        return BoundDrafter(self, target.embedding, head, tokens, borrowed)


@dataclass(frozen=True)
class BoundDrafter:
    """A drafter that can propose: its parameters, the target's embedding, an output layer.

    tokens:    [V'] int32, the token of each output; None when outputs are tokens
    borrowed:  the target's layers that it drafts with, None without any
    look_back: those layers behind the text that is drafted for; see `behind`
    """

    drafter: Drafter
    embedding: Callable[[mx.array], mx.array]
    head: Callable[[mx.array], mx.array]
    tokens: mx.array | None
    borrowed: BorrowedLayers | None = None
    look_back: LookBack | None = None

    @property
    def reads_text(self) -> bool:
        return False

    @property
    def reads_layers(self) -> tuple[int, ...]:
        return self.drafter.config.borrowed_layers

    def behind(self, look_back: LookBack | None) -> BoundDrafter:
        """The same drafter, looking back over one text."""
        return replace(self, look_back=look_back)

    def propose(self, given: DraftInput, shape: BeamShape) -> Beams:
        """Candidates behind the root by beam search; see `beam_search`."""
        return beam_search(self._behind(given), given.context, given.root, shape)

    def advance(self, state: mx.array, tokens: mx.array) -> mx.array:
        """Next state [B, W, D] after tokens [B, W]."""
        return self.drafter.advance(state, self.embedding(tokens).astype(state.dtype))

    def draw(
        self, given: DraftInput, keys: mx.array, shape: BeamShape, params: SamplingParams
    ) -> SampledDrafts:
        """Candidates drawn from the drafter's distribution; see `draw_drafts`."""
        drafter = self._behind(given)
        return draw_drafts(drafter, given.context, given.root, given.position, keys, shape, params)

    def logits(self, context: mx.array, state: mx.array, level: int) -> mx.array:
        """Logits [B, W, V'] float32 of the token at `level`, counted from the root's 0."""
        look_back = self.look_back
        assert (look_back is None) == (self.borrowed is None), "behind() says what to look at"
        borrowed = None if look_back is None else lambda x: look_back(x, level)
        return self.head(self.drafter.features(context, state, borrowed)).astype(mx.float32)

    def _behind(self, given: DraftInput) -> BoundDrafter:
        if self.borrowed is None:
            return self
        assert given.rows is not None
        return self.behind(self.borrowed.behind(given.rows, given.position))

    def over_vocabulary(self, log_probs: mx.array) -> mx.array:
        """Log-probabilities [..., V'] as [..., V], -inf for what cannot be drafted."""
        if self.tokens is None:
            return log_probs
        everything = mx.full((*log_probs.shape[:-1], self.drafter.config.vocab_size), -mx.inf)
        index = mx.broadcast_to(self.tokens, log_probs.shape)
        return mx.put_along_axis(everything, index, log_probs, axis=-1)

    def to_tokens(self, outputs: mx.array) -> mx.array:
        """Output indices as token ids."""
        return outputs if self.tokens is None else self.tokens[outputs]

    @property
    def output_size(self) -> int:
        return self.drafter.config.output_size


def check_target(config: DrafterConfig, hidden_size: int, vocab_size: int) -> None:
    """Raises MismatchError, naming both sides, unless the drafter fits the target's sizes."""
    for what, mine, theirs in (
        ("hidden size", config.hidden_size, hidden_size),
        ("vocabulary", config.vocab_size, vocab_size),
    ):
        if mine != theirs:
            raise MismatchError(
                f"the drafter's {what} is {mine}, the target's is {theirs}; "
                f"train a drafter for this target with `redrafter-mlx train`"
            )


def _is_int(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)
