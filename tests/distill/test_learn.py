"""Learning from kept answers: only a better drafter is used, whatever goes wrong."""

from __future__ import annotations

import errno
import multiprocessing
from collections import Counter
from dataclasses import replace
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest
from chained_target import STEP, V
from learning_samples import chained_target, folder_of, keep_chains, learn_and_die, learn_slowly
from mlx.utils import tree_map
from tiny import byte_model, byte_tokenizer, tiny_source
from waiting import wait_for

from redrafter_mlx.distill.corpus.prompts import user_turns
from redrafter_mlx.distill.corpus.writing import writer
from redrafter_mlx.distill.drafter_forms import FORMS, DrafterForm, RecurrentForm
from redrafter_mlx.distill.forms.registry import recipe_for, recipe_of_folder
from redrafter_mlx.distill.learn import judging
from redrafter_mlx.distill.learn.judging import Quality
from redrafter_mlx.distill.learn.run import LearnOptions, drafter_in_use, learn
from redrafter_mlx.distill.learn.texts import general_texts, interleaved, read, split, up_to
from redrafter_mlx.distill.options import TrainOptions
from redrafter_mlx.distill.training.learner import Learner
from redrafter_mlx.drafting.files.forms import DrafterFolder
from redrafter_mlx.drafting.files.installed import own_shelf
from redrafter_mlx.drafting.names import parse
from redrafter_mlx.errors import BadInputError
from redrafter_mlx.learning.kept_texts import KeptText, TextStore
from redrafter_mlx.learning.versions import history, in_use, undo
from redrafter_mlx.loading.drafter import prepare_drafter
from redrafter_mlx.loading.load import draft_with
from redrafter_mlx.loading.target import LoadedTarget

