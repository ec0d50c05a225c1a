"""check on attention in which heads of several ranks use one head of keys, which every rank has, or its own."""

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention

from fmegatron import step, testing
from fmegatron.collectives import Axes, enter, psum
from fmegatron.layout import Layout, Mesh

F64 = torch.float64


def make_layouts(mesh):
    shapes = {"q": ((6, 24), (None, "tp")), "kv": ((6, 4), ()), "own": ((6, 12), (None, "tp")), "o": ((24, 6), ("tp",))}
    state = {name: Layout(shape, F64, mesh, spec) for name, (shape, spec) in shapes.items()}
    return state, {"x": Layout((2, 5, 6), F64, mesh)}


def attended(q, k, v):
    """[B, S, width] -> the same: heads of 4; keys may have fewer of them."""
    q, k, v = (t.unflatten(-1, (-1, 4)).transpose(1, 2) for t in (q, k, v))
    return scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True).transpose(1, 2).flatten(2)


def one_head(keys, values):
    """All heads of all ranks use one head of keys and values. keys, values: whether they are entered."""

    def loss(tp, p, b):
        kv = b["x"] @ p["kv"]
        k, v = (enter(kv, tp) if entered else kv for entered in (keys, values))
        return (psum(attended(b["x"] @ p["q"], k, v) @ p["o"], tp) - b["x"]).square().sum()

    return loss


def own_head(tp, p, b):
    """Each rank has a head of keys of its own, for its heads of queries."""
    k = b["x"] @ p["own"]
    return (psum(attended(b["x"] @ p["q"], k, k) @ p["o"], tp) - b["x"]).square().sum()


RIGHT = {"one for all": one_head(True, True), "one for each rank": own_head}
WRONG = {"keys not entered": one_head(False, True), "values not entered": one_head(True, False)}


def make(loss):
    def of(mesh, axes=None):
        tp = Axes(mesh)["tp"]

        def fn(s, b):
            (value, _), grads = step.value_and_grad(lambda p: (loss(tp, p, b), {}))(s)
            return {name: s[name] - 0.1 * grads[name] for name in s}, {"loss": value}

        return fn

    return of


MESH, ALL = Mesh(tp=3), RIGHT | WRONG


@pytest.mark.parametrize("name", ALL)
def test_heads(name):
    report = step.check(make(ALL[name])(MESH), *make_layouts(MESH))
    assert not report.findings if name in RIGHT else report.findings, report
    assert name != "one for all" or report.ok, report


@pytest.mark.slow
@pytest.mark.parametrize("name", ALL)
def test_they_are_what_they_say(name):
    draw, layouts = torch.Generator().manual_seed(0), make_layouts(MESH)
    given = [{n: torch.randn(x.shape, generator=draw, dtype=F64) / 2 for n, x in part.items()} for part in layouts]
    assert testing.parity(make(ALL[name]), MESH, *given, layouts=layouts).ok == (name in RIGHT)
