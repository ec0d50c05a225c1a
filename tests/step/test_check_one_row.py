"""Where a rank has one row, views leave no trace of it: what is wrong is found, what may be right is not refused."""

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention

from fmegatron import model, nn, optim, step
from fmegatron.collectives import Axes, Precision, psum
from fmegatron.layout import DataParallel, Layout, Mesh
from fmegatron.step import trace
from fmegatron.step.checker.entrypoints import check_traced
from tests.pairs import few

MESH = Mesh(dp=2)
DP = Axes(MESH)["dp"]


def lay(shape, *spec):
    return Layout(shape, torch.float64, MESH, spec)


X, P = lay((2, 6), "dp"), lay((2, 6, 4), "dp")


def report(fn, out, *ins):
    empty = tuple(torch.empty(x.local_shape(0), dtype=x.dtype) for x in ins)
    return check_traced(trace(lambda *xs: [fn(*xs)], empty), MESH, list(ins), [out])


def test_a_mean_of_a_rank_is_found():
    """It was proven: 2 times too large on two ranks."""
    for view in (lambda x: x.view(6), lambda x: x.squeeze(0), lambda x: x):
        with pytest.raises(ValueError, match="mean over a sharded dim divides by the local size only"):
            report(lambda x, view=view: psum(view(x).mean(), DP), lay(()), X).require()
        assert report(lambda x, view=view: psum(view(x).mean(), DP) / DP.size, lay(()), X).ok
        by_a_number = report(lambda x, view=view: psum(view(x).mean(), DP) / 2, lay(()), X)
        assert not by_a_number.findings and not by_a_number.ok  # on one rank it halves, too
        assert report(lambda x, view=view: psum(view(x).sum(), DP), lay(()), X).ok


def test_a_sum_of_tokens_is_no_finding():
    """What was summed along a dim that may have been the sharded one may be pending, and be added to what is."""
    for fn, out in (
        (lambda p, x: psum(p.view(6, 4).sum(0), DP), lay((4,))),
        (lambda p, x: psum(torch.cat([p.view(6, 4).sum(0), x.sum().view(1)]), DP), lay((5,))),
    ):
        assert not report(fn, out, P, X).findings
    assert report(lambda p, x: psum(p.sum((0, 1)) + x.sum(), DP), lay((4,)), P, X).ok


@pytest.mark.slow
@pytest.mark.parametrize("rows", [4, 8])
def test_experts_on_one_row_or_two(rows):
    precision, moe = Precision.fp64(), model.MoE(nn.Router(4, 2), 12, balance=0.01, ep=("dp",))
    decoder = model.llama(
        vocab_size=30, dim=16, layers=1, heads=4, kv_heads=2, ffn_dim=24, max_seq=6, mlp=moe, precision=precision,
        param_dtype=precision.param, compute_dtype=precision.compute,
    )  # fmt: skip
    found = step.check(*model.build(decoder, optim.adamw(1e-2), Mesh(dp=2, fsdp=2), (rows, 6)))
    assert not found.findings and (found.ok or rows == 4), str(found)


ONE_EACH = {
    "experts over ep, a row each": ("moe", {}, dict(ep=2), 2),
    "experts over fsdp, a row each": ("moe", {}, dict(fsdp=2), 2),
    "experts over tp, a row each": ("moe", dict(ep=("tp",), balance=0.1), dict(dp=2, tp=2), 2),
    "experts over tp, a head and a row each": ("moe", dict(ep=("tp",)), dict(dp=2, tp=4), 2),
    "a head and a row each": ("mlp", {}, dict(fsdp=2, tp=4), 2),
}


