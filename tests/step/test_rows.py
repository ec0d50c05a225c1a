"""all_to_all_rows in a step: rows go to the ranks that have their experts and come back, as many as the data decides.

Letters: T rows, D features, E experts, R rows that a rank has room for, n ranks of ep.
"""

import functools

import pytest
import torch

from fmegatron.collectives import Axes, all_to_all, connect, psum
from fmegatron.collectives.ops import all_to_all_rows, declare
from fmegatron.layout import Layout, Mesh
from fmegatron.step import check, collectives_of, jit, symbolic_nodes, trace, value_and_grad
from fmegatron.step.traffic import bytes_sent
from fmegatron.testing import parity, simulate, split
from tests.pairs import each_value

T, D, E = 24, 6, 4
DATA = ("dp", "ep")


def layouts(mesh):
    """Of (weights, batch)."""
    weights = {"router": Layout((D, E), torch.float64, mesh), "scale": Layout((E, D), torch.float64, mesh, ("ep",))}
    return weights, {"x": Layout((T, D), torch.float64, mesh, (DATA,))}


def values(skew=0.0):
    """Global arguments; skew: how much more often the last expert is chosen."""
    g = torch.Generator().manual_seed(3)
    w = {"router": torch.randn(D, E, generator=g).double(), "scale": torch.randn(E, D, generator=g).double()}
    w["router"][:, -1] += skew
    return w, {"x": torch.randn(T, D, generator=g).double() + (1.0 if skew else 0.0)}


def experts(x_TD, w, axes, rows, fault=""):
    """Each row by the expert that its router prefers -> (y[T, D], rows for which there was no room)."""
    ep, dp, data = axes["ep"], axes["dp"], axes[DATA]
    n = ep.size
    x_TD = declare(x_TD, data, "own", 0)
    scale_ED = declare(declare(w["scale"], ep, backward=("sharded", 0)), dp, backward="partial")
    gate_T, expert_T = (x_TD @ declare(w["router"], data, backward="partial")).softmax(-1).max(-1)
    order_T = expert_T.argsort(stable=True)
    counts_E = (expert_T[:, None] == torch.arange(E)).sum(0)
    send_n = counts_E.view(n, -1).sum(1)
    recv_n = all_to_all(send_n, ep, 0, 0)
    if fault == "counts":
        recv_n = send_n
    came_RD = all_to_all_rows(x_TD[order_T], send_n, recv_n, dp if fault == "axis" else ep, rows)
    expert_R = all_to_all_rows(expert_T[order_T], send_n, recv_n, ep, rows) % scale_ED.shape[0]
    y_RD = came_RD * scale_ED[expert_R]
    back = (send_n, recv_n) if fault == "back" else (recv_n, send_n)
    y_TD = all_to_all_rows(y_RD, *back, ep, x_TD.shape[0])
    y_TD = torch.zeros_like(y_TD).index_add(0, order_T, y_TD) * gate_T[:, None]
    over = (recv_n.sum() - rows).clamp(min=0)
    y_TD = y_TD if fault == "not declared" else declare(y_TD, data, forward=("sharded", 0))
    return y_TD, declare(over, data, forward="partial") if fault != "overflow" else over


def make_step(mesh, room=None, fault=""):
    """Least squares; room: rows a rank has room for, by default all that there are."""
    axes = Axes(mesh)
    data = axes[DATA]
    rows = room or T // mesh["dp"]

    def loss_fn(w, batch):
        y_TD, over = experts(batch["x"], w, axes, rows, fault)
        loss = (y_TD - batch["x"]).square().sum() / T
        return loss, {"loss": psum(loss.detach(), data), "overflow": psum(over, data)}

    def step(w, batch):
        (_, metrics), grads = value_and_grad(loss_fn)(w, batch)
        grads = {"router": psum(grads["router"], data), "scale": psum(grads["scale"], axes["dp"])}
        return {name: w[name] - 0.1 * grads[name] for name in w}, metrics

    return step


MESHES = [Mesh(dp=1, ep=2), Mesh(dp=1, ep=4), Mesh(dp=2, ep=2), Mesh(dp=4, ep=1)]


SKEWS = {0.0: "spread", 5.0: "one expert has nearly all"}


@pytest.mark.parametrize(("mesh", "skew"), each_value(MESHES, SKEWS, ids=[str, SKEWS]))
def test_equal_to_one_rank(mesh, skew):
    found = parity(make_step, mesh, *values(skew), layouts=layouts(mesh), steps=2)
    assert found.ok, str(found)


@pytest.mark.parametrize("mesh", [*MESHES, Mesh(dp=4, ep=2)], ids=str)
def test_check_is_clean(mesh):
    report = check(make_step(mesh), *layouts(mesh))
    assert report.ok, str(report)


@pytest.mark.parametrize("fault", ["not declared", "overflow"])
def test_check_of_wrong_steps(fault):
    mesh = Mesh(dp=2, ep=2)
    assert not check(make_step(mesh, fault=fault), *layouts(mesh)).ok


@pytest.mark.parametrize("fault", ["counts", "axis"])
def test_counts_that_do_not_agree(fault):
    mesh = Mesh(dp=2, ep=2)
    with pytest.raises(ValueError, match=r"test_rows.py:\d+.*exchange the counts"):
        simulate(make_step(mesh, fault=fault), mesh, *values(), layouts=layouts(mesh))


def test_back_by_the_counts_of_the_way_there():
    mesh = Mesh(dp=1, ep=2)
    sims = [simulate(make_step(mesh, fault=fault), mesh, *values(), layouts=layouts(mesh)) for fault in ("", "back")]
    assert sims[0].metrics["loss"] != sims[1].metrics["loss"]


