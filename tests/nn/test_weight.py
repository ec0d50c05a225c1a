"""Weights as values: products with them are those with the dense matrix, and other arithmetic is refused."""

import copy
import pickle

import pytest
import torch

from fmegatron import nn, step, tree
from fmegatron.collectives import Axes, psum
from fmegatron.layout import Layout, Mesh, Split
from fmegatron.testing import assert_parity
from tests.pairs import each_value

D, F, R = 6, (4, 8), 2


def low_rank(*lead, parts=F, base=None, seed=0):
    generator = torch.Generator().manual_seed(seed)

    def random(*shape):
        return torch.randn(*lead, *shape, generator=generator, dtype=torch.float64)

    pairs = tuple(nn.Pair(random(D, R), random(R, width)) for width in parts)
    return nn.LowRank(random(D, sum(parts)) if base is None else base, pairs, torch.tensor(1.5))


KINDS = {
    "tensor": lambda *lead: low_rank(*lead).base,
    "scaled": lambda *lead: nn.Scaled(low_rank(*lead).base, torch.tensor(2.0)),
    "a pair": lambda *lead: low_rank(*lead, parts=(12,)),
    "two pairs": low_rank,
    "beside another": lambda *lead: low_rank(*lead, parts=(12,), base=low_rank(*lead), seed=1),
    "of a scaled one": lambda *lead: low_rank(*lead, base=nn.Scaled(low_rank(*lead).base, torch.tensor(2.0))),
}


def close(got, wanted):
    torch.testing.assert_close(got, wanted, rtol=1e-12, atol=1e-13)


@pytest.mark.parametrize("kind", KINDS)
def test_products_are_those_with_the_dense_matrix(kind):
    w, x = KINDS[kind](), torch.randn(3, 5, D, dtype=torch.float64)
    close(nn.matmul(x, w), x @ nn.dense(w))
    experts, rows, ends = KINDS[kind](3), x.flatten(0, 1), torch.tensor([4, 4, 11], dtype=torch.int32)
    close(nn.grouped_matmul(rows, experts, ends), nn.grouped_matmul(rows, nn.dense(experts), ends))
    entered = nn.entered(w, Axes(Mesh())["tp"])
    close(nn.dense(entered), nn.dense(w))


def test_the_dense_matrix():
    w = low_rank()
    (a, b), (c, d) = w.pairs
    close(nn.dense(w), w.base + 1.5 * torch.cat((a @ b, c @ d), -1))
    stack = low_rank(3)._replace(scale=torch.tensor([1.0, 2.0, 3.0]))  # a number for each layer
    for i, layer in enumerate(nn.dense(stack)):
        close(layer, nn.dense(tree.map(lambda t, i=i: t[i], stack)))


def test_a_plain_product_of_a_user_reaches_it():
    w, x = low_rank(), torch.randn(5, D, dtype=torch.float64)
    assert torch.equal(x @ w, nn.matmul(x, w))


REFUSED = {
    "x + w": lambda x, w: x + w,
    "w + w": lambda x, w: w + w,
    "2 * w": lambda x, w: 2 * w,
    "x * w": lambda x, w: x * w,
    "-w": lambda x, w: -w,
    "w / 2": lambda x, w: w / 2,
    "w @ x": lambda x, w: w @ x,
    "w[0]": lambda x, w: w[0],
    "w[:2]": lambda x, w: w[:2],
}


@pytest.mark.parametrize("name", REFUSED)
def test_other_arithmetic_is_refused(name):
    with pytest.raises(TypeError, match=r"LowRank: got .* wanted a product x @ w; write nn.matmul\(x, w\).*nn.dense"):
        REFUSED[name](torch.ones(D, D, dtype=torch.float64), low_rank())


@pytest.mark.parametrize("name", ["t", "shape", "unflatten"])
def test_what_a_tensor_has_is_refused_by_name(name):
    with pytest.raises(AttributeError, match=rf"LowRank: got .{name} of a sum of factors.*nn.dense\(w\)"):
        getattr(low_rank(), name)


def test_it_is_a_value():
    w = low_rank()
    for same in (copy.deepcopy(w), pickle.loads(pickle.dumps(w)), tree.map(lambda t: t, w), nn.LowRank(*w)):
        assert isinstance(same, nn.LowRank) and torch.equal(same.base, w.base) and len(same) == 3
    assert tree.paths(w)[:2] == ["base", "pairs/0/a"]


# ---- a stack of one's own, on ranks ----------------------------------------------------------------------------------
L, B, H = 2, 8, 8


def layouts_on(mesh):
    """Two matrices in columns that tp splits, and one in rows that it splits; fsdp splits rows at rest."""

    def of(*shape, at=(), dtype=torch.float64):
        return Layout((L, *shape), dtype, mesh, (None, *at))

    up = tuple(nn.Pair(of(D, R, at=("fsdp",)), of(R, H, at=("fsdp", "tp"))) for _ in range(2))
    down = nn.Pair(of(H, R, at=(("tp", "fsdp"),)), of(R, D, at=(None, "fsdp")))
    up = nn.LowRank(of(D, 2 * H, at=("fsdp", Split(("tp",), (H, H)))), up, of(dtype=torch.float32))
    return {"up": up, "down": nn.LowRank(of(H, D, at=(("tp", "fsdp"),)), (down,), of(dtype=torch.float32))}


def _trained(path):
    return not path.endswith("scale")


def gradients(mesh, save):
    """step(params, x) -> (reduced gradients of all but the scales, loss)."""
    layouts, axes = layouts_on(mesh), Axes(mesh)

    def block(x, w):
        gate, up = nn.column_parallel(x, w["up"], axes["tp"]).chunk(2, -1)
        return x + nn.row_parallel(torch.tanh(gate) * up, w["down"], axes["tp"])

    def loss_fn(trained, frozen, x):
        return step.layers(block, tree.merge(trained, frozen), layouts, axes, save)(x).square().sum() / B, {}

    def run(params, x):
        trained, frozen = tree.partition(params, _trained)
        (loss, _), grads = step.value_and_grad(loss_fn)(trained, frozen, x)
        grads = step.reduce_gradients(grads)
        return grads, psum(loss, axes[axes.data])

    return run


@pytest.mark.medium
@pytest.mark.parametrize(("mesh", "save"), each_value([Mesh(tp=2), Mesh(fsdp=2, tp=2)], ["mincut", None]))
def test_in_a_stack_of_one_s_own_factors_are_summed_over_tp(mesh, save):
    generator = torch.Generator().manual_seed(1)
    params = tree.map(lambda of: torch.randn(of.shape, generator=generator).to(of.dtype) / 3, layouts_on(Mesh()))
    x = torch.randn(B, 1, D, generator=generator, dtype=torch.float64)
    layouts, rows = layouts_on(mesh), Layout((B, 1, D), torch.float64, mesh, ("fsdp",))
    out = tree.partition(layouts, _trained)[0], None
    assert_parity(lambda mesh: gradients(mesh, save), mesh, params, x, layouts=(layouts, rows), out_layouts=out)
