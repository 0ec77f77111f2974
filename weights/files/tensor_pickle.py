"""Read a dictionary of tensors that PyTorch has pickled, without unpickling it.

A pickle is a program, which Python's unpickler runs. This module interprets only the few
instructions that PyTorch writes for named tensors, on a stack of plain values. It refuses any other
by name: nothing is imported, called or set. A hostile file can at most fill the stack, and
MAX_BYTES bounds that.
"""

from __future__ import annotations

import pickletools
from collections import Counter
from dataclasses import dataclass
from math import prod
from typing import TypeVar

T = TypeVar("T")

MAX_BYTES = 2**21
"""Maximum size of a pickle; PyTorch writes about 200 bytes per tensor."""

MAX_DIMENSIONS = 8

MAX_SHARING = 4
"""How many times a storage's distinct tensors may cover it in total; tied weights count once."""

STORAGES = {
    f"torch {kind}Storage": code
    for kind, code in (
        ("Half", "<f2"), ("BFloat16", "<u2"), ("Float", "<f4"), ("Double", "<f8"), ("Bool", "u1"),
        ("Long", "<i8"), ("Int", "<i4"), ("Short", "<i2"), ("Char", "i1"), ("Byte", "u1"),
    )
}  # fmt: skip
"""NumPy's code of the element type, by the name of a storage's type."""

_DICTIONARY = "collections OrderedDict"
_TENSOR = "torch._utils _rebuild_tensor_v2"
_GLOBALS = (_DICTIONARY, _TENSOR, *STORAGES)


class RefusedError(Exception):
    """A pickle holds anything but named tensors; `str(error)` gives the reason in a few words."""


@dataclass(frozen=True)
class Storage:
    """Contiguous numbers, stored in a separate member of the archive."""

    kind: str  # name of its type, a key of STORAGES
    key: str
    size: int  # in elements


@dataclass(frozen=True)
class TensorView:
    """A tensor: a view of a storage; offset and strides are in elements."""

    storage: Storage
    offset: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]

    @property
    def span(self) -> int:
        """Number of storage elements from the tensor's first to its last."""
        if 0 in self.shape:
            return 0
        return 1 + sum((n - 1) * by for n, by in zip(self.shape, self.strides, strict=True))


@dataclass(frozen=True)
class _Global:
    """A name that stands for a function or a class; it is never looked up."""

    name: str


_MARK = object()  # marks the start of a group of values on the stack


def read_views(data: bytes) -> dict[str, TensorView]:
    """Return the tensors of a pickled dictionary by name.

    Each lies within its storage, and the tensors of one storage cover it MAX_SHARING times at most.

    data: at most MAX_BYTES, checked by the caller

    Raises RefusedError for anything but a dictionary of tensors.
    """
    try:
        result = _run(data)
    except ValueError as error:  # from pickletools: cut off, or a malformed argument
        raise RefusedError(f"its list of tensors is damaged ({error!s:.80})") from None
    if not isinstance(result, dict):
        raise RefusedError("it holds no dictionary of tensors")
    views = {}
    for name, view in result.items():
        if not isinstance(view, TensorView):
            raise RefusedError(f"its entry {name!r:.80} is no tensor")
        views[name] = view
    _check_together(views)
    return views


