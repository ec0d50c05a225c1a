"""A Description with a pipeline, alone: what it prints, where its stacks lie, itself on one rank."""

import pytest
import torch

from fmegatron import optim, plan, step, testing, tree
from fmegatron.layout import Mesh

OPTIONS = step.Pipelining("zb_v", "2,1,1,1")


def describe(mesh: Mesh) -> step.Description:
    shapes = {"first": (3, 4), "blocks": {"up": (5, 4, 4)}}
    specs = tree.specs(shapes, mesh, stacked=[("blocks", OPTIONS.split(mesh, 5))], strategy="zero3")

    def loss_fn(params, batch):
        x = batch["x"] @ params["first"]
        for n, w in enumerate(params["blocks"]):
            x = step.stage(x, n)
            x = x + torch.tanh(x @ w["up"])
        return step.mean((x - batch["y"]).square().sum(), float(x.numel()))

    rows = {"x": ((16, 3), torch.float32), "y": ((16, 4), torch.float32)}
    return step.build(loss_fn, optim.adamw(1e-2), specs, rows, microbatches=OPTIONS.of(4))


def test_stacks_lie_with_their_stages():
    up = describe(Mesh(pp=2)).layouts.params["blocks"]["up"]
    assert up.padded and up.local_shape(0) == up.local_shape(1) == (3, 4, 4)  # of 2 + 1 and 1 + 1 layers
    assert [[s.start for s in up.segments(rank, 0)] for rank in range(2)] == [[0, 4], [2]]  # adjacent ones are one
    assert describe(Mesh()).layouts.params["blocks"]["up"].local_shape(0) == (5, 4, 4)


def test_the_pipeline_is_shown():
    text = str(describe(Mesh(pp=2)).pipeline)
    assert text.startswith("ZB-V p=2 m=4: ") and "% idle" in text and "blocks of each stage: 2,1,1,1" in text
    assert "balanced" in str(step.build(lambda p, b: None, optim.sgd(0.1), tree.specs({"w": (4, 4)}, Mesh(pp=2),
                             stacked="w"), {"x": (4, 2)}, microbatches=2).pipeline)  # fmt: skip


def test_on_other_meshes():
    of = describe(Mesh(pp=2, fsdp=2))
    one = of.on(Mesh(pp=1, fsdp=1))
    assert one.mesh.size == 1 and one.microbatches == 4 and of.on(of.mesh) is of
    with pytest.raises(ValueError, match="describe the step anew"):
        of.on(Mesh(pp=4))
    with pytest.raises(ValueError, match="without `on`"):
        testing.parity(step.Description(print, of.state, of.batch), of.mesh)
    with pytest.raises(ValueError, match="got no arrays"):
        plan.exact(print)


@pytest.mark.slow
def test_parity_of_a_description_alone():
    testing.assert_parity(describe(Mesh(pp=2, fsdp=2)), Mesh(pp=2, fsdp=2), steps=2)
