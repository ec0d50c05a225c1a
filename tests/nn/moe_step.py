"""Steps with experts on several meshes: routers, exchange, gated experts, losses, plain SGD.

Letters: B batch, S sequence, D width, F hidden, E experts. The mutants of `moe_mutants.py` are this file, `nn/moe.py`
or `nn/routing.py` with one line changed.
"""

import types
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from fmegatron.collectives import Axes, all_gather, enter, psum
from fmegatron.layout import Layout, Mesh, Split
from fmegatron.nn import Router, grouped_matmul, moe
from fmegatron.nn import routing as router
from fmegatron.step import remat, value_and_grad

B, S, D, FF, E = 8, 8, 6, 14, 8
DATA = ("dp", "fsdp", "ep")


@dataclass(frozen=True)
class Setting:
    """A step: its mesh, which axes hold experts and which split the sequence, its router; room."""

    mesh: Mesh
    ep: tuple = ("ep",)
    sequence: tuple = ()
    router: Router = Router(E, 3)
    rows: int | None = None
    capacity: int | None = None
    chunks: int = 1
    pair_rows: int | None = None
    dtype: torch.dtype = torch.float64


V3 = Router(E, 3, "sigmoid", normalised=True, scale=2.5, groups=4, top_groups=2, group_best=2)
SETTINGS = {
    "ep2": Setting(Mesh(ep=2)),
    "ep4": Setting(Mesh(ep=4), router=Router(E, 2, normalised=True)),
    "dp2 ep2": Setting(Mesh(dp=2, ep=2), router=V3),
    "ep2 tp2": Setting(Mesh(ep=2, tp=2), router=V3),
    "ep2 tp7": Setting(Mesh(ep=2, tp=7), router=V3),  # no number that anything is divided by is a multiple of 7
    "fsdp2 ep2": Setting(Mesh(fsdp=2, ep=2)),
    "experts over fsdp": Setting(Mesh(dp=2, fsdp=2), ep=("fsdp",)),
    "folded over fsdp and ep": Setting(Mesh(fsdp=2, ep=2), ep=("fsdp", "ep"), router=V3),
    "folded over cp and tp": Setting(Mesh(dp=2, cp=2, tp=2), ep=("cp", "tp"), sequence=("cp", "tp"), router=V3),
    "capacity": Setting(Mesh(dp=2, ep=2), capacity=2),
    "chunks": Setting(Mesh(dp=2, ep=2), chunks=2),
    "chunks, folded": Setting(Mesh(cp=2, tp=2), ("cp", "tp"), ("cp", "tp"), V3, chunks=4),
    "from each as many": Setting(Mesh(dp=2, ep=2), router=V3, pair_rows=16),
    "from each as many, folded": Setting(Mesh(cp=2, tp=2), ("cp", "tp"), ("cp", "tp"), chunks=2, pair_rows=9),
    "groups without ep": Setting(Mesh(dp=4), router=Router(E, 2, groups=4, top_groups=2)),
}
TOO_FEW = {  # rows that are enough for some ranks
    "too few": Setting(Mesh(dp=2, ep=2), rows=48),
    "too few from one": Setting(Mesh(dp=2, ep=2), pair_rows=11),
    "too few, folded": Setting(Mesh(dp=2, cp=2, tp=2), ("cp", "tp"), ("cp", "tp"), V3, rows=24),
}


def setting_of(of: str) -> Setting:
    """By its name."""
    return {**SETTINGS, **TOO_FEW}[of]


def layouts(mesh: Mesh, of: str) -> tuple:
    """Of (parameters, batch)."""
    setting = setting_of(of)
    tp = "tp" if "tp" not in setting.ep else None
    fsdp = "fsdp" if "fsdp" not in setting.ep else None
    specs = {
        "mix": ((D, D), ()),
        "router": ((D, E), ()),
        "bias": ((E,), ()),
        "up": ((E, D, 2 * FF), (setting.ep, fsdp, Split(tp, 2) if tp else None)),
        "down": ((E, FF, D), (setting.ep, tp, fsdp)),
    }
    params = {name: Layout(shape, setting.dtype, mesh, spec) for name, (shape, spec) in specs.items()}
    rows = Layout((B, S, D), setting.dtype, mesh, (DATA, setting.sequence))
    return params, {"x": rows, "target": rows}


