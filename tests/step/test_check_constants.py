"""A number that is the same on one rank is no size of a part, however large it is; one that is made of a part is."""

import pytest
import torch

from fmegatron import step
from fmegatron.collectives import Axes, all_gather, psum
from fmegatron.layout import Layout, Mesh
from fmegatron.testing import parity

F64 = torch.float64
MESHES = (Mesh(dp=2), Mesh(dp=3), Mesh(dp=2, tp=2))
ROWS = 12  # 6 or 4 a rank


def described(make):
    """make(axes) -> fn(w[6, 5], queue[24, 5], x[rows, 5], dp) -> (a term of the loss, the new queue)."""

    def step_on(mesh, axes=None):
        dp, fn = Axes(mesh)["dp"], make(Axes(mesh))

        def run(s, b):
            def loss(p):
                return fn({**s, **p}, b["x"], dp)

            (_, queue), grads = step.value_and_grad(loss)({"w": s["w"]})
            return {"w": s["w"] - 0.1 * psum(grads["w"], dp), "queue": queue["queue"]}, {}

        return run

    return step_on


def judged(make, mesh):
    """(the report, whether it equals one rank)."""
    shapes = {"w": (6, 5), "queue": (24, 5)}
    state = {name: Layout(shape, F64, mesh) for name, shape in shapes.items()}
    batch = {"x": Layout((ROWS, 5), F64, mesh, ("dp",))}
    draw = torch.Generator().manual_seed(1)
    given = {name: torch.randn(shape, generator=draw, dtype=F64) for name, shape in shapes.items()}
    rows = {"x": torch.randn(ROWS, 5, generator=draw, dtype=F64)}
    fn = described(make)
    return step.check(fn(mesh), state, batch), parity(fn, mesh, given, rows, layouts=(state, batch)).ok


def of(loss, queue=lambda s, x, dp: s["queue"]):
    """A step whose rows are counted by `len`, which tells Python the size of a part."""

    def make(axes):
        def fn(s, x, dp):
            n = len(x) * dp.size
            return (x @ s["w"].T).square().sum() / n + loss(s, x, dp) / dp.size, {"queue": queue(s, x, dp)}

        return fn

    return make


def kept(rows):
    """The newest rows of what all ranks have, as many as rows(s, x, dp) says."""
    return lambda s, x, dp: torch.cat([all_gather(x, dp, 0), s["queue"]])[: rows(s, x, dp)]


def of_builder(axes):
    rows = ROWS // int(axes["dp"].size)
    return of(lambda s, x, dp: s["queue"][:rows].sum() * s["w"].sum())(axes)


def of_a_memory(axes):
    """What the first trace has noted."""
    memory = {}

    def first(s, x, dp):
        return s["queue"][: memory.setdefault("rows", len(x))].sum() * s["w"].sum()

    return of(first)(axes)


RIGHT = {
    "a row": of(lambda s, x, dp: s["w"][4].square().sum()),
    "half as many": of(lambda s, x, dp: s["w"][:3].sum() * s["w"][2].sum()),
    "as many as there are": of(lambda s, x, dp: 0 * s["w"].sum(), kept(lambda s, x, dp: len(s["queue"]))),
    "twelve": of(lambda s, x, dp: s["queue"][:12].square().sum() / 12),
    "a turn": of(lambda s, x, dp: (s["w"].roll(2, 0) * s["w"]).sum()),
    "parts of 2": of(lambda s, x, dp: sum(one.sum() ** 2 for one in s["w"].split(2))),
    "all rows, by hand": of(lambda s, x, dp: all_gather(x, dp, 0)[: len(x) * dp.size].sum() * s["w"].sum()),
}
WRONG = {
    "own rows": of(lambda s, x, dp: s["queue"][: len(x)].sum() * s["w"].sum()),
    "half of own rows": of(lambda s, x, dp: s["queue"][len(x) // 2].sum() * s["w"].sum()),
    "the last of own rows": of(lambda s, x, dp: s["queue"][len(x) - 1].sum() * s["w"].sum()),
    "as many as own rows": of(lambda s, x, dp: 0 * s["w"].sum(), kept(lambda s, x, dp: 4 * len(x))),
    "six times own rows": of(lambda s, x, dp: 0 * s["w"].sum(), kept(lambda s, x, dp: 6 * len(x))),
    "own rows, known": of(lambda s, x, dp: s["queue"][: x.shape[0]].sum() * s["w"].sum()),
    "one of own rows, known": of(lambda s, x, dp: s["queue"][x.shape[0]].sum() * s["w"].sum()),
    "at most 5": of(lambda s, x, dp: s["queue"][: min(len(x), 5) - 1].sum() * s["w"].sum()),
    "a turn by own rows": of(lambda s, x, dp: (s["queue"].roll(len(x) // 2, 0) * s["queue"]).sum() * s["w"].sum()),
    "made by its builder": of_builder,
    "noted by the first trace": of_a_memory,
}


@pytest.mark.parametrize("name", RIGHT)
def test_the_same_on_one_rank_is_proven(name):
    for mesh in MESHES[: 1 if name != "a row" else 3]:
        report, same = judged(RIGHT[name], mesh)
        assert same and report.ok, str(report)


@pytest.mark.parametrize("name", WRONG)
def test_what_is_made_of_a_part_is_not(name):
    report, same = judged(WRONG[name], MESHES[1])
    assert not same and not report.ok, str(report)
