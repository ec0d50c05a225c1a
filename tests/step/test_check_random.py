"""Random numbers by keys, hashes, bits and fp8: numbers of a position are right where it is the global one."""

import re

import pytest
import torch

from fmegatron.collectives import axis_index, pmax
from fmegatron.collectives.ops import declare
from tests.step.test_check_ops import COLUMNS, DP, PENDING, ROWS, TP, WHOLE, grads, lay, report

ALL, BOTH = lay((8, 16), "dp", "tp"), lay((8, 16), ("dp", "tp"))
SEED, OFFSETS = lay((), dtype=torch.int64), lay((4,), dtype=torch.int32)
FP8 = torch.float8_e4m3fn


def mixed(x):
    """A hash of whole numbers, as of global positions: multiply, shift, xor."""
    x = (x ^ (x >> 16)) * 0x45D9F3B
    return (x ^ (x << 13)) & 0x7FFFFFFF | 1


def keyed_noise(x, seed, axis=DP):
    """Noise from a key that is an argument and from positions in the whole array."""
    at = axis_index(axis, like=x) * x.shape[0] + torch.arange(x.shape[0])
    return x + (mixed(at + seed) / 2**31)[:, None].to(x.dtype)


def stochastic(x, seed):
    """fp32 to bf16 by adding random low bits."""
    at = declare((axis_index(DP) * x.shape[0] + torch.arange(x.shape[0])), DP, forward=("sharded", 0))
    bits = x.view(torch.int32) + (mixed(at + seed)[:, None] & 0xFFFF).int()
    return (bits & -65536).view(torch.float32).bfloat16()


def scaled_product(own_scale):
    def fn(x, w):
        largest = x.abs().amax()
        scale = (largest if own_scale else pmax(largest, DP)) / 448
        y, v = (x / scale).to(FP8), w.t().contiguous().to(FP8).t()
        return torch._scaled_mm(y, v, scale, torch.ones(()), out_dtype=torch.float32)

    return fn


def grouped(x, w, offs, g):
    return grads(lambda x, w: torch._grouped_mm(x, w, offs), x, w, g=g)


def half(*args, **kwargs):
    return lay(*args, dtype=torch.bfloat16, **kwargs)


converted = torch.ops.prims.convert_element_type


RIGHT = {
    "noise from a key and global positions": (keyed_noise, (ROWS, SEED), (ROWS,)),
    "stochastic rounding by positions": (stochastic, (ROWS, SEED), (lay((8, 16), "dp", dtype=torch.bfloat16),)),
    "philox of a seed that is an argument": (
        lambda x, s: x + torch.ops.rngprims.philox_rand([8, 16], s, s, None, torch.device("cpu"), x.dtype)[0],
        (WHOLE, SEED), (WHOLE,),
    ),
    "bits of shards": (lambda x: x.view(torch.int32).view(torch.float32), (ROWS,), (ROWS,)),
    "bytes of shards and back": (lambda x: x.view(torch.uint8).view(torch.float32), (COLUMNS,), (COLUMNS,)),
    "bytes of flat shards": (
        lambda x: x.flatten().view(torch.uint8).view(torch.float32).view(x.shape), (ROWS,), (ROWS,)
    ),
    "fp8 cast of shards": (lambda x: x.to(FP8).to(torch.float32), (COLUMNS,), (COLUMNS,)),
    "cast of a pending sum, in a compiled layer": (
        lambda x: converted(x, torch.bfloat16), (PENDING,), (half((8, 16), "dp", unreduced=("tp",)),)
    ),
    "fp8 product, one scale": (scaled_product(False), (lay((32, 16), "dp"), lay((16, 32))), (lay((32, 32), "dp"),)),
    "fp8 product of contracted shards": (
        lambda x, w, s: torch._scaled_mm(x.to(FP8), w.t().contiguous().to(FP8).t(), s, s, out_dtype=torch.float32),
        (lay((32, 32), None, "tp"), lay((32, 32), "tp"), lay(())), (lay((32, 32), unreduced=("tp",)),),
    ),
    "grouped_mm gradients, experts of a rank": (
        grouped,
        (half((32, 16), "tp"), half((4, 16, 8), "tp"), lay((4,), "tp", dtype=torch.int32), half((32, 8), "tp")),
        (half((32, 16), "tp"), half((4, 16, 8), "tp")),
    ),
    "grouped_mm gradients, experts everywhere": (
        grouped, (half((32, 16), "dp"), half((4, 16, 8)), OFFSETS, half((32, 8), "dp")),
        (half((32, 16), "dp"), half((4, 16, 8), unreduced=("dp",))),
    ),
    "lerp by foreach": (lambda x, y: tuple(torch._foreach_lerp([x], [y], 0.1)), (PENDING, PENDING), (PENDING,)),
}  # fmt: skip
WRONG = {
    "noise from positions on another axis": (
        lambda x, s: keyed_noise(x, s, TP), (ROWS, SEED), (ROWS,), "replicated and sharded|sharded"
    ),
    "noise from positions in the shard": (
        lambda x, s: x + mixed(torch.arange(4) + s)[:, None], (ROWS, SEED), (ROWS,), "counts from 0"
    ),
    "philox of a seed of each rank": (
        lambda x, s: x + torch.ops.rngprims.philox_rand([8, 16], s, s, None, torch.device("cpu"), x.dtype)[0],
        (WHOLE, lay((), dtype=torch.int64, unreduced=("tp",))), (WHOLE,), "",
    ),
    "bits of a pending sum": (lambda x: x.view(torch.int32) & 1, (PENDING,), (lay((8, 16), "dp"),), "non-linear"),
    "cast of a pending sum that is not summed": (
        lambda x: converted(x, torch.bfloat16), (PENDING,), (half((8, 16), "dp"),), r"partial \(sum\)"
    ),
    "division of a pending sum that rounds": (
        lambda x: torch.div(x, 2, rounding_mode="floor"), (PENDING,), (PENDING,), "non-linear"
    ),
    "grouped_mm gradients not summed": (
        grouped, (half((32, 16), "dp"), half((4, 16, 8)), OFFSETS, half((32, 8), "dp")),
        (half((32, 16), "dp"), half((4, 16, 8))), r"partial \(sum\)",
    ),
    "lerp of pending and whole": (
        lambda x, y: torch.lerp(x, y, 0.1), (PENDING, ROWS), (PENDING,), "counts once per rank"
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", RIGHT)
def test_right(name):
    found = report(*RIGHT[name])
    assert found.ok, str(found)


@pytest.mark.parametrize("name", WRONG)
def test_wrong(name):
    *problem, said = WRONG[name]
    found = report(*problem)
    assert found.findings
    assert re.search(said, str(found)), str(found)


OPEN = {
    "whole numbers of a pending sum of floats": (
        lambda x: x.to(torch.int32), (PENDING,), (PENDING,), "rounds each rank's term"
    ),
    "the same in a compiled layer": (
        lambda x: converted(x, torch.int32), (PENDING,), (PENDING,), "rounds each rank's term"
    ),
    "fp8 scales of each rank's own, taken out again": (
        scaled_product(True), (lay((32, 16), "dp"), lay((16, 32))), (lay((32, 32), "dp"),), "pending max"
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", OPEN)
def test_what_types_do_not_decide_is_unproven(name):
    *problem, said = OPEN[name]
    found = report(*problem)
    assert not found.findings and [one.outputs for one in found.unproven] == [("0",)]
    assert re.search(said, str(found)), str(found)
