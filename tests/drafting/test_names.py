"""What a drafter's name means, read from the name alone."""

from __future__ import annotations

from pathlib import Path

import pytest

from redrafter_mlx.drafting.names import DrafterName, parse
from redrafter_mlx.errors import BadInputError


@pytest.mark.parametrize(
    ("name", "meaning"),
    [
        (None, DrafterName()),
        ("none", DrafterName()),
        ("lookup", DrafterName(host=("lookup",))),
        ("auto", DrafterName(("trained",), host=("lookup", "earlier"), auto=True)),
        ("auto+lookup", DrafterName(("trained",), host=("lookup", "earlier"), auto=True)),
        ("trained", DrafterName(("trained",))),
        ("lookup+trained", DrafterName(("trained",), host=("lookup",))),
        ("earlier+lookup", DrafterName(host=("lookup", "earlier"))),
        ("org/eagle", DrafterName(("org/eagle",))),
        (Path("folder"), DrafterName(("folder",))),
        ("own.py:Own+trained", DrafterName(("own.py:Own", "trained"))),
        ("a+b+lookup", DrafterName(("a", "b"), host=("lookup",))),
        ("a+tree:oak", DrafterName(("a",), tree="oak")),
        ("a+tree:oak+lookup", DrafterName(("a",), host=("lookup",), tree="oak")),
    ],
)
def test_a_drafters_name_means(name: str | Path | None, meaning: DrafterName) -> None:
    assert parse(name) == meaning


def test_a_folder_whose_name_holds_a_plus_is_one_drafter(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "a+b").mkdir()
    for name in ("~/a+b", "~/a+b+lookup"):
        assert parse(name).parts == (str(tmp_path / "a+b"),)


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("", "name a drafter, or none"),
        ("+lookup", "a drafter beside lookup"),
        ("a+b+c", "one drafter, or two"),
        ("a+", "one drafter, or two"),
        ("auto+a", "name trained and the other one"),
        ("a+none", "none decodes plainly"),
        ("lookup+lookup", "lookup is named twice"),
        ("auto+tree:oak", "auto drafts along no tree"),
        ("lookup+tree:oak", "lookup drafts along no tree"),
    ],
)
def test_a_name_that_means_nothing_is_refused_in_one_line(name: str, why: str) -> None:
    with pytest.raises(BadInputError, match=why) as error:
        parse(name)
    assert "\n" not in str(error.value)
