"""State in 8 bits on meshes that do not divide: a strategy that knows the block cuts none; no bit depends on ranks."""

import math
from dataclasses import replace

import pytest
import torch

from fmegatron import nn, optim, step, tree
from fmegatron.collectives import Axes, psum
from fmegatron.layout import DataParallel, Layout, Mesh, Split
from fmegatron.optim import contrib
from fmegatron.testing import Ranks, simulate
from tests.checkpoint.test_padded import assert_restored, padding_of, saved_with_sentinels, state_of
from tests.pairs import few, mixed

BLOCK = 8
FORMATS = [
    ("adam/m", contrib.int8(block=BLOCK, smallest=0)),
    ("adam/v", contrib.int8(block=BLOCK, smallest=0, root=True)),
]
ADAMW = contrib.compressed(optim.adamw(1e-2, weight_decay=0.1), FORMATS)
NAMES = ("zero1", "zero2", "zero3", "hsdp", "hybrid")
MESHES = tuple(Mesh(fsdp=n, tp=tp) for n in (3, 5, 6, 7) for tp in (1, 2)) + (Mesh(dp=2, fsdp=3), Mesh(dp=3, fsdp=5))
# Rows of whole blocks, rows that end with a shorter one, a stack, one whose rows are fused, a vector.
SHAPES = {
    "wide": ((5, 48), (None, "tp")), "odd": ((26, 22), ()), "stack": ((2, 9, 40), ()),
    "fused": ((3, 64), (None, Split("tp", (32, 16, 16)))), "vector": ((88,), ()),
}  # fmt: skip
STACKS = {"stack": (0,)}


ROWS = 2 * 3 * 5 * 7


def of_block(name: str) -> DataParallel:
    return replace(DataParallel.named(name), block=BLOCK)


def parts(mesh, name, shapes=SHAPES):
    """(step, specs of its state, layouts of its batch): a loss that is linear in all arrays, whose gradients are sums
    of small integers, and exact in any order; so is the norm to which they are clipped."""
    strategy, mesh = of_block(name), mesh if mesh.size > 1 else Mesh(fsdp=1, tp=1)
    axes = Axes(mesh)
    layouts = {
        path: strategy.params_layout(Layout(shape, torch.float32, mesh, spec), STACKS.get(path, ()))
        for path, (shape, spec) in shapes.items()
    }
    rows = mesh.axes(("dp", "fsdp"))
    batch = {
        path: Layout((ROWS, *layout.shape), torch.float32, mesh, (rows, *layout.without(rows).spec))
        for path, layout in layouts.items()
    }

    def loss(params, batch):
        w = nn.gather_tree(params, layouts, axes[axes.data])
        by_leaf = {x: (w[x] * batch[x]).sum() for x in shapes}
        total = sum(psum(one, axes["tp"]) if "tp" in layouts[x].sharded else one for x, one in by_leaf.items())
        return total, {"loss": psum(total.detach(), axes[axes.data])}

    specs = tree.map(lambda layout: tree.ArraySpec(layout, tree.Normal(1.0)), layouts)
    train_step = step.build_train_step(loss, ADAMW, layouts, axes, strategy=strategy, clip_norm=0.1)
    return train_step, step.state_specs(specs, ADAMW, strategy), batch


def trained(mesh, name, updates=3):
    """The global state after some updates, by paths; the padding of all ranks is zeros."""
    train_step, state, batch = parts(mesh, name)
    places, sim = tree.layouts(state), None
    whole = tree.init(parts(Mesh(), name)[1], key=0, rank=0)
    for i in range(updates):
        given = torch.Generator().manual_seed(i)
        x = {path: torch.randint(-1, 2, at.shape, generator=given).float() for path, at in batch.items()}
        if sim is None:
            sim = simulate(train_step, mesh, whole, x, layouts=(places, batch), out_layouts=(places, None))
        else:
            sim = sim.again(Ranks(out[0] for out in sim.outputs), x)
    for rank, out in enumerate(sim.outputs):
        for x, layout in zip(tree.leaves(out[0]), tree.leaves(places), strict=True):
            assert not x[padding_of(x, layout, rank)].any(), layout
    return {path: sim.gather(path) for path in sim.paths if path.startswith("0/")}


