"""`redrafter-mlx doctor`: facts about this machine, problems, and the remedy of each."""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import platform
import shlex
import shutil
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from importlib import metadata
from pathlib import Path

import typer
from packaging.requirements import Requirement

from redrafter_mlx.cli import options as opt
from redrafter_mlx.cli.learn.show import summary
from redrafter_mlx.cli.progress import progress_bars
from redrafter_mlx.cli.terminal import one_line
from redrafter_mlx.cpu.blas import BLAS, libraries_here, preferred_library, remedy
from redrafter_mlx.errors import RedrafterError
from redrafter_mlx.learning.folder import learning_folders
from redrafter_mlx.runtime.files.paths import bytes_below, cache_dir, existing_part, human_size
from redrafter_mlx.runtime.hardware import CUDA_BACKENDS

_PACKAGES = ("redrafter-mlx", "mlx", "mlx-lm", "transformers", "huggingface-hub")
_LITTLE_DISK = 1000**3
_EXACT = "float32 products: drafted tokens are those of plain decoding"
_TF32 = "TF32 products: nearly tied tokens can swap; MLX_ENABLE_TF32=0 makes products float32"

Facts = dict[str, str | int | bool | None]


@dataclass(frozen=True)
class Problem:
    """A problem; `unusable` if nothing can be generated until it is solved."""

    what: str
    remedy: str | None  # None if `what` says it
    unusable: bool = False


@dataclass
class Report:
    """Facts by section and name, in the order of the printed report, and the problems."""

    facts: dict[str, Facts] = field(default_factory=dict)
    problems: list[Problem] = field(default_factory=list)

    @property
    def unusable(self) -> bool:
        return any(p.unusable for p in self.problems)

    def add(self, what: str, remedy: str | None, *, unusable: bool = False) -> None:
        """Add a problem, unless it is known from another section."""
        if (problem := Problem(what, remedy, unusable)) not in self.problems:
            self.problems.append(problem)


@opt.with_options
def command(as_json: opt.Json = False) -> None:
    """Examine this machine: versions, device, memory, caches, problems and their remedies.

    The exit status is non-zero only if a problem makes the program unusable.
    """
    with progress_bars("examining this machine"):
        report = examine()
    if as_json:
        print(json.dumps({**report.facts, "problems": [asdict(p) for p in report.problems]}))
    else:
        print_report(report)
    raise typer.Exit(1 if report.unusable else 0)


def examine() -> Report:
    """Examine every section in turn; a section that fails is itself a problem."""
    report = Report()
    sections: dict[str, Callable[[Report], Facts]] = {
        "system": _system,
        "packages": _packages,
        "mlx": _mlx,
        "memory": memory_facts,
        "model": _model,
        "hub cache": _hub_cache,
        "our cache": lambda report: _folder(report, cache_dir(), "REDRAFTER_CACHE"),
        "learning": lambda _: {folder.model: summary(folder) for folder in learning_folders()},
    }
    for name, examine_section in sections.items():
        report.facts[name] = {}
        try:
            report.facts[name] = examine_section(report)
        except RedrafterError as error:
            report.add(error.what, error.remedy)
        except Exception as error:
            what = f"{name} could not be examined: {type(error).__name__}: {error}"
            report.add(one_line(what), _install(error))
    return report


def print_report(report: Report) -> None:
    """Print aligned facts, then each problem with its remedy."""
    width = max(len(_label(name)) for facts in report.facts.values() for name in facts)
    for section, facts in report.facts.items():
        if facts:
            print(section)
        for name, value in facts.items():
            print(f"  {_label(name):<{width}}  {one_line(_shown(name, value))}")
    for problem in report.problems:
        print(f"{'unusable' if problem.unusable else 'problem'}: {one_line(problem.what)}")
        if problem.remedy is not None:
            print(f"  remedy: {one_line(problem.remedy)}")
    if not report.problems:
        print("no problems found")


def _system(report: Report) -> Facts:
    if sys.platform == "darwin" and platform.machine() != "arm64":
        what = "this Python runs for Intel, where MLX has no Metal"
        report.add(what, "install an arm64 Python", unusable=True)
    mac = platform.mac_ver()[0]
    return {
        "os": f"macOS {mac}" if mac else platform.platform(),
        "cores": os.cpu_count(),
        "python": platform.python_version(),
    }


