"""The `config.json` of a recurrent drafter."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Literal

from redrafter_mlx.checks import check_choice, check_int, refuse_unknown_keys, shown
from redrafter_mlx.config import MAX_BEAM_LENGTH
from redrafter_mlx.drafting.files.recognition import CONFIG, read_drafter_config
from redrafter_mlx.errors import BadInputError, DamagedFileError

Head = Literal["own", "tied"]

FirstState = Literal["recurrent", "embedding"]
"""State after the root's embedding e: silu(W e + b), as in the paper's code, or e, as in its
text."""

MAX_SIZE = 2**22
"""Maximum size of a hidden state, a layer or a vocabulary."""

MAX_LAYERS = 128
"""Maximum number of residual blocks."""

_TRANSFORMERS_KEYS = (
    "_name_or_path",
    "architectures",
    "auto_map",
    "dtype",
    "model_type",
    "torch_dtype",
    "transformers_version",
)
"""Bookkeeping keys that transformers adds to the paper's; they do not describe the drafter."""


@dataclass(frozen=True)
class DrafterConfig:
    """The contents of a drafter's `config.json`; the first six keys are the paper's.

    hidden_size:      D of the target
    vocab_size:       V of the target
    exit_dim:         width of the residual blocks; unless it is 2 D, an input projection maps to it
    num_draft_layers: number of residual blocks
    rnn:              False replaces the recurrence by s' = s + e
    num_lookback_tokens: kept for the paper's code, unused
    context_layers:   layers of the target, counted from 0, whose inputs the drafter reads together
                      with the last hidden state, through a projection; see Target.reading
    head:             `own` output matrix, or `tied` to the target's; if tied, an output projection
                      (if exit_dim is not D) and a norm follow the blocks
    draft_vocab_size: number of tokens that can be drafted; None is all
    target, target_fingerprint: the target that it was trained for
    draft_length:     number of successive drafts that it was trained for, None if not known
    first_state:      an extension; without `rnn` both values mean the embedding
    """

    hidden_size: int
    vocab_size: int
    exit_dim: int
    num_draft_layers: int
    rnn: bool = True
    num_lookback_tokens: int = 0
    context_layers: tuple[int, ...] = ()
    head: Head = "own"
    draft_vocab_size: int | None = None
    target: str | None = None
    target_fingerprint: str | None = None
    draft_length: int | None = None
    first_state: FirstState = "recurrent"

    def __post_init__(self) -> None:
        """Raise BadInputError for a value of the wrong type or out of range, naming its key."""
        for name in ("hidden_size", "vocab_size", "exit_dim"):
            check_int(name, getattr(self, name), 1, MAX_SIZE)
        check_int("num_draft_layers", self.num_draft_layers, 0, MAX_LAYERS)
        check_int("num_lookback_tokens", self.num_lookback_tokens, 0, None)
        if not isinstance(self.rnn, bool):
            raise BadInputError(f"rnn is {shown(self.rnn)}; it must be true or false")
        check_choice("head", self.head, Head)
        check_choice("first_state", self.first_state, FirstState)
        layers = self.context_layers
        for layer in layers:
            check_int("context_layers", layer, 0, None)
        if sorted({*layers}) != [*layers]:
            raise BadInputError(f"context_layers is {shown([*layers])}; the layers must be rising")
        if self.draft_vocab_size is not None:
            check_int("draft_vocab_size", self.draft_vocab_size, 1, self.vocab_size)
        if self.draft_length is not None:
            check_int("draft_length", self.draft_length, 1, MAX_BEAM_LENGTH - 1)
        for name in ("target", "target_fingerprint"):
            value = getattr(self, name)
            if value is not None and not isinstance(value, str):
                raise BadInputError(f"{name} is {shown(value)}; it must be a string")

    @classmethod
    def from_dict(cls, given: Mapping[str, object]) -> DrafterConfig:
        """Read a configuration; raise BadInputError for a missing or unknown key, naming it."""
        known = [f.name for f in fields(cls)]
        own = {k: v for k, v in given.items() if k not in _TRANSFORMERS_KEYS}
        refuse_unknown_keys(own, known, "drafter key")
        for required in ("hidden_size", "vocab_size", "exit_dim", "num_draft_layers", "rnn"):
            if required not in own:
                raise BadInputError(f"drafter key {required!r} is missing")
        layers = own.get("context_layers", ())
        if not isinstance(layers, (list, tuple)):
            raise BadInputError(f"context_layers is {shown(layers)}; it must be a list")
        own["context_layers"] = tuple(layers)
        return cls(**own)  # type: ignore[arg-type]

    def to_dict(self) -> dict[str, object]:
        """Return the keys to store, without unused extensions."""
        stored = {"model_type": "recurrent_drafting_drafter", **asdict(self)}
        stored["context_layers"] = list(self.context_layers) or None
        if self.first_state == "recurrent":
            del stored["first_state"]
        return {k: v for k, v in stored.items() if v is not None}

    @property
    def context_size(self) -> int:
        """C, the size of the target's features at each token."""
        return self.hidden_size * (len(self.context_layers) + 1)

    @property
    def output_size(self) -> int:
        """V', the number of tokens that can be drafted."""
        return self.vocab_size if self.draft_vocab_size is None else self.draft_vocab_size


def read_config(folder: str | Path) -> DrafterConfig:
    """Read the configuration in a drafter's folder; one readable error for anything wrong."""
    return config_of(Path(folder), read_drafter_config(folder))


def config_of(folder: Path, content: Mapping[str, object]) -> DrafterConfig:
    """Return the configuration that config.json holds; raises DamagedFileError."""
    try:
        return DrafterConfig.from_dict(content)
    except BadInputError as error:
        raise DamagedFileError(f"{folder / CONFIG}: {error}") from None
