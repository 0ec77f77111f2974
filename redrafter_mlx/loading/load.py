"""From names to a `Redrafter` that is ready to answer."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import NoneType

from redrafter_mlx.config import DType
from redrafter_mlx.distributed.facts import facts_of
from redrafter_mlx.distributed.follower import follow
from redrafter_mlx.distributed.group import join_ranks
from redrafter_mlx.drafting.interface import Bindable
from redrafter_mlx.drafting.names import AUTO, parse
from redrafter_mlx.drafting.untrained.host_drafters import host_drafters
from redrafter_mlx.drafting.untrained.successors import OwnSuccessors, table_of
from redrafter_mlx.engine.engine import Redrafter
from redrafter_mlx.engine.options import EngineOptions
from redrafter_mlx.engine.thread import EngineThread
from redrafter_mlx.errors import BadInputError
from redrafter_mlx.learning.keeper import TextKeeper
from redrafter_mlx.loading.drafter import open_drafter, prepare_drafter
from redrafter_mlx.loading.prepared import PreparedDrafter
from redrafter_mlx.loading.target import LoadedTarget, load_target
from redrafter_mlx.runtime.device import memory_limit
from redrafter_mlx.target_model.fingerprint import nbytes_of
from redrafter_mlx.weights import Progress


def load(
    model: str | Path | None = None,
    drafter: str | Path | Bindable | None = AUTO,
    *,
    dtype: DType = "auto",
    quantize: int | None = None,
    kv_bits: int | None = None,
    quantized_kv_start: int = 0,
    drafter_bits: int | None = None,
    draft_vocab: int | None = None,
    offline: bool = False,
    progress: Progress | None = None,
    engine: EngineOptions | None = None,
    warm_up: bool = True,
    chat_or: str | None = None,
    learn: bool = False,
    thread: EngineThread | None = None,
) -> Redrafter:
    """Load a target with its drafter, warmed up and ready to answer.

    A thread that loads and ends before the process does has to call `mx.clear_streams()` last: MLX
    may abort the process otherwise.

    Under `mlx.launch` all ranks share the target. Rank 0 returns it. On the other ranks this never
    returns: they repeat rank 0's calls, and end with it.

    Args:
      drafter: "trained": the drafter that was trained for this target; "mtp": the head in the
        target's own files; a drafter's folder or Hub repository; the name of a smaller model with
        the same tokenizer; "FILE.py:CLASS" or an object: the caller's own drafter;
        "successors": what the target says after single tokens, which takes some time at first;
        "lookup": copies of the text; "earlier": copies of earlier texts; "A+B": both;
        "A+tree:NAME": along a static tree; "auto": lookup and earlier texts, together with the
        trained drafter, else the target's own head or a published drafter, if there is one on this
        machine, else the successors that are known, of which more become known while no answer
        runs; None or "none" decodes plainly
      drafter_bits: quantise the drafter's weights to 4 or 8 bits; 16 leaves them as stored; None
        gives them the bits of the target's in memory
      draft_vocab: a drafter that scores all tokens with the target's output layer, as an MTP head
        does, drafts only so many: those that the model's kept answers hold most often, then those
        of the lowest ids. It reads only their rows; None is all tokens
      model, dtype, quantize, kv_bits, quantized_kv_start, offline, progress, chat_or: as in
        `load_target`
      engine: how many answers share the device, and how they take turns
      warm_up: run every kernel once; otherwise the first answer does, which takes longer then
      learn: keep answers on this machine, for `redrafter-mlx learn` to train the drafter on; the
        first time, the log says where. Requests with `learn=False` are left out
      thread: computes for other models, too; None gives this one a thread of its own
    Raises:
      RedrafterError: in one line, for every error that a user can cause
    """
    if not isinstance(engine, (EngineOptions, NoneType)):
        raise BadInputError(f"engine is {engine!r:.80}; give EngineOptions")
    ranks = join_ranks()
    leads = ranks is None or ranks.leads
    named = drafter if leads else None  # only rank 0 has its files
    prepared = prepare_drafter(
        parse(named) if named is None or isinstance(named, (str, Path)) else named,
        drafter_bits,
        draft_vocab,
    )
    loaded = load_target(
        model,
        dtype=dtype,
        quantize=quantize,
        kv_bits=kv_bits,
        quantized_kv_start=quantized_kv_start,
        offline=offline,
        progress=progress,
        ranks=ranks,
        chat_or=chat_or,
    )
    if ranks is not None:
        size = nbytes_of(loaded.model)
        free = ranks.agree(facts_of(loaded.source, drafter), memory_limit() - size)
        if not leads:
            follow(loaded.target, ranks)
        engine = engine or EngineOptions()
        if engine.memory_bytes is None:  # caches grow alike on all ranks
            engine = replace(engine, memory_bytes=max(size + free, 1))
    return draft_with(
        prepared,
        loaded,
        offline=offline,
        progress=progress,
        engine=engine,
        thread=thread,
        warm_up=warm_up,
        learn=learn,
    )


def draft_with(
    drafter: PreparedDrafter,
    loaded: LoadedTarget,
    *,
    offline: bool = False,
    progress: Progress | None = None,
    engine: EngineOptions | None = None,
    thread: EngineThread | None = None,
    warm_up: bool = True,
    learn: bool = False,
) -> Redrafter:
    """Find the drafter for a target in memory, check, and warm up: the second half of `load`.

    thread: computes for other engines, too
    """
    keeper, source = None, loaded.source
    if learn:
        keeper = TextKeeper(source.name, source.fingerprint, loaded.tokenizer.decode)
    table = None
    if drafter.auto and loaded.mirror is None:
        table = table_of(loaded.target, loaded.tokenizer)
    known = OwnSuccessors(table) if table is not None and table.known else None
    opened, note = open_drafter(drafter, loaded, known, offline=offline, progress=progress)
    alone = opened is None or isinstance(opened, OwnSuccessors)  # which are right less often
    redrafter = Redrafter(
        loaded.model,
        loaded.tokenizer,
        opened,
        host_drafters=host_drafters(drafter.host, beside=not alone),
        source=source,
        drafter_note=note,
        engine=engine,
        target=loaded.target,
        mirror=loaded.mirror,
        thread=thread,
        keeper=keeper,
        prepare=table.grow if alone and table and not table.complete else None,
    )
    redrafter.check()
    if warm_up:
        redrafter.warm_up()
    return redrafter
