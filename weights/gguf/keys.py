"""Metadata of a GGUF file, under llama.cpp's names. No MLX is imported here."""

from __future__ import annotations

from dataclasses import dataclass

from redrafter_mlx.errors import DamagedFileError
from redrafter_mlx.weights.gguf.header import GGUFHeader


@dataclass(frozen=True)
class Keys:
    """Metadata of one architecture: `attention.scale` is `granite.attention.scale` in the file.

    Raises DamagedFileError for a value that is missing or of another type.
    """

    header: GGUFHeader
    architecture: str

    def whole(self, key: str, default: int | None = None) -> int:
        return self.header.get(f"{self.architecture}.{key}", int, default)

    def number(self, key: str, default: float | None = None) -> float:
        return self.header.get(f"{self.architecture}.{key}", float, default)

    def text(self, key: str, default: str) -> str:
        return self.header.get(f"{self.architecture}.{key}", str, default)

    def flag(self, key: str, default: bool) -> bool:
        return self.header.get(f"{self.architecture}.{key}", bool, default)

    def has(self, key: str) -> bool:
        return f"{self.architecture}.{key}" in self.header.metadata

    def each(self, key: str) -> list[int] | None:
        """Return a value for each layer; None if the file has one for all, or none."""
        name = f"{self.architecture}.{key}"
        if not isinstance(self.header.metadata.get(name), list):
            return None
        values, layers = self.header.items(name, int), self.whole("block_count")
        if len(values) != layers:
            path = self.header.path
            raise DamagedFileError(f"{path}: {name} of {len(values)} layers, and not {layers}")
        return values

    def holds(self, tensor: str) -> bool:
        """Whether the file has this tensor of any layer."""
        return any(name.endswith(f".{tensor}") for name in self.header.tensors)

    @property
    def layers(self) -> int:
        """Number of layers, without those that predict later tokens."""
        return self.whole("block_count") - self.whole("nextn_predict_layers", 0)

    @property
    def hidden(self) -> int:
        return self.whole("embedding_length")

    @property
    def heads(self) -> int:
        return self.whole("attention.head_count")

    @property
    def intermediate(self) -> int:
        """Units of a dense network, the fewest; of a model of experts alone, those of an expert."""
        if each := self.each("feed_forward_length"):
            return min((size for size in each if size), default=0)
        if self.has("expert_feed_forward_length") and not self.has("feed_forward_length"):
            return self.whole("expert_feed_forward_length")
        return self.whole("feed_forward_length")

    @property
    def kv_heads(self) -> int:
        """Heads of keys and values, in the layers that have any."""
        each = self.each("attention.head_count_kv")
        return max(each) if each else self.whole("attention.head_count_kv", self.heads)

    @property
    def head_dim(self) -> int:
        """Size of a head; DamagedFileError if there is no head to divide by."""
        path, hidden, heads = self.header.path, self.hidden, self.heads
        if hidden <= 0 or heads <= 0 or self.whole("attention.key_length", 1) <= 0:
            raise DamagedFileError(f"{path}: {hidden} hidden units in {heads} heads")
        return self.whole("attention.key_length", max(hidden // heads, 1))

    @property
    def rotary(self) -> float:
        """Share of a head's dimensions that is rotated."""
        return self.whole("rope.dimension_count", self.head_dim) / self.head_dim

    @property
    def norm_epsilon(self) -> float:
        """Of RMS norms, or of LayerNorms."""
        if self.has("attention.layer_norm_epsilon"):
            return self.number("attention.layer_norm_epsilon")
        return self.number("attention.layer_norm_rms_epsilon")
