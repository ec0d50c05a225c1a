"""Attention over one factoring of the ranks and experts over another, on one mesh of 8 simulated ranks.

Letters: B rows, S positions, D features, H heads, K head width, E experts, F hidden width of an expert.
"""

import itertools
from dataclasses import replace

import pytest
import torch

from fmegatron import tree
from fmegatron.collectives import Axes, axis_index, enter, psum, shard
from fmegatron.layout import Layout, Mesh
from fmegatron.layout.folding import folded
from fmegatron.nn import grouped_matmul
from fmegatron.nn.attention_masks import Causal
from fmegatron.nn.context_parallel import ring_attention
from fmegatron.nn.moe import dropless, expert_weights
from fmegatron.nn.routing import Routing
from fmegatron.step import check, value_and_grad
from fmegatron.testing import parity
from tests.pairs import few

B, S, D, H, K, E, F = 8, 16, 10, 4, 6, 8, 12
F64 = torch.float64
ONE = folded(Mesh(dp=1, cp=1, tp=1), Mesh(edp=1, ep=1, etp=1))
FOLDS = {
    "the same boundaries": folded(Mesh(dp=2, cp=2, tp=2), Mesh(edp=2, ep=2, etp=2)),
    "experts over cp and tp": folded(Mesh(dp=2, cp=2, tp=2), Mesh(edp=2, ep=4, etp=1)),
    "experts over a part of dp": folded(Mesh(dp=4, cp=1, tp=2), Mesh(edp=2, ep=2, etp=2)),
    "experts over all": folded(Mesh(dp=2, cp=2, tp=2), Mesh(edp=1, ep=8, etp=1)),
}


def names(fold):
    """(dp, cp, tp, ep, etp, axes of a sequence) in axes of the mesh: positions are dealt over tp if experts are."""
    dp, cp, tp = (fold.first[name] for name in ("dp", "cp", "tp"))
    ep, etp = fold.second["ep"], fold.second["etp"]
    return dp, cp, tp, ep, etp, cp + tuple(name for name in tp if name in ep)


def layouts(fold):
    dp, cp, tp, ep, etp, _ = names(fold)

    def at(shape, *spec):
        return Layout(shape, F64, fold.mesh, [one or None for one in spec])

    weights = {"qkv": at((3, D, H * K), (), (), tp), "out": at((H * K, D), tp), "router": at((D, E))}
    weights |= {"up": at((E, D, F), ep, (), etp), "down": at((E, F, D), ep, etp)}
    return weights, {"x": at((B, S, D), dp, cp), "target": at((B, S, D), dp, cp)}


def make_step(fold):
    axes = Axes(fold.mesh)
    dp, cp, tp, ep, etp, sequence = (axes[one] for one in names(fold))
    over_tp = axes[tuple(name for name in tp.names if name in sequence.names)]  # size 1 where tp deals no positions
    dealt = axes[(*dp.names, *sequence.names)]

    def loss_fn(w, b):
        q, k, v = ((enter(b["x"], tp) @ one).unflatten(-1, (-1, K)) for one in w["qkv"].unbind(0))
        positions = torch.arange(S // cp.size) + axis_index(cp) * (S // cp.size)
        o_BSHK = ring_attention(q, k, v, Causal(positions), cp)
        h_BSD = b["x"] + psum(o_BSHK.flatten(2) @ w["out"], tp)
        h_BSD, target = shard(h_BSD, over_tp, 1), shard(b["target"], over_tp, 1)
        router = enter(w["router"], over_tp)
        probs = (h_BSD @ router).softmax(-1)
        own = expert_weights({name: w[name] for name in ("up", "down")}, ep, dealt)

        def apply(own, x_MD, ends_X, expert_M):
            h_MF = torch.tanh(grouped_matmul(enter(x_MD, etp), own["up"], ends_X))
            return psum(grouped_matmul(h_MF, own["down"], ends_X), etp)

        y_BSD, stats = dropless(h_BSD, Routing(*probs.topk(2, -1), probs), own, apply, ep, dp, sequence)
        loss = (h_BSD + y_BSD - target).square().sum() / (B * S)
        return psum(loss, over_tp), {"loss": psum(loss.detach(), dealt), "sent": psum(stats["sent"], dealt)}

    def step(w, b):
        (_, metrics), grads = value_and_grad(loss_fn)(w, b)
        rest = axes[tuple(name for name in dealt.names if name not in ep.names)]
        outside = axes[(*dp.names, *cp.names)]
        grads = {name: psum(g, rest if name in ("up", "down") else outside) for name, g in grads.items()}
        return tree.subtract(w, tree.scale(grads, 0.1)), {"loss": metrics["loss"]}

    return step


def values():
    g = torch.Generator().manual_seed(2)
    return tuple(
        {n: torch.randn(x.shape, generator=g, dtype=F64) / 2 for n, x in part.items()} for part in layouts(ONE)
    )


@pytest.mark.medium
@pytest.mark.parametrize("name", few(1, [(name,) for name in FOLDS], FOLDS))
def test_equal_to_one_rank(name):
    fold = FOLDS[name]
    assert fold.mesh.size == 8
    report = check(make_step(fold), *layouts(fold))
    assert report.ok, str(report)
    # `parity` builds the step for one rank from a mesh of the same axes, each of size 1
    found = parity(lambda mesh: make_step(replace(fold, mesh=mesh)), fold.mesh, *values(),
                   layouts=layouts(fold), steps=2)  # fmt: skip
    assert found.ok, str(found)


# ---- the refinement --------------------------------------------------------------------------------------------------
def test_groups_of_both_are_groups_of_the_refinement():
    pairs = [
        (Mesh(dp=4, tp=2), Mesh(edp=2, ep=2, etp=2)),
        (Mesh(pp=2, dp=4, tp=2), Mesh(pp=2, edp=2, ep=4)),
        (Mesh(dp=6, tp=4), Mesh(edp=3, ep=8)),
        (Mesh(a=1, b=12), Mesh(c=12, d=1)),
        (Mesh(dp=8, tp=3), Mesh(edp=2, ep=2, etp=6)),
    ]
    for first, second in pairs:
        fold = folded(first, second)
        for mesh, names in ((first, fold.first), (second, fold.second)):
            for count in (1, 2):
                for axes in itertools.permutations(mesh.names, count):
                    joint = tuple(name for axis in axes for name in names[axis])
                    assert fold.mesh.groups(joint) == mesh.groups(axes), (fold, axes)


def test_names():
    fold = folded(Mesh(dp=8, tp=2), Mesh(edp=2, ep=2, etp=4))
    assert (fold.mesh, fold.first["dp"]) == (Mesh(edp=2, ep=2, dp_etp=2, tp=2), ("edp", "ep", "dp_etp"))
    assert fold.second["etp"] == ("dp_etp", "tp")


@pytest.mark.parametrize(
    "first, second, says",
    [
        (Mesh(a=2, b=3), Mesh(c=3, d=2), "axes cross: one ends after 2 ranks, one after 3"),
        (Mesh(a=2), Mesh(c=3), "wanted two meshes of the same ranks"),
        (Mesh(a=2, b=2).view(order=("b", "a"), c=4), Mesh(d=4), "each in the order of its axes"),
    ],
)
def test_errors(first, second, says):
    with pytest.raises(ValueError, match=says):
        folded(first, second)
