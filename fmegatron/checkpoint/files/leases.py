"""Leases: renewed notes that show to processes on any node that a checkpoint is being read, deleted or written.

    .NAME.reading-TOKEN   a process reads the checkpoint NAME; renewed while it lasts
    .NAME.leaving-TOKEN   a process is about to take it away: there while it looks for readers and renames
    .NAME.saving-TOKEN    a process writes the save NAME/TOKEN/; renewed
    .NAME.pinned          the user wants it kept
    .NAME.pinned-TOKEN    the same of the save NAME/TOKEN/ that was set aside: its pin went with it

Reader and deleter first leave their note and then look for the other's, so one of the two always sees the other: who
wants to delete gives way, who wants to read waits until the other has given way or is through. A saver leaves its note
before it makes a draft.

A note is void when its process is gone, which is seen at once on the same node. One of another node is void when it was
not renewed while this process has watched it for LEASE_S by its own clock (`Watch`): no clock is compared with another.
So is one that cannot be parsed: where a rename is a copy, it may have been read in the middle of one.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import secrets
import threading
import time
import warnings
import weakref
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from fmegatron.checkpoint.files.notes import Notes
from fmegatron.collectives import interrupt
from fmegatron.files import owners
from fmegatron.files.owners import host, owner

if TYPE_CHECKING:
    from fmegatron.checkpoint.files.keyvalue import KeyNotes

STEP = re.compile(r"step_([0-9]{8,18})")  # what a Manager calls a checkpoint: no step has more digits
LEASE_S = 300.0  # a note that was watched for so long and not renewed is void
BEAT_S = 30.0  # who holds a lease renews its note
_YIELD_S = 10.0  # the longest that a reader waits for a process that is about to delete (a look and a rename)
NOBODYS = b"{}"  # a note whose owner is dead, or taken for dead
_MOST_SHOWN, _MOST_TIME = 64, 1e11  # characters of a text of a note; seconds: the year 5138
_SAVING = re.compile(r"\.(.+)\.saving-([0-9a-f]{12})")
_NOTE = re.compile(r"\.(.+)\.(reading|leaving)-[0-9a-f]{12}")


def new_token() -> str:
    """12 hex digits that no other save, or note, has."""
    return secrets.token_hex(6)


def step_name(step: int) -> str:
    """The name of a Manager's checkpoint."""
    return f"step_{step:08d}"


class Watch:
    """For how long notes were not renewed, as this process has seen it, looking now and then.

    Only time in which a living owner would surely have renewed its note counts: of a long time between two looks, in
    which the file system may have been away for both, no more than `most_s`.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic, most_s: float = 2.5 * BEAT_S):
        self._clock, self._most_s = clock, most_s
        self._seen: dict[str, tuple[bytes, float, float]] = {}  # stamp, last look, quiet until then
        self.renewed: set[str] = set()  # what was seen to change

    def quiet_s(self, key: str, stamp: bytes) -> float:
        """Seconds for which what `key` names was watched and had this stamp; 0.0 at the first look."""
        now = self._clock()
        before, last, quiet = self._seen.get(key, (stamp, now, 0.0))
        if stamp != before:
            self.renewed.add(key)
        quiet = quiet + min(now - last, self._most_s) if stamp == before else 0.0
        self._seen[key] = stamp, now, quiet
        return quiet


@dataclass(frozen=True)
class Holder:
    """Who wrote a note, and when by its own clock. sure: it lives; else it may, and has not renewed the note yet.

    held: for claims (claim.py).
    """

    host: str = ""
    owner: str = ""
    since: float | None = None
    sure: bool = False
    held: bool = False

    def __str__(self) -> str:
        pid = self.owner.partition("-")[2].partition("-")[0] or "?"
        since = "" if self.since is None else f", since {time.ctime(self.since)}"
        return f"process {_shown(pid)} on {_shown(self.host) or 'an unknown host'}{since}"


def _shown(text: str) -> str:
    """A text of anybody's for a terminal: short, and without what moves the cursor."""
    return "".join(c if c.isprintable() else repr(c)[1:-1] for c in text[:_MOST_SHOWN])


