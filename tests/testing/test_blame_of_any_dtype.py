"""Parity says that a step differs whatever it can say of the place: leaves of any dtype, steps of any transform."""

import torch

from fmegatron.collectives import Axes
from fmegatron.layout import Layout, Mesh
from fmegatron.testing import compare_ranks, parity

F64, F8 = torch.float64, torch.float8_e4m3fn
MESH = Mesh(dp=2, tp=2)


def randn(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=F64)


def compared(make, state, batch, mesh=MESH):
    """Parity of make(axes). state, batch: {name: (value, axes of its dims)}."""
    values = [{name: x for name, (x, _) in part.items()} for part in (state, batch)]
    layouts = [{n: Layout(tuple(x.shape), x.dtype, mesh, at) for n, (x, at) in part.items()} for part in (state, batch)]
    return parity(lambda mesh: make(Axes(mesh)), mesh, *values, layouts=tuple(layouts))


ROWS = {"x": (randn(8, 4, seed=3), ("dp", None))}


def test_float8():
    keep = lambda axes: lambda s, b: ({"most": b["x"].abs().amax(0).to(F8)}, {})  # noqa: E731
    found = compared(keep, {"most": (torch.zeros(4).to(F8), (None,))}, ROWS)
    assert not found.ok and "test_blame_of_any_dtype.py" in str(found)


def test_complex():
    x = torch.complex(randn(8, 4).sort(0, descending=True).values, randn(8, 4, seed=1))
    keep = lambda axes: lambda s, b: ({"first": b["x"][0] * 2}, {})  # noqa: E731
    found = compared(keep, {"first": (torch.zeros_like(x[0]), (None,))}, {"x": (x, ("dp", None))})
    assert not found.ok and "test_blame_of_any_dtype.py" in str(found)


def test_an_imaginary_part_that_differs():
    """Only the real part was compared."""
    x = torch.complex(randn(1, 4).expand(8, 4), randn(8, 4, seed=1))
    keep = lambda axes: lambda s, b: ({"first": b["x"].sum(0) / len(b["x"])}, {})  # noqa: E731
    assert not compared(keep, {"first": (torch.zeros_like(x[0]), (None,))}, {"x": (x, ("dp", None))}).ok
    assert compare_ranks.relative_error(torch.tensor([1 + 2j]), torch.tensor([1 + 3j])) > 0.1


def test_jacobians_of_rows():
    def make(axes):
        def train(state, batch):
            of_row = torch.func.jacfwd(lambda x: torch.tanh(x @ state["w"]))
            return {"w": state["w"] - torch.func.vmap(of_row)(batch["x"]).mean((0, 1))[:, None]}, {}

        return train

    found = compared(make, {"w": (randn(4, 3), (None, None))}, ROWS)
    assert not found.ok and found.differences[0][0] == "0/w"


def test_a_flat_leaf():
    flat = Layout((8, 4), F64, Mesh(dp=2), (None, None), flat=("dp",))

    def make(axes):
        return lambda state, batch: ({"m": state["m"] + batch["x"].sum()}, {})

    rows = {"x": Layout((8, 4), F64, Mesh(dp=2), ("dp", None))}
    values = {"m": randn(8, 4)}, {"x": ROWS["x"][0]}
    found = parity(lambda mesh: make(Axes(mesh)), Mesh(dp=2), *values, layouts=({"m": flat}, rows))
    assert not found.ok


def test_blame_that_fails_does_not_hide_the_difference(monkeypatch):
    def broken(*given, **named):
        raise IndexError("tuple index out of range")

    monkeypatch.setattr(compare_ranks, "blame", broken)
    found = compared(lambda axes: lambda s, b: ({"w": b["x"].sum(0)}, {}), {"w": (randn(4), (None,))}, ROWS)
    assert not found.ok and "first 0/w" in str(found) and "IndexError: tuple index out of range" in str(found)
