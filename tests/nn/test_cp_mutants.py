"""Every mutant of context parallelism is found: by the check where sums or borders are wrong, else by simulation."""

import functools

import pytest
import torch

from fmegatron import collectives
from fmegatron.layout import Mesh
from fmegatron.nn import attention_blocks, context_parallel
from fmegatron.nn.context_parallel import zigzag
from fmegatron.step import check
from fmegatron.testing import simulate
from fmegatron.testing.compare_ranks import relative_error
from tests.nn import cp_step
from tests.nn.cp_mutants import MUTANTS
from tests.pairs import few
from tests.step.mutants.mutate import mutated, stale


def changed(module, mutant):
    """The module of the changed text, which may sum what the right one does not."""
    fresh = mutated(module, mutant)
    vars(fresh)["psum"] = collectives.psum
    return fresh


def steps(mutant):
    """mesh -> step."""
    how = {"form": mutant.form, "window": mutant.window, "packed": mutant.packed}
    if mutant.step:
        return functools.partial(changed(cp_step, mutant).make_step, **how)
    return functools.partial(cp_step.make_step, **how, forms=changed(context_parallel, mutant))


@functools.cache
def right(form, mesh, packed, window):
    """(arguments, outputs on one rank)."""
    order = zigzag(cp_step.S, mesh["cp"]) if form == "balanced" else None
    given, one = cp_step.values(order, packed), Mesh(cpi=1)
    sim = simulate(cp_step.make_step(one, form, window, packed), one, *given, layouts=cp_step.layouts(one))
    return given, {path: sim.gather(path) for path in sim.paths}


def found_by(mutant):
    """ "both", "check", "simulate" or "none"."""
    make, at = steps(mutant), cp_step.layouts(mutant.mesh)
    given, wanted = right(mutant.form, mutant.mesh, mutant.packed, mutant.window)
    report = check(make(mutant.mesh), *at)
    sim = simulate(make(mutant.mesh), mutant.mesh, *given, layouts=at)
    differs = False
    for path, value in wanted.items():
        try:
            differs |= not relative_error(sim.gather(path), value) <= 1e-10
        except ValueError:  # replicas differ
            differs = True
    return {(True, True): "both", (True, False): "check", (False, True): "simulate"}.get(
        (not report.ok, differs), "none"
    )


@pytest.mark.medium
@pytest.mark.parametrize("mutant", few(3, [(m,) for m in MUTANTS], [m.name for m in MUTANTS]))
def test_mutant(mutant, monkeypatch):
    if not mutant.kernel:
        monkeypatch.setattr(attention_blocks, "kernel_of", lambda *_, **__: attention_blocks.Choice("tiled", ()))
    assert found_by(mutant) == mutant.finds


def test_the_list():
    assert len(MUTANTS) >= 40 and len({m.name for m in MUTANTS}) == len(MUTANTS)
    assert all(m.finds in ("both", "check", "simulate") for m in MUTANTS)
    assert not stale(cp_step, (m for m in MUTANTS if m.step))
    assert not stale(context_parallel, (m for m in MUTANTS if not m.step))
    assert torch.is_tensor(right("ring", Mesh(cp=4, cpi=1), True, None)[1]["1/loss"])
