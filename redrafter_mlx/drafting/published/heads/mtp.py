"""MTP: multi-token-prediction heads, which models were trained with and bring along.

One decoder layer of the target's own kind continues the target's last hidden state, joined with the
embedding of the token after it (DeepSeek-V3, arXiv 2412.19437, section 2.2); embedding and output
layer are the target's. Trained for one step, it is applied again to its own output for the next
ones, level by level of a tree.

Files: a folder of its own, as mlx-vlm splits them off (`model_type` qwen3_5_mtp), or the target's
own files, where its tensors are `mtp.*` or, in the layout of DeepSeek-V3 and GLM, a further layer.
Facts that no file states, such as whether its norms were stored without the 1 that is added to
them, are read from the values and checked by calibration.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import cast

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.base import create_attention_mask
from mlx_lm.models.nemotron_h import NemotronHBlock

from redrafter_mlx.drafting.files import recognition
from redrafter_mlx.drafting.files.drafter_files import (
    DrafterFiles,
    Form,
    check_pair,
    fill,
)
from redrafter_mlx.drafting.files.recognition import OF_SPECULATORS
from redrafter_mlx.drafting.files.tensor_names import mtp_names
from redrafter_mlx.drafting.level_drafter import shuffled
from redrafter_mlx.drafting.published.heads.feature_drafter import (
    FeatureConfig,
    FeatureDrafter,
    FeatureNetwork,
)
from redrafter_mlx.drafting.published.heads.mtp_files import (
    dequantised,
    is_latent,
    nemotrons_kinds,
    with_latent_heads,
    with_nemotrons_experts,
    with_stacked_experts,
)
from redrafter_mlx.drafting.published.network import share_weights
from redrafter_mlx.errors import DamagedFileError, UnsupportedModelError
from redrafter_mlx.speculation.draft_vocabulary import DraftVocabulary
from redrafter_mlx.target_model.adapter import find_backbone, layers_of
from redrafter_mlx.target_model.cache.layer_cache import AttentionCache
from redrafter_mlx.target_model.model import Target

_CENTRED = 0.4
"""Mean of the norms' weights below which they were stored without the 1 that is added to them.

