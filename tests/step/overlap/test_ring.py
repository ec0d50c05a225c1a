"""A ring hides its exchange: the next block travels while this one is multiplied, in the graph and inside of a layer.

Letters: T rows, D features.
"""

import functools

import pytest
import torch

from fmegatron.collectives import Axes, all_to_all, connect, ppermute
from fmegatron.collectives.ops import all_to_all_rows, declare
from fmegatron.layout import Mesh
from fmegatron.step import Overlap, jit
from fmegatron.step.graph.nodes import is_start, is_wait, opaque_entries
from fmegatron.step.jitted import Compiled
from fmegatron.step.layer import compiled_layer
from fmegatron.step.passes import Target
from fmegatron.step.timelines.planned import PaperWorld, planned
from fmegatron.testing import Ranks, simulate

MESH = Mesh(cp=2)
T, D = 4, 6


def ring(x_TD, w_DD, axes):
    """Products of this rank's rows with those of all."""
    cp = axes["cp"]
    block_TD, out_TT = declare(x_TD, cp, "own", 0), []
    for hop in range(cp.size):
        now_TD = block_TD
        if hop + 1 < cp.size:
            block_TD = ppermute(block_TD, cp, 1)
        out_TT.append(x_TD @ (now_TD @ w_DD).t())
    return torch.cat(out_TT, 1)


def routed(x_TD, w_DD, axes):
    """Rows come while others are multiplied."""
    cp = axes["cp"]
    x_TD = declare(x_TD, cp, "own", 0)
    send = torch.full((cp.size,), T // cp.size)
    came_TD = all_to_all_rows(x_TD, send, all_to_all(send, cp, 0, 0), cp, T)
    return x_TD @ w_DD + came_TD


def step_of(fn, layer):
    fn = functools.partial(fn, axes=Axes(MESH))
    call = compiled_layer("all")(fn) if layer else fn

    def step(x_TD, w_DD):
        x_TD, w_DD = x_TD.detach().requires_grad_(), w_DD.detach().requires_grad_()
        with torch.enable_grad():
            y = call(x_TD, w_DD)
        return y.detach(), *torch.autograd.grad(y.square().sum(), (x_TD, w_DD))

    return step


def parts(rank):
    g = torch.Generator().manual_seed(rank)
    w_DD = torch.randn(D, D, generator=torch.Generator().manual_seed(9), dtype=torch.float64)
    return torch.randn(T, D, generator=g, dtype=torch.float64), w_DD


def graphs(fn, layer, overlap):
    """The ordered graphs: of the step, and of the layers inside."""
    compiled = Compiled(step_of(fn, layer), parts(0), (), Target(PaperWorld(MESH), "eager", overlap=overlap))
    outer = compiled.stages["overlap"]
    return [outer.graph, *(entry.graph_module.graph for entry in opaque_entries(outer.graph))]


def between(graph, multiply=torch.ops.aten.mm.default):
    """For each start of an exchange with a wait in the graph, how many products are made meanwhile."""
    order, found = list(graph.nodes), []
    for wait in filter(is_wait, order):
        start = wait.args[0]
        if is_start(start) and "all_to_all_single" not in str(start.target):
            found.append(sum(n.target is multiply for n in order[order.index(start) : order.index(wait)]))
    return found


@pytest.mark.parametrize("layer", [False, True], ids=["in the step", "in a layer"])
@pytest.mark.parametrize("fn, at_least", [(ring, [2]), (routed, [1])])
def test_products_while_it_travels(fn, at_least, layer):
    plain = [n for graph in graphs(fn, layer, None) for n in between(graph)]
    found = [n for graph in graphs(fn, layer, Overlap()) for n in between(graph)]
    assert len(found) == len(plain) and not any(plain)
    assert found[0] >= at_least[0]


def test_a_timeline_shows_it():
    (graph,) = graphs(ring, False, Overlap())
    events = planned(graph).events
    assert any("exchange cp" in str(one) for one in events)


def on_rank(rank, layer, backend):
    with connect(MESH) as world:
        found = []
        for fn in (ring, routed):
            for overlap in (False, True, Overlap(separate_groups=True)):
                found.append(jit(step_of(fn, layer), world=world, overlap=overlap, backend=backend)(*parts(rank)))
        return found


@pytest.mark.medium
@pytest.mark.parametrize(
    "layer, backend", [(False, "eager"), (True, "aot_eager"), (False, "inductor"), (True, "inductor")]
)
def test_every_order_gives_the_values_of_simulated_ranks(ranks, layer, backend):
    real = ranks.run(on_rank, layer, backend, ranks=2)
    for i, fn in enumerate((ring, routed)):
        given = [Ranks(column) for column in zip(*map(parts, range(2)), strict=True)]
        sim = simulate(step_of(fn, layer), MESH, *given)
        for rank in range(2):
            for found in real[rank][3 * i : 3 * i + 3]:
                torch.testing.assert_close(list(found), list(sim.outputs[rank]), rtol=1e-12, atol=1e-12)
