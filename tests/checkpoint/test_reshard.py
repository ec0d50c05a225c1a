"""Whatever the layouts: what is restored is bitwise what was saved, on every rank of every mesh."""

import itertools
import os
import re
import tempfile
from typing import NamedTuple

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fmegatron import checkpoint, tree
from fmegatron.checkpoint.files import format
from fmegatron.checkpoint.writing import plan
from fmegatron.layout import Layout, Mesh, Split
from tests.checkpoint.fake_world import assert_same_bits, cut_tree, run, save_all, small_sizes
from tests.checkpoint.tokens import files_of
from tests.layout import strategies
from tests.pairs import few

DTYPES = (
    *(torch.bool, torch.uint8, torch.uint16, torch.uint32, torch.uint64, torch.int8, torch.int16, torch.int32),
    *(torch.int64, torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex64, torch.complex128),
    *(torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e4m3fnuz, torch.float8_e5m2fnuz, torch.float8_e8m0fnu),
)
WITHOUT_ARITHMETIC = (
    torch.complex32,
    torch.float4_e2m1fn_x2,
)  # stored like any other; torch computes nothing with them


MESHES = (
    Mesh(dp=1, fsdp=1, tp=1),
    Mesh(dp=2, fsdp=1, tp=1),
    Mesh(dp=1, fsdp=2, tp=1),
    Mesh(dp=1, fsdp=1, tp=2),
    Mesh(dp=1, fsdp=2, tp=2),
    Mesh(dp=2, fsdp=2, tp=2),
    Mesh(dp=1, fsdp=3, tp=1),
    Mesh(dp=1, fsdp=1, tp=4),
    Mesh(tp=2, dp=3, fsdp=1),
    Mesh(dp=2, fsdp=2, tp=1).view(order=("fsdp", "dp", "tp"), dp=2, tp=2, fsdp=1),
)


class Moments(NamedTuple):
    """A node of the state's tree."""

    m: object
    v: object


def any_bits(shape, dtype, seed=0):
    """A tensor of any bit patterns (NaNs with payloads included), but for bool."""
    generator = torch.Generator().manual_seed(seed)
    if dtype is torch.bool:
        return torch.rand(shape, generator=generator) < 0.5
    n = torch.Size(shape).numel()
    data = torch.randint(0, 256, (max(n, 1) * dtype.itemsize,), dtype=torch.uint8, generator=generator)
    return data.view(dtype)[:n].reshape(shape)


def layouts_on(mesh):
    """Every kind of leaf: stacked, uneven, fused, flat (along rows and not), replicated, small, 0-d, empty."""

    def on(shape, *spec, dtype=torch.bfloat16, flat=()):
        return Layout(shape, dtype, mesh, spec, flat=flat)

    return {
        "embed": on((101, 24), "tp", "fsdp"),
        "blocks": {
            "wqkv": on((4, 24, 48), None, "fsdp", Split("tp", parts=(24, 12, 12))),
            "w_gate_up": on((4, 24, 64), None, "fsdp", Split("tp", parts=2), dtype=torch.float32),
            "wo": on((4, 20, 24), ("fsdp", "dp"), "tp"),
            "norm": on((4, 24)),
        },
        "opt": [
            Moments(
                on((7, 33), dtype=torch.float32, flat=("dp", "fsdp")), on((8, 6, 4), None, "tp", flat=("dp", "fsdp"))
            ),
            on((6, 12), "fsdp", Split("tp", parts=3), flat=("dp",), dtype=torch.float64),
        ],
        "step": on((), dtype=torch.int64),
        "none": on((0, 5), "fsdp", "tp"),
        "bias": on((13,), ("fsdp", "tp")),
    }


def state_for(layouts):
    """Global arrays of these layouts."""
    counter = itertools.count()
    return tree.map(lambda layout: any_bits(layout.shape, layout.dtype, next(counter)), layouts)


@pytest.mark.medium
@pytest.mark.parametrize("source", few(3, zip(MESHES), map(str, MESHES)))
def test_every_pair_of_meshes(tmp_path, source):
    saved = layouts_on(source)
    state = state_for(saved)
    with small_sizes():
        assert save_all(tmp_path / "a", state, saved) == [None] * source.size
        homes = {p.home for p in plan.plan(tree.paths(saved), tree.leaves(saved))}
        assert {"grid", "packed"} <= homes
        for target in MESHES[source.size % 2 :: 2]:
            wanted = layouts_on(target)
            for rank, local in enumerate(cut_tree(state, wanted)):
                got = checkpoint.restore(tmp_path / "a", wanted, rank=rank)
                assert_same_bits(got, local, f"{source} -> {target}, rank {rank}")
    stored = checkpoint.layouts(tmp_path / "a")
    assert stored["blocks"] == saved["blocks"]
    assert stored["opt"]["0"] == saved["opt"][0]._asdict() and stored["opt"]["1"] == saved["opt"][1]
    assert sorted(os.listdir(tmp_path)) == ["a"]


