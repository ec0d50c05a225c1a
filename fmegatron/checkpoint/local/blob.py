"""The file of one rank's shard: its bytes, their digests, and a typed JSON header that describes them.

    payload          the leaves of the rank, one after another in the order of the JSON, no gaps
    uint64[bands]    xxh3_64 of each MiB of the payload
    uint64[world]    ids of all shards of the set: id = xxh3_64 of (digests, JSON) of a shard
    JSON             run, step, rank, world, payload_bytes, the user's metadata, the leaves with their layouts
    uint64[8]        trailer: magic, bytes of payload, bytes of JSON, world, id, set, 0, xxh3_64 of the former

All little-endian. `set` is the xxh3_64 of the ids: shards of one set were saved together, whatever their file names
say, and the same state gives the same bytes each time. No name in a file is ever used as a path.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import stat
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from fmegatron.checkpoint.files.format import CheckpointError, digest, dtype_text
from fmegatron.checkpoint.files.look import look
from fmegatron.checkpoint.files.manifest import layout_to_json, load_json, to_json_text
from fmegatron.layout import Layout, Mesh

BAND_BYTES = 1 << 20  # most bytes under one digest
_MAGIC = int.from_bytes(b"fmlocal1", "little")
_TRAILER, _TRAILER_BYTES = "<8Q", 64
_MOST_TAIL_BYTES = 64 << 20  # all after the payload; what claims more is not read


@dataclass(frozen=True)
class Shard:
    """The checked tail of a shard's file.

    digests: uint64 [bands].  header: the JSON's content.  tail: all bytes after the payload.  path: "" if it came from
    a peer.
    """

    path: str
    payload_bytes: int
    digests: np.ndarray
    header: dict[str, Any]
    id: int
    set: int
    tail: bytes

    @property
    def key(self) -> tuple[int, int, int]:
        """(step, set, rank)."""
        return self.header["step"], self.set, self.header["rank"]


# ---- what stands in the file


def tree_rows(paths: Sequence[str], layouts: Sequence[Layout]) -> dict[str, Any]:
    """The leaves (path, global shape, dtype, layout) in order, and the meshes that their layouts refer to, as JSON."""
    meshes: list[Mesh] = []
    leaves = [[p, x.shape, dtype_text(x.dtype), layout_to_json(x, meshes)] for p, x in zip(paths, layouts, strict=True)]
    return json.loads(to_json_text({"meshes": [mesh.to_json() for mesh in meshes], "leaves": leaves}))


def describe(
    run: str, step: int, rank: int, world: int, payload_bytes: int, metadata: dict[str, Any], rows: dict[str, Any]
) -> bytes:
    """The JSON of a shard; the same for the same state, so that a set saved twice has the same bytes.

    Raises ValueError when the file's tail would be larger than a reader accepts.
    """
    front = {"run": run, "step": step, "rank": rank, "world": world, "payload_bytes": payload_bytes}
    text = to_json_text({**front, "metadata": metadata, **rows}).encode()
    if (size := 8 * band_count(payload_bytes) + 8 * world + len(text) + _TRAILER_BYTES) > _MOST_TAIL_BYTES:
        raise ValueError(
            f"rank {rank}: {len(rows['leaves'])} leaves of {payload_bytes} bytes and their metadata need {size} bytes"
            f" of description, wanted at most {_MOST_TAIL_BYTES}; join small leaves, or save less metadata"
        )
    return text


def band_count(payload_bytes: int) -> int:
    """Number of digests of a payload."""
    return -(-payload_bytes // BAND_BYTES)


def band_digests(data: np.ndarray) -> list[int]:
    """Digests of the bands of a portion (uint8 [n]) that begins at a band."""
    return [digest(data[a : a + BAND_BYTES]) for a in range(0, len(data), BAND_BYTES)]


def shard_id(digests: np.ndarray, text: bytes) -> int:
    """What names a shard's content: elements, step, rank, layouts and all."""
    return digest(np.asarray(digests, "<u8").tobytes() + text)


