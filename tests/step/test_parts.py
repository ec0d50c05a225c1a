"""A loss of sums and counts is its definition on any mesh, for any number of microbatches, and the check proves it."""

import functools
import math
import re
from pathlib import Path
from typing import NamedTuple

import pytest
import torch

from fmegatron import data, loop, optim, step, tree
from fmegatron.collectives import Axes, psum
from fmegatron.collectives.kinds import collective_of
from fmegatron.layout import DataParallel, Mesh
from fmegatron.optim.momentum import accumulate_momentum
from fmegatron.step.checker.entrypoints import check_call
from fmegatron.step.graph.nodes import entry_of
from fmegatron.step.opaque import inline_layers
from fmegatron.testing import split
from fmegatron.testing.compare_ranks import relative_error
from tests.definition import loss_of
from tests.fresh_state import fresh_state
from tests.pairs import few
from tests.step import parts_cases as cases
from tests.step import tiny
from tests.step.parts_cases import CASES, F64, MESHES, by_definition, compared, loss_fn_of, run

ONE = MESHES["one"]
POSSIBLE = [
    (name, mesh, n) for name, case in CASES.items() for mesh in MESHES for n in (1, 2, 4) if case.cp or "cp" not in mesh
]


# ---- equal to the definition -----------------------------------------------------------------------------------------
@pytest.mark.long
@pytest.mark.parametrize(("name", "mesh", "n"), few(10, POSSIBLE))
def test_it_is_the_definition(name, mesh, n):
    worst, report = compared(name, MESHES[mesh], n)
    assert worst <= 1e-12 and report.ok, str(report)


@pytest.mark.parametrize("strategy", ["zero1", "zero2"])
def test_under_other_strategies(strategy):
    worst, report = compared("lm and z, weights", MESHES["dp2 fsdp2"], 4, strategy=DataParallel.named(strategy))
    assert worst <= 1e-12 and report.ok, str(report)


@pytest.mark.parametrize(
    ("name", "n", "backend"),
    [
        ("lm and z, weights", 1, "eager"),
        ("lm and z, weights", 4, "aot_eager"),
        ("metrics", 4, "eager"),
        pytest.param("lm and z, weights", 4, "inductor", marks=pytest.mark.slow),
    ],
)
def test_jitted_donated_and_plain(name, n, backend):
    """One rank; what is not jitted runs its forward passes twice."""
    wanted, case = by_definition(name), CASES[name]
    train, layouts, strategy = cases.step_of(case.loss, ONE, n)
    batch = cases.batch_of(case.batch)
    rows = cases.rows_of(batch, ONE, n, strategy)
    for compiled in (False, True):
        state = split(fresh_state(cases.params_of(), optim.sgd(1.0)), layouts)[0]
        f = step.jit(train, donate=0, backend=backend, patches=tiny.SCALAR) if compiled else train
        after, metrics = f(state, split(batch, rows)[0])
        assert relative_error(metrics["loss"], wanted.loss) <= 1e-12
        for key, value in wanted.means.items():
            assert relative_error(metrics[key], value) <= 1e-12, key
        for key, g in wanted.grads.items():
            assert relative_error(cases.params_of()[key] - after.params[key], g) <= 1e-12, key


def test_gradients_by_hand():
    """value_and_grad, and accumulate, of a loss of parts: the loss of the whole batch, and its metrics."""
    wanted, batch = by_definition("lm and z, weights"), cases.batch_of("weights")
    loss_fn = loss_fn_of(cases.lm_and_z, Axes(ONE), None)
    params = tree.place(cases.params_of(), cases.layouts_of(ONE))
    for f in (step.value_and_grad(loss_fn), step.accumulate(loss_fn, 4), step.accumulate(loss_fn, 1)):
        (loss, metrics), grads = f(params, batch)
        assert relative_error(loss, wanted.loss) <= 1e-12 and set(metrics) == {"loss", "lm", "z", "lm/count", "z/count"}
        assert all(relative_error(grads[k], g) <= 1e-12 for k, g in wanted.grads.items())
        assert metrics["lm/count"] == metrics["z/count"] == batch["mask"].sum()
    (loss, _), _ = step.value_and_grad(loss_fn, axes=Axes(ONE))(cases.params_of(), batch)
    assert relative_error(loss, wanted.loss) <= 1e-12
    with pytest.raises(ValueError, match="got sums and counts, and parameters whose layouts are not known"):
        step.value_and_grad(loss_fn)(cases.params_of(), batch)


