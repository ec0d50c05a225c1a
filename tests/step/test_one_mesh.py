"""Layouts, axes and worlds of different meshes: refused wherever two of them meet, and never for axes of size 1."""

import pytest
import torch

from fmegatron import model, nn, optim, tree
from fmegatron.collectives import Axes, psum, reshard
from fmegatron.collectives.resharding import reshard_many
from fmegatron.collectives.wires import Wire
from fmegatron.layout import DataParallel, Layout, Mesh
from fmegatron.model.array_specs import init
from fmegatron.nn.scaled import with_scales
from fmegatron.optim.clipping import group_norms
from fmegatron.step import build_train_step, check, collectives_of, jit, reduce_gradients, state_specs, trace
from fmegatron.step.timelines.planned import PaperWorld
from fmegatron.testing import parity, simulate
from tests.step import tiny

F32 = torch.float32
DP2, TP2, DP4, ONE = Mesh(dp=2), Mesh(tp=2), Mesh(dp=4), Mesh()
OTHERS = [(ONE, DP2), (DP2, ONE), (DP2, DP4), (DP2, TP2), (Mesh(dp=2, tp=2), Mesh(tp=2, dp=2)),
          (Mesh(dp=2, tp=2), Mesh(dp=2, tp=2).view(order=("tp", "dp"), dp=2, tp=2))]  # fmt: skip
SAME = [(ONE, Mesh(dp=1, tp=1)), (DP2, Mesh(dp=2, tp=1)), (Mesh(pp=1, dp=2, tp=2), Mesh(dp=2, fsdp=1, tp=2))]
others = pytest.mark.parametrize(("mesh", "other"), OTHERS, ids=str)
same = pytest.mark.parametrize(("mesh", "other"), SAME, ids=str)
OPTIMIZER = optim.sgd(0.1)


def layouts(mesh):
    return {"w": Layout((4,), F32, mesh)}


def rows(mesh):
    return Layout((8,), F32, mesh, (mesh.names,) if mesh.names else ())


def loss_over(axes):
    """A loss of one's own, which sums nothing but its metric."""

    def loss_fn(params, batch):
        data = axes[tuple(name for name in axes.mesh.names)]
        loss = params["w"].sum() * batch["x"].sum() / 8
        return loss, {"loss": psum(loss.detach(), data)}

    return loss_fn


@others
def test_build_train_step_with_axes_of_another_mesh(mesh, other):
    """Its gradients would not be reduced, and the check had no findings: it saw one mesh only."""
    with pytest.raises(
        ValueError, match="build_train_step: layouts: got a layout of 'w' of the mesh .*, wanted .* axes"
    ):
        build_train_step(loss_over(Axes(other)), OPTIMIZER, layouts(mesh), Axes(other))


@others
def test_everything_that_takes_layouts_and_axes(mesh, other):
    axes, x, w = Axes(other), torch.ones(4), layouts(mesh)
    both = {"a": tree.place(torch.ones(4), layouts(other)["w"]), "b": tree.place(torch.ones(4), w["w"])}
    decoder = model.layouts(tiny.CONFIG, mesh) if "dp" in mesh or mesh.size == 1 else None
    calls = [
        lambda: reshard(x, w["w"], w["w"], axes),
        lambda: reshard_many([x], [w["w"]], [w["w"]], axes),
        lambda: reduce_gradients(both),
        lambda: nn.gather_tree({"w": x}, w, axes[other.names]),
        lambda: with_scales({"w": x}, w, axes, torch.float8_e4m3fn),
        lambda: optim.global_norm(both),
        lambda: group_norms(both),
    ]
    if decoder is not None:
        params, batch = init(tiny.CONFIG, mesh, key=0), tiny.decoder_batch()
        calls.append(lambda: trace(model.loss, (tree.place(params, decoder), batch, tiny.CONFIG, axes)))
    for call in calls:
        with pytest.raises(
            ValueError, match="of the mesh .*, wanted .*, the mesh of the ax[ei]s; make both of one Mesh"
        ):
            call()


