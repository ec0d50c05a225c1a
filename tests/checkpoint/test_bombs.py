"""Manifests and files with numbers that promise the world: an error for work in proportion to what is there.

Work is counted (calls, bytes read, memory), so that the time of day changes nothing.
"""

import contextlib
import json
import shutil

import pytest
import torch

from fmegatron import checkpoint
from fmegatron.checkpoint import CheckpointError
from fmegatron.checkpoint.tools import verify
from fmegatron.checkpoint.tools.differences import diff
from fmegatron.checkpoint.tools.source import open_source
from fmegatron.checkpoint.writing import plan
from fmegatron.layout import Layout, Mesh
from tests.checkpoint.test_malice import BYTES, sign, watched
from tests.checkpoint.tokens import files_of
from tests.pairs import few
from tests.work import counted

ONE = {"w": Layout((8, 6), torch.float32, Mesh()), "p": Layout((300, 64), torch.float32, Mesh())}
STATE = {"w": torch.arange(48.0).view(8, 6), "p": torch.ones(300, 64)}


@pytest.fixture
def saved(tmp_path, monkeypatch):
    monkeypatch.setattr(plan, "MOST_SMALL", 0)  # the small leaves are packed
    checkpoint.save(tmp_path / "run/a", STATE, ONE, metadata={"lr": [1e-3, {"n": 2}]})
    return tmp_path / "run/a"


def leaf_row(**changes):
    row = {"shape": [8, 6], "dtype": "float32", "layout": {"mesh": 0, "spec": [], "flat": []}, "array": "arrays/w"}
    return {**row, **changes}


def with_boxes(boxes):
    row = leaf_row(pieces=[{"array": "pieces/w/0", "offset": 0, "boxes": boxes}])
    del row["array"]
    return row


def array_row(**changes):
    row = {"shape": [8, 6], "dtype": "float32", "chunk": [8, 6], "band": [1, 6], "first_digest": 0, "digest": "0" * 16}
    return {**row, **changes}


PIECES = array_row(shape=[48], chunk=[48], band=[8], first_digest=8)


def manifest(leaves=None, arrays=None, **changes):
    """A manifest that is right but for what is given."""
    value = {"format": "fmegatron.checkpoint", "version": 1, "step": 1, "metadata": {}, "digest_count": 14}
    meshes = [{"names": ["fsdp"], "sizes": [1], "digits": [[1, 1]]}]
    leaves = leaves or {"w": leaf_row(), "p": with_boxes([[[0, 0], [8, 6], 0, [6, 1]]])}
    arrays = arrays if arrays is not None else {"arrays/w": array_row(), "pieces/w/0": PIECES}
    return json.dumps({**value, "meshes": meshes, "leaves": leaves, "arrays": arrays, **changes})


