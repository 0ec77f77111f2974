"""Options of `redrafter-mlx train`, and of the file that holds them."""

from __future__ import annotations

import sys
from dataclasses import fields
from pathlib import Path

import pytest
from places import ROOT
from train_runs import Keys, arguments

from redrafter_mlx.cli import main
from redrafter_mlx.distill.drafter_forms import FORMS
from redrafter_mlx.distill.options_file import make_job, read_options, to_toml
from redrafter_mlx.errors import BadInputError

SHIPPED = Path(main.__file__).parents[1] / "weights" / "drafters" / "smollm2-135m"
LINUX = pytest.mark.skipif(sys.platform != "linux", reason="nobody can write into /proc")


def refused_in_one_line(given: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    """Return the error of a command that is refused."""
    assert main.run(given) != 0
    (error,) = capsys.readouterr().err.splitlines()
    return error


@pytest.mark.parametrize(
    ("given", "shown"),
    [
        (["--epochs", "0"], "epochs is 0"),
        (["--draft-vocab", "many"], "--draft-vocab is many"),
        (["--draft-vocab", "²"], "--draft-vocab is ²"),
        (["--draft-vocab", "9" * 5000], "--draft-vocab is 999"),
        (["--labels", "mine"], "labels is 'mine'"),
        (["--dtype", "float8"], "dtype is 'float8'"),
        (["--data", "x.jsonl"], "--prompts or --data"),
        (["--epochs", "inf"], "epochs is inf"),
        (["--seed", "-1"], "seed is -1"),
        (["--seed", str(2**64)], f"seed is {2**64}"),
        (["--form", "hydra"], "form is 'hydra'; choose one of recurrent, medusa, mlp"),
        (["--form", "medusa"], "unknown option of [drafter] (form medusa) 'layers'"),
        (["--layers", "100000"], "num_draft_layers is 100000"),
        (["--layers", "-1"], "num_draft_layers is -1"),
        (["--draft-length", "100"], "draft_length is 100"),
        (["--labels", "data"], "give --data"),
        (["--answer-tokens", "63"], "answer_tokens is 63"),
        (["--output", ""], "--output is empty"),
        (["--output", __file__], f"{__file__} is a file"),
        (["--output", f"{__file__}/out"], f"{__file__} is a file"),
        (["--output", str(SHIPPED)], "config.json"),
        pytest.param(["--output", "/proc/out"], "nothing can be written", marks=LINUX),
        (["--config", "no-such-options.toml"], "no-such-options.toml cannot be read"),
        (["--config", __file__], "test_train_options.py is not a TOML file"),
    ],
)
def test_bad_options_are_refused_in_one_line_before_anything_is_loaded(
    prompts: Path, tmp_path: Path, given: list[str], shown: str, capsys: pytest.CaptureFixture[str]
) -> None:
    line = arguments(tmp_path / "nowhere", prompts, tmp_path / "out")
    assert shown in refused_in_one_line([*line, *given], capsys)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("table", "key", "value", "shown"),
    [
        ("", "epochs", 2, "unknown option 'epochs'"),
        ("", "answer_token", 2, "did you mean 'answer_tokens'"),
        ("", "output", "elsewhere", "output is an option of the command"),
        ("", "workers", 0, "workers is 0"),
        ("", "workers", 100000, "workers is 100000"),
        ("", "workers", "two", "workers is 'two'; it must be a whole number"),
        ("", "learn_prompts", "no", "it must be true or false"),
        ("", "read", "x.txt", "read is 'x.txt'; it must be a list"),
        ("", "read", ["no-such-texts.txt"], "no-such-texts.txt cannot be read"),
        ("", "labels", "mine", "labels is 'mine'"),
        ("writing", "own_share", 2, "own_share is 2"),
        ("writing", "own_share", 1, "own_share is 1, so none of the given prompts"),
        ("writing", "starter_share", -1, "starter_share is -1"),
        ("writing", "starters", 1, "did you mean 'starter_share'"),
        ("writing", "openings", [], "openings is []"),
        ("drafter", "head", "loose", 'head is \'loose\'; it must be "own" or "tied"'),
        ("drafter", "context_layers", "last", "context_layers is 'last'; it must be a list"),
        ("drafter", "context_layers", [0.5], "context_layers is 0.5"),
        ("drafter", "exit_dim", 0, "exit_dim is 0"),
        ("drafter", "form", ["mlp"], "form is ['mlp']; choose one of"),
        ("drafter", "inner_dim", 8, "unknown option of [drafter] (form recurrent) 'inner_dim'"),
        ("drafter", "draft_vocab", 0, "draft_vocab is 0"),
        ("training", "keep_start", 0.5, "keep_start is 0.5"),
        ("training", "learning_rate", 1e30, "learning_rate is 1e+30"),
        ("training", "depth_decay", True, "depth_decay is True; it must be a number"),
        ("training", "evaluations", 10**9, "evaluations is 1000000000"),
        ("training", "optimiser", "muon", "did you mean 'optimizer'"),
    ],
)
def test_bad_keys_of_an_options_file_are_refused_in_one_line_before_anything_is_loaded(
    prompts: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str],
    table: str, key: str, value: object, shown: str,
) -> None:  # fmt: skip
    keys: Keys = {table: {key: value}}
    line = arguments(tmp_path / "nowhere", prompts, tmp_path / "out", keys)
    assert shown in refused_in_one_line(line, capsys)
    assert not (tmp_path / "out").exists()


