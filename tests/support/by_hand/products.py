"""Milliseconds of a model's matrix products by query rows and by the type of its weights.

Usage: python tests/support/by_hand/products.py smollm2-135m

All products of one call, without what is between them, and last a whole plain step: the floor of a
step on this machine, and what an engine can save beside it. All weights are multiplied as float32,
bfloat16 and float16, and quantised to 8 and 4 bits in groups of 32, in turns; each figure is the
median of nine.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable

import support_path  # noqa: F401

import redrafter_mlx

# (MLX after redrafter_mlx, which loads a BLAS.)
import mlx.core as mx  # isort: skip
from mlx.utils import tree_flatten  # isort: skip

from redrafter_mlx.cpu.door import prepare_for, threads_by_rows

ROWS = (1, 2, 3, 4, 8, 16)
REPEATS = 9

Product = Callable[[mx.array], mx.array]


def products(weights: list[mx.array], kind: str) -> list[tuple[int, Product]]:
    """Return the input size and the product of each matrix, with its weights as this type."""
    found: list[tuple[int, Product]] = []
    for weight in weights:
        size = weight.shape[1]
        if kind.endswith("bits"):
            bits = int(kind.split()[0])
            packed = mx.quantize(weight, group_size=32, bits=bits)
            mx.eval(packed)
            found.append((size, quantised(packed, bits)))
        else:
            of_kind = weight.astype(getattr(mx, kind))
            mx.eval(of_kind)
            found.append((size, lambda x, w=of_kind: x.astype(w.dtype) @ w.T))
    return found


def quantised(packed: tuple[mx.array, ...], bits: int) -> Product:
    return lambda x: mx.quantized_matmul(x, *packed, group_size=32, bits=bits)


def seconds(all_products: list[tuple[int, Product]], inputs: dict[int, mx.array]) -> float:
    began = time.perf_counter()
    mx.eval([product(inputs[size]) for size, product in all_products])
    return time.perf_counter() - began


def main() -> None:
    model = redrafter_mlx.load(sys.argv[1], "none")
    weights = [w for _, w in tree_flatten(model.model.parameters()) if w.ndim == 2]
    kinds = ("float32", "bfloat16", "float16", "8 bits", "4 bits")
    by_kind = {kind: products(weights, kind) for kind in kinds}
    times: dict[tuple[str, int], list[float]] = {}
    with threads_by_rows():
        for rows in ROWS:
            prepare_for(rows)
            sizes = {w.shape[1] for w in weights}
            inputs = {size: 0.1 * mx.random.normal((rows, size)) for size in sizes}
            mx.eval([*inputs.values()])
            for i in range(REPEATS + 1):
                for kind, of_kind in by_kind.items():
                    taken = seconds(of_kind, inputs)
                    if i:
                        times.setdefault((kind, rows), []).append(taken)
    print("rows     " + "".join(f"{rows:8}" for rows in ROWS))
    for kind in kinds:
        cells = [f"{1e3 * statistics.median(times[kind, rows]):8.1f}" for rows in ROWS]
        print(f"{kind:9}" + "".join(cells))
    rates = [model.generate("Why is the sky blue?", max_tokens=60) for _ in range(3)]
    step = statistics.median(1e3 / answer.generation_tps for answer in rates)
    print(f"a plain step, float32: {step:.1f}")


if __name__ == "__main__":
    main()
