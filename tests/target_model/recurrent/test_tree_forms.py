"""The tree form of each recurrence, against mlx-lm's own function at one node after the other."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from types import ModuleType

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from mlx_lm.models import bailing_hybrid, bailing_moe_linear
from mlx_lm.models.gated_delta import gated_delta_update

from redrafter_mlx.target_model.recurrent.convolution import Convolution
from redrafter_mlx.target_model.recurrent.fixed_decay import FixedDecay
from redrafter_mlx.target_model.recurrent.gated_delta import GatedDelta
from redrafter_mlx.target_model.recurrent.interface import AcceptedPath, Recurrence, TreeNodes
from redrafter_mlx.target_model.recurrent.state_space import StateSpace

LIMITS = (0.001, 10.0)
"""Of the steps of the state-space recurrence."""

Parents = list[list[int]]


def random_parents(rng: random.Random, batch: int, nodes: int, chain: bool) -> Parents:
    rows = []
    for _ in range(batch):
        rows.append([-1, *(i - 1 if chain else rng.randrange(i) for i in range(1, nodes))])
    return rows


def lineage(parents: Sequence[int], node: int) -> list[int]:
    """Return the path from the root to a node."""
    return [*(lineage(parents, parents[node]) if parents[node] >= 0 else []), node]


def nodes_of(parents: Parents, chain: bool = False) -> TreeNodes:
    N = len(parents[0])
    paths = [[lineage(row, i) for i in range(N)] for row in parents]
    mask = [[[j in path for j in range(N)] for path in row] for row in paths]
    depths = [[len(path) - 1 for path in row] for row in paths]
    return TreeNodes(mx.array(mask), mx.array(depths), max(map(max, depths)), chain)


def accepted_at(parents: Parents, node: int) -> AcceptedPath:
    """Return the path to a node, as acceptance gives it: the same node in all rows."""
    paths = [lineage(row, node) for row in parents]
    L = len(parents[0])
    padded = [path + [0] * (L - len(path)) for path in paths]
    return AcceptedPath(mx.array(padded), mx.array([len(path) - 1 for path in paths]))


Step = Callable[[int, int, mx.array], tuple[mx.array, mx.array]]
"""One call of mlx-lm's function: row, node, the parent's state -> the node's output and state."""


def assert_equals_steps(
    recurrence: Recurrence,
    parents: Parents,
    state: mx.array,
    given: tuple[object, ...],
    named: dict[str, object],
    step: Step,
    tolerance: float = 1e-5,
    axis: int = 0,
) -> None:
    """Compare the outputs of all nodes, and the state committed at each of them.

    axis: of the nodes in a row's outputs
    """
    chain = all(parent == i - 1 for row in parents for i, parent in enumerate(row))
    result, tape = recurrence.on_tree(nodes_of(parents, chain), *given, **named)
    outputs = result[0] if isinstance(result, tuple) else result
    for b, row in enumerate(parents):
        states: list[mx.array] = []
        for i, parent in enumerate(row):
            want, after = step(b, i, state[b : b + 1] if parent < 0 else states[parent])
            states.append(after)
            close(mx.take(outputs[b], i, axis), want, tolerance)
    for i in range(len(parents[0])):
        committed = recurrence.commit(state, tape, accepted_at(parents, i))
        assert committed.dtype == state.dtype
        for b, row in enumerate(parents):
            after = state[b : b + 1]
            for node in lineage(row, i):
                after = step(b, node, after)[1]
            close(committed[b], after, tolerance)


def close(got: mx.array, want: mx.array, tolerance: float) -> None:
    a, b = (np.array(x.astype(mx.float32)).reshape(-1) for x in (got, want))
    assert np.abs(a - b).max() <= tolerance * max(np.abs(b).max(), 1e-3)


