"""Operations and bytes of a hybrid model's step, from its configuration: no weights, no clock.

`python -m redrafter_mlx.bench.programs.on_paper config.json --context 8192` prints a table: a plain
step, and chains and trees of 4, 8 and 16 nodes, each with the commit of the tree before. mlx-lm's
model is built in 4 bits with arrays that take no memory; its compiled call is counted, not run.

Operations are those of MLX's graph on this machine: a CPU's has several for a norm or an attention,
where a GPU has one, and in a plain step for a recurrence, where Metal has one kernel.
"""

from __future__ import annotations

import argparse
import io
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple, cast

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten, tree_map
from mlx_lm.utils import _get_classes

from redrafter_mlx.config import BeamShape
from redrafter_mlx.errors import RedrafterError
from redrafter_mlx.runtime.files.json_file import read_object
from redrafter_mlx.speculation.beams import Beams
from redrafter_mlx.speculation.tree import TokenTree, pack_beam
from redrafter_mlx.target_model.cache.kv_cache import TreeCache
from redrafter_mlx.target_model.model import Target

SHAPES = (BeamShape(1, 1), BeamShape(1, 4), BeamShape(2, 4, 4), BeamShape(1, 8),
          BeamShape(3, 4, 8), BeamShape(1, 16), BeamShape(5, 4, 16))  # fmt: skip
"""Chains, and trees of four levels, of 1, 4, 8 and 16 nodes."""

_TREE = (3, 2)
"""Reads and writes of a state: the tree's outputs read it, the commit reads and writes it twice."""

VIEWS = {
    *("AsStrided", "Broadcast", "BroadcastAxes", "ExpandDims", "Flatten", "Reshape", "Slice"),
    *("Split", "Squeeze", "StopGradient", "Transpose", "Unflatten", "CustomTransforms"),
}
"""Primitives that compute nothing."""


class Step(NamedTuple):
    """What one step moves, in bytes."""

    nodes: int
    is_chain: bool
    operations: int
    weights: int  # read, of experts those that rows are expected to read
    keys: int  # keys and values read
    states: int  # read and written
    tapes: int  # written, and read by the commit
    scan: int  # read and written by a scan that keeps a state for each node, for the last two


def steps(config: Mapping[str, object], context: int) -> list[Step]:
    """Return the steps of a model after `context` tokens."""
    target, found = _target(config), []
    for shape in SHAPES:
        tree, N = _tree(shape), shape.nodes
        cache = target.new_cache()
        target.append(mx.zeros((1, 2), mx.int32), cache, 0)
        for bound in (context, context + 1):
            _blank(cache)
            length = mx.array([bound])
            hidden, logits = target.verify(tree, cache, length, bound)
            cache.commit(tree, mx.zeros((1, shape.length), mx.int32), mx.array([0]), length)
        states = [layer.states[-1] for layer in cache.recurrent]
        state = sum(a.nbytes for a in states if a is not None)
        tape = sum(a.nbytes for layer in cache.recurrent for t in layer.tapes if t for a in t)
        keys = sum(
            layer.slot_bytes * min(context, layer.window or context) for layer in cache.attention
        )
        reads, writes = _TREE if N > 1 else (1, 1)
        launched = [o for o in operations([hidden, logits, *cache.buffers]) if o not in VIEWS]
        found.append(
            Step(
                N, tree.is_chain, len(launched),
                _weights(target.model, N), keys, (reads + writes) * state, 2 * tape,
                (N + 3) * state if N > 1 else 2 * state,
            )
        )  # fmt: skip
    return found


def _target(config: Mapping[str, object]) -> Target:
    """Return mlx-lm's model in 4 bits, of arrays that are views of one number each."""
    kind, arguments = _get_classes({**config})
    model = kind(arguments.from_dict({**config}))
    model.set_dtype(mx.bfloat16)
    nn.quantize(model, 64, 4)
    model.update(tree_map(_view, model.parameters()))
    return Target(model)


def _view(array: mx.array) -> mx.array:
    view = mx.broadcast_to(mx.zeros((), array.dtype), array.shape)
    mx.eval(view)
    return view


def _blank(cache: TreeCache) -> None:
    """Replace what was built, and is not computed, by arrays of its size."""
    cache.layer_buffers = [
        tree_map(lambda a: None if a is None else _view(a), buffers)
        for buffers in cache.layer_buffers
    ]


def _tree(shape: BeamShape) -> TokenTree:
    W, L = shape.width, shape.length
    tokens = mx.where(mx.arange(L) == 0, 0, mx.arange(W * L).reshape(1, W, L)).astype(mx.int32)
    scores = mx.broadcast_to(-mx.arange(L, dtype=mx.float32), tokens.shape)
    tree = pack_beam(Beams(tokens, scores), shape.nodes)
    mx.eval(tree.arrays)
    return tree


def operations(arrays: Sequence[mx.array]) -> list[str]:
    """Return the names of the primitives that compute the arrays, which are not computed."""
    dot = io.StringIO()
    mx.export_to_dot(dot, *arrays)
    labels = [line.split('label ="')[1] for line in dot.getvalue().splitlines() if "label" in line]
    return [label.split('"')[0] for label in labels]


def _weights(model: nn.Module, rows: int) -> int:
    """Return the bytes of weights that a call of so many rows reads.

    Of E experts, k for a row, they read E (1 - (1 - k / E)^rows) if rows choose independently.
    """
    args = getattr(model, "args", None)
    chosen = getattr(args, "num_experts_per_tok", 0) or 0
    total = 0.0
    leaves = cast("list[tuple[str, mx.array]]", tree_flatten(model.parameters()))
    for name, array in leaves:
        share = 1.0
        if "switch_mlp" in name:
            share = 1 - (1 - chosen / array.shape[0]) ** rows
        elif "embed_tokens" in name and "lm_head" in model:
            share = 0.0
        total += share * array.nbytes
    return round(total)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.add_argument("config", type=Path, nargs="+")
    parser.add_argument("--context", type=int, default=8192, help="tokens before the step")
    given = parser.parse_args()
    for path in given.config:
        print(path)
        print("nodes | form | operations | weights | keys and values | states | tapes | scan, MB")
        try:
            found = steps(read_object(path), given.context)
        except (RedrafterError, OSError, ValueError, TypeError, KeyError) as error:
            parser.error(f"{path}: {error!r:.200}")
        for step in found:
            form = "plain" if step.nodes == 1 else "chain" if step.is_chain else "tree"
            sizes = " | ".join(f"{nbytes / 1e6:.0f}" for nbytes in step[3:])
            print(f"{step.nodes} | {form} | {step.operations} | {sizes}")


if __name__ == "__main__":
    main()
