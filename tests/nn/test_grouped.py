"""Grouped products against products one by one: values, gradients, rows behind the last group, compiled."""

import pytest
import torch

from fmegatron import nn, step
from fmegatron.collectives import Axes, psum
from fmegatron.layout import Layout, Mesh
from fmegatron.step import check

N, D, F = 40, 16, 24
COUNTS = {"spread": (10, 7, 13, 5), "empty groups": (0, 12, 0, 20), "one has all": (0, 40, 0, 0), "none": (0, 0, 0, 0)}


def values(counts, dtype):
    g = torch.Generator().manual_seed(1)
    x, w, dy = (torch.randn(shape, generator=g).to(dtype) for shape in ((N, D), (len(counts), D, F), (N, F)))
    return x, w, dy, torch.tensor(counts).cumsum(0).to(torch.int32)


def by_hand(x, w, dy, ends):
    """(y, dx, dw) in fp64."""
    x, w, dy = (t.double() for t in (x, w, dy))
    y, dx, dw = torch.zeros_like(dy), torch.zeros_like(x), torch.zeros_like(w)
    for e, (start, end) in enumerate(zip([0, *ends.tolist()], ends.tolist(), strict=False)):
        y[start:end] = x[start:end] @ w[e]
        dx[start:end] = dy[start:end] @ w[e].T
        dw[e] = x[start:end].T @ dy[start:end]
    return y, dx, dw


def with_gradients(x, w, dy, ends):
    x, w = (t.detach().requires_grad_() for t in (x, w))
    with torch.enable_grad():
        y = nn.grouped_matmul(x, w, ends)
    return y.detach(), *torch.autograd.grad(y, (x, w), dy)


@pytest.fixture
def filled_memory():
    """New memory holds NaN, so that what a kernel leaves unwritten shows."""
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(before)


TOLERANCES = {torch.float64: 1e-12, torch.float32: 1e-5, torch.float16: 2e-2, torch.bfloat16: 1e-1}


@pytest.mark.parametrize("dtype", TOLERANCES, ids=str)
@pytest.mark.parametrize("counts", COUNTS)
def test_values_and_poison(counts, dtype, filled_memory):
    """Rows behind the last group are NaN in x and in the gradient: nothing reads them, and zeros are in their place."""
    x, w, dy, ends = values(COUNTS[counts], dtype)
    wanted = by_hand(x, w, dy, ends)
    x[ends[-1] :], dy[ends[-1] :] = torch.nan, torch.nan
    for got, right in zip(with_gradients(x, w, dy, ends), wanted, strict=True):
        torch.testing.assert_close(got.double(), right, rtol=TOLERANCES[dtype], atol=TOLERANCES[dtype])


@pytest.mark.long
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16], ids=str)
@pytest.mark.parametrize("backend", ["eager", "inductor"])
def test_compiled(dtype, backend, filled_memory):
    x, w, dy, ends = values(COUNTS["empty groups"], dtype)
    x[ends[-1] :], dy[ends[-1] :] = torch.nan, torch.nan
    jitted = step.jit(with_gradients, backend=backend, donate=())
    for got, right in zip(jitted(x, w, dy, ends), with_gradients(x, w, dy, ends), strict=True):
        torch.testing.assert_close(got, right)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_check_has_its_rule(dtype):
    """Rows that every rank has of its own, matrices that all have: their gradient is a sum over the ranks."""
    mesh = Mesh(dp=2)
    dp = Axes(mesh)["dp"]

    def of(reduced):
        def update(w, batch):
            _, _, dw = with_gradients(batch["x"], w, batch["dy"], batch["ends"])
            return (psum(dw, dp) if reduced else dw), {}

        return update

    batch = {
        "x": Layout((N, D), dtype, mesh, ("dp",)),
        "dy": Layout((N, F), dtype, mesh, ("dp",)),
        "ends": Layout((4,), torch.int32, mesh),
    }
    w = Layout((4, D, F), dtype, mesh)
    report = check(of(True), w, batch)
    # Rules leave nothing open; the same ends in each rank's rows are others than in all rows, which numbers show.
    assert not report.findings and all(one.why.startswith("on random numbers") for one in report.unproven), str(report)
    assert check(of(False), w, batch).findings


@pytest.mark.parametrize(
    "change", [lambda x, w, e: (x.half(), w, e), lambda x, w, e: (x, w, e.long()), lambda x, w, e: (x, w[:2], e)]
)
def test_bad_arguments(change):
    x, w, _, ends = values(COUNTS["spread"], torch.float32)
    with pytest.raises(ValueError, match="grouped_mm: got .* wanted"):
        nn.grouped_matmul(*change(x, w, ends))


def test_gradients_of_gradients_are_refused():
    x, w, dy, ends = values(COUNTS["spread"], torch.float64)
    x.requires_grad_()
    (dx,) = torch.autograd.grad(nn.grouped_matmul(x, w, ends), x, dy.requires_grad_(), create_graph=True)
    with pytest.raises(ValueError, match="grouped_matmul: got a gradient of its gradient, wanted first gradients only"):
        dx.sum().backward()
