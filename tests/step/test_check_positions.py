"""Rows cut by positions, halos, shifts and scans by hand: what is right is proven, what is not by one place is not."""

import pytest
import torch

from fmegatron import step
from fmegatron.collectives import Axes, all_gather, axis_index, ppermute, psum
from fmegatron.layout import Layout, Mesh
from fmegatron.testing import parity
from tests.pairs import few

MESHES = (Mesh(cp=2), Mesh(cp=3))
SHAPES = {"w": (12, 5), "v": (5, 5)}
SPLIT = {"x": (4, 12, 5)}


def judged(fn, mesh):
    """(the report, whether it equals one rank) of a step of descent on a loss, a sum over ranks, of w and v, which all
    ranks have, and of x, whose dim 1 is split."""
    state = {n: Layout(shape, torch.float64, mesh) for n, shape in SHAPES.items()}
    batch = {n: Layout(shape, torch.float64, mesh, (None, "cp")) for n, shape in SPLIT.items()}

    def make(m):
        axis = Axes(m)["cp"]

        def run(s, b):
            (_, _), grads = step.value_and_grad(lambda p: (fn(p, torch.tanh(b["x"] @ p["v"]), axis), {}))(s)
            return {n: s[n] - 0.1 * psum(grads[n], axis) for n in s}, {}

        return run

    g = torch.Generator().manual_seed(3)
    given = {n: torch.randn(shape, generator=g, dtype=torch.float64) for n, shape in SHAPES.items()}
    data = {n: torch.randn(shape, generator=g, dtype=torch.float64) for n, shape in SPLIT.items()}
    return step.check(make(mesh), state, batch), parity(make, mesh, given, data, layouts=(state, batch)).ok


def end(p, y, x):
    """A loss of y, x and w, the parts of which are added over the ranks."""
    return (y * (1 + x)).square().sum() + 0 * p["w"].sum()


def at(x, axis, more=0, ranks=0):
    return torch.arange(x.shape[1]) + more + (axis_index(axis) + ranks) % axis.size * x.shape[1]


def cut(places):
    """Own rows of what goes backwards, by places."""
    return lambda p, x, axis: end(p, all_gather(x, axis, 1).flip(1)[:, places(x, axis)], x)


def table(places):
    return lambda p, x, axis: (p["w"][places(x, axis)] * x).square().sum()


def by_view(p, x, axis):
    whole = all_gather(x, axis, 1).cumsum(1)
    mine = whole.unflatten(1, (axis.size, x.shape[1])).index_select(1, axis_index(axis).view(1)).squeeze(1)
    return end(p, mine, x)


def halo(reach=1, shift=1, first=lambda axis: (axis_index(axis) == 0).double()):
    def fn(p, x, axis):
        before = ppermute(x[:, -reach:], axis, shift) * (1 - first(axis))
        y = torch.cat([before, x], 1)
        return end(p, sum(y[:, i : i + x.shape[1]] * p["v"][i] for i in range(2)), x)

    return fn


def shifted(shift, take=lambda x: x[:, :1], rest=lambda x: x[:, 1:]):
    return lambda p, x, axis: end(p, torch.cat([rest(x), ppermute(take(x), axis, shift)], 1), x)


def ended(last):
    def fn(p, x, axis):
        after = ppermute(x[:, :1], axis, -1) * last(axis_index(axis), axis)
        return end(p, torch.cat([x[:, 1:], after], 1), x)

    return fn


def scan(seen):
    def fn(p, x, axis):
        ends = all_gather(x.sum(1)[None], axis, 0)
        rank = torch.arange(axis.size)[:, None, None]
        return end(p, x.cumsum(1) + (ends * seen(rank, axis_index(axis))).sum(0)[:, None], x)

    return fn


def placed(hot, share=lambda y, axis: psum(y, axis)):
    def fn(p, x, axis):
        mine = torch.stack([x * hot(axis)[i] for i in range(axis.size)], 1).flatten(1, 2)
        whole = share(mine, axis).cumsum(1)
        return end(p, whole[:, at(x, axis)], x)

    return fn


def one_hot(axis, more=0):
    return ((axis_index(axis) + more) % axis.size == torch.arange(axis.size)).double()


def turned(turn):
    """Own rows of what is gathered, in the order that turn gives it."""
    return lambda p, x, axis: end(p, turn(all_gather(x, axis, 1), x, axis)[:, at(x, axis)], x)


def weighed(weight):
    return lambda p, x, axis: end(p, x * weight(at(x, axis), x, axis).double()[:, None], x)


def parts_of(whole, x, axis):
    return whole.unflatten(1, (axis.size, x.shape[1]))


