"""Number of operations that a step launches: their cost on a GPU, without a clock."""

from __future__ import annotations

from collections import Counter
from itertools import pairwise

import mlx.core as mx
import pytest
from mlx_lm.models.cache import make_prompt_cache
from primitives import launched
from tiny import random_drafter, random_model

from redrafter_mlx.bench.programs.on_paper import operations
from redrafter_mlx.config import PLAIN, BeamShape, SamplingParams
from redrafter_mlx.cpu import fast_functions
from redrafter_mlx.decoding.sequence import Drafted, Proposal
from redrafter_mlx.decoding.state import Drafts, revised
from redrafter_mlx.decoding.step import Decoder
from redrafter_mlx.drafting.untrained.continuation import Continuation
from redrafter_mlx.runtime.device import backend
from redrafter_mlx.speculation.beams import Beams
from redrafter_mlx.speculation.sampling import sequence_keys
from redrafter_mlx.speculation.tree import pack_beam
from redrafter_mlx.target_model.cache.slots import concatenate_padded
from redrafter_mlx.target_model.model import Target

_PROMPT = [1, 2, 3, 4, 5]

GREEDY = SamplingParams()


def third_step(
    shape: BeamShape, layers: int, params: SamplingParams = GREEDY
) -> tuple[list[mx.array], list[mx.array]]:
    """Return what a step computes: what the host waits for, and the next drafts.

    It also moves the path of the tree before to its slots.
    """
    target = Target(random_model(num_hidden_layers=layers))
    drafter = None if shape == PLAIN else random_drafter().bind(target)
    decoder = Decoder(target, drafter, shape, params)
    cache = decoder.new_cache()
    state, output = decoder.start(cache, 0, [_PROMPT], sequence_keys(0))
    for step in range(3):
        mx.eval(output.values, state.length, *state.drafts.tree.arrays, *cache.target.buffers)
        state, output = decoder.step(state, len(_PROMPT) - 1 + step * shape.length)
    return [output.values, state.length, *cache.target.buffers], list(state.drafts.tree.arrays)


def step_launches(
    shape: BeamShape, layers: int, params: SamplingParams = GREEDY
) -> tuple[Counter[str], Counter[str]]:
    """Return the operations of `third_step`'s two parts."""
    verified, drafts = third_step(shape, layers, params)
    before = launched(verified)
    return before, launched([*verified, *drafts]) - before


def step_nodes(shape: BeamShape, layers: int) -> Counter[str]:
    """Return all primitives of a verification, with those that compute nothing."""
    return Counter(operations(third_step(shape, layers)[0]))


def step_operations(shape: BeamShape, layers: int) -> tuple[int, int]:
    verified, drafts = step_launches(shape, layers)
    return verified.total(), drafts.total()


def model_operations(tokens: int, layers: int) -> int:
    """Count the operations of the model's own call after the same prompt."""
    model = random_model(num_hidden_layers=layers)
    cache = make_prompt_cache(model)
    mx.eval(model(mx.array([_PROMPT]), cache=cache))
    logits = model(mx.zeros((1, tokens), mx.int32), cache=cache)
    return launched([mx.argmax(logits[:, -1], axis=-1)]).total()


@pytest.mark.skipif(backend() == "cuda", reason="its attention kernels take no mask of an array")
@pytest.mark.parametrize("shape", [PLAIN, BeamShape(1, 4), BeamShape(4, 4)])
def test_a_layer_of_a_verification_launches_no_more_than_the_models_own(shape: BeamShape) -> None:
    ours = step_operations(shape, 3)[0] - step_operations(shape, 2)[0]
    assert 0 < ours <= model_operations(shape.nodes, 3) - model_operations(shape.nodes, 2)


@pytest.mark.parametrize("shape", [PLAIN, BeamShape(1, 4), BeamShape(4, 4)])
def test_a_layer_transposes_and_folds_nothing_for_its_linear_layers(shape: BeamShape) -> None:
    """Five are transposed in attention; two are folded by rotations, and one there, on a CPU."""
    layer = step_nodes(shape, 3) - step_nodes(shape, 2)
    assert layer["Transpose"] <= 5
    assert max(layer["Flatten"], layer["Unflatten"]) <= 3


@pytest.mark.parametrize(
    ("shape", "writes"), [(PLAIN, 2), (BeamShape(1, 4), 2), (BeamShape(2, 4), 4)]
)
def test_a_layers_cache_is_written_by_one_operation_for_each_run_of_slots(
    shape: BeamShape, writes: int
) -> None:
    """Keys and values: the new nodes, and after a tree the path that was accepted."""
    layer = step_launches(shape, 3)[0] - step_launches(shape, 2)[0]
    assert layer["ScatterAxis"] == writes
    assert not {"DynamicSliceUpdate", "GatherAxis", "Gather", "Copy"} & set(layer)


