"""Files of several chunks: any layout, opened by us and by others; damage in them; how few they are."""

import itertools
import json
import math
import os
from unittest import mock

import numpy as np
import pytest
import tensorstore as ts
import torch
import zarr

from fmegatron import checkpoint
from fmegatron.checkpoint import CheckpointError
from fmegatron.checkpoint.files.stores import open_store
from fmegatron.checkpoint.reading import files as reading_files
from fmegatron.checkpoint.tools import verify
from fmegatron.checkpoint.tools.source import open_source
from fmegatron.checkpoint.writing import plan as planning
from fmegatron.checkpoint.writing.plan import chunks_to_write, grid_array, plan
from fmegatron.layout import Layout, Mesh, Split
from tests.checkpoint.counting import counting
from tests.checkpoint.fake_world import assert_same_bits, cut_tree, run, save_all, small_sizes
from tests.checkpoint.test_reshard import any_bits
from tests.checkpoint.tokens import files_of, plain, reseal
from tests.pairs import each_value

F32 = torch.float32
LAYOUTS = {
    "rows": Layout((8, 64, 32), F32, Mesh(dp=4), (None, "dp")),
    "columns": Layout((64, 256), F32, Mesh(tp=4), (None, "tp")),
    "two axes on two dims": Layout((6, 32, 64), F32, Mesh(fsdp=2, tp=2), (None, "fsdp", "tp")),
    "two axes on one dim": Layout((128, 48), F32, Mesh(fsdp=2, tp=2), (("fsdp", "tp"),)),
    "uneven rows": Layout((103, 64), F32, Mesh(dp=4), ("dp",)),
    "a prime of rows": Layout((53, 32), F32, Mesh(dp=3), ("dp",)),
    "interleaved parts": Layout((64, 192), F32, Mesh(tp=4), (None, Split(("tp",), (128, 32, 32)))),
    "flattened": Layout((8, 32, 16), F32, Mesh(dp=4), (), flat=("dp",)),
    "replicas": Layout((64, 128), F32, Mesh(dp=4, tp=2), (None, "tp")),
}


def opened(path, name):
    """The array by tensorstore and by zarr."""
    spec = {"driver": "zarr3", "kvstore": {"driver": "file", "path": f"{path}/{name}/"}}
    return ts.open({**spec, "fill_missing_data_reads": False}).result(), zarr.open_array(f"{path}/{name}", mode="r")


