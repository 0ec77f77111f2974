"""The target with each drafter that is measured, and what they cost on this machine."""

from __future__ import annotations

from collections.abc import Callable

import mlx.core as mx
import numpy as np

from redrafter_mlx.bench.measure.runner import check_draft_model
from redrafter_mlx.bench.options import Activity, BenchOptions, Loading
from redrafter_mlx.distributed.collectives import seconds_of_exchange
from redrafter_mlx.drafting.names import TRAINED, parse
from redrafter_mlx.engine.engine import Redrafter
from redrafter_mlx.engine.options import EngineOptions
from redrafter_mlx.errors import BadInputError, BusyError
from redrafter_mlx.loading.drafter import prepare_drafter
from redrafter_mlx.loading.load import draft_with, load
from redrafter_mlx.loading.prepared import PreparedDrafter
from redrafter_mlx.loading.target import LoadedTarget, load_target
from redrafter_mlx.runtime.processes.launched import launched_rank

RANDOM = "random"
"""Name of the drafter with untrained weights, which measures the cost of useless drafts."""

_TRIALS = 15  # number of times that the exchange between ranks is timed

Load = Callable[[BenchOptions, Loading, str, EngineOptions], Redrafter]
"""Loads the target of these options with the drafter of this name."""


def load_model(
    options: BenchOptions, loading: Loading, drafter: str, engine: EngineOptions
) -> Redrafter:
    return load(
        options.model, drafter, dtype=loading.dtype, quantize=loading.quantize,
        kv_bits=options.kv_bits, quantized_kv_start=options.quantized_kv_start,
        drafter_bits=options.drafter_bits, draft_vocab=options.draft_vocab, offline=options.offline,
        engine=engine,
        chat_or=None if options.raw else "set raw to ask the questions as plain text",
    )  # fmt: skip


def load_drafters(
    options: BenchOptions, loading: Loading, load: Load, activity: Activity
) -> dict[str | None, Redrafter]:
    """Load the target with each drafter of the options, by name; a single drafter's key is None."""
    first, *others = [name for name in options.drafters if name != RANDOM] or [TRAINED]
    asked, offline = (options.drafter_bits, options.draft_vocab), options.offline
    engine = EngineOptions(max_batch=max([EngineOptions.max_batch, *options.batch_sizes]))
    # Only rank 0 needs the files of drafters.
    named = {} if launched_rank() else {n: prepare_drafter(parse(n), *asked) for n in others}
    loaded = load(options, loading, first, engine)
    by_name = {first: loaded} | {
        name: draft_again(loaded, other, offline, activity) for name, other in named.items()
    }
    if RANDOM in options.drafters:
        untrained = next(filter(None, map(untrain, by_name.values())), None)
        if untrained is None:
            trained = prepare_drafter(parse(TRAINED), *asked)
            untrained = untrain(draft_again(loaded, trained, offline, activity))
        assert untrained is not None, "every form that is trained has weights"
        by_name[RANDOM] = untrained
    found: dict[str | None, Redrafter] = {name: by_name[name] for name in options.drafters}
    for redrafter in found.values():
        if options.ignore_eos:
            redrafter.tokenizer.eos_token_ids = ()  # read by mlx-lm's loops, and by ours
        if redrafter.drafting is None and (options.widths or options.lengths):
            raise BadInputError(
                redrafter.drafter_note
                or "--beam-width and --beam-length need a drafter; there is none"
            )
    return {None: next(iter(found.values()))} if len(found) == 1 else found


def measure_machine(redrafter: Redrafter, activity: Activity) -> list[str]:
    """Measure the cost curves now, so that auto-tuning does not do it between timed answers.

    Returns a note if that failed: answers go on with assumed costs, and correct them.
    """
    if redrafter.tuning is None or redrafter.tuning.measured:
        return []
    with activity("measuring this machine", "{}%".format) as progress:
        try:
            redrafter.measure(lambda share: progress("calls", int(100 * share), 100))
        except BusyError as error:
            return [str(error)]
    return []


def exchange_note(redrafter: Redrafter) -> str | None:
    """Time the exchange between ranks in one call; None unless the ranks share the tensors."""
    mirror, target = redrafter.mirror, redrafter.target
    if mirror is None or mirror.sharing != "tensor":
        return None
    cases = [(rows, command_only) for rows in (1, 8) for command_only in (False, True)]
    with target.lock:
        times = [
            [seconds_of_exchange(mirror, target, *case) for case in cases] for _ in range(_TRIALS)
        ]
    one, command, eight, command_eight = 1000 * np.median(times, axis=0)
    return (
        f"{mirror.ranks.size} ranks: the exchange of a call takes {one:.2f} ms with 1 row and "
        f"{eight:.2f} ms with 8; of these, the command alone takes {command:.2f} and "
        f"{command_eight:.2f} ms"
    )


def load_draft_model(
    options: BenchOptions, loaded: Redrafter, activity: Activity
) -> LoadedTarget | None:
    """Load the draft model for mlx-lm's speculative decoding; None without `--draft-model`."""
    if options.draft_model is None:
        return None
    with activity(f"loading {options.draft_model}", None) as progress:
        draft = load_target(options.draft_model, offline=options.offline, progress=progress)
    vocabulary = int(draft.model(mx.array([[0]])).shape[-1])
    check_draft_model(loaded, vocabulary, options.draft_model)
    return draft


def draft_again(
    loaded: Redrafter, drafter: PreparedDrafter, offline: bool, activity: Activity
) -> Redrafter:
    """Return the same target with another drafter, which is downloaded unless `offline`."""
    assert loaded.source is not None, "was loaded by name"
    again = LoadedTarget.of(loaded.model, loaded.tokenizer, loaded.source, loaded.mirror)
    with activity("loading another drafter", None) as progress:
        return draft_with(
            drafter, again,
            offline=offline, progress=progress, engine=loaded.limits, thread=loaded.thread,
        )  # fmt: skip


def untrain(loaded: Redrafter) -> Redrafter | None:
    """Return the same target with the drafter untrained; None if it has no untrained form."""
    drafter = None if loaded.drafter is None else loaded.drafter.untrained()
    if drafter is None:
        return None
    redrafter = Redrafter(
        loaded.model, loaded.tokenizer, drafter, source=loaded.source, mirror=loaded.mirror,
        engine=loaded.limits, thread=loaded.thread,
    )  # fmt: skip
    redrafter.warm_up()
    return redrafter
