"""Every optimizer on meshes: equal to one rank, its checkpoint moves to another mesh bit for bit, check is silent."""

import dataclasses

import pytest
import torch

from fmegatron import checkpoint, tree
from fmegatron.collectives import Axes, psum
from fmegatron.layout import DataParallel, Layout, Mesh
from fmegatron.step import Description, State, build_train_step, check, state_specs
from fmegatron.testing import assert_parity, split
from tests.checkpoint.fake_world import save_all
from tests.optim.table import DTYPES, EVERY, ONE, TABLE, assert_same, grads_of, make_params, make_specs, run
from tests.pairs import few, mixed

MESH = Mesh(dp=2, fsdp=2, tp=2)
FEW = [Mesh(dp=1, fsdp=2, tp=1), Mesh(dp=1, fsdp=1, tp=2), Mesh(dp=2, fsdp=1, tp=1)]
DATA = ("dp", "fsdp")


def flattened(layout):
    """Over both data axes where the elements can be shared out, whatever the matrices are; else whole."""
    plain = layout.without(DATA)
    found = plain.replace(flat=DATA)
    return found if layout.shape and found.is_even else plain


PLACES = {
    "zero1": lambda layout: DataParallel.zero1().optim_layout(layout.without(DATA)),
    "zero3": lambda layout: DataParallel.zero3().place(layout, whole=()).optim,
    "hybrid": lambda layout: DataParallel.hybrid().place(layout, whole=()).optim,
    "flat": flattened,
}


def kind(layout):
    """Whether it is flattened (f), has two axes on one dim (2), is split (1) or whole (r), by data axes."""
    axes = [len(set(layout.axes(dim)) & set(DATA)) for dim in range(len(layout.shape))]
    return "f" if layout.flat else str(max(axes)) if any(axes) else "r"


# What is stored in fewer bytes is float32, and has tests of its own in test_compressed_mesh.
def fp64(mesh):
    return make_specs(DTYPES["fp64"], mesh)


def assert_sharded_is_plain(row, specs_on, mesh, steps):
    """Updates of parameters and state, from gradients in the parameters' layouts; specs_on(mesh): where they lie."""

    def make_step(mesh):
        opt = row.make()

        def step(carry, grads):
            params, state = opt.update(grads, carry["state"], carry["params"])
            return {"params": params, "state": state}, {}

        specs = specs_on(mesh)
        return Description(step, {"params": specs, "state": opt.init(specs)}, specs)

    opt = row.make()
    layouts = tree.layouts({"params": specs_on(mesh), "state": opt.init(specs_on(mesh))})
    params = make_params(DTYPES["fp64"])
    carry = {"params": params, "state": opt.init(params)}
    assert_parity(
        make_step, mesh, carry, lambda i: grads_of(make_params(DTYPES["fp64"]), i), steps=steps,
        layouts=(layouts, layouts["params"]), out_layouts=(layouts, {}),
    )  # fmt: skip


@pytest.mark.long
@pytest.mark.parametrize(
    ("row", "mesh"),
    [
        *few(5, [(row, MESH) for row in TABLE], TABLE),
        *[pytest.param(row, mesh, marks=pytest.mark.slow) for row in TABLE for mesh in FEW],
    ],
)
def test_sharded_is_plain(row, mesh):
    assert_sharded_is_plain(TABLE[row], fp64, mesh, steps=3)


PLACED = mixed(TABLE, PLACES)


@pytest.mark.long
@pytest.mark.parametrize(("row", "place"), few(5, PLACED, map("-".join, PLACED)))
def test_sharded_is_plain_wherever_a_strategy_puts_the_state(row, place):
    """Layouts O of the ZeRO levels: more dims split, two axes on one dim, flattened leaves."""
    mesh = Mesh(dp=2, fsdp=2, tp=2)

    def specs_on(other):  # the same layouts on the mesh of one rank
        placed = tree.map(lambda spec: PLACES[place](spec.layout).replace(mesh=other), fp64(mesh))
        return tree.map(lambda spec, layout: dataclasses.replace(spec, layout=layout), fp64(mesh), placed)

    assert_sharded_is_plain(TABLE[row], specs_on, mesh, steps=3)


def test_the_strategies_make_all_kinds_of_layouts():
    """Else the test above would prove less than it says."""
    mesh, found = Mesh(dp=2, fsdp=2, tp=2), {}
    for name, place in PLACES.items():
        layouts = [place(spec.layout) for spec in tree.leaves(fp64(mesh))]
        found[name] = "".join(sorted({kind(layout) for layout in layouts}))
    assert found == {"zero1": "12fr", "zero3": "12fr", "hybrid": "1fr", "flat": "fr"}


@pytest.mark.long
@pytest.mark.parametrize("row", EVERY.values(), ids=EVERY)
def test_a_checkpoint_resumes_bitwise_on_another_mesh(row, tmp_path):
    """Saved by the ranks of one mesh, restored on another mesh and whole: the same bits, and the run goes on alike."""
    dtypes, params = DTYPES["mixed"], make_params(DTYPES["mixed"])

    def specs_on(mesh):
        specs = make_specs(dtypes, mesh)
        return specs, row.make().init(specs)

    opt = row.make()
    half = run(opt, params, opt.init(params), range(3))
    saved_on, other = Mesh(dp=1, fsdp=2, tp=1), Mesh(dp=1, fsdp=1, tp=2)
    save_all(tmp_path / "half", half, tree.layouts(specs_on(saved_on)))
    for rank, part in enumerate(split(half, tree.layouts(specs_on(other)))):
        assert_same(checkpoint.restore(tmp_path / "half", specs_on(other), rank=rank), part)
    back = checkpoint.restore(tmp_path / "half", specs_on(ONE))
    assert_same(run(opt, *back, range(3, 5)), run(opt, *half, range(3, 5)))


@pytest.mark.long
@pytest.mark.parametrize("row", few(5, [(row,) for row in EVERY.values()], EVERY))
def test_the_checker_proves_a_train_step(row):
    mesh = Mesh(dp=2, fsdp=2, tp=2)
    specs = make_specs(DTYPES["fp32"], mesh)
    layouts, axes = tree.layouts(specs), Axes(mesh, data=("dp",))
    opt = row.make()

    def loss_fn(params, batch):
        """A quadratic, summed over the axes that split a leaf; replicas of dp see other rows."""
        rows, total = batch["x"].sum(), 0.0
        for x, layout in zip(tree.leaves(params), tree.leaves(layouts), strict=True):
            total = total + psum((x - 0.3).square().sum(), axes[layout.sharded])
        loss = total * rows
        return loss, {"rows": psum(rows.detach(), axes["dp"])}

    step = build_train_step(loss_fn, opt, layouts, axes, clip_norm=None)
    batch = {"x": Layout((8,), torch.float32, mesh, ("dp",))}
    report = check(step, State(*state_specs(specs, opt)), batch)
    assert not report.findings and not report.unproven, str(report)
