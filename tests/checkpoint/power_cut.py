"""A disk on which only what was synced is sure: the states that it may have after a power cut."""

import os
import random
import shutil
from dataclasses import dataclass, field
from pathlib import Path

# What is there of what was not synced. least: nothing. most: all. prefix: of each file and of each directory the first
# changes, as with a journal. lagging: all, but for one directory, of which there is nothing. subset: of each directory
# any of its changes, of a rename perhaps one half; a file has its length and zeros in the place of what was written
# last, or its first writes, the last one perhaps torn.
HOW = ("least", "most", "prefix", "lagging", "subset")


@dataclass
class File:
    """Its bytes: after the last fsync, and after each change behind it."""

    versions: list[bytes] = field(default_factory=lambda: [b""])


@dataclass
class Directory:
    """Its names as of the last fsync, and the changes behind it: each sets names to what they name, or to None."""

    names: dict[str, object] = field(default_factory=dict)
    since: list[dict[str, object]] = field(default_factory=list)

    def now(self) -> dict[str, object]:
        return _with(self.names, self.since)


@dataclass(frozen=True)
class Link:
    """A symbolic link."""

    target: str


def _with(names, changes):
    found = dict(names)
    for change in changes:
        for name, what in change.items():
            found.pop(name, None) if what is None else found.update({name: what})
    return found


class Disk:
    """What lies below a folder, all of it synced; then `change` by change."""

    def __init__(self, top):
        self.top = os.path.realpath(top)
        self.root = self._load(Path(self.top))

    def _load(self, at):
        if at.is_symlink():
            return Link(os.readlink(at))
        if at.is_dir():
            return Directory({child.name: self._load(child) for child in at.iterdir()})
        return File([at.read_bytes()])

    def _find(self, path):
        """What has a path now; None: nothing."""
        at = self.root
        for part in path[len(self.top) :].split("/")[1:]:
            at = at.now().get(part) if isinstance(at, Directory) else None
        return at

    def change(self, op, path, other, offset, data) -> None:
        """One of a record (changes.py)."""
        above, name = self._find(os.path.dirname(path)), os.path.basename(path)
        if op in ("create", "mkdir", "symlink"):
            made = {"create": File, "mkdir": Directory, "symlink": lambda: Link(other)}[op]()
            above.since.append({name: made})
        elif op in ("unlink", "rmdir"):
            above.since.append({name: None})
        elif op == "rename":
            assert os.path.dirname(other) == os.path.dirname(path), (path, other)  # the protocol has no others
            above.since.append({os.path.basename(other): self._find(path), name: None})
        elif (found := self._find(path)) is None:
            pass  # a file that was removed and is open
        elif op == "fsync":
            if isinstance(found, Directory):
                found.names, found.since = found.now(), []
            else:
                del found.versions[:-1]
        else:
            old = found.versions[-1]
            new = old[:offset] + bytes(max(0, offset - len(old)))
            found.versions.append(new + data + old[offset + len(data) :] if op == "write" else new)

    def after_a_cut(self, rng: random.Random, how: str) -> dict[str, object]:
        """One state: path below the folder -> bytes of a file, Link, or None of a directory."""
        state, lags = {}, None
        if how == "lagging":
            how, late = "most", [one for one in _directories(self.root) if one.since]
            lags = rng.choice(late) if late else None

        def put(what, at):
            state[at] = what if isinstance(what, Link) else _bytes(what, rng, how) if isinstance(what, File) else None
            if isinstance(what, Directory):
                for name, child in _names(what, rng, "least" if what is lags else how).items():
                    put(child, f"{at}/{name}")

        put(self.root, "")
        return state


def _directories(at):
    if isinstance(at, Directory):
        yield at
        for child in at.now().values():
            yield from _directories(child)


def _bytes(file, rng, how):
    sure, *others = file.versions
    if how == "least" or not others:
        return sure
    if how == "most":
        return others[-1]
    kept = rng.randrange(len(file.versions))
    whole = file.versions[kept]
    if how == "prefix" or kept == len(file.versions) - 1:
        return whole
    longer = file.versions[kept + 1]
    if rng.random() < 0.5:  # its length is known, its last blocks are not
        return whole[: len(longer)] + bytes(max(0, len(longer) - len(whole)))
    return longer[: rng.randrange(len(longer) + 1)] if longer.startswith(whole) else whole


def _names(directory, rng, how):
    changes = directory.since
    if how == "prefix":
        changes = changes[: rng.randint(0, len(changes))]
    elif how == "subset":
        halves = [{name: what} for change in changes for name, what in change.items()]
        changes = [one for one in (halves if rng.random() < 0.5 else changes) if rng.random() < 0.5]
    return _with(directory.names, [] if how == "least" else changes)


def put_down(state, at) -> None:
    """Make a state a folder, in the place of one that is there."""
    shutil.rmtree(at, ignore_errors=True)
    for path, what in state.items():  # a directory stands before what is in it
        if what is None:
            os.mkdir(f"{at}{path}")
        elif isinstance(what, Link):
            os.symlink(what.target, f"{at}{path}")
        else:
            Path(f"{at}{path}").write_bytes(what)


def key_of(state) -> int:
    """Equal for equal states."""
    return hash(frozenset(state.items()))
