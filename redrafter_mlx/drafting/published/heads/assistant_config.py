"""The configuration of Gemma 4's assistants, read from their files and the target."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import cast

from mlx_lm.models.gemma4_text import ModelArgs
from mlx_lm.models.rope_utils import initialize_rope

from redrafter_mlx.drafting.files.drafter_files import DrafterFiles, check_pair
from redrafter_mlx.drafting.files.recognition import ASSISTANT
from redrafter_mlx.drafting.published.network_config import shape_of, stored_shapes
from redrafter_mlx.errors import DamagedFileError, UnsupportedModelError
from redrafter_mlx.target_model.adapter import find_backbone, layers_of
from redrafter_mlx.target_model.model import Target

FULL, SLIDING = "full_attention", "sliding_attention"

_CENTROIDS = "masked_embedding.centroids.weight"


@dataclass(frozen=True)
class AssistantConfig:
    """The configuration of an assistant.

    args:      of its layers, for mlx-lm
    caches:    the target's cache that each layer reads, counted from 0
    backbone_size: D, the target's hidden size
    centroids: of its output layer, and how many of them are read; None reads the whole embedding
    own_head:  whether it has an output layer besides its embedding
    """

    args: ModelArgs
    caches: tuple[int, ...]
    backbone_size: int
    centroids: tuple[int, int] | None
    own_head: bool


def read_assistant(files: DrafterFiles, target: Target) -> AssistantConfig:
    """Read the configuration. Sizes follow from tensors, which are not read.

    Raises MismatchError, naming both sizes, UnsupportedModelError for a target of another family,
    and DamagedFileError.
    """
    text = files.config.get("text_config")
    flat = {**files.config, **(text if isinstance(text, dict) else {})}
    read = replace(files, config={key: value for key, value in flat.items() if value is not None})
    V, H = shape_of(files, "embed_tokens.weight")
    backbone = shape_of(files, "pre_projection.weight")[1] // 2
    check_pair(backbone, target.hidden_size, "target hidden size")
    check_pair(V, target.vocab_size, "vocabulary")
    kinds = _kinds(read)
    last = _last_caches(target)
    sizes = {kind: _head_size(files, kinds.index(kind)) for kind in dict.fromkeys(kinds)}
    for kind, size in sizes.items():
        if kind not in last:
            raise UnsupportedModelError(
                f"{ASSISTANT} attends to the keys of Gemma 4's layers of {kind}; "
                f"{target.model_type} has none"
            )
        check_pair(size, last[kind][1], f"head size in layers of {kind}")
    args = ModelArgs(
        hidden_size=H,
        num_hidden_layers=len(kinds),
        intermediate_size=shape_of(files, "layers.0.mlp.gate_proj.weight")[0],
        num_attention_heads=read.integer("num_attention_heads"),
        head_dim=sizes.get(SLIDING, 1),
        global_head_dim=sizes.get(FULL, 1),
        rms_norm_eps=read.number("rms_norm_eps", 1e-6),
        vocab_size=V,
        num_kv_shared_layers=len(kinds),
        hidden_size_per_layer_input=0,
        rope_parameters=_rotations(read, sizes),
        sliding_window=read.integer("sliding_window"),
        use_double_wide_mlp=False,
        layer_types=kinds,
    )
    tied = read.flag("tie_word_embeddings", True)
    return AssistantConfig(
        args=args,
        caches=tuple(last[kind][0] for kind in kinds),
        backbone_size=backbone,
        centroids=_centroids(read, V),
        own_head=not tied and "lm_head.weight" in stored_shapes(files),
    )


def _kinds(files: DrafterFiles) -> list[str]:
    """Return the attention type of each layer."""
    names = stored_shapes(files)
    n_layers = len({name.split(".")[1] for name in names if name.startswith("layers.")})
    kinds = files.config.get("layer_types")
    known = isinstance(kinds, list) and all(kind in (FULL, SLIDING) for kind in kinds)
    if not known or len(cast("list[str]", kinds)) != n_layers or not n_layers:
        raise files.bad_value("layer_types", f"a list of {n_layers} of {FULL} and {SLIDING}")
    return cast("list[str]", kinds)


def _last_caches(target: Target) -> dict[str, tuple[int, int]]:
    """Return the target's last cache of each attention type, and the size of its key heads."""
    kinds = getattr(getattr(target.model, "args", None), "layer_types", None) or ()
    _, backbone = find_backbone(target.model, target.model_type)
    layers = layers_of(backbone, target.model_type)
    own = zip(kinds[: target.n_caches], layers, strict=False)  # later layers share these caches
    return {
        kind: (i, cast(int, layer.self_attn.head_dim))  # type: ignore[attr-defined]
        for i, (kind, layer) in enumerate(own)
    }


def _head_size(files: DrafterFiles, layer: int) -> int:
    name = f"layers.{layer}.self_attn.q_norm.weight"
    shape = stored_shapes(files).get(name, ())
    if len(shape) != 1 or shape[0] < 1:
        raise DamagedFileError(f"{files.tensors.path} lacks tensor {name}, or it is no vector")
    return shape[0]


def _centroids(files: DrafterFiles, vocab_size: int) -> tuple[int, int] | None:
    """Return the number of centroids and of those whose tokens are scored; None without any."""
    if _CENTROIDS not in stored_shapes(files):
        return None
    count = shape_of(files, _CENTROIDS)[0]
    if vocab_size % count:
        raise DamagedFileError(
            f"{files.tensors.path}: {vocab_size} tokens do not divide into {count} centroids"
        )
    return count, files.integer("centroid_intermediate_top_k", maximum=count)


def _rotations(files: DrafterFiles, sizes: Mapping[str, int]) -> dict[str, dict[str, object]]:
    """Return the rotary embedding of each attention type, once they could be made."""
    found = files.config.get("rope_parameters", {})
    by_kind = found if isinstance(found, dict) else {}
    for kind, size in sizes.items():
        try:
            given = by_kind[kind]
            initialize_rope(size, given["rope_theta"], False, given, 2048)
        except Exception:  # mlx-lm checks nothing, and can raise anything
            raise files.bad_value(
                "rope_parameters", f"a rotary embedding for each type of layers, as {kind}"
            ) from None
    return {kind: by_kind[kind] for kind in sizes}
