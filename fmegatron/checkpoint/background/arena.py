"""The arena: bounded host memory shared by the trainer and its writer process, reused between saves, freed at the end.

The memory has no name (memfd): nothing is left of it when both processes are gone, however they went. Its first page is
the board, a few counters by which the writer shows that it lives; regions for staged saves come after it.
"""

from __future__ import annotations

import mmap
import os
import tempfile
import weakref
from types import ModuleType

import torch

BOARD_BYTES = 4096
TICKS, SAVE, WRITTEN = 0, 1, 2  # int64 on the board: signs of progress; save being written; its bytes written so far
_POPULATE_WRITE = 23  # MADV_POPULATE_WRITE of Linux 5.14: enter all pages into our page table at once
_PAGE = 4096
_PIN_BYTES = 1 << 30  # page-locked at a time


class Arena:
    """Regions of shared memory for one rank's saves.

    bound: bytes that it may take; None: as much as the largest request so far, so that one save has room at a time.
    """

    def __init__(self, bound: int | None = None):
        self.bound, self._grows = bound or 0, bound is None
        self._device: torch.device | None = None
        self._pinned: list[int] = []  # addresses of pieces
        self.fd = _anonymous_file()
        self._end = weakref.finalize(self, os.close, self.fd)
        self.capacity = 0
        self._regions: dict[int, int] = {}
        self._resize(BOARD_BYTES)
        self.board = map_board(self.fd)

    @property
    def used(self) -> int:
        """Bytes in regions."""
        return sum(self._regions.values())

    def allocate(self, nbytes: int) -> int | None:
        """The start of a region (a multiple of the page size) in `memory`; None while there is no room.

        A request beyond the bound gets the arena for itself when it is empty. Raises OSError when the system has no
        memory for it.
        """
        nbytes = max(_PAGE, -(-nbytes // _PAGE) * _PAGE)
        if self._grows:
            self.bound = max(self.bound, nbytes)
        at = BOARD_BYTES
        for start, size in sorted(self._regions.items()):
            if start - at >= nbytes:
                break
            at = start + size
        end = at + nbytes
        if end > self.capacity:
            if end - BOARD_BYTES > self.bound and self._regions:
                return None
            self._resize(end)
        self._regions[at] = nbytes
        return at

    def release(self, at: int) -> None:
        """Give a region back. What is beyond the bound goes back to the system."""
        self._regions.pop(at, None)
        if not self._regions and self.capacity > self.bound + BOARD_BYTES:
            self._resize(self.bound + BOARD_BYTES)

    def reserve(self, nbytes: int) -> None:
        """Take memory up to the bound now, so that the first save finds it warm. Raises OSError."""
        if (at := self.allocate(nbytes if self._grows else min(nbytes, self.bound))) is not None:
            self.release(at)

    def pin(self, device: torch.device) -> None:
        """Page-lock the memory, now and when it grows, so that copies from a device of CUDA are not waited for.

        The device is the current one meanwhile: nothing is opened on another GPU. Raises RuntimeError.
        """
        if self._device is None:
            self._device = device
            self._lock()

    def close(self) -> None:
        """Give everything back; views of `memory` must not be used any more."""
        if self.fd >= 0:
            self._unpin()
            self.memory = self.board = None
            self._end()
            self.fd, self.capacity = -1, 0

    def _resize(self, capacity: int) -> None:
        old = self.capacity
        if capacity > old:
            _take(self.fd, old, capacity - old)
        self._unpin()
        self.memory = None
        if capacity < old:
            os.truncate(self.fd, capacity)
        self.memory, self.capacity = map_memory(self.fd, capacity), capacity
        self._lock()

    def _lock(self) -> None:
        """Page-lock what is mapped, in pieces: the driver takes seconds for many GiB at once, and holds others up."""
        if self._device is None or self.memory is None:
            return
        with torch.cuda.device(self._device):
            for start in range(0, self.capacity, _PIN_BYTES):
                address, nbytes = self.memory.data_ptr() + start, min(_PIN_BYTES, self.capacity - start)
                if code := int(_cudart().cudaHostRegister(address, nbytes, 0)):
                    self._unpin()
                    raise RuntimeError(
                        f"AsyncSaver: CUDA error {code} when {nbytes:,} bytes of {self.capacity:,} were page-locked; "
                        "AsyncSaver(pin=False) does without, and copies take longer"
                    )
                self._pinned.append(address)

    def _unpin(self) -> None:
        while self._pinned:
            code = int(_cudart().cudaHostUnregister(self._pinned.pop()))
            if code:
                raise RuntimeError(f"AsyncSaver: CUDA error {code} when page-locked memory was given back")


def map_memory(fd: int, nbytes: int, warm: bool = True) -> torch.Tensor:
    """The first bytes of the file as a uint8 tensor, shared with all who map it. warm: no page faults later."""
    mapped = mmap.mmap(fd, nbytes)
    if warm and nbytes > BOARD_BYTES:
        try:
            mapped.madvise(_POPULATE_WRITE)
        except (OSError, AttributeError):  # an older kernel: touch every page without changing it
            for at in range(0, nbytes, _PAGE):
                mapped[at] = mapped[at]
    return torch.frombuffer(mapped, dtype=torch.uint8)


def map_board(fd: int) -> torch.Tensor:
    """The counters: int64."""
    return map_memory(fd, BOARD_BYTES).view(torch.int64)


def _anonymous_file() -> int:
    if hasattr(os, "memfd_create"):
        return os.memfd_create("fmegatron-arena")
    fd, path = tempfile.mkstemp()
    os.unlink(path)
    return fd


def _take(fd: int, start: int, nbytes: int) -> None:
    """Grow the file by pages that are really there: too little memory is an error now, not a signal at first touch."""
    if hasattr(os, "posix_fallocate"):
        os.posix_fallocate(fd, start, nbytes)
    else:
        os.truncate(fd, start + nbytes)


def _cudart() -> ModuleType:
    """CUDA's runtime, where there is CUDA: memory is not pinned elsewhere."""
    cudart = torch.cuda.cudart()
    assert cudart is not None, "torch has CUDA"
    return cudart
