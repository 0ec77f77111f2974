"""What a drafter's card on the Hub says of its target, in the Hub's own terms."""

from __future__ import annotations

import re
from pathlib import Path

import huggingface_hub

from redrafter_mlx.weights.fetching.hub import split_repo
from redrafter_mlx.weights.registry import REGISTRY

_LICENCES = (
    "apache-2.0", "mit", "gemma", "llama2", "llama3", "llama3.1", "llama3.2", "llama3.3", "llama4",
    "cc-by-4.0", "cc-by-nc-4.0", "cc-by-sa-4.0",
)  # fmt: skip
"""The Hub's identifiers of most models' licences; it refuses a card with an unknown identifier."""


def hub_licence(licence: str | None) -> tuple[str, str | None]:
    """Return a card's identifier of a licence and, for `other`, the licence's name."""
    given = (licence or "").strip().lower()
    if given in _LICENCES:
        return given, None
    name = re.sub(r"[^a-z0-9.]+", "-", given).strip("-.")
    return ("other", name) if name else ("unknown", None)


def card_front_matter(target: str, licence: str | None) -> str:
    """Return the front matter of a drafter's card: YAML that names its target and licence."""
    identifier, name = hub_licence(licence)
    data = huggingface_hub.ModelCardData(
        library_name="mlx",
        pipeline_tag="text-generation",
        license=identifier,
        license_name=name,
        base_model=hub_repo(target),
        tags=["redrafter", "speculative-decoding", "mlx"],
    )
    return f"---\n{data.to_yaml()}\n---"


def hub_repo(name: str) -> str | None:
    """Return the Hub repository of a model by its name; None for the user's own files."""
    if name in REGISTRY:
        return REGISTRY[name].repo
    repo = split_repo(name)
    return None if repo is None or name.endswith(".gguf") or Path(name).exists() else repo[0]
