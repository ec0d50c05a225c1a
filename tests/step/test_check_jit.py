"""Every jit of a step with layouts checks it: errors before anything is compiled, a switch, lines vouched for, cost."""

import contextlib
import gc
import warnings

import pytest
import torch

from fmegatron import optim, tree
from fmegatron.collectives import Axes, connect, psum
from fmegatron.layout import Layout, Mesh
from fmegatron.step import build_train_step, jit, state_specs
from fmegatron.step.checker.entrypoints import check_traced
from tests.fresh_state import fresh_state
from tests.step import tiny
from tests.step.graph_mutants import problem, traced_problem
from tests.work import counted

MESH = Mesh(dp=2)
LAYOUTS = {"w": Layout((4,), torch.float64, MESH)}


def step_with(loss_psum: bool, own=lambda x: x):
    """A linear model; without loss_psum the metric stays this rank's own."""
    axis = Axes(MESH)["dp"]

    def loss_fn(params, batch):
        loss = (own(batch["x"]) @ params["w"]).square().sum()
        return loss, {"loss": psum(loss.detach(), axis) if loss_psum else loss.detach()}

    return build_train_step(loss_fn, optim.sgd(1e-2), LAYOUTS, Axes(MESH))


def arguments():
    specs = state_specs({"w": tree.ArraySpec(LAYOUTS["w"], 1.0)}, optim.sgd(1e-2))
    rows = Layout((6, 4), torch.float64, MESH, ("dp",))
    return tree.init(specs, 0, 0), tree.place({"x": torch.ones(3, 4, dtype=torch.float64)}, rows)


def on_a_rank(rank):
    """(message of the refused step, report of the right one, steps made without a check and with a reason)."""
    world = connect(MESH)
    with pytest.raises(ValueError) as refused:
        jit(step_with(False), world=world, backend="eager")(*arguments())
    right = jit(step_with(True), world=world, backend="eager")
    right(*arguments())
    line = str(refused.value).split("\n  ")[1].split(": ")[0]
    off = jit(step_with(False), world=world, backend="eager", check=False)
    off(*arguments())
    vouched = jit(step_with(False), world=world, backend="eager", allow={line: "a test"})
    vouched(*arguments())
    unproven = jit(step_with(True, own=of_segments), world=world, backend="eager")
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        unproven(*arguments())
    said = [str(w.message) for w in said if "check of collectives" in str(w.message)]
    plain = jit(lambda p, b: ({"w": p["w"] - b["x"].sum(0)}, {}), world=world, backend="eager")
    with pytest.raises(ValueError, match="adds a pending sum and a complete value"):
        plain(arguments()[0].params, arguments()[1])
    state, batch = arguments()
    batch["x"].data = batch["x"].data[:2]
    with pytest.raises(ValueError, match=r"argument '1/x': got f64\[2, 4\], wanted f64\[3, 4\]"):
        plain(state.params, batch)
    reports = [next(iter(f.cache.values())).report for f in (right, off, vouched)]
    return str(refused.value), reports[0].ok, reports[1], [reason for _, reason in reports[2].silenced], said


def of_segments(x):
    """The same rows, by an op that no rule covers."""
    return torch.segment_reduce(x, "sum", lengths=torch.tensor([1, 1, 1]))


def test_on_real_ranks(ranks):
    results = ranks.run(on_a_rank, ranks=2)
    for message, ok, unchecked, reasons, _ in results:
        assert message.startswith("train_step: 1 finding of the check of collectives:\n  ")
        assert "the output 1/loss is partial (sum), its layout says replicated" in message
        assert ok and unchecked is None and reasons == ["a test"]
    (said,), by_others = (unproven for *_, unproven in results)  # once for the job, not once per rank
    assert by_others == []
    assert said.startswith("train_step: the check of collectives cannot prove 3 of 5 outputs:\n  test_check_jit.py:")
    assert "unproven: segment_reduce over 'dp': no rule for aten.segment_reduce.default" in said
    assert "so 0/params/w, 1/grad_norm, 1/loss may be wrong" in said and "testing.assert_parity" in said


@contextlib.contextmanager
def collections():
    """A list that gains an item for every collection of garbage, made after every 700 objects as by default."""
    found, before = [], gc.get_threshold()
    note = lambda phase, info: found.append(info["generation"]) if phase == "start" else None  # noqa: E731
    gc.collect()
    gc.set_threshold(700, 10, 10)
    gc.callbacks.append(note)
    try:
        yield found
    finally:
        gc.callbacks.remove(note)
        gc.set_threshold(*before)


@pytest.mark.long
def test_costs_little():
    """In calls of functions for each node (345 were 0.098 of those of a warm trace until traces took 40 % less), and
    few objects stay alive: the collector walks all memory."""
    mesh = Mesh(dp=2, fsdp=2, tp=2)
    traced, given, wanted, data = traced_problem(*problem(mesh, optim.adamw(1e-3), layers=2))
    with counted() as work, collections() as young:
        assert check_traced(traced, mesh, given, wanted, data=data).ok
    assert len(young) <= 4  # 2 by measurement; 6 when no value is ever dropped
    assert work.calls < 345 * len(traced.graph_module.graph.nodes)


@pytest.mark.medium
def test_a_compiled_layer_is_checked_once():
    """However often it runs: its trace does not grow with depth either."""
    mesh = Mesh(dp=2, fsdp=2, tp=2)
    calls = []
    for layers in (1, 5):
        traced, given, wanted, data = traced_problem(*problem(mesh, optim.sgd(1e-2), layers=layers, save="inputs"))
        with counted() as work:
            assert check_traced(traced, mesh, given, wanted, data=data).ok
        calls.append(work.calls)
    assert calls[1] < 2 * calls[0]


def test_one_rank_is_not_checked():
    step = jit(tiny.mlp_step(), backend="eager")
    state = fresh_state(tiny.mlp_params(), tiny.OPTIMIZER)
    step(state, tiny.mlp_batch())
    assert next(iter(step.cache.values())).report is None and tree.leaves(state)
