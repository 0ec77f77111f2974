"""Imports run strictly downwards through the layers of packages, anywhere in a file."""

from __future__ import annotations

import ast
import tomllib
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

from places import ROOT, TESTS

ROOMS = (
    "version",
    "errors",
    "runtime",
    "cpu",
    "checks",
    "config",
    "weights",
    "learning",
    "speculation",
    "target_model",
    "distributed",
    "drafting",
    "response",
    "decoding",
    "tuning",
    "engine",
    "loading",
    "verification",
    "structured",
    "server",
    "distill",
    "bench",
    "cli",
)
"""Packages, lowest first: each imports only from itself and from those before it."""

FLOORS = {
    "bench": (
        "statistics",
        "measure",
        "programs",
        "options",
        "checks",
        "models",
        "analyse",
        "show",
        "papers",
        "session",
        "paper_run",
    ),
    "distill": (
        "checked_arrays",
        "options",
        "drafter_forms",
        "job",
        "options_file",
        "corpus",
        "evaluation",
        "forms",
        "training",
        "report",
        "memory_plan",
        "sizes",
        "hours",
        "plan",
        "run",
        "learn",
    ),
}
"""The same order within a package that has folders."""


def modules() -> Iterator[tuple[str, Path]]:
    """Yield the name of each module below redrafter_mlx, such as `target.model`, and its file."""
    for folder, prefix in (("redrafter_mlx", ""), *((f, f) for f in ("cli", "bench", "weights"))):
        for path in (ROOT / folder).rglob("*.py"):
            parts = path.relative_to(ROOT / folder).with_suffix("").parts
            name = ".".join([*([prefix] if prefix else []), *parts]).removesuffix("__init__")
            if name and not name.startswith("cli.start"):
                yield name.rstrip("."), path


def all_imports(path: Path) -> Iterator[str]:
    """Yield every module that a file imports."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
            yield node.module
        elif isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)


def imports(path: Path) -> Iterator[str]:
    """Yield what a file imports of this package, `` for the package root."""
    for name in all_imports(path):
        if name.split(".")[0] == "redrafter_mlx":
            yield name.removeprefix("redrafter_mlx").lstrip(".")


def test_every_module_belongs_to_a_room() -> None:
    assert {name.split(".")[0] for name, _ in modules()} <= set(ROOMS)


def test_the_installed_packages_are_the_folders() -> None:
    installed = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    packages = {*installed["tool"]["setuptools"]["packages"]} - {"redrafter_mlx_start"}
    folders = {name.rpartition(".")[0] for name, path in modules() if path.stem != "__init__"}
    assert packages == {f"redrafter_mlx.{f}".rstrip(".") for f in folders}


def test_no_folder_has_more_than_15_modules_and_no_module_more_than_300_lines() -> None:
    for name, path in modules():
        lines = path.read_text(encoding="utf-8").count("\n")
        assert lines <= 300, f"{name} has {lines} lines; part it"
    folders = Counter(path.parent for _, path in modules() if path.stem != "__init__")
    folders += Counter(path.parent for path in TESTS.rglob("*.py"))
    full = {str(folder.relative_to(ROOT)): n for folder, n in folders.items() if n > 15}
    assert not full, f"part these folders by meaning, or merge modules: {full}"


def test_no_test_file_has_more_than_600_lines() -> None:
    for path in TESTS.rglob("*.py"):
        lines = path.read_text(encoding="utf-8").count("\n")
        assert lines <= 600, f"{path} has {lines} lines; part it by what its tests are about"


def test_imports_run_downwards() -> None:
    for name, path in modules():
        here = ROOMS.index(name.split(".")[0])
        for imported in imports(path):
            assert imported, f"{name} imports the package root"
            there = ROOMS.index(imported.split(".")[0])
            assert there <= here, f"{name} imports {imported} from above"
            if there == here and (floors := FLOORS.get(ROOMS[here])):
                upper, lower = (floors.index(m.split(".")[1]) for m in (name, imported))
                assert lower <= upper, f"{name} imports {imported} from above"


def test_no_circle_within_a_room() -> None:
    known = dict(modules())
    graph = {name: {i for i in imports(path) if i in known} for name, path in known.items()}
    while graph:
        free = [name for name, below in graph.items() if not below & graph.keys() - {name}]
        assert free, f"these import each other in a circle: {sorted(graph)}"
        for name in free:
            del graph[name]


def test_what_only_a_cpu_needs_has_one_door() -> None:
    """Beside it, libraries are found and named for people, without MLX."""
    for name, path in modules():
        inside = {imported for imported in imports(path) if imported.split(".")[0] == "cpu"}
        assert name.startswith("cpu") or inside <= {"cpu.door", "cpu.blas"}, name


def test_only_the_upper_rooms_know_the_terminal_and_few_the_network() -> None:
    for name, path in modules():
        packages = {imported.split(".")[0] for imported in all_imports(path)}
        room = name.split(".")[0]
        if room not in ("bench", "cli"):
            assert not packages & {"typer", "rich"}, name
        if room not in ("weights", "bench", "cli"):
            assert not packages & {"huggingface_hub", "requests", "httpx", "urllib"}, name


def test_the_algorithm_knows_no_model() -> None:
    for name, path in modules():
        if name.startswith("speculation."):
            below = {imported.split(".")[0] for imported in imports(path)}
            assert below <= {"checks", "config", "errors", "speculation"}, name


def test_no_test_imports_a_test() -> None:
    for path in TESTS.rglob("*.py"):
        shared = {name for name in all_imports(path) if name.split(".")[-1].startswith("test_")}
        assert not shared, f"{path}: what tests share belongs in tests/support"


def test_the_slow_tests_are_tests() -> None:
    """Those that `make check` leaves out, by tests/slow.txt."""
    names = (TESTS / "slow.txt").read_text(encoding="utf-8").split()
    assert names == sorted(names)
    for name in names:
        path, _, function = name.partition("::")
        assert f"def {function}(" in (ROOT / path).read_text(encoding="utf-8"), name
