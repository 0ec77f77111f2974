"""What a GGUF architecture is in mlx-lm. No MLX is imported here."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from redrafter_mlx.weights.gguf.architectures.names import TOP
from redrafter_mlx.weights.gguf.keys import Keys

Settings = Callable[[Keys], Mapping[str, object]]
"""Return the keys of config.json that only this architecture has."""


@dataclass(frozen=True)
class Architecture:
    """What a GGUF architecture is in mlx-lm.

    model_type:  mlx-lm's name
    layer:       module of a layer, or one of its whole tensor names -> mlx-lm's path in a layer
    top:         module outside of layers -> mlx-lm's path
    layers:      mlx-lm's path of the layers
    biased:      modules that may have a bias
    settings:    see `Settings`
    scalings:    kinds of rope scaling that mlx-lm's class applies
    partial:     whether only a part of each head may be rotated
    pairs:       whether rows of queries and keys are permuted for rotation of adjacent pairs
    traditional: whether mlx-lm's class rotates adjacent pairs, if it is told to
    tiled:       whether the first value heads of all key heads come first
    adds_one:    whether norms hold the one that mlx-lm's class adds
    wide:        whether activations exceed float16's range: arithmetic on a GPU is in bfloat16
    """

    model_type: str
    layer: Mapping[str, str]
    top: Mapping[str, str] = field(default_factory=lambda: TOP)
    layers: str = "model.layers"
    biased: tuple[str, ...] = ()
    settings: Settings = lambda _: {}
    scalings: tuple[str, ...] = ("linear", "yarn", "llama3")
    partial: bool = False
    pairs: bool = False
    traditional: bool = False
    tiled: bool = False
    adds_one: bool = False
    wide: bool = False

    def path(self, tensor: str) -> str | None:
        """Return mlx-lm's name of a tensor; None if no model of this architecture has it.

        `blk.3.attn_q.weight` is `model.layers.3.self_attn.q_proj.weight`.
        """
        found = re.fullmatch(r"blk\.(\d+)\.(.+)", tensor)
        names, name = (self.layer, found[2]) if found else (self.top, tensor)
        before = f"{self.layers}.{found[1]}." if found else ""
        if name in names:
            return f"{before}{names[name]}"
        module, _, part = name.rpartition(".")
        holds = part == "weight" or (part == "bias" and module in self.biased)
        return f"{before}{names[module]}.{part}" if holds and module in names else None
