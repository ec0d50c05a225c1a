"""`reshard`: bit-exact between meshes, the files that a save would write, in bounded memory; all or nothing."""

import io
import json
import os
import re

import pytest
import torch

from fmegatron import checkpoint, tree
from fmegatron.checkpoint.__main__ import main
from fmegatron.checkpoint.tools import reshard, verify
from fmegatron.checkpoint.tools.resharding import parse_mesh, parse_rules, plan_of, target_layouts
from fmegatron.checkpoint.tools.source import open_source
from fmegatron.layout import Layout, Mesh
from fmegatron.tree.structure import flatten, unflatten
from tests.checkpoint.counting import counting
from tests.checkpoint.fake_world import assert_same_bits, cut_tree, save_all, small_sizes
from tests.checkpoint.test_reshard import MESHES, layouts_on, state_for
from tests.checkpoint.tokens import files_of
from tests.pairs import few


def call(*argv):
    out, err = io.StringIO(), io.StringIO()
    status = main([str(a) for a in argv], out, err)
    return status, out.getvalue(), err.getvalue()


def snapshot(root):
    """Content of every file."""
    found = {}
    for folder, _, names in os.walk(root):
        for name in names:
            at = os.path.join(folder, name)
            with open(at, "rb") as f:
                found[os.path.relpath(at, root)] = f.read()
    return found


@pytest.mark.slow
@pytest.mark.long
@pytest.mark.parametrize(
    "source, bound", few(2, zip(MESHES[1:6], (4096, 1 << 20, 3000, 5000, 8000), strict=True), map(str, MESHES[1:6]))
)
def test_the_files_are_those_of_a_save(tmp_path, source, bound):
    """From any mesh to any other: byte for byte what the ranks would have saved, but for pieces, of which none is left;
    whatever bound that holds a file."""
    saved = layouts_on(source)
    state = state_for(saved)
    with small_sizes():
        assert save_all(tmp_path / "a", state, saved, step=7, metadata={"k": [1]}) == [None] * source.size
        for i, target in enumerate(MESHES[source.size % 3 :: 3]):
            wanted = layouts_on(target)
            assert save_all(tmp_path / f"w{i}", state, wanted, step=7, metadata={"k": [1]}) == [None] * target.size
            a = open_source(tmp_path / "a")
            plans = plan_of(target_layouts(a, like=open_source(tmp_path / f"w{i}")), bound=bound)
            reshard(a, tmp_path / f"b{i}", plans, bound=bound)
            got, want = snapshot(files_of(tmp_path / f"b{i}")), snapshot(files_of(tmp_path / f"w{i}"))
            grids = {n.rsplit("/", 2)[0].replace("pieces/", "arrays/") for n in want if re.match(r"pieces/.*/c\.0$", n)}
            same = [n for n in want if not n.startswith(("pieces/", "manifest", "digests", "COMPLETE"))]
            assert all(got[n] == want[n] for n in same) and not any(n.startswith("pieces/") for n in got)
            assert {os.path.dirname(n) for n in got.keys() - want.keys() if "/c." in n} == grids
            assert verify(tmp_path / f"b{i}").damages == ()
            for rank, local in enumerate(cut_tree(state, wanted)):
                assert_same_bits(checkpoint.restore(tmp_path / f"b{i}", wanted, rank=rank), local)
            assert checkpoint.metadata(tmp_path / f"b{i}") == {"k": [1]}
            assert json.loads(got["manifest.json"])["step"] == 7


def test_real_sizes_with_packed_leaves(tmp_path):
    saved = layouts_on(MESHES[5])
    saved["big"] = Layout((96, 1024), torch.float32, MESHES[5], ("fsdp", "tp"))
    state = state_for(saved)
    assert save_all(tmp_path / "a", state, saved) == [None] * 8
    status, out, err = call("reshard", tmp_path / "a", tmp_path / "b", "--mesh", "tp=4,fsdp=2", "--memory", "4096B")
    assert (status, err) == (0, "") and "fsdp" in out
    stored = checkpoint.layouts(tmp_path / "b")
    assert stored["big"] == Layout((96, 1024), torch.float32, Mesh(tp=4, fsdp=2), ("fsdp", "tp"))
    assert stored["opt"]["0"]["m"].flat == ("fsdp",)  # dp is gone
    wanted = nested_like(stored, saved)
    for rank, local in enumerate(cut_tree(state, wanted)):
        assert_same_bits(checkpoint.restore(tmp_path / "b", wanted, rank=rank), local)
    assert verify(tmp_path / "b").damages == ()