def values(of: str, skew: float = 0.0) -> tuple:
    """Global arguments. skew: how much the first experts are preferred."""
    g = torch.Generator().manual_seed(5)
    shapes, batch = layouts(setting_of(of).mesh, of)

    def draw(layout):
        return torch.randn(layout.shape, generator=g, dtype=torch.float64).to(layout.dtype)

    w = {name: draw(layout) / (1 if layout.shape[0] == E else 2) for name, layout in shapes.items()}
    w["bias"] = w["bias"] / 8 - skew * torch.arange(E)
    return w, {name: draw(layout) for name, layout in batch.items()}


def make_step(mesh: Mesh, of: str, moe: types.ModuleType = moe, router: types.ModuleType = router):
    """step(params, batch) -> (params, metrics)."""
    setting, axes = setting_of(of), Axes(mesh)
    data, sequence, ep = axes[DATA], axes[setting.sequence], axes[setting.ep]
    token_axes = axes[(*DATA, *setting.sequence)]
    tp = axes["tp" if "tp" not in setting.ep else ()]
    gathered = axes["fsdp" if "fsdp" not in setting.ep else ()]
    choose = router.Router(**vars(setting.router))
    tokens = B * S

    def apply(w, x_MD: Tensor, ends: Tensor, expert_M: Tensor) -> Tensor:
        gate_MF, up_MF = grouped_matmul(x_MD, w["up"], ends).chunk(2, -1)
        return grouped_matmul(F.silu(gate_MF) * up_MF, w["down"], ends)

    def loss_fn(w, batch):
        h_BSD = (batch["x"] @ w["mix"]).tanh()
        logits_BSE = h_BSD @ w["router"]
        routing = choose(logits_BSE, w["bias"])
        experts = {"up": all_gather(w["up"], gathered, 1), "down": all_gather(w["down"], gathered, 2)}
        experts = moe.expert_weights(experts, ep, token_axes)
        given = (enter(h_BSD, tp), routing._replace(gates=enter(routing.gates, tp)), experts, apply, ep, data)
        if setting.capacity is None:
            y_BSD, stats = moe.dropless(*given, sequence, setting.rows, setting.chunks, remat, setting.pair_rows)
        else:
            y_BSD, stats = moe.with_capacity(*given, setting.capacity)
        stats.pop("sent", None)  # which is another number on every mesh
        y_BSD = psum(y_BSD, tp)
        load_E = psum(router.expert_load(routing.experts, E), token_axes)
        share_E = load_E.to(routing.probs.dtype) / load_E.sum().clamp(min=1)
        terms = {
            "fit": (y_BSD - batch["target"]).square().sum() / tokens,
            "balance": 0.1 * E / tokens * (share_E * router.expert_probs(routing.probs)).sum(),
            "of sequences": 0.1 * router.sequence_balance_loss(routing.probs, routing.experts, sequence) / tokens,
            "z": 0.01 * router.router_z_loss(logits_BSE) / tokens,
            "entropy": router.router_entropy(routing.probs) / tokens,
        }
        loss = sum(value for name, value in terms.items() if name != "entropy")
        metrics = {name: psum(value.detach(), token_axes) for name, value in {**terms, **stats, "loss": loss}.items()}
        return loss, {**metrics, "load": load_E}

    def step(params, batch):
        (_, metrics), raw = value_and_grad(loss_fn)(params, batch)
        grads = {name: psum(raw[name], token_axes) for name in ("mix", "router")}
        rest = token_axes.only(tuple(name for name in token_axes.names if name not in ep.names + gathered.names))
        grads |= {name: psum(raw[name], rest) for name in ("up", "down")}
        new = {name: params[name] - 0.02 * g for name, g in grads.items()}
        new["bias"] = router.balanced_bias(params["bias"], metrics["load"], 0.001)
        return new, metrics

    return step
