"""A directory that is held open, so that what is read through it is of one save."""

from __future__ import annotations

import errno
import os

from fmegatron.files import disk

# Hold a directory: on Linux without reading it, which those who may only pass through it may, too.
_HOLD = getattr(os, "O_PATH", os.O_RDONLY) | os.O_CLOEXEC | os.O_DIRECTORY | os.O_NOFOLLOW


class Held:
    """A directory that is held open: its files are reached by it whatever has taken its name since.

    So what is read through it is of one save, never of two; files that are gone are errors.
    """

    def __init__(self, path: str):
        self._path, self._fd, self._identity, self._error = path, None, None, None
        try:
            self._fd = self._opened()
            self._identity = disk.identity(self._fd)
        except OSError as error:
            self._error = error

    @property
    def fd(self) -> int:
        """The descriptor. Raises OSError, the same as at the beginning, if the directory could not be opened then."""
        if self._fd is None:
            assert self._error is not None, "it is open, or there is a reason"
            raise OSError(self._error.errno, self._error.strerror, self._error.filename)
        return self._fd

    def open(self, name: str) -> int:
        """A descriptor of a file in the directory. Raises OSError."""
        try:
            return disk.open_safely(name, self.fd)
        except OSError as error:
            if error.errno == errno.ESTALE:
                self._renew()
            raise

    def _opened(self) -> int:
        return disk.look(lambda: os.open(self._path, _HOLD))

    def _renew(self) -> None:
        """On a network file system a handle goes stale when its directory is deleted, or when the server restarts."""
        fd = self._opened()
        try:
            if disk.identity(fd) != self._identity:
                raise FileNotFoundError(errno.ENOENT, "was taken away", self._path)
            os.dup2(fd, self.fd, inheritable=False)
        finally:
            os.close(fd)

    def __del__(self) -> None:
        if self._fd is not None:
            os.close(self._fd)
