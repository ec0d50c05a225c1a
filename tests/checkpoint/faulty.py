"""Stores whose reads and writes go wrong as told: a full disk, a broken one, short files; for any kind of storage."""

import contextlib
from collections.abc import Callable
from dataclasses import dataclass
from unittest import mock

from fmegatron.checkpoint.files import leases
from fmegatron.checkpoint.files.commit import Store
from fmegatron.checkpoint.files.storage import Storage
from fmegatron.files import owners


@dataclass(frozen=True)
class FaultyStorage:
    """A Storage that calls `before(operation, name)` first (raise there), and may change the blocks of a write."""

    real: Storage
    before: Callable[[str, str], None] = lambda operation, name: None
    blocks: Callable = lambda name, blocks: blocks

    def __getattr__(self, name):
        return getattr(self.real, name)

    def read(self, name, start=0, size=None):
        self.before("read", name)
        return self.real.read(name, start, size)

    def open(self, name, size, ranges):
        self.before("open", name)
        return self.real.open(name, size, ranges)

    def write(self, name, blocks, durable=True):
        self.before("write", name)
        self.real.write(name, self.blocks(name, blocks), durable)

    def sync(self):
        self.before("sync", "")
        self.real.sync()


@dataclass(frozen=True)
class FaultyStore:
    """A Store that gives out its storages through `wrap`."""

    real: Store
    wrap: Callable[[Storage], Storage]

    def __getattr__(self, name):
        return getattr(self.real, name)

    def locate(self):
        return self.wrap(self.real.locate())

    def begin(self):
        return self.wrap(self.real.begin())

    def draft(self, root):
        return self.wrap(self.real.draft(root))


@contextlib.contextmanager
def lives():
    """Within this block a process that was killed in pretence stays dead: yields a function that ends its life.

    Notes that it left before are those of another process, which is gone.
    """
    life, real = [0], owners._start
    start = mock.patch.object(owners, "_start", lambda pid: f"{real(pid)}{life[0]}")
    with start, mock.patch.object(leases._Renewed, "forsake", lambda self: self.done.set()):
        yield lambda: life.__setitem__(0, life[0] + 1)


def full_after(writes):
    """A `before` for a disk that is full after so many writes."""
    left = iter(range(writes))

    def before(operation, name):
        if operation == "write" and next(left, None) is None:
            raise OSError(28, "No space left on device")

    return before


class Killed(BaseException):
    """The process is gone: after this, nothing that it would have done happens."""


def die_at(patch, moment, places):
    """Kill the process at the n-th thing that it does by one of these functions, each (owner, name) of an attribute.

    Returns the count of things done, in a list.
    """
    done = [0]

    def mortal(function):
        def call(*args, **kwargs):
            done[0] += 1
            if done[0] >= moment:
                raise Killed
            return function(*args, **kwargs)

        return call

    for place, name in places:
        patch.setattr(place, name, mortal(getattr(place, name)))
    return done