def _run(data: bytes) -> object:
    """Interpret a pickle and return the value that it leaves on the stack.

    Dictionary keys must be strings: hashing nested tuples can take forever.
    """
    stack: list[object] = []
    memo: dict[object, object] = {}

    def take(count: int) -> tuple[object, ...]:
        """Pop `count` values off the stack, and return them in order."""
        taken = tuple(stack[-count:])
        if len(taken) < count or any(value is _MARK for value in taken):
            raise RefusedError("its list of tensors is damaged (a value is missing)")
        del stack[-count:]
        return taken

    def since_mark() -> tuple[object, ...]:
        taken: list[object] = []
        while stack:
            if (value := stack.pop()) is _MARK:
                return tuple(reversed(taken))
            taken.append(value)
        raise RefusedError("its list of tensors is damaged (a mark is missing)")

    for opcode, argument, _ in pickletools.genops(data):
        match opcode.name:
            case "PROTO":
                pass
            case "STOP":
                return take(1)[0]
            case "BINPUT" | "LONG_BINPUT":
                memo[argument] = take(1)[0]
                stack.append(memo[argument])
            case "BINGET" | "LONG_BINGET":
                if argument not in memo:
                    raise RefusedError(
                        "its list of tensors is damaged (it recalls what is not there)"
                    )
                stack.append(memo[argument])
            case "BININT" | "BININT1" | "BININT2" | "LONG1" | "BINUNICODE":
                stack.append(argument)
            case "NONE" | "NEWTRUE" | "NEWFALSE":
                stack.append({"NONE": None, "NEWTRUE": True, "NEWFALSE": False}[opcode.name])
            case "EMPTY_DICT" | "EMPTY_TUPLE":
                stack.append({} if opcode.name == "EMPTY_DICT" else ())
            case "MARK":
                stack.append(_MARK)
            case "TUPLE1" | "TUPLE2" | "TUPLE3":
                stack.append(take(int(opcode.name[-1])))
            case "TUPLE":
                stack.append(since_mark())
            case "SETITEM":
                stack.append(_with_items(*take(3)))
            case "SETITEMS":
                items = since_mark()
                stack.append(_with_items(*take(1), *items))
            case "GLOBAL":
                if argument not in _GLOBALS:
                    raise RefusedError(f"it asks for {_dotted(argument)!r}, which no tensor needs")
                stack.append(_Global(str(argument)))
            case "REDUCE":
                stack.append(_call(*take(2)))
            case "BINPERSID":
                stack.append(_storage(*take(1)))
            case "BUILD":  # sets attributes on a module's dictionary; they are dropped
                dictionary, attributes = take(2)
                _typed(attributes, dict)
                stack.append(_typed(dictionary, dict))
            case other:
                raise RefusedError(f"it asks for {other}, which no tensor needs")
    raise RefusedError("its list of tensors has no end")


def _dotted(name: object) -> str:
    return str(name).replace(" ", ".")[:80]


def _call(function: object, arguments: object) -> object:
    """Interpret a call that PyTorch writes; return the dictionary or tensor that it creates."""
    name, given = _typed(function, _Global).name, _typed(arguments, tuple)
    if name == _DICTIONARY and not given:
        return {}
    if name != _TENSOR or len(given) not in (6, 7):
        raise RefusedError(f"it calls {_dotted(name)} with other arguments than PyTorch")
    storage, offset = _typed(given[0], Storage), _count(given[1])
    view = TensorView(storage, offset, shape=_counts(given[2]), strides=_counts(given[3]))
    if len(view.shape) != len(view.strides):
        raise RefusedError("a tensor has other strides than dimensions")
    if offset + view.span > storage.size:
        raise RefusedError("a tensor reaches beyond its storage")
    if prod(view.shape) > view.span:
        raise RefusedError("a tensor has elements that lie over one another")
    return view


def _storage(persistent_id: object) -> Storage:
    given = _typed(persistent_id, tuple)
    if len(given) != 5 or given[0] != "storage":
        raise RefusedError("it refers to something that is no storage")
    kind = _typed(given[1], _Global).name
    if kind not in STORAGES:
        raise RefusedError(f"a storage is of type {_dotted(kind)}")
    return Storage(kind, _typed(given[2], str), _count(given[4]))


def _with_items(dictionary: object, *items: object) -> dict[str, object]:
    """Add items to a dictionary and return it: a key, its value, the next key, and so on."""
    into: dict[str, object] = _typed(dictionary, dict)
    if len(items) % 2:
        raise RefusedError("its list of tensors is damaged (a key has no value)")
    for key, value in zip(items[::2], items[1::2], strict=True):
        name = _typed(key, str)
        if name in into:
            raise RefusedError(f"it names {name!r:.80} twice")
        into[name] = value
    return into


def _counts(value: object) -> tuple[int, ...]:
    counts = _typed(value, tuple)
    if len(counts) > MAX_DIMENSIONS:
        raise RefusedError(f"a tensor has more than {MAX_DIMENSIONS} dimensions")
    return tuple(_count(one) for one in counts)


def _count(value: object) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < 2**62:
        raise RefusedError("a size, stride or offset is no count")
    return value


def _typed(value: object, kind: type[T]) -> T:
    if not isinstance(value, kind):
        raise RefusedError(f"it has a {type(value).__name__} where a {kind.__name__} belongs")
    return value


def _check_together(views: dict[str, TensorView]) -> None:
    """Refuse storages that contradict each other, and a small one that many large tensors share."""
    storages: dict[str, Storage] = {}
    spans: Counter[str] = Counter()
    for view in set(views.values()):
        storage = view.storage
        if storages.setdefault(storage.key, storage) != storage:
            raise RefusedError(f"storage {storage.key!r:.80} has two types or sizes")
        spans[storage.key] += view.span
        if spans[storage.key] > MAX_SHARING * storage.size:
            raise RefusedError(f"too many tensors share storage {storage.key!r:.80}")
