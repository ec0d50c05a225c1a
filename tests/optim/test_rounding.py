"""float32 <-> bfloat16: the remainder is exact for every bit pattern, rounding at random is unbiased and mesh-free."""

import math

import pytest
import torch

from fmegatron.collectives.random_words import random_words
from fmegatron.optim.contrib.rounding import join_master, split_master, stochastic_bfloat16

QUIET = 0x00400000
EDGES = {
    "zeros": [0x00000000, 0x80000000],
    "denormal": [0x00000001, 0x80000001, 0x007FFFFF, 0x807FFFFF, 0x00008000, 0x00018000, 0x00007FFF],
    "ties": [0x3F808000, 0x3F818000, 0xBF808000, 0xBF818000, 0x3F807FFF, 0x3F808001, 0x3F817FFF, 0x3F818001],
    "largest": [0x7F7FFFFF, 0xFF7FFFFF, 0x7F7F8000, 0x7F7F7FFF],
    "infinite": [0x7F800000, 0xFF800000],
    "NaN": [0x7FC00000, 0xFFC00000, 0x7FFFFFFF, 0xFFFFFFFF, 0x7FC12345, 0xFFC08000],
    "signalling NaN": [0x7F800001, 0x7F808000, 0xFFBFFFFF],
}


def from_bits(bits):
    return torch.tensor([b - 2**32 if b >= 2**31 else b for b in bits], dtype=torch.int32).view(torch.float32)


def every_high():
    """All 65536 upper halves with the lower halves at which something happens."""
    high = torch.arange(-(2**15), 2**15, dtype=torch.int32) << 16
    return (high[:, None] + torch.tensor([0, 1, 0x7FFF, 0x8000, 0x8001, 0xFFFF], dtype=torch.int32)).view(torch.float32)


@pytest.mark.parametrize("x", [*map(from_bits, EDGES.values()), every_high()], ids=[*EDGES, "every upper half"])
def test_parameter_and_remainder_are_the_master_bit_for_bit(x):
    param, remainder = split_master(x)
    assert (param.dtype, remainder.dtype) == (torch.bfloat16, torch.int16)
    wanted = torch.where(x.isnan(), x.view(torch.int32) | QUIET, x.view(torch.int32))
    assert torch.equal(join_master(param, remainder).view(torch.int32), wanted)
    assert torch.equal(param.isnan(), x.isnan())
    known = ~x.isnan()
    assert torch.equal(param.signbit(), x.signbit())
    nearest, tie = x.to(torch.bfloat16), (x.view(torch.int32) & 0xFFFF) == 0x8000
    assert torch.equal(param[known & ~tie].view(torch.int16), nearest[known & ~tie].view(torch.int16))
    away = (x.view(torch.int32) >> 16) + 1
    assert torch.equal(param[known & tie].view(torch.int16), away[known & tie].to(torch.int16))


def words_of(n, count=0, path="w", key=0):
    return random_words(key, path, torch.tensor(count), torch.empty(n))


@pytest.mark.parametrize("value", [1.001, -1.001, 3.14159e-5, -2.7e30, 1e-40, -0.7, 1 + 2**-8 + 2**-20])
def test_rounding_at_random_is_unbiased(value):
    n = 200_000
    x = torch.full((n,), value)
    rounded = stochastic_bfloat16(x, words_of(n)).double()
    below, above = rounded.min(), rounded.max()
    assert below <= x[0] <= above and len(rounded.unique()) <= 2
    step = above - below
    assert (rounded.mean() - x[0].double()).abs() <= 5 * step * 0.5 / math.sqrt(n)
    p = ((x[0].double() - below) / step).item() if step else 0.0
    assert abs((rounded == above).double().mean().item() - p) < 5 * 0.5 / math.sqrt(n) if step else True


def test_what_bfloat16_has_stays():
    x = torch.cat([every_high()[:, 0], from_bits([b for name in ("NaN", "infinite", "zeros") for b in EDGES[name]])])
    rounded = stochastic_bfloat16(x, words_of(len(x)))
    assert torch.equal(rounded.isnan(), x.isnan())
    known = ~x.isnan()
    assert torch.equal(rounded[known].view(torch.int16), x[known].to(torch.bfloat16).view(torch.int16))


def test_no_small_update_is_lost_on_average():
    """1000 additions of 1e-4 to 1 in bfloat16, whose step there is 2⁻⁷: to nearest it stays 1."""
    x = torch.ones(4096, dtype=torch.bfloat16)
    for count in range(1000):
        x = stochastic_bfloat16(x.float() + 1e-4, words_of(4096, count))
    assert (1 + torch.tensor(1e-4)).to(torch.bfloat16) == 1
    assert abs(x.double().mean().item() - 1.1) < 5 * 2**-7 * math.sqrt(1000) / math.sqrt(4096)
