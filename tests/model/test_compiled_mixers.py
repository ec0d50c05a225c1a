"""Mamba-2 and multi-token prediction compiled with Inductor, on one rank and two of gloo, equal one plain rank."""

import pytest
import torch

from fmegatron import model, tree
from fmegatron.collectives import connect
from fmegatron.layout import DataParallel, Mesh
from fmegatron.step import jit
from fmegatron.testing import join, split
from fmegatron.testing.compare_ranks import relative_error
from tests.model import settings
from tests.model.test_mamba import hybrid
from tests.model.test_mtp import further
from tests.model.test_reference import make_batch
from tests.pairs import few
from tests.step.tiny import SCALAR

STEPS = 2


def made(name, mesh):
    """The setting of a model with states, or of one that predicts two more tokens."""
    of = hybrid(4) if name == "hybrid" else further()
    return settings.Made(mesh, DataParallel.hsdp(), of, "inputs", 1)


def batch_at(of, i):
    """Global arrays of step i, of two documents in a row."""
    batch = make_batch(of.decoder, 4, seed=i)
    documents = (torch.arange(12) >= torch.tensor([[5], [8], [12], [1]])).long()
    return batch | {"documents": documents, "positions": torch.arange(12).repeat(4, 1)}


def steps(train, state, batches):
    for batch in batches:
        state, metrics = train(state, batch)
    return state, metrics


def steps_on_rank(rank, name, mesh):
    """(state, metrics) of this rank after all steps."""
    of = made(name, mesh)
    with connect(mesh) as world:
        train = jit(settings.train_step(mesh, of), donate=0, world=world, backend="inductor", patches=SCALAR)
        state = split(settings.state_of(of), settings.specs_of(of, mesh))[rank]
        batches = [batch_at(of, i) for i in range(STEPS)]
        return steps(train, state, [split(b, settings.rows_of(of, b))[rank] for b in batches])


CASES = [(name, mesh) for mesh in (Mesh(), Mesh(tp=2), Mesh(fsdp=2)) for name in ("hybrid", "more tokens")]


@pytest.mark.parametrize(("name", "mesh"), few(0, CASES, [f"{name}-{mesh.size}-{mesh}" for name, mesh in CASES]))
def test_compiled(ranks, name, mesh):  # a minute each
    of = made(name, mesh)
    plain, batches = settings.train_step(Mesh(), of._replace(mesh=Mesh())), [batch_at(of, i) for i in range(STEPS)]
    wanted, metrics = steps(plain, settings.state_of(of), batches)
    if mesh.size == 1:
        train = jit(settings.train_step(mesh, of), donate=0, backend="inductor", patches=SCALAR)
        found = [steps(train, settings.state_of(of), batches)]
    else:
        found = ranks.run(steps_on_rank, name, mesh, ranks=mesh.size)
    got = join([state for state, _ in found], settings.specs_of(of, mesh))
    for path, a, b in zip(tree.paths(wanted), tree.leaves(got), tree.leaves(wanted), strict=True):
        assert relative_error(a, b, 1e-12) <= 1e-10, path
    for _, of_rank in found:
        assert {"loss", "grad_norm"} <= set(of_rank)
        for key, value in metrics.items():
            assert relative_error(of_rank[key], value) <= 1e-10, key


def test_both_models_are_what_they_say():
    assert any(isinstance(part.mixer, model.Mamba) for block in made("hybrid", Mesh()).decoder.blocks for part in block)
    assert made("more tokens", Mesh()).decoder.mtp.depths == 2