@pytest.mark.long
@pytest.mark.parametrize("source, target", [(MESHES[4], MESHES[8]), (MESHES[8], MESHES[0]), (MESHES[5], MESHES[9])])
@pytest.mark.parametrize("most", [0, 256])
def test_real_sizes_and_small_leaves(tmp_path, monkeypatch, source, target, most):
    """Small leaves have arrays of their own, or are packed where there are too many of them."""
    monkeypatch.setattr(plan, "MOST_SMALL", most)
    saved, wanted = layouts_on(source), layouts_on(target)
    big = lambda mesh: Layout((96, 1024), torch.float32, mesh, ("fsdp", "tp"))  # noqa: E731
    saved["big"], wanted["big"] = big(source), big(target)
    state = state_for(saved)
    assert save_all(tmp_path / "a", state, saved) == [None] * source.size
    files = [
        os.path.relpath(d, files_of(tmp_path / "a"))
        for d, _, files in os.walk(files_of(tmp_path / "a"))
        if any(re.match("c", f) for f in files)
    ]
    if most:
        homes = plan.plan(tree.paths(saved), tree.leaves(saved))
        own = {format.array_name(p.path) for p in homes if p.home == "grid" and p.layout.nbytes}
        assert {f for f in files if not f.startswith("packed/")} == own and len(own) > 3
    else:
        assert {f for f in files if not f.startswith("packed/")} == {"arrays/big"} and len(files) <= 1 + source.size
    locals_ = cut_tree(state, wanted)
    restored = run(target.size, lambda world: checkpoint.restore(tmp_path / "a", wanted, world=world))
    for rank, got in enumerate(restored):
        assert_same_bits(got, locals_[rank])


@pytest.mark.medium
@settings(max_examples=50, deadline=None)
@given(data=st.data())
def test_any_layout_to_any_layout(data):
    mesh, shape = data.draw(strategies.meshes()), data.draw(strategies.shapes())
    dtype = data.draw(st.sampled_from(DTYPES))
    saved = {"x": data.draw(strategies.layouts(shape=shape, mesh=mesh, dtype=dtype))}
    wanted = {"x": data.draw(strategies.layouts(shape=shape, dtype=dtype))}
    state = state_for(saved)
    chunk, band = data.draw(st.sampled_from([(128, 32), (32, 16), (1 << 20, 1 << 20)]))
    with tempfile.TemporaryDirectory(dir="/dev/shm" if os.path.isdir("/dev/shm") else None) as folder:
        with small_sizes(chunk, band):
            assert save_all(folder + "/a", state, saved) == [None] * mesh.size
            assert checkpoint.layouts(folder + "/a") == saved
            for rank, local in enumerate(cut_tree(state, wanted)):
                assert_same_bits(checkpoint.restore(folder + "/a", wanted, rank=rank), local)


@pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental")
def test_all_dtypes_bit_exact(tmp_path):
    mesh, dtypes = Mesh(fsdp=2), (*DTYPES, *WITHOUT_ARITHMETIC)
    layouts = {str(d): [Layout((5, 40), d, mesh, ("fsdp",)), Layout((), d, mesh)] for d in dtypes}
    layouts |= {"big": {str(d): Layout((1 << 18,), d, mesh, ("fsdp",)) for d in dtypes}}
    layouts |= {"none": {str(d): Layout((0, 5), d, mesh, ("fsdp",)) for d in dtypes}}
    state = state_for(layouts)
    assert save_all(tmp_path / "a", state, layouts) == [None] * 2
    for rank, local in enumerate(cut_tree(state, layouts)):
        assert_same_bits(checkpoint.restore(tmp_path / "a", layouts, rank=rank), local)


def test_a_state_that_is_a_single_tensor(tmp_path):
    x = torch.randn(3)
    checkpoint.save(tmp_path / "a", x, Layout((3,), torch.float32, Mesh()))
    assert torch.equal(checkpoint.restore(tmp_path / "a", Layout((3,), torch.float32, Mesh())), x)


def test_strided_and_offset_tensors(tmp_path):
    x = torch.randn(300, 200)
    state = {
        "t": x.t(),
        "part": x[10:20, 5:],
        "row": x.view(-1)[7:12],
        "conj": torch.randn(9, dtype=torch.complex64).conj(),
    }
    layouts = tree.map(lambda t: Layout(tuple(t.shape), t.dtype, Mesh()), state)
    checkpoint.save(tmp_path / "a", state, layouts)
    got = checkpoint.restore(tmp_path / "a", layouts)
    assert all(torch.equal(a, b) for a, b in zip(tree.leaves(got), tree.leaves(state), strict=True))
    size = sum(os.path.getsize(os.path.join(d, f)) for d, _, files in os.walk(tmp_path) for f in files)
    assert size < 2 * sum(t.nbytes for t in tree.leaves(state))  # a view does not drag its base along
