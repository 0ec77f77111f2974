"""`bench --report`: one folder with the whole result, which `--compare` can read."""

from __future__ import annotations

import errno
import json
import shlex
from pathlib import Path

import pytest
from bench_runs import QUICK, SHAPES, Refusal, loader  # noqa: F401
from command_line import CommandLine

from redrafter_mlx.bench.analyse.compare import read_result
from redrafter_mlx.bench.show.report_folder import check_report
from redrafter_mlx.cli import main

pytestmark = pytest.mark.usefixtures("loader")


def test_a_report_holds_table_heatmap_profile_machine_and_command(
    tmp_path: Path, cli: CommandLine
) -> None:
    pytest.importorskip("matplotlib")
    folder = tmp_path / "my report"
    asked = [*QUICK, *SHAPES, "--temperature", "0,0.5", "--report", str(folder)]
    result = cli.json(*asked, "--json")
    assert json.loads((folder / "result.json").read_text()) == result
    names = {"report.md", "result.json", "heatmap.png", "profile.png"}
    assert {path.name for path in folder.iterdir()} == names
    text = (folder / "report.md").read_text()
    lines = text.splitlines()
    command = next(line for line in lines if line.startswith("redrafter-mlx bench"))
    again = shlex.split(command)[1:]
    assert {*asked} - {"-r"} <= {*again}
    assert result["machine"]["chip"] in text.replace("\\", "")
    assert f"mlx {result['machine']['mlx']}" in text
    assert sum(line.startswith("| redrafter |") for line in lines) >= 2 * 2
    assert "the target's call by query rows" in text
    for name in names - {"report.md"}:
        assert f"]({name})" in text
    assert (folder / "heatmap.png").read_bytes().startswith(b"\x89PNG")
    assert main.run(again) == 0, "and its command line makes the same report"
    assert {path.name for path in folder.iterdir()} == names
    assert [path.name for path in tmp_path.iterdir()] == ["my report"]


def test_two_reports_are_compared_as_their_results_are(tmp_path: Path, cli: CommandLine) -> None:
    for name in ("a", "b"):
        assert main.run([*QUICK, "--report", str(tmp_path / name)]) == 0
    assert read_result(tmp_path / "a") == read_result(tmp_path / "a" / "result.json")
    found = []
    for ends in ("", "/result.json"):
        pair = [f"{tmp_path}/{name}{ends}" for name in ("a", "b")]
        found.append(cli.json("bench", "--compare", *pair, "--json"))
    assert found[0] == found[1]
    assert found[0]["changes"]
    assert main.run(["bench", "--compare", str(tmp_path), str(tmp_path)]) == 1


def test_each_of_several_drafters_has_its_profile(tmp_path: Path) -> None:
    both = ["--drafter", "trained", "--drafter", "random"]
    assert main.run([*QUICK, *SHAPES, *both, "--report", str(tmp_path / "r")]) == 0
    text = (tmp_path / "r" / "report.md").read_text()
    assert text.count("## Profile: ") == 2
    assert "## Profile: auto trained" in text


def test_a_folder_that_is_no_report_is_refused_before_anything_is_measured(
    tmp_path: Path, refusal: Refusal
) -> None:
    other, file = tmp_path / "other", tmp_path / "file"
    other.mkdir()
    (other / "thesis.txt").write_text("mine")
    file.write_text("mine")
    for wrong in (other, file, tmp_path / "no" / "such"):
        assert str(wrong) in refusal("--report", str(wrong))
    assert "--report" in refusal("--report", str(tmp_path / "x"), "--batch-size", "2")
    assert "--report" in refusal("--report", str(tmp_path / "x"), "--paper", "table2")
    assert [path.name for path in other.iterdir()] == ["thesis.txt"]
    assert file.read_text() == "mine"
    assert not (tmp_path / "x").exists()
    (other / "result.json").write_text("{}")
    assert "thesis.txt" in refusal("--report", str(other))


def test_hidden_files_as_finder_leaves_them_do_not_keep_a_report_from_being_replaced(
    tmp_path: Path,
) -> None:
    (tmp_path / "report.md").write_text("older")
    (tmp_path / "result.json").write_text("{}")
    (tmp_path / ".DS_Store").write_text("Finder's")
    check_report(tmp_path)


def test_answers_in_the_reports_folder_stay_and_are_resumed(tmp_path: Path) -> None:
    folder = tmp_path / "r"
    folder.mkdir()
    asked = [*QUICK, "--report", str(folder), "--answers", str(folder / "answers.jsonl")]
    assert main.run(asked) == 0
    lines = (folder / "answers.jsonl").read_text()
    assert main.run(asked) == 0
    assert (folder / "answers.jsonl").read_text() == lines != ""
    assert (folder / "result.json").is_file()


def test_a_report_on_another_disk_replaces_the_older_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Renaming a file into another folder's disk fails; the folder is a mount, or a link to one."""
    folder, asked = tmp_path / "r", [*QUICK, *SHAPES, "--report", str(tmp_path / "r")]
    assert main.run(asked) == 0
    (folder / "profile-7.png").write_text("of the older report")
    before, replace = sorted(path.name for path in folder.iterdir()), Path.replace

    def on_one_disk(self: Path, target: Path) -> Path:
        if not self.is_relative_to(folder):
            raise OSError(errno.EXDEV, "Invalid cross-device link")
        return replace(self, target)

    monkeypatch.setattr(Path, "replace", on_one_disk)
    monkeypatch.setattr(Path, "rename", on_one_disk)
    assert main.run(asked) == 0
    assert sorted(path.name for path in folder.iterdir()) == [
        name for name in before if name != "profile-7.png"
    ]


@pytest.mark.skipif(not Path("/proc/self").is_dir(), reason="needs a folder that takes no files")
def test_a_folder_that_takes_no_files_is_refused_before_anything_is_measured(
    refusal: Refusal,
) -> None:
    assert "nothing can be written" in refusal("--report", "/proc/report")