def test_a_loss_scale_and_frozen_parameters():
    """A loss scale multiplies what is differentiated, not what is shown; frozen parameters get no gradient."""
    wanted = by_definition("lm and z, weights")
    scaled = optim.skip_nonfinite(optim.sgd(1.0), loss_scale=optim.LossScale(2.0**10))
    frozen = optim.grouped(1.0, [("head", optim.Group(frozen=True))], weight_decay=0.0, plain=accumulate_momentum(0.5))
    for optimizer, trained in ((scaled, ("table", "head")), (frozen, ("table",))):
        after, metrics = run(cases.lm_and_z, "weights", MESHES["dp2"], 4, optimizer=optimizer).globals()
        assert relative_error(metrics["loss"], wanted.loss) <= 1e-12
        for key, g in wanted.grads.items():
            moved = cases.params_of()[key] - after.params[key]
            assert relative_error(moved, g) <= 1e-12 if key in trained else not moved.any()


# ---- what does not count ---------------------------------------------------------------------------------------------
@pytest.mark.parametrize("n", [1, 2])
def test_nothing_counts(n):
    """No gradient, a part that is NaN with the count 0, and a loss that is the sum of the others: no 0/0."""

    def loss(of):
        none = torch.zeros_like(of.batch["mask"])
        return {"lm": cases.lm(of), "none": step.mean((of.lse * none).sum(), none.sum())}

    sim = run(loss, "weights", MESHES["dp2"], n)
    after, metrics = sim.globals()
    wanted = by_definition("lm and z, weights").means["lm"]
    assert metrics["none"].isnan() and metrics["none/count"] == 0 and metrics["grad_norm"].isfinite()
    assert relative_error(metrics["loss"], wanted) <= 1e-12 and all(x.isfinite().all() for x in after.params.values())


@pytest.mark.parametrize("n", [1, 2])
def test_a_loss_that_is_not_finite_makes_the_norm_so(n):
    """A NaN that no gradient follows: the update is skipped, and the loop sees it."""

    def loss(of):
        bad = of.nll.detach().sum() * torch.where(of.batch["tokens"].sum() > 0, torch.nan, 0.0)
        return {"lm": cases.lm(of), "bad": step.mean(of.nll.sum() * 0 + bad, of.nll.shape[0])}

    optimizer = optim.skip_nonfinite(optim.sgd(1.0))
    after, metrics = run(loss, "weights", MESHES["dp2"], n, optimizer=optimizer).globals()
    assert metrics["loss"].isnan() and metrics["grad_norm"].isnan() and metrics["lm"].isfinite()
    assert all(torch.equal(after.params[k], x) for k, x in cases.params_of().items())


def test_counts_are_added_up_in_fp64():
    """Weights in fp32 of a sum above 2^24, to which a weight of 1 would add nothing."""
    x = torch.tensor([2.0**24, 1.0, 1.0, 1.0])
    (_, metrics), _ = step.accumulate(lambda p, b: step.mean((p * b).sum(), b.sum()), 4, axes=Axes(ONE))(
        torch.ones(()), x
    )
    assert metrics["loss/count"] == 2**24 + 3 and metrics["loss/count"].dtype == F64


def test_the_page_runs():
    """docs/losses.md, as it stands there."""
    text = (Path(__file__).parents[2] / "docs" / "losses.md").read_text()
    [code] = re.findall(r"^```python\n(.*?)^```", text, re.M | re.S)
    exec(compile(code, "losses.md", "exec"), {})


