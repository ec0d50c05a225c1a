"""A collective is added by one entry: traced, checked, simulated, lowered, run on gloo ranks, and its bytes counted.

Nothing else knows of the three that this file makes.
"""

import functools

import pytest
import torch

from fmegatron.collectives import Axes, connect, psum
from fmegatron.collectives.kinds import REPLICATED, Collective, Partial, Permuted, Sharded, collective_of
from fmegatron.collectives.places import Place
from fmegatron.collectives.real import all_reduced, ppermute
from fmegatron.collectives.table import PSUM
from fmegatron.collectives.torch_private import functional_ops
from fmegatron.layout import Layout, Mesh
from fmegatron.step import check, collectives_of, jit, symbolic_nodes, trace
from fmegatron.step.jitted import Compiled
from fmegatron.step.passes import Target
from fmegatron.step.timelines.planned import PaperWorld
from fmegatron.step.traffic import bytes_sent
from fmegatron.testing import Ranks, simulate, split

PMIN = Collective(
    "toy_pmin",
    "",
    type=lambda: (Partial("min"), REPLICATED),
    real=lambda xs, group: [all_reduced(x, "min", group) for x in xs],
    simulated=lambda xs, sizes: [functools.reduce(torch.minimum, xs)] * len(xs),
    sent=lambda nbytes, n: 2 * (n - 1) * nbytes / n,
)


def scattered_rows(xs, group, places):
    ops = functional_ops()
    return [ops.wait_tensor(ops.reduce_scatter_tensor(x.contiguous(), "max", group.n, group.name)) for x in xs]


MAX_SCATTER = Collective(  # on dim 0
    "toy_max_scatter",
    "Place[] places",
    type=lambda place: (Partial("max"), Sharded(place)),
    result=lambda x, sizes, place: x.new_empty(place.shard_shape(x.shape, sizes)),
    real=scattered_rows,
    simulated=lambda xs, sizes, place: list(place.pieces(functools.reduce(torch.maximum, xs), sizes).unbind(0)),
    sent=lambda nbytes, n: (n - 1) * nbytes / n,
)

SHIFT = Collective(  # rank i has what rank i - shift had, one that has a gradient
    "toy_shift",
    "int shift",
    type=lambda shift: (None, Permuted()),
    real=ppermute,
    simulated=lambda xs, sizes, shift: [xs[(i - shift) % len(xs)] for i in range(len(xs))],
    transpose=lambda gs, axis, shift: SHIFT.emit(gs, axis, -shift),
    sent=lambda nbytes, n: nbytes,
)

MESH = Mesh(dp=2, tp=2)
ROWS = Layout((8, 3), torch.float64, MESH, ("dp",))
COLUMN = Layout((8, 4), torch.float64, MESH, (None, "tp"))


def least(state, batch, axes, axis="dp", reduce=lambda x: x.amin(0)):
    """The smallest element of each column of rows that dp shards; the largest of each row of columns that tp shards."""
    (low,) = PMIN([reduce(batch["rows"])], axes[axis])
    (high,) = MAX_SCATTER([batch["columns"].amax(1)], axes["tp"], [Place((0,))])
    return {"high": state["high"] + high}, {"low": low}


LAYOUTS = {"high": Layout((8,), torch.float64, MESH, ("tp",))}, {"rows": ROWS, "columns": COLUMN}
VALUES = (
    {"high": torch.zeros(8, dtype=torch.float64)},
    {name: torch.randn(x.shape, dtype=x.dtype, generator=torch.Generator().manual_seed(i))
     for i, (name, x) in enumerate(LAYOUTS[1].items())},
)  # fmt: skip
PARTS = list(zip(*(split(values, layouts) for values, layouts in zip(VALUES, LAYOUTS, strict=True)), strict=True))
RIGHT = functools.partial(least, axes=Axes(MESH))


