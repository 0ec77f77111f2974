"""PyTorch's files: tensors are read unchanged, and nothing else is ever executed."""

from __future__ import annotations

import io
import os
import pickle
import struct
import sys
import tracemalloc
import zipfile
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest
from torch_files import (
    ORDERED_DICT,
    REBUILD,
    START,
    STOP,
    Flat,
    archive,
    counts,
    dictionary,
    group,
    integer,
    storage,
    tensor,
    text,
    write_torch_file,
)

from redrafter_mlx.errors import DamagedFileError
from redrafter_mlx.weights.files.pickles import open_torch_file
from redrafter_mlx.weights.files.tensors import open_tensors

FLAT = Flat()


def test_every_type_is_read_as_it_was_written(tmp_path: Path) -> None:
    numbers = mx.array([[0.5, -2.0, 3.0], [4.0, 0.0, 1.0]])
    floating = {str(t): numbers.astype(t) for t in (mx.float16, mx.bfloat16, mx.float32)}
    whole = {str(t): numbers.astype(t) for t in (mx.int64, mx.int32, mx.int16, mx.int8, mx.bool_)}
    given = {**floating, **whole, "scalar": mx.array(7, mx.uint8), "none": mx.zeros((0, 3))}
    file = open_torch_file(write_torch_file(tmp_path / "w.bin", given))
    assert {name: view.shape for name, view in file.views.items()} == {
        name: array.shape for name, array in given.items()
    }
    for name, array in file.read().items():
        assert array.dtype == given[name].dtype
        assert mx.array_equal(array, given[name]), name


def test_doubles_become_floats(tmp_path: Path) -> None:
    given = np.array([1.5, -2.0])
    pickled = dictionary({"w": tensor(storage("Double", "0", 2), 0, (2,), (1,))})
    array = open_torch_file(archive(tmp_path / "w.bin", pickled, {"0": given.tobytes()})).read()
    assert array["w"].tolist() == [1.5, -2.0]
    assert array["w"].dtype == mx.float32


def test_views_of_one_storage_are_read_by_offset_and_strides(tmp_path: Path) -> None:
    views = {
        "rows": tensor(FLAT.where, 3, (3, 3), (3, 1)),
        "transposed": tensor(FLAT.where, 0, (3, 4), (1, 3)),
        "column": tensor(FLAT.where, 1, (4,), (3,)),
        "again": tensor(FLAT.where, 3, (3, 3), (3, 1)),
    }
    file = archive(tmp_path / "w.bin", dictionary(views), {"0": FLAT.content})
    got = open_torch_file(file).read()
    flat = np.arange(12.0)
    assert mx.array_equal(got["rows"], mx.array(flat[3:].reshape(3, 3)))
    assert mx.array_equal(got["transposed"], mx.array(flat.reshape(4, 3).T))
    assert got["column"].tolist() == [1, 4, 7, 10]
    assert got["again"] is got["rows"], "tied weights are one array"


def test_what_a_module_adds_to_its_dictionary_is_passed_over(tmp_path: Path) -> None:
    """`state_dict` has an attribute, and repeated values come from the memo."""
    body = ORDERED_DICT + b")Rq\x00(" + text("w") + b"q\x01" + tensor(FLAT.where, 0, (2,), (1,))
    body += text("v") + tensor(FLAT.where, 2, (2,), (1,)) + b"u"
    version = b"}" + text("version") + b"K\x01s"
    metadata = b"}" + text("_metadata") + b"}" + text("") + version + b"ss"
    pickled = START + body + metadata + b"b" + STOP
    got = open_torch_file(archive(tmp_path / "w.bin", pickled, {"0": FLAT.content})).read()
    assert got["w"].tolist() == [0, 1]
    assert got["v"].tolist() == [2, 3]


def test_a_folder_without_safetensors_is_read_from_pytorchs_files(tmp_path: Path) -> None:
    ones = {"a": mx.ones((2, 3))}
    write_torch_file(tmp_path / "training_state.pt", {"step": mx.ones(1)})
    write_torch_file(tmp_path / "medusa_lm_head.pt", ones)
    assert open_tensors(tmp_path).path.name == "medusa_lm_head.pt"
    write_torch_file(tmp_path / "pytorch_model.bin", ones)
    stored = open_tensors(tmp_path)
    assert stored.path.name == "pytorch_model.bin"
    assert stored.shapes == {"a": (2, 3)}
    assert mx.array_equal(stored.read()["a"], ones["a"])
    mx.save_safetensors(str(tmp_path / "model.safetensors"), ones)
    assert open_tensors(tmp_path).path.name == "model.safetensors"


