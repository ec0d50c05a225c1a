"""Attention in compiled layers, by each policy, in microbatches, under aot_eager: trains as its definition does."""

import pytest
import torch

from fmegatron import optim, step, tree
from fmegatron.layout import Mesh
from fmegatron.nn import tiled_attention
from fmegatron.nn.dense_attention import attention
from tests.nn.test_attention_guest import definition

B, S, H, K, D, L = 4, 12, 4, 6, 24, 2
SHAPES = {"g": (D,), "blocks": {"q": (L, D, H * K), "kv": (L, D, 2 * 2 * K), "o": (L, H * K, D), "sinks": (L, H)}}
POLICIES = ["mincut", "inputs", "all", 0.5, None]
OPTIONS = {
    "sinks": ({}, True),
    "cap": ({"softcap": 1.5}, False),
    "all": ({"softcap": 2.0, "scale": 0.3}, True),
    "scale": ({"scale": 0.6}, False),
}


def block_of(attend, how, sinks):
    def block(x, w, mask):
        q, kv = (x @ w["q"]).unflatten(-1, (H, K)), (x @ w["kv"]).unflatten(-1, (4, K))
        k, v = kv.split(2, 2)
        return x + attend(q, k, v, mask, w["sinks"] if sinks else None, **how).flatten(2) @ w["o"]

    return block


def ours(q, k, v, mask, sinks, **how):
    return attention(q, k, v, mask, sinks_H=sinks, **how)


def theirs(q, k, v, mask, sinks, scale=None, softcap=None):
    return definition(q, k, v, mask, scale, softcap, sinks)


def batch():
    draw = torch.Generator().manual_seed(1)
    mask = torch.rand(B, S, S, generator=draw) < 0.5
    mask[0, 3] = False
    mask[2] = False
    return {"x": torch.randn(B, S, D, generator=draw, dtype=torch.float64), "mask": mask}


def trained(attend, how, sinks, save, microbatches, backend):
    mesh = Mesh()
    specs = tree.specs(SHAPES, mesh, init=tree.Normal(0.4), dtype=torch.float64, stacked="blocks")

    def loss_fn(w, b):
        y = w["blocks"].run(block_of(attend, how, sinks), b["x"] * w["g"], b["mask"], save=save)
        return step.mean(y.square().sum(), y.numel())

    rows = {name: (tuple(x.shape), x.dtype) for name, x in batch().items()}
    described = step.build(loss_fn, optim.sgd(0.1), specs, rows, microbatches=microbatches)
    state, run = tree.init(described.state, key=0, rank=0), described.function
    if backend:
        run = step.jit(run, donate=0, backend=backend)
    for _ in range(2):
        state, metrics = run(state, batch())
    return state.params["blocks"], metrics["loss"]


CASES = [(o, save, tile, n) for o in OPTIONS for save in POLICIES for tile in (5, 1024) for n in (1, 2)]
FIRST = ("all", 0.5, 5, 2)  # torch measures ops for a share of the memory, in the trace of a microbatch too


@pytest.mark.medium
@pytest.mark.parametrize(
    "option, save, tile, microbatches",
    [pytest.param(*c, id=f"{c}", marks=() if c == FIRST else pytest.mark.slow) for c in CASES],
)
def test_layers(option, save, tile, microbatches, monkeypatch):
    monkeypatch.setattr(tiled_attention, "_TILE", tile)
    how, sinks = OPTIONS[option]
    got, loss = trained(ours, how, sinks, save, microbatches, "aot_eager")
    want, wanted = trained(theirs, how, sinks, None, 1, None)
    torch.testing.assert_close(loss, wanted, rtol=1e-11, atol=0)
    for name, x in want.items():
        torch.testing.assert_close(got[name], x, rtol=1e-10, atol=1e-12, msg=lambda m, name=name: f"{name}: {m}")
