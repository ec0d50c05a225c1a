"""What is right on the CPU and dies on the first CUDA tensor is found by check and simulated ranks, with its line."""

import re

import pytest
import torch
import torch.nn.functional as F

from fmegatron import step, tree
from fmegatron.collectives import Axes, axis_index, psum
from fmegatron.layout import DataParallel, Layout, Mesh
from fmegatron.step import tracing
from fmegatron.step.layer import compiled_layer
from fmegatron.testing import parity, simulate
from tests.step.tiny import line_of

MESH = Mesh(dp=2)
STATE = {"w": Layout((8, 4), torch.float32, MESH, (None, None))}
ROWS = {"x": DataParallel().batch_layout((16, 8), torch.float32, MESH)}


PER_ROW = Layout((16,), torch.float32, MESH, ("dp",))


def own_labels(p, b):
    own = torch.arange(len(b["x"])) % 4  # HERE own_labels
    return F.cross_entropy(b["x"] @ p["w"], own, reduction="none")


def mask(p, b):
    return (b["x"] @ p["w"]).sum(1) * torch.ones(len(b["x"]))  # HERE mask


def constant(p, b):
    return (b["x"] @ p["w"] * torch.tensor([1.0, 2.0, 3.0, 4.0])).sum(1)  # HERE constant


def by_name(p, b):
    return (b["x"] @ p["w"] + torch.zeros(4, device="cpu")).sum(1)  # HERE by_name


def moved_by_name(p, b):
    return (b["x"].cpu() @ p["w"] + b["x"][:, :4]).sum(1)  # HERE moved_by_name


def in_place(p, b):
    out = torch.zeros(8, 4)  # HERE in_place
    out += b["x"] @ p["w"]
    return out.sum(1)


def joined(p, b):
    return torch.cat([b["x"] @ p["w"], torch.zeros(8, 1)], 1).sum(1)  # HERE joined


def stacked_numbers(p, b):
    two = torch.tensor(2.0)  # HERE stacked_numbers
    return torch.stack([(b["x"] @ p["w"]).sum(), two * 2]).sum() * b["x"].sum(1)


def number_that_is_sent(p, b):
    rows = torch.tensor(float(len(b["x"])))  # HERE number_that_is_sent
    return (b["x"] @ p["w"]).sum(1) / psum(rows, Axes(MESH)["dp"])


def moved_and_sent(p, b):
    total = (b["x"] @ p["w"]).sum().cpu()  # HERE moved_and_sent
    return psum(total, Axes(MESH)["dp"]) * b["x"].sum(1)


def gradient_that_is_given(p, b):
    w = p["w"].detach().requires_grad_()
    y = b["x"] @ w * 2
    return b["x"] @ torch.autograd.grad(y, w, torch.ones(8, 4))[0].sum(1)  # HERE gradient_that_is_given


WRONG = [own_labels, mask, constant, by_name, moved_by_name, in_place, joined]
WRONG += [stacked_numbers, number_that_is_sent, moved_and_sent, gradient_that_is_given]


def of_an_argument(p, b):
    own = torch.arange(len(b["x"]), device=b["x"].device) % 4
    return F.cross_entropy(b["x"] @ p["w"], own, reduction="none")


def moved(p, b):
    return (b["x"] @ p["w"] + torch.ones(4).to(b["x"].device)).sum(1)


def an_index(p, b):
    return (b["x"] @ p["w"])[torch.arange(3)].sum(1)


def without_dims(p, b):
    return (b["x"] @ p["w"] * torch.tensor(2.0)).sum(1)


def like(p, b):
    return (b["x"] @ p["w"] + b["x"].new_ones(4) + torch.zeros_like(b["x"][0, :4])).sum(1)


def own_index(p, b):
    return (b["x"] @ p["w"]).sum(1) * axis_index(Axes(MESH)["dp"])


def number_of_an_argument(p, b):
    rows = torch.tensor(float(len(b["x"])), device=b["x"].device)
    return (b["x"] @ p["w"]).sum(1) / psum(rows, Axes(MESH)["dp"])


def gradient_without_dims(p, b):
    w = p["w"].detach().requires_grad_()
    return b["x"] @ torch.autograd.grad((b["x"] @ w).sum(), w, torch.tensor(2.0))[0].sum(1)


RIGHT = [of_an_argument, moved, an_index, without_dims, like, own_index, number_of_an_argument, gradient_without_dims]
name = lambda f: f.__name__  # noqa: E731


@pytest.mark.parametrize("f", WRONG, ids=name)
def test_wrong_steps_are_found(f):
    report = step.check(f, STATE, ROWS)
    assert report.on_second_device.startswith(f"{line_of(__file__, f.__name__)}: made without a device"), report
    assert report.on_second_device in str(report) and not any("device" in one.fix for one in report.findings)
    silenced = step.check(f, STATE, ROWS, allow={line_of(__file__, f.__name__): "never leaves the CPU"})
    assert not silenced.on_second_device


@pytest.mark.parametrize("f", RIGHT, ids=name)
def test_right_steps_pass(f):
    assert not step.check(f, STATE, ROWS).on_second_device


def test_simulated_ranks_say_it():
    values = {"w": torch.ones(8, 4)}, {"x": torch.ones(16, 8)}
    found = parity(lambda mesh: mask, MESH, *values, layouts=(STATE, ROWS), out_layouts=PER_ROW)
    assert re.search(rf"{line_of(__file__, 'mask')}: made without a device", str(found))
    right = simulate(of_an_argument, MESH, *values, layouts=(STATE, ROWS))
    assert right.on_second_device == ""


def test_a_step_that_makes_nothing_is_traced_once(monkeypatch):
    args = tree.map(lambda of: torch.empty(of.local_shape(0)), (STATE, ROWS))
    assert tracing.trace(of_an_argument, args).made_here == []
    assert tracing.trace(mask, args).made_here == [line_of(__file__, "mask")]


def test_what_a_layer_joins_is_made_where_its_arguments_are():
    """A layer's graph is run again while it is cut: with lists of its own kind, whose tensors are arguments, too."""
    layer = compiled_layer("mincut")(lambda x, w: torch.cat([x * w, x], -1).sum(-1, keepdim=True) + x)
    traced = step.trace(
        lambda w, x: torch.autograd.grad(layer(x, w.requires_grad_()).sum(), w), (torch.ones(3), torch.ones(2, 3))
    )
    assert not traced.made_here