def one_array(leaf, n, names=("w",)):
    """A manifest of a leaf, or several alike, in one array of n float32."""
    array = array_row(shape=[n], chunk=[n], band=[min(n, 1 << 18)])
    return manifest(dict.fromkeys(names, leaf), {"pieces/w/0": array}, digest_count=-(-n // (1 << 18)))


def hole(key, text):
    """A manifest with this text as the value of a key."""
    return manifest(**{key: "@"}).replace('"@"', text)


def scattered_boxes():
    """A leaf in 1,024 boxes that are as large together as it is, are cut in 11 dims, and share no corner."""
    n, a, b = 12_000, 8000, 9000  # a * b = n * n / 2
    strides = [a * b] * 9 + [b, 1]
    boxes = [
        [[i >> d & 1 for d in range(9)] + [3 * i, 2 * i], [1] * 9 + [a, b], i * a * b, strides] for i in range(1024)
    ]
    return {**with_boxes(boxes), "shape": [2] * 9 + [n, n]}, 1024 * a * b


def empty(*paths):
    """The rows of leaves without elements."""
    row = {k: v for k, v in leaf_row(shape=[0], pieces=[]).items() if k != "array"}
    return dict.fromkeys(paths, row)


def below(count, depth):
    """A manifest of leaves without elements, each below `depth` folders of its own."""
    return manifest(empty(*(f"{i:04}" + "/a" * depth for i in range(count))), {}, digest_count=0)


def huge_array(n, dims):
    """An array whose numbers of chunks and digests are right and have hundreds of digits."""
    shape, inner = [n] * dims, [1] * (dims - 1)
    array = array_row(shape=shape, chunk=[*inner, 1 << 18], band=[*inner, 1 << 18])
    count = n ** (dims - 1) * (n >> 18)
    return manifest({"w": leaf_row(shape=shape)}, {"arrays/w": array}, digest_count=count)


def assigned(sizes, count):
    """A leaf whose dims are assigned in many pieces, one of them the whole, to very many ranks."""
    spec = [{"axes": [a], "sizes": [n, *[0] * (count - 1)], "order": [*range(count)]} for a, n in sizes.items()]
    mesh = {"names": [*sizes], "sizes": [2 ** (60 // len(sizes))] * len(sizes), "digits": [[2**60, 1]]}
    layout = {"mesh": 0, "spec": spec, "flat": [], "padded": True}
    return manifest({"w": leaf_row(layout=layout)}, {"arrays/w": array_row()}, meshes=[mesh], digest_count=8)


MiB = 1 << 20
SAME = [[0, 0], [8, 6], 0, [6, 1]]
BOMBS = {  # name: (content of manifest.json, what the error says)
    "brackets": (lambda: "[" * (20 * MiB), "memory"),
    "braces": (lambda: '{"a":' * (4 * MiB), "nested too deeply"),
    "lists": (lambda: hole("metadata", "{" + '"a":[' + "[]," * (7 * MiB) + "[]]}"), "memory"),
    "objects": (lambda: hole("metadata", '{"a":[' + "{}," * (7 * MiB) + "{}]}"), "memory"),
    "ones": (lambda: hole("step", "[" + "1," * (10 * MiB) + "1]"), "got step"),
    "keys": (lambda: hole("metadata", "{" + ",".join(f'"{i:x}":0' for i in range(1 << 19)) + "}"), "not fit"),
    "digits": (lambda: hole("step", "7" * (10 * MiB)), "digits"),
    "fraction": (lambda: hole("metadata", '{"a":0.' + "7" * (10 * MiB) + "}"), "not fit"),
    "exponent": (lambda: hole("metadata", '{"a":1e999999999}'), "no JSON number"),
    "nan": (lambda: hole("metadata", '{"a":NaN}'), "no JSON number"),
    "infinity": (lambda: hole("metadata", '{"a":-Infinity}'), "no JSON number"),
    "text": (lambda: hole("step", '"' + "x" * (30 * MiB) + '"'), "got step"),
    "name": (lambda: manifest({"w" * (5 * MiB): leaf_row()}), "a path of"),
    "slashes": (lambda: manifest({"/" * (100_000): leaf_row()}), "a path of"),
    "deep": (lambda: below(2000, 2040), "a path of 2041 parts"),
    "long": (lambda: below(4000, 63), "not fit"),
    "below": (lambda: manifest(empty("a/b", "a")), "'a/b' lies below the leaf 'a'"),
    "dims": (lambda: manifest({"w": leaf_row(shape=[2] * 1_000_000)}), "wanted a list"),
    "large dims": (
        lambda: manifest(
            {"w": leaf_row(shape=[2**61] * 64)},
            {"arrays/w": array_row(shape=[2**61] * 64, chunk=[1] * 64, band=[1] * 64)},
        ),
        "larger than any array",
    ),
    "many chunks": (
        lambda: manifest(
            {"w": leaf_row(shape=[2**40])},
            {"arrays/w": array_row(shape=[2**40], chunk=[1], band=[1])},
            digest_count=2**40,
        ),
        "too small",
    ),
    "digest count": (lambda: huge_array(2**61, 40), "larger than any array"),
    "beyond 64 bits": (lambda: huge_array(2**40, 2), "larger than any array"),
    "boxes": (lambda: one_array(with_boxes([[[0, 0], [1, 1], 0, [1, 1]]] * 50_000), 50_000), "hold 50000 of 48"),
    "twice and not at all": (
        lambda: one_array(with_boxes([[[0, 0], [4, 6], 0, [6, 1]], [[2, 0], [4, 6], 24, [6, 1]]]), 48),
        "do not cover .* exactly once",
    ),
    "corners": (lambda: one_array(*scattered_boxes()), "do not cover .* exactly once"),
    "no boxes": (lambda: one_array({**with_boxes([]), "shape": [0]}, 1 << 40), "a piece without boxes"),
    "stride 0": (lambda: one_array({**with_boxes([[[0], [1 << 50], 0, [0]]]), "shape": [1 << 50]}, 1), "at least 1"),
    "strides that meet": (lambda: one_array(with_boxes([[*SAME[:3], [1, 1]]]), 48), "two elements at one place"),
    "one place for many": (
        lambda: one_array(with_boxes([SAME]), 48, names=[f"w{i}" for i in range(900)]),
        "more than its leaves have, or fewer",
    ),
    "mesh": (lambda: manifest(meshes=[{"names": ["fsdp"], "sizes": [2**61], "digits": [[2**61, 1]]}]), "not fit"),
    "meshes": (lambda: manifest(meshes=[{"names": ["a"] * 200_000, "sizes": [2] * 200_000, "digits": []}]), None),
    "parts": (
        lambda: manifest(
            {"w": leaf_row(layout={"mesh": 0, "spec": [{"axes": [], "parts": 2**60}], "flat": []})},
            {"arrays/w": array_row()},
            digest_count=8,
        ),
        None,
    ),
    "pieces": (lambda: assigned({"a": 8}, 60_000), None),
    "pieces of dims": (lambda: assigned({"a": 8, "b": 6}, 8000), None),
    "leaves": (lambda: manifest({f"w{i}": leaf_row() for i in range(20_000)}), "another leaf's array"),
    "utf-16": (lambda: manifest().encode("utf-16"), "not the JSON"),
    "not utf-8": (lambda: manifest().encode().replace(b"fsdp", b"\xff\xfe\xfd\xfc"), "not the JSON"),
}  # fmt: skip


def test_the_bombs_are_right_but_for_one_thing(saved):
    sign(saved, manifest().encode())
    assert set(checkpoint.layouts(saved)) == {"w", "p"}


LARGE = ("ones", "keys", "boxes", "long", "text")  # seconds each; two by default


@pytest.mark.long
@pytest.mark.parametrize("name", [*(name for name in BOMBS if name not in LARGE), *few(2, zip(LARGE), LARGE)])
def test_bombs(saved, name):
    make, match = BOMBS[name]
    data = make()
    data = data if isinstance(data, bytes) else data.encode()
    sign(saved, data)
    size = len(data)
    del data

    def budget(work):
        assert work.calls < 100_000 + 3 * size and work.read < 2 * size + MiB and work.memory < BYTES, (size, work)

    with counted() as work, watched(saved), pytest.raises(ValueError, match=match) as caught:
        checkpoint.restore(saved, ONE)
    budget(work)
    assert len(str(caught.value)) < 2000
    with counted() as work, watched(saved), contextlib.suppress(ValueError):
        checkpoint.layouts(saved)
    budget(work)
    assert verify(saved).damages


def sparse(at, size):
    with open(at, "r+b") as f:
        f.truncate(size)


@pytest.mark.parametrize("file", ["manifest.json", "COMPLETE", "digests.bin", "arrays/p/c.0.0", "packed/0/c.0"])
@pytest.mark.parametrize("size", [1 << 40, 1 << 31], ids=["TiB", "2GiB"])
def test_huge_files(saved, file, size):
    """Holes cost nothing on the disk: their size must not become memory, or time; `verify`, too, does not read them."""
    sparse(files_of(saved) / file, size)
    with counted() as work, pytest.raises(CheckpointError):
        checkpoint.restore(saved, ONE)
    with counted() as more:
        damages = verify(saved).damages
    assert any(file in str(damage) for damage in damages)
    work += more
    assert work.calls < 100_000 and work.read < MiB and work.memory < BYTES, work


@pytest.mark.parametrize("chunks", ["missing", "short"])
def test_a_digests_file_for_what_is_not_there(saved, chunks):
    """As large as the manifest says, a hole of 8 GiB: the digests of an array of which there are no files."""
    at, n = saved.parent / "b", 1 << 50
    shutil.copytree(saved, at)
    for path, digest in ((saved, "0" * 16), (at, "1" * 16)):
        array = array_row(shape=[n], chunk=[1 << 22], band=[1 << 18], digest=digest)
        sign(path, manifest({"w": leaf_row(shape=[n])}, {"arrays/w": array}, digest_count=n >> 18).encode())
        sparse(files_of(path) / "digests.bin", 8 * (n >> 18))
        if chunks == "short":
            (files_of(path) / "arrays/w").mkdir()
            (files_of(path) / "arrays/w/c.0").write_bytes(bytes(1 << 10))
    with counted() as work, pytest.raises(CheckpointError, match="w: .*arrays/w/c.0"):
        diff(open_source(saved), open_source(at))
    with counted() as more:
        damages = verify(saved).damages
    work += more
    assert any(d.file == "digests.bin" and d.kind == "size" for d in damages)
    assert work.calls < 500_000 and work.read < MiB and work.memory < BYTES, work


def test_a_huge_manifest_with_its_marker(saved):
    """The marker says that it has a TiB: more than any manifest has."""
    sparse(files_of(saved) / "manifest.json", 1 << 40)
    for at in (files_of(saved) / "COMPLETE", saved / "COMPLETE"):
        at.write_text(json.dumps({**json.loads(at.read_text()), "manifest_bytes": 1 << 40}))
    with counted() as work, pytest.raises(CheckpointError, match="manifest"):
        checkpoint.restore(saved, ONE)
    assert work.read < MiB and work.memory < BYTES, work
