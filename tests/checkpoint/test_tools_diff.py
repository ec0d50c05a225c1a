"""`diff`: one changed element of any dtype is found, wherever it is; NaNs, tolerances, structure, digests."""

import io
import json

import pytest
import torch

from fmegatron import checkpoint, tree
from fmegatron.checkpoint.__main__ import main
from fmegatron.checkpoint.tools.differences import Comparison, diff
from fmegatron.checkpoint.tools.source import open_source
from fmegatron.layout import Layout, Mesh
from tests.checkpoint.fake_world import save_all, small_sizes
from tests.checkpoint.test_reshard import DTYPES, any_bits


def call(*argv):
    out, err = io.StringIO(), io.StringIO()
    status = main([str(a) for a in argv], out, err)
    return status, out.getvalue(), err.getvalue()


def on(mesh, state, *spec):
    """Every leaf on this mesh, its first dims split so."""
    return tree.map(lambda x: Layout(tuple(x.shape), x.dtype, mesh, spec[: x.dim()]), state)


def save(path, state, mesh=None, spec=(), **options):
    mesh = mesh or Mesh()
    assert save_all(path, state, on(mesh, state, *spec), **options) == [None] * mesh.size
    return open_source(path)


class Counting:
    """What Snapshots fill, counted in bytes."""

    def __init__(self, monkeypatch):
        self.nbytes, fill = 0, checkpoint.Snapshot.fill

        def counted(source, wanted, verify=True):
            self.nbytes += sum(target.view.nbytes for targets in wanted.values() for target in targets)
            return fill(source, wanted, verify)

        monkeypatch.setattr(checkpoint.Snapshot, "fill", counted)


@pytest.mark.long
@pytest.mark.parametrize("same_chunks", [True, False])
def test_one_changed_element_of_every_dtype(tmp_path, same_chunks):
    """Whether chunks are compared by their digests or all is read, and in portions far smaller than a leaf."""
    state = {str(d): any_bits((13, 21), d, seed=1) for d in DTYPES}
    mesh, spec = (Mesh(fsdp=2), ("fsdp",)) if same_chunks else (Mesh(tp=3), (None, "tp"))
    with small_sizes():
        a = save(tmp_path / "a", state, Mesh(fsdp=2), ("fsdp",))
        assert diff(a, save(tmp_path / "same", state, mesh, spec), ignore=frozenset(["layouts"]), most=200).equal
        for n, name in enumerate(state):
            state[name] = state[name].clone()
            flat = state[name].view(-1).view(torch.uint8).view(13 * 21, -1)
            flat[(n * 37) % 273, 0] ^= 1
        b = save(tmp_path / "b", state, mesh, spec)
        found = diff(a, b, ignore=frozenset(["layouts"]), most=200)
    assert [leaf.path for leaf in found.leaves] == sorted(state)
    for leaf in found.leaves:
        number = (list(state).index(leaf.path) * 37) % 273
        assert leaf.index == divmod(number, 21) and leaf.values.bits == 1 and leaf.values.count == 273, leaf


def test_values(tmp_path):
    """Greatest differences, against numbers made by hand; integers exactly, however large."""
    nan, inf = float("nan"), float("inf")
    a = {
        "f": torch.tensor([1.0, 2.0, nan, inf, -inf, 0.0]),
        "i": torch.tensor([1 << 62, 5], dtype=torch.int64),
        "u": torch.tensor([0, 3], dtype=torch.uint8),
        "z": torch.tensor([0.0, nan]),
        "c": torch.tensor([3 + 4j, complex(nan, 1)]),
        "b": torch.tensor([True, False]),
        "n": torch.tensor([nan]),
    }
    b = {
        "f": torch.tensor([1.0, 2.5, nan, inf, -inf, 0.0]),
        "i": torch.tensor([(1 << 62) + 1, 5], dtype=torch.int64),
        "u": torch.tensor([255, 3], dtype=torch.uint8),
        "z": torch.tensor([-0.0, nan]),
        "c": torch.tensor([0j, complex(nan, 1)]),
        "b": torch.tensor([False, False]),
        "n": torch.tensor([1.0]),
    }
    found = {x.path: x for x in diff(save(tmp_path / "a", a), save(tmp_path / "b", b)).leaves}
    got = {k: (x.values.beyond, x.values.max_abs, x.values.max_rel, x.index) for k, x in found.items()}
    assert got["f"] == (1, 0.5, 0.2, (1,))
    assert got["i"] == (1, 1.0, 1 / (1 << 62), (0,))
    assert got["u"] == (1, 255.0, 1.0, (0,)) and got["b"] == (1, 1.0, inf, (0,))
    assert got["c"] == (1, 5.0, inf, (0,))
    assert got["n"] == (1, inf, inf, (0,))
    assert got["z"] == (0, 0.0, 0.0, (0,)) and found["z"].values.bits == 1
    status, out, _ = call("diff", tmp_path / "a", tmp_path / "b")
    assert status == 1 and "other bits and equal values" in out and "max abs 0.5" in out
    json.loads(call("diff", tmp_path / "a", tmp_path / "b", "--json")[1])


