"""Ids that are none, and ids that the vocabulary does not have: the same on any number of ranks, and never silent."""

import pytest
import torch
import torch.nn.functional as F

from fmegatron import nn
from fmegatron.collectives import Axes
from fmegatron.layout import Layout, Mesh
from fmegatron.testing import simulate

V, PADDED, D, F64 = 11, 18, 4, torch.float64  # ids, columns of the head and rows of the table, width
LABELS = torch.tensor([[0, 10, -100, -1, 5, 7], [11, 17, 18, 10**9, 3, -(10**9)]])
NAN = LABELS >= V
NONE = LABELS < 0
MESHES = [Mesh(), Mesh(tp=2), Mesh(tp=3)]


def on_ranks(f, mesh, x, w, split):
    """f(x, w, LABELS, tp) of w, which tp splits on this dim: two results and the gradient of w."""
    axes = Axes(mesh)
    spec = tuple("tp" if dim == split and mesh.size > 1 else None for dim in range(w.dim()))
    at = Layout(tuple(w.shape), w.dtype, mesh, spec)
    out = (None, None, at)
    given = x, w, LABELS
    step = lambda x, w, ids: f(x, w, ids, axes["tp"])  # noqa: E731
    return simulate(step, mesh, *given, layouts=(None, at, None), out_layouts=out).globals()


def losses(how):
    def f(x_BSD, head_DV, ids, tp):
        head_DV = head_DV.detach().requires_grad_()
        if how == "chunks":
            nll, lse = nn.chunked_cross_entropy(x_BSD, head_DV, ids, tp, V, chunks=3)
        else:
            nll, lse = nn.cross_entropy(x_BSD @ head_DV, ids, tp, V)
        (grad,) = torch.autograd.grad(torch.where(ids >= V, 0, nll).sum() + 0.1 * lse.sum(), head_DV)
        return nll, lse, grad

    return f


@pytest.mark.long
@pytest.mark.parametrize("how", ["whole", "chunks"])
@pytest.mark.parametrize("mesh", MESHES, ids=str)
def test_losses_of_labels(mesh, how):
    """Torch's own of those that are ids, 0 of those below 0, NaN of those beyond the vocabulary, padding of it too."""
    g = torch.Generator().manual_seed(0)
    x, head = torch.randn(2, 6, D, generator=g, dtype=F64), torch.randn(D, PADDED, generator=g, dtype=F64)
    leaf = head.clone().requires_grad_()
    logits = (x @ leaf)[..., :V]
    labels = LABELS.masked_fill(NONE | NAN, -100)
    want = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="none").view(2, 6)
    (grad,) = torch.autograd.grad(want.sum() + 0.1 * logits.logsumexp(-1).sum(), leaf)
    nll, lse, got = on_ranks(losses(how), mesh, x, head, 1)
    assert torch.equal(nll.isnan(), NAN) and (nll[NONE] == 0).all()
    torch.testing.assert_close(nll[~NAN], want[~NAN], rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(lse, logits.logsumexp(-1).detach(), rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(got.nan_to_num(), grad.nan_to_num(), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("mesh", MESHES, ids=str)
def test_a_label_beyond_the_vocabulary_is_seen_in_the_gradient_as_well(mesh):
    g = torch.Generator().manual_seed(0)
    x, head = torch.randn(2, 6, D, generator=g, dtype=F64), torch.randn(D, PADDED, generator=g, dtype=F64)

    def f(x_BSD, head_DV, ids, tp):
        head_DV = head_DV.detach().requires_grad_()
        nll, lse = nn.cross_entropy(x_BSD @ head_DV, ids, tp, V)
        return nll, lse, torch.autograd.grad(nll.sum(), head_DV)[0]

    assert on_ranks(f, mesh, x, head, 1)[2][:, :V].isnan().all()


@pytest.mark.parametrize("split", [False, True], ids=["whole", "sequence parallel"])
@pytest.mark.parametrize("mesh", MESHES, ids=str)
def test_lookup(mesh, split):
    """A row of the table, or NaN: of -1, of what is beyond the vocabulary, of rows that only fill the table."""
    table, ids = torch.randn(PADDED, D, generator=torch.Generator().manual_seed(0), dtype=F64), LABELS
    axes = Axes(mesh)
    at = Layout((PADDED, D), F64, mesh, ("tp" if mesh.size > 1 else None,))
    out = Layout((2, 6, D), F64, mesh, (None, "tp" if split and mesh.size > 1 else None))

    def f(ids, table):
        return nn.embed(ids, table, axes["tp"], split, V)

    got = simulate(f, mesh, ids, table, layouts=(None, at), out_layouts=out).globals()
    known = ~NAN & ~NONE
    assert torch.equal(got.isnan().all(-1), ~known) and torch.equal(got[known], table[ids[known]])
