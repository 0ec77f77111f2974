"""What an engine keeps on disk of the texts that it has read: their caches, and earlier texts."""

from __future__ import annotations

from collections.abc import Sequence

from redrafter_mlx.decoding.cache.prefix_store import PrefixStore
from redrafter_mlx.decoding.cache.text_store import TextStore
from redrafter_mlx.drafting.interface import Drafter
from redrafter_mlx.drafting.untrained.continuation import HostDrafter, KeepsEarlier
from redrafter_mlx.engine.options import EngineOptions
from redrafter_mlx.runtime.files.paths import free_disk
from redrafter_mlx.target_model.fingerprint import values_hash
from redrafter_mlx.target_model.model import Target
from redrafter_mlx.tuning.cost import setup_of

_DISK_SHARE = 10
"""One part in this many of a disk's free room is for the store, if its limit is not given."""


def prefix_store(
    options: EngineOptions, target: Target, drafter: Drafter | None
) -> PrefixStore | None:
    """Return the store on disk that the options ask for; raises BadInputError if it cannot be used.

    What it holds serves the same weights, on the same machine, with the same versions alone.
    """
    folder = options.cache_dir
    if folder is None:
        return None
    label, modules = ("", ()) if drafter is None else (drafter.label, drafter.modules)
    setup = setup_of(target.model, target, label).key
    return PrefixStore(
        folder,
        _disk_limit(options),
        f"{setup} {values_hash(target.model, *modules)}",
    )


class EarlierOnDisk:
    """Keeps the earlier texts of a model's drafters on disk, if the options ask for it."""

    def __init__(
        self, options: EngineOptions, target: Target, host_drafters: Sequence[HostDrafter]
    ) -> None:
        """Load what there is; raises BadInputError if the folder cannot be used."""
        self._stores: list[tuple[KeepsEarlier, TextStore]] = []
        folder = options.cache_dir
        for one in host_drafters:
            if folder is not None and (keeper := one.earlier) is not None:
                setup = f"{one.name} texts {values_hash(target.model)}"
                store = TextStore(folder, _disk_limit(options), setup, target.vocab_size)
                if (kept := store.load()) is not None:
                    keeper.restore(kept)
                self._stores.append((keeper, store))

    def save(self) -> None:
        """Write the texts, in another thread; only the engine's thread may call it."""
        for keeper, store in self._stores:
            if (kept := keeper.state()).texts:
                store.save(kept)

    def close(self) -> None:
        """Wait until all is written."""
        for _, store in self._stores:
            store.close()


def _disk_limit(options: EngineOptions) -> int:
    assert options.cache_dir is not None
    given = options.cache_bytes
    return free_disk(options.cache_dir) // _DISK_SHARE if given is None else given
