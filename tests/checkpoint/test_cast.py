"""Casting on the way: between any two types that can be cast, through rules and exchanges, as torch casts."""

import pytest
import torch

from fmegatron.checkpoint import copy, fuse, pad, restore, transpose
from fmegatron.layout import Layout, Mesh, Split
from tests.checkpoint.fake_world import assert_same_bits, cut_tree, run, save_all, small_sizes

BF16, F32, FP8 = torch.bfloat16, torch.float32, torch.float8_e4m3fn
SHAPES = {"matrix": (24, 36), "flat": (7, 11), "vector": (5,), "scalar": ()}


def on(mesh, dtype):
    last = mesh.names[-1]
    return {
        "matrix": Layout(SHAPES["matrix"], dtype, mesh, (None, Split(last, 3))),
        "flat": Layout(SHAPES["flat"], dtype, mesh, flat=(last,)),
        "vector": Layout(SHAPES["vector"], dtype, mesh),
        "scalar": Layout((), dtype, mesh),
    }


def numbers(dtype):
    """Values that are exact in none of the types."""
    generator = torch.Generator().manual_seed(0)
    return {k: (3 * torch.randn(shape, generator=generator)).to(dtype) for k, shape in SHAPES.items()}


@pytest.mark.long
@pytest.mark.parametrize("read", ["own", "once"])
@pytest.mark.parametrize(
    "stored, wanted",
    [(BF16, F32), (F32, BF16), (FP8, BF16), (torch.float8_e5m2, F32), (F32, FP8), (BF16, torch.float16),
     (torch.int32, torch.int64), (torch.bool, F32), (F32, torch.float64)],
    ids=str,
)  # fmt: skip
def test_types(tmp_path, stored, wanted, read):
    state, source, target = numbers(stored), on(Mesh(tp=2), stored), on(Mesh(dp=2, tp=3), wanted)
    cast = {k: x.to(wanted) for k, x in state.items()}
    for small in (True, False):
        with small_sizes(*((256, 64) if small else (1 << 20, 1 << 20))):
            save_all(tmp_path / f"a{small}", state, source)

            def work(world, at=tmp_path / f"a{small}"):
                return restore(at, target, world=world, cast=True, read=read)

            got = run(6, work)
        for rank, local in enumerate(cut_tree(cast, target)):
            assert_same_bits(got[rank], local, f"rank {rank}")


def test_fp32_masters_from_bf16_and_fp8_parameters_by_rules(tmp_path):
    """Two stored leaves of different types become one bf16 parameter and one padded fp32 master."""
    a, b = torch.randn(10, 6).to(BF16), torch.randn(10, 4).to(FP8)
    mesh = Mesh(fsdp=2)
    stored = {"a": Layout((10, 6), BF16, mesh, ("fsdp",)), "b": Layout((10, 4), FP8, mesh, (None, "fsdp"))}
    both = torch.cat([a.float(), b.float()], 1)
    wanted = {"params": {"w": both.to(BF16)}, "master": {"w": torch.cat([both.t(), torch.zeros(2, 10)]).contiguous()}}
    layouts = {
        "params": {"w": Layout((10, 10), BF16, Mesh(tp=3), (None, "tp"))},
        "master": {"w": Layout((12, 10), F32, Mesh(tp=3), flat=("tp",))},
    }
    rules = [
        fuse(["a", "b"], "params/w", dim=1),
        copy(r"params/(.*)", r"master/\1"),
        transpose("master/w", (1, 0)),
        pad("master/w"),
    ]
    with small_sizes(64, 16):
        save_all(tmp_path / "a", {"a": a, "b": b}, stored)
        got = run(3, lambda world: restore(tmp_path / "a", layouts, world=world, rules=rules, cast=True))
    for rank, local in enumerate(cut_tree(wanted, layouts)):
        assert_same_bits(got[rank], local, f"rank {rank}")
    with pytest.raises(
        ValueError, match=r"params/w: stored as float8_e4m3fn \(from a, b\), wanted bfloat16; pass cast="
    ):
        restore(tmp_path / "a", layouts, rank=0, rules=rules)
