"""What saves up to version 3 have left beside a checkpoint NAME, which took its name by a rename of its directory.

.NAME.tmp-TOKEN     being written, or (after an exchange) the old checkpoint on its way out
.NAME.old-TOKEN     the old checkpoint while the new one took its name: if NAME is missing, one of the two counts
.NAME.gone-TOKEN    being deleted
.NAME.aside-TOKEN   a checkpoint that a run has left behind when it went on from an older step; `mv` brings it back
"""

from __future__ import annotations

import contextlib
import os
import re

from fmegatron.checkpoint.files.format import MARKER
from fmegatron.checkpoint.files.leases import LEASE_S, Watch, alive, saving_note
from fmegatron.checkpoint.files.notes import Notes
from fmegatron.checkpoint.files.trees import remove
from fmegatron.files import disk

HIDDEN = re.compile(r"\.(.+)\.(tmp|old|gone|aside)-([0-9a-f]+)")


def resolve(path: str) -> str:
    """The directory of the checkpoint `path`: itself, or what a re-save that was killed between two renames has left.

    Raises OSError.
    """
    if not disk.is_there(path):
        parent, name = os.path.split(path)
        for old in disk.names_in(parent):
            if (m := HIDDEN.fullmatch(old)) and (m[1], m[2]) == (name, "old"):
                found = (os.path.join(parent, n) for n in (f".{name}.tmp-{m[3]}", old))  # the new one first
                if complete := next((at for at in found if disk.is_file(os.path.join(at, MARKER))), None):
                    return complete
    return path


def finish(path: str) -> None:
    """Give a checkpoint its name back that such a re-save had taken. Raises OSError."""
    if (found := resolve(path)) != path:
        with contextlib.suppress(FileNotFoundError):  # another process does the same
            os.rename(found, path)


def has_begun(path: str, token: str) -> bool:
    """Whether a save of `path` has left a directory. Raises OSError."""
    parent, name = os.path.split(path)
    return disk.is_there(os.path.join(parent, f".{name}.tmp-{token}"))


def clean(directory: str, pattern: str, keep: tuple[str, ...], watch: Watch) -> None:
    """Remove what dead saves and deletions left of the checkpoints whose full name matches, but for those in `keep`.

    What has a note is its saver's while that may live; what has none goes when nothing in it changes. Raises OSError.
    """
    notes = Notes(directory)
    left = [m for m in map(HIDDEN.fullmatch, notes.names()) if m and m[2] != "aside"]
    for m in left:
        if not re.fullmatch(pattern, m[1]) or m[1] in keep:
            continue
        at, note = os.path.join(directory, m[0]), saving_note(m[1], m[3])
        if m[2] != "gone":
            noted = notes.read(note) is not None
            quiet = 0.0 if noted else watch.quiet_s(at, disk.tree_stamp(at))
            if alive(notes, note, watch) if noted else quiet < LEASE_S:
                continue
            finish(os.path.join(directory, m[1]))
        remove(at)
