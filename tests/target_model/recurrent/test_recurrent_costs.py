"""What a recurrent layer costs a step: operations, and reads and writes of its state; no clock."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from functools import partial
from typing import cast

import mlx.core as mx
import pytest
from decoding import PROMPT, read
from hybrids import HYBRIDS, hybrid_model
from mlx_lm.models import bailing_hybrid
from mlx_lm.models.cache import make_prompt_cache
from primitives import launched, touching

from redrafter_mlx.bench.programs.on_paper import steps
from redrafter_mlx.config import PLAIN, BeamShape
from redrafter_mlx.speculation.beams import Beams
from redrafter_mlx.speculation.tree import TokenTree, pack_beam
from redrafter_mlx.target_model.model import Target
from redrafter_mlx.target_model.recurrent.fixed_decay import FixedDecay
from redrafter_mlx.target_model.recurrent.gated_delta import GatedDelta
from redrafter_mlx.target_model.recurrent.interface import AcceptedPath, Recurrence, Tape, TreeNodes
from redrafter_mlx.target_model.recurrent.state_space import StateSpace


def layer_launches(shape: BeamShape) -> Counter[str]:
    """Return what one more recurrent layer adds to a step, the third of a text."""
    counts = []
    for layers in (3, 4):
        changes = {"num_hidden_layers": layers, "full_attention_interval": layers}
        target = Target(hybrid_model("qwen3_5", **changes))
        cache, tree = read(target, [PROMPT]), drafts_of(shape)
        length = mx.array([3])
        for bound in (3, 4):
            mx.eval(cache.buffers, length)
            hidden, _ = target.verify(tree, cache, length, bound)
            path = mx.zeros((1, shape.length), mx.int32)
            length = cache.commit(tree, path, mx.array([0]), length)
        counts.append(launched([hidden, *cache.buffers]))
    return counts[1] - counts[0]


def drafts_of(shape: BeamShape) -> TokenTree:
    """Return the tree of different drafts of a shape."""
    W, L = shape.width, shape.length
    tokens = mx.arange(W * L, dtype=mx.int32).reshape(1, W, L)
    tokens = mx.where(mx.arange(L) == 0, 0, tokens)
    scores = mx.broadcast_to(-mx.arange(L, dtype=mx.float32), tokens.shape)
    return pack_beam(Beams(tokens, scores), shape.nodes)


def test_a_recurrent_layer_of_a_plain_step_launches_no_more_than_the_models_own() -> None:
    def of_model(layers: int) -> int:
        changes = {"num_hidden_layers": layers, "full_attention_interval": layers}
        model = hybrid_model("qwen3_5", **changes)
        cache = make_prompt_cache(model)
        model(mx.array([PROMPT]), cache=cache)
        mx.eval([getattr(layer, "cache", layer.state) for layer in cache])
        hidden = model.model(mx.zeros((1, 1), mx.int32), cache=cache)
        states = [a for layer in cache for a in getattr(layer, "cache", ())]
        return launched([hidden, *states]).total()

    assert layer_launches(PLAIN).total() <= of_model(4) - of_model(3)


_H, _V, _K = 2, 80, 48
GIVEN: dict[str, tuple[Recurrence, Callable[[int], list[object]]]] = {
    "gated delta": (GatedDelta(), lambda n: [
        *of_nodes(n, (_H, _K), (_H, _K), (_H, _V), (_H,), (_H,)), mx.ones(_H), mx.ones(_H)]),
    "vector gate": (GatedDelta(), lambda n: [
        *of_nodes(n, (_H, _K), (_H, _K), (_H, _V), (_H, _K), (_H,)), mx.ones((_H, 1)),
        mx.ones(_K)]),
    "state space": (StateSpace(), lambda n: [
        *of_nodes(n, (_H, _V)), mx.ones(_H), *of_nodes(n, (1, _K), (1, _K)), mx.ones(_H),
        *of_nodes(n, (_H,)), mx.ones(_H)]),
    "fixed decay": (FixedDecay(bailing_hybrid.recurrent_gla), lambda n: [
        *(mx.ones((1, _H, n, size)) for size in (_V, _V, _K)), -mx.ones(_H), 1.0]),
}  # fmt: skip
"""For each recurrence, what its function is given of n nodes, before the state."""


def of_nodes(n: int, *shapes: tuple[int, ...]) -> list[mx.array]:
    return [mx.ones((1, n, *shape)) for shape in shapes]


def outputs(
    recurrence: Recurrence, nodes: TreeNodes, given: list[object], state: mx.array
) -> object:
    (result, _), _ = cast(
        "tuple[tuple[mx.array, None], Tape]", recurrence.on_tree(nodes, *given, state)
    )
    return result


@pytest.mark.parametrize("name", GIVEN)
def test_a_state_is_read_and_written_as_often_for_any_tree(name: str) -> None:
    """Where a state for each node would be read and written once for each."""
    recurrence, given_of = GIVEN[name]
    state = mx.ones((1, _H, _V, _K))
    for shape in (BeamShape(1, 2), BeamShape(1, 8), BeamShape(2, 4), BeamShape(4, 5)):
        tree = drafts_of(shape)
        N = tree.tokens.shape[1]
        nodes = TreeNodes(tree.mask, tree.depths, tree.max_depth, tree.is_chain)
        given = given_of(N)
        accepted = AcceptedPath(mx.zeros((1, shape.length), mx.int32), mx.array([0]))
        _, tape = recurrence.on_tree(nodes, *given, state)
        mx.eval(tape)

        verified = partial(outputs, recurrence, nodes, given)
        assert touching(state.size, verified, state) == (1, 0), shape
        committed = partial(recurrence.commit, tape=tape, accepted=accepted)
        assert touching(state.size, committed, state) == (2, 2), shape


def test_a_recurrent_layer_launches_as_much_for_any_width() -> None:
    narrow, wide = (layer_launches(BeamShape(width, 4)) for width in (2, 4))
    assert narrow.total() == wide.total() <= 60
    chain = layer_launches(BeamShape(1, 4))
    assert chain.total() <= narrow.total()


def test_on_paper_the_bytes_of_states_do_not_depend_on_the_tree() -> None:
    """As a scan's do, which keeps a state for each node."""
    sizes = {"hidden_size": 64, "vocab_size": 128, "max_position_embeddings": 512}
    config = {**HYBRIDS["qwen3_5"], **sizes, "num_attention_heads": 8, "num_key_value_heads": 8,
              "linear_value_head_dim": 16, "linear_key_head_dim": 32, "intermediate_size": 64,
              "rms_norm_eps": 1e-5}  # fmt: skip
    plain, *trees = steps({"model_type": "qwen3_5", "text_config": config}, 100)
    assert plain.states == plain.scan == 2 * 3 * (4 * 16 * 32 * 4)
    assert {tree.states for tree in trees} == {5 * plain.states // 2}
    assert [tree.scan for tree in trees] == [(tree.nodes + 3) * plain.scan // 2 for tree in trees]
    widths = [tree.operations for tree in trees if not tree.is_chain]
    assert max(widths) == min(widths) > plain.operations
