"""The optimizers against torch.optim, and low-precision parameters against a float32 run."""

import pytest
import torch

from fmegatron import tree
from fmegatron.layout import Mesh
from fmegatron.optim import adamw, clip, cosine, global_norm, sgd
from fmegatron.tree import ArraySpec
from fmegatron.tree.arithmetic import cast


def random_tree(seed, dtype=torch.float64):
    generator = torch.Generator().manual_seed(seed)

    def draw(*shape):
        return torch.randn(shape, generator=generator, dtype=dtype)

    blocks = {"w": draw(3, 4, 5), "norm": draw(3, 4)}
    return {"embed": draw(7, 4), "blocks": blocks, "head_bias": draw(5), "scale": draw()}


SPECS = tree.specs(tree.map(lambda x: tuple(x.shape), random_tree(0)), Mesh(), dtype=torch.float64, stacked="blocks")


def grads_at(step, dtype=torch.float64):
    scale = 10.0 ** (step % 5 - 2)  # so that the moments see gradients of many sizes
    return tree.scale(random_tree(1000 + step, dtype), scale)


def torch_groups(params, weight_decay):
    leaves = tree.map(lambda x: x.clone().requires_grad_(), params)
    named = dict(zip(tree.paths(leaves), tree.leaves(leaves), strict=True))
    decayed = [x for path, x in named.items() if path in ("embed", "blocks/w")]
    rest = [x for path, x in named.items() if path not in ("embed", "blocks/w")]
    return leaves, [{"params": decayed, "weight_decay": weight_decay}, {"params": rest, "weight_decay": 0.0}]


def assert_like_torch(opt, make_reference, weight_decay, schedule=None, max_norm=None):
    params = tree.place(random_tree(0), SPECS)  # blocks are stacks of 3 layers
    leaves, groups = torch_groups(params, weight_decay)
    reference = make_reference(groups)
    state = opt.init(params)
    for step in range(20):
        grads = grads_at(step)
        for x, g in zip(tree.leaves(leaves), tree.leaves(grads), strict=True):
            x.grad = g.clone()
        if max_norm:
            norm = global_norm(grads)
            torch.testing.assert_close(
                torch.nn.utils.clip_grad_norm_(tree.leaves(leaves), max_norm), norm, rtol=1e-13, atol=0
            )
            grads = clip(grads, norm, max_norm)
        if schedule:
            for group in reference.param_groups:
                group["lr"] = schedule(step)
        reference.step()
        params, state = opt.update(grads, state, params)
        for path, x, y in zip(tree.paths(params), tree.leaves(params), tree.leaves(leaves), strict=True):
            assert torch.allclose(x, y.detach(), rtol=1e-12, atol=1e-12), f"{path} at step {step}"


@pytest.mark.parametrize(
    "b1, b2, eps, weight_decay", [(0.9, 0.95, 1e-8, 0.1), (0.0, 0.999, 1e-4, 0.0), (0.5, 0.0, 1e-8, 1.0)]
)
def test_adamw(b1, b2, eps, weight_decay):
    opt = adamw(3e-3, b1, b2, eps, weight_decay)
    assert_like_torch(opt, lambda groups: torch.optim.AdamW(groups, lr=3e-3, betas=(b1, b2), eps=eps), weight_decay)


def test_adamw_with_a_schedule_and_an_active_clip():
    schedule = cosine(1e-2, total=18, warmup=4, end=1e-3)
    opt = adamw(schedule)
    reference = lambda groups: torch.optim.AdamW(groups, betas=(0.9, 0.95))  # noqa: E731
    assert_like_torch(opt, reference, 0.1, schedule, max_norm=1.0)


@pytest.mark.parametrize(
    "momentum, nesterov, weight_decay", [(0.0, False, 0.0), (0.0, False, 0.1), (0.9, False, 0.1), (0.9, True, 0.1)]
)
def test_sgd(momentum, nesterov, weight_decay):
    opt = sgd(1e-2, momentum, nesterov, weight_decay)
    reference = lambda groups: torch.optim.SGD(groups, lr=1e-2, momentum=momentum, nesterov=nesterov)  # noqa: E731
    assert_like_torch(opt, reference, weight_decay)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("make", [adamw, sgd], ids=["adamw", "sgd"])
def test_low_precision_parameters_are_the_rounded_float32_run(make, dtype):
    """With the same gradients the master copy is bitwise the float32 parameters: no update is lost."""
    opt = make(1e-5)  # below half a unit in the last place of bf16 for most elements
    start = cast(random_tree(0), dtype)
    low, wide = start, cast(start, torch.float32)
    low_state, wide_state = opt.init(low), opt.init(wide)
    assert "master" in low_state and "master" not in wide_state
    for step in range(20):
        grads = cast(grads_at(step), dtype)
        low, low_state = opt.update(grads, low_state, low)
        wide, wide_state = opt.update(cast(grads, torch.float32), wide_state, wide)
        for x, master, y in zip(*map(tree.leaves, (low, low_state["master"], wide)), strict=True):
            assert torch.equal(master, y) and torch.equal(x, y.to(dtype))


def test_float32_gradients_of_low_precision_parameters_are_not_rounded():
    opt, params = sgd(1.0), {"w": torch.zeros(1, dtype=torch.bfloat16)}
    _, state = opt.update({"w": torch.tensor([1 + 2**-20])}, opt.init(params), params)
    assert state["master"]["w"].item() == -(1 + 2**-20)


def test_only_low_precision_leaves_have_a_master():
    params = {"norm": torch.ones(2), "w": torch.ones(2, dtype=torch.bfloat16)}
    opt = adamw(1e-3)
    state = opt.init(params)
    assert [path for path in tree.paths(state) if path.startswith("master")] == ["master/w"]
    _, state = opt.update(params, state, params)
    assert [path for path in tree.paths(state) if path.startswith("master")] == ["master/w"]
    assert not any(isinstance(leaf, ArraySpec) for leaf in tree.leaves(state))
