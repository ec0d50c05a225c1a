"""The list of wrong experts: check and simulated ranks together find all; the check all sums, and proves no border."""

from functools import lru_cache

import pytest

from fmegatron import tree
from fmegatron.layout import Mesh
from fmegatron.nn import moe, routing
from fmegatron.step.checker.entrypoints import check_traced
from fmegatron.testing import simulate
from fmegatron.testing.compare_ranks import relative_error
from tests.nn import cp_mutants, moe_mutants, moe_step
from tests.pairs import few
from tests.step.mutants.mutate import mutated, stale

LISTS = (
    (moe_step, moe_mutants.SUMS_OF_STEP + moe_mutants.OF_STEP),
    (moe, moe_mutants.BORDERS + moe_mutants.OF_MOE),
    (routing, moe_mutants.OF_ROUTER),
)
ALL = [(module, mutant) for module, mutants in LISTS for mutant in mutants]


@lru_cache
def right_outputs(of):
    """Of the right step on one rank; where ranks have too few rows, on the mesh."""
    mesh = moe_step.setting_of(of).mesh
    one = mesh if of in moe_step.TOO_FEW else Mesh(**dict.fromkeys(mesh.names, 1))
    sim = simulated(one, of, moe_step, moe, routing)
    return {path: sim.gather(path) for path in sim.paths}


def simulated(mesh, of, step, *modules):
    return simulate(step.make_step(mesh, of, *modules), mesh, *step.values(of), layouts=step.layouts(mesh, of))


def judge(module, mutant):
    """(who finds it, see `moe_mutants`; the report, or why simulated ranks cannot run it)."""
    own = [mutated(one, mutant) if one is module else one for one in (moe_step, moe, routing)]
    mesh = moe_step.setting_of(mutant.of).mesh
    try:
        sim = simulated(mesh, mutant.of, *own)
    except (ValueError, RuntimeError) as error:  # counts that do not agree: simulated ranks refuse them
        return "simulate", error
    layouts = tree.leaves(sim.arg_layouts)
    state = dict(zip(tree.paths(sim.arg_layouts[0]), tree.leaves(sim.arg_layouts[0]), strict=True))
    wanted = [state.get(path.removeprefix("0/")) if path.startswith("0/") else None for path in sim.paths]
    data = {path for path in sim.traced.in_paths if path.startswith("1/")}
    report = check_traced(sim.traced, mesh, layouts, wanted, data=data)
    differ = [path for path, right in right_outputs(mutant.of).items() if not _same(sim, path, right)]
    by_check = "check" if report.findings else "" if report.ok else "unproven"
    return ", ".join(filter(None, (by_check, "simulate" if differ else ""))), report


def _same(sim, path, right):
    try:
        return relative_error(sim.gather(path), right) <= 1e-10
    except ValueError:  # replicas differ
        return False


@pytest.mark.medium
@pytest.mark.parametrize("module, mutant", few(5, ALL, [mutant.name for _, mutant in ALL]))
def test_mutant(module, mutant):
    found, report = judge(module, mutant)
    assert found.replace("check, simulate", "both") == mutant.finds, f"{mutant.says}\n{report}"


def test_the_list():
    assert len(ALL) + len(cp_mutants.MUTANTS) >= 150 and all(mutant.finds for _, mutant in ALL)
    open_ = {mutant.name for mutant in moe_mutants.SUMS_OF_STEP if mutant.finds != "both"}  # by their sizes alone
    assert open_ == {"tokens_not_entered_of_tp2", "y_transposed_by_psum_of_tp2"}
    assert sum(mutant.finds == "simulate" for mutant in moe_mutants.BORDERS) == 4  # exchanges by other ranks' counts
    for module, mutants in LISTS:
        assert not stale(module, mutants)
        assert len({m.name for m in mutants}) == len({(m.old, m.new, m.of) for m in mutants}) == len(mutants)
