"""Check whether a model fits a machine, before it is downloaded and before it is loaded."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from redrafter_mlx.errors import TooLargeError
from redrafter_mlx.runtime.files.json_file import read_object
from redrafter_mlx.runtime.files.paths import human_size
from redrafter_mlx.weights.files.names import weight_files, weight_names
from redrafter_mlx.weights.fit.machine import Machine
from redrafter_mlx.weights.fit.model_size import (
    StoredModel,
    bits_of_drafter,
    of_config,
    of_gguf,
    quantised_bits,
)
from redrafter_mlx.weights.gguf.header import read_header
from redrafter_mlx.weights.known_drafters import family, known_drafters
from redrafter_mlx.weights.registry import REGISTRY, Registered

CONTEXT = 8192
"""Number of tokens in the context that a model should have room for: a long chat."""

WORK = 500_000_000
"""Number of bytes for everything except weights, cache and drafter."""

MOSTLY_EMBEDDING = "most of its weights are an embedding, which 4 bits change much: prefer 8"

_SMALLER = "take a smaller model"

FOUR_BITS = quantised_bits(4) / 16
"""Size under `--quantize 4`, with scales and biases, as a share of that in 16 bits."""


@dataclass(frozen=True)
class Need:
    """Bytes that a model takes if loaded with `quantize`, where None means as `auto` loads it."""

    quantize: int | None
    weights: int
    cache: int
    drafter: int

    @property
    def total(self) -> int:
        return self.weights + self.cache + self.drafter + WORK

    def fits(self, machine: Machine) -> bool:
        return self.total <= machine.working_set

    @property
    def option(self) -> str:
        """The option for loading it this way, such as `--quantize 4`."""
        return "as it is" if self.quantize is None else f"--quantize {self.quantize}"


def needs(
    stored: StoredModel,
    machine: Machine,
    *,
    context: int = CONTEXT,
    drafter: int | None = None,
    kv_bits: int | None = None,
) -> list[Need]:
    """Return what a model takes on a machine, for each way to load its stored weights.

    context: tokens to have room for, as far as the model can have them
    drafter: its size in 16 bits, None for that of a typical drafter
    kv_bits: of the keys and values of whole texts, None for floats
    """
    floats = 4 if machine.on_cpu else 2
    cache = stored.size.cache_bytes(stored.planned(context), floats, kv_bits)
    drafter = stored.size.drafter_bytes if drafter is None else drafter
    weights: dict[int | None, int] = {
        None: stored.size.weight_bytes(None, floats) if machine.on_cpu else stored.nbytes
    }
    for bits in (8, 4):  # weights cannot be quantised twice, and a GPU keeps quantised ones anyway
        if stored.bits is None or (stored.bits == bits and machine.on_cpu):
            weights[bits] = stored.size.weight_bytes(bits, floats)
    kept = None if machine.on_cpu else stored.bits
    return [
        Need(bits, size, cache, round(drafter * _share_of_16_bits(bits or kept, floats)))
        for bits, size in weights.items()
    ]


def largest_named(machine: Machine) -> list[Registered]:
    """Return the named models that fit in memory and on disk, the largest first.

    Those whose own context is too short for a long chat are not proposed.
    """
    found = [
        entry
        for entry in REGISTRY.values()
        if entry.context >= CONTEXT
        and entry.size <= machine.free_disk
        and any(way.fits(machine) for way in needs(entry.stored, machine))
    ]
    return sorted(found, key=lambda entry: entry.shape.parameters, reverse=True)


def check_download(name: str, stored: StoredModel, machine: Machine) -> str | None:
    """Check, before a download, whether this machine can use a model.

    Returns None if the model fits as stored, and a line of advice if it fits only in another way.
    Raises TooLargeError, with the model to take instead, if not even its weights fit.
    """
    ways = needs(stored, machine)
    fitting = [way for way in ways if way.fits(machine)]
    if ways[0] in fitting:
        return None
    context = stored.planned(CONTEXT)
    room = (
        f"{name} takes {human_size(ways[0].total)} with a context of {context} tokens, and models "
        f"may take {human_size(machine.working_set)} here"
    )
    if fitting:
        here = f"load it with {fitting[0].option} ({human_size(fitting[0].total)})"
    else:
        short = [way for way in needs(stored, machine, context=0, drafter=0) if way.fits(machine)]
        if not short:
            raise TooLargeError(f"{room}; {_instead(name, machine, any_model=True) or _SMALLER}")
        tokens = (machine.working_set - short[-1].total) * context // max(1, ways[-1].cache)
        here = f"with {short[-1].option} there is room for {tokens} tokens without a drafter"
    instead = _instead(name, machine, any_model=not fitting)
    return f"{room}; {here}" + (f", or {instead}" if instead else "")


def check_listing(
    name: str, config: Path, sizes: Mapping[str, int], machine: Machine
) -> str | None:
    """`check_download` by configuration and file sizes; of a mixture by its bytes alone."""
    described = read_object(config)
    nbytes = sum(sizes[file] for file in weight_names([*sizes]))
    stored = of_config(described, nbytes)
    if stored is not None:
        return check_download(name, stored, machine)
    if nbytes <= machine.working_set:
        return None
    quantised = any(described.get(key) for key in ("quantization", "quantization_config"))
    min_bytes = nbytes if quantised else round(nbytes * FOUR_BITS)
    text = f"{_too_large(name, nbytes, machine)}; "
    if min_bytes > machine.working_set:
        raise TooLargeError(text + (_instead(name, machine, any_model=True) or _SMALLER))
    return f"{text}load it with --quantize 4 ({human_size(min_bytes)})"


def check_load(
    name: str, path: Path, nbytes: int, machine: Machine, *, shared: bool = False
) -> None:
    """Raise TooLargeError, with what fits instead; `shared` are a rank's share of the weights."""
    if nbytes <= machine.working_set:
        return
    if shared:
        raise TooLargeError(f"{_too_large(name, nbytes, machine)}; start more ranks")
    stored, ways = stored_model(path), []
    if stored is not None:  # first what `check_download` proposes
        short = needs(stored, machine, context=0, drafter=0)
        ways = [*needs(stored, machine), *reversed(short)]
    fitting = [way for way in ways if way.quantize is not None and way.fits(machine)]
    other = _instead(name, machine, any_model=True)
    remedy = f"load it with {fitting[0].option}" if fitting else other
    raise TooLargeError(f"{_too_large(name, nbytes, machine)}; {remedy or _SMALLER}")


