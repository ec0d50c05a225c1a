"""Grids and blocks: the nearest code, the same bits again, nothing that matters lost."""

import pytest
import torch

from fmegatron.optim import contrib
from fmegatron.optim.contrib.blockwise import Blockwise
from fmegatron.optim.contrib.grids import Dynamic, Floating, Linear

GRIDS = {
    "e4m3": Floating(torch.float8_e4m3fn),
    "e5m2": Floating(torch.float8_e5m2),
    "fp16": Floating(torch.float16),
    "linear": Linear(),
    "dynamic": Dynamic(),
}
every_grid = pytest.mark.parametrize("grid", GRIDS.values(), ids=GRIDS)
signs = pytest.mark.parametrize("signed", [True, False], ids=["signed", "unsigned"])


def numbers(signed, n=4000):
    """Numbers of every size, with 0 and the largest."""
    generator = torch.Generator().manual_seed(0)
    y = torch.rand(n, generator=generator) * 10 ** (-8 * torch.rand(n, generator=generator))
    y = torch.cat([torch.tensor([0.0, 1.0, 0.5, 1e-20]), y])
    return torch.where(torch.arange(len(y)) % 2 == 0, y, -y) if signed else y


def values_of(grid, signed):
    """All values of a grid."""
    dtype = grid.code_dtype(signed)
    count = 256 ** torch.empty((), dtype=dtype).element_size()
    codes = torch.arange(count).to(torch.uint8 if count == 256 else torch.int16).view(dtype)
    y = grid.decode(codes, signed)
    y = y[y.isfinite() & (y.abs() <= 1)]
    return (y if signed else y[y >= 0]).unique()


@every_grid
@signs
def test_the_nearest_value(grid, signed):
    values, y = values_of(grid, signed), numbers(signed)
    assert values.max() == 1 and values.min() == (-1 if signed else 0)
    got = grid.decode(grid.encode(y, signed), signed)
    at = torch.searchsorted(values, y).clamp(1, len(values) - 1)
    nearest = torch.minimum((y - values[at - 1]).abs(), (y - values[at]).abs())
    least = values[values > 0].min()
    kept = (y > 0) & (y < least) & (not signed)  # nothing above 0 becomes 0
    assert (got[kept] == least).all()
    assert (((got - y).abs() - nearest)[~kept] <= 1e-7 * y.abs()[~kept] + 1e-12).all()


@every_grid
@signs
def test_what_was_decoded_encodes_to_the_same_bits(grid, signed):
    values = values_of(grid, signed)
    codes = grid.encode(values, signed)
    assert torch.equal(grid.decode(codes, signed), values) and grid.decode(codes, signed).dtype == torch.float32


def test_how_far_down_a_grid_reaches():
    """The smallest value against the largest: what a second moment may span within a block."""
    least = {name: values_of(grid, False).unique()[1].item() for name, grid in GRIDS.items()}
    wanted = {"e4m3": 2**-9 / 448, "e5m2": 2**-16 / 57344, "fp16": 2**-24 / 65504, "linear": 1 / 255, "dynamic": 1e-7}
    assert least == pytest.approx(wanted, rel=1e-6)


@every_grid
@pytest.mark.parametrize("root", [False, True])
@pytest.mark.parametrize("shape", [(), (1,), (5,), (3, 8), (2, 3, 10), (4, 1)], ids=str)
def test_blocks(grid, root, shape):
    form = Blockwise(grid, block=4, root=root, smallest=0)
    x = torch.randn(shape, generator=torch.Generator().manual_seed(1)) * 1e-3
    x = x.square() if root else x
    stored = form.encode(x, None)
    assert stored["codes"].shape == x.shape and stored["codes"].is_contiguous()
    assert stored["scale"].shape == ((*shape[:-1], -(-shape[-1] // 4)) if shape else (1,))
    back = form.decode(stored, None)
    again = form.encode(back, None)
    assert all(torch.equal(stored[name].float(), again[name].float()) for name in stored)
    step = {"e4m3": 2**-4, "e5m2": 2**-3, "fp16": 2**-11, "linear": 1, "dynamic": 1}
    name = next(name for name in GRIDS if GRIDS[name] == grid)
    tops = stored["scale"].square() if root else stored["scale"]
    coarse = {"linear": 1 / 100, "dynamic": 1 / 64}.get(name, 0.0)  # of the largest in the block
    bound = 2.5 * step[name] * x.abs() if name not in ("linear", "dynamic") else 2 * coarse * tops.max()
    assert ((back - x).abs() <= bound + 1e-5 * tops.max()).all()
    assert torch.equal(back.reshape(-1).abs().argmax(), x.reshape(-1).abs().argmax())


def test_blocks_of_zeros_and_of_no_numbers():
    form = contrib.int8(block=2, smallest=0)
    stored = form.encode(torch.tensor([0.0, 0.0, 1.0, float("nan"), float("inf"), 1.0, 2.0, -3.0]), None)
    back = form.decode(stored, None)
    assert back[:2].tolist() == [0, 0] and back[2:6].isnan().all() and back[6:].isfinite().all()
    denormal = torch.tensor([1e-42, -3e-43, 0.0, 1e-44])
    assert (form.decode(form.encode(denormal, None), None) - denormal).abs().max() < 2e-44
    negative = contrib.float8(root=True, block=2, smallest=0)
    assert negative.decode(negative.encode(torch.tensor([-1.0, 1.0]), None), None).isnan().all()


def test_errors_for_people():
    with pytest.raises(ValueError, match="block of at least 1"):
        contrib.int8(block=0)
    with pytest.raises(ValueError, match="wanted torch.float8_e4m3fn"):
        contrib.float8(torch.bfloat16)
