"""Whole matrices on any layout: right values, work dealt evenly, and no more bytes than the exchange needs."""

import pytest
import torch

from fmegatron import optim, tree
from fmegatron.layout import DataParallel, Layout, Mesh, Split
from fmegatron.optim import contrib
from fmegatron.optim.matrices import on_whole_matrices
from fmegatron.optim.orthogonalized import orthogonalize
from fmegatron.step import collectives_of, trace
from fmegatron.testing import join, simulate

MESH = Mesh(pp=2, dp=2, fsdp=2, tp=2)
# name: (shape, spec, flat, share, matrices that each rank works on)
CASES = {
    "replicated": ((4, 6, 8), (), (), (), 4),
    "shared": ((4, 6, 8), (), (), ("dp", "fsdp"), 1),
    "shared-padded": ((3, 6, 8), (), (), ("dp", "fsdp"), 1),
    "rows": ((4, 6, 8), (None, "fsdp"), (), (), 2),
    "both": ((4, 6, 8), (None, "fsdp", "tp"), (), (), 1),
    "both-padded": ((6, 6, 8), (None, "fsdp", "tp"), (), (), 2),
    "fewer-layers-than-ranks": ((1, 6, 8), (None, "fsdp", "tp"), (), ("dp",), 1),
    "two-axes-one-dim": ((8, 8, 6), (None, ("dp", "fsdp"), "tp"), (), (), 1),
    "interleaved": ((4, 6, 16), (None, "fsdp", Split("tp", (8, 4, 4))), (), (), 1),
    "interleaved-two-axes": ((4, 6, 16), (None, "tp", Split(("dp", "fsdp"), 2)), (), (), 1),
    "interleaved-rows": ((4, 8, 6), (None, Split("tp", 2), "fsdp"), (), ("dp",), 1),
    "stages": ((8, 6, 8), ("pp", "fsdp", "tp"), (), (), 1),
    "stages-shared": ((8, 6, 8), ("pp", "fsdp"), (), ("dp",), 1),
    "experts": ((2, 4, 6, 8), ("pp", "dp", "fsdp", "tp"), (), (), 1),
    "one-matrix": ((6, 8), ("fsdp", "tp"), (), (), 1),
    "flat-whole-matrices": ((4, 6, 8), (), ("dp", "fsdp"), (), 1),
    "flat-with-tp": ((8, 6, 8), (None, None, "tp"), ("dp", "fsdp"), (), 1),
    "flat-pieces": ((3, 6, 8), (), ("dp", "fsdp"), (), 1),
    "flat-one-matrix": ((6, 8), (), ("fsdp",), (), 1),
}


@pytest.mark.long
@pytest.mark.parametrize("shape, spec, flat, share, work", CASES.values(), ids=CASES)
def test_values_and_balance(shape, spec, flat, share, work):
    layout = Layout(shape, torch.float64, MESH, spec, flat=flat)
    x = torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    seen = []

    def f(matrices):
        seen.append(tuple(matrices.shape))
        return orthogonalize(matrices)

    def step(x):
        return on_whole_matrices(f, [x], [layout], share)[0]

    got = simulate(step, MESH, x, layouts=(layout,), out_layouts=layout).globals()
    torch.testing.assert_close(got, orthogonalize(x), rtol=1e-12, atol=1e-13)
    assert seen == [(work, *sorted(shape[-2:]))]


def test_two_exchanges_for_each_split_dim_and_the_bytes_of_the_shard():
    layout = Layout((8, 6, 8), torch.float32, MESH, ("pp", "fsdp", Split(("dp", "tp"), 2)))
    x = torch.empty(layout.local_shape(0))
    traced = trace(lambda x: on_whole_matrices(lambda y: y, [x], [layout])[0], (x,))
    sent = [(list(one.axes), one.elements) for one in collectives_of(traced.graph_module.graph, MESH)]
    padded = 2 * x.numel()  # 4 layers of a stage for 8 ranks
    assert [axes for axes, _ in sent] == [["dp", "tp"], ["fsdp"], ["fsdp"], ["dp", "tp"]]
    assert all(numel == padded for _, numel in sent)
    alone = layout.replace(spec=("pp",))
    traced = trace(lambda x: on_whole_matrices(lambda y: y, [x], [alone])[0], (torch.empty(4, 6, 8),))
    assert not collectives_of(traced.graph_module.graph, MESH)


# ---- many leaves at once ---------------------------------------------------------------------------------------------
def decoder_leaves(mesh, layers=2, **changes):
    """name: (layout, parts) of a decoder's matrices: width 8, 4 query and 2 kv heads of width 2, hidden 12."""
    shapes = {
        "wqkv": ((layers, 8, 16), (None, "fsdp", Split("tp", (8, 4, 4))), (8, 4, 4)),
        "wo": ((layers, 8, 8), (None, "tp", "fsdp"), None),
        "gate_up": ((layers, 8, 24), (None, "fsdp", Split("tp", 2)), (12, 12)),
        "down": ((layers, 12, 8), (None, "tp", "fsdp"), None),
    }
    table = {name: (Layout(shape, torch.float64, mesh, spec), parts) for name, (shape, spec, parts) in shapes.items()}
    return table | {name: (table[name][0], parts) for name, parts in changes.items()}


