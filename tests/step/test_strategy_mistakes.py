"""Strategies that do not fit are told in words; what must not travel does not; placements that only integers show."""

import functools

import pytest
import torch

from fmegatron import model, optim, tree
from fmegatron.collectives import Axes, Precision
from fmegatron.layout import DataParallel, Layout, Mesh, Split
from fmegatron.layout.data_parallel import DATA_AXES
from fmegatron.step import build_train_step, collectives_of, state_specs, trace
from fmegatron.step.costs import least_traffic
from fmegatron.step.state import placements
from fmegatron.testing import split
from tests.fresh_state import fresh_state
from tests.step import strategies
from tests.step.strategies import OPTIMIZER, STRATEGIES, make_config, make_step

NUMBERS = 16  # bytes: losses, norms and counts


def first_state(config, mesh, strategy, optimizer=OPTIMIZER):
    return tree.init(state_specs(model.specs(config, mesh, strategy=strategy), optimizer, strategy), 0, 0)


def sent(step, config, mesh, strategy, optimizer=OPTIMIZER):
    batch = split(strategies.batch_at(config, 0), strategies.batch_layouts(mesh))[0]
    state = first_state(config, mesh, strategy, optimizer)
    found = collectives_of(trace(step, (state, batch)).graph_module.graph, mesh)
    return [one for one in found if one.nbytes > NUMBERS]


# ---- bytes -----------------------------------------------------------------------------------------------------------
@pytest.mark.medium
def test_accumulated_gradients_travel_as_the_policy_says():
    """Matrices in bf16, once a step, though they were added up in fp32, and vectors in fp32: the outer sum of HSDP."""
    mesh, strategy = Mesh(dp=2, fsdp=2), STRATEGIES["hsdp"]
    config = make_config(precision=Precision.bf16_wire())
    outer = [c for c in sent(make_step(config, mesh, strategy, 3), config, mesh, strategy) if c.axes == ("dp",)]
    layouts = model.layouts(config, mesh, strategy=strategy)

    def wire(layout):
        vector = layout.shape in ((config.dim,), (config.layers, config.dim))
        return torch.float32 if vector else torch.bfloat16

    least = least_traffic(layouts, strategy, 3, reduce_dtype=wire, late_dtype=wire)
    alone = tree.map(lambda x: x.replace(mesh=Mesh(dp=1, fsdp=2)), layouts)
    inner = least_traffic(alone, strategy, 3, reduce_dtype=wire)
    assert sum(c.sent for c in outer) == least.reduce - inner.reduce > 0


@pytest.mark.parametrize("name", ["zero1", "hybrid"])
def test_frozen_parameters_stay_where_they_are(name):
    """Neither their gradients nor their updates travel."""
    config, mesh, strategy = make_config(), Mesh(dp=2, fsdp=2), STRATEGIES[name]
    rules = [("blocks|embed", optim.Group(frozen=True))]
    optimizer = optim.grouped(1e-2, rules, adam=optim.scale_by_adam())
    step = make_step(config, mesh, strategy, optimizer=optimizer)
    least = least_traffic(model.layouts(config, mesh, strategy=strategy), strategy, trains=optimizer.trains)
    total = {"all_gather": 0, "reduce_scatter": 0}
    for one in sent(step, config, mesh, strategy, optimizer):
        if name == "zero1" or one.axes == ("dp",):
            total[one.op] += one.sent
    assert total["all_gather"] == least.update > 0
    state = first_state(config, mesh, strategy, optimizer)
    assert total["all_gather"] < sum(x.nbytes for x in tree.leaves(state.params["blocks"])) / 8


# ---- mistakes --------------------------------------------------------------------------------------------------------
def test_a_state_of_another_strategy():
    """The optimizer's state is that of the parameters: the leaf is named before anything is computed."""
    config, mesh, strategy = make_config(), Mesh(dp=2), STRATEGIES["zero1"]
    state = fresh_state(first_state(config, mesh, strategy).params, OPTIMIZER)
    batch = split(strategies.batch_at(config, 0), strategies.batch_layouts(mesh))[0]
    with pytest.raises(ValueError, match="adam/m/blocks/attention"):
        make_step(config, mesh, strategy)(state, batch)


