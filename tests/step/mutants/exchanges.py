"""Collectives that move values, in a loss: sequence shards, heads by all_to_all, a ring, experts. Plain SGD.

Letters: B batch, S sequence, D model, H heads, E width of a head, X experts, F hidden. The mutants of
`of_exchanges.py` are this file with one line changed.
"""

import torch

from fmegatron.collectives import Axes, all_gather, all_to_all, enter, ppermute, psum, shard
from fmegatron.collectives.ops import declare
from fmegatron.layout import Layout, Mesh
from fmegatron.step import value_and_grad

B, S, D, H, E, X, F = 8, 16, 6, 4, 5, 4, 10
SHAPES = {
    "wq_DHE": ((D, H * E), ()),
    "wo_HED": ((H * E, D), ()),
    "up_XDF": ((X, D, F), ("tp",)),
    "down_XFD": ((X, F, D), ("tp", None, "fsdp")),
    "scale_D": ((D,), ()),
}


def layouts(mesh: Mesh) -> tuple:
    """Layouts of the arguments (parameters, batch)."""
    params = {k: Layout(shape, torch.float64, mesh, spec) for k, (shape, spec) in SHAPES.items()}
    return params, {"x_BSD": Layout((B, S, D), torch.float64, mesh, (("dp", "fsdp"),))}


def values() -> tuple:
    """Global arguments."""
    generator = torch.Generator().manual_seed(0)

    def draw(shape):
        return torch.rand(shape, generator=generator, dtype=torch.float64) - 0.4

    return {k: draw(shape) for k, (shape, _) in SHAPES.items()}, {"x_BSD": draw((B, S, D))}


def make_step(mesh: Mesh):
    """step(params, batch) -> (params, metrics) over the symbolic axes dp, fsdp, tp of a mesh."""
    axes = Axes(mesh)
    fsdp, tp, data = axes["fsdp"], axes["tp"], axes["dp", "fsdp"]

    def attention(x_BSD, w):
        """Ulysses: this rank's positions of all heads become all positions of its heads, and back."""
        q_BSHE = (x_BSD @ enter(w["wq_DHE"], tp)).unflatten(2, (H, E))
        q_BSHE = all_to_all(q_BSHE, tp, split_dim=2, concat_dim=1)
        mixed_BSHE = torch.einsum(
            "bsht,bthe->bshe", torch.einsum("bshe,bthe->bsht", q_BSHE, q_BSHE).softmax(-1), q_BSHE
        )
        mixed_BSHE = all_to_all(mixed_BSHE, tp, split_dim=1, concat_dim=2)
        return mixed_BSHE.flatten(2) @ enter(w["wo_HED"], tp)

    def ring(x_BSD):
        """Linear attention of this rank's positions to all: parts of the sequence go round the ring."""
        x_BSD = declare(x_BSD, tp, backward=("sharded", 1))
        part_BTD, out_BSD = x_BSD, torch.zeros_like(x_BSD)
        for _ in range(mesh["tp"]):
            part_BTD = ppermute(part_BTD, tp, 1)
            out_BSD = out_BSD + x_BSD @ part_BTD.transpose(1, 2) @ part_BTD / S
        return declare(out_BSD, tp, forward=("sharded", 1))

    def experts(x_BSD, w):
        """Positions in equal parts to all experts: exchanged to the ranks of the experts, and back."""
        x_XBD = x_BSD.transpose(0, 1).unflatten(0, (-1, X)).transpose(0, 1).flatten(1, 2)
        x_XBD = all_to_all(x_XBD, tp, split_dim=0, concat_dim=1)
        h_XBF = torch.nn.functional.gelu(torch.bmm(x_XBD, w["up_XDF"]))
        y_XBD = torch.bmm(h_XBF, all_gather(w["down_XFD"], fsdp, 2))
        y_XBD = all_to_all(y_XBD, tp, split_dim=1, concat_dim=0)
        return y_XBD.unflatten(1, (-1, x_BSD.shape[0])).transpose(0, 1).flatten(0, 1).transpose(0, 1)

    def loss_fn(w, batch):
        x_BSD = shard(batch["x_BSD"] * w["scale_D"], tp, 1)
        x_BSD = x_BSD + attention(x_BSD, w)
        x_BSD = x_BSD + ring(x_BSD)
        x_BSD = x_BSD + experts(x_BSD, w)
        pooled = psum(x_BSD.square().sum() + x_BSD.sum(), tp)
        return pooled / (B * S)

    def step(params, batch):
        (loss, _), raw = value_and_grad(loss_fn)(params, batch)
        whole = [k for k in raw if k != "down_XFD"]
        grads = {k: psum(raw[k], data) for k in whole}
        grads["down_XFD"] = psum(raw["down_XFD"], axes["dp"])
        new = {k: p - 0.1 * grads[k] for k, p in params.items()}
        return new, {"loss": psum(loss, data)}

    return step