def of_parts(x, parts):
    """What is wanted: each part of each matrix on its own, times a factor that tells rows from columns."""
    pieces = x.split(list(parts or (x.shape[-1],)), -1)
    return torch.cat([orthogonalize(p) * (1 + p.shape[-2] / p.shape[-1]) for p in pieces], -1)


HEADS = {"wqkv": (2,) * 8}
MANY = {
    "fsdp": (Mesh(fsdp=2, tp=1), {}, 2),
    "tp": (Mesh(fsdp=1, tp=2), {}, 2),
    "both": (Mesh(fsdp=2, tp=2), {}, 2),
    "odd-layers": (Mesh(fsdp=2, tp=2), {}, 3),
    "heads": (Mesh(fsdp=2, tp=2), HEADS, 2),
    "heads-odd": (Mesh(fsdp=4, tp=2), HEADS, 3),
    "parts-across-ranks": (Mesh(fsdp=2, tp=4), {"wqkv": (6, 6, 4)}, 2),
    "one-fused-matrix": (Mesh(fsdp=2, tp=2), {"wqkv": None, "gate_up": None}, 2),
}


@pytest.mark.long
@pytest.mark.parametrize("mesh, changes, layers", MANY.values(), ids=MANY)
def test_all_leaves_of_a_decoder_at_once(mesh, changes, layers):
    table = decoder_leaves(mesh, layers, **changes)
    layouts, parts = zip(*table.values(), strict=True)
    generator = torch.Generator().manual_seed(1)
    xs = [torch.randn(layout.shape, dtype=torch.float64, generator=generator) for layout in layouts]

    def step(*xs):
        found = on_whole_matrices(orthogonalize, xs, layouts, (), parts, lambda m, n: 1 + m / n)
        return dict(zip(table, found, strict=True))

    got = simulate(step, mesh, *xs, layouts=layouts, out_layouts=dict(zip(table, layouts, strict=True))).globals()
    for name, x, sizes in zip(table, xs, parts, strict=True):
        torch.testing.assert_close(got[name], of_parts(x, sizes), rtol=1e-11, atol=1e-12, msg=name)


def exchanged(table, mesh):
    """(what f saw, [(axes, elements sent)]) for the leaves of a table on one rank of a mesh."""
    layouts, parts = zip(*table.values(), strict=True)
    seen = []

    def f(x):
        seen.append(tuple(x.shape))
        return x

    xs = tuple(torch.empty(layout.local_shape(0), dtype=layout.dtype) for layout in layouts)
    traced = trace(lambda *xs: on_whole_matrices(f, xs, layouts, (), parts), xs)
    found = collectives_of(traced.graph_module.graph, mesh)
    return seen, [("+".join(one.axes), one.elements) for one in found], sum(x.numel() for x in xs)


def test_equal_matrices_of_different_leaves_are_one_batch_dealt_without_loss():
    """gate, up and down turned; wo turned and q: 3 layers on 2 ranks would be 4 each on their own, and are 9 and 6."""
    mesh = Mesh(fsdp=2, tp=1)
    seen, sent, held = exchanged(decoder_leaves(mesh, layers=3), mesh)
    assert sorted(seen) == [(3, 4, 8), (3, 8, 8), (5, 8, 12)]  # k and v; q and wo; gate, up and down: 6, 6 and 9
    assert sent == [("fsdp", held + 4 * 12)] * 2  # out and back; one matrix of padding


def test_heads_that_lie_whole_on_a_rank_are_not_exchanged_over_its_axis():
    mesh = Mesh(fsdp=1, tp=2)
    table = decoder_leaves(mesh, **HEADS)
    assert exchanged({"wqkv": table["wqkv"]}, mesh)[:2] == ([(8, 2, 8)], [])  # 2 layers of 4 of the 8 heads
    seen, sent, _ = exchanged(decoder_leaves(Mesh(fsdp=2, tp=2), **HEADS), Mesh(fsdp=2, tp=2))
    assert (4, 2, 8) in seen and [axes for axes, _ in sent] == ["fsdp", "tp", "tp", "fsdp"]


@pytest.mark.long
@pytest.mark.parametrize("name", ["muon", "soap", "adafactor", "skip_nonfinite"])
def test_two_updates_in_one_function(name):
    """The second finds the layouts again: full matrices of shards would be wrong, and no rule of the check sees it."""
    mesh = Mesh(fsdp=2)
    specs = tree.specs(
        {"w": (8, 6), "b": (8,)}, mesh, init=tree.Normal(1.0), dtype=torch.float32, strategy=DataParallel.zero3("fsdp")
    )
    opt = {
        "muon": optim.muon(1e-2, matrices=("w",)),
        "soap": contrib.soap(1e-2, matrices=("w",)),
        "adafactor": contrib.adafactor(1e-2),
        "skip_nonfinite": optim.skip_nonfinite(optim.muon(1e-2, matrices=("w",)), clip_norm=0.1),
    }[name]

    def twice(params, grads):
        state = opt.init(params)
        for _ in range(2):
            params, state = opt.update(grads, state, params)[:2]
        return params

    layouts, alone = tree.layouts(specs), {"w": (8, 6), "b": (8,)}
    drawn = torch.Generator().manual_seed(0)
    params, grads = ({k: torch.randn(shape, generator=drawn) for k, shape in alone.items()} for _ in range(2))
    outs = simulate(twice, mesh, params, grads, layouts=(layouts, layouts), out_layouts=layouts).outputs
    torch.testing.assert_close(join(outs, layouts), twice(params, grads))