class Command:
    """A hostile object: unpickling it would run a command."""

    def __reduce__(self) -> tuple[object, tuple[str]]:
        return os.system, ("touch was_here",)


def one(pickled: bytes) -> bytes:
    """Return a dictionary whose only value is made by a pickle."""
    return dictionary({"w": pickled})


def view(offset: int, shape: tuple[int, ...], strides: tuple[int, ...]) -> bytes:
    return one(tensor(FLAT.where, offset, shape, strides))


def rebuilt(*arguments: bytes) -> bytes:
    return one(REBUILD + group(*arguments) + b"R")


DEEP = b")" + b"\x85" * 100_000
DOUBLED = b")" + b"".join(b"q%ch%c\x86" % (i, i) for i in range(200))
"""A pair of the same pair of the same pair: hashing or printing it would take forever."""

PICKLES = {
    "os.system": (pickle.dumps(Command(), 2), "posix.system"),
    "os.system, old text opcodes": (pickle.dumps(Command(), 0), "posix.system"),
    "os.system, protocol 4": (pickle.dumps(Command(), 4), "FRAME|STACK_GLOBAL|BINUNICODE"),
    "os.system as an instance": (START + b"(" + text("x") + b"ios\nsystem\n.", "INST"),
    "os.system as an object": (START + b"(cos\nsystem\n" + text("x") + b"o.", "os.system"),
    "a new object": (START + ORDERED_DICT + b")\x81.", "NEWOBJ"),
    "eval": (one(b"c__builtin__\neval\n" + group(text("1")) + b"R"), "__builtin__.eval"),
    "an admitted name with a dot": (one(b"ctorch._utils\n_rebuild_tensor_v2.x\n"), "v2.x"),
    "a parameter": (one(b"ctorch._utils\n_rebuild_parameter\n"), "_rebuild_parameter"),
    "the extension registry": (START + b"\x82\x01.", "EXT1"),
    "a persistent id in text": (START + b"Pstorage\n.", "PERSID"),
    "a storage that is no tuple": (one(text("storage") + b"Q"), "str where a tuple"),
    "a storage of another kind": (
        one(group(text("module"), *[text("x")] * 4) + b"Q"), "no storage"),
    "a storage of four parts": (one(group(text("storage"), *[text("x")] * 3) + b"Q"), "no storage"),
    "a storage of dictionaries": (
        one(group(text("storage"), ORDERED_DICT, text("0"), text("cpu"), integer(1)) + b"Q"),
        "type collections.OrderedDict"),
    "a storage of negative size": (one(storage("Float", "0", -12)), "no count"),
    "a storage of 10^18 numbers": (
        one(tensor(storage("Float", "0", 10**18), 0, (10**9, 10**9), (10**9, 1))), "48 bytes, not"),
    "a storage that is not there": (
        one(tensor(storage("Float", "1", 12), 0, (2,), (1,))), "storage '1' is missing"),
    "a storage elsewhere": (
        one(tensor(storage("Float", "../version", 12), 0, (2,), (1,))), "is missing"),
    "one storage of two types": (
        dictionary({"a": tensor(FLAT.where, 0, (2,), (1,)),
                    "b": tensor(storage("Int", "0", 12), 0, (2,), (1,))}), "two types"),
    "a negative offset": (view(-1, (2,), (1,)), "no count"),
    "a negative stride": (view(11, (2,), (-1,)), "no count"),
    "a negative shape": (view(0, (-2,), (1,)), "no count"),
    "a shape of truth values": (
        rebuilt(FLAT.where, integer(0), group(b"\x88"), counts((1,)), b"\x89", b"}"), "no count"),
    "beyond its storage by offset": (view(11, (2,), (1,)), "beyond its storage"),
    "beyond its storage by stride": (view(0, (2,), (12,)), "beyond its storage"),
    "beyond its storage by 10^18": (view(0, (10**18,), (1,)), "beyond its storage"),
    "beyond its storage by 2^300": (view(0, (2**300,), (0,)), "no count"),
    "one number repeated 10^12 times": (view(0, (10**6, 10**6), (0, 0)), "over one another"),
    "other strides than dimensions": (view(0, (2, 2), (1,)), "other strides"),
    "a thousand dimensions": (view(0, (1,) * 1000, (1,) * 1000), "more than 8 dimensions"),
    "a storage covered a hundred times": (
        dictionary({str(i): tensor(FLAT.where, 0, (12 - i, 1), (1, 1)) for i in range(9)}),
        "too many tensors share"),
    "a tensor of too few arguments": (rebuilt(FLAT.where), "other arguments"),
    "a tensor of a number": (
        rebuilt(integer(1), integer(0), counts((1,)), counts((1,)), b"\x89", b"}"),
        "int where a Storage"),
    "a dictionary with arguments": (one(ORDERED_DICT + group(group()) + b"R"), "other arguments"),
    "calling a tensor": (one(tensor(FLAT.where, 0, (1,), (1,)) + b")R"), "TensorView where"),
    "calling a type of storage": (one(b"ctorch\nFloatStorage\n)R"), "torch.FloatStorage with"),
    "attributes of a tensor": (
        one(tensor(FLAT.where, 0, (1,), (1,)) + b"}" + text("a") + b"K\x01sb"), "TensorView where"),
    "attributes of a function": (one(REBUILD + b"}b"), "_Global where"),
    "a name twice": (
        START + b"}(" + 2 * (text("w") + tensor(FLAT.where, 0, (1,), (1,))) + b"u.", "'w' twice"),
    "a name that is no string": (START + b"}K\x01K\x02s.", "int where a str"),
    "an entry that is no tensor": (one(integer(3)), "entry 'w' is no tensor"),
    "a dictionary in a dictionary": (one(b"}"), "entry 'w' is no tensor"),
    "no dictionary": (START + b"N.", "no dictionary"),
    "a list": (START + b"]" + b"N" + b"a.", "EMPTY_LIST"),
    "a set": (START + b"\x8f.", "EMPTY_SET"),
    "nested a hundred thousand deep": (one(DEEP), "entry 'w' is no tensor"),
    "doubled two hundred times": (one(DOUBLED), "entry 'w' is no tensor"),
    "doubled two hundred times, as a name": (START + b"}" + DOUBLED + b"Ns.", "tuple where a str"),
    "a memo of 2^32": (START + b"Nr\xff\xff\xff\xff" + STOP, "no dictionary"),
    "recalled from nowhere": (START + b"j\xff\xff\xff\xff" + STOP, "is not there"),
    "a string of 4 GB": (START + b"X\xff\xff\xff\xff" + b"abc" + STOP, "damaged"),
    "a number of 255 bytes for a size": (
        one(storage("Float", "0", 2**2000)), "no count"),
    "taken from an empty stack": (START + b"R" + STOP, "a value is missing"),
    "taken from below a mark": (START + b"N(R" + STOP, "a value is missing"),
    "no mark": (START + b"t" + STOP, "a mark is missing"),
    "a key without a value": (START + b"}(" + text("w") + b"u.", "no value"),
    "items without a dictionary": (START + b"N(" + text("w") + b"Nu.", "NoneType where a dict"),
    "no end": (START + b"N", "damaged"),
    "nothing": (b"", "damaged"),
    "no pickle": (b"hello", "damaged"),
    "3 MB of nothing": (START + b"N" * 3_000_000 + STOP, "larger than"),
}  # fmt: skip