def stored_model(path: Path) -> StoredModel | None:
    """Return the sizes of a model on disk; None if it is not a dense decoder."""
    if path.is_file():
        return of_gguf(read_header(path))
    nbytes = sum(file.stat().st_size for file in weight_files(path))
    return of_config(read_object(path / "config.json"), nbytes)


def drafter_bytes(model: str) -> int | None:
    """Return the memory of a model's best published drafter; None if it is unknown."""
    return next((one.in_memory for one in known_drafters(model)), None)


def _share_of_16_bits(target: int | None, float_bytes: int) -> float:
    """Return the size of a drafter in memory, with a target in these bits, over that in 16 bits."""
    bits = bits_of_drafter(None, target)
    return (8 * float_bytes if bits is None else quantised_bits(bits, float_bytes)) / 16


def _too_large(name: str, nbytes: int, machine: Machine) -> str:
    return (
        f"the weights of {name} take {human_size(nbytes)} and models may take "
        f"{human_size(machine.working_set)} here"
    )


def _instead(name: str, machine: Machine, *, any_model: bool) -> str | None:
    """Return advice to pull the same model in fewer bits or, with `any_model`, the largest one."""
    fitting = [entry for entry in largest_named(machine) if entry.name != name]
    same = [entry for entry in fitting if family(entry.name) == family(name)]
    best = next(iter(same or (fitting if any_model else ())), None)
    if best is None:
        return None
    ways = needs(best.stored, machine)
    way = next(way for way in ways if way.fits(machine))
    option = "" if way is ways[0] else f", and load it with {way.option}"
    return f"take one that fits: redrafter-mlx pull {best.name}{option} ({human_size(way.total)})"