@pytest.mark.parametrize("chain", [False, True])
@pytest.mark.parametrize(
    ("vector", "options"),
    [(False, {}), (False, {"allow_neg_eigval": True}), (True, {}), (True, {"lower_bound": -5.0})],
)
def test_gated_delta_rule(vector: bool, options: dict[str, object], chain: bool) -> None:
    rng = random.Random(3)
    for seed, (batch, N) in enumerate([(1, 1), (1, 7), (2, 9)]):
        parents = random_parents(rng, batch, N, chain)
        mx.random.seed(seed)
        Hk, Hv, Dk, Dv = (4, 4, 8, 6) if vector else (2, 4, 8, 6)
        q, k = mx.random.normal((2, batch, N, Hk, Dk))
        k = k / mx.linalg.norm(k, axis=-1, keepdims=True)
        v, b = mx.random.normal((batch, N, Hv, Dv)), mx.random.normal((batch, N, Hv))
        a = mx.random.normal((batch, N, Hv, Dk) if vector else (batch, N, Hv))
        A_log, dt_bias = mx.random.normal((Hv, 1) if vector else (Hv,)), mx.zeros(a.shape[2:])
        state = mx.random.normal((batch, Hv, Dv, Dk))

        def step(
            row: int, i: int, before: mx.array, arrays: tuple[mx.array, ...] = (q, k, v, a, b),
            rest: tuple[mx.array, ...] = (A_log, dt_bias),
        ) -> tuple[mx.array, mx.array]:  # fmt: skip
            one = [x[row : row + 1, i : i + 1] for x in arrays]
            out, after = gated_delta_update(*one, *rest, before, **options)
            return out, after

        given = (q, k, v, a, b, A_log, dt_bias, state)
        assert_equals_steps(GatedDelta(), parents, state, given, options, step)


@pytest.mark.parametrize("vector", [False, True])
def test_prompts_of_the_gated_delta_rule_are_read_as_by_mlx_lm(vector: bool) -> None:
    """On a CPU as chains of nodes, the last of which may be short."""
    mx.random.seed(2)
    q, k = mx.random.normal((2, 2, 70, 4, 8))
    k = k / mx.linalg.norm(k, axis=-1, keepdims=True)
    v, b = mx.random.normal((2, 70, 4, 6)), mx.random.normal((2, 70, 4))
    a = mx.random.normal((2, 70, 4, 8) if vector else (2, 70, 4))
    A_log, dt_bias = mx.random.normal((4, 1) if vector else (4,)), mx.zeros(a.shape[2:])
    want = gated_delta_update(q, k, v, a, b, A_log, dt_bias)
    for got, expected in zip(
        GatedDelta().function(q, k, v, a, b, A_log, dt_bias), want, strict=True
    ):
        close(got, expected, 1e-5)


def test_gated_delta_rule_of_equal_keys_does_not_lose_its_digits() -> None:
    """The powers of their products cancel: the inverse by repeated squares would be wrong."""
    N = 32
    k = mx.broadcast_to(mx.array([1.0, 0, 0, 0]), (1, N, 1, 4))
    v = mx.random.normal((1, N, 1, 4), key=mx.random.key(0))
    a, b = mx.full((1, N, 1), -20.0), mx.full((1, N, 1), 3.0)
    state, A_log, dt_bias = mx.zeros((1, 1, 4, 4)), mx.zeros((1,)), mx.zeros((1,))

    def step(row: int, i: int, before: mx.array) -> tuple[mx.array, mx.array]:
        del row
        one = [x[:, i : i + 1] for x in (k, k, v, a, b)]
        out, after = gated_delta_update(*one, A_log, dt_bias, before)
        return out, after

    parents = random_parents(random.Random(0), 1, N, chain=True)
    given = (k, k, v, a, b, A_log, dt_bias, state)
    assert_equals_steps(GatedDelta(), parents, state, given, {}, step)