SPAWN = multiprocessing.get_context("spawn")
STEPS = LearnOptions(steps=40)
STAGES = (
    "writing general texts", "reading held-out texts", "reading answers",
    "judging the drafter in use", "training", "judging what was trained", "bringing it into use",
)  # fmt: skip


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("REDRAFTER_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def loaded() -> LoadedTarget:
    return chained_target()


def weights(folder: Path | None) -> bytes:
    assert folder is not None
    return (folder / "model.safetensors").read_bytes()


def trained(loaded: LoadedTarget) -> Path:
    """Let a first drafter be learned, and more answers be kept."""
    keep_chains(loaded)
    run = learn(loaded, LearnOptions(steps=3))
    assert run is not None
    assert run.version == "0001"
    keep_chains(loaded, V)
    folder = drafter_in_use(loaded)
    assert folder is not None
    return folder


def test_without_a_drafter_a_fresh_head_learns_to_draft(loaded: LoadedTarget) -> None:
    keep_chains(loaded, general=6)
    assert drafter_in_use(loaded) is None
    run = learn(loaded, STEPS)
    assert run is not None
    assert run.version == "0001"
    assert run.own[0] == 1.0
    assert run.own[1] > 3.5
    assert run.general is not None
    assert run.general[1] > 3.5
    version = in_use(folder_of(loaded))
    assert version is not None
    assert drafter_in_use(loaded) == version.folder
    assert not folder_of(loaded).work.exists()


def test_it_goes_on_from_the_drafter_in_use_and_says_if_nothing_is_new(
    loaded: LoadedTarget,
) -> None:
    first = trained(loaded)
    run = learn(loaded, STEPS)
    assert run is not None
    assert 1.0 < run.own[0] < run.own[1]
    second = in_use(folder_of(loaded))
    assert second is not None
    assert (second.name, second.start) == ("0002", "0001")
    assert learn(loaded, STEPS) is None
    assert undo(folder_of(loaded)) is not None
    assert drafter_in_use(loaded) == first
    assert [one.version for one in history(folder_of(loaded))] == ["0001", "0002"]


def test_a_worse_drafter_is_never_used(
    loaded: LoadedTarget, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = trained(loaded)

    def spoil(learner: Learner, *_: object) -> float:
        network = learner.network
        noise = tree_map(lambda a: mx.random.normal(a.shape), network.trainable_parameters())
        network.update(noise)
        return 0.0

    monkeypatch.setattr(Learner, "step", spoil)
    run = learn(loaded, STEPS)
    assert run is not None
    assert run.version is None
    assert run.own[1] < run.own[0]
    assert drafter_in_use(loaded) == first
    assert history(folder_of(loaded))[-1].version is None


def test_weights_that_are_not_finite_are_never_used(
    loaded: LoadedTarget, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = trained(loaded)
    nothing = mx.array(np.nan)

    def diverge(learner: Learner, *_: object) -> float:
        network = learner.network
        network.update(tree_map(lambda a: a * nothing, network.trainable_parameters()))
        return float("nan")

    monkeypatch.setattr(Learner, "step", diverge)
    run = learn(loaded, STEPS)
    assert run is not None
    assert run.version is None
    assert drafter_in_use(loaded) == first


@pytest.mark.parametrize(
    ("after", "better"),
    [
        (Quality(2.1, 2.0), True),
        (Quality(2.1, 1.961), True),
        (Quality(2.1, 1.959), False),
        (Quality(2.0, 2.5), False),
        (Quality(1.9, 2.0), False),
        (Quality(float("nan"), 2.0), False),
        (Quality(2.1, float("nan")), False),
    ],
)
def test_better_is_more_for_the_user_and_at_most_two_percent_less_in_general(
    after: Quality, better: bool
) -> None:
    assert after.is_better_than(Quality(2.0, 2.0)) is better


def test_what_was_forgotten_comes_back_with_a_share_of_the_start(
    loaded: LoadedTarget, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The judge sees general texts suffer at the first share, and not at the second one."""
    trained(loaded)
    general = iter([2.0, 1.0, 2.0])

    def quality(_: judging.Judge, drafter: object) -> Quality:
        del drafter
        seen.append(next(general))
        return Quality(1.0 + len(seen), seen[-1])

    seen: list[float] = []
    monkeypatch.setattr(judging.Judge, "quality", quality)
    run = learn(loaded, STEPS)
    assert run is not None
    assert run.version == "0002"
    assert (run.own, run.general) == ((2.0, 4.0), (2.0, 2.0))


@pytest.mark.parametrize("stage", STAGES)
def test_a_kill_at_any_stage_leaves_the_drafter_and_the_next_run_learns(
    loaded: LoadedTarget, cache: Path, stage: str
) -> None:
    first = trained(loaded)
    before = weights(first)
    child = SPAWN.Process(target=learn_and_die, args=(str(cache), stage))
    child.start()
    child.join()
    assert child.exitcode == -9
    assert drafter_in_use(loaded) == first
    assert weights(first) == before
    texts = len([*TextStore(folder_of(loaded).texts).texts()])
    assert texts == 2 * V
    run = learn(loaded, LearnOptions(steps=3))
    assert run is not None
    assert not folder_of(loaded).work.exists()
    assert not [*folder_of(loaded).drafters.glob(".*")]


def test_a_second_process_that_learns_is_refused_and_the_first_one_ends(
    loaded: LoadedTarget, cache: Path, tmp_path: Path
) -> None:
    keep_chains(loaded)
    begun, let_go = tmp_path / "begun", tmp_path / "let go"
    child = SPAWN.Process(target=learn_slowly, args=(str(cache), str(begun), str(let_go)))
    child.start()
    wait_for(begun.exists)
    with pytest.raises(BadInputError, match="another process learns"):
        learn(loaded, STEPS)
    assert drafter_in_use(loaded) is None
    let_go.touch()
    child.join()
    assert child.exitcode == 0
    assert [run.version for run in history(folder_of(loaded))] == ["0001"]


@pytest.mark.parametrize(
    "failing", ["distill.corpus.shards.save_arrays", "drafting.recurrent.write_drafter",
                "learning.versions.write_private_text"],
)  # fmt: skip
def test_a_full_disk_leaves_the_drafter_and_no_work(
    loaded: LoadedTarget, monkeypatch: pytest.MonkeyPatch, failing: str
) -> None:
    first = trained(loaded)

    def full(*_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device", "/there")

    monkeypatch.setattr(f"redrafter_mlx.{failing}", full)
    with pytest.raises(OSError, match="No space"):
        learn(loaded, STEPS)
    assert drafter_in_use(loaded) == first
    assert not folder_of(loaded).work.exists()
    assert [path.name for path in folder_of(loaded).drafters.iterdir()] == ["0001"]


def test_a_damaged_store_is_learned_from_as_far_as_it_can_be_read(loaded: LoadedTarget) -> None:
    keep_chains(loaded)
    (path,) = folder_of(loaded).texts.iterdir()
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)
    TextStore(path.parent).append(KeptText((1, 2, V), tuple(range(V)), 0.0, 1000.0))
    run = learn(loaded, STEPS)
    assert run is not None
    assert run.answers == V - 1
    for path in folder_of(loaded).texts.iterdir():
        path.write_bytes(b"\0" * 1000)
    with pytest.raises(BadInputError, match="too few"):
        learn(loaded, STEPS)


def test_the_text_of_a_seed_is_the_same_before_and_after(loaded: LoadedTarget) -> None:
    def texts() -> list[list[int]]:
        redrafter = draft_with(prepare_drafter(parse("auto")), loaded, warm_up=False)
        drafted = [
            redrafter.generate([3, 1, 4], max_tokens=60, beam_width=2, beam_length=4, **options)
            for options in ({}, {"temperature": 1.0, "seed": 7}, {"temperature": 3.0, "seed": 8})
        ]
        redrafter.close()
        return [answer.token_ids for answer in drafted]

    before = texts()
    keep_chains(loaded)
    run = learn(loaded, STEPS)
    assert run is not None
    assert run.version == "0001"
    assert texts() == before


@pytest.mark.parametrize("form", [kind() for kind in FORMS])
def test_each_form_that_is_trained_here_learns_further(
    loaded: LoadedTarget, form: DrafterForm
) -> None:
    """From files as they were published or trained; the files keep their form."""
    if hasattr(form, "draft_vocab"):
        form = replace(form, draft_vocab="all")
    source, target = loaded.source, loaded.target
    recipe = recipe_for(form, target, source.name, source.fingerprint, 3)
    target = target.reading(recipe.context_layers)
    keep_chains(loaded)
    texts = [*read(target, [*TextStore(folder_of(loaded).texts).texts()][:3])]
    drafter = recipe.fresh(target, np.ones(V, np.int64), texts, 0)
    recipe.save(recipe.student(drafter, target, TrainOptions(draft_length=3)), own_shelf() / "mine")
    assert drafter_in_use(loaded) == own_shelf() / "mine"
    run = learn(loaded, STEPS)
    assert run is not None
    assert run.own[1] > run.own[0]
    version = in_use(folder_of(loaded))
    assert version is not None
    assert version.start is None
    found = recipe_of_folder(version.folder, loaded.target, "tiny", "sha256:1")
    assert type(found) is type(recipe)


def test_the_users_tokens_take_the_place_of_tokens_that_nobody_used(loaded: LoadedTarget) -> None:
    """A head whose output layer is the target's can draft other tokens than it was made with."""
    start, used = 3, [(3 + STEP * k) % V for k in range(1, 13)]
    store = TextStore(folder_of(loaded).texts)
    for i in range(V):
        store.append(KeptText((i, start), tuple(used), 0.0, float(i + 1)))
    known = [token for token in range(V) if token not in used[1::2]][: len(used) + 4]
    source, target = loaded.source, loaded.target
    form = RecurrentForm(draft_vocab=len(known), context_layers=())
    recipe = recipe_for(form, target, source.name, source.fingerprint, 3)
    counts = np.bincount(known, minlength=V)
    texts = [*read(target, [*store.texts()][:3])]
    student = recipe.student(recipe.fresh(target, counts, texts, 0), target, TrainOptions())
    recipe.save(student, own_shelf() / "mine")
    run = learn(loaded, STEPS)
    assert run is not None
    assert run.own[0] < 2
    assert run.own[1] > 3, "no draft is out of reach"
    version = in_use(folder_of(loaded))
    assert version is not None
    tokens = DrafterFolder(version.folder, source).load(target).vocabulary.tokens
    assert tokens is not None
    now = tokens.tolist()
    assert len(now) == len(known)
    assert {*used} <= {*now} <= {*used, *known}
    gone = {*known} - {*now}
    assert min(gone) > max({*known} - {*used} - gone, default=0), "those with the largest ids"


def test_another_form_is_named_and_the_trained_ones_listed(
    loaded: LoadedTarget, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    keep_chains(loaded)
    drafter = tmp_path / "drafter"
    drafter.mkdir()
    (drafter / "config.json").write_text('{"dflash_config": {}}')
    mx.save_safetensors(
        str(drafter / "model.safetensors"),
        {"fc.weight": mx.zeros((2, 2)), "hidden_norm.weight": mx.zeros(2)},
    )
    monkeypatch.setattr("redrafter_mlx.distill.learn.run.drafter_in_use", lambda _: drafter)
    with pytest.raises(BadInputError, match=r"DFlash drafter.*trained are.*EAGLE-3"):
        learn(loaded, STEPS)


def test_too_few_answers_are_named(loaded: LoadedTarget) -> None:
    with pytest.raises(BadInputError, match="no answers of tiny are kept"):
        learn(loaded, STEPS)
    keep_chains(loaded, count=3)
    with pytest.raises(BadInputError, match="3 answers of tiny are kept, too few"):
        learn(loaded, STEPS)


# What is trained on, and what it is judged with.


def kept(count: int, first: int = 0) -> list[KeptText]:
    return [
        KeptText((i,), tuple(range(i, i + 12)), 0.0, float(i)) for i in range(first, first + count)
    ]


def test_a_prompt_that_was_trained_on_is_never_held_out_later() -> None:
    for count in (4, 10, 50, 300):
        now, later = split(kept(count)), split(kept(count + 200))
        assert not {*now.training} & {*later.held_out}
        assert now.held_out
        assert len(now) == count
    many = split(kept(4000))
    assert 0.1 < len(many.held_out) / len(many) < 0.15
    assert [text.time for text in many.training] == sorted(
        (text.time for text in many.training), reverse=True
    )


def test_the_answers_to_one_prompt_are_on_the_same_side() -> None:
    twice = [replace(text, answer=text.answer[::-1]) for text in kept(300)]
    both = split([*kept(300), *kept(300), *twice])
    assert len(both) == 600
    assert not {t.prompt for t in both.training} & {t.prompt for t in both.held_out}


def test_an_answer_is_cut_where_it_repeats_itself() -> None:
    loop = KeptText((1,), (*range(30), *range(30), *range(30)))
    found = split([loop, KeptText((2,), (1, 2))])
    assert [text.answer for text in found.held_out] == [tuple(range(30))]


def test_any_beginning_has_its_share_of_both() -> None:
    mixed = interleaved(kept(90), kept(30, first=1000))
    assert sorted(text.time for text in mixed) == [*range(90), *range(1000, 1030)]
    for end in (4, 40, 80):
        assert abs(sum(text.time >= 1000 for text in mixed[:end]) - end / 4) <= 1
    assert up_to(kept(9), 25) == kept(9)[:3]
    assert up_to(kept(9), 1) == kept(9)[:1]


def test_steps_are_as_many_as_fit_into_the_time(loaded: LoadedTarget) -> None:
    """By a clock that each step advances by 2 seconds."""
    keep_chains(loaded)
    now = 0.0
    told: list[tuple[int, int]] = []
    honest = Learner.step

    def step(learner: Learner, *args: object) -> float:
        nonlocal now
        now += 2.0
        return honest(learner, *args)  # type: ignore[arg-type]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Learner, "step", step)
        run = learn(
            loaded, LearnOptions(minutes=1.0),
            lambda name, *n: told.append(n) if name == "training" else None, lambda: now,
        )  # fmt: skip
    assert run is not None
    assert 15 <= run.steps <= 26
    assert told[-1] == (run.steps, run.steps), "the schedule was planned for these steps"
    assert now <= 60


def test_general_texts_are_written_once_and_on_subjects_of_all_kinds(
    loaded: LoadedTarget, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By a target with a chat template; without one there are none."""
    folder, told = folder_of(loaded), list[int]()
    assert general_texts(loaded, folder, lambda done, _: told.append(done)) == []
    real = LoadedTarget.of(byte_model(seed=1), byte_tokenizer(), tiny_source())
    drawn = Counter[str]()
    draw = writer.draw_starters

    def counted(count: int, seed: str) -> Counter[str]:
        drawn.update(found := draw(count, seed))
        return found

    monkeypatch.setattr(writer, "draw_starters", counted)
    monkeypatch.setattr(user_turns, "TURN_TOKENS", 400)  # a random model ends no turn soon
    first = general_texts(real, folder, lambda done, _: told.append(done))
    assert len(drawn) > 40
    assert first
    assert told == sorted(told)
    assert told[-1] >= sum(len(text.answer) for text in first)
    drawn.clear()
    assert general_texts(real, folder, lambda *_: None) == first
    assert not drawn
