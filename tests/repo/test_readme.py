"""The claims of README.md and docs/ hold: tests exist, links resolve, commands parse."""

from __future__ import annotations

import ast
import re
import shlex
from collections.abc import Iterator
from pathlib import Path

import pytest
import typer
from places import ROOT, TESTS
from tiny import ARCHITECTURES

from redrafter_mlx.cli.main import app
from redrafter_mlx.loading.drafter import published_drafter
from redrafter_mlx.runtime.files.paths import human_size
from redrafter_mlx.weights.registry import REGISTRY

PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
BY_DEFAULT, EXHAUSTIVE = "By `python -m pytest -q`:", "By `python -m pytest -q -m exhaustive`"


def text_of(page: Path) -> str:
    return page.read_text(encoding="utf-8")


def laws_after(words: str) -> list[str]:
    """Return the rows of the first table of the page on exactness after `words`, without header."""
    _, _, rest = text_of(ROOT / "docs" / "concepts" / "exactness.md").partition(words)
    table = re.search(r"(?:^\|.*\n)+", rest, re.MULTILINE)
    assert table is not None
    return table.group().splitlines()[2:]


def known_tests() -> dict[str, bool]:
    """Return all tests by name, and whether a plain pytest runs them; also each file's name."""
    found: dict[str, bool] = {}
    for path in TESTS.rglob("test_*.py"):
        for node in ast.parse(text_of(path)).body:
            if isinstance(node, ast.FunctionDef) and node.name.startswith("test_"):
                marks = [ast.unparse(mark) for mark in node.decorator_list]
                runs = "pytest.mark.exhaustive" not in marks
                found[node.name] = found.get(node.name, False) or runs
                named = f"tests/{path.relative_to(TESTS)}"
                found[named] = found.get(named, False) or runs
    return found


@pytest.mark.parametrize(("words", "by_default"), [(BY_DEFAULT, True), (EXHAUSTIVE, False)])
def test_each_law_names_tests_that_its_command_runs(words: str, by_default: bool) -> None:
    known = known_tests()
    laws = laws_after(words)
    assert len(laws) > 3
    for law in laws:
        named = re.findall(r"`(tests/[\w/]+\.py|test_\w+)`", law)
        assert named, law
        assert [known.get(name) for name in named] == [by_default] * len(named), law


def test_the_architectures_that_are_counted_are_tried() -> None:
    types = {name.split(" ")[0] for name in ARCHITECTURES}
    dense = {name for name in types if "moe" not in name}
    (law,) = (law for law in laws_after(BY_DEFAULT) if "architectures" in law)
    assert [int(n) for n in re.findall(r"\d+", law)] == [len(types), len(dense)]
    assert len(types) - len(dense) == 1


MAY_SKIP = {
    "test_bad_prompts_are_refused_at_once": "of two kinds of prompts, one may be empty",
    "_as_nobody": "needs a system on which another user may read this environment",
}


def test_no_test_skips_for_data_that_a_clone_lacks() -> None:
    """Test data is in the repository, made by the tests, or fetched like the model.

    Tests marked `parity` compare with what may be downloaded in addition.
    """
    outside = re.compile(r"Path\(__file__\)(\.resolve\(\))?\.parents(?!\[1\])|\bshared/")
    skipping = set()
    for path in TESTS.rglob("*.py"):
        module = ast.parse(text_of(path))
        if path == Path(__file__) or "pytestmark = pytest.mark.parity" in ast.unparse(module):
            continue
        for node in module.body:
            code = ast.unparse(node)
            if "@pytest.mark.parity" in code:
                continue
            assert not outside.search(code), f"{path.name}: {code}"
            if "pytest.skip(" in code:
                assert isinstance(node, ast.FunctionDef), f"{path.name} skips as a whole"
                skipping.add(node.name)
    assert skipping == set(MAY_SKIP)


def test_the_readme_is_short() -> None:
    assert (ROOT / "README.md").stat().st_size <= 9000


def test_the_models_of_the_readme_have_these_sizes_and_drafters() -> None:
    rows = re.findall(
        r"^\| `(\S+)` \| (.+) \| (\S+/\S+) \| (.*)\|$", text_of(ROOT / "README.md"), re.M
    )
    assert len(rows) > 5
    for name, size, drafter, drafters_size in rows:
        offered = published_drafter(name)
        assert offered is not None, name
        known = "" if offered.size is None else human_size(offered.size)
        assert (size, drafter, drafters_size.strip()) == (
            human_size(REGISTRY[name].size), offered.name, known
        )  # fmt: skip


def without_blocks(text: str) -> str:
    """Return the text without its fenced code blocks."""
    return re.sub(r"^```.*?^```", "", text, flags=re.DOTALL | re.MULTILINE)


def anchors(page: Path) -> set[str]:
    """Return the names that GitHub gives to a page's headings."""
    headings = re.findall(r"^#+ (.+)$", without_blocks(text_of(page)), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def links(page: Path) -> list[str]:
    return re.findall(r"\]\(([^)\s]+)\)", without_blocks(text_of(page)))


def test_links_and_commands_are_found() -> None:
    """Otherwise the tests of each page below would pass with nothing to check."""
    readme = ROOT / "README.md"
    assert any(link.startswith("docs/") for link in links(readme))
    assert {page.name for page in PAGES if links(page)} >= {"README.md", "server.md"}
    commands = [line.split()[1] for page in PAGES for line in shown_commands(text_of(page))]
    assert {"chat", "serve", "train", "bench"} <= set(commands)
    assert list(shown_commands(text_of(readme)))


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_relative_links_lead_to_files_and_headings(page: Path) -> None:
    for link in links(page):
        if re.match(r"\w+:", link):
            continue
        path, _, heading = link.partition("#")
        target = page.parent / path if path else page
        assert target.exists(), link
        assert not heading or heading in anchors(target), link


def shown_commands(text: str) -> Iterator[str]:
    """Yield every `redrafter-mlx ...` command of a page, from shell blocks and code spans."""
    blocks = re.findall(r"^```sh\n(.*?)^```", text, re.DOTALL | re.MULTILINE)
    lines = "\n".join(blocks).replace("\\\n", " ").splitlines()
    spans = [span.replace("\n", " ") for span in re.findall(r"`([^`]+)`", without_blocks(text))]
    for code in [*lines, *spans]:
        for command in re.split(r"&&|\||;", re.sub(r"\s#.*", "", code)):
            if command.strip().startswith("redrafter-mlx "):
                yield command.strip()


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_commands_that_are_shown_have_their_options(page: Path) -> None:
    root = typer.main.get_command(app)
    for line in shown_commands(text_of(page)):
        name, *given = [word for word in shlex.split(line)[1:] if word not in ("…", "...")]
        assert name in root.commands, line  # type: ignore[attr-defined]
        if f"{name} {' '.join(given[:1])}" in root.commands:  # type: ignore[attr-defined]
            name = f"{name} {given.pop(0)}"
        command = root.commands[name]  # type: ignore[attr-defined]
        try:
            _, left, _ = command.make_parser(typer.Context(command)).parse_args(args=given)
        except Exception as error:
            pytest.fail(f"{page.name}: {line}: {error}")
        assert not left, line
