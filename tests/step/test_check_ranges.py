"""Tables split by hand over ranks, looked up by ids in a rank's own range: what is right is proven, else nothing is."""

import pytest
import torch
import torch.nn.functional as F

from fmegatron import step
from fmegatron.collectives import Axes, axis_index, psum
from fmegatron.layout import Layout, Mesh
from fmegatron.testing import parity
from tests.pairs import few

MESHES = (Mesh(tp=2), Mesh(tp=3))
SHAPES = {"e": ((12, 5), ("tp", None)), "o": ((12, 5), ("tp", None)), "w": ((5, 12), (None, "tp"))}
IDS = ("t", "u")


def judged(fn, mesh):
    """(the report, whether it equals one rank) of one step of descent on a loss of e, o and w."""
    state = {n: Layout(shape, torch.float64, mesh, at) for n, (shape, at) in SHAPES.items()}
    batch = dict.fromkeys(IDS, Layout((6, 6), torch.int64, mesh))

    def make(m):
        axis = Axes(m)["tp"]

        def run(s, b):
            (_, _), grads = step.value_and_grad(lambda p: (fn(p, b, axis), {}))(s)
            return {n: s[n] - 0.1 * grads[n] for n in s}, {}

        return run

    g = torch.Generator().manual_seed(3)
    given = {n: torch.randn(shape, generator=g, dtype=torch.float64) for n, (shape, _) in SHAPES.items()}
    ids = {n: torch.randperm(36, generator=g).view(6, 6) % 12 for n in IDS}
    same = parity(make, mesh, given, ids, layouts=(state, batch)).ok
    return step.check(make(mesh), state, batch), same


def rest(p):
    """Something with a gradient for what the others leave out."""
    return sum(0 * x.square().sum() for x in p.values())


def at_of(p, ids, axis):
    return ids - axis_index(axis, like=ids) * p["e"].shape[0]


def inside_of(p, at):
    return (at >= 0) & (at < p["e"].shape[0])


def indexed(p, b, axis):
    at = at_of(p, b["t"], axis)
    x = p["e"][at.clamp(0, p["e"].shape[0] - 1)] * inside_of(p, at)[..., None]
    return psum(x, axis).square().sum() + rest(p)


def from_begin_to_end(p, b, axis):
    n = p["e"].shape[0]
    begin = n * axis_index(axis, like=b["t"])
    out = (b["t"] < begin) | (b["t"] >= begin + n)
    x = F.embedding((b["t"] - begin).masked_fill(out, 0), p["e"]).masked_fill(out[..., None], 0)
    return psum(x, axis).tanh().sum() + rest(p)


def chosen_flat(p, b, axis):
    at = at_of(p, b["t"], axis).flatten()
    inside = ~((at < 0) | (at >= p["e"].shape[0]))
    x = torch.where(inside[:, None], p["e"][at * inside] + 1, 0)
    return psum(x.view(6, 6, 5), axis).square().sum() + rest(p)


def between(p, b, axis):
    begin = axis_index(axis, like=b["t"]) * p["e"].shape[0]
    end = (axis_index(axis, like=b["t"]) + 1) * p["e"].shape[0]
    inside = torch.logical_and(begin <= b["t"], end > b["t"]).to(p["e"].dtype)
    x = p["e"].index_select(0, (b["t"] - begin).clamp(0, p["e"].shape[0] - 1).view(-1)).view(6, 6, 5)
    return psum(inside.unsqueeze(-1) * x * 0.5, axis).exp().sum() + rest(p)


def of_logits(p, b, axis):
    z = b["u"][:, :5].to(p["w"].dtype) @ p["w"]
    at = b["t"][:, 0] - axis_index(axis, like=z) * z.shape[1]
    inside = (at >= 0) & (at < z.shape[1])
    hit = z.gather(1, at.clamp(0, z.shape[1] - 1)[:, None]).squeeze(1) * inside
    return psum(hit, axis).square().sum() + rest(p)


RIGHT = {f.__name__: f for f in (indexed, from_begin_to_end, chosen_flat, between, of_logits)}


def masked_by(mask):
    """A lookup whose mask is another than that of its ids."""

    def fn(p, b, axis):
        at = at_of(p, b["t"], axis)
        x = p["e"][at.clamp(0, p["e"].shape[0] - 1)] * mask(p, b, axis, at).to(p["e"].dtype)[..., None]
        return psum(x, axis).square().sum() + rest(p)

    return fn


def by_another_size(p, b, axis):
    at = b["t"] - axis_index(axis, like=b["t"]) * p["w"].shape[0]
    inside = (at >= 0) & (at < p["w"].shape[0])
    return psum(p["e"][at.clamp(0, p["e"].shape[0] - 1)] * inside[..., None], axis).square().sum() + rest(p)


def added_before(p, b, axis):
    at = at_of(p, b["t"], axis)
    x = p["e"][at.clamp(0, p["e"].shape[0] - 1)] * inside_of(p, at)[..., None] + 1
    return psum(x, axis).square().sum() + rest(p)


def clamped_short(p, b, axis):
    at = at_of(p, b["t"], axis)
    x = p["e"][at.clamp(0, p["e"].shape[0] - 2)] * inside_of(p, at)[..., None]
    return psum(x, axis).square().sum() + rest(p)


def squared_before(p, b, axis):
    at = at_of(p, b["t"], axis)
    x = p["e"][at.clamp(0, p["e"].shape[0] - 1)] * inside_of(p, at)[..., None]
    return psum(x.exp(), axis).square().sum() + rest(p)


def gradient_put_elsewhere(p, b, axis):
    at = at_of(p, b["t"], axis).clamp(0, p["e"].shape[0] - 1)
    new = p["e"].detach()[at] * inside_of(p, at_of(p, b["u"], axis))[..., None]
    added = torch.zeros_like(p["e"]).index_put((at,), new, accumulate=True)
    return psum((p["e"] * added).sum(), axis) + rest(p)


WRONG = {
    "no mask": masked_by(lambda p, b, axis, at: torch.ones_like(at)),
    "what is outside": masked_by(lambda p, b, axis, at: ~inside_of(p, at)),
    "of other ids": masked_by(lambda p, b, axis, at: inside_of(p, at_of(p, b["u"], axis))),
    "turned": masked_by(lambda p, b, axis, at: inside_of(p, at).T),
    "one more": masked_by(lambda p, b, axis, at: (at >= 0) & (at <= p["e"].shape[0])),
    "one less": masked_by(lambda p, b, axis, at: (at > 0) & (at < p["e"].shape[0])),
    "from its begin": masked_by(lambda p, b, axis, at: at >= 0),
    **{f.__name__: f for f in (by_another_size, added_before, clamped_short, squared_before, gradient_put_elsewhere)},
}


@pytest.mark.long
@pytest.mark.parametrize("name", few(2, [(name,) for name in RIGHT], RIGHT))
def test_what_is_right_is_proven(name):
    for mesh in MESHES:
        report, same = judged(RIGHT[name], mesh)
        assert same and report.ok, str(report)


@pytest.mark.long
@pytest.mark.parametrize("name", few(4, [(name,) for name in WRONG], WRONG))
def test_what_is_wrong_is_not(name):
    report, same = judged(WRONG[name], MESHES[0])
    assert not same and not report.ok, str(report)
