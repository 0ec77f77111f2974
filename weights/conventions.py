"""How the Hub names things in the front matter of a model card: licences and base models."""

from __future__ import annotations

import re
from pathlib import Path

from redrafter_mlx.weights.registry import REGISTRY

_REPO = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+", re.ASCII)

_LICENCES = """
afl-3.0 agpl-3.0 apache-2.0 apple-amlr apple-ascl artistic-2.0 bigcode-openrail-m
bigscience-bloom-rail-1.0 bigscience-openrail-m bsd bsd-2-clause bsd-3-clause
bsd-3-clause-clear bsl-1.0 c-uda cc cc-by-2.0 cc-by-2.5 cc-by-3.0 cc-by-4.0 cc-by-nc-2.0
cc-by-nc-3.0 cc-by-nc-4.0 cc-by-nc-nd-3.0 cc-by-nc-nd-4.0 cc-by-nc-sa-2.0 cc-by-nc-sa-3.0
cc-by-nc-sa-4.0 cc-by-nd-4.0 cc-by-sa-3.0 cc-by-sa-4.0 cc0-1.0 cdla-permissive-1.0
cdla-permissive-2.0 cdla-sharing-1.0 creativeml-openrail-m deepfloyd-if-license ecl-2.0
epl-1.0 epl-2.0 etalab-2.0 eupl-1.1 eupl-1.2 fair-noncommercial-research-license gemma gfdl
gpl gpl-2.0 gpl-3.0 h-research intel-research isc lgpl lgpl-2.1 lgpl-3.0 lgpl-lr llama2
llama3 llama3.1 llama3.2 llama3.3 llama4 lppl-1.3c mit mpl-2.0 ms-pl ncsa odbl odc-by
ofl-1.1 openmdw-1.0 openrail openrail++ osl-3.0 pddl postgresql unlicense wtfpl zlib
"""
"""The Hub's identifiers; it refuses a card with any other word."""


def hub_licence(licence: str | None) -> dict[str, str]:
    """The licence fields of a card: an identifier, or `other` with the licence's own name."""
    said = (licence or "").strip().lower()
    if said in _LICENCES.split():
        return {"license": said}
    name = re.sub(r"[^a-z0-9.]+", "-", said).strip("-.")
    return {"license": "other", "license_name": name} if name else {"license": "unknown"}


def hub_repo(name: str) -> str | None:
    """The Hub repository of a model by its name, None for files of the user's own."""
    if name in REGISTRY:
        return REGISTRY[name].repo
    if not _REPO.fullmatch(name) or name.endswith(".gguf"):
        return None
    return None if Path(name).exists() else name
