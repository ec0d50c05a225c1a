"""A data-parallel step under every strategy, written by hand: three layouts per leaf and the reshards between them.

A tied embedding, an MLP that tp splits, odd leaves; two microbatches, uneven masks, a loss scale, steps that are not
finite skipped, a clip, AdamW on the optimizer's shards, norms as metrics. The mutants of `of_data_parallel.py` are this
file with one line changed.
"""

import torch

from fmegatron.collectives import Axes, enter, psum, reshard
from fmegatron.layout import DataParallel, Layout, Mesh
from fmegatron.step import value_and_grad
from fmegatron.step.reduce import raw_gradient_layout

V, D, F, B, S = 24, 8, 20, 32, 6
SHAPES = {
    "table_VD": ((V, D), ("fsdp", None)),
    "norm_D": ((D,), ("fsdp",)),
    "w1_DF": ((D, F), ("fsdp", "tp")),
    "w2_FD": ((F, D), ("tp", "fsdp")),
    "ranges": ((6, 2), ()),
    "odd": ((5,), ()),
    "gain": ((), ()),
}
STRATEGIES = {
    "replicated": DataParallel.replicated(),
    "zero1": DataParallel.zero1(),
    "zero2": DataParallel.zero2(),
    "zero3": DataParallel.zero3(),
    "hsdp": DataParallel.hsdp(),
    "hybrid": DataParallel.hybrid(),
}
STEPS = tuple(STRATEGIES)
MICROBATCHES = 2


def base(mesh: Mesh) -> dict:
    """What the model's rules say of the leaves."""
    return {k: Layout(shape, torch.float64, mesh, spec) for k, (shape, spec) in SHAPES.items()}


def place(name: str, layouts: dict) -> dict:
    """The three layouts of each leaf; ZeRO-1 keeps the state of one of them in ranges of the flattened leaf."""
    placed = {k: STRATEGIES[name].place(layout) for k, layout in layouts.items()}
    if name == "zero1":
        whole = placed["ranges"].params
        placed["ranges"] = placed["ranges"]._replace(optim=whole.replace(flat=("dp", "fsdp")))
    return placed


def layouts(mesh: Mesh, name: str) -> tuple:
    """Layouts of the arguments (state, batch)."""
    placed = place(name, base(mesh))
    own = {k: x.optim for k, x in placed.items()}
    number = Layout((), torch.float64, mesh)
    state = {"p": {k: x.params for k, x in placed.items()}, "m": own, "v": own, "scale": number, "skipped": number}
    tokens = Layout((B, S), torch.int64, mesh, (("dp", "fsdp"), None))
    return state, {"tokens": tokens, "labels": tokens, "mask": tokens.replace(dtype=torch.float64)}


def values(name: str) -> tuple:
    """Global arguments; the mask has other counts on every rank and in every microbatch."""
    generator = torch.Generator().manual_seed(0)

    def draw(low):
        return {k: torch.rand(s, generator=generator, dtype=torch.float64) + low for k, (s, _) in SHAPES.items()}

    tokens = torch.randint(0, V, (B, S), generator=generator)
    mask = (torch.arange(S) < torch.randint(1, S, (B, 1), generator=generator)).double()
    state = {"p": draw(-0.4), "m": draw(-0.5), "v": draw(0.1)}
    state |= {"scale": torch.tensor(8.0).double(), "skipped": torch.tensor(2.0).double()}
    return state, {"tokens": tokens, "labels": tokens.roll(-1, 1), "mask": mask}


def make_step(mesh: Mesh, name: str):
    """step(state, batch) -> (state, metrics) over the symbolic axes dp, fsdp, tp of a mesh."""
    axes, strategy, whole = Axes(mesh), STRATEGIES[name], base(mesh)
    data, tp = axes[strategy.axes], axes["tp"]
    placed = place(name, whole)
    whole = {k: layout.without(strategy.axes) for k, layout in whole.items()}

    def loss_fn(params, batch, count, scale):
        w = {k: reshard(x, placed[k].params, whole[k], axes) for k, x in params.items()}
        x_BSD = w["table_VD"][batch["tokens"]]
        u_BSD = enter(x_BSD * torch.rsqrt(x_BSD.square().mean(-1, keepdim=True) + 1e-6) * w["norm_D"], tp)
        x_BSD = x_BSD + psum(torch.tanh(u_BSD @ w["w1_DF"]) @ w["w2_FD"], tp)
        logits_BSV = x_BSD @ w["table_VD"].t() * w["gain"] * w["ranges"].cos().sum()
        logits_BSV = logits_BSV - logits_BSV.detach().amax(-1, keepdim=True)
        chosen_BS = logits_BSV.gather(-1, batch["labels"][..., None]).squeeze(-1)
        nll_BS = logits_BSV.exp().sum(-1).log() - chosen_BS + 0.1 * w["odd"].square().sum()
        return (nll_BS * batch["mask"]).sum() / count * scale

    def squared_norm(tensors):
        total = torch.zeros((), dtype=torch.float64)
        for k, x in tensors.items():
            split = tuple(name for name in mesh.names if name in placed[k].optim.sharded)
            total = total + (psum(x.square().sum(), axes[split]) if split else x.square().sum())
        return total

    def step(state, batch):
        scale = state["scale"]
        count = psum(batch["mask"].sum(), data)
        loss, total = torch.zeros((), dtype=torch.float64), None
        for rows in zip(*(x.chunk(MICROBATCHES, 0) for x in batch.values()), strict=True):
            part = dict(zip(batch, rows, strict=True))
            (one, _), raw = value_and_grad(loss_fn)(state["p"], part, count, scale)
            at = {k: raw_gradient_layout(placed[k].params, strategy.axes) for k in raw}
            grads = {k: reshard(g, at[k], placed[k].grads, axes) for k, g in raw.items()}
            total = grads if total is None else {k: total[k] + g for k, g in grads.items()}
            loss = loss + one
        grads = {k: reshard(g, placed[k].grads, placed[k].optim, axes) for k, g in total.items()}
        grads = {k: g / scale for k, g in grads.items()}
        norm = squared_norm(grads).sqrt()
        finite = norm.isfinite()
        grads = {k: g * torch.clamp(0.02 / (norm + 1e-6), max=1.0) for k, g in grads.items()}
        own = {k: reshard(p, placed[k].params, placed[k].optim, axes) for k, p in state["p"].items()}
        m = {k: 0.9 * state["m"][k] + 0.1 * g for k, g in grads.items()}
        v = {k: 0.95 * state["v"][k] + 0.05 * g.square() for k, g in grads.items()}
        new = {k: p - 0.05 * (m[k] / (v[k].sqrt() + 1e-3) + 0.1 * p) for k, p in own.items()}
        new = {k: torch.where(finite, p, own[k]) for k, p in new.items()}
        moved = squared_norm({k: p - own[k] for k, p in new.items()}).sqrt()
        p = {k: reshard(x, placed[k].optim, placed[k].params, axes) for k, x in new.items()}
        m = {k: torch.where(finite, x, state["m"][k]) for k, x in m.items()}
        v = {k: torch.where(finite, x, state["v"][k]) for k, x in v.items()}
        kept = {"scale": torch.where(finite, scale, scale / 2), "skipped": state["skipped"] + ~finite}
        metrics = {"loss": psum(loss, data) / scale, "tokens": count, "grad_norm": norm, "update_norm": moved}
        return {"p": p, "m": m, "v": v, **kept}, metrics

    return step