# ---- how it is computed ----------------------------------------------------------------------------------------------
def small(graph):
    """How many collectives send at most 16 numbers."""
    found = 0
    for node in graph.nodes:
        one = collective_of(node.target) if node.op == "call_function" else None
        if one is not None and one.sent is not None:
            found += sum(x.meta["val"].numel() for x in node.all_input_nodes) <= 16
    return found


def test_the_trace_is_cut_at_the_sums_of_the_counts():
    """The gradient is one opaque node however many microbatches there are; before it run a few sums of masks, and no
    forward pass; three small collectives a step: counts, totals, norm."""
    nodes = {}
    for n in (2, 4):
        sim = run(cases.lm_and_z, "weights", MESHES["dp2"], n)
        graph = sim.traced.graph_module.graph
        layers = [node for node in graph.nodes if entry_of(node)]
        assert len(layers) == n and len({node.target for node in layers}) == 1
        outside = [str(node.target) for node in graph.nodes if node.op == "call_function"]
        assert not [name for name in outside if "tanh" in name or "logsumexp" in name or "exp" in name.split(".")[:2]]
        assert small(inline_layers(graph)) == 3
        nodes[n] = len(outside)
    # rows cut, counts (two), order, gradients and totals added: of each microbatch more
    assert (nodes[4] - nodes[2]) / 2 <= 45, nodes


def test_with_one_microbatch_nothing_is_cut():
    graph = run(cases.lm_and_z, "weights", MESHES["dp2"], 1).traced.graph_module.graph
    assert not any(map(entry_of, graph.nodes)) and small(graph) == 3


def test_twice_runs_a_forward_pass_more():
    graph = run(cases.balance, "01", MESHES["dp2"], 2, twice=True).traced.graph_module.graph
    assert sum("tanh.default" in str(node.target) for node in inline_layers(graph).nodes) == 4


# ---- mistakes --------------------------------------------------------------------------------------------------------
def global_count(of):
    w = of.batch["mask"]
    return step.mean((of.nll * w).sum(), psum(w.sum(), of.axes[of.axes.data]))


def global_total(of):
    w = of.batch["mask"]
    return step.mean(psum((of.nll * w).sum(), of.axes[of.axes.data]), w.sum())


def divided(of):
    w = of.batch["mask"]
    return step.mean((of.nll * w).sum() / w.sum(), 1)


def without_over(of):
    """Whole rows, equal on all ranks of cp."""
    logp, w = psum(-of.nll.sum(1), of.axes.sequence), of.batch["weight"]
    return step.mean(-(torch.nn.functional.logsigmoid(logp) * w).sum(), w.sum())


TWICE = r"test_parts.py:\d+ \(in step.mean, .*over= for whole rows\): psum over .*already replicated: 2 times too large"
MISTAKES = {
    global_count: ("dp2", TWICE),
    global_total: ("fsdp2", TWICE),
    divided: ("dp2", r"test_parts.py:\d+: div over 'dp': divides by a pending sum"),
    without_over: ("cp2", TWICE),
}


@pytest.mark.parametrize("n", [1, 2])
@pytest.mark.parametrize("loss", MISTAKES, ids=lambda f: f.__name__)
def test_the_check_finds(loss, n):
    mesh, words = MISTAKES[loss]
    sim = run(loss, "rows" if loss is without_over else "weights", MESHES[mesh], n)
    with pytest.raises(ValueError, match=words):
        check_call(sim.traced, MESHES[mesh], (), "train_step", {}, speak=False)


def count_of_params(of):
    return {"lm": cases.lm(of), "far": step.mean(of.nll.sum(), (of.nll > 1).sum())}


def weight_of_params(of):
    return {"lm": cases.lm(of) * step.mean(of.lse.sum(), of.nll.shape[0])}


