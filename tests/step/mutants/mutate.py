"""Mutants as text: a step's file with one line changed, and what the check and simulated ranks say of it."""

import inspect
import types
from collections.abc import Iterable
from dataclasses import dataclass
from functools import lru_cache

from fmegatron import tree
from fmegatron.layout import Mesh
from fmegatron.step.checker.context import Report
from fmegatron.step.checker.entrypoints import check_traced
from fmegatron.testing import simulate
from fmegatron.testing.compare_ranks import relative_error
from tests.step.mutants import wrong

MESH = Mesh(dp=2, fsdp=2, tp=2)


@dataclass(frozen=True)
class Mutant:
    """One fault of a hand-written step.

    says: what is wrong, in one sentence.  old, new: the text that stands exactly once in the file of the step, and what
    stands there instead.  finds: who must find it: "both", "check" or "simulate" (a wrong constant, which has the right
    type).  of: which of the file's steps it is (a strategy), "" where there is one.  mesh: where it shows.
    """

    name: str
    says: str
    old: str
    new: str
    finds: str = "both"
    of: str = ""
    mesh: Mesh = MESH


def mutated(module: types.ModuleType, mutant: Mutant | None) -> types.ModuleType:
    """A module from the changed text (None: unchanged); lines keep their numbers and their file."""
    text = inspect.getsource(module)
    if mutant is not None:
        assert text.count(mutant.old) == 1, f"{mutant.name}: {mutant.old!r} stands {text.count(mutant.old)} times"
        assert mutant.old.count("\n") == mutant.new.count("\n"), mutant.name
        text = text.replace(mutant.old, mutant.new)
    fresh = types.ModuleType(module.__name__)
    vars(fresh).update(wrong=wrong, __file__=module.__file__)
    exec(compile(text, module.__file__, "exec"), vars(fresh))
    return fresh


def stale(module: types.ModuleType, mutants: Iterable[Mutant]) -> list[str]:
    """Names of those whose old text no longer stands exactly once in the module."""
    text = inspect.getsource(module)
    return [mutant.name for mutant in mutants if text.count(mutant.old) != 1]


@lru_cache
def right_on_one_rank(module: types.ModuleType, of: str):
    """Outputs of the right step on one rank, by path."""
    one = Mesh(**dict.fromkeys(MESH.names, 1))
    sim = _simulated(module, one, of)
    return {path: sim.gather(path) for path in sim.paths}


def _simulated(module, mesh, of):
    extra = (of,) if of else ()
    layouts = module.layouts(mesh, *extra)
    return simulate(module.make_step(mesh, *extra), mesh, *module.values(*extra), layouts=layouts)


def judge(module: types.ModuleType, mutant: Mutant | None, of: str = "", mesh: Mesh = MESH) -> tuple[Report, dict]:
    """(what the check says, outputs that differ from one rank of the right step: path -> relative error)."""
    of, mesh = (of, mesh) if mutant is None else (mutant.of, mutant.mesh)
    sim = _simulated(mutated(module, mutant), mesh, of)
    layouts = tree.leaves(sim.arg_layouts)
    state = dict(zip(tree.paths(sim.arg_layouts[0]), tree.leaves(sim.arg_layouts[0]), strict=True))
    wanted = [state.get(path.removeprefix("0/")) if path.startswith("0/") else None for path in sim.paths]
    data = {path for path in sim.traced.in_paths if path.startswith("1/")}
    report = check_traced(sim.traced, mesh, layouts, wanted, data=data)
    differ = {}
    for path, right in right_on_one_rank(module, of).items():
        try:
            error = relative_error(sim.gather(path), right)
        except ValueError:  # replicas differ
            error = float("inf")
        if not error <= 1e-10:
            differ[path] = error
    return report, differ


def found_by(report: Report, differ: dict) -> str:
    """ "both", "check", "simulate" or "nobody"."""
    return {(True, True): "both", (True, False): "check", (False, True): "simulate"}.get(
        (bool(report.findings), bool(differ)), "nobody"
    )
