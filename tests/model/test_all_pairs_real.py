"""Train steps compiled with Inductor on gloo ranks: state and metrics after three steps are those of one rank, fp64."""

import functools

import pytest

from fmegatron import tree
from fmegatron.collectives import connect
from fmegatron.layout import Mesh
from fmegatron.step import jit
from fmegatron.testing import join, simulate, split
from fmegatron.testing.compare_ranks import relative_error
from tests.model import settings
from tests.pairs import few
from tests.step.tiny import SCALAR

STEPS = 3


def steps_on_rank(rank, case, backend):
    """(state, metrics) of this rank after all steps."""
    of = settings.made(case)
    with connect(of.mesh) as world:
        train = jit(settings.train_step(of.mesh, of), donate=0, world=world, backend=backend, patches=SCALAR)
        state = split(settings.state_of(of), settings.specs_of(of, of.mesh))[rank]
        for i in range(STEPS):
            batch = settings.batch_of(case, i)
            state, metrics = train(state, split(batch, settings.rows_of(of, batch))[rank])
        return state, metrics


def on_one_rank(case):
    """(state, metrics) after all steps."""
    of = settings.made(case)
    one = Mesh(**dict.fromkeys(of.mesh.names, 1))
    rows = tree.map(lambda x: x.replace(mesh=one), settings.rows_of(of, settings.batch_of(case)))
    state = settings.state_of(of)
    for i in range(STEPS):
        step, layouts = settings.train_step(one, of), (settings.specs_of(of, one), rows)
        state, metrics = simulate(step, one, state, settings.batch_of(case, i), layouts=layouts).outputs[0]
    return state, metrics


@functools.cache
def real():
    return {settings.named(case): case for case in settings.REAL}


@pytest.mark.parametrize("name", few(0, [(name,) for name in real()], real()))  # a minute and more each
def test_compiled_on_gloo_ranks(ranks, name):
    case = real()[name]
    of = settings.made(case)
    found = ranks.run(steps_on_rank, case, "inductor", ranks=of.mesh.size)
    wanted, metrics = on_one_rank(case)
    got = join([state for state, _ in found], settings.specs_of(of, of.mesh))
    for path, a, b in zip(tree.paths(wanted), tree.leaves(got), tree.leaves(wanted), strict=True):
        assert relative_error(a, b, 1e-12) <= 1e-10, path
    for _, of_rank in found:
        for key, value in metrics.items():
            assert relative_error(of_rank[key], value) <= 1e-10, key


def test_twelve_of_them():
    """With each value of every option, on two ranks or four."""
    assert len(settings.REAL) >= 12 and {settings.made(case).mesh.size for case in settings.REAL} <= {2, 4}
    for name, values in settings.OPTIONS.items():
        assert {case[name] for case in settings.REAL} == set(values), name
