"""Numbers by keys: right distributions, the same bits on every mesh and compiled, masks that differ where they must."""

import math

import pytest
import torch

from fmegatron import nn, tree
from fmegatron.collectives import Axes
from fmegatron.collectives.random_words import random_words
from fmegatron.layout import Layout, Mesh
from fmegatron.nn.random import box_muller
from fmegatron.step import jit
from fmegatron.testing import simulate
from tests.collectives.test_random_words import LAYOUTS, MESH
from tests.pairs import each_value, few, mixed

COUNT = torch.tensor(7)
KINDS = {
    "uniform": nn.uniform,
    "normal": nn.normal,
    "dropout": lambda x, **how: nn.dropout(torch.ones_like(x), 0.3, **how),
}
kinds = pytest.mark.parametrize("kind", KINDS)


def drawn(kind, shape, key=1, count=COUNT, dtype=torch.float32, **how):
    return KINDS[kind](torch.empty(shape, dtype=dtype), key=key, count=count, **how)


# ---- the same numbers everywhere -------------------------------------------------------------------------------------
@pytest.mark.long
@pytest.mark.parametrize(("name", "kind"), each_value(LAYOUTS, KINDS))
def test_the_same_bits_on_every_mesh(name, kind):
    layout = LAYOUTS[name]
    sim = simulate(
        lambda x, c: KINDS[kind](x, key=1, count=c, layout=layout),
        MESH, torch.zeros(layout.shape), COUNT, layouts=(layout, None), out_layouts=layout,
    )  # fmt: skip
    assert torch.equal(sim.globals(), drawn(kind, layout.shape))


@pytest.mark.long
@kinds
@pytest.mark.parametrize("mesh", [Mesh(dp=2), Mesh(dp=2, tp=2), Mesh(tp=4)], ids=str)
def test_a_count_for_each_row_stays_with_the_row(kind, mesh):
    """Wherever rows lie, and in whatever order, their numbers are those of the sample."""
    samples = torch.tensor([5, 3, 2**40, 0, 9, 1, 8, 4])
    spec = tuple(name if name in mesh else None for name in ("dp", None, "tp"))
    rows, layout = Layout((8,), torch.int64, mesh, spec[:1]), Layout((8, 3, 4), torch.float32, mesh, spec)
    sim = simulate(
        lambda x, c: KINDS[kind](x, key=1, count=c, layout=layout), mesh, torch.zeros(8, 3, 4),
        samples, layouts=(layout, rows), out_layouts=layout,
    )  # fmt: skip
    together = sim.globals()
    assert torch.equal(together, drawn(kind, (8, 3, 4), count=samples))
    for row, sample in zip(together, samples, strict=True):
        assert torch.equal(row, drawn(kind, (1, 3, 4), count=sample[None])[0])
        assert torch.equal(row, drawn(kind, (3, 4), count=sample))  # position in the sample, of a draw of its own


# The kernel of normal numbers takes longest to compile: with the slow tests.
COMPILED = mixed(["uniform", "dropout"], [(1003,), (17, 31)])
NORMAL = [pytest.param("normal", shape, marks=pytest.mark.slow) for shape in [(1003,), (17, 31)]]


@pytest.mark.slow
@pytest.mark.long
@pytest.mark.parametrize(("kind", "shape"), [*few(1, COMPILED), *NORMAL])
def test_the_same_bits_compiled(kind, shape):
    """Sizes at which a vectorized loop has a rest; a factor that a compiler could contract with what is before it."""
    assert_compiled_is_eager([kind], shape, "inductor")


@pytest.mark.medium
def test_the_same_bits_of_a_functional_graph():
    assert_compiled_is_eager(KINDS, (17, 31), "aot_eager")


def assert_compiled_is_eager(of, shape, backend):
    def all_kinds(x, c):
        return [3 * KINDS[kind](x, key=1, count=c) + x for kind in of]

    x = torch.linspace(-1, 1, math.prod(shape)).view(shape)
    for kind, got, wanted in zip(of, jit(all_kinds, backend=backend)(x, COUNT), all_kinds(x, COUNT), strict=True):
        assert torch.equal(got, wanted), kind


@kinds
def test_the_numbers_are_fixed_for_ever(kind):
    """A resumed run of a later version goes on with them."""
    wanted = {
        "uniform": [0.6352394223213196, 0.14496374130249023, 0.9697532057762146],
        "normal": [2.323625326156616, -0.05544452741742134, 0.8109903335571289],
        "dropout": [0.0, 1.4285714626312256, 0.0],
    }[kind]
    assert drawn(kind, (3,)).tolist() == wanted