def build(mesh=None, strategy=None, data=DATA_AXES):
    mesh = mesh or Mesh(dp=2)
    layouts = {"w": Layout((4, 4), torch.float32, mesh)}
    return build_train_step(lambda p, b: p["w"].sum(), OPTIMIZER, layouts, Axes(mesh, data=data), strategy=strategy)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: DataParallel(("dp", "dp")), r"axes: got \('dp', 'dp'\), wanted names of axes, each once"),
        (lambda: DataParallel.zero1(("dp", "fsdp")), r"axes: got \(\('dp', 'fsdp'\),\), wanted names"),
        (
            lambda: build(Mesh(dp=2, fsdp=2), DataParallel.zero3("fsdp")),
            "got the axis 'dp', which is none of the strategy's axes",
        ),
        (lambda: build(data=()), "got the axis 'dp', which is none of the strategy's axes"),
        (
            lambda: build(Mesh(data=2), DataParallel.zero1("data")),
            r"got data axes \(\), wanted those of the strategy, \('data',\); give Axes\(mesh, data=\('data',\)\)",
        ),
        (lambda: build(Mesh(dp=2, fsdp=2), DataParallel.zero1(), data="dp"), r"got data axes \('dp',\), wanted those"),
    ],
)
def test_strategies_that_do_not_fit(make, message):
    with pytest.raises(ValueError, match=message):
        make()


def test_a_weight_that_no_metric_has():
    config = make_config()
    layouts, axes = model.layouts(config, Mesh()), Axes(Mesh())

    def scalar(params, batch):
        part = model.loss(params, batch, config, axes)[0]["lm"]
        return part.total / part.count, {"tokens": part.count}

    parts = functools.partial(model.loss, decoder=config, axes=axes)
    for loss, words in (
        (scalar, "weight='token': got metrics .*did you mean tokens"),
        (parts, "weight='token': got a loss of parts, which have counts of their own, .*leave weight out"),
    ):
        step = build_train_step(loss, OPTIMIZER, layouts, axes, microbatches=2, weight="token")
        with pytest.raises(ValueError, match=words):
            step(first_state(config, Mesh(), None), strategies.batch_at(config, 0))


def test_a_batch_without_a_token():
    """Nothing to learn: loss 0, and parameters that stay finite."""
    config = make_config()
    batch = strategies.batch_at(config, 0)
    batch["mask"] = torch.zeros_like(batch["mask"])
    state, metrics = make_step(config, Mesh(), STRATEGIES["replicated"], 2)(first_state(config, Mesh(), None), batch)
    assert metrics["loss"] == 0 and all(x.isfinite().all() for x in tree.leaves(state.params))


def test_matrix_optimizers_see_the_layouts_of_the_strategy():
    """Nobody tells them: they read the layouts off the specs, and in the step off the parameters that were moved."""
    config, mesh, strategy = make_config(), Mesh(dp=2), STRATEGIES["zero1"]
    layouts = model.layouts(config, mesh, strategy=strategy)
    state = strategies.specs_of(config, mesh, strategy, optim.muon(1e-2))
    placed = placements(layouts, strategy).optim["blocks"]["mlp"]["w_down"]
    assert placed.sharded and state.opt["muon"]["blocks"]["mlp"]["w_down"].layout == placed
    assert state.opt["muon"]["blocks"]["mlp"]["w_gate_up"].layout.beside  # on a mesh without tp, too


# ---- placements ------------------------------------------------------------------------------------------------------
def test_dims_that_stay_whole():
    mesh, zero3 = Mesh(fsdp=2), DataParallel.zero3("fsdp")
    stack = Layout((4, 3), torch.float32, mesh)
    # Neither the layers nor ranges of them: rows that do not divide are padded.
    assert zero3.params_layout(stack, whole=(0,)) == stack.replace(spec=(None, "fsdp"), padded=True)
    assert zero3.params_layout(stack).axes(0) == ("fsdp",)
    assert zero3.params_layout(Layout((3, 6), torch.float32, mesh)).axes(1) == ("fsdp",)
    assert zero3.params_layout(Layout((3, 2, 1), torch.float32, mesh), whole=(1,)).spec == ("fsdp", None, None)
    assert zero3.params_layout(Layout((3, 2, 1), torch.float32, mesh), whole=(0, 1, 2)).spec == (None,) * 3
    odd = zero3.params_layout(Layout((9, 3), torch.float32, mesh))
    assert odd == Layout((9, 3), torch.float32, mesh, flat=("fsdp",), padded=True)


def test_ranges_and_interleaved_dims():
    mesh = Mesh(fsdp=2, tp=3)
    fused = Layout((3, 5, 12), torch.float32, mesh, (None, None, Split("tp", (6, 6))))
    assert DataParallel.zero1("fsdp").optim_layout(fused).flat == ("fsdp",)  # not a cut of every part
    assert DataParallel.zero3("fsdp").params_layout(Layout((3, 6), torch.float32, Mesh(fsdp=6))).axes(1) == ("fsdp",)
    assert DataParallel.zero3("fsdp").params_layout(Layout((3, 2), torch.float32, Mesh(fsdp=6))).flat == ("fsdp",)


def test_parameters_are_split_in_the_order_of_the_mesh():
    """The minor axis is gathered first, whatever the order in which a strategy names them."""
    order = ("fsdp", "dp")
    layout = DataParallel(order, order, order, order).params_layout(Layout((8,), torch.float32, Mesh(dp=2, fsdp=2)))
    assert layout.spec == (("dp", "fsdp"),)