Those of Qwen3.5 and 3.6 lie between -0.5 and 0.3, and above 0.4 with the 1 (mlx-lm issue 1456)."""


_HIDDEN_NORM = "pre_fc_norm_hidden.weight"
_ROUTING = "e_score_correction_bias"
"""A bias that decides between experts, and is float32 in every model."""


@dataclass(frozen=True, kw_only=True)
class MtpConfig(FeatureConfig):
    """The configuration of one MTP head; all sizes are the target's.

    layers:       () for the final norm's output, or the number of the target's layers for its input
    centred:      whether its norms may have been stored without the 1 that is added to them
    normed_again: whether its own output is read again after its final norm, as the target's is
    kinds:        of a Nemotron's layers, see `nemotrons_kinds`; empty for one of the target's
    """

    centred: bool
    normed_again: bool
    kinds: str = ""

    @property
    def rotations(self) -> int:
        return 0 if self.kinds else self.n_layers

    @classmethod
    def of(cls, target: Target, *, centred: bool, normed_again: bool, kinds: str = "") -> MtpConfig:
        return cls(
            centred=centred,
            normed_again=normed_again,
            kinds=kinds,
            layers=(),
            context_size=target.hidden_size,
            n_layers=kinds.count("*") if kinds else 1,
            own_head=False,
            own_embedding=False,
            rope_scaling=None,
        )


class MtpNetwork(FeatureNetwork):
    """One layer of the target's own class over an embedding and a hidden state, both normed.

    Parameter names are those of the published files without their prefix.
    """

    def __init__(self, config: MtpConfig, target: Target) -> None:
        """Raise UnsupportedModelError if no layer can be made like those of the target."""
        super().__init__()
        self.config: MtpConfig = config
        H = target.hidden_size
        if config.kinds:
            layers = nemotrons_layers(target, config.kinds)
            eps = layers[0].norm.eps
        else:
            layers = [layer_like(target)]
            eps = layers[0].input_layernorm.eps
        self.pre_fc_norm_embedding = nn.RMSNorm(H, eps)
        self.pre_fc_norm_hidden = nn.RMSNorm(H, eps)
        self.fc = nn.Linear(2 * H, H, bias=False)
        self.layers = layers
        # Which layers mlx-lm quantises to other bits: those that choose experts.
        self.quant_predicate = getattr(target.model, "quant_predicate", None)
        self.norm = nn.RMSNorm(H, eps)

    @property
    def norms(self) -> list[nn.RMSNorm]:
        """All norms, those of its layer too."""
        return [module for module in self.modules() if isinstance(module, nn.RMSNorm)]

    def fuse(self, features: mx.array) -> mx.array:
        return features

    def forward(
        self, embedding: mx.array, context: mx.array, cache: Sequence[AttentionCache]
    ) -> mx.array:
        normed = [self.pre_fc_norm_embedding(embedding), self.pre_fc_norm_hidden(context)]
        x: mx.array = self.fc(mx.concatenate(normed, axis=-1))
        latent = not self.config.kinds and is_latent(self.layers[0])
        mask = create_attention_mask(x, cache[0], return_array=latent)
        if not self.config.kinds:
            out: mx.array = self.layers[0](x, mask, cache[0])
            return out
        caches = iter(cache)
        for kind, layer in zip(self.config.kinds, self.layers, strict=True):
            x = layer(x, mask, next(caches)) if kind == "*" else layer(x)
        return x

    def feedback(self, hidden: mx.array) -> mx.array:
        """Map outputs to hidden states as they are read: after the final norm, or before it."""
        return self.normed(hidden) if self.config.normed_again else hidden

    def normed(self, hidden: mx.array) -> mx.array:
        out: mx.array = self.norm(hidden)
        return out


class MtpDrafter(FeatureDrafter, well_formed=True):
    """An MTP head, with the target's embedding and output layer."""

    def __init__(
        self, network: MtpNetwork, target: Target, vocabulary: DraftVocabulary | None = None
    ) -> None:
        """`vocabulary` are the tokens that it can draft; None is all."""
        V = target.vocab_size
        super().__init__(MTP.name, network, target, vocabulary or DraftVocabulary(V, V))
        self._network = network

    def readings(self) -> dict[str, MtpDrafter]:
        """Readings that differ in what no file states: where hidden states are read, and norms."""
        config = self._network.config
        before = replace(config, layers=(self._target.n_layers,), normed_again=False)
        found = {"hidden states before the final norms": self._changed(before)}
        if not config.centred:
            words = "its own output after the final norm"
            return found | {words: self._changed(replace(config, normed_again=True))}
        shift = -1 if self._mean_norm() > _CENTRED else 1
        words = "norms without 1" if shift < 0 else "norms plus 1"
        return found | {words: self._changed(shift=shift)}

    def as_trained(self) -> MtpDrafter:
        """Return the drafter with the 1 added to its norms that they were stored without, if so."""
        without = self._network.config.centred and self._mean_norm() <= _CENTRED
        return self._changed(shift=1) if without else self

    def untrained(self) -> MtpDrafter:
        return MtpDrafter(shuffled(self._network), self._target, self.vocabulary)

    def _mean_norm(self) -> float:
        means = [norm.weight.astype(mx.float32).mean() for norm in self._network.norms]
        return cast(float, mx.stack(means).mean().item())

    def _changed(self, config: MtpConfig | None = None, shift: int = 0) -> MtpDrafter:
        """Return the drafter with another configuration, and a number added to its norms."""
        network = MtpNetwork(config or self._network.config, self._target)
        share_weights(network, self._network)
        for norm in network.norms:
            norm.weight = norm.weight + shift
        return MtpDrafter(network, self._target, self.vocabulary)


