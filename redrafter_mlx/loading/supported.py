"""Whether a model's architecture can be a target, told before its weights are downloaded."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from mlx_lm.utils import _get_classes

from redrafter_mlx.drafting.forms import check_form
from redrafter_mlx.errors import UnsupportedModelError
from redrafter_mlx.runtime.json_file import read_object
from redrafter_mlx.target.model import Target
from redrafter_mlx.weights.hub import MOST_DRAFTER_LAYERS
from redrafter_mlx.weights.raw_model import is_unknown, top_level_rope


def check_supported(config: Path) -> None:
    """Raise UnsupportedModelError for a model that cannot be a target, and an unsupported drafter.

    The model is built without weights, and none of its arrays is evaluated. A configuration from
    which none can be built passes, as the error on reading the files says more; so does that of a
    drafter, which names an architecture too and is recognised by its draft vocabulary or its few
    layers.
    """
    stored = read_object(config)
    check_form(stored, config.parent)
    stored |= top_level_rope(stored)
    text = stored.get("text_config")
    layers = (text if isinstance(text, Mapping) else stored).get("num_hidden_layers")
    few = not isinstance(layers, int) or layers <= MOST_DRAFTER_LAYERS
    if few or "draft_vocab_size" in stored:
        return
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
