"""400 random changes to the files of a checkpoint: a reader or verify finds each; no reader returns other bits.

Every reader has its turn: restore, a Manager, a snapshot, `load_state_dict`. They read marker, manifest, digests.bin
and every band of the leaves that are asked for, and find all changes there. `verify` reads everything, so it alone
finds what no restore reads: zarr.json of arrays and groups (for other readers), bands that are padding only, and files
that do not belong there.
"""

import collections
import contextlib
import itertools
import json
import os
import random
import shutil

import pytest
import torch

from fmegatron import checkpoint, interop, tree
from fmegatron.checkpoint import CheckpointError
from fmegatron.checkpoint.tools import verify
from fmegatron.checkpoint.tools.source import open_source
from fmegatron.layout import Layout, Mesh, Split
from tests.checkpoint.fake_world import assert_same_bits, save_all, small_sizes
from tests.checkpoint.tokens import files_of
from tests.pairs import few, mixed
from tests.sampling import seeds
from tests.work import Work, counted

MESHES = {"4 ranks": Mesh(fsdp=2, tp=2), "1 rank": Mesh(fsdp=1, tp=1)}
JSON_FILES = ("manifest.json", "COMPLETE", "zarr.json")


def layouts_on(mesh):
    """Grid leaves (even, padded at the edge, interleaved), flat pieces, and packed leaves."""
    return {
        "block": {
            "w": Layout((8, 16), torch.bfloat16, mesh, ("fsdp", Split("tp", parts=2))),
            "edge": Layout((7, 12), torch.float32, mesh, (None, "tp")),
        },
        "v": Layout((8, 16), torch.bfloat16, mesh, ("fsdp", Split("tp", parts=2))),  # files like those of block/w
        "flat": Layout((5, 7), torch.float32, mesh, flat=("fsdp", "tp") if mesh.size > 1 else ()),
        "norm": Layout((16,), torch.float32, mesh),
        "step": Layout((), torch.int64, mesh),
        "flag": Layout((), torch.bool, mesh),
    }


def state(seed):
    torch.manual_seed(seed)
    return tree.map(lambda x: torch.randint(1, 1000, x.shape).to(x.dtype), layouts_on(Mesh(fsdp=1, tp=1)))


@pytest.fixture(autouse=True)
def _tiny():
    with small_sizes():
        yield


def read_files(path):
    names = (os.path.join(folder, name) for folder, _, found in os.walk(path) for name in found)
    return {os.path.relpath(name, path): open_bytes(name) for name in sorted(names)}


POINTER = "../COMPLETE"


def read_save(path):
    """The files of the save at a path, and the pointer that names it."""
    return {**read_files(files_of(path)), POINTER: open_bytes(os.path.join(path, "COMPLETE"))}


def open_bytes(name):
    with open(name, "rb") as f:
        return f.read()