AXES = Axes(Mesh(ep=2))["ep"]


def one_each(x):
    counts = torch.ones(2, dtype=torch.int64)
    return all_to_all_rows(x, counts, counts, AXES, 4)


def as_many_as_positive(x):
    counts = (x > 0).sum().expand(2)
    return all_to_all_rows(x, counts, counts, AXES, 4)


OTHERS = {
    "pending rows": (one_each, {"unreduced": ("ep",)}),
    "rows of all": (one_each, {}),
    "columns": (one_each, {"spec": (None, "ep")}),
    "pending counts": (as_many_as_positive, {"spec": ("ep",)}),
}


@pytest.mark.parametrize("name", OTHERS)
def test_check_finds(name):
    fn, at = OTHERS[name]
    mesh = Mesh(ep=2)
    given = Layout((4, 4), torch.float64, mesh, at.get("spec", ()), unreduced=at.get("unreduced", ()))
    out = Layout((8, 4), torch.float64, mesh, ("ep",))
    report = check(lambda s, x: (s, {"y": declare(fn(x), AXES, ("sharded", 0)).sum()}), out, given)
    assert any(one.op == "all_to_all_rows" for one in report.findings), str(report)


def test_rows_for_which_there_is_no_room():
    """They are left out, nothing is written outside, and of what was not there nothing but zeros comes back."""
    mesh = Mesh(dp=1, ep=2)
    w, batch = values(5.0)
    sim = simulate(make_step(mesh, room=5), mesh, w, batch, layouts=layouts(mesh))
    chosen = (batch["x"] @ w["router"]).argmax(-1)
    came = [int((chosen // 2 == rank).sum()) for rank in range(2)]
    assert sim.metrics["overflow"] == sum(max(0, n - 5) for n in came) > 0
    assert all(torch.isfinite(sim.gather(path)).all() for path in sim.paths)


def on_rank(rank, backend, room):
    """The step on this rank, eagerly and jitted, and what its graphs send."""
    mesh = Mesh(dp=1, ep=2)
    with connect(mesh) as world:
        given = [split(v, at)[rank] for v, at in zip(values(5.0 if room else 0.0), layouts(mesh), strict=True)]
        step = jit(make_step(mesh, room), world=world, backend=backend)
        found = step(*given)
        return found, [bytes_sent(collectives_of(step.graph(stage), mesh)) for stage in ("trace", "lower")]


@pytest.mark.long
@pytest.mark.parametrize("backend, room", [("eager", None), ("eager", 5), ("aot_eager", None), ("inductor", 5)])
def test_gloo_ranks(ranks, backend, room):
    mesh = Mesh(dp=1, ep=2)
    sim = simulate(make_step(mesh, room), mesh, *values(5.0 if room else 0.0), layouts=layouts(mesh))
    for rank, (found, sent) in enumerate(ranks.run(on_rank, backend, room, ranks=2)):
        for got, wanted in zip(found, sim.outputs[rank], strict=True):
            for name in wanted:
                torch.testing.assert_close(got[name], wanted[name], rtol=1e-12, atol=1e-12)
        assert sent[0] == sent[1]


def rows_on_rank(rank, dtype):
    """Eagerly, on the world: 3 rows here, none there; room for 2."""
    mesh = Mesh(ep=2)
    with connect(mesh) as world:
        ep = Axes(mesh, world)["ep"]
        x = torch.arange(6).view(3, 2).to(dtype)
        return all_to_all_rows(x, torch.tensor([0, 3]), torch.tensor([3, 3]) * rank, ep, 2).float()


DTYPES = (torch.float64, torch.bfloat16, torch.int64, torch.bool, torch.float8_e4m3fn)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_eager_and_dtypes(ranks, dtype):
    first, second = ranks.run(rows_on_rank, dtype, ranks=2)
    assert torch.equal(first, torch.zeros(2, 2))
    assert torch.equal(second, torch.arange(4).view(2, 2).to(dtype).float())


def test_bytes():
    mesh = Mesh(dp=1, ep=4)
    given = [split(v, at)[0] for v, at in zip(values(), layouts(mesh), strict=True)]
    found = collectives_of(trace(make_step(mesh, room=100), given).graph_module.graph, mesh)
    sent = [one.sent for one in found if one.op == "all_to_all_rows"]
    # 6 rows of a rank, 3 of 4 ranks away: features there and back, numbers of experts there, gradients there and back.
    assert sorted(sent) == sorted([6 * D * 8 * 3 // 4] * (len(sent) - 1) + [6 * 8 * 3 // 4]) and len(sent) == 4


@pytest.mark.parametrize(
    "call, says",
    [
        (lambda x, n: all_to_all_rows(x, n[:1], n, AXES, 4), r"send: got torch.int64 of shape \(1,\)"),
        (lambda x, n: all_to_all_rows(x, n, n.int(), AXES, 4), "recv: got torch.int32"),
        (lambda x, n: all_to_all_rows(x, n, n, AXES, -1), "got -1 rows"),
    ],
)
def test_bad_calls(call, says):
    with pytest.raises(ValueError, match=says):
        call(torch.zeros(2, 3), torch.tensor([1, 1]))


def test_one_rank_has_no_collective():
    ep = Axes(Mesh(ep=1))["ep"]
    x, three = torch.arange(10.0).view(5, 2), torch.tensor([3])
    fn = functools.partial(all_to_all_rows, axis=ep, rows=4)
    assert torch.equal(fn(x, three, three), torch.cat([x[:3], torch.zeros(1, 2)]))
    assert not symbolic_nodes(trace(fn, (x, three, three)).graph_module.graph)
