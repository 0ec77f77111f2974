"""What `show` tells of a model or a drafter, by label."""

from __future__ import annotations

from typing import TYPE_CHECKING

from redrafter_mlx.errors import DamagedFileError, RedrafterError, UnsupportedModelError
from redrafter_mlx.runtime.files.paths import human_size
from redrafter_mlx.runtime.words import count

if TYPE_CHECKING:
    from redrafter_mlx.weights.fit.machine import Machine
    from redrafter_mlx.weights.status import ModelStatus


def drafter_facts(name: str) -> dict[str, str]:
    """Return what is known of a drafter, by label; nothing of anything else."""
    from redrafter_mlx.drafting.files.recognition import form_in, holds_drafter, read_drafter_config
    from redrafter_mlx.runtime.files.paths import bytes_below
    from redrafter_mlx.weights.fetching.resolve import find_local
    from redrafter_mlx.weights.files.folder import check_model

    local = find_local(name)
    if local is None or local.path.is_file() or not holds_drafter(local.path):
        return {}
    try:
        config = read_drafter_config(local.path)
        form = form_in(local.path)
    except RedrafterError:
        check_model(local.path)  # whose error says more of a folder that holds neither
        raise
    speculators = config.get("speculators_config")
    verifier = speculators.get("verifier") if isinstance(speculators, dict) else None
    targets = [config.get("target"), config.get("base_model_name_or_path")]
    targets += [verifier.get("name_or_path")] if isinstance(verifier, dict) else []
    return {
        "name": name,
        "form": f"{form} drafter",
        "target": next((str(target) for target in targets if target), ""),
        "path": str(local.path),
        "on disk": human_size(bytes_below(local.path, follow_links=True)),
    }


def source_facts(model: ModelStatus) -> dict[str, str | None]:
    remedy = f"not here; fetch it with: redrafter-mlx pull {model.name}"
    return {
        "name": model.name,
        "description": model.description,
        "license": model.licence,
        "source": model.source,
        "download": size_text(model.size),
        "path": str(model.path) if model.path else remedy,
        "on disk": size_text(model.on_disk),
        **model.details,
    }


def unsupported(model: ModelStatus) -> str | None:
    """Return why a model on disk cannot be used here; None if it can, or if it is not on disk."""
    from redrafter_mlx.weights.registry import REGISTRY

    if model.path is None or model.name in REGISTRY:
        return None
    try:  # MLX's own definitions decide, and its import takes a second or two
        if model.path.is_file():
            from redrafter_mlx.weights.gguf.load import check_gguf

            check_gguf(model.path)
        elif (config := model.path / "config.json").is_file():
            from redrafter_mlx.loading.supported import check_supported

            check_supported(config)
    except (UnsupportedModelError, DamagedFileError) as error:
        return str(error)
    return None


def memory_facts(model: ModelStatus, machine: Machine, context: int) -> dict[str, str]:
    from redrafter_mlx.weights.fit.needs import MOSTLY_EMBEDDING, drafter_bytes, needs

    if model.stored is None:
        return {}
    planned = count(model.stored.planned(context), "token")
    whole = "" if model.stored.planned(context) == context else ", all that the model can have"
    facts = {"memory": f"{size_text(machine.working_set)} for models, context of {planned}{whole}"}
    drafter = drafter_bytes(model.name)
    for way in needs(model.stored, machine, context=context, drafter=drafter):
        weights, cache, heads = map(size_text, (way.weights, way.cache, way.drafter))
        parts = f"{weights} weights, {cache} cache, {heads} drafter"
        verdict = "fits" if way.fits(machine) else "does not fit"
        facts[way.option] = f"{verdict}: {size_text(way.total)} ({parts}, and work)"
        if way.quantize == 4 and model.stored.size.mostly_embedding:
            facts[way.option] += f"; {MOSTLY_EMBEDDING}"
    packed = {
        bits: needs(model.stored, machine, context=context, kv_bits=bits)[0].cache
        for bits in (8, 4)
    }
    facts["--kv-bits"] = ", ".join(
        f"{bits}: {size_text(size)} cache" for bits, size in packed.items()
    )
    return facts


def size_text(size: int | None) -> str:
    """Return a size in words, nothing for one that is unknown."""
    return "" if size is None else human_size(size)