@pytest.mark.parametrize("chain", [False, True])
@pytest.mark.parametrize("groups", [1, 2])
def test_state_space(groups: int, chain: bool) -> None:
    rng = random.Random(4)
    for seed, (batch, N) in enumerate([(1, 1), (1, 7), (2, 9)]):
        parents = random_parents(rng, batch, N, chain)
        mx.random.seed(seed)
        H, P, S = 4, 5, 6
        x, dt = mx.random.normal((batch, N, H, P)), mx.random.normal((batch, N, H))
        B, C = mx.random.normal((2, batch, N, groups, S))
        A_log, D, dt_bias = mx.random.normal((3, H))
        state = mx.random.normal((batch, H, P, S))

        def step(
            row: int, i: int, before: mx.array, arrays: tuple[mx.array, ...] = (x, B, C, dt),
            rest: tuple[mx.array, ...] = (A_log, D, dt_bias),
        ) -> tuple[mx.array, mx.array]:  # fmt: skip
            x, B, C, dt = [a[row : row + 1, i : i + 1] for a in arrays]
            A_log, D, dt_bias = rest
            out, after = StateSpace.function(x, A_log, B, C, D, dt, dt_bias, before, LIMITS)
            return out, after

        given = (x, A_log, B, C, D, dt, dt_bias, state, LIMITS)
        assert_equals_steps(StateSpace(), parents, state, given, {}, step)


@pytest.mark.parametrize("chain", [False, True])
@pytest.mark.parametrize("module", [bailing_hybrid, bailing_moe_linear])
def test_fixed_decay(module: ModuleType, chain: bool) -> None:
    rng = random.Random(5)
    for seed, (batch, N) in enumerate([(1, 1), (1, 7), (2, 9)]):
        parents = random_parents(rng, batch, N, chain)
        mx.random.seed(seed)
        q, k = mx.random.normal((2, batch, 3, N, 8))
        v, g = mx.random.normal((batch, 3, N, 6)), -mx.abs(mx.random.normal((3,)))
        state = mx.random.normal((batch, 3, 8, 6))

        def step(
            row: int, i: int, before: mx.array, arrays: tuple[mx.array, ...] = (q, k, v),
            g: mx.array = g,
        ) -> tuple[mx.array, mx.array]:  # fmt: skip
            one = [a[row : row + 1, :, i : i + 1] for a in arrays]
            out, after = module.recurrent_gla(*one, g, scale=0.5, h=before)
            return out, after

        recurrence, named = FixedDecay(module.recurrent_gla), {"scale": 0.5, "h": state}
        assert_equals_steps(recurrence, parents, state, (q, k, v, g), named, step, axis=1)


@pytest.mark.parametrize("chain", [False, True])
@pytest.mark.parametrize("size", [2, 4])
def test_convolution(size: int, chain: bool) -> None:
    mx.random.seed(1)
    layer = nn.Conv1d(6, 6, size, groups=6)
    for batch, N in ((1, 1), (1, 7), (2, 9)):
        parents = random_parents(random.Random(N), batch, N, chain)
        state, rows = mx.random.normal((batch, size - 1, 6)), mx.random.normal((batch, N, 6))

        def step(
            row: int, i: int, before: mx.array, rows: mx.array = rows
        ) -> tuple[mx.array, mx.array]:
            window = mx.concatenate([before, rows[row : row + 1, i : i + 1]], axis=1)
            return layer(window), window[:, 1:]

        given = (layer, mx.concatenate([state, rows], axis=1))
        assert_equals_steps(Convolution(), parents, state, given, {}, step)


def test_the_windows_of_nodes_and_of_paths() -> None:
    """The drawing in `TreeNodes.windows`."""
    parents = [[-1, 0, 0]]
    assert nodes_of(parents).windows(3).tolist() == [[[0, 1, 2], [1, 2, 3], [1, 2, 4]]]
    assert accepted_at(parents, 0).window(3).tolist() == [[1, 2]]
    assert accepted_at(parents, 2).window(3).tolist() == [[2, 4]]