def _time(value: object) -> float | None:
    """Seconds since 1970 that a clock may show; None for anything else."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    return float(value) if 0 <= value < _MOST_TIME else None


class Lease:
    """A note of this process, renewed by a thread until `release`. Raises OSError when it cannot be left.

    One that is dropped without `release` then states that it has no holder; one whose process dies has its name.

    exclusive: a note that others have removed, or marked as free, is not left again: they took this process for dead,
    and `lost` is True.
    fields: more JSON values in the note.
    """

    def __init__(
        self,
        notes: Notes | KeyNotes,
        note: str,
        beat_s: float | None = None,
        exclusive: bool = False,
        **fields: object,
    ):
        self._note = _Renewed(notes, note, exclusive, fields)
        args = (self._note, BEAT_S if beat_s is None else beat_s)  # not this object, so that it can be dropped
        self._thread = threading.Thread(target=_Renewed.keep, args=args, daemon=True, name=f"lease {note}")
        self._dropped = weakref.finalize(self, self._note.forsake)
        self._dropped.atexit = False
        try:
            with (
                interrupt.held_interrupt()
            ):  # a Ctrl-C in between would leave a note that counts as long as this process lives
                self._note.write()
                self._thread.start()
        except BaseException:
            self.release()
            raise

    @property
    def lost(self) -> bool:
        """Whether others have removed an exclusive note."""
        return self._note.lost

    def change(self, **fields: object) -> None:
        """Leave the note again with other fields. Raises OSError."""
        self._note.fields = self._note.fields | fields
        self._note.write()

    def release(self) -> None:
        """Take the note back; a second time does nothing. A disk that does not answer is not waited for."""
        with interrupt.held_interrupt():
            if self._dropped.detach() is None or os.getpid() != self._note.pid:
                return
            self._note.done.set()
            if self._thread.ident is not None:  # it was started
                self._thread.join(_YIELD_S)
            with contextlib.suppress(OSError):
                self._note.notes.remove(self._note.name)

    def drop(self) -> None:
        """Leave the note, stating that it has no holder: what it names the owner of is left to whoever cleans."""
        self._dropped()


def _signed() -> dict[str, object]:
    """What a note states of who leaves it, and when."""
    return {"time": time.time(), "host": host(), "owner": owner()}


@contextlib.contextmanager
def settling(lease: Lease | None) -> Iterator[None]:
    """Ends the lease of a save with this block, which removes what the save has left.

    Where that failed the note stays, stating that it has no holder: whoever cleans goes on. An OSError is not raised:
    how the save itself has ended is what counts.
    """
    removed = False
    try:
        with contextlib.suppress(OSError):
            yield
            removed = True
    finally:
        if lease is not None:
            lease.release() if removed else lease.drop()


class _Renewed:
    """A note and what renews it."""

    def __init__(self, notes: Notes | KeyNotes, name: str, exclusive: bool, fields: dict[str, object]):
        self.notes, self.name, self.exclusive, self.fields = notes, name, exclusive, fields
        self.own, self.beats, self.lost = _signed(), 0, False
        self.done, self.lock, self.pid = threading.Event(), threading.RLock(), os.getpid()

    def text(self) -> bytes:
        return json.dumps(self.own | {"beat": self.beats} | self.fields).encode()

    def write(self) -> None:
        with self.lock:
            self.notes.write(self.name, self.text())

    def keep(self, beat_s: float) -> None:
        while not self.done.wait(beat_s):
            with self.lock, contextlib.suppress(OSError):  # a disk that is away for a while; the next beat tries again
                if self.done.is_set():
                    return
                if self.exclusive and self.notes.read(self.name) in (None, NOBODYS):
                    self.lost = True
                    return
                self.beats += 1
                self.notes.renew(self.name, self.text())
                if self.done.is_set():  # `release` has not waited for a disk that was away
                    self.notes.remove(self.name)

    def forsake(self) -> None:
        if os.getpid() != self.pid:  # a forked child drops its copy; the note is its parent's
            return
        with self.lock, contextlib.suppress(OSError):
            self.done.set()
            self.notes.write(self.name, NOBODYS)


@contextlib.contextmanager
def reading(notes: Notes | KeyNotes, name: str) -> Iterator[None]:
    """Within this block no process deletes the checkpoint `name` beside these notes, if it was there to begin with.

    Where no note can be left (a directory that is read-only for us) there is no protection, and no error.
    """
    lease = None
    try:
        with interrupt.held_interrupt(), contextlib.suppress(OSError):
            lease = Lease(notes, f".{name}.reading-{new_token()}")
        until, watch = time.monotonic() + _YIELD_S, Watch()
        with contextlib.suppress(OSError):  # notes that cannot be read protect no reader, and must not stop a reader
            while lease and holder(notes, name, "leaving", watch) and time.monotonic() < until:
                time.sleep(0.01)
        yield
    finally:
        if lease is not None:
            lease.release()


@contextlib.contextmanager
def leaving(notes: Notes | KeyNotes, name: str, watch: Watch, pins: bool = True) -> Iterator[str | None]:
    """None if the checkpoint `name` may be renamed away within this block; else why not: who reads it, or a pin.

    pins: whether a pin counts.
    """
    note = f".{name}.leaving-{new_token()}"
    try:
        with contextlib.suppress(OSError):  # a full disk must not keep old steps from going
            notes.write(note, json.dumps(_signed()).encode())
        yield why_held(notes, name, watch, pins)
    finally:
        with interrupt.held_interrupt(), contextlib.suppress(OSError):
            notes.remove(note)


def why_held(notes: Notes | KeyNotes, name: str, watch: Watch, pins: bool = True) -> str | None:
    """Why the checkpoint `name` must stay: it is pinned, or a process reads it now. None if it need not."""
    if pins and is_pinned(notes, name):
        return "it is pinned"
    reader = holder(notes, name, "reading", watch)
    return None if reader is None else f"{reader} reads it"


def holder(notes: Notes | KeyNotes, name: str, kind: str, watch: Watch) -> Holder | None:
    """A living process that has left a note of this kind about the checkpoint `name`. Raises OSError."""
    start = f".{name}.{kind}-"
    return next(
        (found for note in notes.names() if note.startswith(start) and (found := alive(notes, note, watch))), None
    )


def saving_note(name: str, token: str) -> str:
    """The note of who writes the save NAME/TOKEN/."""
    return f".{name}.saving-{token}"


def say_doubts(text: str, left: Sequence[tuple[str, Holder]], fix: str) -> None:
    """Warn of what savers on other machines have at `text`, who may live; a Manager watches those of its steps itself.

    left: where, and whose.  fix: what to do if they are dead.
    """
    if left and not STEP.fullmatch(text.rpartition("/")[2]):
        where = "; ".join(f"{at} is of {saver}" for at, saver in left[:3])
        warnings.warn(f"{text}: others save here, too, or have died: {where}; {fix}", RuntimeWarning, stacklevel=3)


def alive(notes: Notes | KeyNotes, note: str, watch: Watch, lease_s: float | None = None) -> Holder | None:
    """Who has left a note, if the note is there and not void. Raises OSError if it cannot be read."""
    lease_s = LEASE_S if lease_s is None else lease_s
    data = notes.read(note)
    if data is None or data == NOBODYS:
        return None  # gone since it was listed, or left without a holder
    whose, where, since, held = "", "", None, False
    with contextlib.suppress(ValueError, TypeError, KeyError, AttributeError, RecursionError):
        value = json.loads(data)
        whose, where, since = str(value["owner"]), str(value.get("host", "")), _time(value.get("time"))
        held = value.get("held") is True
    state = owners.fate(whose)
    if state == "unknown":
        stamp = notes.stamp(note)
        quiet = lease_s if stamp is None else watch.quiet_s(note, stamp)
        state = "unknown" if quiet < lease_s else "gone"
    sure = state == "lives" or note in watch.renewed
    return None if state == "gone" else Holder(where, whose, since, sure, held)


def pin(notes: Notes | KeyNotes, name: str) -> None:
    """Keep `name` until `unpin`; durable."""
    notes.write(f".{name}.pinned", json.dumps({"time": time.time(), "host": host()}).encode(), durable=True)


def unpin(notes: Notes | KeyNotes, name: str) -> None:
    """Take a pin back, if there is one, and those of what was set aside of `name`."""
    for note in notes.names():
        if note == f".{name}.pinned" or note.startswith(f".{name}.pinned-"):
            notes.remove(note)


def is_pinned(notes: Notes | KeyNotes, name: str, token: str | None = None) -> bool:
    """Whether `name` is pinned; with a token, the save that was set aside under it, or whatever has the name now."""
    notes_of = [f".{name}.pinned", *([] if token is None else [f".{name}.pinned-{token}"])]
    return any(notes.read(note) is not None for note in notes_of)


def move_pin(notes: Notes | KeyNotes, name: str, token: str) -> None:
    """`name` was set aside under this token: its pin goes with it. Raises OSError; then a pin too many is left."""
    if (data := notes.read(f".{name}.pinned")) is not None:
        notes.write(f".{name}.pinned-{token}", data, durable=True)
        notes.remove(f".{name}.pinned")


def clean_savers(
    notes: Notes | KeyNotes,
    pattern: str,
    keep: Collection[str],
    watch: Watch,
    has_begun: Callable[[str, str], bool],
) -> None:
    """Remove the notes of savers that died before they made a draft, or were ended after it went.

    Of what is saved under names that match `pattern` and are not in `keep`.  has_begun: of a name and a token, whether
    there is a draft.
    """
    for note in notes.names():
        m = _SAVING.fullmatch(note)
        if m and re.fullmatch(pattern, m[1]) and m[1] not in keep and not has_begun(m[1], m[2]):
            if not alive(notes, note, watch):
                notes.remove(note)


def clean(notes: Notes | KeyNotes, watch: Watch) -> None:
    """Remove the notes of readers and deleters that are dead; those of savers go with what they have left."""
    for note in notes.names():
        if _NOTE.fullmatch(note) and alive(notes, note, watch) is None:
            notes.remove(note)
