"""One commit protocol for directories and object stores: data under a token, one small file whose name is its state.

    NAME/COMPLETE         the pointer: a marker with `root`, the TOKEN of the save that is the checkpoint. Without
                          `root` (versions 1 and 3, or a token that was copied): the files are in NAME itself
    NAME/TOKEN/...        the files of one save, its own COMPLETE among them: a checkpoint by itself
    NAME/.COMPLETE-TOKEN  draft of the pointer: empty from `begin` on, filled just before the end
    NAME/ASIDE-TOKEN      the pointer of a save that was set aside (ASIDE-plain: of files in NAME itself)
    NAME/.GONE-TOKEN      the pointer, or draft, of a save that is being deleted (.GONE-plain: of files in NAME itself)
    NAME/arrays           a link to TOKEN/arrays for people and zarr, where there are links; nothing of ours reads it

Each change of state is one `move` of that file: publish .COMPLETE-T -> COMPLETE, set aside COMPLETE -> ASIDE-T,
delete COMPLETE -> .GONE-T, clean up a dead saver .COMPLETE-T -> .GONE-T. Publisher and cleaner move the same file, so
one wins, whoever slept. No directory is renamed, and no move has to be atomic: where the pointer is missing or torn, a
filled draft of a complete token counts.

Deleted is a token with .GONE-T, and one without such a file beside a COMPLETE that names another: it was replaced. A
token without such a file where there is no COMPLETE is a copy under way: it is left to a person.
"""

from __future__ import annotations

import errno
import json
import re
import threading
import time
import warnings
from abc import abstractmethod
from collections.abc import Collection
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any

from fmegatron.checkpoint.files.format import MANIFEST, MARKER, MARKER_VERSION, CheckpointError
from fmegatron.checkpoint.files.leases import (
    STEP,
    Holder,
    Lease,
    Watch,
    alive,
    clean_savers,
    new_token,
    saving_note,
    say_doubts,
    settling,
)
from fmegatron.checkpoint.files.slots import Files, Slots
from fmegatron.checkpoint.files.storage import Storage
from fmegatron.files import disk

TOKEN = re.compile(r"[0-9a-f]{12}")
_DRAFT = re.compile(r"\.COMPLETE-([0-9a-f]{12})")
_ASIDE = re.compile(r"ASIDE-([0-9a-f]{12}|plain)")
_GONE = re.compile(r"\.GONE-([0-9a-f]{12}|plain)")
_PLAIN = frozenset({MANIFEST, "digests.bin", "arrays", "packed", "pieces"})  # of a checkpoint in NAME itself
_TAKEN = "was deleted by another process, which took this save for dead; save again"
_SETTLE_S = 10.0  # for a process that cleans to read the pointer


def parse_pointer(data: bytes | None) -> dict[str, Any] | None:
    """A pointer or draft: None if it is missing, {} if it is empty or torn (which `read_manifest` reports)."""
    if data is None:
        return None
    try:
        value = json.loads(data)
    except (ValueError, RecursionError):
        return {}
    return value if isinstance(value, dict) else {}


def root_of(pointer: dict[str, Any] | None) -> str | None:
    """The token that a pointer names; None for that of files in NAME itself, and for none."""
    root = (pointer or {}).get("root")
    return root if type(root) is str and TOKEN.fullmatch(root) else None


@dataclass(frozen=True)
class Withdrawn:
    """What is left of a checkpoint whose pointer is gone."""

    place: Store

    def delete(self, stop: threading.Event | None = None) -> None:
        """Remove them, until `stop`. Killed half-way: .GONE- is there until the end, and anybody goes on."""
        self.place.sweep(Watch(), stop=stop)


@dataclass(frozen=True)
class Remnant:
    """A save at `place` that is not its checkpoint. kind: "tmp" (under way, or killed), "old" (replaced), "gone" (being
    deleted) or "aside".  token: "plain" for files in the place itself."""

    place: Store
    token: str
    kind: str
    files: Storage


