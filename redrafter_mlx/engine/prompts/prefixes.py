"""Prefixes of prompts: read once, kept for later prompts, and awaited while another reads them."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager

from redrafter_mlx.decoding.cache.prefix_cache import PrefixCache, common_prefix
from redrafter_mlx.decoding.cache.prefix_store import PrefixStore, StoredPrefix
from redrafter_mlx.decoding.cache.sequence_cache import SequenceCache
from redrafter_mlx.decoding.cache.text_store import TextStore
from redrafter_mlx.drafting.interface import Drafter
from redrafter_mlx.drafting.untrained.continuation import HostDrafter, KeepsEarlier
from redrafter_mlx.engine.options import EngineOptions
from redrafter_mlx.engine.request import Answer
from redrafter_mlx.errors import DrafterError
from redrafter_mlx.runtime.files.paths import free_disk
from redrafter_mlx.target_model.fingerprint import values_hash
from redrafter_mlx.target_model.model import Target
from redrafter_mlx.tuning.cost import setup_of

LOG = logging.getLogger("redrafter_mlx.engine")

_MIN_LOADED = 256
"""Minimum number of tokens that a file must hold beyond what is in memory to be loaded."""

_DISK_SHARE = 10
"""One part in this many of a disk's free room is for the store, if its limit is not given."""

_MIN_AWAITED = 64
"""Minimum number of tokens that are awaited of another prompt: fewer are read in one call."""


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


class Prefixes:
    """The prefixes that the answers of one model share.

    cache: texts that were read, by earlier answers or in a prompt that others wait for
    """

    def __init__(self, max_bytes: int, store: PrefixStore | None = None) -> None:
        """`store`: keeps them on disk, too."""
        self.cache, self.store = PrefixCache(max_bytes), store

    def take(self, answer: Answer) -> tuple[SequenceCache, int]:
        """Return a cache for an answer, and how many tokens of its prompt it holds."""
        request, decoder = answer.request, answer.decoder
        found = None
        if request.options.cache_prompt:
            self._load(answer)
            found = self.cache.take(request.prompt, decoder.drafter)
        cache, start = found or (decoder.new_cache(), 0)
        if cache.target.forgetful and request.options.cache_prompt:
            cache.parted = self.cache.longest_shared(request.prompt)
        return cache, start

    def touch(self, answer: Answer) -> None:
        """Drop the text that an answer needs only after all others; searched once for it."""
        if answer.request.options.cache_prompt and answer.touched != self.cache.added:
            answer.touched = self.cache.added
            self.cache.touch(answer.request.prompt, answer.decoder.drafter)

    def keep_prefill(self, answer: Answer) -> None:
        """Keep what was read of the prompt of an answer that has ended."""
        answer.prefill.wait()
        self.keep(answer, answer.prefill.cache, answer.request.prompt[: answer.prefill.position])

    def keep_answer(self, answer: Answer, cache: SequenceCache) -> None:
        """Keep the cache of an answer that has ended, whose last token was not read, or in vain."""
        text = [*answer.request.prompt, *answer.text.tokens]
        read = answer.kept_length
        if cache.target.reaches_back(answer.committed, read):
            cache.target.excess += max(answer.committed - read, 0)
        else:
            read = answer.committed
        if read <= len(text):
            self.keep(answer, cache, text[:read])

    def keep(self, answer: Answer, cache: SequenceCache, tokens: Sequence[int]) -> None:
        """Keep an answer's cache, which is not used any more, for prompts that share a prefix.

        Drafters that read no features read the tokens again if they draft for such a prompt.
        """
        drafter = answer.decoder.drafter
        if not (answer.request.options.cache_prompt and tokens):
            return
        with _only_logged():
            _catch_up(cache, drafter)
            kept = self.cache.keep(cache, tokens, drafter, len(answer.request.prompt))
            if kept is not None and self.store is not None:
                found = (kept.tokens, cache.arrays, kept.remembered, kept.prompt)
                self.store.save(StoredPrefix(*found))

    def _load(self, answer: Answer) -> None:
        """Load the text that holds most of an answer's prompt, if it is on disk alone."""
        if self.store is None:
            return
        prompt, decoder = answer.request.prompt, answer.decoder
        path, shared = self.store.longest(prompt)
        if path is None or shared - self.cache.known(prompt, decoder.drafter) < _MIN_LOADED:
            return
        if (stored := self.store.load(path)) is not None:
            cache = decoder.new_cache().holding(stored.arrays, stored.remembered)
            self.cache.restore(cache, stored.tokens, stored.remembered, stored.prompt)

    def await_prefix(self, answer: Answer, reading: Answer) -> None:
        """Let a waiting answer begin only once another's prompt is read as far as both agree.

        That is where it saves reading more than the other one found in the cache. Each pair is
        compared once.
        """
        one, other = answer.request, reading.request
        if not (one.options.cache_prompt and other.options.cache_prompt):
            return
        if answer.decoder.drafter is not reading.decoder.drafter:
            return
        # The last token of a prompt is always read for its answer.
        shared = min(common_prefix(one.prompt, other.prompt), len(one.prompt) - 1)
        shared = min(shared, len(other.prompt) - 1)
        known = reading.tally.cached
        if answer.awaited_prefix is not None:
            earlier, length = answer.awaited_prefix
            if answer.awaits_prefix or length not in earlier.stops:  # else it ended before
                known = max(known, length)
        if shared - known >= _MIN_AWAITED:
            answer.awaited_prefix = reading, shared
            reading.stops.append(shared)
            self.keep_awaited([reading])

    def keep_awaited(self, read: Iterable[Answer]) -> None:
        """Keep the prefixes that others wait for, of prompts that were read so far by now."""
        for answer in read:
            for stop in sorted(answer.stops):
                if stop <= answer.prefill.position and answer.error is None:
                    answer.stops.remove(stop)
                    with _only_logged():
                        self._keep_beginning(answer, stop)

    def _keep_beginning(self, answer: Answer, length: int) -> None:
        """Keep a copy of what was read of a prompt, up to some length, if it can be cut there."""
        tokens, drafter = answer.request.prompt[:length], answer.decoder.drafter
        cache, position = answer.prefill.cache, answer.prefill.position
        _catch_up(cache, drafter)
        if length == position:
            cache.keep_states(length)
        if cache.reusable(position, length) == length:
            self.cache.keep(cache.reused(tokens, drafter, position), tokens, drafter)


def _catch_up(cache: SequenceCache, drafter: Drafter | None) -> None:
    """Give a drafter that reads the target's features those that it missed: they are not kept."""
    if drafter is not None and drafter.features.any:
        cache.catch_up(drafter)


@contextmanager
def _only_logged() -> Iterator[None]:
    """Context in which a drafter's failure keeps a text from later prompts, and ends nothing."""
    try:
        yield
    except DrafterError as error:
        LOG.warning("a text is not kept for later prompts: %s", error)
