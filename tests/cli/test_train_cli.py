"""`redrafter-mlx train`, from the command line to a drafter that decodes."""

from __future__ import annotations

import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import fields, replace
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import mlx.core as mx
import pytest
from mlx.utils import tree_flatten
from mtp_samples import random_head, target_model, without_ones
from places import ROOT
from rich.console import Console
from tiny import byte_model, byte_tokenizer
from train_runs import (  # noqa: F401
    Keys,
    arguments,
    model,
    options_file,
    own_cache,
    prompts,
    save_folder,
    unwrapped,
)
from waiting import wait_for

from redrafter_mlx.cli import main
from redrafter_mlx.cli.train.lines import shortfall
from redrafter_mlx.cli.train.screen import fit
from redrafter_mlx.distill import run as run_module
from redrafter_mlx.distill import sizes
from redrafter_mlx.distill.corpus.folder import CorpusSize
from redrafter_mlx.distill.corpus.shards import load_shard
from redrafter_mlx.distill.drafter_forms import FORMS, RecurrentForm
from redrafter_mlx.distill.job import TrainingJob
from redrafter_mlx.distill.options import TrainOptions
from redrafter_mlx.distill.options_file import make_job, read_options, to_toml
from redrafter_mlx.distill.plan import plan
from redrafter_mlx.distill.report.metrics import read_metrics
from redrafter_mlx.distill.training.checkpoint import (
    CHECKPOINT,
    Checkpoint,
    Progress,
    save_checkpoint,
)
from redrafter_mlx.distill.training.loop import Step
from redrafter_mlx.distributed.group import Ranks
from redrafter_mlx.drafting.files.installed import drafter_folder
from redrafter_mlx.drafting.recurrent_config import read_config
from redrafter_mlx.errors import BadInputError
from redrafter_mlx.loading.load import load
from redrafter_mlx.runtime.atomic_write import locked
from redrafter_mlx.runtime.paths import bytes_below
from redrafter_mlx.target_model.fingerprint import nbytes_of
from redrafter_mlx.weights.fit.machine import this_machine

SHIPPED = Path(main.__file__).parents[1] / "weights" / "drafters" / "smollm2-135m"
LINUX = pytest.mark.skipif(sys.platform != "linux", reason="nobody can write into /proc")


def losses(folder: Path) -> list[float]:
    return [record["loss"] for record in read_metrics(folder) if record["event"] == "step"]


def steps_logged(folder: Path) -> list[int]:
    return [record["step"] for record in read_metrics(folder) if record["event"] == "step"]


