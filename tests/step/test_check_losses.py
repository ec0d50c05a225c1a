"""Losses as people write them are equal to one rank and not refused; wrong ones with equal terms are not proven."""

import pytest
import torch

from fmegatron import step, tree
from fmegatron.collectives import psum
from fmegatron.layout import Mesh
from fmegatron.step.checker.entrypoints import check_call
from fmegatron.testing import parity
from tests.pairs import each_value, few
from tests.step import loss_programs
from tests.step.loss_programs import PROGRAMS, batch_of, make

SETTINGS = [
    ("zero1", Mesh(fsdp=3), 2), ("zero2", Mesh(fsdp=2), 1),
    ("zero3", Mesh(dp=2, fsdp=3), 1), ("zero3", Mesh(fsdp=4), 2),
    ("hsdp", Mesh(dp=2, fsdp=2), 2), ("replicated", Mesh(dp=2), 1),
]  # fmt: skip
# Right, and beyond the rules: the mean of labels that may be ignored, and numbers that may be of rows.
OPEN = frozenset(("of_torch_means", "l2_beside_rows_as_count"))
ALL = [(name, *setting) for name in PROGRAMS for setting in SETTINGS]


def tried(name, strategy, mesh, n, programs=PROGRAMS):
    """(whether it is equal to one rank, the report or the findings as text)."""
    one = Mesh(**dict.fromkeys(mesh.names, 1))
    _, specs, rows = make(name, mesh, strategy, n, programs)
    state, layouts = tree.init(make(name, one, strategy, n, programs)[1], 0, 0), tree.layouts(specs)
    found = parity(
        lambda m: make(name, m, strategy, n, programs)[0], mesh, state, batch_of(), layouts=(layouts, rows),
        out_layouts=(layouts, None), steps=2, tolerance=1e-10,
    )  # fmt: skip
    try:
        return found.ok, check_call(found.sharded.traced, mesh, (0,), "step", speak=False)
    except ValueError as error:
        return found.ok, str(error)


@pytest.mark.long
@pytest.mark.parametrize("name, strategy, mesh, n", few(6, ALL))
def test_right_losses(name, strategy, mesh, n):
    right, report = tried(name, strategy, mesh, n)
    assert right and not isinstance(report, str), report
    assert report.ok or name in OPEN, str(report)


def test_what_a_microbatch_waits_for_is_no_part_of_it():
    """The second microbatch begins behind the gradients of the first, which are to be summed; its rows are not."""
    fn, specs, rows = make("local_mean_and_penalty", Mesh(fsdp=2), "zero1", 2)
    assert (report := step.check(fn, tree.layouts(specs), rows)).ok, str(report)


def psum_of_shards(of):
    data = of.axes[of.axes.data]
    return {"lm": of.lm(), "l2": step.mean(psum(of.p["up"].square().sum(), data), 1)}


def of_all_rows(of):
    data = of.axes[of.axes.data]
    return step.mean(psum(of.nll.sum(), data) / (loss_programs.B * loss_programs.S), 1)


def by_rows(of):
    return {"lm": of.lm(), "l2": step.mean(of.w["up"].square().sum(), len(of.nll))}


def by_a_tensor_of_rows(of):
    return {"lm": of.lm(), "l2": step.mean(of.w["up"].square().sum(), torch.full((), len(of.nll)))}


def by_a_mask(of):
    return {"lm": of.lm(), "l2": step.mean(of.w["up"].square().sum(), of.b["mask"].sum())}


WRONG = {f.__name__: f for f in (psum_of_shards, of_all_rows, by_rows, by_a_tensor_of_rows, by_a_mask)}


@pytest.mark.long
@pytest.mark.parametrize(("setting", "name"), each_value([SETTINGS[0], SETTINGS[3]], WRONG))
def test_wrong_losses_are_not_proven(name, setting):
    right, report = tried(name, *setting, WRONG)
    assert not right and (isinstance(report, str) or not report.ok)
