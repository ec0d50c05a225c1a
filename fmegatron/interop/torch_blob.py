"""Tensors and plain objects inside torch.save's zip archives, read without executing anything.

A DCP file is such archives one after another; each is a zip with `data.pkl` (what the tensor looks like) and `data/N`
(its bytes, stored as they are). The pickle is read by `inert.load`, and the bytes by position: so a few rows of a shard
cost a few rows, which torch.load(weights_only=True) cannot do, and there is no unpickler to be fooled.
"""

from __future__ import annotations

import io
import math
import os
import zipfile
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from fmegatron.checkpoint import CheckpointError
from fmegatron.files import disk
from fmegatron.interop.inert import Global, Persistent, Record, UnsafePickle, describe, load
from fmegatron.layout import boxes

_STORAGES = (
    ("torch.FloatStorage", torch.float32),
    ("torch.DoubleStorage", torch.float64),
    ("torch.HalfStorage", torch.float16),
    ("torch.BFloat16Storage", torch.bfloat16),
    ("torch.ByteStorage", torch.uint8),
    ("torch.CharStorage", torch.int8),
    ("torch.ShortStorage", torch.int16),
    ("torch.IntStorage", torch.int32),
    ("torch.LongStorage", torch.int64),
    ("torch.BoolStorage", torch.bool),
    ("torch.ComplexFloatStorage", torch.complex64),
    ("torch.ComplexDoubleStorage", torch.complex128),
    ("torch.storage.UntypedStorage", torch.uint8),
)
_TENSOR_GLOBALS = frozenset(
    {
        "torch._utils._rebuild_tensor_v2",
        "torch._utils._rebuild_tensor_v3",
        "torch._utils._rebuild_parameter",
        "collections.OrderedDict",
        "torch.Size",
        *(name for name, _ in _STORAGES),
    }
)
_OBJECT_GLOBALS = _TENSOR_GLOBALS | {"argparse.Namespace", "torch.device"}
_MOST_DEPTH = 100
_MOST_EXPANDED_BYTES = 1 << 20  # of a tensor whose elements share stored bytes, as those of `x.expand(...)` do
_MOST_PICKLE_BYTES = 256 << 20  # of data.pkl
Read = Callable[[int, int], bytes]  # (how many bytes, from where) -> the bytes


@dataclass(frozen=True)
class Blob:
    """A tensor in a file: its elements are `offset` + strides elements into the bytes [start, start + nbytes)."""

    start: int
    nbytes: int
    crc: int
    dtype: torch.dtype
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    offset: int

    @property
    def is_plain(self) -> bool:
        """Whether the elements are the bytes, row by row."""
        whole = math.prod(self.shape) * self.dtype.itemsize == self.nbytes
        return whole and self.offset == 0 and (self.strides == boxes.row_major_strides(self.shape) or self.nbytes == 0)


def dtype_from_global(name: str) -> torch.dtype | None:
    """The dtype that "torch.bfloat16" names, None when it is not the name of a dtype."""
    dtype = getattr(torch, name.removeprefix("torch."), None) if name.startswith("torch.") else None
    return dtype if isinstance(dtype, torch.dtype) else None


def open_tensor(file: int, offset: int, length: int, where: str) -> Blob:
    """The tensor archived in `length` bytes at `offset` of an open file. Raises CheckpointError naming `where`."""
    try:
        archive = _Archive(partial(os.pread, file), offset, length, where)
        value = load(archive.pickle(), lambda name: name in _TENSOR_GLOBALS or bool(dtype_from_global(name)), where)
        return archive.blob(value)
    except UnsafePickle as error:
        raise CheckpointError(str(error)) from None


def read_object(file: int, offset: int, length: int, where: str, lenient: bool = False) -> Any:
    """A plain object archived there: numbers, strings, containers, dtypes, tensors; a Namespace becomes a dict.

    lenient: what is not plain stays as inert values (inert.Record, Global) in its place; nothing is executed then, too.

    Raises UnsafePickle, naming it, for any other kind of object; CheckpointError for damage.
    """
    return _object(_Archive(partial(os.pread, file), offset, length, where), where, lenient)