@pytest.mark.parametrize(
    ("loss", "words"),
    [
        (count_of_params, r"part 'far': its count \(at test_parts.py:\d+\) depends on the parameter '(table|head)'"),
        (weight_of_params, "part 'lm': its total of weight 0 .* depends on the parameter"),
    ],
)
def test_counts_of_parameters(loss, words):
    """Refused with several microbatches, unless one more forward pass is asked for; as they are with one."""
    with pytest.raises(ValueError, match=words + ".*twice=True"):
        run(loss, "weights", MESHES["dp2"], 2)
    one, two = run(loss, "weights", MESHES["dp2"], 1), run(loss, "weights", MESHES["dp2"], 2, twice=True)
    assert one.metrics["loss"] == pytest.approx(two.metrics["loss"], rel=1e-12)
    assert check_call(two.traced, MESHES["dp2"], (), "train_step", {}, speak=False).ok


@pytest.mark.parametrize("n", [1, 2])
def test_a_count_with_a_gradient_is_refused_for_any_number_of_microbatches(n):
    """It would be left out of the gradient in silence."""
    for how in ({}, {"twice": True}):
        with pytest.raises(ValueError, match=r"mean: count: got one with a gradient.*count.detach\(\)"):
            run(lambda of: {"lm": step.mean(of.nll.sum(), of.lse.sum())}, "weights", MESHES["dp2"], n, **how)


# ---- weights, and counts that are numbers, are one for all microbatches ---------------------------------------------
def weight_of_the_batch(of):
    return {"lm": of.batch["mask"].to(F64).mean() * cases.lm(of)}


def weight_through_a_part_of_memory(of):
    weights = torch.zeros(2, dtype=F64)
    weights[0] = of.batch["mask"].to(F64).sum()
    return {"lm": cases.lm(of), "z": cases.lm(of) * weights[0]}


def weight_of_parameters_and_batch(of):
    return {"lm": of.nll.detach().mean() * cases.lm(of)}


def weight_that_was_read(of):
    return {"lm": of.batch["mask"].to(F64).mean().item() * cases.lm(of)}


def count_that_was_read(of):
    return {"lm": step.mean(of.nll.sum(), int(of.batch["mask"].gt(0).sum()))}


def count_of_a_weight_that_was_read(of):
    return {"lm": step.mean(of.lse.detach().sum(), int(of.batch["mask"].gt(0).sum())) * cases.lm(of)}


OF_THE_BATCH = [weight_of_the_batch, weight_through_a_part_of_memory, weight_of_parameters_and_batch]
READ = [weight_that_was_read, count_that_was_read, count_of_a_weight_that_was_read]


@pytest.mark.long
@pytest.mark.parametrize("mesh", ["one", "dp2 fsdp2"])
@pytest.mark.parametrize("loss", OF_THE_BATCH, ids=lambda f: f.__name__)
def test_a_weight_of_the_batch_is_refused_with_several_microbatches(loss, mesh):
    """Each microbatch would have its own, and the first one's would be shown: wrong numbers without a word."""
    words = (
        r"part '(lm|z)': got a weight \(at test_parts.py:\d+\) that depends on '\w+' of the batch, wanted one .*mean"
    )
    with pytest.raises(ValueError, match=words):
        run(loss, "weights", MESHES[mesh], 2)
    if mesh == "one":
        run(loss, "weights", MESHES[mesh], 1)


@pytest.mark.parametrize("loss", [*OF_THE_BATCH, *READ], ids=lambda f: f.__name__)
def test_without_a_trace_values_are_compared(loss):
    params = tree.place(cases.params_of(), cases.layouts_of(ONE))
    loss_fn = loss_fn_of(loss, Axes(ONE), None)
    with pytest.raises(ValueError, match=r"part .*\(of (test_parts|parts_cases).py:\d+\): got (the weights|a count)"):
        step.accumulate(loss_fn, 2)(params, cases.batch_of("weights"))
    step.accumulate(loss_fn, 1)(params, cases.batch_of("weights"))


def weight_first(of):
    return {"lm": step.mean(of.lse.detach().sum(), of.batch["mask"].to(F64).sum()) * cases.lm(of)}


