"""EAGLE and block drafters that learn a tiny target's answers."""

from __future__ import annotations

from pathlib import Path

import block_samples
import eagle_files
import eagle_samples
import mlx.core as mx
import mlx.nn as nn
import mlx.optimizers as optim
import numpy as np
from draft_models import PROMPT
from eagle_files import features_of
from eagle_samples import Tensors
from tiny import plain_tokens

from redrafter_mlx.drafting.interface import Seen
from redrafter_mlx.drafting.published.blocks.dflash import BlockDrafter
from redrafter_mlx.drafting.published.blocks.dflash2 import DFlash2Drafter
from redrafter_mlx.target_model.model import Target


class Trained(dict[str, Path]):
    """Folders of drafters, by form, each of which learns the target's answers when first named."""

    def __init__(self, model: nn.Module, folder: Path) -> None:
        super().__init__()
        self._model, self._folder = model, folder

    def __missing__(self, name: str) -> Path:
        made = self._eagle if name in eagle_files.TRAINED else self._block
        self[name] = made(name)
        return self[name]

    def _eagle(self, name: str) -> Path:
        sample, write = eagle_files.TRAINED[name], eagle_samples.write_files
        fresh = write(self._folder / "random" / name, sample, eagle_samples.random_tensors(sample))
        learned = eagle_files.train(eagle_files.load(fresh, Target(self._model)), self._model)
        return write(self._folder / name, sample, learned)

    def _block(self, name: str) -> Path:
        sample, write = block_samples.TRAINED[name], block_samples.write_files
        tensors = block_samples.random_tensors(sample)
        for part, tensor in tensors.items():  # DFlash 2 starts as DFlash
            if part.endswith("base_kernel"):
                tensor[:] = np.array([1.0, 0.0])[None, :, None]
            if "kernel_projection" in part or part.endswith("hidden_projection.weight"):
                tensor *= 0
        fresh = write(self._folder / "random" / name, sample, tensors)
        learned = train_block(block_samples.load(fresh, Target(self._model)), self._model)
        return write(self._folder / name, sample, learned)


def train_block(drafter: BlockDrafter, model: nn.Module) -> Tensors:
    """Return the drafter's tensors after it has learned some answers of the target."""
    starts = [PROMPT, PROMPT[::-1], sorted(PROMPT)]
    texts = mx.array([start + plain_tokens(model, start, 50) for start in starts])
    features = features_of(drafter, model, texts)
    drafter, zeros = drafter.uncompiled(), mx.zeros((len(starts),), mx.int32)
    network, drafts = drafter.rows.network, drafter.config.drafts

    def loss(at: int) -> mx.array:
        labels = texts[:, at + 1 : at + 1 + drafts]
        committed = Seen(texts[:, : at + 1], features[:, :at], zeros, zeros + at, at)
        if isinstance(drafter, DFlash2Drafter):  # its choice of candidates has no gradient
            hidden = drafter.rows.call(committed, drafter.new_cache(), drafts)
            logits = drafter.rows.logits(hidden)
            return nn.losses.cross_entropy(logits, labels, reduction="mean")
        levels = drafter.levels((), committed, drafts)
        before = [texts[:, i : i + 1] for i in range(at + 1, at + drafts)]
        logits = [levels.first(), *(levels.following(zeros[:, None], each) for each in before)]
        return nn.losses.cross_entropy(mx.concatenate(logits, axis=1), labels, reduction="mean")

    optimizer, rng = optim.Adam(3e-3), np.random.default_rng(0)
    value_and_grad = nn.value_and_grad(network, loss)
    for _ in range(360):
        _, grads = value_and_grad(int(rng.integers(len(PROMPT), texts.shape[1] - drafts)))
        optimizer.update(network, grads)
        mx.eval(network.parameters())
    leaves = nn.utils.tree_flatten(network.parameters())
    return {name: np.array(array).astype(np.float64) for name, array in leaves}
