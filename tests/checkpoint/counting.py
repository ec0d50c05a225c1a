"""A place for checkpoints that counts the bytes of chunk files that are read."""

import contextlib
import math
import threading
from dataclasses import dataclass, field

from fmegatron.checkpoint.files.manifest import read_manifest
from fmegatron.checkpoint.files.storage import Storage
from fmegatron.checkpoint.files.stores import open_store
from tests.checkpoint.faulty import FaultyStore


@dataclass
class Count:
    """Bytes by file, but for indexes of shards; (file, offset) of every read of a chunk file. opened: how often."""

    files: dict = field(default_factory=dict)
    offsets: list = field(default_factory=list)
    opened: dict = field(default_factory=dict)
    lock: threading.Lock = field(default_factory=threading.Lock)

    def add(self, name, offset, nbytes):
        with self.lock:
            self.files[name] = self.files.get(name, 0) + nbytes
            if name.rsplit("/", 1)[-1].startswith("c"):
                self.offsets.append((name, offset))

    @property
    def nbytes(self):
        """Of chunk files (digests do not count)."""
        return sum(n for name, n in self.files.items() if name.rsplit("/", 1)[-1].startswith("c"))


@dataclass(frozen=True)
class CountingReader:
    """A reader that counts."""

    real: object
    name: str
    count: Count
    end: int  # of its chunks

    def read_into(self, into, offset):
        got = self.real.read_into(into, offset)
        if offset < self.end:
            self.count.add(self.name, offset, got)
        return got


@dataclass(frozen=True)
class CountingStorage:
    """A Storage whose readers count."""

    real: Storage
    count: Count

    def __getattr__(self, name):
        return getattr(self.real, name)

    @contextlib.contextmanager
    def open(self, name, size, ranges):
        with self.count.lock:
            self.count.opened[name] = self.count.opened.get(name, 0) + 1
        array = read_manifest(self.real).arrays.get(name.rpartition("/")[0])
        end = size if array is None or not array.shard else size - 16 * math.prod(array.shard)
        with self.real.open(name, size, ranges) as reader:
            yield CountingReader(reader, name, self.count, end)


def counting(path):
    """(a store at `path`, the Count of what is read from it)."""
    count = Count()
    return FaultyStore(open_store(path), lambda storage: CountingStorage(storage, count)), count
