"""relate: how the values of the ranks make up one value; and the measure of equality."""

import pytest
import torch

from fmegatron.layout import Layout, Mesh, Split
from fmegatron.testing import split
from fmegatron.testing.compare_ranks import relative_error
from fmegatron.testing.relate import relate

MESH = Mesh(dp=2, tp=2)


def values(shape=(8, 12)):
    return torch.rand(shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64) + 0.5


@pytest.mark.parametrize(
    "spec, other, wanted",
    [
        ((None, None), {}, {"tp": "equal", "dp": "equal"}),
        (("dp", "tp"), {}, {"tp": ("concat", 1, 1), "dp": ("concat", 0, 1)}),
        ((("dp", "tp"),), {}, {"tp": ("concat", 0, 1), "dp": ("concat", 0, 1)}),
        ((("tp", "dp"),), {}, {"tp": ("concat", 0, 1), "dp": ("concat", 0, 2)}),
        (("tp",), {"unreduced": ("dp",)}, {"tp": ("concat", 0, 1), "dp": "sum"}),
        ((None, Split("tp", 2)), {}, {"tp": ("concat", 1, 2), "dp": "equal"}),
        ((None, Split("tp", (8, 2, 2))), {}, {"tp": ("concat", 1, (8, 2, 2)), "dp": "equal"}),
    ],
)
def test_relate(spec, other, wanted):
    x = values()
    ranks = split(x, Layout(x.shape, x.dtype, MESH, spec, **other))
    assert relate(ranks, x, MESH, parts=((8, 2, 2),)) == wanted


def test_relate_max_and_nothing():
    x = values()
    parts = [x - x * torch.randint(0, 2, x.shape) * 0.3 for _ in range(2)]
    assert relate([parts[0], parts[1]] * 2, torch.maximum(*parts), MESH) == {"tp": "max", "dp": "equal"}
    assert relate([x, x * 2, x * 3, x * 4], x, MESH) is None
    assert relate([x * 2] * 4, x, MESH) is None


def test_relate_is_elementwise():
    """A huge element, such as a mask's -1e9, does not widen the tolerance of the others."""
    x = values()
    x[0, 0] = -1e9
    y = x.clone()
    y[3, 3] += 1e-3
    assert relate([y] * 4, x, MESH) is None


def test_relative_error():
    x = values()
    assert relative_error(x, x.clone()) == 0
    assert relative_error(x * (1 + 1e-9), x) == pytest.approx(5e-10, rel=0.5)
    assert relative_error(x[:2], x) == relative_error(x.float(), x) == float("inf")
    nan = x.clone()
    nan[0, 0] = float("nan")
    assert relative_error(nan, x) == float("inf") and relative_error(nan, nan.clone()) == 0
    infinite = x.clone()
    infinite[0, 0] = float("inf")
    assert relative_error(infinite, infinite.clone()) == 0 and relative_error(x, infinite) == float("inf")
    zeros = torch.zeros_like(x)
    zeros[0] = 1.0
    noisy = zeros + 1e-18
    assert relative_error(noisy, zeros) < 1e-15
    assert relative_error(x + 1e-6, x, floor=1e-5) == 0
    assert relative_error(torch.zeros(0), torch.zeros(0)) == 0
