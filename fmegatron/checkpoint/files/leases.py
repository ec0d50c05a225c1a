"""Leases: a checkpoint that somebody reads is not deleted, whichever process or node reads or deletes.

    .NAME.reading-TOKEN   somebody reads the checkpoint NAME; renewed while it lasts
    .NAME.leaving-TOKEN   somebody is about to take it away: there while it looks for readers and renames
    .NAME.pinned          the user wants it kept

Both sides first leave their note and then look for the other's, so one of the two always sees the other: who wants to
delete gives way, who wants to read waits until the other has given way or is through. A note is void when its process
is gone (seen from the same node), or when it was not renewed for LEASE_S, so a reader that was killed holds nobody up
for ever. Clocks of nodes may differ by minutes: what a reader that was not seen finds is an error (a file is missing),
never wrong data.
"""

from __future__ import annotations

import contextlib
import json
import re
import secrets
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager

from fmegatron.checkpoint.files.notes import Notes, is_dead, owner
from fmegatron.checkpoint.files.storage import Store

STEP = re.compile(r"step_(\d{8,})")  # what a Manager calls a checkpoint
LEASE_S = 300.0  # a note is void after this
BEAT_S = 30.0  # a reader renews its note
_YIELD_S = 10.0  # the longest that a reader waits for somebody who is about to delete (a look and a rename)
_NOTE = re.compile(r"\.(.+)\.(reading|leaving)-[0-9a-f]{12}")


@contextlib.contextmanager
def reading(notes: Notes, name: str) -> Iterator[None]:
    """Within this block nobody deletes the checkpoint `name` beside these notes, if it was there to begin with.

    Where no note can be left (a directory that is read-only for us) there is no protection, and no error.
    """
    note = f".{name}.reading-{secrets.token_hex(6)}"
    try:
        notes.write(note, _now())
    except OSError:
        yield
        return
    done = threading.Event()
    beat = threading.Thread(target=_renew, args=(notes, note, done), daemon=True)
    beat.start()
    try:
        until = time.monotonic() + _YIELD_S
        with contextlib.suppress(OSError):  # notes that cannot be read protect nobody, and must not stop a reader
            while _held(notes, name, "leaving") and time.monotonic() < until:
                time.sleep(0.01)
        yield
    finally:
        done.set()
        beat.join()
        with contextlib.suppress(OSError):
            notes.remove(note)


def holding(store: Store) -> AbstractContextManager[None]:
    """`reading` of the checkpoint at `store`, if it has the name of a Manager's step; others nobody deletes."""
    name = store.text.rpartition("/")[2]
    return reading(store.above().notes(), name) if STEP.fullmatch(name) else contextlib.nullcontext()


@contextlib.contextmanager
def leaving(notes: Notes, name: str) -> Iterator[bool]:
    """Whether the checkpoint `name` may be renamed away within this block: nobody reads it, and it is not pinned."""
    note = f".{name}.leaving-{secrets.token_hex(6)}"
    with contextlib.suppress(OSError):  # a full disk must not keep old steps from going
        notes.write(note, _now())
    try:
        yield not is_held(notes, name)
    finally:
        with contextlib.suppress(OSError):
            notes.remove(note)


def is_held(notes: Notes, name: str) -> bool:
    """Whether the checkpoint `name` is pinned, or somebody reads it now."""
    return is_pinned(notes, name) or _held(notes, name, "reading")


def pin(notes: Notes, name: str) -> None:
    """Keep `name` until `unpin`; durable."""
    notes.write(f".{name}.pinned", _now(), durable=True)


def unpin(notes: Notes, name: str) -> None:
    """Take a pin back, if there is one."""
    notes.remove(f".{name}.pinned")


def is_pinned(notes: Notes, name: str) -> bool:
    """Whether `name` is pinned."""
    return notes.read(f".{name}.pinned") is not None


def clean(notes: Notes) -> None:
    """Remove the notes of the dead."""
    for note in notes.names():
        if _NOTE.fullmatch(note) and not _alive(notes, note):
            notes.remove(note)


def _held(notes: Notes, name: str, kind: str) -> bool:
    start = f".{name}.{kind}-"
    return any(_alive(notes, note) for note in notes.names() if note.startswith(start))


def _alive(notes: Notes, note: str) -> bool:
    data = notes.read(note)
    if data is None:
        return False  # gone since it was listed
    try:
        value = json.loads(data)
        renewed, whose = float(value["time"]), str(value.get("owner"))
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
        return False  # notes are put in place whole: not one of ours
    return abs(time.time() - renewed) < LEASE_S and not is_dead(whose)


def _now() -> bytes:
    return json.dumps({"time": time.time(), "host": socket.gethostname(), "owner": owner()}).encode()


def _renew(notes: Notes, note: str, done: threading.Event) -> None:
    while not done.wait(BEAT_S):
        with contextlib.suppress(OSError):  # a disk that is full for a while; the next beat tries again
            notes.write(note, _now())