@pytest.mark.parametrize(("shape", "selects"), [(PLAIN, 0), (BeamShape(1, 4), 2)])
def test_a_layer_keeps_a_trees_keys_and_values_finite_by_one_operation_each(
    shape: BeamShape, selects: int
) -> None:
    """In plain decoding by none."""
    layer = step_launches(shape, 3)[0] - step_launches(shape, 2)[0]
    kept = [name for name in layer if "Subtract" in name and name.endswith("BitwiseOrSelect")]
    assert sum(layer[name] for name in kept) == selects


@pytest.mark.parametrize("shape", [PLAIN, BeamShape(1, 4), BeamShape(4, 4)])
def test_a_step_makes_no_constants(shape: BeamShape) -> None:
    verified, drafts = step_launches(shape, 2)
    assert verified["Arange"] <= 2  # in MLX's rotary embedding for a CPU
    assert not drafts["Arange"]


@pytest.mark.parametrize(
    ("shape", "most"), [(PLAIN, 28), (BeamShape(1, 4), 39), (BeamShape(2, 4), 71)]
)
def test_what_a_verification_launches_beside_its_layers_is_little(
    shape: BeamShape, most: int
) -> None:
    """Embedding, positions, mask, norm, head, acceptance and the order of the cache."""
    one, two = (step_operations(shape, layers)[0] for layers in (1, 2))
    assert one - (two - one) <= most


def launched_for_a_copy(batch: int) -> int:
    """Count the operations that put a copy into the first row's tree of a batch."""
    tokens = mx.random.randint(0, 90, (batch, 3, 3), key=mx.random.key(0))
    beams = Beams(mx.where(mx.arange(3) == 0, tokens[:, :1, :1], tokens), -mx.ones((batch, 3, 3)))
    drafts = Drafts(pack_beam(beams, 6), (Drafted(BeamShape(3, 3, 6)),) * batch, beams=beams)
    mx.eval(drafts.tree.arrays, beams.tokens, beams.log_probs)
    plan = Proposal(BeamShape(1, 8), [Continuation(tuple(range(7)), (-0.1,) * 7, "short match")])
    copied = revised(drafts, [plan, *[None] * (batch - 1)], [1] * batch)
    return launched([*copied.tree.arrays]).total()


def test_a_copy_in_one_row_costs_as_much_in_every_batch() -> None:
    assert launched_for_a_copy(2) == launched_for_a_copy(4) == launched_for_a_copy(8) > 0


def test_beams_and_nodes_launch_nothing_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    # On a CPU, MLX's own attention takes over where there are few scores.
    monkeypatch.setattr(fast_functions, "FEW_SCORES", 0)
    assert step_operations(BeamShape(2, 4), 2)[0] == step_operations(BeamShape(4, 4), 2)[0]
    two, four = (step_operations(BeamShape(width, 4), 2)[1] for width in (2, 4))
    assert four <= two + 12  # the best of more beams take more passes over the logits


@pytest.mark.parametrize(("width", "level"), [(1, 18), (2, 32)])
def test_a_level_of_drafts_launches_as_much_as_any_other(width: int, level: int) -> None:
    counts = [step_operations(BeamShape(width, length), 2)[1] for length in (3, 4, 5, 6)]
    rises = {after - before for before, after in pairwise(counts)}
    assert len(rises) == 1
    assert rises.pop() <= level


@pytest.mark.parametrize("shape", [BeamShape(1, 4), BeamShape(2, 4)], ids=str)
def test_a_sampled_step_draws_its_noise_once_while_it_drafts(shape: BeamShape) -> None:
    """Verification adds the noise to the logits, and the drafter to its levels."""
    verified, drafts = step_launches(shape, 2, SamplingParams(0.8))
    assert verified["RandomBits"] == 0
    assert drafts["RandomBits"] == 1
    greedy = step_launches(shape, 2)
    assert verified.total() <= greedy[0].total() + 5
    assert drafts.total() <= greedy[1].total() + 24


def test_joining_caches_of_one_size_copies_each_buffer_once() -> None:
    """MLX would copy them again to pad them by nothing."""
    equal, longer = mx.zeros((2, 1, 8, 4)), mx.zeros((1, 1, 16, 4))
    assert launched([concatenate_padded([equal, equal[:1] + 1])])["Pad"] == 0
    assert launched([concatenate_padded([equal, longer])])["Pad"] == 1
