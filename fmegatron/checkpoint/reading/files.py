"""The files of arrays, each opened once for all that is read of it; the index of a shard is compared when it is opened.

Nothing outside the checkpoint is opened; every file must have exactly the size that the manifest implies.
"""

from __future__ import annotations

import errno
import threading
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field

import numpy as np

from fmegatron.checkpoint.files.format import Array, CheckpointError
from fmegatron.checkpoint.files.manifest import RESTORE_ANOTHER
from fmegatron.checkpoint.files.storage import Reader, Storage
from fmegatron.files import disk

_MOST_OPEN = 64  # beside those that are being read


@dataclass
class _Open:
    """A file that some threads read; users: how many. The first to come opens it."""

    users: int = 0
    reader: Reader | None = None
    stack: ExitStack = field(default_factory=ExitStack)
    lock: threading.Lock = field(default_factory=threading.Lock)


class Files:
    """A context manager; on leaving the block all files are closed."""

    def __init__(self, storage: Storage):
        self.storage = storage
        self._open: OrderedDict[str, _Open] = OrderedDict()
        self._lock = threading.Lock()
        self._compared: set[str] = set()

    def __enter__(self) -> Files:
        return self

    def __exit__(self, kind, error, traceback) -> None:
        for one in self._open.values():
            one.stack.close()
        self._open.clear()

    @contextmanager
    def open(
        self, array: Array, file: tuple[int, ...], ranges: Sequence[tuple[int, int]], leaf: str
    ) -> Iterator[Reader]:
        """A file of an array, for reads in these rising ranges of its bytes. leaf: whose they are, for messages.

        Raises CheckpointError.
        """
        if not self.storage.stays_open:
            with self._opened(array, file, ranges, leaf) as reader:
                yield reader
            return
        name = array.file_name(file)
        with self._lock:
            one = self._open.setdefault(name, _Open())
            one.users += 1
            self._open.move_to_end(name)
        try:
            with one.lock:
                if one.reader is None:
                    one.reader = one.stack.enter_context(self._opened(array, file, (), leaf))
            yield one.reader
        finally:
            self._leave(one)

    def _leave(self, one: _Open) -> None:
        with self._lock:
            one.users -= 1
            full = len(self._open) > _MOST_OPEN
            idle = [name for name, other in self._open.items() if not other.users] if full else []
            old = [self._open.pop(name) for name in idle[: max(0, len(idle) - _MOST_OPEN)]]
        for other in old:
            other.stack.close()

    @contextmanager
    def _opened(
        self, array: Array, file: tuple[int, ...], ranges: Sequence[tuple[int, int]], leaf: str
    ) -> Iterator[Reader]:
        name, (start, stop) = array.file_name(file), array.index_span(file)
        new = start < stop and name not in self._compared
        with ExitStack() as stack:
            try:
                wanted = [*ranges, (start, stop)] if new else ranges
                reader = stack.enter_context(self.storage.open(name, stop, wanted))
                found = read_exactly(reader, start, stop) if new else None
            except OSError as error:
                disk.check_damage(error, f"{leaf}: {self.storage.at(name)}")
                what = "is missing" if isinstance(error, FileNotFoundError) else error.strerror or str(error)
                raise file_error(self.storage, name, leaf, what) from None
            if found is not None and not np.array_equal(found.view("<u8"), array.file_index(file)):
                what = f"is damaged between bytes {start} and {stop}: its index is not that of its chunks"
                raise file_error(self.storage, name, leaf, what)
            self._compared.add(name)
            yield reader


def read_exactly(reader: Reader, start: int, stop: int) -> np.ndarray:
    """Bytes [start, stop) of a file, uint8. Raises OSError where it ends before."""
    data, done = np.zeros(stop - start, np.uint8), 0
    while done < data.nbytes:
        if not (got := reader.read_into(data[done:], start + done)):
            raise OSError(errno.EINVAL, f"ends at byte {start + done}")
        done += got
    return data


def file_error(storage: Storage, name: str, leaf: str, what: str) -> CheckpointError:
    """The error that names the leaf, the file and what to do."""
    return CheckpointError(f"{leaf}: its chunk file {storage.at(name)} {what}; {RESTORE_ANOTHER}")
