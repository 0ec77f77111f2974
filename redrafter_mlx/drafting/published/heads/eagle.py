"""EAGLE: one or two layers that continue the target's own features, with their own KV cache.

EAGLE-1 and 2 (Li et al., arXiv 2401.15077, 2406.16858) read the target's last hidden state, EAGLE-3
(arXiv 2503.01840) the inputs of a few of its layers. Beam search yields EAGLE-2's dynamic tree: the
likeliest nodes by the product of probabilities along their paths, within a budget. Its authors'
defaults (top_k 10, depth 7, total_token 60) are a beam width of 10, a beam length of 9 (the root
and 8 drafts) and 60 nodes. Here, a level has no more nodes than the beam is wide.
"""

from __future__ import annotations

from dataclasses import replace

from redrafter_mlx.drafting.files import recognition
from redrafter_mlx.drafting.files.drafter_files import DrafterFiles, Form, fill
from redrafter_mlx.drafting.files.tensor_names import eagle_name
from redrafter_mlx.drafting.level_drafter import shuffled
from redrafter_mlx.drafting.published.heads.eagle_config import read_eagle_one, read_eagle_three
from redrafter_mlx.drafting.published.heads.eagle_network import (
    EagleNetwork,
    EagleOneNetwork,
    EagleThreeNetwork,
)
from redrafter_mlx.drafting.published.heads.feature_drafter import FeatureDrafter
from redrafter_mlx.drafting.published.network_config import (
    ROPE_BASE,
    of_network,
    read_vocabulary,
    rope_kind,
)
from redrafter_mlx.speculation.draft_vocabulary import DraftVocabulary
from redrafter_mlx.target_model.model import Target


class EagleDrafter(FeatureDrafter, well_formed=True):
    """An EAGLE network, of either form."""

    def __init__(
        self, name: str, network: EagleNetwork, target: Target, vocabulary: DraftVocabulary
    ) -> None:
        super().__init__(name, network, target, vocabulary)
        self._network, self.config = network, network.config

    def readings(self) -> dict[str, EagleDrafter]:
        """Readings that correct known errors of files: layers, rotary embedding, norms.

        Early trainers rotated with a base of 10000, and without Llama 3's scaling, whatever
        config.json said. Some wrote norm_output for a head that feeds back its output as it is.
        """
        config, last = self.config, self._target.n_layers - 1
        changed = {}
        if config.rope_base != ROPE_BASE:
            scaling = None if rope_kind(config.rope_scaling) == "llama3" else config.rope_scaling
            changed["a rotary base of 10000"] = replace(
                config, rope_base=ROPE_BASE, rope_scaling=scaling
            )
        for step, words in ((-1, "layers one earlier"), (1, "layers one later")):
            layers = tuple(layer + step for layer in config.layers)
            if layers and layers[0] >= 0 and layers[-1] <= last:
                changed[words] = replace(config, layers=layers)
        if config.layers:
            other = not config.norm_before_residual
            words = f"norm_before_residual {str(other).lower()}"
            changed[words] = replace(config, norm_before_residual=other)
        if config.norm_output:
            changed["norm_output false"] = replace(config, norm_output=False)
        network = self._network
        return {
            words: EagleDrafter(self._name, network.changed(config), self._target, self.vocabulary)
            for words, config in changed.items()
        }

    def untrained(self) -> EagleDrafter:
        network = shuffled(self._network)
        return EagleDrafter(self._name, network, self._target, self.vocabulary)


def load_eagle_one(files: DrafterFiles, target: Target) -> EagleDrafter:
    config = read_eagle_one(files, target)
    return _load(EAGLE.name, files, target, EagleOneNetwork(config))


def load_eagle_three(files: DrafterFiles, target: Target) -> EagleDrafter:
    config = read_eagle_three(files, target)
    return _load(EAGLE3.name, files, target, EagleThreeNetwork(config))


def _load(name: str, files: DrafterFiles, target: Target, network: EagleNetwork) -> EagleDrafter:
    """Load the drafter from its files; DamagedFileError names what they lack."""
    stored = files.read(eagle_name)
    vocabulary = read_vocabulary(network.config, stored, files)
    own = {n: array for n, array in stored.items() if of_network(n, network.config)}
    fill(network, own, files, target.dtype)
    return EagleDrafter(name, network, target, vocabulary)


EAGLE3 = Form(recognition.EAGLE3, load_eagle_three)
EAGLE = Form(recognition.EAGLE, load_eagle_one)