def test_the_part_is_the_same_one_in_the_pass_for_the_counts():
    """Which of two means is the part is seen by its gradient, so the pass that counts before has one too."""
    params = tree.place(cases.params_of(), cases.layouts_of(ONE))
    f = step.value_and_grad(loss_fn_of(weight_first, Axes(ONE), None))
    (loss, _), grads = f(params, cases.batch_of("weights"))
    for n in (2, 4):
        f = step.accumulate(loss_fn_of(weight_first, Axes(ONE), None), n)
        (found, _), got = f(params, cases.batch_of("weights"))
        assert relative_error(found, loss) <= 1e-12
        assert all(relative_error(got[k], g) <= 1e-12 for k, g in grads.items())


def weight_of_a_parameter(of):
    return {"lm": of.table.square().mean() * cases.lm(of)}


def weight_of_no_value(of):
    return {"lm": torch.full((), 0.5 * len(of.nll[0]), dtype=F64) * cases.lm(of)}


@pytest.mark.long
@pytest.mark.parametrize("n", [1, 2, 4])
@pytest.mark.parametrize("loss", [weight_of_a_parameter, weight_of_no_value], ids=lambda f: f.__name__)
def test_a_weight_that_is_the_same_for_all_is_right(loss, n):
    """Of parameters (a learned weight, whose gradient is made) or of numbers: as the definition, jitted and not."""

    def loss_fn(params, batch):
        nll = -(torch.tanh(params["table"][batch["tokens"]]) @ params["head"]).log_softmax(-1)
        nll = nll.gather(-1, batch["labels"][..., None])[..., 0]
        return loss(Given(params["table"], nll, batch))

    params, batch = cases.params_of(), cases.batch_of("weights")
    wanted = {k: x.requires_grad_() for k, x in cases.params_of().items()}
    full = loss_of(loss_fn(wanted, batch))
    grads = dict(zip(wanted, torch.autograd.grad(full, list(wanted.values())), strict=True))
    f = step.accumulate(loss_fn, n)
    for one in (f, step.jit(f, backend="eager")):
        (found, _), got = one(tree.place(params, cases.layouts_of(ONE)), batch)
        assert relative_error(found, full) <= 1e-12
        assert all(relative_error(got[k], g) <= 1e-12 for k, g in grads.items())


class Given(NamedTuple):
    table: torch.Tensor
    nll: torch.Tensor
    batch: dict


@pytest.mark.parametrize("n", [2, 4])
def test_a_count_that_is_written_into_memory(n):
    """The graph of the counts has what was written into the memory of one: it was 0 without, and the loss NaN."""

    def loss(of):
        counts = torch.zeros(2, dtype=F64)
        counts[1] = of.batch["mask"].to(F64).sum()
        return step.mean((of.nll * of.batch["mask"]).sum(), counts[1])

    for name in ("one", "dp2 fsdp2"):
        found = run(loss, "weights", MESHES[name], n)
        wanted = float(by_definition("lm and z, weights").means["lm"])
        assert found.metrics["loss"] == pytest.approx(wanted, rel=1e-12)


ONE_TOTAL = torch.ones(())
WRONG = {
    "an integer total": (lambda: step.mean(torch.ones((), dtype=torch.int64), 1), "mean: total: got .*floating"),
    "a total that is a number": (lambda: step.mean(1.0, 1), "mean: total: got .*wanted a floating tensor"),
    "counts of rows": (lambda: step.mean(ONE_TOTAL, torch.ones(3)), r"count: got shape \(3,\), wanted one number"),
    "16 bits": (lambda: step.mean(ONE_TOTAL, ONE_TOTAL.bfloat16()), "count: got torch.bfloat16, in which 256"),
    "a bool": (lambda: step.mean(ONE_TOTAL, torch.tensor(True)), "count: got torch.bool"),
    "a gradient": (lambda: step.mean(ONE_TOTAL, torch.ones((), requires_grad=True)), "count: got one with a gradient"),
    "NaN": (lambda: step.mean(ONE_TOTAL, math.nan), "count: got .*wanted a 0-d tensor or a finite number"),
    "a weight of rows": (lambda: torch.ones(3) * step.mean(ONE_TOTAL, 1), r"weight of a part: got shape \(3,\)"),
    "a weight that is text": (lambda: step.mean(ONE_TOTAL, 1) * "2", "weight of a part: got"),
    "a sum": (lambda: step.mean(ONE_TOTAL, 1) + step.mean(ONE_TOTAL, 1), "got their sum, wanted both by name"),
    "the sum of a list": (lambda: sum([step.mean(ONE_TOTAL, 1)]), "got their sum, wanted both by name"),
}


