"""The options file of a training run: TOML whose keys are the fields of `TrainingJob`.

    model = "smollm2-135m"
    answer_tokens = 2000000

    [training]
    epochs = 4.0

The fields `writing`, `drafter` and `training` are tables. A key that is left out has its default.
The keys of [drafter] are those of its `form`.
"""

from __future__ import annotations

import json
import os
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import is_dataclass
from pathlib import Path
from typing import Literal, TypeVar, cast, get_args, get_origin, get_type_hints

from redrafter_mlx.checks import check_choice, refuse_unknown_keys, shown
from redrafter_mlx.distill.drafter_forms import DEFAULT_FORM, DrafterForm, form_named
from redrafter_mlx.distill.job import TrainingJob
from redrafter_mlx.distill.options import OPENINGS
from redrafter_mlx.errors import BadInputError
from redrafter_mlx.runtime.files.regular_file import read_regular_text

OPTIONS = "train.toml"
"""Name of the options file that is written next to a drafter."""

_NOT_IN_FILE = ("output", "offline")
_NAMES = {int: "a whole number", float: "a number", bool: "true or false"}
_T = TypeVar("_T")


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


def read_options(path: Path) -> dict[str, object]:
    """Return the tables of an options file; raises BadInputError naming it if it is not TOML."""
    try:
        return tomllib.loads(read_regular_text(path))
    except OSError as error:
        raise BadInputError(f"{path} cannot be read: {error.strerror or error}") from None
    except (ValueError, RecursionError) as error:  # not UTF-8, or not TOML
        raise BadInputError(f"{path} is not a TOML file: {error}") from None


def make_job(given: Mapping[str, object], output: Path, *, offline: bool = False) -> TrainingJob:
    """Return the job that the keys and tables of `given` describe.

    If prompts are given, half of the prompts are the target's own by default (none if they are
    plain texts), and prompts are answered three times. If the target continues given answers, there
    are no soft labels, since its probabilities there are not kept.

    Raises BadInputError naming an unknown key, or a value of the wrong type or out of range.
    """
    openings = list(OPENINGS) if given.get("prompts") else [0]
    own_share = 0.0 if given.get("raw") else 0.5 if given.get("prompts") else 1.0
    writing = {"own_share": own_share, "openings": openings}
    continued = given.get("data") and given.get("labels", "target") == "target"
    training = {"soft_share": 0.0 if continued else 0.5}
    filled = dict(given)
    for table, defaults in (("writing", writing), ("training", training)):
        own = given.get(table, {})
        filled[table] = {**defaults, **own} if isinstance(own, dict) else own
    for name in _NOT_IN_FILE:
        if name in filled:
            raise BadInputError(f"{name} is an option of the command, not of its file")
    return _build(TrainingJob, {**filled, "output": str(output), "offline": offline}, "option")


def to_toml(job: TrainingJob) -> str:
    """Return the job as an options file; raises BadInputError for a path that TOML cannot hold."""
    lines = ["# Repeat this run with: redrafter-mlx train --config train.toml --output DIR"]
    lines += _lines(job)
    for name in ("writing", "drafter", "training"):
        lines += ["", f"[{name}]", *_lines(getattr(job, name))]
    text = "\n".join(lines) + "\n"
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise BadInputError(f"{shown(error.object[error.start :])} is not a UTF-8 path") from None
    return text


def _lines(options: object) -> list[str]:
    return [
        f"{name} = {_to_toml(value)}"
        for name, value in vars(options).items()
        if name not in _NOT_IN_FILE and value is not None and not is_dataclass(value)
    ]


def _to_toml(value: object) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, (int, float)):
        return repr(value)
    if isinstance(value, tuple):
        return f"[{', '.join(map(_to_toml, value))}]"
    # JSON strings are TOML strings, except for one control character that JSON does not escape.
    return json.dumps(str(value), ensure_ascii=False).replace("\x7f", "\\u007f")


def _build(kind: type[_T], given: Mapping[str, object], what: str) -> _T:
    """Make a dataclass from a table; `what` describes its keys in error messages."""
    hints = get_type_hints(kind)
    refuse_unknown_keys(given, list(hints), what)
    values: dict[str, object] = {}
    for name, value in given.items():
        hint = hints[name]
        if hint is not DrafterForm and not is_dataclass(hint):
            values[name] = _typed(name, value, hint)
        elif not isinstance(value, dict):
            raise BadInputError(f"{name} is {shown(value)}; it must be a table, [{name}]")
        elif hint is DrafterForm:
            form = form_named(value.get("form", DEFAULT_FORM))
            values[name] = _build(form, value, f"option of [{name}] (form {form.form})")
        else:
            values[name] = _build(cast(type[object], hint), value, f"option of [{name}]")
    return kind(**values)


def _typed(name: str, value: object, hint: object) -> object:
    """Return a TOML value, converted to a field's type `hint`."""
    for kind in _alternatives(hint):
        if get_origin(kind) is tuple and isinstance(value, list):
            return tuple(_typed(name, held, get_args(kind)[0]) for held in value)
        if kind is Path and isinstance(value, str) and "\0" not in value:
            return Path(os.path.expanduser(value))
        if type(value) is kind or (kind is float and type(value) is int):
            return value
        if get_origin(kind) is Literal and value in get_args(kind):
            return value
    raise BadInputError(f"{name} is {shown(value)}; it must be {_described(hint)}")


def _alternatives(hint: object) -> list[object]:
    """Return the types of a union, without None, which TOML does not have."""
    union = get_origin(hint) not in (None, tuple, Literal)
    return [kind for kind in (get_args(hint) if union else (hint,)) if kind is not type(None)]


def _described(hint: object) -> str:
    names = []
    for kind in _alternatives(hint):
        if get_origin(kind) is Literal:
            names.append(" or ".join(map(json.dumps, get_args(kind))))
        elif get_origin(kind) is tuple:
            names.append(f"a list, each {_described(get_args(kind)[0])}")
        else:
            names.append(next((name for known, name in _NAMES.items() if kind is known), "text"))
    return " or ".join(names)


def with_recipe(
    name: str, given: Mapping[str, object], sources: Mapping[str, str]
) -> dict[str, object]:
    """Return the options `given`, as `make_job` takes them, with those that a recipe fixes.

    sources: what set a key, for messages: "--layers" for `drafter.layers`
    Raises BadInputError for an unknown recipe, or a key with another value, naming what set it.
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