def nested_like(stored, layouts):
    """Stored layouts (nested dicts) in the containers of `layouts`."""
    paths, _, spec = flatten(layouts)

    def at(path):
        value = stored
        for key in path.split("/"):
            value = value[key]
        return value

    return unflatten(spec, [at(path) for path in paths])


def test_bounded_memory_and_bytes_read(tmp_path, monkeypatch):
    """A leaf far above the bound: no more than the bound is held, and nothing is read twice when chunks nest."""
    mesh = Mesh(fsdp=2)
    layouts = {
        "x": Layout((256, 64), torch.float32, mesh, ("fsdp",)),
        "flat": Layout((97, 31), torch.float32, mesh, flat=("fsdp",)),
    }
    state = state_for(layouts)
    held = []

    def counted(source, wanted, verify=True):
        held.append(sum(t.view.nbytes for targets in wanted.values() for t in targets))
        return fill(source, wanted, verify)

    with small_sizes(chunk=4096, band=512):
        assert save_all(tmp_path / "a", state, layouts) == [None] * 2
        store, count = counting(tmp_path / "a")
        source = open_source(store)
        fill = source.__class__.fill
        monkeypatch.setattr(source.__class__, "fill", counted)
        reshard(source, tmp_path / "b", plan_of(target_layouts(source, [Mesh(fsdp=8)]), bound=8192), bound=8192)
    total = sum(x.nbytes for x in tree.leaves(state))
    assert max(held) <= 8192 and sum(held) >= total
    assert total <= count.nbytes <= 1.3 * total, (count.nbytes, total)


def test_few_bytes_are_read_under_the_new_layout(tmp_path):
    """Written for rows, wanted by columns: after the reshard a rank reads what it needs and no more."""
    x = torch.randn(512, 512)
    saved, wanted = ({"x": Layout((512, 512), torch.float32, Mesh(tp=8), spec)} for spec in (("tp",), (None, "tp")))
    nbytes = []
    with small_sizes(chunk=1 << 17, band=1 << 14):
        assert save_all(tmp_path / "a", {"x": x}, saved) == [None] * 8
        (tmp_path / "rules.json").write_text(json.dumps([[".*", [None, "tp"]]]))
        assert (
            call("reshard", tmp_path / "a", tmp_path / "b", "--mesh", "tp=8", "--rules", tmp_path / "rules.json")[0]
            == 0
        )
        for path in ("a", "b"):
            store, count = counting(tmp_path / path)
            assert torch.equal(checkpoint.restore(store, wanted, rank=3)["x"], x[:, 192:256])
            nbytes.append(count.nbytes)
    assert nbytes[1] <= 1.01 * x.nbytes / 8 < nbytes[0]


def test_chunks(tmp_path):
    x = torch.randn(300, 400)
    assert (
        save_all(tmp_path / "a", {"x": x}, {"x": Layout((300, 400), torch.float32, Mesh(tp=2), ("tp",))}) == [None] * 2
    )
    assert call("reshard", tmp_path / "a", tmp_path / "b", "--chunks", "x=50x128")[0] == 0
    array = open_source(tmp_path / "b").manifest.arrays["arrays/x"]
    assert array.chunk == (50, 128) and array.grid == (6, 4)
    assert torch.equal(checkpoint.restore(tmp_path / "b", {"x": Layout((300, 400), torch.float32, Mesh())})["x"], x)
    assert verify(tmp_path / "b").damages == ()
    for chunks, text in (
        ("x=100x400", "divisor of 150"),
        ("x=5", "2 dims"),
        ("y=1x1", "wanted one that matches a leaf"),
        ("x", "PATTERN=SHAPE"),
    ):
        status, _, err = call("reshard", tmp_path / "a", tmp_path / "c", "--chunks", chunks)
        assert status == 2 and text in err and not os.path.exists(tmp_path / "c")