@pytest.mark.long
@pytest.mark.parametrize(("what", "file"), each_value(LAYOUTS, (128, 600, 1 << 20)))
def test_any_layout_in_any_files(tmp_path, what, file):
    layout, state = LAYOUTS[what], {"w": any_bits(LAYOUTS[what].shape, F32)}
    path = tmp_path / "a"
    with small_sizes(file=file), mock.patch.object(planning, "_LEAST_FILES", 1 << 20):
        assert save_all(path, state, {"w": layout}) == [None] * layout.mesh.size
        array = open_source(path).manifest.arrays["arrays/w"]
        assert bool(array.shard) == (file > 128 and math.prod(array.file_grid) < math.prod(array.grid))
        assert array.shard or file < 1 << 20
        names = [name for name in os.listdir(path / "arrays/w") if name != "zarr.json"]
        assert sorted(names) == sorted(
            array.file_name(f).rpartition("/")[2] for f in itertools.product(*map(range, array.file_grid))
        )
        wanted = state["w"].numpy().view(np.uint32)
        part = tuple(slice(n // 5, n - n // 3) for n in layout.shape)
        for other in opened(path, "arrays/w"):
            whole, some = (other[...], other[part]) if isinstance(other, zarr.Array) else (
                other.read().result(), other[part].read().result())  # fmt: skip
            assert np.array_equal(np.asarray(whole).view(np.uint32), wanted)
            assert np.array_equal(np.ascontiguousarray(some).view(np.uint32), wanted[part])
        for mesh, spec in ((Mesh(dp=3), ("dp",)), (Mesh(fsdp=3, tp=2), ("fsdp", "tp")), (Mesh(), ())):
            target = {"w": Layout(layout.shape, F32, mesh, spec)}
            for rank, local in enumerate(cut_tree(state, target)):
                assert_same_bits(checkpoint.restore(path, target, rank=rank), local, (what, mesh))
        assert verify(path).damages == ()


def test_each_file_has_one_writer_and_replicas_share_them():
    mesh = Mesh(dp=4, fsdp=2)
    layouts = [Layout((64 * n, 4096), F32, mesh, ("fsdp",)) for n in (8, 24, 16, 2, 40, 8)]
    layouts += [Layout((48, 4096), F32, mesh, ("fsdp",))] * 6
    leaves = plan([*"abcdef", *(f"layers/{i}/w" for i in range(6))], layouts)
    writers, nbytes = {}, [0] * mesh.size
    for rank in range(mesh.size):
        for leaf in leaves:
            array = grid_array(leaf)
            for index, box in chunks_to_write(leaf, rank):
                writers.setdefault((array.name, array.file_of((*leaf.at, *index))), set()).add(rank)
                nbytes[rank] += box.size * 4
    assert sum(nbytes) == sum(x.nbytes for x in layouts) and all(len(ranks) == 1 for ranks in writers.values())
    arrays = {grid_array(leaf).name: grid_array(leaf) for leaf in leaves}
    assert len(writers) == sum(math.prod(a.file_grid) for a in arrays.values())
    largest = max(a.index_span((0,) * len(a.grid))[1] for a in arrays.values())
    assert max(nbytes) - sum(nbytes) / mesh.size <= largest <= 9 << 20


APART = {
    **{f"layers/{i}/{name}": Layout((24, 16), F32, Mesh(fsdp=2, tp=2), spec)
       for i in range(12) for name, spec in (("wq", ("fsdp", "tp")), ("wo", ("tp", "fsdp")))},
    **{f"layers/{i}/norm": Layout((16,), torch.float16, Mesh(fsdp=2, tp=2), ()) for i in range(12)},
    # Another shape of the same pattern, a number with two places, one that is no number, too few, and a star.
    **{f"layers/{i}/wq": Layout((8, 16), F32, Mesh(fsdp=2, tp=2), ("fsdp",)) for i in range(12, 17)},
    **{f"moe/{i}/experts/{e}/up": Layout((8, 8), F32, Mesh(fsdp=2, tp=2), ("fsdp",))
       for i in range(2) for e in range(6)},
    **{f"odd/{i}/w": Layout((8, 8), F32, Mesh(fsdp=2, tp=2)) for i in ("00", "01", "02", "03")},
    **{f"few/{i}": Layout((8, 8), F32, Mesh(fsdp=2, tp=2)) for i in range(3)},
    **{f"mixed/{i}": Layout((8, 8), F32, Mesh(fsdp=2, tp=2)) for i in range(4)},
    **{f"mixed/{i}/w": Layout((8, 8), F32, Mesh(fsdp=2, tp=2)) for i in range(4, 8)},
    "layers/*/wo": Layout((4, 4), F32, Mesh(fsdp=2, tp=2)),
}  # fmt: skip


def nested(flat):
    tree = {}
    for path, x in flat.items():
        *above, last = path.split("/")
        at = tree
        for part in above:
            at = at.setdefault(part, {})
        at[last] = x
    return tree


def apart(path, mesh=None):
    """Saves the leaves of APART; returns the state and the layouts, flat."""
    state = {p: any_bits(x.shape, x.dtype) for p, x in APART.items()}
    assert save_all(path, nested(state), nested(APART)) == [None] * 4
    return state


@pytest.mark.long
@pytest.mark.parametrize("file", [512, 1 << 20])
def test_leaves_alike_are_one_array(tmp_path, file):
    with small_sizes(file=file):
        state = apart(tmp_path / "a")
        found = open_source(tmp_path / "a").manifest
        stacks = {x.array: found.arrays[x.array].shape[0] for x in found.leaves.values() if x.at}
        assert stacks == {
            "arrays/layers/%2A/wq": 12, "arrays/layers/%2A.1/wo": 12, "arrays/layers/%2A/norm": 12,
            "arrays/layers/%2A.1/wq": 5, "arrays/moe/0/experts/%2A/up": 6, "arrays/moe/1/experts/%2A/up": 6,
            "arrays/mixed/%2A": 4, "arrays/mixed/%2A.1/w": 4,
        }  # fmt: skip
        assert found.leaves["layers/11/wq"].at == (11,) and found.leaves["layers/*/wo"].at == ()
        for name in stacks:
            leaves = {x.at: p for p, x in found.leaves.items() if x.array == name}
            for other in map(np.asarray, (t.read().result() if isinstance(t, ts.TensorStore) else t[...]
                                          for t in opened(tmp_path / "a", name))):  # fmt: skip
                for (k,), path in leaves.items():
                    assert other[k].tobytes() == state[path].numpy().tobytes(), path
        target = {p: Layout(x.shape, x.dtype, Mesh(dp=3), ("dp",)) for p, x in APART.items()}
        for rank, local in enumerate(cut_tree(nested(state), nested(target))):
            assert_same_bits(checkpoint.restore(tmp_path / "a", nested(target), rank=rank), local)
        assert verify(tmp_path / "a").damages == ()
        wanted = {"layers": {"7": {"wq": target["layers/7/wq"]}}}
        store, count = counting(tmp_path / "a")
        got = [checkpoint.restore(store, wanted, rank=rank, strict="subset") for rank in range(3)]
        assert_same_bits(torch.cat([x["layers"]["7"]["wq"] for x in got]), state["layers/7/wq"])
        assert count.nbytes <= 2 * state["layers/7/wq"].nbytes, "other layers are not read"


def test_where_ranks_are_many_paths_that_differ_in_a_word_share_files(tmp_path):
    """Eight ranks with a little of each leaf; six have the paths as they are. Restored on three."""
    flat = {p: (8 * 6, 8) for p in ("p/w", "m/w", "v/w", "m/b/w", "v/b/w")} | {"m/other": (96, 8), "*/w": (48, 4)}
    for ranks, joined in ((8, {"%2A/b/w": 2, "%2A.1/w": 3}), (6, {})):
        layouts = {p: Layout(shape, F32, Mesh(fsdp=ranks), ("fsdp",)) for p, shape in flat.items()}
        state = {p: any_bits(x.shape, x.dtype) for p, x in layouts.items()}
        with small_sizes(file=1 << 20), mock.patch.object(planning, "_MANY_RANKS", 8):
            assert save_all(tmp_path / f"{ranks}", nested(state), nested(layouts)) == [None] * ranks
            found = open_source(tmp_path / f"{ranks}").manifest
            assert {x.array: len(found.arrays[x.array].shape) for x in found.leaves.values() if x.at} == {
                f"arrays/{name}": 3 for name in joined
            }
            assert all(found.arrays[f"arrays/{name}"].shape[0] == n for name, n in joined.items())
            files = [at for at in files_of(tmp_path / f"{ranks}").rglob("c.*") if at.is_file()]
            assert len(files) == ranks * (len(flat) - sum(joined.values()) + len(joined))
            target = {p: Layout(x.shape, x.dtype, Mesh(dp=3), ("dp",)) for p, x in layouts.items()}
            for rank, local in enumerate(cut_tree(nested(state), nested(target))):
                assert_same_bits(checkpoint.restore(tmp_path / f"{ranks}", nested(target), rank=rank), local)
            for name in joined:
                leaves = {x.at: p for p, x in found.leaves.items() if x.array == f"arrays/{name}"}
                for other in opened(tmp_path / f"{ranks}", f"arrays/{name}"):
                    other = np.asarray(other.read().result() if isinstance(other, ts.TensorStore) else other[...])
                    assert all(other[k].tobytes() == state[p].numpy().tobytes() for (k,), p in leaves.items())


def test_damage_in_a_stack_names_its_leaf(tmp_path):
    with small_sizes(file=1 << 20):
        apart(tmp_path / "a")
        a = open_source(tmp_path / "a").manifest.arrays["arrays/layers/%2A/wq"]
        name, at = a.chunk_file((7, 0, 0)), a.offset((7, 0, 0))
        change(tmp_path / "a" / name, at, flipped)
        layouts = nested({p: x for p, x in APART.items() if p in ("layers/7/wq", "layers/6/wq")})
        with pytest.raises(
            CheckpointError, match=rf"layers/7/wq: its chunk file .*{name} is damaged between bytes {at} "
        ):
            checkpoint.restore(tmp_path / "a", layouts, rank=0, strict="subset")
        (damage,) = verify(tmp_path / "a").damages
        assert (damage.leaf, damage.file, damage.start) == ("layers/7/wq", name, at)


def flipped(data, at):
    data[at] ^= 4


def zeroed(data, at):
    data[at : at + 4096] = bytes(len(data[at : at + 4096]))


def ones(data, at):
    data[-16 * 8 :] = b"\xff" * (16 * 8)


def zeros(data, at):
    data[-16 * 8 :] = bytes(16 * 8)


def hole(data, at):
    data[-16:] = b"\xff" * 16


def swapped(data, at):
    data[-32:] = data[-16:] + data[-32:-16]


def change(path, at, how):
    data = bytearray(path.read_bytes())
    how(data, at)
    path.write_bytes(data)


def in_objects(path):
    """The files of a directory, damaged or not, as objects."""
    store = open_store(f"memory://shards/{path.name}", {})
    values = store.values
    values.delete()
    for folder, _, names in os.walk(path):
        for name in names:
            at = os.path.join(folder, name)
            with open(at, "rb") as f:
                values.write(os.path.relpath(at, path), [f.read()])
    return store


DAMAGES = {
    "flip": (flipped, 300, "is damaged between bytes 256 and 384"),
    "flip of the last byte": (flipped, 1023, "is damaged between bytes 896 and 1024"),
    "zeroed page": (zeroed, 0, "is damaged between bytes"),
    "index of ones": (ones, 0, "is damaged between bytes 1024 and 1152: its index"),
    "index of zeros": (zeros, 0, "is damaged between bytes 1024 and 1152: its index"),
    "a hole": (hole, 0, "is damaged between bytes 1024 and 1152: its index"),
    "chunks swapped in the index": (swapped, 0, "is damaged between bytes 1024 and 1152: its index"),
    "flip in the index": (flipped, 1100, "is damaged between bytes 1024 and 1152: its index"),
    "short": (lambda data, at: data.pop(), 0, "has 1151 bytes, wanted 1152"),
    "long": (lambda data, at: data.append(0), 0, "has 1153 bytes, wanted 1152"),
    "without its index": (lambda data, at: data.__delitem__(slice(1024, None)), 0, "has 1024 bytes, wanted 1152"),
    "missing": (None, 0, "is missing"),
}  # fmt: skip


@pytest.mark.parametrize(("what", "where"), each_value(DAMAGES, ("folder", "objects")))
def test_damage_is_refused_with_leaf_and_place(tmp_path, what, where):
    """Two files of eight chunks of 128 bytes; the second is damaged."""
    layouts, state = {"w": Layout((64, 8), F32, Mesh(tp=2), ("tp",))}, {"w": torch.arange(512.0).view(64, 8) + 1}
    how, at, text = DAMAGES[what]
    with small_sizes(band=128, file=1 << 20):
        assert save_all(tmp_path / "a", state, layouts) == [None] * 2
        assert open_source(tmp_path / "a").manifest.arrays["arrays/w"].shard == (8, 1)
        file = tmp_path / "a/arrays/w/c.1.0"
        assert file.stat().st_size == 1152
        change(file, at, how) if how else file.unlink()
        path = tmp_path / "a" if where == "folder" else in_objects(tmp_path / "a")
        one = {"w": Layout((64, 8), F32, Mesh())}
        for verified in (True, False) if "index" in what or what in ("a hole", "short", "long", "missing") else (True,):
            with pytest.raises(
                CheckpointError, match=f"w: its chunk file .*arrays/w/c.1.0.* {text}|w: .*c.1.0.*{text}"
            ):
                checkpoint.restore(path, one, verify=verified)
        damages = verify(path).damages
        assert damages and {(d.file, d.leaf) for d in damages} == {("arrays/w/c.1.0", "w")}
        if "its index" in text:
            assert [(d.start, d.stop) for d in damages] == [(1024, 1152)]
        assert_same_bits(checkpoint.restore(path, {"w": layouts["w"]}, rank=0), {"w": state["w"][:32]})


def test_a_file_is_opened_once_and_its_index_is_read_once(tmp_path):
    """By all jobs of a restore, on several threads; and files that nobody reads any more do not stay open."""
    layouts = {f"x{c}": Layout((64, 64), F32, Mesh(tp=2), ("tp",)) for c in "abcdefgh"}
    with small_sizes(file=2048), mock.patch.object(reading_files, "_MOST_OPEN", 4):
        state = {p: any_bits(x.shape, F32) for p, x in layouts.items()}
        assert save_all(tmp_path / "a", state, layouts) == [None] * 2
        store, count = counting(tmp_path / "a")
        before = len(os.listdir("/proc/self/fd"))
        one = {p: Layout(x.shape, F32, Mesh()) for p, x in layouts.items()}
        assert_same_bits(checkpoint.restore(store, one), state)
        chunks = {name: n for name, n in count.opened.items() if "/c." in name}
        arrays = open_source(tmp_path / "a").manifest.arrays.values()
        assert sum(math.prod(a.grid) for a in arrays) >= 4 * len(chunks) and set(chunks.values()) == {1}
        assert len(os.listdir("/proc/self/fd")) <= before + 2


@pytest.mark.parametrize(
    "change, text",
    [
        ({"shard": [0, 1]}, "whole numbers of at least 1"),
        ({"shard": [-1, 1]}, "whole numbers of at least 1"),
        ({"shard": [1 << 40, 1 << 40]}, "is not a part of"),
        ({"shard": [8]}, "is not a part of"),
        ({"shard": [17, 1]}, "is not a part of"),
        ({"shard": "8"}, "wanted list"),
        ({"shard": [4, 1]}, "has .* bytes, wanted|is missing|does not describe"),
        ({"shard": []}, "has .* bytes, wanted|is missing|does not describe"),
    ],
)
def test_a_manifest_that_lies_about_files(tmp_path, change, text):
    layouts, state = {"w": Layout((64, 8), F32, Mesh(tp=2), ("tp",))}, {"w": torch.ones(64, 8)}
    with small_sizes(band=128, file=1 << 20):
        assert save_all(tmp_path / "a", state, layouts) == [None] * 2
        rewrite(tmp_path / "a", lambda m: m["arrays"]["arrays/w"].update(change))
        with pytest.raises(CheckpointError, match=text):
            checkpoint.restore(tmp_path / "a", {"w": Layout((64, 8), F32, Mesh())})


@pytest.mark.long
@pytest.mark.parametrize(
    "change, text",
    [
        ({"at": [12]}, "is no leaf of a stack"),
        ({"at": [1, 0]}, "at most 1"),
        ({"at": [-1]}, "at least 0"),
        ({"at": [3]}, "is another leaf's array"),
        ({"at": []}, "another shape"),
    ],
)
def test_a_manifest_that_lies_about_stacks(tmp_path, change, text):
    with small_sizes():
        apart(tmp_path / "a")
        rewrite(tmp_path / "a", lambda m: m["leaves"]["layers/2/wq"].update(change))
        with pytest.raises(CheckpointError, match=text):
            checkpoint.layouts(tmp_path / "a")


def rewrite(path, how):
    """Change the manifest, and marker and pointer to fit."""
    value = json.loads((files_of(path) / "manifest.json").read_text())
    how(value)
    reseal(files_of(path), json.dumps(value).encode(), value["version"])


def test_version_3_is_read(tmp_path):
    """A file for each chunk, every leaf by itself, no word of either in the manifest."""
    with small_sizes(), mock.patch.object(planning, "_MOST_SLOTS", 1):
        with mock.patch.object(planning, "stacked", lambda plans: {}):
            state = apart(tmp_path / "a")
    rewrite(tmp_path / "a", lambda m: m.update(version=3))
    plain(tmp_path / "a")
    text = (tmp_path / "a/manifest.json").read_text()
    assert '"version": 3' in text and '"shard"' not in text and '"at"' not in text
    with small_sizes():
        target = {p: Layout(x.shape, x.dtype, Mesh(dp=3), ("dp",)) for p, x in APART.items()}
        for rank, local in enumerate(cut_tree(nested(state), nested(target))):
            assert_same_bits(checkpoint.restore(tmp_path / "a", nested(target), rank=rank), local)
        assert checkpoint.describe(tmp_path / "a").version == 3 and verify(tmp_path / "a").damages == ()


def test_a_restore_while_ranks_share(tmp_path):
    """read="once": replicas read different files of a stack, and none twice."""
    with small_sizes(file=1024):
        state = apart(tmp_path / "a")
        target = {p: Layout(x.shape, x.dtype, Mesh(dp=3)) for p, x in APART.items()}
        store, count = counting(tmp_path / "a")
        got = run(3, lambda world: checkpoint.restore(store, nested(target), world=world, read="once"))
        for tree in got:
            assert_same_bits(tree, nested(state))
        assert count.nbytes <= 1.2 * sum(x.nbytes for x in state.values())