def plain_object(data: bytes, where: str) -> Any:
    """As `read_object`, of what torch.save has made in memory."""
    return _object(_Archive(lambda n, at: data[at : at + n], 0, len(data), where), where)


def _object(archive: _Archive, where: str, lenient: bool = False) -> Any:
    def known(name: str) -> bool:
        return lenient or name in _OBJECT_GLOBALS or bool(dtype_from_global(name))

    return _Plain(archive, lenient).convert(load(archive.pickle(), known, where), 0)


class _Archive:
    """The zip archive in a slice of a file."""

    def __init__(self, read: Read, offset: int, length: int, where: str):
        self.read, self.offset, self.length, self.where = read, offset, length, where
        try:
            with zipfile.ZipFile(io.BufferedReader(_Slice(read, offset, length))) as archive:
                found = archive.infolist()
        except (zipfile.BadZipFile, OSError, ValueError, RuntimeError) as error:
            if isinstance(error, OSError):
                disk.check_damage(error, where)
            raise self.error(f"is no archive of torch.save ({error!s:.100})") from None
        # All members are in one folder, whose name does not matter.
        self.members = {info.filename.partition("/")[2]: info for info in found}
        order = self.members.get("byteorder")
        if order is not None and (order.file_size != len(b"little") or self.member("byteorder") != b"little"):
            raise self.error("was written on a machine of another byte order")

    def error(self, what: str) -> CheckpointError:
        return CheckpointError(f"{self.where} {what}; the file is damaged, or not of torch.distributed.checkpoint")

    def place(self, name: str) -> tuple[int, zipfile.ZipInfo]:
        """(position in the file, description) of a member's bytes."""
        info = self.members.get(name)
        if info is None:
            raise self.error(f"has no member {name[:40]!r}")
        if info.compress_type != zipfile.ZIP_STORED or info.compress_size != info.file_size or info.flag_bits & 1:
            raise self.error(f"has a compressed or encrypted member {name[:40]!r}")
        if not 0 <= info.header_offset < self.length:
            raise self.error(f"has the member {name[:40]!r} outside of itself")
        header = self.read(30, self.offset + info.header_offset)
        start = (
            info.header_offset + 30 + int.from_bytes(header[26:28], "little") + int.from_bytes(header[28:30], "little")
        )
        if len(header) < 30 or header[:4] != b"PK\3\4" or start + info.file_size > self.length:
            raise self.error(f"ends inside the member {name[:40]!r}")
        return self.offset + start, info

    def member(self, name: str) -> bytes:
        """The bytes of a small member."""
        at, info = self.place(name)
        return self.read(info.file_size, at)

    def pickle(self) -> bytes:
        """data.pkl, whose checksum must be right."""
        _, info = self.place("data.pkl")
        if info.file_size > _MOST_PICKLE_BYTES:
            raise self.error(f"has a data.pkl of {info.file_size} bytes")
        data = self.member("data.pkl")
        if zlib.crc32(data) != info.CRC:
            raise self.error("is damaged: the checksum of data.pkl is wrong")
        return data

    def blob(self, value: Any) -> Blob:
        """The place of a tensor that data.pkl describes."""
        if isinstance(value, Record) and value.name == "torch._utils._rebuild_parameter" and value.args:
            value = value.args[0]
        if not isinstance(value, Record) or not value.name.startswith("torch._utils._rebuild_tensor_v"):
            raise self.error(f"holds {describe(value)}, wanted a tensor")
        args = value.args
        dtype = None
        if value.name.endswith("_v3"):
            dtype = dtype_from_global(args[6].name) if len(args) > 6 and isinstance(args[6], Global) else None
        storage = args[0].value if args and isinstance(args[0], Persistent) else ()
        kinds = (str, Global, str, str, int)
        if (
            len(args) < 4
            or type(storage) is not tuple
            or len(storage) != 5
            or tuple(type(part) for part in storage) != kinds
        ):
            raise self.error("describes its tensor in a way that is not torch's")
        _, kind, key, _, count = storage
        dtype = dtype or next((dtype for name, dtype in _STORAGES if name == kind.name), None)
        offset, shape, strides = args[1:4]
        whole = [*shape, *strides] if type(shape) is tuple and type(strides) is tuple else [None]
        if dtype is None or any(type(n) is not int or not 0 <= n < 1 << 62 for n in [*whole, offset, count]):
            raise self.error("describes its tensor in a way that is not torch's")
        at, info = self.place(f"data/{key}")
        last = offset + sum((n - 1) * s for n, s in zip(shape, strides, strict=False))
        if math.prod(shape) * dtype.itemsize > max(info.file_size, _MOST_EXPANDED_BYTES):  # elements that share bytes
            raise self.error(f"has {info.file_size} bytes for a tensor of shape {shape}")
        if len(shape) != len(strides) or (0 not in shape and (last + 1) * dtype.itemsize > info.file_size):
            raise self.error(f"has {info.file_size} bytes for a tensor of shape {shape} and strides {strides}")
        return Blob(at, info.file_size, info.CRC, dtype, shape, strides, offset)

    def tensor(self, value: Any) -> torch.Tensor:
        """A small tensor, in memory of its own."""
        blob = self.blob(value)
        data = self.read(blob.nbytes, blob.start)
        if len(data) != blob.nbytes or zlib.crc32(data) != blob.crc:
            raise self.error("is damaged: the checksum of a tensor is wrong")
        if 0 in blob.shape:
            return torch.empty(blob.shape, dtype=blob.dtype)
        flat = torch.frombuffer(
            bytearray(data[: len(data) // blob.dtype.itemsize * blob.dtype.itemsize]), dtype=blob.dtype
        )
        return flat.as_strided(blob.shape, blob.strides, blob.offset).clone()


class _Plain:
    """Inert values to plain Python values; what is shared stays shared, so nothing grows."""

    def __init__(self, archive: _Archive, lenient: bool = False):
        self.archive, self.lenient, self.done = archive, lenient, {}

    def convert(self, value: Any, depth: int) -> Any:
        if id(value) in self.done:
            return self.done[id(value)][1]
        if depth > _MOST_DEPTH:
            raise UnsafePickle(f"{self.archive.where}: more than {_MOST_DEPTH} containers inside each other")
        done = self._convert(value, depth + 1)
        self.done[id(value)] = (value, done)  # the value is kept, so that its id stays its own
        return done

    def _convert(self, value: Any, depth: int) -> Any:
        if value is None or type(value) in (bool, int, float, str, bytes):
            return value
        if type(value) in (list, tuple):
            return type(value)(self.convert(item, depth) for item in value)
        if type(value) is dict:
            return {self.convert(key, depth): self.convert(item, depth) for key, item in value.items()}
        if type(value) is Global and (dtype := dtype_from_global(value.name)):
            return dtype
        if type(value) is Record and value.name == "argparse.Namespace" and type(value.state) is dict:
            return self.convert(value.state, depth)
        if type(value) is Record and value.name == "torch.device" and all(type(a) in (str, int) for a in value.args):
            return ":".join(map(str, value.args))
        if type(value) is Record and value.name.startswith("torch._utils."):
            return self.archive.tensor(value)
        if self.lenient:
            return value
        raise UnsafePickle(
            f"{self.archive.where}: got {describe(value)}, wanted plain containers, numbers, strings, tensors"
        )


class _Slice(io.RawIOBase):
    """A window of a file."""

    def __init__(self, read: Read, offset: int, length: int):
        self.read_at, self.offset, self.length, self.at = read, offset, length, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        self.at = offset + (0, self.at, self.length)[whence]
        if self.at < 0:
            raise OSError(f"position {self.at}: is before the beginning")
        return self.at

    def tell(self) -> int:
        return self.at

    def readinto(self, into: Any) -> int:
        n = max(0, min(len(into), self.length - self.at))
        data = self.read_at(n, self.offset + self.at)
        into[: len(data)] = data
        self.at += len(data)
        return len(data)
