"""Gradients of vectors travel in fp32 under every strategy, whatever matrices travel in: one rule, by dims."""

from collections import Counter

import pytest
import torch

from fmegatron import model, tree
from fmegatron.collectives import Precision
from fmegatron.collectives.kinds import collective_of
from fmegatron.collectives.wires import Wire
from fmegatron.layout import Layout, Mesh
from fmegatron.step import reduce_gradients, trace
from fmegatron.step.graph.nodes import entry_of
from fmegatron.testing import Ranks, simulate, split
from tests.pairs import few
from tests.step import strategies
from tests.step.strategies import STRATEGIES, make_config, make_step, specs_of

MESH = Mesh(dp=2, fsdp=2)
F32, B16 = torch.float32, torch.bfloat16


def reduced(graph) -> Counter:
    """(dtype on the wire, axes) -> elements that are summed over ranks; numbers (losses, norms) left out."""
    found = Counter()
    for node in graph.nodes:
        if (entry := entry_of(node)) is not None:
            found += reduced(entry.graph_module.graph)
        collective = collective_of(node.target)
        if collective and collective.name in ("psum", "reduce_scatter"):
            for x in (n.meta["val"] for n in node.args[0]):
                found[x.dtype, "+".join(node.args[1])] += x.numel() * (x.numel() > 2)
    return +found


@pytest.mark.parametrize("microbatches", [1, pytest.param(3, marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", few(2, [(name,) for name in STRATEGIES], STRATEGIES))
def test_what_travels(name, microbatches):
    """Each reduction has all vectors in fp32 and all matrices in bf16, in their proportion."""
    # 4 layers, so that every leaf is split alike.
    config, strategy = make_config(precision=Precision.bf16_wire(), layers=4), STRATEGIES[name]
    step = make_step(config, MESH, strategy, microbatches)
    specs = specs_of(config, Mesh(), strategy)
    state = split(tree.init(specs, 0, 0), specs_of(config, MESH, strategy))[0]
    batch = split(strategies.batch_at(config, 0), strategies.batch_layouts(MESH))[0]
    found = reduced(trace(step, (state, batch)).graph_module.graph)
    count = Counter()
    for path, spec in zip(tree.paths(specs.params), tree.leaves(specs.params), strict=True):
        count["norm" in path] += spec.layout.nbytes // 4
    assert found and {dtype for dtype, _ in found} == {F32, B16}
    for axes in {axes for _, axes in found}:
        assert found[F32, axes] * count[False] == found[B16, axes] * count[True], axes


def test_a_policy_gives_each_leaf_its_wire():
    layouts = model.layouts(make_config(), MESH)
    wires = Precision.bf16_wire().wires(layouts)
    matrix, vector = Wire(B16, B16, True, B16), Wire(exact=True)
    for path, wire in zip(tree.paths(layouts), tree.leaves(wires), strict=True):
        assert wire == (vector if "norm" in path else matrix), path
    of_a_layer = {"scale": Layout((8,), F32, MESH), "bias": Layout((2, 8), F32, MESH, lead=1)}
    assert set(tree.leaves(Precision.bf16_wire().wires(of_a_layer))) == {vector}
    # Where all gradients travel in 32 bits there is nothing to tell apart: they share collectives.
    assert {wire.reduce for wire in tree.leaves(Precision.bf16().wires(layouts))} == {F32}


@pytest.mark.parametrize("exact", [True, False])
def test_sums_of_vectors_are_not_rounded(exact):
    """1 + 2^-20 has no place in bf16; in one reduction with matrices whose terms are rounded."""
    mesh = Mesh(dp=2)
    layouts = {"norm": Layout((3, 4), F32, mesh, lead=1), "w": Layout((4, 4), F32, mesh)}
    wires = Precision.bf16(reduce=B16, exact=exact).wires(layouts)
    terms = [{name: torch.full(x.shape, 1 + 2.0**-20) for name, x in layouts.items()} for _ in range(2)]
    raw = tree.map(lambda layout: layout.replace(unreduced=("dp",)), layouts)
    sim = simulate(lambda g: reduce_gradients(tree.place(g, raw), wire=wires, bucket_bytes=1 << 20), mesh, Ranks(terms))
    for local in sim.outputs:
        assert bool((local["norm"] == 2 + 2.0**-19).all()) and bool((local["w"] == 2).all())