class Changes:
    """Kinds of damage: each returns {file: new bytes, or None for a file that is gone}."""

    def __init__(self, rng, files, other):
        self.rng, self.files, self.other = rng, files, other  # `other`: another checkpoint of the same tree

    def _any(self, test=lambda name: True):
        return self.rng.choice([name for name in self.files if test(name)])

    def _data(self):
        """Mostly chunks and digests; the other files by turns."""
        return self._any(lambda name: not name.endswith(".json")) if self.rng.random() < 0.7 else self._any()

    def flipped_bit(self):
        name = self._data()
        data = bytearray(self.files[name])
        data[self.rng.randrange(len(data))] ^= 1 << self.rng.randrange(8)
        return {name: bytes(data)}

    def zeroed_page(self):
        name, page = self._data(), self.rng.choice((8, 32, 64))
        data = bytearray(self.files[name])
        at = self.rng.randrange(0, len(data), page)
        data[at : at + page] = bytes(len(data[at : at + page]))
        return {name: bytes(data)}

    def overwritten(self):
        name = self._data()
        data = bytearray(self.files[name])
        at = self.rng.randrange(len(data))
        data[at : at + 16] = self.rng.randbytes(len(data[at : at + 16]))
        return {name: bytes(data)}

    def truncated(self):
        name = self._data()
        return {name: self.files[name][: self.rng.randrange(len(self.files[name]))]}

    def extended(self):
        name, more = self._data(), self.rng.choice((1, 8, 4096))
        return {name: self.files[name] + self.rng.choice((bytes(more), b" " * more, self.rng.randbytes(more)))}

    def extended_by_a_hole(self):
        return {self._any(): self.rng.choice((1 << 31, 1 << 40))}

    def deleted(self):
        return {self._data(): None}

    def swapped(self):
        """Two files of the same size, of the same array or of two."""
        a = self._any(lambda name: "/c." in name)
        alike = [b for b in self.files if "/c." in b and b != a and len(self.files[b]) == len(self.files[a])]
        return {a: self.files[b], b: self.files[a]} if alike and (b := self.rng.choice(alike)) else {}

    def copied(self):
        return dict(list(self.swapped().items())[:1])

    def of_another_step(self):
        """A file of another checkpoint of the same tree: what a re-save in place leaves when it is killed."""
        name = self._any(lambda name: name in self.other)
        return {name: self.other[name]}

    def swapped_digests(self):
        data = self.files["digests.bin"]
        rows = [data[i : i + 8] for i in range(0, len(data), 8)]
        i, j = self.rng.randrange(len(rows)), self.rng.randrange(len(rows))
        rows[i], rows[j] = rows[j], rows[i]
        return {"digests.bin": b"".join(rows)}

    def edited_json(self):
        name = self._any(lambda name: name.endswith(JSON_FILES))
        value = json.loads(self.files[name])
        row = value
        while True:
            keys = list(row) if isinstance(row, dict) else list(range(len(row)))
            key = self.rng.choice(keys)
            if not isinstance(row[key], dict | list) or not row[key] or self.rng.random() < 0.2:
                break
            row = row[key]
        if self.rng.random() < 0.3:
            del row[key]
        else:
            row[key] = self.rng.choice((0, 1, 7, None, "w", [], {}, 1.5, [1, 2]))
        return {name: json.dumps(value).encode()}

    def extra_file(self):
        folder = os.path.dirname(self._any(lambda name: name != POINTER))
        return {os.path.join(folder, self.rng.choice(("c.9.9", "notes.txt", "part.3.json"))): b"something"}


KINDS = tuple(name for name in vars(Changes) if not name.startswith("_"))


def put(path, changes):
    for name, data in changes.items():
        at = os.path.join(path, name)
        if data is None:
            os.remove(at)
        elif isinstance(data, int):  # a hole up to this size
            os.truncate(at, data)
        else:
            with open(at, "wb") as f:
                f.write(data)


def names_it(text, names):
    """Whether a message names the file, or a leaf that has something there."""
    parts = {name.split("/", 1)[1].rsplit("/", 1)[0] for name in names if "/" in name}
    return any(name in text for name in names) or any(part.rsplit("/", 1)[0] in text for part in parts)


def readers(path):
    """Ways to get all elements of the checkpoint, in the structure of the layouts."""
    target = layouts_on(MESHES["1 rank"])

    def filled(read):
        into = state(7)
        read(into)
        return into

    def by_snapshot():
        with checkpoint.open_snapshot(path) as saved:
            return checkpoint.restore(saved, target)

    return (
        lambda: checkpoint.restore(path, target),
        lambda: checkpoint.Manager(os.path.dirname(path)).restore(0, target)[0],
        by_snapshot,
        lambda: filled(lambda into: interop.load_state_dict(path, into)),
    )


def damage(path, other, seed, times):
    """Change `path` again and again; how often was each kind found by each reader. Raises on a silent one."""
    at, files, found = files_of(path), read_save(path), collections.Counter()
    changes, read = Changes(random.Random(seed), files, read_save(other)), itertools.cycle(readers(path))
    target, whole = layouts_on(MESHES["1 rank"]), state(0)
    while found.total() < times:
        kind = KINDS[found.total() % len(KINDS)]
        change = {n: data for n, data in getattr(changes, kind)().items() if data != files.get(n, b"")}
        if not change:
            continue
        put(at, change)
        try:
            with counted() if kind == "extended_by_a_hole" else contextlib.nullcontext(Work()) as work:
                assert_same_bits(next(read)(), whole, (kind, list(change)))
        except CheckpointError as error:
            assert names_it(str(error), change), (kind, list(change), str(error))
            found[kind, "restore"] += 1
        else:
            damages = verify(path).damages
            assert any(names_it(str(d), change) for d in damages), f"{kind} of {list(change)} was found by nobody"
            found[kind, "verify"] += 1
        assert work.read < 1 << 20 and work.memory < 200 << 20, (change, work)
        put(at, {name: files.get(name) for name in change})
    assert_same_bits(checkpoint.restore(path, target), whole)
    assert not verify(path).damages
    return found


