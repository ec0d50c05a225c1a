"""A layer of experts, forward and backward over ep, against a loop over experts in eager torch with the same exchange.

    make bench-moe
    python experiments/benchmarks/moe.py [--rounds=7] [--quick]

2 gloo ranks of one thread each, fp32, half of the experts on each. Ours: `nn.dropless` in one compiled step, room for
the worst case, and with room for 1.25 times the balanced load. The peer: tokens sorted by expert, `all_to_all_single`
with splits that the host knows, a loop over experts, and back (as Hugging Face's and Megatron's plain layers do). Both
must compute the same output and gradients before anything is timed. A ratio is the median over rounds of ours / peer,
each the slowest rank's. JSON lines on stdout, a table on stderr.
"""

import argparse
import contextlib
from typing import NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F

from fmegatron import nn, step
from fmegatron.collectives import Axes, connect
from fmegatron.layout import Mesh
from fmegatron.testing import RankPool, paired_seconds, report

LIMIT_S = 900


class Sizes(NamedTuple):
    """T tokens of a rank, D width, F hidden width of an expert, E experts, K of a token."""

    tokens: int = 1024
    dim: int = 256
    hidden: int = 512
    experts: int = 8
    top_k: int = 2


def values(sizes: Sizes, rank: int) -> list[torch.Tensor]:
    """(tokens, router, up, down) of this rank."""
    g = torch.Generator().manual_seed(0)
    T, D, H, E, _ = sizes
    shapes = ((2, T, D), (D, E), (E, D, 2 * H), (E, H, D))
    x, router, up, down = (torch.randn(shape, generator=g) / shape[-2] ** 0.5 for shape in shapes)
    return [x[rank] * T**0.5, router, *(w.chunk(2)[rank].clone() for w in (up, down))]


def ours(mesh: Mesh, sizes: Sizes, rows: int | None):
    """step(tokens, router, up, down) -> (loss of this rank, gradients)."""
    axes = Axes(mesh)
    ep, (_, _, _, E, K) = axes["ep"], sizes
    choose = nn.Router(E, K, normalised=True)

    def experts(w, x_MD, ends, expert_M):
        gate, up = nn.grouped_mm(x_MD, w["up"], ends).chunk(2, -1)
        return nn.grouped_mm(F.silu(gate) * up, w["down"], ends)

    def layer(x, router, up, down):
        leaves = [v.detach().requires_grad_() for v in (x, router, up, down)]
        with torch.enable_grad():
            x, router, up, down = leaves
            routing = choose(x[None] @ router)
            w = nn.expert_weights({"up": up, "down": down}, ep, ep)
            y, _ = nn.dropless(x[None], *routing[:2], w, experts, E, ep, ep, axes[()], rows)
            loss = y.square().sum()
        return loss.detach(), torch.autograd.grad(loss, leaves)

    return layer


class _Exchange(torch.autograd.Function):
    """Rows to other ranks, as many as the splits say."""

    @staticmethod
    def forward(ctx, x, send, recv):
        ctx.splits = send, recv
        out = x.new_empty(sum(recv), x.shape[1])
        dist.all_to_all_single(out, x.contiguous(), recv, send)
        return out

    @staticmethod
    def backward(ctx, g):
        send, recv = ctx.splits
        out = g.new_empty(sum(send), g.shape[1])
        dist.all_to_all_single(out, g.contiguous(), send, recv)
        return out, None, None


def by_loop(x, router, up, down, sizes: Sizes):
    """The same by a loop over the experts of this rank."""
    n, K, X = dist.get_world_size(), sizes.top_k, len(up)
    x, router, up, down = leaves = [v.detach().requires_grad_() for v in (x, router, up, down)]
    gates, chosen = (x @ router).softmax(-1).topk(K, -1)
    gates = gates / gates.sum(-1, keepdim=True)
    order = chosen.flatten().argsort(stable=True)
    counts = chosen.flatten().bincount(minlength=n * X)
    there = torch.empty_like(counts)
    dist.all_to_all_single(there, counts)
    send, recv = counts.view(n, X).sum(1).tolist(), there.view(n, X).sum(1).tolist()
    came = _Exchange.apply(x[order // K], send, recv)
    expert = torch.arange(X).repeat(n).repeat_interleave(there)
    y = torch.zeros_like(came)
    for e in range(X):
        (rows,) = (expert == e).nonzero(as_tuple=True)
        gate, h = (came[rows] @ up[e]).chunk(2, -1)
        y = y.index_add(0, rows, (F.silu(gate) * h) @ down[e])
    back = _Exchange.apply(y, recv, send)
    y = torch.zeros_like(x).index_add(0, order // K, back * gates.flatten()[order][:, None])
    loss = y.square().sum()
    return loss.detach(), torch.autograd.grad(loss, leaves)


def race(rank: int, numbers: tuple[int, int, int, int, int], rows: int | None, rounds: int, backend: str) -> dict:
    """(seconds of both in each round, the largest relative difference of loss and gradients)."""
    sizes, mesh = Sizes(*numbers), Mesh(ep=2)
    given = values(sizes, rank)
    with connect(mesh) as world:
        compiled = step.jit(ours(mesh, sizes, rows), world=world, backend=backend)
        x, router, up, down = given
        found, wanted = compiled(*given), by_loop(x, router, up, down, sizes)
        pairs = zip((found[0], *found[1]), (wanted[0], *wanted[1]), strict=True)
        error = max(float((a - b).abs().max() / b.abs().max()) for a, b in pairs)
        times = paired_seconds(
            lambda: compiled(*given), lambda: by_loop(x, router, up, down, sizes), rounds, before=dist.barrier
        )
    return {"pairs": times, "error": error}


def main(arguments: list[str] | None = None, pool: RankPool | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--quick", action="store_true", help="tiny and one round, to see that all runs and is equal")
    parser.add_argument("--backend", default="inductor")
    flags = parser.parse_args(arguments)
    sizes = Sizes(32, 16, 16) if flags.quick else Sizes()
    rounds = 1 if flags.quick else flags.rounds
    where = f"2 gloo ranks, 1 thread each, {sizes}, fp32, torch {torch.__version__}"
    balanced = sizes.tokens * sizes.top_k
    with contextlib.ExitStack() as stack:
        pool = pool or stack.enter_context(contextlib.closing(RankPool(2)))
        for name, rows in (("worst_case", None), ("balanced", balanced * 5 // 4)):
            ranks = pool.run(race, tuple(sizes), rows, rounds, flags.backend, ranks=2, timeout_s=LIMIT_S)
            error = max(r["error"] for r in ranks)
            report(f"moe_{name}_difference", [error], unit="relative", against="loop", bar="<= 1e-4", where=where)
            slowest = [tuple(max(r["pairs"][i][f] for r in ranks) for f in (0, 1)) for i in range(rounds)]
            ratios, least = [a / b for a, b in slowest], min(b for _, b in slowest) * 1e3
            bar = None if flags.quick else "<= 1.0"
            note = f"{least:.0f} ms of the loop"
            report(f"moe_{name}_time", ratios, unit="ratio", against="loop", bar=bar, where=where, note=note)


if __name__ == "__main__":
    main()
