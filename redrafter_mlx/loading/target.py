"""Loading a target: from its name to an mlx-lm model in memory."""

from __future__ import annotations

import shlex
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import cast

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.tokenizer_utils import TokenizerWrapper

from redrafter_mlx.checks import check_choice, check_quantize, plain
from redrafter_mlx.config import DType, KVQuantization
from redrafter_mlx.cpu.door import check_allocation
from redrafter_mlx.distributed.group import Ranks
from redrafter_mlx.distributed.mirror import Mirror, target_of
from redrafter_mlx.distributed.sharding import shard
from redrafter_mlx.errors import (
    BadInputError,
    DamagedFileError,
    ModelNotFoundError,
    RedrafterError,
    device_failure,
)
from redrafter_mlx.loading.supported import check_repository
from redrafter_mlx.runtime.device import MLX_PROCESS
from redrafter_mlx.target_model.fingerprint import nbytes_of
from redrafter_mlx.target_model.model import Target
from redrafter_mlx.target_model.source import TargetSource
from redrafter_mlx.weights import LOG, Progress
from redrafter_mlx.weights.fetching.resolve import LocalModel, find_local, resolve
from redrafter_mlx.weights.fit.machine import this_machine
from redrafter_mlx.weights.fit.needs import MOSTLY_EMBEDDING, check_load, stored_model
from redrafter_mlx.weights.gguf.header import parts_of
from redrafter_mlx.weights.gguf.load import load_gguf
from redrafter_mlx.weights.load_folder import load_folder
from redrafter_mlx.weights.precision import (
    Precision,
    convert,
    dequantise,
    packed_layers,
    stored_bits,
)
from redrafter_mlx.weights.quantised_cache import keep_quantised, quantised_file, use_quantised
from redrafter_mlx.weights.raw_model import RawModel
from redrafter_mlx.weights.registry import DEFAULT_MODEL
from redrafter_mlx.weights.text.chat_template import require_chat_template


@dataclass(frozen=True)
class LoadedTarget:
    """An mlx-lm model with its parameters evaluated, and its tokenizer.

    target: the model as it is called on trees
    mirror: sends the target's calls to the other ranks; None if this process runs alone
    """

    model: nn.Module
    target: Target
    tokenizer: TokenizerWrapper
    source: TargetSource
    mirror: Mirror | None = None

    @classmethod
    def of(
        cls,
        model: nn.Module,
        tokenizer: TokenizerWrapper,
        source: TargetSource,
        mirror: Mirror | None = None,
    ) -> LoadedTarget:
        """Make the target of a model in memory."""
        return cls(model, target_of(model, mirror, source.kv), tokenizer, source, mirror)


def load_target(
    name: str | Path | None = None,
    *,
    dtype: DType = "auto",
    quantize: int | None = None,
    kv_bits: int | None = None,
    quantized_kv_start: int = 0,
    offline: bool = False,
    progress: Progress | None = None,
    ranks: Ranks | None = None,
    chat_or: str | None = None,
    weights: bool = True,
) -> LoadedTarget:
    """Load a target, downloading its files first if they are missing.

    Args:
      name: a registry name, a Hub repository, a folder or a GGUF file; None is the default model
      dtype: the arithmetic, see weights/precision.py; auto is as stored on a GPU and float32 on
        a CPU
      quantize: 4 or 8 bits; a model that is already quantised to that many stays as it is
      kv_bits: 4 or 8: quantise the keys and values in caches to so many bits, in all layers that
        keep them of the whole text. Another target: its tokens differ from those of whole numbers
      quantized_kv_start: number of a text's first positions that `kv_bits` leaves as they are
      offline: use only files on this machine
      progress: reports downloads and their checks; None logs those that take long
      ranks: the ranks that share the target; None keeps all of it in this process
      chat_or: refuses a model without a chat template before its weights are read, with this
        advice; None loads it
      weights: False leaves a folder's weights on the disk: shapes are known, a call reads them
    Raises:
      RedrafterError: in one line: no such model, cannot be fetched, damaged, or not supported
    """
    MLX_PROCESS.check()
    check_choice("dtype", dtype, DType)
    quantize = cast("int | None", plain(quantize))
    check_quantize(quantize)
    kv = KVQuantization(kv_bits, quantized_kv_start)
    advise = LOG.warning if quantize is None else LOG.debug  # it advises to quantise
    if not weights and find_local(DEFAULT_MODEL if name is None else name) is None:
        raise ModelNotFoundError(
            f"{name} is not on this machine, and nothing is downloaded to describe it; "
            f"run: redrafter-mlx pull {shlex.quote(str(name))}"
        )
    local = resolve(
        name, offline=offline, progress=progress, advise=advise, check_listed=check_repository
    )
    try:
        if chat_or is not None:
            require_chat_template(local.path, local.name, chat_or)
        stored = stored_model(local.path) if quantize == 4 else None
        if stored is not None and stored.bits is None and stored.size.mostly_embedding:
            LOG.warning("%s in 4 bits: %s", local.name, MOSTLY_EMBEDDING)
        return read_target(local, dtype, quantize, kv, ranks, weights=weights)
    except DamagedFileError as error:
        if local.remedy is None:
            raise
        raise DamagedFileError(f"{error}; run: {local.remedy}") from error
    except OSError as error:
        raise DamagedFileError(f"{local.path} cannot be read: {error.strerror or error}") from error
    except MemoryError as error:
        raise BadInputError(f"{local.name} cannot be brought into memory: {error}") from error


