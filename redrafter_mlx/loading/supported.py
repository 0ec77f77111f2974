"""Whether a model's architecture can be a target, told before its weights are downloaded."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path

from mlx_lm.utils import _get_classes

from redrafter_mlx.drafting.files.recognition import check_form
from redrafter_mlx.errors import ModelNotFoundError, UnsupportedModelError
from redrafter_mlx.runtime.files.json_file import read_object
from redrafter_mlx.target_model.model import Target
from redrafter_mlx.weights.fetching.hub import MAX_DRAFTER_LAYERS
from redrafter_mlx.weights.files.folder import MAX_LAYERS, check_layers
from redrafter_mlx.weights.files.names import holds_tokenizer
from redrafter_mlx.weights.raw_model import is_unknown, top_level_rope


def check_repository(config: Path, files: Iterable[str]) -> None:
    """Refuse a repository that holds neither a target nor a drafter, before it is downloaded.

    files: names of the repository's files
    Raises:
      UnsupportedModelError: as `check_supported`
      ModelNotFoundError: a model without a tokenizer; a drafter needs none
    """
    check_supported(config)
    if not (_may_be_drafter(read_object(config)) or holds_tokenizer(files)):
        raise ModelNotFoundError(
            "the repository holds no tokenizer (tokenizer.json or tokenizer.model); "
            "give the repository of a whole model"
        )


def check_supported(config: Path) -> None:
    """Raise UnsupportedModelError for a model that cannot be a target, and an unsupported drafter.

    Raises DamagedFileError for more layers than any model has.

    The model is built without weights, and none of its arrays is evaluated. A configuration from
    which none can be built passes, as the error on reading the files says more; so does that of a
    drafter, which names an architecture too and is recognised by its draft vocabulary or its few
    layers.
    """
    stored = read_object(config)
    check_form(stored, config.parent)
    if _may_be_drafter(stored):
        return
    check_layers(stored, MAX_LAYERS, config)
    stored |= top_level_rope(stored)
    try:
        kind, arguments = _get_classes(stored)
        Target(kind(arguments.from_dict(stored)))
    except UnsupportedModelError:
        raise
    except Exception as error:  # architectures raise errors of any type on a foreign configuration
        if is_unknown(error):
            raise UnsupportedModelError(
                f"mlx-lm has no architecture {str(stored.get('model_type'))!r:.80}"
            ) from error


def _may_be_drafter(config: Mapping[str, object]) -> bool:
    """Whether a configuration may be a drafter's; that of an MTP head is its target's."""
    text = config.get("text_config")
    layers = (text if isinstance(text, Mapping) else config).get("num_hidden_layers")
    few = not isinstance(layers, int) or layers <= MAX_DRAFTER_LAYERS
    return few or "draft_vocab_size" in config or str(config.get("model_type")).endswith("_mtp")