def test_tolerances(tmp_path):
    x = torch.randn(1000, dtype=torch.float64)
    a, b = save(tmp_path / "a", {"x": x}), save(tmp_path / "b", {"x": x + 1e-6})
    assert not diff(a, b).equal and diff(a, b, atol=1e-5).equal and not diff(a, b, atol=1e-7).equal
    scaled = save(tmp_path / "c", {"x": x * 1.001})
    assert diff(a, scaled, rtol=0.002).equal and not diff(a, scaled, rtol=0.0005).equal
    minus = save(tmp_path / "d", {"x": torch.tensor([-0.0])}), save(tmp_path / "e", {"x": torch.tensor([0.0])})
    assert not diff(*minus).equal and diff(*minus, atol=1e-30).equal
    assert call("diff", tmp_path / "a", tmp_path / "b", "--atol", "1e-5")[0] == 0


def test_structure_layouts_metadata(tmp_path):
    a = save(tmp_path / "a", {"x": torch.zeros(4), "y": torch.zeros(4), "s": torch.zeros(4)}, metadata={"k": 1, "l": 2})
    state = {"x": torch.zeros(4, dtype=torch.bfloat16), "z": torch.zeros(4), "s": torch.zeros(2, 2)}
    b = save(tmp_path / "b", state, Mesh(tp=2), ("tp",), metadata={"k": True, "m": 2})
    found = diff(a, b)
    leaves = {x.path: x for x in found.leaves}
    assert leaves["y"].only == "a" and leaves["z"].only == "b"
    assert leaves["x"].dtypes == ("float32", "bfloat16") and leaves["x"].values.within
    assert leaves["s"].shapes == ((4,), (2, 2)) and leaves["s"].values is None
    assert "tp2" in leaves["x"].layouts[1]
    assert found.metadata == {"k": (1, True), "l": (2, "(nothing)"), "m": ("(nothing)", 2)}
    ignoring = diff(a, b, ignore=frozenset(["metadata", "layouts", "values"]))
    assert not ignoring.metadata and all(x.structure and x.layouts is None for x in ignoring.leaves)
    assert [x.path for x in diff(a, b, "^[xy]").leaves] == ["x", "y"]
    with pytest.raises(ValueError, match="wanted one that matches a leaf"):
        diff(a, b, "nothing")


def test_equal_digests_are_not_read(tmp_path, monkeypatch):
    """Only the chunk that differs is read; `read_all` reads both sides."""
    x = torch.arange(1 << 10, dtype=torch.int32).view(64, 16)
    with small_sizes():
        a, same = save(tmp_path / "a", {"x": x}), save(tmp_path / "same", {"x": x})
        y = x.clone()
        y[40, 3] = -1
        b = save(tmp_path / "b", {"x": y})
        counting = Counting(monkeypatch)
        assert diff(a, same).skipped_bytes == x.nbytes and counting.nbytes == 0
        found = diff(a, b)
        assert found.leaves[0].index == (40, 3) and found.leaves[0].values.count == x.numel()
        assert counting.nbytes == 2 * 128 and found.skipped_bytes == x.nbytes - 128
        diff(a, same, read_all=True)
        assert counting.nbytes == 2 * 128 + 2 * x.nbytes


def test_damage_is_an_error(tmp_path):
    x = torch.randn(300, 300)
    save(tmp_path / "a", {"x": x})
    save(tmp_path / "b", {"x": x + 1})
    at = tmp_path / "b/arrays/x/c.0.0"
    data = bytearray(at.read_bytes())
    data[100] ^= 1
    at.write_bytes(data)
    status, out, err = call("diff", tmp_path / "a", tmp_path / "b")
    assert (status, out) == (1, "") and "damaged" in err and len(err.splitlines()) == 1


def test_comparison_in_portions_is_that_of_the_whole():
    a, b = torch.randn(5000), torch.randn(5000)
    b[:1000] = a[:1000]
    whole, parts = Comparison(), Comparison()
    whole.add(a, b, lambda at: at)
    for at in range(0, 5000, 700):
        parts.add(a[at : at + 700], b[at : at + 700], lambda i, at=at: i + at)
    assert whole == parts and whole.first == 1000 and whole.bits == 4000
    assert whole.max_abs == float((a.double() - b.double()).abs().max())