RIGHT = {
    "all less one": weighed(lambda at, x, axis: at / (x.shape[1] * axis.size - 1)),
    "all but the last": weighed(lambda at, x, axis: at != x.shape[1] * axis.size - 1),
    "rolled by one": turned(lambda whole, x, axis: whole.roll(1, 1)),
    "next, none behind the last": lambda p, x, axis: end(
        p, torch.cat([x[:, 1:], ppermute(x[:, :1], axis, -1) * (axis_index(axis) < axis.size - 1)], 1), x
    ),
    "own rows": cut(at),
    "own rows, one place on": cut(lambda x, axis: at(x, axis, 1) % (x.shape[1] * axis.size)),
    "own rows of a table": table(at),
    "one view later": by_view,
    "halo": halo(),
    "next": shifted(-1),
    "nothing behind the last": ended(lambda rank, axis: rank < axis.size - 1),
    "what is behind": scan(lambda rank, own: rank < own),
}
WRONG = {
    "rest of a part": weighed(lambda at, x, axis: at % x.shape[1]),
    "part of a place": weighed(lambda at, x, axis: at // x.shape[1]),
    "rest of ranks": table(lambda x, axis: at(x, axis) % axis.size),
    "ranks less one on": weighed(lambda at, x, axis: at + axis.size - 1),
    "half of the ranks on": weighed(lambda at, x, axis: at + axis.size // 2),
    "twice the ranks on": weighed(lambda at, x, axis: at + (axis.size + axis.size)),
    "a part less one": weighed(lambda at, x, axis: at / (x.shape[1] - 1 + 1e-3)),
    "rolled by a part": turned(lambda whole, x, axis: whole.roll(x.shape[1], 1)),
    "rolled by ranks": turned(lambda whole, x, axis: whole.roll(axis.size, 1)),
    "each part turned round": turned(lambda whole, x, axis: parts_of(whole, x, axis).flip(2).flatten(1, 2)),
    "ranks turned round": turned(lambda whole, x, axis: parts_of(whole, x, axis).flip(1).flatten(1, 2)),
    "each part added up": turned(lambda whole, x, axis: parts_of(whole, x, axis).cumsum(2).flatten(1, 2)),
    "cut by a size, a plain number": lambda p, x, axis: end(
        p, all_gather(x, axis, 1)[:, : int(x.shape[1])].sum(1, keepdim=True) / axis.size, x
    ),
    "rolled by a size, a plain number": turned(lambda whole, x, axis: whole.roll(int(x.shape[1] - 1), 1)),
    "rolled by half of a size": turned(lambda whole, x, axis: whole.roll(x.shape[1] >> 1, 1)),
    "parts across": turned(lambda whole, x, axis: parts_of(whole, x, axis).transpose(1, 2).flatten(1, 2)),
    "a place too far": cut(lambda x, axis: (at(x, axis) + (axis_index(axis) == 0)) % (x.shape[1] * axis.size)),
    "the rows of the next": cut(lambda x, axis: at(x, axis, ranks=1)),
    "the first rows": cut(lambda x, axis: torch.arange(x.shape[1])),
    "overlapping": cut(lambda x, axis: torch.arange(x.shape[1]) + axis_index(axis) * (x.shape[1] - 1)),
    "of the next of a table": table(lambda x, axis: at(x, axis, ranks=1)),
    "halo from behind": halo(shift=-1),
    "halo of all": halo(first=lambda axis: torch.ones(()).double()),
    "halo of none": halo(first=lambda axis: (axis_index(axis) == axis.size - 1).double()),
    "next of the wrong side": shifted(1),
    "nothing behind the first": ended(lambda rank, axis: rank >= 1),
    "nothing behind the last but one": ended(lambda rank, axis: rank < axis.size - 2),
    "next, the last of it": shifted(-1, take=lambda x: x[:, -1:]),
    "next, two alike": shifted(-1, rest=lambda x: x[:, :-1]),
    "with its own": scan(lambda rank, own: rank <= own),
    "what comes": scan(lambda rank, own: rank > own),
    "no carry": scan(lambda rank, own: rank < own - 99),
    "placed elsewhere": placed(lambda axis: one_hot(axis, 1)),
    "placed and not summed": placed(one_hot, share=lambda y, axis: y),
}


@pytest.mark.long
@pytest.mark.parametrize("name", few(2, [(name,) for name in RIGHT], RIGHT))
def test_what_is_right_is_proven(name):
    for mesh in MESHES:
        report, same = judged(RIGHT[name], mesh)
        assert same and report.ok, str(report)


@pytest.mark.long
@pytest.mark.parametrize("name", few(2, [(name,) for name in WRONG], WRONG))
def test_what_is_wrong_is_not(name):
    report, same = judged(WRONG[name], MESHES[1])
    assert not same and not report.ok, str(report)