def set_id(ids: np.ndarray) -> int:
    """What names the shards of all ranks (ids: uint64 [world]) together."""
    return digest(np.asarray(ids, "<u8").tobytes())


def tail_bytes(payload_bytes: int, digests: np.ndarray, ids: np.ndarray, text: bytes) -> bytes:
    """All that follows the payload."""
    front = (_MAGIC, payload_bytes, len(text), len(ids), shard_id(digests, text), set_id(ids), 0)
    trailer = struct.pack(_TRAILER, *front, digest(struct.pack("<7Q", *front)))
    return np.asarray(digests, "<u8").tobytes() + np.asarray(ids, "<u8").tobytes() + text + trailer


# ---- reading: nothing is trusted


def open_regular(path: str) -> int:
    """A descriptor of a regular file; a link or a pipe is an OSError, and never waited for or followed."""
    flags = os.O_RDONLY | os.O_CLOEXEC | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0)
    fd = look(lambda: os.open(path, flags))
    if not stat.S_ISREG(os.fstat(fd).st_mode):
        os.close(fd)
        raise OSError(errno.EINVAL, "not a regular file", path)
    return fd


def read_shard(path: str) -> Shard:
    """The tail of a file, checked. Raises CheckpointError that says what is wrong with it."""
    try:
        fd = open_regular(path)
        try:
            size = os.fstat(fd).st_size
            trailer = _read(fd, max(0, size - _TRAILER_BYTES), min(size, _TRAILER_BYTES))
            payload, text, world = _sizes(trailer, path)
            tail = 8 * band_count(payload) + 8 * world + text + _TRAILER_BYTES
            if payload + tail != size or tail > _MOST_TAIL_BYTES:
                raise CheckpointError(f"{path}: got {size} bytes, wanted the {payload + tail} that its end speaks of")
            return parse_tail(_read(fd, payload, tail), path)
        finally:
            os.close(fd)
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read ({error.strerror or error})") from None


def _read(fd: int, at: int, count: int) -> bytes:
    data = bytearray(count)
    _read_into(fd, at, memoryview(data))
    return bytes(data)


def _read_into(fd: int, at: int, view: memoryview) -> None:
    done = 0
    while done < len(view):
        n = look(lambda done=done: os.preadv(fd, [view[done:]], at + done))
        if n == 0:
            raise OSError(f"ends at byte {at + done}")
        done += n


def _sizes(trailer: bytes, where: str) -> tuple[int, int, int]:
    """(bytes of payload, bytes of JSON, world) of a trailer whose digest is right."""
    values = struct.unpack(_TRAILER, trailer) if len(trailer) == _TRAILER_BYTES else (0,) * 8
    if values[0] != _MAGIC or values[6] or digest(trailer[:-8]) != values[-1]:
        raise CheckpointError(f"{where}: its last bytes are not those of a local replica; it was cut or altered")
    return values[1:4]


def tail_start(data: bytes) -> int:
    """Where the tail begins in bytes that end with one. Raises CheckpointError."""
    payload, text, world = _sizes(data[-_TRAILER_BYTES:], "what a peer sent")
    start = len(data) - 8 * band_count(payload) - 8 * world - text - _TRAILER_BYTES
    if start < 0:
        raise CheckpointError(f"what a peer sent: got {len(data)} bytes, {-start} fewer than its end speaks of")
    return start


