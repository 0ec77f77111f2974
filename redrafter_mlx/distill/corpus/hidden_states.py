"""Hidden states on their way from the target to the corpus: in a type that holds their range.

They stay in the target's own type. NumPy has no bfloat16, so there they are float32, which holds
the same values; on disk they are bfloat16 again.
"""

from __future__ import annotations

import mlx.core as mx
import numpy as np

from redrafter_mlx.errors import UnsupportedModelError
from redrafter_mlx.target.model import Target


def to_host(array: mx.array) -> np.ndarray:
    """The same values as a NumPy array; bfloat16 becomes float32."""
    return np.array(array.astype(mx.float32) if array.dtype == mx.bfloat16 else array)


def host_size(dtype: mx.Dtype) -> int:
    """Bytes of one number of that type after `to_host`."""
    return 4 if dtype == mx.bfloat16 else dtype.size


def check_finite(states: np.ndarray, target: Target) -> np.ndarray:
    """The states [..., C] of a target, unchanged.

    Raises UnsupportedModelError, naming the layer, where one is infinite or not a number.
    """
    if not np.isfinite(states).all():
        names = [f"the input of layer {i}" for i in target.context_layers] + ["the last norm"]
        parts = np.split(states, len(names), axis=-1)
        raise not_finite(
            target, next(n for n, p in zip(names, parts, strict=True) if not np.isfinite(p).all())
        )
    return states


def not_finite(target: Target, name: str) -> UnsupportedModelError:
    """One line for values that cannot be learnt from; `name` says of what they are."""
    kind = str(target.dtype).removeprefix("mlx.core.")
    return UnsupportedModelError(
        f"{target.model_type} makes values in {name} that are not finite in {kind}, and nothing "
        f"can be learnt from them; "
        + (
            "load it with --dtype bfloat16 or float32"
            if kind == "float16"
            else "its weights may be damaged"
        )
    )
