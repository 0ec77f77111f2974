"""`train --recipe`: the settings that a paper fixes, and the first state of a recurrent head."""

from __future__ import annotations

from pathlib import Path

import mlx.core as mx
import pytest
from command_line import CommandLine
from tiny import HIDDEN, random_drafter, random_model

from redrafter_mlx.config import BeamShape
from redrafter_mlx.distill.drafter_forms import SpeculatorForm
from redrafter_mlx.distill.options import TrainOptions
from redrafter_mlx.distill.options_file import make_job, read_options, to_toml, with_recipe
from redrafter_mlx.distill.training.learner import drafter_optimizer
from redrafter_mlx.drafting.files.forms import DrafterFolder
from redrafter_mlx.drafting.recurrent import save_drafter
from redrafter_mlx.drafting.recurrent_config import read_config
from redrafter_mlx.errors import BadInputError
from redrafter_mlx.speculation.beam_search import beam_search
from redrafter_mlx.target_model.model import Target


def test_a_run_of_a_recipe_repeats_from_its_own_options_file(tmp_path: Path) -> None:
    job = make_job(with_recipe("paper", {"model": "tiny", "answer_tokens": 5000}, {}), tmp_path)
    file = tmp_path / "train.toml"
    file.write_text(to_toml(job))
    assert make_job(with_recipe("paper", read_options(file), {}), tmp_path) == job


def test_what_a_recipe_leaves_open_can_be_chosen(tmp_path: Path) -> None:
    given = {"model": "tiny", "drafter": {"inner_dim": 64}, "training": {"epochs": 3.0}}
    job = make_job(with_recipe("speculators", given, {}), tmp_path)
    assert job.drafter == SpeculatorForm(inner_dim=64)
    assert (job.training.epochs, job.training.depth_decay) == (3.0, 1.0)


def test_the_second_stage_of_a_speculator_runs_at_a_tenth_of_the_firsts_rate(
    tmp_path: Path,
) -> None:
    first = make_job(with_recipe("speculators", {"model": "tiny"}, {}), tmp_path / "stage-1")
    given = {"model": "tiny", "start_from": str(tmp_path / "stage-1")}
    second = make_job(with_recipe("speculators", given, {}), tmp_path / "stage-2")
    assert (first.training.learning_rate, second.training.learning_rate) == (1e-3, 1e-4)
    of_paper = make_job(with_recipe("paper", given, {}), tmp_path / "stage-2")
    assert of_paper.training.learning_rate == 1e-3
    own = {**given, "training": {"learning_rate": 1e-3}}
    with pytest.raises(BadInputError, match=r"training\.learning_rate 0\.0001"):
        with_recipe("speculators", own, {})


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["--recipe", "paper", "--layers", "3"], ["--layers is 3", "drafter.layers 2"]),
        (["--recipe", "paper", "--form", "medusa"], ["--form", "drafter.form"]),
        (["--recipe", "paper", "--labels", "data", "--data", "x"], ["--labels", "'target'"]),
        (["--recipe", "speculators", "--form", "eagle"], ["--form", "'mlp'"]),
        (["--recipe", "paper", "--hours", "8"], ["--hours", "--recipe"]),
        (["--recipe", "papers"], ["papers", "speculators"]),
    ],
)
def test_setting_what_a_recipe_fixes_is_refused_and_names_both(
    arguments: list[str], named: list[str], cli: CommandLine, tmp_path: Path
) -> None:
    err = cli.error("train", "-o", tmp_path / "out", "--dry-run", *arguments)
    assert all(name in err for name in named)


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("[drafter]\nexit_dim = 64\n", "drafter.exit_dim in {file}"),
        ("training = 3\n", "training is 3; it must be a table"),
    ],
)
def test_what_a_recipe_cannot_take_from_the_options_file_is_named(
    cli: CommandLine, tmp_path: Path, text: str, named: str
) -> None:
    file = tmp_path / "own.toml"
    file.write_text(text)
    line = ["train", "-o", str(tmp_path / "out"), "--recipe", "paper", "--config", str(file)]
    assert named.format(file=file) in cli.error(*line)


def test_the_first_step_of_pytorchs_adamw_is_the_learning_rate_in_every_entry() -> None:
    """With bias correction, m / sqrt(v) is the gradient's sign; without it, three times as much."""
    steps = {}
    for name in ("adamw_torch", "adamw"):
        options = TrainOptions(
            optimizer=name,  # type: ignore[arg-type]
            learning_rate=0.5, warmup_share=0.0, weight_decay=0.0,
        )  # fmt: skip
        optimizer = drafter_optimizer(options, lambda _: True)
        moved = optimizer.apply_gradients({"w": mx.array([[3.0, -0.1]])}, {"w": mx.zeros((1, 2))})
        rate = optimizer.learning_rate.item()
        steps[name] = (moved["w"] / rate)[0].tolist()
    assert steps["adamw_torch"] == pytest.approx([-1.0, 1.0], abs=1e-4)
    assert abs(steps["adamw"][0]) != pytest.approx(1.0, abs=0.1)


@pytest.mark.parametrize("first_state", ["recurrent", "embedding"])
def test_the_first_draft_follows_from_the_chosen_first_state(
    first_state: str, tmp_path: Path
) -> None:
    """A folder stores the choice; the paper's files have no such key and use its code's choice."""
    target = Target(random_model())
    network = random_drafter(first_state=first_state)
    save_drafter(network, tmp_path)
    assert ("first_state" in (tmp_path / "config.json").read_text()) == (first_state != "recurrent")
    assert read_config(tmp_path).first_state == first_state
    bound = DrafterFolder(tmp_path).load(target)
    context, root = mx.ones((1, HIDDEN)), mx.array([3])
    e = target.embedding(root[:, None])
    silu = bound.advance(mx.zeros((1, 1, HIDDEN)), root[:, None])
    state = e if first_state == "embedding" else silu
    want = mx.argmax(bound.logits(context[:, None], state)).item()
    beams = beam_search(bound.levels_of(context, root, 2), root, BeamShape(1, 3))
    assert beams.tokens[0, 0, 1].item() == want
    second = bound.advance(state, mx.array([[want]]))
    assert beams.tokens[0, 0, 2].item() == mx.argmax(bound.logits(context[:, None], second)).item()


def test_a_first_state_that_does_not_exist_is_refused() -> None:
    with pytest.raises(BadInputError, match="first_state"):
        random_drafter(first_state="zero")