@kinds
def test_dtypes(kind):
    for dtype in (torch.float64, torch.float32, torch.bfloat16, torch.float16):
        x = drawn(kind, (4096,), dtype=dtype)
        assert x.dtype == dtype and x.isfinite().all()
        if kind == "uniform":
            assert 0 <= x.min() and x.max() < 1
            bits = {torch.bfloat16: 8, torch.float16: 11, torch.float32: 24, torch.float64: 32}[dtype]
            assert torch.equal(x.double() * 2**bits, (x.double() * 2**bits).round())


# ---- distributions ---------------------------------------------------------------------------------------------------
N = 1 << 18


def is_independent(a, b):
    """Their correlation is within 5 standard deviations of that of independent values."""
    a, b = a.double().flatten(), b.double().flatten()
    return torch.corrcoef(torch.stack([a, b]))[0, 1].abs() < 5 / math.sqrt(len(a))


def chi_square(observed, expected):
    """In standard deviations from what independent draws give."""
    freedom = len(observed) - 1
    return (((observed - expected) ** 2 / expected).sum() - freedom) / math.sqrt(2 * freedom)


@pytest.mark.parametrize("rate", [0.05, 0.1, 0.5, 0.9])
def test_masks(rate):
    """The share of zeros, of pairs of zeros next to each other in both dims, and of zeros in blocks of 64."""
    x = nn.dropout(torch.ones(512, N // 512), rate, key=3, count=COUNT)
    zero = (x == 0).double()
    assert torch.equal(x, torch.where(x == 0, 0, torch.tensor(1 / (1 - rate))))
    assert abs(zero.mean() - rate) < 5 * math.sqrt(rate * (1 - rate) / N)
    for shift in (1, 2, 3, 4, 8, 64):
        assert is_independent(zero[:, shift:], zero[:, :-shift]) and is_independent(zero[shift:], zero[:-shift])
    of_blocks = zero.view(-1, 64).sum(1)
    expected = torch.distributions.Binomial(64, rate).log_prob(torch.arange(65.0)).exp() * len(of_blocks)
    likely = expected > 10
    counts = torch.bincount(of_blocks.long(), minlength=65).double()
    counts, expected = ([*v[likely], v[~likely].sum()] for v in (counts, expected.double()))
    assert abs(chi_square(torch.stack(counts), torch.stack(expected))) < 5


def test_uniform_numbers():
    x = drawn("uniform", (N,)).double()
    assert 0 <= x.min() < 1e-4 and 1 - 1e-4 < x.max() < 1
    assert abs(x.mean() - 0.5) < 5 / math.sqrt(12 * N) and abs(x.var() * 12 - 1) < 5 * math.sqrt(0.8 / N) * 2
    assert abs(chi_square(torch.histc(x, 256, 0, 1), torch.full((256,), N / 256.0))) < 5
    pairs = (x[::2] * 16).long() * 16 + (x[1::2] * 16).long()
    assert abs(chi_square(torch.bincount(pairs, minlength=256).double(), torch.full((256,), N / 512.0))) < 5


def test_normal_numbers():
    x = drawn("normal", (N,)).double()
    for power, moment in ((1, 0.0), (2, 1.0), (3, 0.0), (4, 3.0), (6, 15.0)):
        spread = math.sqrt((math.prod(range(1, 2 * power, 2)) - moment**2) / N)
        assert abs((x**power).mean() - moment) < 5 * spread, power
    assert 4 < x.abs().max() < 6.7 and is_independent(x[1:], x[:-1]) and is_independent(x[1:] ** 2, x[:-1] ** 2)
    edges = torch.special.ndtri(torch.linspace(0, 1, 257, dtype=torch.float64)[1:-1])
    counts = torch.bincount(torch.bucketize(x, edges), minlength=256).double()
    assert abs(chi_square(counts, torch.full((256,), N / 256.0))) < 5


def test_extreme_words_of_normal_numbers():
    """Every exponent of the logarithm, and the ends of the angle, against the formula in fp64."""
    radius = [0, 1, 2, 3, 2**16 - 1, 2**31 - 1, 2**31, 3037000498, 3037000499, 2**32 - 201, 2**32 - 2, 2**32 - 1]
    radius = torch.tensor(radius)
    angle = torch.tensor([0, 1, 2**30, 2**31 - 1, 2**31, 2**31 + 1, 3 * 2**30, 2**32 - 1])
    r, a = (x.flatten() for x in torch.meshgrid(radius, angle, indexing="ij"))
    got = box_muller(r, a)
    turn = ((a % 2**31).double() / 2**30 - 1) * math.pi / 2
    wanted = (-2 * ((r.double() + 1) / 2**32).log()).sqrt() * turn.cos() * torch.where(a >= 2**31, -1, 1)
    assert ((got - wanted).abs() < torch.where(r > 2**32 - 200, 3e-5, 1e-6)).all()


@kinds
def test_streams_differ(kind):
    """Between keys (of layers), counts (of steps), rows (of samples), and kinds of numbers with one key."""
    base = drawn(kind, (N // 8,))
    others = [drawn(kind, (N // 8,), key=tree.fold_in(1, "mlp", i)) for i in range(3)]
    others += [drawn(kind, (N // 8,), count=torch.tensor(count)) for count in (6, 8, 7 + 2**32)]
    rows = drawn(kind, (4, N // 8), count=torch.arange(4))
    others += [drawn(other, (N // 8,)) for other in KINDS if other != kind]
    for i, a in enumerate([base, *others, *rows]):
        for b in [base, *others, *rows][:i]:
            assert is_independent(a, b)


# ---- dropout as an op ------------------------------------------------------------------------------------------------
def test_the_gradient_passes_where_the_value_did():
    x = torch.randn(64, 64, dtype=torch.float64, generator=torch.Generator().manual_seed(0)).requires_grad_()
    y = nn.dropout(x, 0.25, key=1, count=COUNT)
    (grad,) = torch.autograd.grad(y.sum(), x)
    assert torch.equal(grad != 0, y != 0) and torch.equal(y, x * grad)
    assert grad.unique().tolist() == [0.0, 1 / 0.75]


def test_rates_of_0_and_1():
    x = torch.tensor([1.0, torch.inf, torch.nan], requires_grad=True)
    assert nn.dropout(x, 0, key=1, count=COUNT) is x
    assert nn.dropout(x, 1, key=1, count=COUNT).tolist() == [0, 0, 0]
    assert nn.dropout(x[:0], 0.5, key=1, count=COUNT).shape == (0,)


X = torch.ones(4, 6)
WRONG = {
    "rate": (lambda: nn.dropout(X, 1.5, key=1, count=COUNT), r"rate of 1.5, wanted a probability from 0 to 1"),
    "NaN": (lambda: nn.dropout(X, math.nan, key=1, count=COUNT), "rate of nan"),
    "key": (lambda: nn.dropout(X, 0.5, key=torch.tensor(1), count=COUNT), r"got the key tensor\(1\), wanted a Python"),
    "key of truth": (lambda: nn.normal(X, key=True, count=COUNT), "got the key True"),
    "count": (lambda: nn.uniform(X, key=1, count=3), "got the count 3, wanted an int64 tensor, .* the same numbers in"),
    "count of floats": (lambda: nn.uniform(X, key=1, count=torch.ones(())), "a tensor of torch.float32"),
    "counts": (lambda: nn.dropout(X, 0.5, key=1, count=torch.arange(6)), r"counts of shape \(6,\) .* \(4, 6\)"),
    "counts of pairs": (lambda: nn.dropout(X, 0.5, key=1, count=torch.ones(4, 5).long()), r"counts of shape \(4, 5\)"),
    "whole numbers": (lambda: nn.dropout(X.long(), 0.5, key=1, count=COUNT), "got a value of torch.int64"),
    "layout": (
        lambda: nn.dropout(X, 0.5, key=1, count=COUNT, layout=Layout((4, 6), X.dtype, MESH, ("dp",))),
        r"got a local tensor of shape \(4, 6\), wanted \(2, 6\), which .* gives",
    ),
    "no axes": (
        lambda: random_words(1, "mask", COUNT, X, Layout((8, 6), X.dtype, MESH, ("dp",)), None),
        "which is sharded, and no axes, wanted axes; give Axes",
    ),
    "axes of another mesh": (
        lambda: random_words(1, "mask", COUNT, X, Layout((8, 6), X.dtype, MESH, ("dp",)), Axes(Mesh(dp=2))),
        "the mesh",
    ),
    "flat rows": (
        lambda: nn.dropout(
            X[0], 0.5, key=1, count=torch.arange(6), layout=Layout((4, 3), X.dtype, MESH, flat=("dp",))
        ),
        "whose ranges cut rows, wanted one count",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", WRONG)
def test_what_is_refused(name):
    make, message = WRONG[name]
    with pytest.raises(ValueError, match=message):
        make()