@pytest.mark.parametrize("name", WRONG)
def test_what_is_no_mean_is_refused(name):
    make, words = WRONG[name]
    with pytest.raises(ValueError, match=words):
        make()


LOSSES = {
    "a part called loss": (lambda of: {"loss": cases.lm(of), "z": cases.lm(of)}, "a part named 'loss' beside others"),
    "a tensor among parts": (lambda of: {"lm": cases.lm(of), "z": of.lse.sum()}, "part 'z' of its loss: got"),
    "a metric called loss": (lambda of: (cases.lm(of), {"loss": of.lse.sum()}), "metric 'loss': got one of loss_fn"),
    "a metric like a part": (lambda of: ({"a": cases.lm(of)}, {"a/count": of.lse.sum()}), "metric 'a/count': got one"),
    "a mean beside a scalar": (lambda of: (of.nll.sum(), {"a": cases.lm(of)}), "metric 'a': got a mean.* the loss as"),
    "a total of rows": (lambda of: step.mean(of.nll.sum(1), 1), r"part 'loss': got a total of shape \(48,\)"),
    "over tp": (lambda of: step.mean(of.nll.sum(), 1, over=("tp",)), "mean: over: got .'tp',. on the mesh"),
    "a metric with a weight": (lambda of: (cases.lm(of), {"a": 2 * cases.lm(of)}), "got a mean with weights"),
    "no parameter": (lambda of: step.mean(of.batch["mask"].sum(), 1), "the loss: got a 0-d tensor without a gradient"),
}


@pytest.mark.parametrize("name", LOSSES)
def test_what_is_no_loss_is_refused(name):
    loss, words = LOSSES[name]
    mesh = Mesh(tp=2) if name == "over tp" else ONE
    axes = Axes(mesh)
    params = tree.place(cases.params_of(), cases.layouts_of(mesh))
    with pytest.raises(ValueError, match=words):
        step.value_and_grad(loss_fn_of(loss, axes, None))(params, cases.batch_of("weights"))


# ---- evaluation ------------------------------------------------------------------------------------------------------
def test_an_evaluation_adds_up_the_same_sums():
    """Batches of other numbers of tokens, one of none: the mean over all of them."""
    masks, values = (
        [torch.tensor(m, dtype=F64) for m in ([1.0, 0.5], [0.0, 0.0], [0.01, 3.0])],
        torch.tensor([2.0, 7.0]),
    )
    means = functools.partial(step.means, axes=Axes(ONE))
    found = loop.evaluate(
        lambda params, mask: {**means({"nll": step.mean((values * mask).sum(), mask.sum())}), "lr": torch.ones(())},
        {}, data.source(masks.__getitem__), 3,
    )  # fmt: skip
    total = sum(float((values * mask).sum()) for mask in masks)
    assert found["nll"] == pytest.approx(total / 4.51, rel=1e-12) and found["lr"] == 1
    assert found["nll/count"] == pytest.approx(4.51, rel=1e-12)


def test_of_two_means_the_one_with_a_gradient_is_the_part():
    """Whichever stands first: else the loss would be right and its gradient gone."""
    w, rows = torch.ones(3, requires_grad=True), torch.arange(4.0)
    part, weight = step.mean(w.square().sum(), 3), step.mean(rows.sum(), 4)
    for product in (part * weight, weight * part):
        assert product.total is part.total and product.weights == (weight,)
