"""`show` and the statistics: of every dtype what numpy says in float64, in portions, whatever the layout."""

import io
import json

import numpy as np
import pytest
import torch

from fmegatron import checkpoint, tree
from fmegatron.checkpoint.__main__ import main
from fmegatron.checkpoint.tools.printed import print_table, short, tree_rows
from fmegatron.checkpoint.tools.show import Statistics, show
from fmegatron.checkpoint.tools.source import blocks, cut, open_source, stream
from fmegatron.layout import Layout, Mesh
from tests.checkpoint.fake_world import assert_same_bits, save_all, small_sizes
from tests.checkpoint.test_reshard import DTYPES, MESHES, any_bits, layouts_on, state_for


def call(*argv):
    out, err = io.StringIO(), io.StringIO()
    status = main([str(a) for a in argv], out, err)
    return status, out.getvalue(), err.getvalue()


def expected(x):
    """The statistics by numpy, on the whole."""
    if x.is_complex():
        values = x.to(torch.complex128).abs().numpy()
    elif x.is_floating_point() and x.element_size() < 4:
        values = x.float().double().numpy()
    else:
        values = x.numpy()
    finite = values[np.isfinite(values)]
    wide = finite.astype(np.float64)
    return {
        "count": values.size,
        "nonfinite": values.size - finite.size,
        "zeros": int((values == 0).sum()),
        "min": finite.min().item(),
        "max": finite.max().item(),
        "mean": wide.mean(),
        "std": wide.std(),
    }


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_statistics_of_any_bits(dtype):
    x = any_bits((2500,), dtype, seed=3)
    if dtype in (torch.float64, torch.complex128):  # squares of random bits are infinite
        x = torch.where(x.abs() < 1e100, x, torch.zeros_like(x))
        x[7] = float("nan")
    found, wanted = Statistics(), expected(x)
    for at in range(0, 2500, 333):
        found.add(x[at : at + 333])
    got = found.to_json()
    for name in ("count", "nonfinite", "zeros", "min", "max"):
        assert got[name] == wanted[name], (name, got, wanted)
    assert got["mean"] == pytest.approx(wanted["mean"], rel=1e-9, abs=1e-9 * abs(wanted["std"]))
    assert got["std"] == pytest.approx(wanted["std"], rel=1e-9)


def test_statistics_of_nothing_and_of_extremes():
    assert Statistics().to_json() == dict(count=0, nonfinite=0, zeros=0, min=None, max=None, mean=None, std=None)
    s = Statistics()
    s.add(torch.tensor([float("nan"), float("inf")]))
    assert s.nonfinite == 2 and s.mean is None and s.min is None
    s = Statistics()
    s.add(torch.tensor([0, (1 << 64) - 1], dtype=torch.uint64))
    assert (s.min, s.max) == (0, (1 << 64) - 1)
    s = Statistics()
    for _ in range(10):
        s.add(torch.full((1000,), 1e8))
    assert s.mean == 1e8 and s.std == 0


@pytest.mark.medium
@pytest.mark.parametrize("most", [40, 1000, 1 << 20])
@pytest.mark.parametrize("mesh", MESHES[4:6], ids=str)
def test_streams_are_the_leaves(tmp_path, mesh, most):
    """Blocks of any bound, put one after another, are the leaf; none is above the bound."""
    layouts = layouts_on(mesh)
    state = state_for(layouts)
    with small_sizes():
        assert save_all(tmp_path / "a", state, layouts) == [None] * mesh.size
        source, parts, ends = open_source(tmp_path / "a"), {}, []
        for block, x in stream(source, list(source.leaves.values()), most):
            assert x.nbytes <= most and tuple(x.shape) == block.shape
            before = parts.setdefault(block.leaf.path, [])
            assert block.first == sum(p.numel() for p in before)
            before.append(x.reshape(-1))
            ends += [block.leaf.path] * block.last
    assert ends == list(source.manifest.leaves)
    flat = {"x": {p: torch.cat(xs) for p, xs in parts.items()}}
    from_state = dict(zip(source.manifest.leaves, tree.leaves(state), strict=True))
    assert_same_bits(flat, {"x": {p: x.reshape(-1) for p, x in from_state.items()}})


def test_blocks_end_where_chunks_end(tmp_path):
    x = torch.zeros(64, 100)
    with small_sizes(chunk=4000, band=400):
        checkpoint.save(tmp_path / "a", {"x": x}, {"x": Layout((64, 100), torch.float32, Mesh())})
        source = open_source(tmp_path / "a")
        rows = source.manifest.arrays["arrays/x"].chunk[0]
        found = list(blocks(source, source.manifest.leaves["x"], rows * 400 * 2 + 399))
    assert rows > 1 and all(b.start[0] % rows == 0 for b in found)
    assert list(cut((), 10)) == [((), ())] and list(cut((0, 3), 1)) == [((0, 0), (0, 3))]


def test_text(tmp_path):
    mesh = Mesh(tp=2)
    state = {"a": {"w": torch.ones(300, 200), "b": torch.zeros(3)}, "n": torch.tensor([1.0, float("nan")])}
    layouts = {
        "a": {"w": Layout((300, 200), torch.float32, mesh, ("tp",)), "b": Layout((3,), torch.float32, mesh)},
        "n": Layout((2,), torch.float32, mesh),
    }
    assert save_all(tmp_path / "a", state, layouts, step=12, metadata={"lr": 0.1}) == [None] * 2
    status, out, err = call("show", tmp_path / "a", "--layouts", "--stats")
    assert (status, err) == (0, "")
    lines = out.splitlines()
    assert "step 12" in out and '"lr":0.1' in out and "tp=2" in out and "60,005 elements, 234.4 KiB" in lines[-1]
    w = next(line.split() for line in lines if line.startswith("  w "))
    assert w[1:4] == ["float32", "300x200", "234.4"] and "f32[300@tp," in w and w[-6:] == "1 1 1 0 0 0".split()
    assert next(line.split() for line in lines if line.startswith("n "))[-2] == "1"
    status, out, _ = call("show", tmp_path / "a", "^a/", "--json", "--stats")
    value = json.loads(out)
    assert [leaf["path"] for leaf in value["leaves"]] == ["a/b", "a/w"] and value["bytes"] == 240_012
    assert value["leaves"][1]["statistics"]["mean"] == 1 and value["leaves"][1]["chunk"] == [150, 200]
    assert show(open_source(tmp_path / "a"), "w$").leaves[0].statistics is None


def test_a_terminal_gets_a_table():
    class Terminal(io.StringIO):
        def isatty(self):
            return True

    out = Terminal()
    print_table(out, ("NAME", "N"), [("[red]x", "1")], (1,))
    assert "[red]x" in out.getvalue() and "NAME" in out.getvalue()


def test_hostile_names_are_one_printable_line():
    assert short("a\x1b[31m\nb") == "a\\x1b[31m\\nb" and len(short("x" * 500)) == 60
    assert tree_rows(["a/b/c", "a/d", "e"]) == [
        ("a/", None),
        ("  b/", None),
        ("    c", "a/b/c"),
        ("  d", "a/d"),
        ("e", "e"),
    ]
