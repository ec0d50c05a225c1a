"""The real binding: every collective on gloo ranks has the bits of the simulated ranks."""

import pytest
import torch

from fmegatron.collectives import Axes, connect
from fmegatron.layout import Mesh
from fmegatron.testing import Ranks, simulate
from tests.collectives.definitions import AXES, CASES, inputs, make_step


def run_all(rank, mesh):
    """Every case over every axis of the mesh, on this rank."""
    axes = Axes(mesh, connect(mesh))
    found = {}
    for axis in AXES[mesh]:
        for name in CASES:
            xs, gs = inputs(mesh, name, axis)
            found[name, axis] = make_step(name, axes[axis])(xs[rank], gs[rank])
    return found


@pytest.mark.parametrize("mesh", AXES, ids=str)
def test_bits_of_simulated_ranks(ranks, mesh):
    real = ranks.run(run_all, mesh, ranks=mesh.size)
    for name, axis in real[0]:
        xs, gs = inputs(mesh, name, axis)
        sim = simulate(make_step(name, Axes(mesh)[axis]), mesh, Ranks(xs), Ranks(gs))
        for rank in range(mesh.size):
            for kind, got, wanted in zip(("value", "gradient"), real[rank][name, axis], sim.outputs[rank], strict=True):
                assert torch.equal(got, wanted), f"{kind} of {name} over {axis} on rank {rank}"


def wrong_mesh(rank):
    connect(Mesh(a=3))


def test_mesh_of_another_size(ranks):
    with pytest.raises(RuntimeError, match="3 ranks, but 2 processes"):
        ranks.run(wrong_mesh, ranks=2)
