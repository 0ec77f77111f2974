"""Recipes: how a paper trains its drafter, as fixed values for keys of an options file."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Literal, cast

from redrafter_mlx.checks import check_choice, shown
from redrafter_mlx.errors import BadInputError

RecipeName = Literal["paper", "speculators"]

RECIPES: Mapping[RecipeName, Mapping[str, object]] = {
    # arXiv 2403.09919, section 3.5, and its code's recurrent_drafting/cmd/train.{py,sh}. The loss
    # there is the sum over T = 5 drafts, with gradients clipped at 1; here it is their mean.
    "paper": {
        "labels": "target",
        "learn_prompts": False,
        "drafter.form": "recurrent",
        "drafter.rnn": True,
        "drafter.layers": 2,
        "drafter.exit_dim": None,
        "drafter.head": "own",
        "drafter.draft_vocab": "all",
        "drafter.context_layers": [],
        "training.draft_length": 5,
        "training.epochs": 2.0,
        "training.optimizer": "adamw_torch",
        "training.learning_rate": 1e-3,
        "training.final_rate": 0.0,
        "training.warmup_share": 0.1,
        "training.weight_decay": 0.0,
        "training.clip": 0.2,
        "training.soft_share": 0.0,
        "training.depth_decay": 1.0,
    },
    # arXiv 2404.19124, its first stage.
    "speculators": {
        "drafter.form": "mlp",
        "training.learning_rate": 1e-3,
        "training.depth_decay": 1.0,
    },
}
"""Recipes by name: keys of an options file (`training.epochs` for a key of a table) and their
values; None for a key that must be left out."""

_FURTHER: Mapping[str, Mapping[str, object]] = {
    # The second stage: the paper saw spikes of the loss at the first one's rate.
    "speculators": {"training.learning_rate": 1e-4},
}
"""What a recipe fixes otherwise in a run that starts from a drafter."""


def with_recipe(
    name: str, given: Mapping[str, object], sources: Mapping[str, str]
) -> dict[str, object]:
    """Return the options `given`, as `make_job` takes them, with those that a recipe fixes.

    Args:
      sources: what set a key, for messages: "--layers" for `drafter.layers`
    Raises:
      BadInputError: for an unknown recipe, or for a key with another value, naming what set it
    """
    check_choice("recipe", name, RecipeName)
    keys = dict(flat(given))
    fixed = dict(RECIPES[cast(RecipeName, name)])
    if keys.get("start_from") is not None:
        fixed |= _FURTHER.get(name, {})
    for key, value in fixed.items():
        if key in keys and keys[key] != value:
            own = f"leaves {key} out" if value is None else f"has {key} {shown(value)}"
            raise BadInputError(
                f"{sources.get(key, key)} is {shown(keys[key])}, and --recipe {name} {own}; leave "
                f"out one of the two"
            )
    filled: dict[str, object] = {}
    for key, value in (keys | fixed).items():
        if value is None:
            continue
        table, _, own = key.rpartition(".")
        part = filled.setdefault(table, {}) if table else filled
        if isinstance(part, dict):  # or `make_job` refuses it
            part[own] = value
    return filled


def flat(given: Mapping[str, object], table: str = "") -> Iterator[tuple[str, object]]:
    """Yield every key, with its table as in `training.epochs`, and its value."""
    for key, value in given.items():
        if isinstance(value, Mapping):
            yield from flat(value, f"{key}.")
        else:
            yield f"{table}{key}", value