def test_check():
    assert check(RIGHT, *LAYOUTS).ok
    wrong = {
        "over another axis": functools.partial(RIGHT, axis="tp"),
        "of a pending sum": functools.partial(RIGHT, reduce=lambda x: x.sum(0)),
    }
    for name, step in wrong.items():
        report = check(step, *LAYOUTS)
        assert any(one.op == "toy_pmin" and "test_one_entry.py" in one.at for one in report.findings), (name, report)


def test_simulated_ranks():
    sim = simulate(RIGHT, MESH, *VALUES, layouts=LAYOUTS)
    assert torch.equal(sim.gather("1/low"), VALUES[1]["rows"].amin(0))
    assert torch.equal(sim.gather("0/high"), VALUES[1]["columns"].amax(1))


def test_bytes():
    step = Compiled(RIGHT, PARTS[0], (), Target(PaperWorld(MESH), "eager"))
    traced, lowered = (collectives_of(step.stages[stage].graph, MESH) for stage in ("trace", "lower"))
    assert [(one.op, one.sent) for one in traced] == [("toy_pmin", 2 * 3 * 8 // 2), ("toy_max_scatter", 8 * 8 // 2)]
    assert bytes_sent(lowered) == bytes_sent(traced)


def on_rank(rank):
    """What the step gives on this rank, jitted and eagerly, and what the lowered graph sends."""
    with connect(MESH) as world:
        jitted = jit(RIGHT, world=world, backend="eager")
        found = jitted(*PARTS[rank])
        eager = least(*PARTS[rank], axes=Axes(MESH, world))
        return found, eager, bytes_sent(collectives_of(jitted.graph("lower"), MESH))


def test_gloo_ranks(ranks):
    sim = simulate(RIGHT, MESH, *VALUES, layouts=LAYOUTS)
    for rank, (found, eager, sent) in enumerate(ranks.run(on_rank, ranks=4)):
        for state, metrics in (found, eager):
            assert torch.equal(state["high"], sim.outputs[rank][0]["high"])
            assert torch.equal(metrics["low"], sim.outputs[rank][1]["low"])
        assert sent == {"dp": 24, "tp": 32}


def shifted(x, g, axis):
    """A value and its gradient."""
    leaf = x.detach().requires_grad_()
    with torch.enable_grad():
        (y,) = SHIFT([leaf], axis, 1)
    return y.detach(), torch.autograd.grad(y, leaf, g)[0]


def shifted_on_rank(rank, mesh):
    with connect(mesh) as world:
        x = torch.full((3,), float(rank))
        jitted = jit(functools.partial(shifted, axis=Axes(mesh)["dp"]), world=world, backend="eager")
        found = [y.tolist() for y in (*jitted(x, x), *shifted(x, x, Axes(mesh, world)["dp"]))]
        return found, [str(one) for one in collectives_of(jitted.graph("lower"), mesh)]


def test_transpose(ranks):
    mesh = Mesh(dp=4)
    own = Ranks(torch.full((3,), float(rank)) for rank in range(4))
    sim = simulate(functools.partial(shifted, axis=Axes(mesh)["dp"]), mesh, own, own)
    for rank, (found, sent) in enumerate(ranks.run(shifted_on_rank, mesh, ranks=4)):
        wanted = [[float((rank - 1) % 4)] * 3, [float((rank + 1) % 4)] * 3]
        assert found == wanted * 2 == [y.tolist() for y in sim.outputs[rank]] * 2
        assert len(sent) == 2 and all(text.startswith("toy_shift over dp: float32[3], sends 12 B") for text in sent)


def test_a_name_is_taken_once():
    with pytest.raises(RuntimeError, match="toy_pmin"):
        Collective("toy_pmin", "", type=PMIN.type, real=PMIN.real, simulated=PMIN.simulated, sent=PMIN.sent)


def test_one_tensor_is_a_list_of_one():
    graph = trace(lambda x: psum(x, Axes(MESH)["dp"]), (torch.ones(2),)).graph_module.graph
    (node,) = symbolic_nodes(graph)
    assert collective_of(node.target) is PSUM and len(node.args[0]) == 1
