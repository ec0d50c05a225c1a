"""The global norm on any mesh, what it sends, and clipping against torch."""

import pytest
import torch

from fmegatron import tree
from fmegatron.layout import Layout, Mesh, Split
from fmegatron.optim import clip, clip_by_global_norm, global_norm, optimizer, scale_by_learning_rate
from fmegatron.optim.clipping import clip_scale, group_norms
from fmegatron.step import trace
from fmegatron.testing import simulate

MESHES = [
    Mesh(dp=2, fsdp=1, tp=1),
    Mesh(dp=1, fsdp=4, tp=1),
    Mesh(dp=1, fsdp=1, tp=4),
    Mesh(dp=2, fsdp=2, tp=2),
    Mesh(tp=2, fsdp=2, dp=2),
]
every_mesh = pytest.mark.parametrize("mesh", MESHES, ids=str)


def layouts_on(mesh, dtype=torch.float64):
    """Replicated, split over one axis, over two on two dims, over two on one dim, interleaved, flattened."""

    def layout(*shape, spec=(), flat=()):
        return Layout(shape, dtype, mesh, spec, flat=flat)

    return {
        "norm": layout(8),
        "scale": layout(),
        "w": layout(8, 12, spec=("fsdp", "tp")),
        "wo": layout(4, 8, 16, spec=(None, "tp", "fsdp")),
        "table": layout(16, 3, spec=(("fsdp", "tp"), None)),
        "gate_up": layout(5, 16, spec=(None, Split("tp", parts=2))),
        "rows": layout(8, 5, spec=("fsdp",)),
        "range": layout(4, 16, flat=("fsdp",)),
    }


def random_grads(layouts, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return tree.map(lambda x: torch.randn(x.shape, dtype=torch.float64, generator=generator).to(x.dtype), layouts)


def whole_norm(grads):
    return torch.cat([g.double().flatten() for g in tree.leaves(grads)]).norm()


@pytest.mark.long
@every_mesh
@pytest.mark.parametrize("max_norm", [1.0, 1e6], ids=["active", "inactive"])
def test_every_rank_gets_the_norm_of_the_whole(mesh, max_norm):
    layouts = layouts_on(mesh)
    grads = random_grads(layouts)

    def step(grads):
        norm = global_norm(grads)
        return clip(grads, norm, max_norm), {"norm": norm}

    simulation = simulate(step, mesh, grads, layouts=(layouts,))
    assert simulation.metrics["norm"] == pytest.approx(whole_norm(grads).item(), rel=1e-14)
    leaves = [g.clone().requires_grad_() for g in tree.leaves(grads)]
    for leaf, g in zip(leaves, tree.leaves(grads), strict=True):
        leaf.grad = g.clone()
    torch.nn.utils.clip_grad_norm_(leaves, max_norm)
    for path, leaf in zip(tree.paths(grads), leaves, strict=True):
        torch.testing.assert_close(simulation.gather(f"0/{path}"), leaf.grad, rtol=1e-13, atol=0)


@every_mesh
def test_one_collective_for_each_set_of_axes_that_splits_a_leaf(mesh):
    layouts = layouts_on(mesh)
    grads = tree.init(_specs(layouts), key=0, rank=0)
    traced = trace(global_norm, (grads,))
    sets = [
        tuple(node.args[1])
        for node in traced.graph_module.graph.nodes
        if node.op == "call_function" and "psum" in str(node.target)
    ]
    assert sorted(sets) == sorted({tuple(a for a in mesh.names if a in x.sharded) for x in layouts.values()} - {()})


def test_as_the_first_transform_of_a_chain():
    mesh = MESHES[3]
    layouts = layouts_on(mesh)
    grads, params = random_grads(layouts), random_grads(layouts, seed=1)
    opt = optimizer(clip=clip_by_global_norm(0.1), rate=scale_by_learning_rate(1.0))

    def step(grads, params):
        return opt.update(grads, opt.init(params), params)[0]

    moved = simulate(step, mesh, grads, params, layouts=(layouts, layouts), out_layouts=layouts).globals()
    wanted = tree.subtract(params, clip(grads, whole_norm(grads), 0.1))
    for path, x, y in zip(tree.paths(moved), tree.leaves(moved), tree.leaves(wanted), strict=True):
        torch.testing.assert_close(x, y, rtol=1e-13, atol=1e-15, msg=path)


def test_low_precision_gradients_are_squared_in_float32():
    grads = {
        "a": torch.full((10_000,), 300.0, dtype=torch.float16),
        "b": torch.full((4,), 2.0**-10, dtype=torch.bfloat16),
    }
    norm = global_norm(grads)
    assert norm.dtype == torch.float32 and norm.item() == pytest.approx(30_000, rel=1e-6)  # 300² is infinite in fp16
    clipped = clip(grads, norm, 1.0)
    assert {path: g.dtype for path, g in clipped.items()} == {"a": torch.float16, "b": torch.bfloat16}
    assert global_norm(clipped).item() == pytest.approx(1.0, rel=1e-3)


def test_scale():
    assert clip_scale(torch.tensor(4.0), 1.0).item() == pytest.approx(0.25, rel=1e-6)
    assert clip_scale(torch.tensor(0.5), 1.0) == 1 and clip_scale(torch.tensor(0.0), 1.0) == 1
    assert clip_scale(torch.tensor(torch.nan), 1.0).isnan()
    assert clip_scale(torch.tensor(torch.inf), 1.0) == 0


def test_errors_for_people():
    mesh = Mesh(dp=2, tp=2)
    layout = Layout((4,), torch.float32, mesh, ("tp",))
    raw = tree.place({"head": {"w": torch.ones(2)}}, layout.replace(unreduced=("dp",)))
    with pytest.raises(ValueError, match=r"head/w: .* pending over dp"):
        global_norm(raw)
    here, there = tree.place(torch.ones(2), layout), tree.place(torch.ones(2), layout.replace(mesh=Mesh(tp=2)))
    with pytest.raises(ValueError, match=r"global_norm.*b.*tp2"):
        global_norm({"a": here, "b": there})
    for max_norm in (0.0, -1.0, float("nan")):
        with pytest.raises(ValueError, match="max_norm"):
            clip_scale(torch.tensor(1.0), max_norm)


def _specs(layouts):
    return tree.map(lambda layout: tree.ArraySpec(layout, tree.Normal(1.0)), layouts)


@pytest.mark.parametrize("norm", [global_norm, group_norms])
def test_a_leaf_without_a_layout_among_others(norm):
    """Its norm would be that of this rank's part alone."""
    mesh = Mesh(fsdp=2)
    layouts = {k: Layout((4,), torch.float32, mesh, ("fsdp",)) for k in ("a/w", "b/w")}
    placed = tree.place({k: torch.ones(2) for k in layouts}, layouts)
    with pytest.raises(ValueError, match=r"b/w: got a gradient whose layout is not known .*tree.place"):
        norm({**placed, "b/w": placed["b/w"] * 1})