def _packages(report: Report) -> Facts:
    versions: Facts = {}
    for name in _PACKAGES:
        remedy = f"pip install {_requirement(name)}"
        try:
            version = versions[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            versions[name] = None
            report.add(f"{name} is not installed", remedy, unusable=True)
            continue
        wanted = _wanted(name)
        if wanted is not None and not wanted.specifier.contains(version, prereleases=True):
            report.add(f"{name} {version} is installed, and {wanted} is needed", remedy)
    hidden = overwritten_backend()
    if hidden is not None:
        what = f"another MLX backend has overwritten the library of {hidden}"
        report.add(what, f"pip install --force-reinstall --no-deps {hidden}")
    return versions


def overwritten_backend() -> str | None:
    """Return the installed CUDA backend whose library another backend has overwritten, or None.

    mlx-cpu and mlx-cuda-* both install `mlx/lib/libmlx.so`; the last one installed is used.
    """
    for name in CUDA_BACKENDS:
        with contextlib.suppress(metadata.PackageNotFoundError):
            for file in metadata.files(name) or ():
                here = Path(str(file.locate()))
                if file.name == "libmlx.so" and here.stat().st_size != file.size:
                    return name
    return None


def _mlx(report: Report) -> Facts:
    """Return the device, whether it computes correctly, and the BLAS of the CPU."""
    facts: Facts = {"blas": BLAS.note}
    try:
        import mlx.core as mx

        from redrafter_mlx.runtime.device import float32_is_exact

        device = mx.default_device()
        chip = mx.device_info(device).get("device_name", "")
        if device.type == mx.DeviceType.cpu and (choice := blas_facts(str(chip))):
            facts["blas_choice"] = choice
        facts["device"] = f"{device.type.name}, {chip}"
        facts["computes"] = mx.ones((64, 64)).sum().item() == 64 * 64
        for module in ("mlx_lm", "redrafter_mlx.engine.engine", "redrafter_mlx.loading.load"):
            importlib.import_module(module)
        facts["float32"] = _EXACT if float32_is_exact() else _TF32
    except Exception as error:
        what = f"MLX does not work: {type(error).__name__}: {error}"
        report.add(one_line(what), _install(error), unusable=True)
        return facts
    if not facts["computes"]:
        again = f"pip install --force-reinstall {_requirement('mlx')}"
        report.add(f"MLX computes wrongly on {facts['device']}", again, unusable=True)
    if sys.platform == "linux" and device.type == mx.DeviceType.cpu and BLAS.library is None:
        what = "matrix products run on MLX's own reference BLAS, many times slower"
        report.add(what, remedy())
    if sys.platform == "darwin" and device.type == mx.DeviceType.cpu:
        what = "MLX computes on the CPU, not on the GPU"
        report.add(what, "use macOS 14 or later on Apple Silicon")
    return facts


def blas_facts(chip: str) -> str | None:
    """Return how to get a faster BLAS than this machine's; None if nothing is known."""
    if sys.platform != "linux" or preferred_library() is not None:
        return None
    here = libraries_here()  # loads them all
    if len(here) > 1:
        return "several are here; `redrafter-mlx tune` finds the fastest"
    if "AMD" in chip and here and "blis" not in here[0]:
        return "BLIS may be faster: apt install libblis4-openmp, then `redrafter-mlx tune`"
    return None


def memory_facts(_: Report) -> Facts:
    """Return the memory of this machine, and the largest named models that fit into it."""
    from redrafter_mlx.weights.fit.machine import this_machine
    from redrafter_mlx.weights.fit.needs import CONTEXT, largest_named

    machine = this_machine()
    named = largest_named(machine)
    return {
        "total_bytes": machine.memory,
        "models_may_use_bytes": machine.working_set,
        "context_tokens": CONTEXT,
        "parameters_that_fit": f"{named[0].shape.parameters / 1e9:.3g} billion" if named else None,
        "named_models": ", ".join(entry.name for entry in named[:3]) or None,
    }


def _model(report: Report) -> Facts:
    """Return the default model and its path; a problem if it is missing or damaged."""
    from redrafter_mlx.weights.fetching.resolve import find_local
    from redrafter_mlx.weights.fetching.wheel import wheel_path
    from redrafter_mlx.weights.registry import DEFAULT_MODEL, REGISTRY

    local = find_local(DEFAULT_MODEL)
    if local is None:
        file = wheel_path(REGISTRY[DEFAULT_MODEL])
        what = f"{file} is damaged" if file.exists() else f"{DEFAULT_MODEL} is not on disk yet"
        report.add(what, f"redrafter-mlx pull {DEFAULT_MODEL}")
    return {"default": DEFAULT_MODEL, "path": None if local is None else str(local.path)}


def _hub_cache(report: Report) -> Facts:
    from huggingface_hub import constants

    return _folder(report, Path(constants.HF_HUB_CACHE), "HF_HUB_CACHE")


def _folder(report: Report, folder: Path, variable: str) -> Facts:
    """Return path, size and free disk of a cache; a problem if not writable or nearly full."""
    place = existing_part(folder)
    free = shutil.disk_usage(place).free
    remedy = f"set {variable} to a folder that can be written and has room"
    if not place.is_dir() or not os.access(place, os.W_OK):
        report.add(f"{folder} cannot be written", remedy)
    elif free < _LITTLE_DISK:
        report.add(f"the disk of {folder} is nearly full", remedy)
    return {"path": str(folder), "size_bytes": bytes_below(folder), "free_bytes": free}


def _install(error: Exception) -> str:
    """Return the remedy of an error that an incomplete installation may have caused."""
    if isinstance(error, ModuleNotFoundError) and error.name:
        package = error.name.split(".")[0].replace("_", "-")
        return f"pip install {_requirement(package)}"
    return f"pip install --force-reinstall {_requirement('mlx')} {_requirement('mlx-lm')}"


def _requirement(package: str) -> str:
    """Return what `pip install` takes: a dependency of ours with its versions, or our checkout."""
    if package == "redrafter-mlx":
        return f"-e {shlex.quote(str(Path(__file__).parent.parent))}"
    wanted = _wanted(package)
    return shlex.quote(package if wanted is None else str(wanted))


def _wanted(package: str) -> Requirement | None:
    """Return a dependency of ours, with its versions; None for another package."""
    with contextlib.suppress(metadata.PackageNotFoundError):
        for wanted in map(Requirement, metadata.requires("redrafter-mlx") or ()):
            if wanted.name == package and (wanted.marker is None or wanted.marker.evaluate()):
                wanted.marker = None
                return wanted
    return None


def _label(name: str) -> str:
    return name.removesuffix("_bytes").replace("_", " ")


def _shown(name: str, value: str | int | bool | None) -> str:
    if value is None or isinstance(value, bool):
        return "yes" if value else "no"
    return human_size(value) if name.endswith("_bytes") and isinstance(value, int) else str(value)