@pytest.mark.parametrize("what", PICKLES)
def test_a_hostile_pickle_is_refused_in_one_line_and_nothing_is_done(
    what: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pickled, message = PICKLES[what]
    monkeypatch.chdir(tmp_path)
    file = archive(tmp_path / "w.bin", pickled, {"0": FLAT.content})
    refused(file, message)
    assert not (tmp_path / "was_here").exists()


def refused(file: Path, message: str) -> None:
    """Check that the file is refused by name, in one short line, with little memory and few calls.

    Every byte of a pickle may be an instruction, which takes a few calls of Python.
    """
    calls = 0

    def count(*_: object) -> None:
        nonlocal calls
        calls += 1

    tracemalloc.start()
    sys.setprofile(count)
    try:
        with pytest.raises(DamagedFileError, match=message) as caught:
            open_torch_file(file)
    finally:
        sys.setprofile(None)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert str(file) in str(caught.value)
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < len(str(file)) + 200
    assert peak < 200e6
    assert calls < 10_000 + 30 * file.stat().st_size


def good(path: Path) -> Path:
    return archive(path, view(0, (12,), (1,)), {"0": FLAT.content})


def changed(path: Path, old: bytes, new: bytes) -> None:
    """Write a good file with these bytes replaced wherever they occur."""
    data = good(path).read_bytes()
    assert old in data
    path.write_bytes(data.replace(old, new))


def compressed(path: Path) -> None:
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as out:
        out.writestr("archive/data.pkl", one(tensor(storage("Float", "0", 2**22), 0, (2,), (1,))))
        out.writestr("archive/data/0", bytes(2**24))


def with_members(path: Path, *names: str) -> None:
    good(path)
    with zipfile.ZipFile(path, "a") as out:
        for name in names:
            out.writestr(name, b"x")


def overlapping(path: Path) -> None:
    """Write two storages that the archive's directory places at the same bytes."""
    views = {k: tensor(storage("Float", k, 12), 0, (12,), (1,)) for k in ("0", "1")}
    archive(path, dictionary(views), {"0": FLAT.content, "1": FLAT.content})
    with zipfile.ZipFile(path) as whole:
        first, second = (whole.getinfo(f"archive/data/{k}").header_offset for k in ("0", "1"))
    data = path.read_bytes()
    listed = data.rindex(struct.pack("<I", second) + b"archive/data/1")
    path.write_bytes(data[:listed] + struct.pack("<I", first) + data[listed + 4 :])


def beyond_the_end(path: Path) -> None:
    """Write a 4 MB storage, by the archive's directory, into a file of about 500 bytes."""
    pickled = one(tensor(storage("Float", "0", 2**20), 0, (2,), (1,)))
    data = archive(path, pickled, {"0": FLAT.content}).read_bytes()
    sizes = data.rindex(b"archive/data/0") - 26
    path.write_bytes(data[:sizes] + struct.pack("<II", 2**22, 2**22) + data[sizes + 8 :])


def legacy(path: Path) -> None:
    out = io.BytesIO()
    for part in (0x1950A86A20F9469CFC6C, 1001, {"little_endian": True}, Command()):
        pickle.dump(part, out, 2)
    path.write_bytes(out.getvalue())


ZIPS = {
    "PyTorch before 1.6": (legacy, "no zip archive"),
    "empty": (lambda p: p.write_bytes(b""), "no zip archive"),
    "a pickle alone": (lambda p: p.write_bytes(view(0, (2,), (1,))), "no zip archive"),
    "truncated by a byte": (lambda p: p.write_bytes(good(p).read_bytes()[:-1]), "truncated"),
    "truncated by half": (lambda p: p.write_bytes(good(p).read_bytes()[:200]), "truncated"),
    "compressed": (compressed, "compressed"),
    "encrypted": (lambda p: changed(p, b"PK\1\2\x14\3\x14\0\0", b"PK\1\2\x14\3\x14\0\1"),
                  "encrypted"),
    "big-endian": (lambda p: archive(p, view(0, (12,), (1,)), {"0": FLAT.content}, b"big"),
                   "little-endian"),
    "two pickles": (lambda p: with_members(p, "other/data.pkl"), "or several"),
    "no pickle": (lambda p: changed(p, b"data.pkl", b"data.pkx"), "no NAME/data.pkl"),
    "a storage of other size": (
        lambda p: archive(p, view(0, (12,), (1,)), {"0": FLAT.content[:-4]}), "44 bytes, not 48"),
    "a storage beyond the end": (beyond_the_end, "truncated"),
    "a member that is not there": (lambda p: changed(p, b"PK\3\4", b"PK\3\5"), "damaged"),
    "storages over one another": (overlapping, "damaged or truncated"),
}  # fmt: skip


@pytest.mark.parametrize("what", ZIPS)
def test_a_hostile_archive_is_refused_in_one_line(what: str, tmp_path: Path) -> None:
    make, message = ZIPS[what]
    path = tmp_path / "w.bin"
    make(path)  # type: ignore[operator]
    refused(path, message)


def test_a_tensors_name_cannot_drive_a_terminal(tmp_path: Path) -> None:
    write_torch_file(tmp_path / "pytorch_model.bin", {"\x1b[2J": mx.ones(1)})
    with pytest.raises(DamagedFileError, match=r"\\x1b"):
        open_tensors(tmp_path)


def test_a_pipe_is_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pytorch_model.bin")
    with pytest.raises(DamagedFileError, match="is missing"):
        open_tensors(tmp_path)