@others
def test_axes_of_one_mesh_under_a_world_of_another(mesh, other):
    """Nothing compared them when a step was lowered: parameters would differ between ranks after one step."""
    if other.size == 1:
        return  # over axes of size 1 there is no collective, and nothing to compare

    def step(x):
        return psum(x, Axes(other)[other.names])

    x = tree.place(torch.ones(4), Layout((4,), F32, mesh))
    for check_it in (True, False):
        with pytest.raises(
            ValueError, match=r"psum over .* at test_one_mesh.py:\d+: got axes of .* the mesh of the world"
        ):
            jit(step, world=PaperWorld(mesh), backend="eager", check=check_it)(x)
    with pytest.raises(ValueError, match=r"simulate: psum over .*, the mesh of the ranks"):
        simulate(step, mesh, torch.ones(4))
    traced = trace(step, (torch.ones(4),))
    with pytest.raises(ValueError, match="collectives_of: psum over"):
        collectives_of(traced.graph_module.graph, mesh)
    with pytest.raises(ValueError, match="Axes: got axes of the mesh"):
        Axes(other, PaperWorld(mesh))


@others
def test_a_state_under_a_world_of_another_mesh(mesh, other):
    """Also where the step has no collective that could tell."""

    def step(state, batch):
        return {"w": state["w"] + batch["x"]}, {}

    layout, jitted = layouts(other)["w"], jit(step, world=PaperWorld(mesh), backend="eager")
    state, batch = (tree.place({name: torch.ones(layout.local_shape(0))}, layout) for name in "wx")
    with pytest.raises(ValueError, match="jit of step: got a layout of '0/w' of the mesh"):
        jitted(state, batch)


@others
def test_check_and_simulated_ranks_with_layouts_of_another_mesh(mesh, other):
    axes = Axes(mesh, data=mesh.names)
    step = build_train_step(loss_over(axes), OPTIMIZER, layouts(mesh), axes, strategy=of_all_axes(mesh))
    specs = {m: tree.layouts(state_specs({"w": tree.ArraySpec(layouts(m)["w"])}, OPTIMIZER)) for m in (mesh, other)}
    batch = {m: {"x": rows(m)} for m in (mesh, other)}
    for state_of, batch_of in ((other, mesh), (mesh, other), (other, other)):
        with pytest.raises(ValueError, match="check: .*make both of one Mesh|findings? of the check"):
            check(step, specs[state_of], batch[batch_of]).require()
    state = tree.init(state_specs({"w": tree.ArraySpec(layouts(ONE)["w"], 1.0)}, OPTIMIZER), 0, 0)
    for wrong in ((specs[other], batch[mesh]), (specs[mesh], batch[other])):
        with pytest.raises(ValueError, match=r"simulate: layouts\[.\]: .*make both of one Mesh"):
            simulate(step, mesh, state, {"x": torch.ones(8)}, layouts=wrong)


def of_all_axes(mesh):
    return DataParallel.replicated(*mesh.names) if mesh.names else DataParallel.replicated()


@same
def test_axes_of_size_1_make_no_difference(mesh, other):
    """One program text serves all meshes: layouts may name axes that the step's axes lack, if they have one rank."""
    axes, w, x = Axes(other, data=other.names), layouts(mesh), torch.ones(4)
    step = build_train_step(loss_over(axes), OPTIMIZER, w, axes, strategy=of_all_axes(other))
    state = tree.init(state_specs({"w": tree.ArraySpec(w["w"], 1.0)}, OPTIMIZER), 0, 0)
    ins = tree.layouts(state_specs({"w": tree.ArraySpec(w["w"])}, OPTIMIZER)), {"x": rows(other)}
    assert check(step, *ins).ok
    simulate(step, mesh, state, {"x": torch.ones(8)}, layouts=ins)
    Axes(other, PaperWorld(mesh))
    nn.gather_tree({"w": x}, w, axes[other.names], Wire())
    optim.global_norm({"w": tree.place(torch.ones(4), w["w"])})


def test_parity_of_a_step_that_takes_its_axes_from_elsewhere():
    """`make_step` is asked for the mesh of ones too; one that gives the same step for both is told so."""
    step = build_train_step(loss_over(Axes(DP2)), OPTIMIZER, layouts(DP2), Axes(DP2))
    state = tree.init(state_specs({"w": tree.ArraySpec(layouts(ONE)["w"], 1.0)}, OPTIMIZER), 0, 0)
    ins = tree.layouts(state_specs({"w": tree.ArraySpec(layouts(DP2)["w"])}, OPTIMIZER)), None
    with pytest.raises(ValueError, match="make both of one Mesh"):
        parity(lambda mesh: step, DP2, state, {"x": torch.ones(4)}, layouts=ins)
