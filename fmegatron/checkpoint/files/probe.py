"""What a directory must be able to do so that checkpoints can be saved there; looked at when a save begins.

Needed: files are created, written, synced, renamed and removed, and an open sees what was closed. Not needed: a rename
of directories, or one that is one step; links; equal clocks; inode numbers. Without an fsync of directories the names
are as durable as the file system makes them; files are synced.
"""

from __future__ import annotations

import contextlib
import errno
import os

from fmegatron.files import whole

_DATA = b"fmegatron"
_NO_RENAME = frozenset({errno.ENOSYS, errno.ENOTSUP, errno.EOPNOTSUPP, errno.EPERM, errno.EINVAL})


def probe(directory: str) -> bool:
    """Whether the names in a directory can be synced.

    Raises ValueError where files cannot be renamed, or are not read as they were written; OSError for a full disk, ...
    """
    new, renamed = whole.new_beside(directory), whole.new_beside(directory)
    try:
        with open(new, "xb") as file:
            file.write(_DATA)
            whole.sync_file(file)
        try:
            os.rename(new, renamed)
        except OSError as error:
            if error.errno not in _NO_RENAME:
                raise
            raise ValueError(
                f"{directory}: got a file system that does not rename files ({error.strerror}), wanted one that does;"
                " save to the object store behind it by its URL, as s3://bucket/name or gs://bucket/name"
            ) from None
        with open(renamed, "rb") as file:
            if (data := file.read()) != _DATA:
                raise ValueError(
                    f"{directory}: got {len(data)} bytes from a file of {len(_DATA)} that was renamed, wanted what was"
                    " written; this file system keeps no files; choose another"
                )
    finally:
        for at in (new, renamed):
            with contextlib.suppress(OSError):
                os.remove(at)
    return whole.can_sync(directory)
