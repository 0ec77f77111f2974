"""The beam shape of the options is the shape that is drafted, packed and verified."""

from __future__ import annotations

from dataclasses import replace

import mlx.nn as nn
import pytest
from simulated import cliff, machine
from tiny import byte_model, byte_tokenizer, plain_tokens, random_drafter

from redrafter_mlx.config import PLAIN, BeamShape, GenerationOptions
from redrafter_mlx.drafting.files.forms import DrafterFolder
from redrafter_mlx.drafting.interface import Bindable
from redrafter_mlx.drafting.recurrent import save_drafter
from redrafter_mlx.drafting.untrained.ngram import Lookup
from redrafter_mlx.engine.engine import Redrafter
from redrafter_mlx.tuning.cost import CostModel, Setup
from redrafter_mlx.tuning.store import Record
from redrafter_mlx.verification import verify

PROMPT = [72, 101, 108]
SHAPES = [BeamShape(W, L) for W in (1, 2, 3, 4) for L in (2, 4, 5)]


@pytest.fixture(scope="module")
def model() -> nn.Module:
    return byte_model(seed=1)


@pytest.fixture(scope="module")
def drafters(model: nn.Module, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Redrafter]:
    """A trained drafter's folder alone, with lookup, and lookup alone."""
    folder = tmp_path_factory.mktemp("drafter")
    save_drafter(random_drafter(vocab_size=258, draft_length=1), folder)
    drafter = DrafterFolder(folder)
    return {
        "drafter": Redrafter(model, byte_tokenizer(), drafter),
        "both": Redrafter(model, byte_tokenizer(), drafter, host_drafters=(Lookup(3),)),
        "lookup": Redrafter(model, byte_tokenizer(), host_drafters=(Lookup(),)),
    }


@pytest.mark.parametrize("shape", SHAPES, ids=lambda s: f"{s.width}x{s.length}")
@pytest.mark.parametrize("name", ["drafter", "both", "lookup"])
def test_every_step_has_the_shape_that_was_asked_for(
    name: str, shape: BeamShape, drafters: dict[str, Redrafter]
) -> None:
    """A drafter's trees are also full: they contain all prefixes that its search kept."""
    responses = drafters[name].stream(
        PROMPT, max_tokens=60, beam_width=shape.width, beam_length=shape.length
    )
    steps = {r.steps: r.step for r in responses if r.steps > 0}.values()
    drafted = [step for step in steps if step.shape != PLAIN]
    assert {step.shape for step in drafted} == {shape}
    if name != "lookup":
        assert len(drafted) == len(steps)
        assert {step.nodes for step in steps} == {shape.nodes}
    if name != "drafter":
        assert any(step.from_host for step in steps)
        longest = max(max(step.depths) for step in steps if step.from_host)
        assert longest == shape.length - 1


@pytest.mark.parametrize("name", ["drafter", "both"])
def test_the_verification_report_verifies_the_shape_that_was_asked_for(
    name: str, drafters: dict[str, Redrafter]
) -> None:
    found = verify(drafters[name], [PROMPT], max_tokens=20, shape=BeamShape(3, 4))
    assert found.nodes == 10
    assert found.exact


def test_a_capacity_that_was_asked_for_is_not_exceeded(drafters: dict[str, Redrafter]) -> None:
    answer = drafters["both"].stream(
        PROMPT, max_tokens=60, beam_width=3, beam_length=5, max_nodes=6
    )
    assert {r.step.nodes for r in answer if r.steps > 0} == {6}


CHEAP, DEAR = machine(cliff(8)), machine(lambda rows: 20.0 * rows)


def on_machine(
    known: CostModel, monkeypatch: pytest.MonkeyPatch, drafter: Bindable, lookup: bool = False
) -> Redrafter:
    """Return a model with a drafter, on a machine with the measurements `known`."""

    def saved(setup: Setup, values: str) -> Record:
        del values
        return Record(replace(known, setup=setup))

    monkeypatch.setattr("redrafter_mlx.tuning.tuner.saved_record", saved)
    return Redrafter(
        byte_model(seed=1), byte_tokenizer(), drafter, host_drafters=(Lookup(3),) if lookup else ()
    )


@pytest.fixture
def folder(tmp_path_factory: pytest.TempPathFactory) -> DrafterFolder:
    path = tmp_path_factory.mktemp("drafter")
    save_drafter(random_drafter(vocab_size=258, draft_length=3), path)
    return DrafterFolder(path)


def test_what_a_shape_leaves_open_is_what_promises_most_on_this_machine(
    folder: DrafterFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same drafter on two machines, with one part of the shape given."""
    chosen = {}
    for name, known in (("cheap", CHEAP), ("dear", DEAR)):
        redrafter = on_machine(known, monkeypatch, folder)
        for asked in ({"beam_width": 2}, {"beam_length": 4}, {"max_nodes": 5}):
            (shape,) = set(redrafter.generate(PROMPT, max_tokens=20, **asked).shapes)  # type: ignore[arg-type]
            options = GenerationOptions(**asked)  # type: ignore[arg-type]
            assert (options.beam_width or shape.width) == shape.width
            assert (options.beam_length or shape.length) == shape.length
            assert shape.nodes <= (options.max_nodes or shape.nodes)
            assert shape.length <= 4, "no further than the drafter was trained for"
            chosen[name, next(iter(asked))] = shape
    assert chosen["cheap", "beam_width"].length > chosen["dear", "beam_width"].length == 2
    assert chosen["dear", "beam_length"] == BeamShape(1, 4)


@pytest.mark.parametrize("accept", ["sample", "rejection", "typical"])
@pytest.mark.parametrize("lookup", [False, True])
def test_a_seed_gives_the_same_text_whatever_the_machine_measures(
    accept: str, lookup: bool, folder: DrafterFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Costs determine shapes only without a seed, or if draws depend on positions alone."""
    texts = set()
    for known in (CHEAP, DEAR, machine(lambda _: 20.0)):
        redrafter = on_machine(known, monkeypatch, folder, lookup)
        for _ in range(2):
            answer = redrafter.generate(
                PROMPT, max_tokens=60, temperature=0.8, accept=accept, seed=5
            )
            texts.add(tuple(answer.token_ids))
    assert len(texts) == 1


def test_a_fixed_shape_repeats_a_seeds_text_in_half_precision(folder: DrafterFolder) -> None:
    """Calls with the same number of rows round near-ties in the same way."""
    import mlx.core as mx

    model = byte_model(seed=1)
    model.set_dtype(mx.float16)
    redrafter = Redrafter(model, byte_tokenizer(), folder)
    for accept in ("sample", "rejection", "typical"):
        texts = {
            tuple(
                redrafter.generate(
                    PROMPT, max_tokens=60, temperature=0.8, accept=accept, seed=5,
                    beam_width=3, beam_length=4,
                ).token_ids
            )
            for _ in range(3)
        }  # fmt: skip
        assert len(texts) == 1


def test_drafts_do_not_change_greedy_tokens(model: nn.Module, folder: DrafterFolder) -> None:
    """The guarantee of `greedy` in float32: no seed, shape or drafter changes a token."""
    redrafter = Redrafter(model, byte_tokenizer(), folder, host_drafters=(Lookup(),))
    want = plain_tokens(model, PROMPT, 60)
    for shape in SHAPES[::4]:
        asked = {"beam_width": shape.width, "beam_length": shape.length}
        answer = redrafter.generate(PROMPT, max_tokens=60, seed=shape.width, **asked)
        assert answer.token_ids == want
