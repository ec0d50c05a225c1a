"""A train step of one attention layer over a sequence that is split: what the tests of context parallelism share.

Letters: B rows, S positions, D features, H/G query/kv heads, K head width.
"""

from __future__ import annotations

import types

import torch

from fmegatron import step, tree
from fmegatron.collectives import Axes, all_gather, enter, psum
from fmegatron.layout import Layout, Mesh
from fmegatron.nn import context_parallel
from fmegatron.nn.attention_masks import Causal

F64 = torch.float64
B, S, D, H, G, K = 4, 48, 24, 8, 4, 6
SEQ = ("cp", "cpi")  # cpi: the inner axis of two levels
LENGTHS = (17, 20, 11)  # of packed documents: the second and the third begin inside of a rank's part


def layouts(mesh: Mesh):
    """Of (weights, batch)."""

    def at(shape, dtype, *spec):
        return Layout(shape, dtype, mesh, spec)

    weights = {name: at((D, heads * K), F64, "fsdp", "tp") for name, heads in (("q", H), ("k", G), ("v", G))}
    weights["o"] = at((H * K, D), F64, "tp", "fsdp")
    batch = {name: at((B, S, D), F64, "fsdp", SEQ) for name in ("x", "target")}
    batch |= {name: at((B, S), torch.int64, "fsdp", SEQ) for name in ("positions", "documents")}
    return weights, batch


def values(order: torch.Tensor | None = None, packed: bool = True):
    """Global arguments, positions of the sequence in an order. packed: rows of several documents, else one each."""
    g = torch.Generator().manual_seed(1)
    weights = {name: torch.randn(x.shape, generator=g, dtype=F64) / 3 for name, x in layouts(Mesh(cpi=1))[0].items()}
    x, target = (torch.randn(B, S, D, generator=g, dtype=F64) for _ in range(2))
    positions, documents = torch.arange(S).repeat(B, 1), torch.zeros(B, S, dtype=torch.int64)
    if packed:
        positions[0] = torch.cat([torch.arange(n) for n in LENGTHS])
        documents[0] = torch.cat([torch.full((n,), i) for i, n in enumerate(LENGTHS)])
        documents[1, S // 2 :], positions[1, S // 2 :] = 1, torch.arange(S // 2)  # begins where another rank does
    batch = {"x": x, "target": target, "positions": positions, "documents": documents}
    return weights, {name: v if order is None else v[:, order].contiguous() for name, v in batch.items()}


def attend(forms: types.ModuleType, form: str, q, k, v, at, axes: Axes, window: int | None):
    """One of the forms, by name."""
    cp, seen = axes[SEQ], Causal(*at, window, form.endswith("balanced"))
    match form:
        case "ring":
            return forms.ring_attention(q, k, v, seen, cp)
        case "balanced":
            return forms.ring_attention(q, k, v, seen, cp)
        case "gathered":
            return forms.gathered_attention(q, k, v, seen, cp)
        case "ulysses":
            return forms.ulysses_attention(q, k, v, seen, cp)
        case "two levels" | "two levels, balanced":
            return forms.two_level_attention(q, k, v, seen, axes)
    raise AssertionError(form)


def make_step(mesh: Mesh, form: str, window: int | None = None, packed: bool = True, forms=context_parallel):
    """step(weights, batch) -> (weights, metrics), plain SGD. forms: the module, or a mutant of it."""
    axes = Axes(mesh)
    tp, fsdp = axes["tp"], axes["fsdp"]

    def loss_fn(w, b):
        w = {name: all_gather(x, fsdp, 1 if name == "o" else 0) for name, x in w.items()}
        x_BSD = enter(b["x"], tp)
        q, k, v = ((x_BSD @ w[name]).unflatten(-1, (-1, K)) for name in "qkv")
        at = b["positions"], b["documents"] if packed else None
        o_BSHK = attend(forms, form, q, k, v, at, axes, window)
        y_BSD = psum(o_BSHK.flatten(2) @ w["o"], tp)
        loss = (y_BSD * b["target"] + y_BSD.square()).sum() / (B * S)
        return loss, {"loss": psum(loss.detach(), axes["fsdp", *SEQ])}

    def train_step(w, b):
        (_, metrics), grads = step.value_and_grad(loss_fn)(w, b)
        grads = {name: psum(g, axes[SEQ]) for name, g in grads.items()}
        return tree.subtract(w, tree.scale(grads, 0.5)), metrics

    return train_step
