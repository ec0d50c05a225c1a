"""Value and gradient of every collective on simulated ranks, against its definition."""

import pytest
import torch

from fmegatron import collectives as c
from fmegatron.collectives import Axes
from fmegatron.collectives.kinds import collective_of
from fmegatron.collectives.ops import declare
from fmegatron.collectives.table import COLLECTIVES
from fmegatron.layout import Mesh
from fmegatron.step import symbolic_nodes
from fmegatron.testing import Ranks, simulate
from tests.collectives.definitions import AXES, CASES, by_definition, inputs, make_step

ALL = [(mesh, axis) for mesh, axes in AXES.items() for axis in axes] + [(Mesh(a=2, b=2, c=2), ("c", "a"))]


@pytest.mark.long
@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("mesh, axis", ALL, ids=str)
def test_value_and_transpose(name, mesh, axis):
    xs, gs = inputs(mesh, name, axis)
    sim = simulate(make_step(name, Axes(mesh)[axis]), mesh, Ranks(xs), Ranks(gs))
    _, definition, transpose = CASES[name]
    wanted = by_definition(mesh, axis, definition, xs)
    if transpose is None:  # pmax: gradient of x * constant
        maxima = by_definition(mesh, axis, lambda group: [torch.stack(group).amax(0)] * len(group), xs)
        wanted_grads = [g * m for g, m in zip(gs, maxima, strict=True)]
    else:
        wanted_grads = by_definition(mesh, axis, transpose, gs)
    for rank, (y, dx) in enumerate(sim.outputs):
        assert torch.equal(y, wanted[rank]), f"value on rank {rank}"
        assert torch.equal(dx, wanted_grads[rank]), f"gradient on rank {rank}"


@pytest.mark.parametrize("name", CASES)
def test_size_one_leaves_no_node(name):
    mesh = Mesh(a=1, b=2)
    xs, gs = inputs(mesh, name, "a")
    sim = simulate(make_step(name, Axes(mesh)["a"]), mesh, Ranks(xs), Ranks(gs))
    assert not symbolic_nodes(sim.traced.graph_module.graph)


NODES = {
    "all_gather": ["all_gather", "reduce_scatter"],
    "all_gather_negative_dim": ["all_gather", "reduce_scatter"],
    "reduce_scatter": ["all_gather", "reduce_scatter"],
    "psum": ["psum"],
    "enter": ["psum"],
    "pmax": ["pmax"],
    "all_to_all": ["all_to_all", "all_to_all"],
    "all_to_all_same_dim": ["all_to_all", "all_to_all"],
    "all_to_all_rows": ["all_to_all_rows", "all_to_all_rows", "axis_index"],
    "ppermute": ["ppermute", "ppermute"],
    "ppermute_back": ["ppermute", "ppermute"],
    "shard": ["all_gather", "axis_index"],
    "shard_padded": ["all_gather", "axis_index", "cut"],
    "axis_index": ["axis_index"],
    "declare": ["declare", "declare"],
    "declare_own": ["declare", "declare"],
}


@pytest.mark.parametrize("name", CASES)
def test_one_node_per_collective(name):
    """The value and its transpose are one collective each, at most; nothing else is exchanged."""
    mesh = Mesh(a=2)
    xs, gs = inputs(mesh, name, "a")
    sim = simulate(make_step(name, Axes(mesh)["a"]), mesh, Ranks(xs), Ranks(gs))
    found = [collective_of(n.target).name for n in symbolic_nodes(sim.traced.graph_module.graph)]
    assert sorted(found) == NODES[name]


def test_every_entry_has_a_case():
    assert {name for names in NODES.values() for name in names} == {entry.name for entry in COLLECTIVES}


@pytest.mark.parametrize(
    "call, says",
    [
        (lambda x, a: c.all_gather(x, a, 3), "dim 3"),
        (lambda x, a: c.reduce_scatter(x, a, 1), "not divisible by 2"),
        (lambda x, a: c.shard(x, a, 1), "not divisible by 2"),
        (lambda x, a: c.all_to_all(x, a, 1, 0), "not divisible by 2"),
        (lambda x, a: declare(x, a, "whole"), "declare: forward: got 'whole'"),
        (lambda x, a: declare(x, a, "own"), "got None after it, wanted the dim"),
        (lambda x, a: declare(x, a, "own", 2), "dim 2 of a tensor"),
    ],
)
def test_bad_calls(call, says):
    with pytest.raises(ValueError, match=says):
        call(torch.zeros(2, 3), Axes(Mesh(a=2))["a"])


def test_bad_axes():
    with pytest.raises(ValueError, match="got mesh axis 'b', wanted one of a"):
        Axes(Mesh(a=2))["b"]
    with pytest.raises(ValueError, match="wanted each axis once"):
        Axes(Mesh(a=2))["a", "a"]


CALLS = [
    lambda x, axis: c.psum(x, axis),
    lambda x, axis: c.enter(x, axis),
    lambda x, axis: c.pmax(x, axis),
    lambda x, axis: c.all_gather(x, axis, 0),
    lambda x, axis: c.reduce_scatter(x, axis, 0),
    lambda x, axis: c.all_to_all(x, axis, 0, 1),
    lambda x, axis: c.ppermute(x, axis, 1),
    lambda x, axis: c.shard(x, axis, 0),
]


@pytest.mark.parametrize("call", [*CALLS, lambda x, axis: c.axis_index(axis)])
def test_the_name_of_an_axis_is_not_an_axis(call):
    with pytest.raises(ValueError, match=r"got the axis 'dp', wanted a value of Axes; .* axes\['dp'\]"):
        call(torch.ones(4, 4), "dp")


@pytest.mark.parametrize("value", [{"a": torch.ones(4, 4)}, [torch.ones(4, 4)], 1.0], ids=["dict", "list", "number"])
@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("call", CALLS)
def test_what_is_no_tensor_is_refused(call, ranks, value):
    """As jax.lax.psum takes trees and numbers; over one rank, too, where nothing is sent."""
    kind = type(value).__name__
    with pytest.raises(ValueError, match=rf"over .*: got a value of type {kind}, wanted a tensor; .*tree\.map.*\.size"):
        call(value, Axes(Mesh(dp=ranks))["dp"])


@pytest.mark.parametrize(
    "use", [lambda x, dp: x / dp, lambda x, dp: dp * x, lambda x, dp: 8 // dp, lambda x, dp: dp + 1]
)
def test_an_axis_is_no_number(use):
    with pytest.raises(TypeError, match=r"arithmetic with the axis dp, wanted a number; .* axes\['dp'\]\.size"):
        use(torch.ones(4), Axes(Mesh(dp=2))["dp"])


def test_a_ring_is_a_shift():
    with pytest.raises(ValueError, match=r"ppermute over dp: got shift=\[\(0, 1\), \(1, 0\)\], .* are shift=1"):
        c.ppermute(torch.ones(4), Axes(Mesh(dp=2))["dp"], [(0, 1), (1, 0)])


def test_symbolic_collectives_refuse_real_tensors():
    with pytest.raises(RuntimeError, match="testing.simulate"):
        c.psum(torch.zeros(2), Axes(Mesh(a=2))["a"])