def test_a_key_in_place_of_a_table_is_refused_in_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = tmp_path / "options.toml"
    config.write_text("training = 3")
    line = ["train", "--config", str(config), "--output", str(tmp_path / "out")]
    assert "it must be a table" in refused_in_one_line(line, capsys)
    assert not (tmp_path / "out").exists()


def test_drafts_that_no_answer_is_long_enough_for_are_refused(tmp_path: Path) -> None:
    def keys(longest: int) -> dict[str, object]:
        return {
            "model": "tiny",
            "training": {"draft_length": 5},
            "writing": {"max_answer_tokens": longest},
        }

    make_job(keys(6), tmp_path)
    with pytest.raises(BadInputError, match="raise max_answer_tokens"):
        make_job(keys(5), tmp_path)


def test_an_options_file_reads_back_equal(tmp_path: Path) -> None:
    given = {
        "model": 'a "quoted"\tm\u00f6del \U0001f600 \x7f', "prompts": ["a.txt", "b\\c"],
        "quantize": 4, "learn_prompts": False, "memory": 2**40,
        "writing": {"openings": [0, 3], "own_share": 0.25},
        "drafter": {"draft_vocab": "all", "context_layers": [20, 27], "rnn": False},
        "training": {"learning_rate": 1e-05, "epochs": 3},
    }  # fmt: skip
    heads = {"model": "tiny", "drafter": {"form": "medusa", "head": "tied"}}
    speculator = {"model": "tiny", "drafter": {"form": "mlp", "inner_dim": 3072}}
    for keys in (given, {"model": "tiny"}, heads, speculator):
        job = make_job(keys, tmp_path)
        path = tmp_path / "train.toml"
        path.write_text(to_toml(job), encoding="utf-8")
        assert make_job(read_options(path), tmp_path) == job


def test_every_key_of_the_options_file_is_documented() -> None:
    documented = (ROOT / "docs" / "guides" / "training.md").read_text(encoding="utf-8")
    job = make_job({"model": "tiny", "memory": 1, "workers": 1, "quantize": 4}, Path("out"))
    for part in (job, job.writing, job.training, *(form() for form in FORMS)):
        for option in fields(part):
            if option.name not in ("output", "offline"):
                assert f"`{option.name}`" in documented or f"[{option.name}]`" in documented


def test_paths_in_an_options_file_may_begin_with_the_home_and_unknown_users_are_names(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    job = make_job({"model": "tiny", "exclude": ["~/q", "~nobody-here/q"]}, tmp_path / "out")
    assert job.exclude == (tmp_path / "q", Path("~nobody-here/q"))