@pytest.mark.medium
@pytest.mark.parametrize("name", few(2, [(name,) for name in ONE_EACH], ONE_EACH))
def test_one_of_each(name):
    """The library with one row, head or expert on a rank is proven: no rule decides by a size."""
    kind, fields, sizes, rows = ONE_EACH[name]
    mlp = model.MoE(nn.Router(8, 2, normalised=True), 32, **fields) if kind == "moe" else model.MLP(64)
    strategy = DataParallel(("dp", "fsdp", "ep"), *[("fsdp",)] * 3)
    attention, norm, precision = model.Attention(heads=8, kv_heads=4, head_dim=8), model.RMSNorm(), Precision.fp64()
    blocks = ((model.Part("mixer", attention, norm), model.Part("mlp", mlp, norm)),) * 2
    decoder = model.Decoder(
        *(250, 64, blocks, 32, norm), vocab_multiple=16, precision=precision, sequence_parallel=sizes.get("tp", 1) > 1
    )
    mesh = Mesh(**{axis: sizes.get(axis, 1) for axis in ("dp", "fsdp", "ep", "cp", "cpi", "tp")})
    report = step.check(*model.build(decoder, optim.adamw(1e-2), mesh, (rows, 32), strategy=strategy))
    assert report.ok, str(report)


@pytest.mark.slow
@pytest.mark.parametrize("sizes, rows", [(dict(cp=2), 1), (dict(fsdp=2, tp=2), 2)], ids=str)
def test_a_scan_of_one_row(sizes, rows):
    """Over cp it was refused: what a rank picks of what depends on its index was taken for the same on all of them."""
    norm, precision = model.RMSNorm(), Precision.fp64()
    blocks = ((model.Part("mixer", model.Mamba(8, 4, 6, 2, conv=3, chunk=4), norm),),)
    decoder = model.Decoder(*(250, 64, blocks, 32, norm), vocab_multiple=16, precision=precision)
    mesh = Mesh(**{axis: sizes.get(axis, 1) for axis in ("dp", "fsdp", "ep", "cp", "cpi", "tp")})
    report = step.check(*model.build(decoder, optim.adamw(1e-2), mesh, (rows, 32)))
    assert report.ok, str(report)


WRONG = {
    "a mean through a leading 1": lambda x: psum((x * x.view(1, -1).mean(1)).sum(), DP),
    "a maximum of a sum through a leading 1": lambda x: psum(x.view(1, -1).sum(1).amax(0), DP),
    "a softmax through a leading 1": lambda x: psum(x.reshape(1, -1).softmax(1).square().sum(), DP),
    "a scan through a leading 1": lambda x: psum(x[None].view(1, 1, -1).cumsum(2).sum(), DP),
    "a sum and what is sharded": lambda x: psum((x - x.reshape(1, -1).sum(1)).tanh().sum(), DP),
}


@pytest.mark.parametrize("name", WRONG)
def test_what_fails_in_one_reading_is_not_proven(name):
    for rows in (2, 6):
        x = lay((rows,), "dp")
        outs = report(WRONG[name], lay(()), x)
        assert not outs.ok, str(outs)


def products(q, k):
    """Attention by products: keys [B, T, K] of one head."""
    k = k.view(k.shape[0], 1, -1, k.shape[-1])
    return (q @ k.mT).softmax(-1) @ k


KEYS = {
    "products": products,
    "fused": lambda q, k: scaled_dot_product_attention(q, *[k.view(k.shape[0], 1, -1, k.shape[-1])] * 2),
    "fused, a mask of ones": lambda q, k: scaled_dot_product_attention(
        q, *[k.view(k.shape[0], 1, -1, k.shape[-1])] * 2, attn_mask=torch.ones(5, 5, dtype=torch.bool)
    ),
}


@pytest.mark.parametrize("name", KEYS)
def test_a_part_of_the_sequence_is_not_taken_for_a_head(name):
    """It was proven: a head of queries on each rank was evidence that the keys, a part of the sequence of each, are of
    a head each."""
    q, k = lay((3, 2, 5, 4), None, "dp"), lay((3, 10, 4), None, "dp")
    found = report(lambda q, k: psum(KEYS[name](q, k).square().sum(), DP), lay(()), q, k)
    assert not found.ok, str(found)