def parse_tail(tail: bytes, where: str) -> Shard:
    """The shard that a tail describes; all but the payload is checked. Raises CheckpointError."""
    payload, text_size, world = _sizes(tail[-_TRAILER_BYTES:], where)
    a = 8 * band_count(payload)
    b, c = a + 8 * world, a + 8 * world + text_size
    if c + _TRAILER_BYTES != len(tail):
        raise CheckpointError(f"{where}: got a tail of {len(tail)} bytes, wanted {c + _TRAILER_BYTES}")
    digests, ids, text = np.frombuffer(tail[:a], "<u8"), np.frombuffer(tail[a:b], "<u8"), tail[b:c]
    *_, own, whole, _, _ = struct.unpack(_TRAILER, tail[c:])
    header = load_json(text, where)
    whole_numbers = dict.fromkeys(("step", "rank", "world", "payload_bytes"), int)
    for key, kind in {**whole_numbers, "run": str, "metadata": dict, "meshes": list, "leaves": list}.items():
        if type(header.get(key)) is not kind:
            raise CheckpointError(f"{where}: {key}: got {header.get(key)!r:.60}, wanted {kind.__name__}")
    rank = header["rank"]
    if header["world"] != world or not 0 <= rank < world or not 0 <= header["step"] < 1 << 62:
        got = f"rank {rank!r:.20} of {header['world']!r:.20}, step {header['step']!r:.20}"
        raise CheckpointError(f"{where}: got {got}, wanted a rank of {world} and a step of 0 or more")
    if (
        header["payload_bytes"] != payload
        or not shard_id(digests, text) == own == int(ids[rank])
        or set_id(ids) != whole
    ):
        raise CheckpointError(f"{where}: its digests or its JSON were altered after the save")
    return Shard(where, payload, digests, header, own, whole, tail)


class Reader:
    """The payload of a shard's file, read by portions and verified."""

    def __init__(self, shard: Shard):
        self._shard, self._fd = shard, open_regular(shard.path)

    def read(self, start: int, out: torch.Tensor) -> None:
        """Fill `out` (uint8 [n], CPU) from byte `start`, which begins a band. Raises OSError, CheckpointError."""
        _read_into(self._fd, start, memoryview(out.numpy()))
        check_portion(self._shard, start, out)

    def close(self) -> None:
        """Close the file."""
        os.close(self._fd)


def check_portion(shard: Shard, start: int, data: torch.Tensor) -> None:
    """Raise CheckpointError unless the payload's bytes from `start` on (the start of a band) are those digested."""
    first = start // BAND_BYTES
    for i, got in enumerate(band_digests(data.numpy()), first):
        if i >= len(shard.digests) or got != int(shard.digests[i]):
            where = shard.path or f"the shard of rank {shard.header['rank']} of step {shard.header['step']}"
            raise CheckpointError(f"{where}: damaged: bytes {i * BAND_BYTES} and on are not those that were saved")


# ---- writing


def in_use(path: str) -> bool:
    """Whether a living process has this file open in a `Writer`. Raises OSError if that cannot be seen."""
    try:
        fd = open_regular(path)
    except OSError as error:
        if error.errno in (errno.ENOENT, errno.EINVAL, errno.ELOOP, errno.ENXIO):  # no file of a Writer
            return False
        raise
    try:
        fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)  # shared: several ranks of a node may ask at once
        return False
    except BlockingIOError:
        return True
    finally:
        os.close(fd)


class Writer:
    """A shard's file while it is written, under a name of its own. `digests`: of the bands so far."""

    def __init__(self, path: str, durable: bool):
        self.path, self.digests, self._durable = path, [], durable
        self._file = open(path, "xb", buffering=0)  # x: a name that exists, or is a link, is an error
        fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)  # for `in_use`; the system drops it when we die

    def digest(self, data: torch.Tensor) -> None:
        """Note the digests of a portion of the payload: uint8 [n], whole bands but for the last."""
        self.digests += band_digests(data.numpy())

    def write(self, data: torch.Tensor) -> None:
        """Append a portion of the payload. Raises OSError."""
        self._write(memoryview(data.numpy()))

    def finish(self, tail: bytes) -> None:
        """Append the tail; on disk when this returns, if durable. Raises OSError."""
        self._write(memoryview(tail))
        if self._durable:
            os.fsync(self._file.fileno())
        self._file.close()

    def _write(self, view: memoryview) -> None:
        while len(view):  # a full disk first writes less, then fails
            view = view[self._file.write(view) :]

    def discard(self) -> None:
        """Close and remove what is there under this name."""
        self._file.close()
        with contextlib.suppress(FileNotFoundError):
            os.remove(self.path)
