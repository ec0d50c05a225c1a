"""collectives_of: traced and lowered graphs list the same collectives, and bytes are those of the formulas."""

import pytest
import torch

from fmegatron import collectives as c
from fmegatron import model, tree
from fmegatron.collectives import Axes
from fmegatron.collectives.ops import declare
from fmegatron.layout import Mesh
from fmegatron.step import collectives_of, trace
from fmegatron.step.jitted import Compiled
from fmegatron.step.passes import Target
from fmegatron.step.timelines.planned import PaperWorld
from fmegatron.step.traffic import bytes_sent
from tests.step import tiny

MESH = Mesh(dp=3, tp=4, one=1)
X = torch.zeros(12, 4, device="meta")  # fp32: 192 bytes
CASES = {  # name: (call, op, axes, elements, bytes that a rank sends)
    "all_gather": (lambda x, a: c.all_gather(x, a["tp"], 0), "all_gather", ("tp",), 48, 3 * 192),
    "reduce_scatter": (lambda x, a: c.reduce_scatter(x, a["tp"], 0), "reduce_scatter", ("tp",), 48, 3 * 48),
    "psum": (lambda x, a: c.psum(x, a["dp"]), "psum", ("dp",), 48, 2 * 2 * 64),
    "psum that rounds up": (lambda x, a: c.psum(x[0, 0], a["dp"]), "psum", ("dp",), 1, 6),  # 16/3 bytes
    "joint": (lambda x, a: c.psum(x.bfloat16(), a["dp", "tp"]), "psum", ("dp", "tp"), 48, 2 * 11 * 8),
    "pmax": (lambda x, a: c.pmax(x, a["dp"]), "pmax", ("dp",), 48, 256),
    "all_to_all": (lambda x, a: c.all_to_all(x, a["tp"], 0, 1), "all_to_all", ("tp",), 48, 144),
    "ppermute": (lambda x, a: c.ppermute(x, a["tp"], 1), "ppermute", ("tp",), 48, 192),
}


@pytest.mark.parametrize("name", CASES)
def test_each_collective(name):
    call, op, axes, elements, sent = CASES[name]
    graph = trace(lambda x: call(x, Axes(MESH)), (X,)).graph_module.graph
    (found,) = collectives_of(graph, MESH)
    assert (found.op, found.axes, found.elements, found.sent) == (op, axes, elements, sent)
    assert found.size == MESH.extent(axes) and found.at.startswith("test_traffic.py:")
    assert found.nbytes == elements * found.dtype.itemsize and f"sends {sent} B" in str(found)


def test_what_sends_nothing_is_not_listed():
    step = lambda x: c.shard(declare(c.psum(x, Axes(MESH)["one"]), Axes(MESH)["tp"], "partial"), Axes(MESH)["tp"], 0)  # noqa: E731
    assert collectives_of(trace(step, (X,)).graph_module.graph, MESH) == []


@pytest.mark.long
@pytest.mark.parametrize("mesh", [Mesh(fsdp=2), Mesh(dp=2, tp=2)], ids=str)
def test_lowered_graph_sends_what_the_traced_one_does(mesh):
    """The decoder's step."""
    args = (tiny.decoder_state(mesh=mesh), tiny.decoder_batch(mesh=mesh))
    step = Compiled(tiny.decoder_step(save="inputs", mesh=mesh), args, (0,), Target(PaperWorld(mesh)))
    traced, lowered = (collectives_of(step.stages[stage].graph, mesh) for stage in ("trace", "overlap"))
    assert bytes_sent(lowered) == bytes_sent(traced)
    assert [one.op for one in lowered] == [one.op for one in traced]
    assert {one.at for one in lowered} == {one.at for one in traced}


@pytest.mark.long
def test_bytes_of_zero3():
    """Two gathers of what lies in the blocks, one of the rest, one reduction of all: n - 1 of n parts each."""
    mesh = Mesh(fsdp=4)
    args = (tiny.decoder_state(mesh=mesh), tiny.decoder_batch(mesh=mesh))
    found = collectives_of(trace(tiny.decoder_step(save="inputs", mesh=mesh), args).graph_module.graph, mesh)
    layouts = model.layouts(tiny.CONFIG, mesh)
    blocks, all_of_it = (
        sum(leaf.local_nbytes(0) for leaf in tree.leaves(t) if leaf.sharded) for t in (layouts["blocks"], layouts)
    )
    by_op = {op: sum(one.sent for one in found if one.op.startswith(op)) for op in ("all_gather", "reduce_scatter")}
    assert by_op == {"all_gather": 3 * (all_of_it + blocks), "reduce_scatter": 3 * all_of_it}