def layer_like(target: Target) -> nn.Module:
    """Return a new layer of the class and the sizes of the target's last layer with attention.

    Raises UnsupportedModelError if there is none, or mlx-lm makes it otherwise.
    """
    _, backbone = find_backbone(target.model, target.model_type)
    layers = cast("Sequence[nn.Module]", layers_of(backbone, target.model_type))
    with_attention = [(i, layer) for i, layer in enumerate(layers) if "self_attn" in layer]
    args = getattr(target.model, "args", None)
    if with_attention and args is not None:
        number, layer = with_attention[-1]
        make = cast(Callable[..., nn.Module], type(layer))
        for given in ((args, number), (args,)):
            with contextlib.suppress(TypeError):
                return make(*given)
    raise UnsupportedModelError(
        f"an {MTP.name} head needs a target whose layers attend and can be made one by one; "
        f"those of {target.model_type} do not"
    )


def nemotrons_layers(target: Target, kinds: str) -> list[nn.Module]:
    """Return new layers of these kinds, of the sizes of a Nemotron-H's.

    Raises UnsupportedModelError for a target of another family.
    """
    args = getattr(target.model, "args", None)
    if target.model_type == "nemotron_h":
        with contextlib.suppress(TypeError, AttributeError):  # without experts of its own
            return [NemotronHBlock(args, kind) for kind in kinds]
    raise UnsupportedModelError(
        f"a Nemotron's {MTP.name} head needs a Nemotron-H with layers like its own; the target is "
        f"a {target.model_type}"
    )


def load_mtp(files: DrafterFiles, target: Target) -> MtpDrafter:
    """Load a head from a folder of its own, or from the target's.

    Weights that are quantised already are dequantised; `files.bits` quantises them again.

    Raises MismatchError, naming both hidden sizes, and DamagedFileError, naming the tensor.
    """
    names = mtp_names(files.tensors.shapes)
    sizes = [files.tensors.shapes[name] for name, own in names.items() if own == _HIDDEN_NORM]
    if not sizes:
        raise DamagedFileError(f"{files.tensors.path} lacks tensor {_HIDDEN_NORM}")
    check_pair(sizes[0][0], target.hidden_size, "hidden size")
    joined = next((name for name, own in names.items() if own.startswith("fc.")), "")
    is_mimos = "input_proj." in joined and OF_SPECULATORS not in files.config
    kinds = nemotrons_kinds([*names.values()], files.tensors.path)
    is_deepseeks = "eh_proj." in joined and not kinds
    centred = not (is_mimos or is_deepseeks or kinds)
    config = MtpConfig.of(target, centred=centred, normed_again=not is_deepseeks, kinds=kinds)
    network = MtpNetwork(config, target)
    arrays = files.tensors.read()
    try:
        own = with_stacked_experts({names[name]: arrays[name] for name in names})
        layer = network.layers[0]
        own = with_nemotrons_experts(own) if kinds else with_latent_heads(own, layer)
    except (KeyError, ValueError) as error:
        raise DamagedFileError(
            f"{files.tensors.path}: experts or attention are not those of {target.model_type}: "
            f"{error}"
        ) from None
    routing = {name: a.astype(mx.float32) for name, a in own.items() if name.endswith(_ROUTING)}
    own = dequantised(own, network, files.tensors.path)
    if is_mimos and "fc.weight" in own:  # which reads the hidden state first
        both, H = own["fc.weight"], target.hidden_size
        own["fc.weight"] = mx.concatenate([both[..., H:], both[..., :H]], axis=-1)
    fill(network, own, files, target.dtype)
    network.load_weights(list(routing.items()), strict=False)
    return MtpDrafter(network, target).as_trained()


MTP = Form(recognition.MTP, load_mtp)