def test_train_ends_with_a_drafter_that_is_used_and_a_verdict(
    model: Path, prompts: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    output, texts = tmp_path / "drafter[x]", tmp_path / "texts.txt"
    texts.write_text("\n".join(f"A text of {i} words or more." for i in range(20)))
    keys: Keys = {
        "": {"read": [str(texts)], "timed_questions": 1},
        "training": {"evaluations": 2, "epochs": 4},
    }
    assert main.run(arguments(model, prompts, output, keys)) == 0
    shown = capsys.readouterr()
    assert "On this machine it" in shown.out
    assert f"--drafter {shlex.quote(str(output))}" in shown.out
    assert "tokens/step" in shown.out
    assert "corpus:" in shown.err
    assert {p.name for p in output.iterdir()} >= {
        "config.json", "model.safetensors", "metrics.jsonl", "README.md", "train.toml",
    }  # fmt: skip
    config = read_config(output)
    assert config.target_fingerprint is not None
    assert config.draft_vocab_size == 100
    assert config.context_layers == (0, 1)
    (corpus,) = (tmp_path / "cache" / "corpora").iterdir()
    learnt = [bool(load_shard(path).texts) for path in sorted(corpus.glob("prompts/block-*"))]
    assert learnt[0] is False  # held out
    assert any(learnt)
    read = [len(load_shard(path).texts) for path in sorted(corpus.glob("read-*/block-*"))]
    assert sum(read) == 20
    assert read[0] == 15  # as many as the block has answers
    assert " 0 tokens read" not in (output / "README.md").read_text()
    assert sum(record["event"] == "evaluation" for record in read_metrics(output)) >= 2
    assert losses(output)[-1] < losses(output)[0]

    drafted = load(model, output)
    plain = load(model, None)
    prompt = [5, 6, 7]
    answer = drafted.generate(prompt, max_tokens=48, draft=True)
    assert answer.token_ids == plain.generate(prompt, max_tokens=48).token_ids

    # With the same options nothing is left to do; with other texts it is another run.
    before = (output / "model.safetensors").read_bytes()
    again = ["train", "--config", str(output / "train.toml"), "--output"]
    assert main.run([*again, str(output)]) == 0
    assert (output / "model.safetensors").read_bytes() == before
    more = str(int(0.9 * this_machine().memory))
    assert main.run([*again, str(output), "--memory", more]) == 0, "the order of batches stays"
    assert main.run([*again, str(output), "--memory", "1500000000"]) == 1
    assert "give more --memory" in unwrapped(capsys.readouterr().err)
    (output / "metrics.jsonl").unlink()
    assert main.run([*again, str(output)]) == 0
    assert "The log of its training was removed" in (output / "README.md").read_text()
    keys[""]["read"] = []
    assert main.run(arguments(model, prompts, output, keys)) == 1
    assert "run with read" in unwrapped(capsys.readouterr().err)

    # In another folder the options make the same drafter.
    assert main.run([*again, str(tmp_path / "twin")]) == 0
    assert (tmp_path / "twin" / "model.safetensors").read_bytes() == before
    written = [(folder / "train.toml").read_text() for folder in (output, tmp_path / "twin")]
    assert written[0] == written[1]


def test_a_drafter_is_trained_further_on_other_text(
    model: Path, prompts: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    first, second = tmp_path / "first", tmp_path / "second"
    assert main.run(arguments(model, prompts, first)) == 0
    go_on = [*arguments(model, prompts, second), "--start-from", str(first), "--seed", "1"]
    assert main.run([*go_on, "--layers", "2"]) == 1
    assert "num_draft_layers 1" in unwrapped(capsys.readouterr().err)
    assert not second.exists()
    assert len(list((tmp_path / "cache/corpora").iterdir())) == 1
    assert main.run([*arguments(model, prompts, first), "--start-from", str(first)]) == 1
    assert "give another --output" in unwrapped(capsys.readouterr().err)
    assert main.run(go_on) == 0
    assert len(list((tmp_path / "cache/corpora").iterdir())) == 2
    afresh, further = (losses(run)[:10] for run in (first, second))
    assert sum(further) / 10 < sum(afresh) / 10 - 0.1
    assert "random weights" in (first / "README.md").read_text()
    assert "a trained drafter, `sha256:" in (second / "README.md").read_text()
    assert main.run([*arguments(model, prompts, second), "--seed", "1"]) == 1
    assert "started_from" in unwrapped(capsys.readouterr().err)
    for size in (150, "all"):  # a tied head may have another draft vocabulary
        output = tmp_path / str(size)
        given = arguments(model, prompts, output, {"drafter": {"draft_vocab": size}})
        assert main.run([*given, "--start-from", str(second), "--seed", "1"]) == 0
        assert sum(losses(output)[:10]) / 10 < sum(afresh) / 10 - 0.1
        stored = mx.load(str(output / "model.safetensors"))
        assert [array.shape for name, array in stored.items() if name == "draft_vocab"] == (
            [(size,)] if size == 150 else []
        )


def test_another_architecture_is_trained_for_by_the_same_command(
    prompts: Path, tmp_path: Path
) -> None:
    """In the paper's own form."""
    qwen = save_folder(tmp_path / "qwen", "qwen3")
    output = tmp_path / "drafter"
    paper: Keys = {
        "drafter": {"head": "own", "draft_vocab": "all", "context_layers": []},
        "training": {"soft_share": 0},
    }
    assert main.run(arguments(qwen, prompts, output, paper)) == 0
    stored = json.loads((output / "config.json").read_text())
    assert "draft_vocab_size" not in stored
    assert stored["head"] == "own"
    assert "context_layers" not in stored
    assert load(qwen, output).drafting == "drafter"


@pytest.mark.parametrize("anew", [False, pytest.param(True, marks=pytest.mark.exhaustive)])
def test_a_models_own_head_is_trained_further_from_its_files_or_anew(
    anew: bool, prompts: Path, tmp_path: Path
) -> None:
    """And is exported as a folder of its own, with which the model decodes."""
    network = target_model("qwen3_5")
    qwen = save_folder(tmp_path / "qwen", model=network)
    weights = dict(tree_flatten(network.parameters()))
    head = {f"mtp.{name}": array for name, array in without_ones(random_head(network)).items()}
    for file in qwen.glob("model*"):
        file.unlink()
    mx.save_safetensors(str(qwen / "model.safetensors"), weights | head, {"format": "mlx"})
    form = {"form": "mtp", **dict.fromkeys(("draft_vocab", "layers", "context_layers"))}
    output = tmp_path / "drafter"
    given = arguments(qwen, prompts, output, {"drafter": form})
    assert main.run([*given, *([] if anew else ["--start-from", str(qwen)])]) == 0
    assert losses(output)[-1] < losses(output)[0]
    drafted = load(qwen, output)
    assert drafted.drafting == "MTP"
    answer = drafted.generate([5, 6, 7], max_tokens=24, draft=True)
    assert answer.token_ids == load(qwen, None).generate([5, 6, 7], max_tokens=24).token_ids


def test_a_corpus_cut_short_by_the_disk_is_reported() -> None:
    job = TrainingJob(
        model="any", output=Path("out"), answer_tokens=1000, cache_bytes=5000,
        training=TrainOptions(batch=10),
    )  # fmt: skip
    whole = CorpusSize(1, 1, 1000, 0, 10, 4000, {})
    cut = replace(whole, answer_tokens=900)
    assert shortfall(whole, job, 5000, layers=True) is None
    given = replace(job, data=Path("given.jsonl"), labels="data")
    assert shortfall(cut, given, 5000, layers=True) is None
    with_layers, without = (shortfall(cut, job, 5000, layers=layers) for layers in (True, False))
    for note in (with_layers, without):
        assert note is not None
        assert "cache_bytes 5000" in note
        assert "1000" in note
    assert "context layers" in str(with_layers)
    assert "context layers" not in str(without)


def test_dry_run_prints_sizes_and_writes_nothing(
    model: Path, prompts: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    output = tmp_path / "drafter"
    assert main.run([*arguments(model, prompts, output), "--dry-run"]) == 0
    shown = capsys.readouterr().out
    lines = {line[:20].strip() for line in shown.splitlines()}
    assert {"drafter", "corpus on disk", "checkpoints", "memory", "training", "time"} < lines
    assert "writing the corpus" in lines
    assert not output.exists()
    assert not (tmp_path / "cache" / "corpora").exists()


@pytest.mark.parametrize("more", [[], ["--recipe", "paper"], ["--hours", "8"], ["--quantize", "4"]])
def test_a_dry_run_computes_nothing_and_names_what_it_did_not_measure(
    more: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    model = byte_model(hidden_size=512, intermediate_size=2048, num_hidden_layers=4)
    weights = nbytes_of(model)
    folder = save_folder(tmp_path / "large", model=model)
    del model
    mx.clear_cache()

    def computed(*_: object) -> None:
        raise AssertionError("a dry run computes something")

    for function in ("eval", "async_eval"):
        monkeypatch.setattr(mx, function, computed)
    before = mx.get_active_memory()
    mx.reset_peak_memory()
    line = ["train", str(folder), "-o", str(tmp_path / "out"), "--dry-run", *more]
    assert main.run(line) == 0
    assert mx.get_peak_memory() - before < weights / 10
    shown = capsys.readouterr().out
    assert "not measured" in shown
    assert "steps" in shown


def test_a_dry_run_downloads_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fetched(*_: object) -> None:
        raise AssertionError("it asks the Hub")

    monkeypatch.setattr("redrafter_mlx.weights.resolve.fetch", fetched)
    line = ["train", "org/not-here", "-o", str(tmp_path / "out"), "--dry-run"]
    assert main.run(line) == 1
    assert "pull org/not-here" in capsys.readouterr().err


def test_a_corpus_takes_a_tenth_of_the_free_disk_at_most_and_a_dry_run_says_so(
    model: Path, prompts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    line = arguments(model, prompts, tmp_path / "out", {"": {"cache_bytes": None}})
    disk = SimpleNamespace(free=100_000_000 + 4_000_000)
    monkeypatch.setattr("redrafter_mlx.runtime.paths.shutil.disk_usage", lambda _: disk)
    monkeypatch.setattr(sizes, "training_bytes", lambda *_: 0)
    assert main.run([*line, "--answer-tokens", "100000", "--dry-run"]) == 0
    shown = capsys.readouterr().out
    assert "400 kB, which holds" in shown
    assert "a tenth of the free disk" in shown
    assert main.run([*line, "--answer-tokens", "100000"]) == 0
    (corpus,) = (tmp_path / "cache" / "corpora").iterdir()
    assert 300_000 < bytes_below(corpus) < 600_000  # the last block goes beyond it
    assert "a tenth of the free disk" in capsys.readouterr().err


def test_a_resumed_run_keeps_the_bound_of_its_corpus_when_the_free_disk_has_changed(
    model: Path, prompts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    line = arguments(model, prompts, tmp_path / "out", {"": {"cache_bytes": None}})
    monkeypatch.setattr(sizes, "training_bytes", lambda *_: 0)
    for free in (4_000_000, 9_000_000, 2_000_000):
        disk = SimpleNamespace(free=100_000_000 + free)
        monkeypatch.setattr("redrafter_mlx.runtime.paths.shutil.disk_usage", lambda _, d=disk: d)
        assert main.run([*line, "--answer-tokens", "100000"]) == 0


def test_a_model_without_row_masks_is_written_one_text_at_a_time_with_a_note(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = TrainingJob(
        model=str(model), output=tmp_path / "out", drafter=RecurrentForm(context_layers=())
    )
    run = plan(job)
    assert not run.notes
    monkeypatch.setattr(run.target, "row_masks", False)
    (note,) = run.notes
    assert "llama" in note
    assert "one at a time" in note


def test_ranks_whose_options_store_other_files_are_refused(model: Path, tmp_path: Path) -> None:
    facts: list[dict[str, str]] = []
    ranks = cast(Ranks, SimpleNamespace(agree=facts.append))
    for drafter, learn_prompts in (
        (RecurrentForm(context_layers=()), True),
        (RecurrentForm(context_layers=()), False),
        (RecurrentForm(context_layers=(1,)), True),
    ):
        plan(
            TrainingJob(str(model), tmp_path, drafter=drafter, learn_prompts=learn_prompts),
            ranks=ranks,
        )
    assert len({fact["set of files"] for fact in facts}) == 3
    assert not any(str(tmp_path) in fact["set of files"] for fact in facts)


def test_too_little_memory_is_refused_before_anything_is_written(
    model: Path, prompts: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main.run([*arguments(model, prompts, tmp_path / "out"), "--memory", "1000000"]) == 1
    shown = unwrapped(capsys.readouterr().err)
    assert "memory is 1 MB" in shown
    assert "--memory" in shown
    assert not (tmp_path / "cache" / "corpora").exists()


def test_dry_run_counts_given_answers_and_texts_that_are_only_read(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    output, given, texts = tmp_path / "drafter", tmp_path / "given.jsonl", tmp_path / "texts.txt"
    pairs = [{"prompt": f"Question {i}?", "response": f"The answer is {i}."} for i in range(10, 50)]
    given.write_text("\n".join(map(json.dumps, pairs)))
    texts.write_text("\n".join(f"A text of {i} words or more." for i in range(20)))
    many: Keys = {"": {"answer_tokens": 4000}}
    read: Keys = {"": {"answer_tokens": 4000, "read": [str(texts)]}}
    asked = ["train", "--model", str(model), "--output", str(output), "--data", str(given)]

    def dry_run(keys: Keys) -> dict[str, str]:
        config = options_file(tmp_path / "options.toml", keys)
        shown = [*asked, "--config", str(config), "--labels", "data"]
        assert main.run([*shown, "--dry-run"]) == 0
        lines = capsys.readouterr().out.splitlines()
        return {line[:20].strip(): line[20:].strip() for line in lines}

    shown = dry_run(many)
    each = len(byte_tokenizer().encode("The answer is 10.<|im_end|>"))
    assert shown["answers"] == f"{40 * each} tokens"
    assert "writing the corpus" not in shown
    assert "reading the answers" in shown
    steps = [int(of["training"].split()[-2]) for of in (shown, dry_run(read))]
    assert steps[0] < steps[1] < 3 * steps[0]

    given.write_text(json.dumps({"prompt": "A question?", "response": ""}))
    for more in ([], ["--dry-run"]):
        config = str(options_file(tmp_path / "options.toml", many))
        assert main.run([*asked, "--config", config, "--labels", "data", *more]) == 1
        refused = unwrapped(capsys.readouterr().err)
        assert "given.jsonl" in refused
        assert "cache_bytes" not in refused
    assert not output.exists()


def test_ctrl_c_saves_and_the_same_command_resumes(
    model: Path, prompts: Path, tmp_path: Path
) -> None:
    output = tmp_path / "drafter"
    given = [*arguments(model, prompts, output), "--epochs", "12"]
    command = [sys.executable, "-m", "redrafter_mlx.cli.main", *given]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)

    def training() -> bool:
        assert process.poll() is None, process.stderr.read() if process.stderr else ""
        return (output / "metrics.jsonl").exists() and len(read_metrics(output)) >= 5

    wait_for(training)
    process.send_signal(signal.SIGINT)
    _, error = process.communicate(timeout=60)
    assert process.returncode == 130
    assert "the same command resumes" in error
    assert "Traceback" not in error
    made = steps_logged(output)
    assert main.run(given) == 0
    steps = steps_logged(output)
    assert steps == list(range(1, len(steps) + 1))
    assert len(steps) > len(made)


@pytest.mark.parametrize(("more", "own"), [([], True), (["--raw"], False)])
def test_too_few_prompts_are_refused_with_a_remedy_that_is_allowed(
    more: list[str], own: bool, model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A model that only continues plain texts writes no prompts."""
    one = tmp_path / "one.txt"
    one.write_text("Who?")
    assert main.run([*arguments(model, one, tmp_path / "drafter"), *more]) == 1
    refused = unwrapped(capsys.readouterr().err)
    assert "holds 1 prompt," in refused
    assert ("own_share" in refused) is own


def test_a_resumed_run_removes_what_it_half_wrote_and_nothing_else(
    model: Path, prompts: Path, tmp_path: Path
) -> None:
    output = tmp_path / "drafter"
    given = [*arguments(model, prompts, output), "--epochs", "1"]
    assert main.run(given) == 0
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait()
    for name in ("model.safetensors", "checkpoint.safetensors", "README.md", "loss.png"):
        (output / f".{ended.pid}-1.{name}").write_text("half")
    (output / ".notes").touch()
    (output / f".{os.getpid()}-1.train.toml").touch()  # is being written
    assert main.run([*given, "--dry-run"]) == 0
    assert len([*output.glob(".*")]) == 6
    assert main.run(given) == 0
    assert {path.name for path in output.glob(".*")} == {".notes", f".{os.getpid()}-1.train.toml"}


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
        (["--config", __file__], "test_train_cli.py is not a TOML file"),
    ],
)
def test_bad_options_are_refused_in_one_line_before_anything_is_loaded(
    prompts: Path, tmp_path: Path, given: list[str], shown: str, capsys: pytest.CaptureFixture[str]
) -> None:
    nowhere = tmp_path / "nowhere"
    assert main.run([*arguments(nowhere, prompts, tmp_path / "out"), *given]) != 0
    error = capsys.readouterr().err
    assert shown in error
    assert error.count("\n") == 1
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("table", "key", "value", "shown"),
    [
        ("", "epochs", 2, "unknown option 'epochs'"),
        ("", "answer_token", 2, "did you mean 'answer_tokens'"),
        ("", "output", "elsewhere", "output is an option of the command"),
        ("", "training", 3, "it must be a table"),
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
    prompts: Path,
    tmp_path: Path,
    table: str,
    key: str,
    value: object,
    shown: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    keys: Keys = {table: {key: value}}
    if (table, key) == ("", "training"):
        config = tmp_path / "options.toml"
        config.write_text("training = 3")
        given = ["train", "--config", str(config), "--output", str(tmp_path / "out")]
    else:
        given = arguments(tmp_path / "nowhere", prompts, tmp_path / "out", keys)
    assert main.run(given) == 1
    error = capsys.readouterr().err
    assert shown in error
    assert error.count("\n") == 1
    assert not (tmp_path / "out").exists()


def test_soft_labels_that_are_not_there_are_refused(
    prompts: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """For texts that are only read, and for the target's continuations of given answers."""
    hard: Keys = {"": {"read": ["x.txt"]}, "training": {"soft_share": 0}}
    assert main.run(arguments(tmp_path, prompts, tmp_path / "out", hard)) == 1
    assert "soft_share is 0" in capsys.readouterr().err
    soft: Keys = {"": {"data": "x.jsonl"}, "training": {"soft_share": 0.5}}
    config = options_file(tmp_path / "options.toml", soft)
    assert main.run(["train", "--config", str(config), "-o", str(tmp_path / "out")]) == 1
    assert "soft_share is 0.5" in capsys.readouterr().err


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


def test_options_of_the_command_win_over_those_of_the_file(
    model: Path, prompts: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    steps = []
    for more in ([], ["--epochs", "1"]):
        given = [*arguments(model, prompts, tmp_path / "out"), *more, "--dry-run"]
        assert main.run(given) == 0
        (line,) = (x for x in capsys.readouterr().out.splitlines() if x.startswith("training"))
        steps.append(int(line.split()[-2]))
    assert steps[0] == pytest.approx(2 * steps[1], abs=1)


def test_layers_that_the_target_lacks_are_refused_before_anything_is_written(
    model: Path, prompts: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    output = tmp_path / "out"
    assert main.run(arguments(model, prompts, output, {"drafter": {"context_layers": [1, 7]}})) == 1
    assert "layers 1, 7" in unwrapped(capsys.readouterr().err)
    assert not output.exists()


@pytest.mark.parametrize(
    ("more", "named"),
    [
        (["--answer-tokens", "100000"], "answer_tokens"),
        (["--quantize", "4"], "target"),
        (["--hours", "8"], "--hours"),
    ],
)
def test_a_run_with_other_text_or_hours_is_refused_before_it_writes(
    model: Path,
    prompts: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    more: list[str],
    named: str,
) -> None:
    output = tmp_path / "drafter"
    given = arguments(model, prompts, output)
    assert main.run(given) == 0
    capsys.readouterr()

    def write(*_: object, **__: object) -> None:
        raise AssertionError("it writes")

    monkeypatch.setattr(run_module, "write_corpus", write)
    assert main.run([*given, *more]) == 1
    assert named in unwrapped(capsys.readouterr().err)


def test_files_of_another_run_or_of_none_are_not_written_over(
    model: Path, prompts: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    other, none = tmp_path / "other", tmp_path / "none"
    other.mkdir()
    save_checkpoint(Checkpoint({}, {}, {"target": "sha256:0"}, Progress(1, 0, 1)), other)
    none.mkdir()
    (none / "README.md").write_text("mine")
    for output, named in ((other, "a run with target 'sha256:0'"), (none, "README.md")):
        assert main.run(arguments(model, prompts, output)) == 1
        assert named in unwrapped(capsys.readouterr().err)
    assert not (tmp_path / "cache" / "corpora").exists()


def test_prompts_too_few_to_hold_some_out_are_refused_before_anything_is_written(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    few, output = tmp_path / "few.txt", tmp_path / "out"
    few.write_text("\n".join(f"Question {i}?" for i in range(10)))
    assert main.run(arguments(model, few, output)) == 1
    assert "few.txt holds 10 prompts" in unwrapped(capsys.readouterr().err)
    pairs = [{"prompt": f"Question {i}?", "response": f"The answer is {i}."} for i in range(32)]
    few.write_text("\n".join(map(json.dumps, pairs)))
    config = options_file(tmp_path / "options.toml", {})
    given = ["train", "--model", str(model), "-o", str(output), "--data", str(few)]
    assert main.run([*given, "--config", str(config)]) == 1
    assert "few.txt holds 32 conversations" in unwrapped(capsys.readouterr().err)
    assert not output.exists()


def test_the_smallest_run_that_is_accepted_holds_some_out_and_ends_with_a_drafter(
    model: Path, prompts: Path, tmp_path: Path
) -> None:
    output = tmp_path / "drafter"
    smallest = ["--answer-tokens", "64", "--draft-length", "1", "--epochs", "0.1"]
    assert main.run([*arguments(model, prompts, output), *smallest]) == 0
    assert (output / "model.safetensors").exists()


def test_labels_of_given_answers_are_the_answers_or_the_targets_continuations(
    model: Path, tmp_path: Path
) -> None:
    data = tmp_path / "data.jsonl"
    rows = [{"prompt": f"Say {i}", "response": f"I say {i}, as you wished."} for i in range(80)]
    data.write_text("\n".join(map(json.dumps, rows)))
    steps = []
    for labels in ("data", "target"):
        output = tmp_path / labels
        keys: Keys = {"": {"learn_prompts": False, "answer_tokens": 1000}}
        config = options_file(tmp_path / "options.toml", keys)
        given = ["train", "--config", str(config), "--model", str(model), "-o", str(output)]
        assert main.run([*given, "--data", str(data), "--labels", labels]) == 0
        assert read_config(output).draft_vocab_size == 100
        steps.append(len(steps_logged(output)))
    assert steps[0] == steps[1] > 20, "as many passes over as many positions"


def test_quality_gives_the_steps_of_decoding(
    model: Path, prompts: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    output = tmp_path / "drafter"
    assert main.run(arguments(model, prompts, output)) == 0
    capsys.readouterr()
    twin = shutil.copytree(output, tmp_path / "twin")
    questions = prompts.read_text().splitlines()[:3]
    few = tmp_path / "few.txt"
    few.write_text("\n".join(questions))
    given = ["quality", str(output), str(twin), str(output), "--model", str(model),
             "--questions", str(few), "--beam-width", "2", "--max-tokens", "40"]  # fmt: skip
    assert main.run([*given, "--json"]) == 0
    shown = json.loads(capsys.readouterr().out)
    row, other = shown["drafters"]
    assert [row["name"], other["name"]] == [str(output), str(twin)]
    assert row["tokens_per_step"] == other["tokens_per_step"]
    assert row["draft_seconds"]["2"] > 0 < other["draft_seconds"]["2"]
    drafted = load(model, output)
    steps = tokens = 0
    for line in questions:
        answer = drafted.generate(line, max_tokens=40, beam_width=2, beam_length=4)
        steps += answer.steps
        tokens += len(answer.token_ids) - 1
    # Decoding also counts its last step, which the limit may cut short.
    assert row["tokens_per_step"]["2"] == pytest.approx(tokens / steps, rel=0.1)
    assert main.run(given) == 0
    assert "right at position" in capsys.readouterr().out
    assert main.run(["quality", str(tmp_path / "none")]) != 0
    assert "no drafter at" in capsys.readouterr().err


def test_every_key_of_the_options_file_is_documented() -> None:
    documented = (ROOT / "docs" / "guides" / "training.md").read_text(encoding="utf-8")
    job = make_job({"model": "tiny", "memory": 1, "workers": 1, "quantize": 4}, Path("out"))
    for part in (job, job.writing, job.training, *(form() for form in FORMS)):
        for option in fields(part):
            if option.name not in ("output", "offline"):
                assert f"`{option.name}`" in documented or f"[{option.name}]`" in documented


@pytest.mark.parametrize(
    ("form", "drafter", "title", "parameters", "drafts"),
    [
        pytest.param("medusa", {}, "A set of Medusa heads", 2 * (32 * 32 + 32 + 100 * 32), 2,
                     marks=pytest.mark.exhaustive),
        pytest.param("mlp", {"draft_vocab": None}, "An MLP speculator",
                     2 * (258 * 32 + 32 * 32 + 32), 2, marks=pytest.mark.exhaustive),
        ("eagle", {}, "A decoder layer", 32 * (64 + 3 * 64 + 32 + 3 * 85 + 6 + 100), 5),
    ],
)  # fmt: skip
def test_another_form_is_trained_used_and_compared_by_the_same_commands(
    model: Path,
    prompts: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    form: str,
    drafter: dict[str, object],
    title: str,
    parameters: int,
    drafts: int,
) -> None:
    first, second = tmp_path / "first", tmp_path / "second"
    keys: Keys = {
        "": {"timed_questions": 1},
        "training": {"draft_length": 2},
        "drafter": {"layers": None, "context_layers": None, **drafter},
    }
    given = [*arguments(model, prompts, first, keys), "--form", form]
    further = [*arguments(model, prompts, second, keys), "--form", form]
    assert main.run([*given, "--dry-run"]) == 0
    assert main.run(given) == 0
    assert f"{title} that guesses" in (first / "README.md").read_text()
    capsys.readouterr()
    assert main.run([*further, "--start-from", str(first)]) == 0
    assert sum(losses(second)[:5]) < sum(losses(first)[:5])
    capsys.readouterr()
    few = tmp_path / "few.txt"
    few.write_text("What is one?\nWhat is two?")
    compare = ["quality", str(first), str(second), "--model", str(model), "--questions", str(few)]
    assert main.run([*compare, "--max-tokens", "16", "--beam-length", "6", "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)["drafters"]
    assert [len(row["top1"]) for row in rows] == [drafts, drafts]
    assert rows[0]["parameters"] == parameters
    assert rows[0]["bytes"] == (first / "model.safetensors").stat().st_size
    assert rows[0]["training_seconds"] == read_metrics(first)[-1]["seconds"]
    drafted, plain = load(model, first), load(model, None)
    answers = [m.generate("What is it?", max_tokens=24).token_ids for m in (drafted, plain)]
    assert answers[0] == answers[1]


def test_without_an_output_the_drafter_is_where_auto_looks(
    model: Path, prompts: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    given = arguments(model, prompts, tmp_path / "unused")
    at = given.index("--output")
    del given[at : at + 2]
    assert main.run([*given, "--dry-run"]) == 0
    folder = tmp_path / "cache" / "drafters" / "model"
    assert not folder.exists()
    assert main.run(given) == 0
    (used,) = (x for x in capsys.readouterr().out.splitlines() if x.startswith("use it: "))
    assert used == f"use it: redrafter-mlx chat {model}"
    assert (folder / "model.safetensors").exists()
    assert load(model, "trained", offline=True).drafting == "drafter"


@pytest.mark.parametrize(
    ("model", "name"),
    [
        ("smollm2-135m", "smollm2-135m"),
        ("mlx-community/Qwen3-8B-4bit", "Qwen3-8B-4bit"),
        ("lmsys/vicuna-7b-v1.3@refs/pr/4", "vicuna-7b-v1.3"),
        ("/home/me@work/my model/", "my-model"),
        ("models/a.Q4_0.gguf", "a.Q4_0.gguf"),
        ("..", "model"),
    ],
)
def test_the_default_folder_of_a_drafter_has_its_models_name(
    model: str, name: str, tmp_path: Path
) -> None:
    assert drafter_folder(model) == tmp_path / "cache" / "drafters" / name


def test_a_disk_without_room_for_the_corpus_is_noticed_before_it_is_written(
    model: Path,
    prompts: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    given, corpora = arguments(model, prompts, tmp_path / "out"), tmp_path / "cache" / "corpora"
    real = shutil.disk_usage
    full = SimpleNamespace(free=100_001_000)
    monkeypatch.setattr("redrafter_mlx.runtime.paths.shutil.disk_usage", lambda _: full)
    assert main.run([*given, "--dry-run"]) == 0
    assert "1 kB are free" in capsys.readouterr().out
    assert main.run(given) == 1
    shown = unwrapped(capsys.readouterr().err)
    for what in ("REDRAFTER_CACHE", "--answer-tokens", "cache_bytes"):
        assert what in shown
    assert not [*corpora.rglob("block-*")]
    monkeypatch.setattr("redrafter_mlx.runtime.paths.shutil.disk_usage", real)
    assert main.run(given) == 0
    saved = (tmp_path / "out" / CHECKPOINT).stat().st_size
    shutil.rmtree(tmp_path / "out")
    one, two = (SimpleNamespace(free=100_000_000 + n * saved) for n in (1.5, 2.5))
    monkeypatch.setattr("redrafter_mlx.runtime.paths.shutil.disk_usage", lambda _: one)
    assert main.run(given) == 1, "a new checkpoint is written beside the last one"
    monkeypatch.setattr("redrafter_mlx.runtime.paths.shutil.disk_usage", lambda _: two)
    assert main.run(given) == 0  # a whole corpus needs no more


def test_only_what_is_missing_of_a_corpus_needs_room_on_the_disk(
    model: Path, prompts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Here the states of layers that an earlier drafter did not read; and a copy of a block, as
    file managers make them, is not one."""
    monkeypatch.setattr(sizes, "training_bytes", lambda *_: 0)
    without = {"drafter": {"context_layers": []}}
    assert main.run(arguments(model, prompts, tmp_path / "one", without)) == 0
    (corpus,) = (tmp_path / "cache" / "corpora").iterdir()
    block = next(corpus.glob("block-*.safetensors"))
    shutil.copy(block, block.with_stem(f"{block.stem} copy"))
    before = bytes_below(corpus)
    real = shutil.disk_usage
    room = SimpleNamespace(free=100_000_000 + 300_000)
    monkeypatch.setattr("redrafter_mlx.runtime.paths.shutil.disk_usage", lambda _: room)
    assert main.run(arguments(model, prompts, tmp_path / "two")) == 0
    monkeypatch.setattr("redrafter_mlx.runtime.paths.shutil.disk_usage", real)
    assert 200_000 < bytes_below(corpus) - before < 300_000


class PressedTwice:
    """A run that is interrupted in a step, and again while its state is saved."""

    saved = False

    def fit(self, stop: Callable[[], bool], _: Callable[[], float]) -> Iterator[Step]:
        os.kill(os.getpid(), signal.SIGINT)
        yield Step(1, 9, 0.5, 0.1, 100.0)
        assert stop()
        os.kill(os.getpid(), signal.SIGINT)
        for _ in range(3):
            time.sleep(0)
        self.saved = True


def test_ctrl_c_says_what_happens_and_another_one_waits_for_the_save(
    capfd: pytest.CaptureFixture[str],
) -> None:
    run = PressedTwice()
    assert not fit(run.fit, Console(stderr=True))
    assert run.saved
    assert capfd.readouterr().err.count("stopping after this step and saving") == 1


def test_a_second_run_in_the_same_folder_is_refused_and_writes_nothing(
    model: Path, prompts: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    output = tmp_path / "out"
    output.mkdir()
    with locked(output, ""):
        assert main.run(arguments(model, prompts, output)) == 1
    assert f"another run is training in {output}" in unwrapped(capsys.readouterr().err)
    assert list(output.iterdir()) == []
    with locked(output, ""):
        pass


def test_an_output_that_is_a_link_to_nothing_is_refused_before_anything_is_loaded(
    model: Path, prompts: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "out").symlink_to(tmp_path / "gone")
    assert main.run(arguments(model, prompts, tmp_path / "out")) == 1
    assert "gone, which is not there" in unwrapped(capsys.readouterr().err)


def test_paths_in_an_options_file_may_begin_with_the_home_and_unknown_users_are_names(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    job = make_job({"model": "tiny", "exclude": ["~/q", "~nobody-here/q"]}, tmp_path / "out")
    assert job.exclude == (tmp_path / "q", Path("~nobody-here/q"))