def read_target(
    local: LocalModel,
    dtype: DType,
    quantize: int | None,
    kv: KVQuantization,
    ranks: Ranks | None,
    *,
    weights: bool,
) -> LoadedTarget:
    if local.path.is_file():
        # Its tensors are read at once; in memory they take at least as much as in the file.
        size = sum(part.stat().st_size for part in parts_of(local.path) if part.exists())
        check_load(local.name, local.path, size, this_machine())
        raw = load_gguf(local.path)
    else:
        raw = load_folder(local.path, local.name)
    with ThreadPoolExecutor(1) as beside:  # MLX and NumPy need no interpreter while they work
        tokenizer = beside.submit(raw.read_tokenizer)
        if weights:
            precision, target, mirror = _read_weights(local, raw, dtype, quantize, kv, ranks)
        else:
            precision, mirror = convert(raw.model, dtype, quantize, raw.stored), None
            target = _make_target(raw, local.path, None, kv)
    source = TargetSource(
        name=local.name,
        path=local.path,
        fingerprint=raw.fingerprint,
        model_type=raw.model_type,
        dtype=precision.dtype,
        bits=precision.bits,
        licence=local.entry.licence if local.entry else raw.licence,
        context_length=raw.context_length,
        earlier_fingerprint=raw.earlier_fingerprint,
        kv=kv,
    )
    return LoadedTarget(raw.model, target, tokenizer.result(), source, mirror)


def _make_target(raw: RawModel, path: Path, mirror: Mirror | None, kv: KVQuantization) -> Target:
    """Make the target, whose weights may still be on the disk.

    Raises:
      UnsupportedModelError: trees cannot be verified with this architecture
      DamagedFileError: the model cannot even be called, such as with a rotary base that is a text
    """
    try:
        return target_of(raw.model, mirror, kv)
    except RedrafterError:
        raise
    except Exception as error:  # architectures raise errors of any type on wrong settings
        text = f"{path} describes a model that cannot be called: {' '.join(str(error).split())}"
        raise DamagedFileError(f"{text:.300}") from error


def _read_weights(
    local: LocalModel,
    raw: RawModel,
    dtype: DType,
    quantize: int | None,
    kv: KVQuantization,
    ranks: Ranks | None,
) -> tuple[Precision, Target, Mirror | None]:
    """Bring the weights into memory, in the form that the options ask for.

    Before that, refuse what cannot be a target.
    """
    quantises = quantize is not None and stored_bits(raw.model) is None
    # NumPy takes whole layers, of which a rank wants only its share.
    packed = packed_layers(raw.model) if ranks is None else {}
    precision = convert(raw.model, dtype, quantize, raw.stored)
    kept = None
    if quantises:
        kept = quantised_file(local.path, raw.fingerprint, precision)
    is_kept = kept is not None and use_quantised(raw.model, kept)
    mirror = None
    if ranks is not None:
        sharing = shard(raw.model, raw.model_type, ranks.group)
        mirror = Mirror(ranks, sharing) if sharing and ranks.leads else None
    target = _make_target(raw, local.path, mirror, kv)
    size, shared = nbytes_of(raw.model), ranks is not None
    check_load(local.name, local.path, size, this_machine(), shared=shared)
    check_allocation(size)
    try:
        dequantise(raw.model, packed)
        mx.eval(raw.model.parameters())
    except RuntimeError as error:
        reason = device_failure(error) or " ".join(str(error).split())
        raise BadInputError(f"{local.name} cannot be brought into memory: {reason}") from error
    if kept is not None and not is_kept and ranks is None:
        keep_quantised(raw.model, kept)
    return precision, target, mirror
