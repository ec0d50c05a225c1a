"""Attention against its definition in plain torch: options times forms times block sizes, forward and gradients."""

import pytest
import torch

from fmegatron.collectives import Axes, psum
from fmegatron.layout import Layout, Mesh
from fmegatron.nn import context_parallel, tiled_attention
from fmegatron.nn.attention_masks import Causal
from fmegatron.nn.dense_attention import attention
from fmegatron.testing import simulate
from tests.pairs import few

B, S, H, K, V = 2, 24, 4, 6, 6


def given(groups=2, values=V, seed=0):
    draw = torch.Generator().manual_seed(seed)
    shapes = {"q": (B, S, H, K), "k": (B, S, groups, K), "v": (B, S, groups, values), "sinks": (H,)}
    return {name: torch.randn(shape, generator=draw, dtype=torch.float64) for name, shape in shapes.items()}


def definition(q, k, v, mask, scale=None, softcap=None, sinks=None):
    """Scores, exponentials, their sum with that of the sink; a row that sees nothing is 0."""
    k, v = (x.repeat_interleave(q.shape[2] // x.shape[2], 2) for x in (k, v))
    s = torch.einsum("bshk,bthk->bhst", q, k) * (K**-0.5 if scale is None else scale)
    s = s if softcap is None else softcap * (s / softcap).tanh()
    mask = mask[:, None] if mask.dim() == 3 else mask[None, None]
    top = s.detach().amax(-1, keepdim=True)
    p = (s - top).exp() * mask
    total = p.sum(-1, keepdim=True)
    if sinks is not None:
        total = total + (sinks[:, None, None] - top).exp()
    p = p / torch.where(total == 0, 1.0, total)
    return torch.einsum("bhst,bthk->bshk", p, v)


def masks():
    draw = torch.Generator().manual_seed(3)
    some = torch.rand(B, S, S, generator=draw) < 0.4
    some[:, 5] = False
    some[1, :, 7:] = False
    late = torch.arange(S)[:, None] - 4 >= torch.arange(S)  # the first four rows see nothing
    return {"causal": None, "random": some, "nothing early": late, "nothing": torch.zeros(S, S, dtype=torch.bool)}


def equal(f, want_of, x):
    leaves = {name: value.clone().requires_grad_() for name, value in x.items()}
    again = {name: value.clone().requires_grad_() for name, value in x.items()}
    o, want = f(**leaves), want_of(**again)
    torch.testing.assert_close(o, want, rtol=1e-10, atol=1e-11)
    weight = torch.randn(want.shape, generator=torch.Generator().manual_seed(9), dtype=torch.float64)
    got = torch.autograd.grad((o * weight).sum(), list(leaves.values()), allow_unused=True)
    wanted = torch.autograd.grad((want * weight).sum(), list(again.values()), allow_unused=True)
    for name, g, w in zip(x, got, wanted, strict=True):
        assert (g is None) == (w is None), name
        if w is not None:
            torch.testing.assert_close(g, w, rtol=1e-9, atol=1e-11, msg=lambda m, name=name: f"{name}: {m}")


def none_dropped():
    """Dropout that is computed, and drops nothing."""
    return tiled_attention.Dropped(torch.zeros(2, B, S, dtype=torch.int64), torch.arange(H) * S, 0.0)


OPTIONS = {
    "plain": {},
    "scale": {"scale": 0.7},
    "cap": {"softcap": 1.5},
    "sinks": {"sinks": True},
    "all": {"scale": -0.4, "softcap": 2.0, "sinks": True},
}


DENSE = [
    (option, mask, *widths, tile, drop)
    for option in OPTIONS
    for mask in masks()
    for widths in ((1, V), (2, 3), (4, V))
    for tile in (5, 1024)
    for drop in (False, True)
]


@pytest.mark.parametrize(
    "option, mask, groups, values, tile, drop", few(4, DENSE, ["-".join(map(str, c)) for c in DENSE])
)
def test_dense(option, mask, groups, values, tile, drop, monkeypatch):
    monkeypatch.setattr(tiled_attention, "_TILE", tile)
    how, x, m = dict(OPTIONS[option]), given(groups, values), masks()[mask]
    sinks = how.pop("sinks", False)
    seen = torch.ones(S, S, dtype=torch.bool).tril() if m is None else m
    dropped = {"dropped": none_dropped()} if drop else {}

    def ours(q, k, v, sinks):
        return attention(q, k, v, m, sinks_H=sinks if on else None, **how, **dropped)

    on = sinks
    equal(ours, lambda q, k, v, sinks: definition(q, k, v, seen, sinks=sinks if on else None, **how), x)


FORMS = ("ring", "balanced", "gathered", "ulysses")
CP = Mesh(cp=2)


def rows_of(packed):
    documents = torch.zeros(B, S, dtype=torch.int64)
    if packed:
        documents[0, 5:] = 1
        documents[0, 17:] = 2
        documents[1, 12:] = 1
    positions = torch.arange(S).expand(B, S).clone()
    return positions, documents


def over_cp(form, mesh, packed, window, softcap, sinks, backend=None):
    axes = Axes(mesh)
    cp = axes["cp"]

    def f(x, at):
        causal = Causal(at["positions"], at["documents"] if packed else None, window, form == "balanced")
        names = {"ring": "ring", "balanced": "ring"}.get(form, form)
        o = getattr(context_parallel, f"{names}_attention")(
            x["q"], x["k"], x["v"], causal, cp, softcap, x["sinks"] if sinks else None
        )
        return (o * at["weight"]).sum(), o

    def run(x, at):
        leaves = {name: value.detach().requires_grad_() for name, value in x.items()}
        with torch.enable_grad():
            total, o = f(leaves, at)
            used = {n: leaf for n, leaf in leaves.items() if n != "sinks" or sinks}
            grads = dict(zip(used, torch.autograd.grad(total, list(used.values())), strict=True))
        if sinks:
            grads["sinks"] = psum(grads["sinks"], cp)
        return {"o": o.detach(), **grads}

    return run


WAYS = [(False, None, None, False, 2), (True, 3, None, True, 1), (True, None, 1.5, True, 4), (False, 7, 2.0, False, 2)]
CASES = [(*way, form, tile, n) for way in WAYS for form in FORMS for tile in (3, 1024) for n in (2, 1)]


@pytest.mark.parametrize(
    "packed, window, softcap, sinks, groups, form, tile, n", few(2, CASES, ["-".join(map(str, c)) for c in CASES])
)
def test_split_sequences(form, packed, window, softcap, sinks, groups, tile, n, monkeypatch):
    monkeypatch.setattr(tiled_attention, "_TILE", tile)
    mesh, x = Mesh(cp=n), given(groups)
    positions, documents = rows_of(packed)
    weight = torch.randn(B, S, H, V, generator=torch.Generator().manual_seed(9), dtype=torch.float64)
    order = context_parallel.zigzag(S, n) if form == "balanced" else torch.arange(S)
    at = {"positions": positions, "documents": documents, "weight": weight}
    layouts = [{name: lay(v, mesh, n) for name, v in t.items()} for t in (x, at)]
    dealt = [{name: v if v.dim() == 1 else v[:, order] for name, v in t.items()} for t in (x, at)]
    run = over_cp(form, mesh, packed, window, softcap, sinks)
    outs = {name: lay(v, mesh, n) for name, v in {"o": weight, **x}.items() if name != "sinks" or sinks}
    sim = simulate(run, mesh, *dealt, layouts=tuple(layouts), out_layouts=outs)
    gap = positions[:, :, None] - positions[:, None]
    seen = (gap >= 0) & (gap < (window or S)) & (documents[:, :, None] == documents[:, None])
    leaves = {name: v.clone().requires_grad_() for name, v in x.items()}
    want = definition(leaves["q"], leaves["k"], leaves["v"], seen, None, softcap, leaves["sinks"] if sinks else None)
    grads = torch.autograd.grad((want * weight).sum(), list(leaves.values()), allow_unused=True)
    for name, w in {"o": want, **dict(zip(leaves, grads, strict=True))}.items():
        if w is not None:
            w = w if w.dim() == 1 else w[:, order]
            torch.testing.assert_close(
                sim.gather(name), w, rtol=1e-9, atol=1e-11, msg=lambda m, name=name: f"{name}: {m}"
            )


def lay(x, mesh, n):
    return Layout(tuple(x.shape), x.dtype, mesh, (None, "cp") if n > 1 and x.dim() > 1 else ())


def test_dropout_of_rows_that_see_nothing():
    """Their output is 0, as without dropout, and not 0 / 0."""
    x, mask = given(), torch.zeros(S, S, dtype=torch.bool)
    o = attention(x["q"], x["k"], x["v"], mask, dropped=none_dropped())
    assert torch.equal(o, torch.zeros_like(o))
