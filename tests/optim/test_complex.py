"""Complex parameters: norms and dot products are right, optimizers refuse them, one's own gradient descent works."""

import pytest
import torch

from fmegatron import optim, tree
from fmegatron.collectives import Axes
from fmegatron.layout import Layout, Mesh
from fmegatron.step import build_train_step, state_specs, value_and_grad
from fmegatron.tree.arithmetic import dot, squared_norm
from tests.optim.table import EVERY

X = torch.tensor([3 + 4j, 1 - 2j], dtype=torch.complex128)


def test_norms_count_both_parts():
    assert squared_norm({"x": X}).item() == pytest.approx(30.0, rel=1e-15)
    assert optim.global_norm({"x": X, "y": torch.tensor([2.0])}).item() == pytest.approx(34**0.5, rel=1e-7)
    y = torch.tensor([1j, 2 + 0j], dtype=torch.complex128)
    assert dot({"x": X}, {"x": y}).item() == pytest.approx((X * y.conj()).sum().real.item(), rel=1e-15)
    assert squared_norm({"x": X.to(torch.complex64)}).dtype == torch.float32


@pytest.mark.parametrize("row", EVERY.values(), ids=EVERY)
@pytest.mark.parametrize("dtype", [torch.complex64, torch.complex128], ids=str)
def test_every_optimizer_refuses_them(row, dtype):
    specs = {
        "blocks": {"w": tree.ArraySpec(Layout((4, 4), dtype, Mesh()))},
        "real": tree.ArraySpec(Layout((4,), torch.float32, Mesh())),
    }
    params = {"blocks": {"w": torch.ones(4, 4, dtype=dtype)}, "real": torch.ones(4)}
    for given in (specs, params):
        with pytest.raises(ValueError, match="optimizer: blocks/w: got torch.complex.*, wanted a real .*view_as_real"):
            (row.alone or row.make)().init(given)


def test_a_train_step_is_refused_when_it_is_built():
    specs = {"w": tree.ArraySpec(Layout((4,), torch.complex64, Mesh()))}
    with pytest.raises(ValueError, match="optimizer: w: got torch.complex64"):
        build_train_step(lambda p, b: p["w"].abs().sum(), optim.adamw(1e-3), tree.layouts(specs), Axes(Mesh()))
    with pytest.raises(ValueError, match="optimizer: w: got torch.complex64"):
        state_specs(specs, optim.adamw(1e-3))


def test_what_is_not_trained_may_be_complex():
    """A table of rotations, say, that a group freezes."""
    opt = optim.grouped(1e-2, [("angles", optim.Group(frozen=True))], adam=optim.scale_by_adam())
    params = {"angles": X, "w": torch.ones(3)}
    new, _ = opt.update({"angles": None, "w": torch.ones(3)}, opt.init(params), params)
    assert new["angles"] is X and not torch.equal(new["w"], params["w"])


def test_gradient_descent_of_ones_own():
    """torch's gradient of a real loss is the direction of steepest ascent, so p - lr·g descends."""
    params = {"w": X.clone()}
    losses = []
    for _ in range(20):
        (loss, _), grads = value_and_grad(lambda p: (p["w"] - (1 + 1j)).abs().square().sum())(params)
        params = tree.subtract(params, tree.scale(grads, 0.2))
        losses.append(loss.item())
    assert losses[-1] < 1e-3 * losses[0]
