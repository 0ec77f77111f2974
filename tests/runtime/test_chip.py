"""Whether float32 products are exact is measured, not assumed."""

from __future__ import annotations

import mlx.core as mx
import pytest

from redrafter_mlx.runtime.device import backend, float32_is_exact, keeps_float32


def tf32_product(a: mx.array, b: mx.array) -> mx.array:
    """Multiply as tensor cores do: inputs have 10 fraction bits, sums are float32."""
    kept = (mx.view(mx.view(x, mx.uint32) & 0xFFFFE000, mx.float32) for x in (a, b))
    return mx.matmul(*kept)


def test_products_in_tf32_are_distinguished_from_float32() -> None:
    assert not keeps_float32(tf32_product)
    assert keeps_float32(lambda a, b: mx.sum(a[:, :, None] * b[None], axis=1))


@pytest.mark.skipif(backend() != "cpu", reason="products of a GPU may be in TF32")
def test_on_a_cpu_nothing_is_multiplied_to_know_that_float32_is_exact(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A product outside the engine's thread would let the threads of a BLAS sleep from then on."""
    asked: list[object] = []
    monkeypatch.setattr("redrafter_mlx.runtime.device.keeps_float32", asked.append)
    assert float32_is_exact()
    assert not asked