class Store(Slots[Files]):
    """A place where a checkpoint is, or will be; or a directory of such places."""

    @abstractmethod
    def child(self, name: str) -> Store[Files]:
        """The place `name` in this directory."""

    @abstractmethod
    def above(self) -> Store[Files]:
        """The directory that it is in."""

    @abstractmethod
    def around(self) -> Store[Files] | None:
        """The checkpoint among whose files it would be, so that a save of that one would remove it."""

    # ---- what is there

    def pointer(self) -> dict[str, Any] | None:
        """The pointer; where it is missing or torn, a filled draft of a complete token.

        That is of a save that was killed in its last move. Where a move is a copy the draft goes last, so what is left
        in between is found here.
        """
        found = parse_pointer(self.content(MARKER))
        if not found:
            for name in self.inside(".COMPLETE-"):
                draft = parse_pointer(self.content(name))
                if (m := _DRAFT.fullmatch(name)) and root_of(draft) == m[1] and self._has_marker(m[1]):
                    return draft
        return found

    def locate(self) -> Files:
        """The files of the complete checkpoint: of the token that the pointer names, or those in NAME itself; where
        there is none, those that `read_manifest` will complain about.

        They are of one save, also when another takes its place while they are read: then some may be missing.
        """
        try:
            pointer = self.pointer()
        except OSError as error:
            disk.check_damage(error, f"{self.text}/{MARKER}")
            raise
        if pointer is None or "root" not in pointer:
            return self.files("", hold=True)
        if (root := root_of(pointer)) is None or pointer.get("version") != MARKER_VERSION:
            raise CheckpointError(
                f"{self.text}/{MARKER}: got root {pointer['root']!r:.40} in version {pointer.get('version')!r:.20},"
                f" wanted 12 hex digits in version {MARKER_VERSION}; restore another step"
            )
        return self.files(root, stated=pointer, hold=True)

    def is_complete(self) -> bool:
        """Whether the pointer names a save that is there to its end. Raises OSError if that cannot be seen."""
        pointer = self.pointer()
        return pointer is not None and ((root := root_of(pointer)) is None or self._has_marker(root))

    def stamp(self) -> tuple[float | None, str]:
        """What differs when it was saved again, or a copy was put here."""
        return self.saved_at(), repr(self.pointer())

    def is_meant(self) -> bool:
        """Whether this is a checkpoint, complete, damaged or half copied, and no directory of them."""
        if self.pointer() is not None:
            return True
        is_named = STEP.fullmatch(self.text.rpartition("/")[2]) is not None
        return (is_named or self.is_there(MANIFEST)) and not self.is_begun()

    def is_begun(self) -> bool:
        """Whether all that is here is of saves that are under way, were killed, are set aside, or are being deleted.

        What is not, and not complete, is damaged, or a copy that is not finished."""
        if self.is_link():
            return False
        names = self.inside()
        if "ASIDE-plain" in names or ".GONE-plain" in names:
            return MARKER not in names
        kept = [n for n in names if not n.startswith(".") and not _ASIDE.fullmatch(n)]
        return all(TOKEN.fullmatch(n) and self._state(n) is not None for n in kept)

    def has_begun(self, token: str) -> bool:
        """Whether a save has left more than its note, and has not come to its end."""
        return self.is_there(f".COMPLETE-{token}")

    # ---- a save

    def begin(self) -> Files:
        """A new token: note (who writes), draft (it may still win), room for files."""
        self.prepare()
        try:
            watch, name = Watch(), self.text.rpartition("/")[2]
            self.clean_old(watch)
            doubts = self.sweep(watch)
            clean_savers(self.saver_notes, re.escape(name), (), watch, lambda _, token: self.has_begun(token))
            above = self.text.rpartition("/")[0]
            fix = f"if they have died, `python -m fmegatron.checkpoint gc --watch 5m {above}` removes it"
            say_doubts(self.text, doubts, fix)
        except OSError as error:  # such as what belongs to another user; it is in no save's way
            text = f"{self.text}: what killed saves have left there could not be removed: {error}"
            warnings.warn(text, RuntimeWarning, stacklevel=2)
        token = new_token()
        lease = Lease(self.saver_notes, self._note(token), exclusive=True)
        try:
            self.make(token)
        except BaseException:
            with suppress(OSError):
                self.drop(f".COMPLETE-{token}")
                self.tidy()
            lease.release()
            raise
        return self.files(token, lease)

    def draft(self, root: str) -> Files:
        """The files of a save that has begun."""
        return self.files(_token(root))

    def publish(self, storage: Storage, marker: bytes) -> None:
        """Marker beside the data; then, when all names down to the token are durable, the pointer.

        If the last `durable` fails, the save has failed and may still be the checkpoint: both tokens stay, either can
        be restored. It is not taken back, as that could fail in the same way.
        """
        token, draft = _token(storage.root), f".COMPLETE-{_token(storage.root)}"
        before = None
        try:
            storage.write(MARKER, [marker])
            self.durable(token)
            before = self.content(MARKER)
            self.fill(draft, pointer_to(token, marker))
            self.durable()
            if before is None:  # else who published that one has done it
                self.durable("..")
            self.move(draft, MARKER)
        except FileNotFoundError:
            # A server that was asked twice, as its answer was lost, finds no draft the second time: then it is done.
            if self._root() != token:
                raise OSError(errno.ESTALE, _TAKEN, storage.text) from None
        self.durable()
        if self._was_taken(token):
            self._take_back(token, before)
            raise OSError(errno.ESTALE, _TAKEN, storage.text)
        with suppress(OSError):  # it is the checkpoint; the next save tries again
            self.sweep(Watch(), synced=True)
        with suppress(OSError):
            self.published(token)

    def end(self, storage: Storage | None) -> None:
        """Remove a save that has not become the checkpoint, and its note."""
        if storage is None:
            return
        token = _token(storage.root)
        draft = f".COMPLETE-{token}"
        with settling(storage.lease):
            if self._root() != token and not self.is_there(f"ASIDE-{token}"):
                self._discard(draft if self.is_there(draft) else None, token)

    # ---- deletion, setting aside

    def withdraw(self) -> Withdrawn:
        """This is no checkpoint any more: .GONE- for all that is here, filled drafts first, as one could be next.

        A link of this name to another place goes, and nothing else. Of what is gone there is nothing left to do.
        """
        if self.is_link():
            self.unlink()
            return Withdrawn(self)
        names, root = self.inside(), None
        with suppress(OSError):  # one that cannot be read can be given up: all that is here goes
            root = self._root()
        for name in names:
            if (m := _DRAFT.fullmatch(name)) and self.content(name):
                self._condemn(name, m[1])
        for token in filter(TOKEN.fullmatch, names):
            if token != root and self._state(token) is None:
                self._condemn(None, token)
        if MARKER in names:
            gone = root or "plain"
            self._condemn(MARKER, gone)
            taken = None if root is None else root_of(parse_pointer(self.content(f".GONE-{gone}")))
            if taken not in (None, root):  # another has saved since we looked: it is what was deleted
                self._condemn(None, taken)
        if any(not is_ours(n) for n in names):
            self._condemn(None, "plain")
        self.durable()
        return Withdrawn(self)

    def set_aside(self) -> str:
        """The pointer takes another name, and the files stay; returns where they are. FileNotFoundError for nothing."""
        if self.is_link():
            raise ValueError(f"{self.text}: got a link to another place, wanted what was saved here; remove the link")
        with suppress(FileNotFoundError):  # it was deleted meanwhile
            if self.inside():
                return self._set_aside()
        raise FileNotFoundError(errno.ENOENT, "got nothing, wanted a save to set aside; list what is there", self.text)

    def _set_aside(self) -> str:
        root = root_of(self.pointer())
        if root is None and self.content(MARKER) is None:  # half a copy, or damaged
            lone = [name for name in self.inside() if TOKEN.fullmatch(name) and self._state(name) is None]
            for token in [*lone, *(["plain"] if any(not is_ours(name) for name in self.inside()) else [])]:
                self.put(f"ASIDE-{token}", b"")
            self.durable()
            return self.text
        now, token = (MARKER, "plain") if root is None else (MARKER, root)
        if root is not None and self._root() != root:
            now = f".COMPLETE-{root}"
        self.move(now, f"ASIDE-{token}")
        taken = root_of(parse_pointer(self.content(f"ASIDE-{token}"))) or "plain"
        if taken != token:  # another has saved since we looked
            self.move(f"ASIDE-{token}", f"ASIDE-{taken}")
        self.durable()
        return self.files("" if taken == "plain" else taken).text

    def leftovers(self) -> list[Remnant]:
        """What is here besides the checkpoint: saves that are under way, killed, replaced, set aside, being deleted."""
        if self.is_link():
            return []
        names, root = self.inside(), root_of(self.pointer())
        states = {m[1]: kind for kind, p in _KINDS for m in map(p.fullmatch, names) if m}
        if (now := self._root()) is not None and self._stands(now):  # else a person has renamed what it names
            states |= {n: "old" for n in names if TOKEN.fullmatch(n) and n not in states and n != now}
        return [
            Remnant(self, token, kind, self.files("" if token == "plain" else token))
            for token, kind in sorted(states.items())
            if token != root
        ]

    def remove(self, left: Remnant) -> None:
        """Remove a leftover, whatever it is and whoever owns it."""
        file = {"tmp": f".COMPLETE-{left.token}", "aside": f"ASIDE-{left.token}"}.get(left.kind)
        self._discard(file, left.token)

    # ---- a directory of them

    def clean(self, pattern: str, keep: Collection[str], watch: Watch) -> None:
        """Remove what dead saves and deletions left of children whose full name matches, but for those in `keep`: what
        is being written or deleted now. watch: what this process knows of the savers of others."""

        def notes() -> None:
            clean_savers(self.notes(), pattern, keep, watch, lambda name, token: self.child(name).has_begun(token))

        names = [name for name in self.children() if re.fullmatch(pattern, name) and name not in keep]
        failed: list[OSError] = []
        for work in (*(partial(self.child(name).sweep, watch) for name in names), notes):
            try:
                work()
            except OSError as error:
                failed.append(error)
        if failed:
            raise failed[0]

    def sweep(
        self, watch: Watch, synced: bool = False, stop: threading.Event | None = None
    ) -> list[tuple[str, Holder]]:
        """Remove what can never be the checkpoint, until `stop`. Returns what belongs to savers that may live.

        A token's own file is looked for first, then the pointer is read. What has no file was condemned, or published
        before we read the pointer: if that names another, it was replaced.

        synced: the names in NAME are durable. Who moved the pointer may have been killed, or refused, before that:
        files that an older pointer names must not go while that one may come back after a power cut.
        """
        if self.is_link():
            return []
        doubts, living, names = [], set(), self.inside()
        for name in names:
            if not (m := _DRAFT.fullmatch(name)):
                continue
            saver = alive(self.saver_notes, self._note(m[1]), watch)
            if saver is not None:
                living.add(m[1])
                doubts += [] if saver.sure else [(self.files(m[1]).text, saver)]
            elif self._root() is None and root_of(self.pointer()) == m[1]:
                # Killed in its last move: it is the checkpoint. It stays a draft until the next save: to finish the
                # move here could put it over the pointer that another has just acknowledged.
                living.add(m[1])
                self.saver_notes.remove(self._note(m[1]))
            else:
                self._condemn(name, m[1])
        root = self._root()
        lone = [n for n in names if TOKEN.fullmatch(n) and n not in living and n != root and self._state(n) is None]
        root = self._root() if lone else root
        if root is not None and not self._stands(root):
            root = None
        replaced = [n for n in lone if root not in (None, n)]
        gone = [m[1] for m in map(_GONE.fullmatch, self.inside(".GONE-")) if m]
        plain = root is not None and not _PLAIN.isdisjoint(names) and "ASIDE-plain" not in names
        if (gone or replaced or plain) and not synced:
            self.durable()
        for token in gone:
            self._finish(token, stop)
        for token in replaced:
            self._remove(token, stop)
        for name in _PLAIN.intersection(names) if plain else ():
            self.delete(name, stop)
        if gone or replaced or plain or not names:
            self.tidy()
        return doubts

    # ---- one token

    def _note(self, token: str) -> str:
        return saving_note(self.text.rpartition("/")[2], token)

    def _root(self) -> str | None:
        """The token that COMPLETE names; drafts do not count."""
        return root_of(parse_pointer(self.content(MARKER)))

    def _has_marker(self, token: str) -> bool:
        return self.is_there(f"{token}/{MARKER}")

    def _stands(self, root: str) -> bool:
        """Whether the save that the pointer names replaces others: where a move is a copy, it may have been put there
        while a cleaner was deleting the save, and is about to be taken back."""
        return not self.is_there(f".GONE-{root}") and self._has_marker(root)

    def _state(self, token: str) -> str | None:
        """Which file a token has, but for COMPLETE. Looked at one by one: a listing may be old."""
        names = (f".COMPLETE-{token}", f"ASIDE-{token}", f".GONE-{token}")
        return next((name for name in names if self.is_there(name)), None)

    def _condemn(self, name: str | None, token: str) -> None:
        """From here on the save can only be deleted, and needs no owner. name: its file now; None where it has none."""
        with suppress(FileNotFoundError):  # another process was faster: to publish it, or to condemn it
            if name is None:
                self.put(f".GONE-{token}", b"")
            else:
                self.move(name, f".GONE-{token}")
                if _DRAFT.fullmatch(name):
                    self.saver_notes.remove(self._note(token))

    def _discard(self, name: str | None, token: str) -> None:
        """Condemn a save and remove its files."""
        self._condemn(name, token)
        if self.is_there(f".GONE-{token}"):
            self.durable()
            self._finish(token, None)
        self.tidy()

    def _finish(self, token: str, stop: threading.Event | None) -> None:
        """Delete what was condemned, its .GONE- last."""
        if token != "plain":
            self._remove(token, stop)
        elif self._root() is not None or self.content(MARKER) is None:
            for name in self.inside():
                if not is_ours(name):
                    self.delete(name, stop)
        if stop is None or not stop.is_set():
            self.drop(f".GONE-{token}")

    def _remove(self, token: str, stop: threading.Event | None) -> None:
        """Remove the files of a token that no pointer names. The look is after the end of its draft."""
        if token != self._root() and not self.is_there(f"ASIDE-{token}"):  # in this order: `set_aside` moves it
            self.delete(token, stop)

    def _was_taken(self, token: str) -> bool:
        """Whether a process that cleans has come into the middle of our last move; waits while it makes up its mind.

        It puts .GONE- and then reads the pointer, we put the pointer and then look for .GONE-: one sees the other.
        Looked at token first, pointer second: one that was replaced by now was saved.
        """
        end = time.monotonic() + _SETTLE_S
        while (gone := self.is_there(f".GONE-{token}")) and self._root() == token and time.monotonic() < end:
            time.sleep(0.02)
        return (gone or not self._has_marker(token)) and self._root() == token

    def _take_back(self, token: str, before: bytes | None) -> None:
        """The pointer is what it was before, unless that is gone by now, or another save has put its own.

        Ours may have gone over one that another has put while we slept: to a complete save that now has no file.
        """
        root, markers = root_of(parse_pointer(before)), dict[str, bytes]()
        for name in filter(TOKEN.fullmatch, self.inside()):
            if name not in (token, root) and self._state(name) is None and (marker := self.content(f"{name}/{MARKER}")):
                markers[name] = marker
        there = before is not None and (self.is_there(MANIFEST) if root is None else self._has_marker(root))
        back = pointer_to(*markers.popitem()) if markers else before if there else None
        if self._root() == token:
            self.put(MARKER, back) if back is not None else self.drop(MARKER)


_KINDS = (("tmp", _DRAFT), ("aside", _ASIDE), ("gone", _GONE))


def pointer_to(token: str, marker: bytes) -> bytes:
    """The pointer to a save whose own marker is this."""
    return json.dumps({**json.loads(marker), "version": MARKER_VERSION, "root": token}).encode()


def is_ours(name: str) -> bool:
    """Whether a name in NAME is one of this protocol."""
    return name == MARKER or any(p.fullmatch(name) for p in (TOKEN, _DRAFT, _ASIDE, _GONE))


def _token(root: str) -> str:
    """The token of a Storage's root."""
    return root.rpartition("/")[2]