def prove(mesh, name):
    """Of blocks that cross rows of which another axis has a part the rules cannot say which elements meet."""
    shapes = {path: of for path, of in SHAPES.items() if path != "fused"}
    train_step, state, batch = parts(mesh, name, shapes)
    report = step.check(train_step, state, batch)
    assert report.ok, str(report)


CASES = mixed(NAMES, MESHES)


@pytest.mark.slow
@pytest.mark.parametrize("name, mesh", few(1, CASES, map(str, CASES)))
def test_no_bit_of_a_training_depends_on_ranks(name, mesh):
    """AdamW with both moments in 8 bits, clipped, after three updates."""
    got, wanted = trained(mesh, name), trained(Mesh(fsdp=1, tp=1), name)
    assert got.keys() == wanted.keys() and sum("codes" in path for path in got) == 2 * len(SHAPES)
    for path, x in wanted.items():
        assert x.any() and torch.equal(got[path], x), path


@pytest.mark.medium
@pytest.mark.parametrize("name, mesh", few(1, CASES, map(str, CASES)))
def test_the_step_is_proven(name, mesh):
    prove(mesh, name)


def test_ranges_are_of_whole_blocks_and_the_scales_lie_as_they_do():
    state = parts(Mesh(fsdp=7), "zero3")[1]
    stored = state.opt["adam"]["m"]
    assert {path: str(one["codes"].layout) for path, one in stored.items() if one["codes"].layout.padded > 1} == {
        "wide": "i8[5, 48] flat@fsdp padded 8 on fsdp7",
        "stack": "i8[2, 9, 40] flat@fsdp from dim 1 padded 8 on fsdp7",
        "fused": "i8[3, 64] flat@fsdp padded 8 on fsdp7",
        "vector": "i8[88] flat@fsdp padded 8 on fsdp7",
    }
    for one in stored.values():
        codes, scale = one["codes"].layout, one["scale"].layout
        wide = min(BLOCK, codes.shape[-1])
        assert math.prod(codes.local_shape(0)) <= math.prod(scale.local_shape(0)) * wide
    assert stored["stack"]["scale"].layout.local_shape(0) == (2, 7) and state.params["stack"].layout.padded == 8


@pytest.mark.medium
@pytest.mark.parametrize("name", ["zero3", pytest.param("zero1", marks=pytest.mark.slow)])
def test_a_checkpoint_is_restored_on_any_number_of_ranks(tmp_path, name):
    """Written on 6, read on 8, 5, 7·tp2 and 1; what 8 has is written, and read on 6: the same bits, none of padding."""

    def layouts(mesh):
        state = parts(mesh, name)[1]
        return tree.layouts({"params": state.params, "opt": state.opt})

    six, eight = layouts(Mesh(fsdp=6)), layouts(Mesh(fsdp=8))
    state = state_of(six)
    saved_with_sentinels(tmp_path / "six", state, six)
    for mesh in (Mesh(fsdp=8), Mesh(fsdp=5), Mesh(fsdp=7, tp=2), Mesh(fsdp=1, tp=1)):
        assert_restored(tmp_path / "six", state, layouts(mesh))
    saved_with_sentinels(tmp_path / "eight", state, eight)
    assert_restored(tmp_path / "eight", state, six)


def test_a_row_of_padded_pieces_without_the_block_is_refused():
    form, layout = contrib.int8(block=8, smallest=0, fit=True), Layout((4, 90), torch.float32, Mesh(fsdp=3))
    at = DataParallel.zero3().params_layout(layout.replace(spec=(None, "fsdp")))
    with pytest.raises(ValueError, match=r"edge of a shard every 30 elements.*DataParallel\(..., block=8\), or give"):
        replace(form, fit=False).specs("x", tree.ArraySpec(at))
    cut = layout.replace(shape=(4, 95), spec=(None, "fsdp"), padded=True)
    with pytest.raises(ValueError, match=r"every 32 and 95 elements.*block=8\), or leave it in Float32"):
        form.specs("x", tree.ArraySpec(cut))  # fit=True would make blocks of one element
    with pytest.raises(ValueError, match="wanted elements of a block, 1 or more"):
        replace(DataParallel.zero3(), block=0)