def check_changes(folder, ranks, seed, times):
    """Damage a checkpoint of so many ranks; returns who found what."""
    mesh = MESHES[ranks]
    for name, step in (("step_00000000", 0), ("b", 1)):
        assert save_all(folder / name, state(step), layouts_on(mesh), step=step) == [None] * mesh.size
    found = damage(folder / "step_00000000", folder / "b", seed, times)
    assert found.total() == times and {kind for kind, _ in found} == set(KINDS)
    # What moves whole files or digests about is found by restore, each time.
    assert not any(found[kind, "verify"] for kind in ("swapped", "copied", "swapped_digests")), found
    assert sum(n for (_, who), n in found.items() if who == "restore") > 0.6 * times, found
    return found


CHANGES = mixed(MESHES, seeds("changes", 1, 1))


@pytest.mark.long
@pytest.mark.parametrize(("ranks", "seed"), few(2, CHANGES))
def test_changes_are_found(tmp_path, ranks, seed):
    """What is in the way of a reader is found by it, the rest by verify; nothing is silent, nothing without bound."""
    check_changes(tmp_path, ranks, seed, 100)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(1, 6))
@pytest.mark.parametrize("ranks", MESHES)
def test_2000_changes_are_found(tmp_path, ranks, seed):
    """The same with other random numbers."""
    check_changes(tmp_path, ranks, seed, 2000)


@pytest.mark.parametrize("ranks", MESHES)
def test_every_byte_that_is_read_is_checked(tmp_path, ranks):
    """A flip in each band of each chunk file: restore finds it unless the band is padding, and then verify does."""
    mesh = MESHES[ranks]
    assert save_all(tmp_path / "a", state(0), layouts_on(mesh)) == [None] * mesh.size
    files, padding = read_files(files_of(tmp_path / "a")), []
    ends = {a.file_name(f): a.index_span(f)[0] for a in open_source(tmp_path / "a").manifest.arrays.values()
            for f in itertools.product(*map(range, a.file_grid))}  # fmt: skip
    target = layouts_on(MESHES["1 rank"])
    for name, data in files.items():
        for at in range(0, len(data), 32) if "/c." in name else ():
            put(files_of(tmp_path / "a"), {name: data[:at] + bytes([data[at] ^ 4]) + data[at + 1 :]})
            try:
                assert_same_bits(checkpoint.restore(tmp_path / "a", target), state(0))
                assert any(name in str(d) for d in verify(tmp_path / "a").damages)
                padding.append((name, at, data[at : min(at + 32, ends[name])]))
                assert at < ends[name], "an index that restore did not read"
            except CheckpointError as error:
                assert name in str(error)
            put(files_of(tmp_path / "a"), {name: data})
    assert all(not any(rest) for _, _, rest in padding), "a band that restore did not read holds more than zeros"


def test_parts_of_the_tree(tmp_path):
    """A restore of some leaves finds damage in those, and is not hindered by damage in others."""
    mesh = MESHES["4 ranks"]
    assert save_all(tmp_path / "a", state(0), layouts_on(mesh)) == [None] * 4
    put(files_of(tmp_path / "a"), {"arrays/norm/c.0": bytes(64)})
    target = layouts_on(MESHES["1 rank"])
    with pytest.raises(CheckpointError, match=r"norm: its chunk file .*arrays/norm/c\.0 is damaged"):
        checkpoint.restore(tmp_path / "a", {"norm": target["norm"]}, strict="subset")
    got = checkpoint.restore(tmp_path / "a", {"v": target["v"]}, strict="subset")
    assert_same_bits(got, {"v": state(0)["v"]})
    (damage,) = verify(tmp_path / "a").damages
    assert damage.leaf == "norm" and damage.file == "arrays/norm/c.0"


def test_links_and_swapped_directories(tmp_path):
    """Whole directories in each other's place, and links to the very same bytes, are found too."""
    assert save_all(tmp_path / "a", state(0), layouts_on(MESHES["4 ranks"])) == [None] * 4
    at, target = tmp_path / "a/arrays", layouts_on(MESHES["1 rank"])
    os.rename(at / "v", at / "x")
    os.rename(at / "block/w", at / "v")
    os.rename(at / "x", at / "block/w")
    with pytest.raises(CheckpointError, match=r"(v|block/w): its chunk file .* is damaged"):
        checkpoint.restore(tmp_path / "a", target)
    shutil.rmtree(at / "block/w")
    (at / "block/w").symlink_to(at / "v")
    with pytest.raises(CheckpointError, match="block/w: .* leads outside of the checkpoint"):
        checkpoint.restore(tmp_path / "a", target)
