"""blame names the line of a planted fault in steps that people write, whatever the number of microbatches."""

import inspect
import re
from collections import defaultdict

import pytest
import torch

from fmegatron.collectives import Axes, axis_index, psum
from fmegatron.layout import Layout, Mesh, Split
from fmegatron.testing import assert_parity, parity
from tests.pairs import few
from tests.sampling import seeds
from tests.step.tiny import line_of
from tests.testing import faults

MESH = Mesh(dp=2, fsdp=2, tp=2)
LINES: dict[str, list[str]] = defaultdict(list)  # of each fault
WAYS: dict[str, tuple[str, ...]] = {}  # of writing the step, which have the fault
for number, line in enumerate(inspect.getsource(faults).splitlines(), 1):
    if mark := re.search(r"# bug: (\w+)(?: \((.*)\))?$", line):
        LINES[mark[1]].append(f"faults.py:{number}")
        WAYS[mark[1]] = tuple(mark[2].split(", ")) if mark[2] else faults.WAYS
CASES = [(bug, by, n, save) for bug in LINES for by in WAYS[bug] for n in (1, 2, 4) for save in (None, "inputs")]

OF_MICROBATCHES = ("count_over_tp", "count_times_ranks", "index_as_a_metric", "metric_of_a_rank")


def result_of(bug, by, n, save, mesh=MESH, run=parity):
    args, layouts = faults.arguments(mesh, by, n)
    return run(lambda m: faults.make_step(m, bug, n, by, save), mesh, *args, layouts=layouts)


def missed(bug, by, n, save) -> str:
    """What is wrong with what is found, else ""."""
    result = result_of(bug, by, n, save)
    named = [line for line in LINES[bug] if re.search(rf"{line}\b", str(result.findings[:1]))]
    right = named and len(result.findings) <= 6 and not result.ok
    return "" if right else f"{bug} ({' or '.join(LINES[bug])}), {by}, {n} microbatches, save={save}: {result}"


@pytest.mark.medium
@pytest.mark.parametrize("i", range(2))
def test_a_sample(i):
    """Others with fresh seeds."""
    assert not missed(*CASES[seeds("faults", 0, 2)[i] % len(CASES)])


@pytest.mark.medium
@pytest.mark.parametrize("bug", few(1, zip(OF_MICROBATCHES), OF_MICROBATCHES))
def test_of_microbatches(bug):
    """Blamed before on a product of the backward, on the loop over microbatches, or on nothing."""
    assert not missed(bug, "build", 2, None)


@pytest.mark.slow
@pytest.mark.parametrize("bug", LINES)
def test_every_way(bug):
    found = [missed(*case) for case in CASES if case[0] == bug]
    assert not any(found), "\n\n".join(filter(None, found))


@pytest.mark.medium
@pytest.mark.parametrize("by", few(1, zip(faults.WAYS), faults.WAYS))
def test_the_right_step_has_none(by):
    """Nor has one whose ranks cut other rows into a microbatch than one rank does: sums over all do not see that."""
    assert result_of(None, by, 2, "mincut", MESH, assert_parity).worst[1] < 1e-12


# ---- rows that are coupled within a microbatch -----------------------------------------------------------------------
def coupled(mesh):
    """Normalizes each microbatch by its own mean: right on every mesh, if a microbatch is the same rows on all."""
    data = Axes(mesh)["dp"]

    def step(x):
        total = 0.0
        for rows in x.chunk(2):  # HERE chunk
            mean = psum(rows.sum(0), data) / (len(rows) * data.size)
            total = total + psum((rows - mean).pow(3).sum(), data)
        return {"loss": total}

    return step


def test_a_cut_that_couples_other_rows():
    """The line that cuts, and the layout with which nothing differs."""
    x = torch.rand(8, 3, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    mesh = Mesh(dp=2)
    result = parity(coupled, mesh, x, layouts=(Layout((8, 3), x.dtype, mesh, ("dp",)),))
    (finding,) = result.findings
    assert finding.at == line_of(__file__, "chunk") and "Split(axes, parts=2) on dim 0" in finding.what
    assert_parity(coupled, mesh, x, layouts=(Layout((8, 3), x.dtype, mesh, (Split("dp", 2),)),))


# ---- what is made of the rank's index --------------------------------------------------------------------------------
@pytest.mark.parametrize(
    "made",
    [
        lambda x, axis: axis_index(axis, like=x),
        lambda x, axis: x.sum(0) * 0 + axis_index(axis, like=x),
        lambda x, axis: {"a": x.square(), "rank": axis_index(axis, like=x).double()},
        lambda x, axis: torch.where(axis_index(axis, like=x) == 0, x.sum(), 2 * x.sum()),
    ],
)
def test_a_result_made_of_the_index(made):
    x = torch.rand(4, 3, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    result = parity(lambda mesh: lambda x: made(x, Axes(mesh)["dp"]), Mesh(dp=4), x)
    at = f"test_faults.py:{made.__code__.co_firstlineno}"
    assert not result.ok and [f.at for f in result.findings] == [at], result
    assert f"depends on the rank's index of dp at {at}, and it is returned" in result.findings[0].what