def test_wrong_requests(tmp_path):
    state = {"x": torch.zeros(4, 4), "y": torch.zeros(3)}
    layouts = tree.map(lambda t: Layout(tuple(t.shape), t.dtype, Mesh(tp=1), ("tp",)), state)
    checkpoint.save(tmp_path / "a", state, layouts)
    checkpoint.save(tmp_path / "other", {"x": torch.zeros(4, 5)}, {"x": Layout((4, 5), torch.float32, Mesh())})
    rules = tmp_path / "rules.json"
    for argv, text in (
        ([], "wanted --mesh"),
        (["--mesh", "tp=x"], "wanted axes with sizes"),
        (["--mesh", "tp=2", "--mesh", "ep=3"], "different sizes"),
        (["--mesh", "tp=2", "--like", tmp_path / "other"], "wanted one of them"),
        (["--like", tmp_path / "other"], "got shape (4, 4)"),
        (["--mesh", "tp=2", "--rules", tmp_path / "none.json"], "No such file"),
        (["--mesh", "tp=2", "--rules", rules], "wanted [pattern, spec]"),
        (["--mesh", "tp=99999999"], "at most"),
    ):
        rules.write_text('[["x", "tp"]]')
        status, out, err = call("reshard", tmp_path / "a", tmp_path / "b", *argv)
        assert (status, out) == (2, "") and text in err and len(err.splitlines()) == 1, (argv, err)
    for text, wanted in (
        ('[["x", ["tp"]]]', "no rule for the path 'y'"),
        ('[[".*", ["zz"]]]', "axis 'zz'"),
        ("[", "no JSON"),
    ):
        rules.write_text(text)
        status, _, err = call("reshard", tmp_path / "a", tmp_path / "b", "--mesh", "tp=2", "--rules", rules)
        assert status == 2 and wanted in err, err
    assert sorted(os.listdir(tmp_path)) == ["a", "other", "rules.json"]


def test_rules_and_views(tmp_path):
    """Experts on their own view of the ranks; flat axes by rule."""
    mesh = Mesh(dp=2, tp=2)
    layouts = {
        "dense": Layout((8, 8), torch.float32, mesh, ("tp",)),
        "experts": Layout((4, 8), torch.float32, mesh.view(ep=4), ("ep",)),
    }
    state = state_for(layouts)
    with small_sizes():
        assert save_all(tmp_path / "a", state, layouts) == [None] * 4
        assert call("reshard", tmp_path / "a", tmp_path / "b", "--mesh", "tp=8,dp=1", "--mesh", "ep=2,etp=4")[0] == 0
        stored = checkpoint.layouts(tmp_path / "b")
        assert (
            str(stored["dense"]) == "f32[8@tp, 8] on tp8·dp1" and str(stored["experts"]) == "f32[4@ep, 8] on ep2·etp4"
        )
        (tmp_path / "r.json").write_text('[["dense", [], ["dp"]], ["experts", [null, {"axes": ["ep"], "parts": 2}]]]')
        argv = ("--mesh", "tp=1,dp=2", "--mesh", "ep=2", "--rules", tmp_path / "r.json")
        assert call("reshard", tmp_path / "a", tmp_path / "c", *argv)[0] == 0
        stored = checkpoint.layouts(tmp_path / "c")
        assert stored["dense"].flat == ("dp",) and str(stored["experts"]) == "f32[4, (2×4)@ep] on ep2"
        for rank, local in enumerate(cut_tree(state, stored)):
            assert_same_bits(checkpoint.restore(tmp_path / "c", stored, rank=rank), local)
    assert parse_mesh("1") == Mesh() and parse_rules("[]", "f") == ()


def test_all_or_nothing(tmp_path):
    """Damage in the source, or a checkpoint at the target: nothing is left, and what was there stays."""
    x = torch.randn(300, 300)
    layouts = {"x": Layout((300, 300), torch.float32, Mesh(tp=1), ("tp",))}
    checkpoint.save(tmp_path / "a", {"x": x}, layouts)
    checkpoint.save(tmp_path / "old", {"x": x + 1}, layouts)
    status, _, err = call("reshard", tmp_path / "a", tmp_path / "old", "--mesh", "tp=2")
    assert status == 2 and "--overwrite" in err
    at = tmp_path / "a/arrays/x/c.0.0"
    data = bytearray(at.read_bytes())
    at.write_bytes(bytes(data[:9]) + bytes([data[9] ^ 4]) + bytes(data[10:]))
    status, _, err = call("reshard", tmp_path / "a", tmp_path / "old", "--mesh", "tp=2", "--overwrite")
    assert status == 1 and "damaged between bytes" in err and len(err.splitlines()) == 1
    assert sorted(os.listdir(tmp_path)) == ["a", "old"]
    assert torch.equal(checkpoint.restore(tmp_path / "old", layouts)["x"], x + 1)
    at.write_bytes(data)
    assert call("reshard", tmp_path / "a", tmp_path / "old", "--mesh", "tp=2", "--overwrite")[0] == 0
    assert torch.equal(checkpoint.restore(tmp_path / "old", layouts)["x"], x) and sorted(os.listdir(tmp_path)) == [
        "a",
        "old",
    ]
    assert call("reshard", tmp_path / "a", tmp_path / "a", "--mesh", "tp=4", "--overwrite")[0] == 0  # in place
    assert torch.equal(checkpoint.restore(tmp_path / "a", layouts)["x"], x)
