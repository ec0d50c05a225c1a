"""A layer of experts, forward and backward: over ep against a loop over experts, on one rank against transformers'.

    make bench-moe
    python experiments/benchmarks/moe.py [--rounds=7] [--quick]

2 gloo ranks of one thread each, fp32, half of the experts on each. Ours: `moe.dropless` in one compiled step, room for
the worst case, and with room for 1.25 times the balanced load. The peer: tokens sorted by expert, `all_to_all_single`
with splits that the host knows, a loop over experts, and back (as Hugging Face's and Megatron's plain layers do). Then
one rank with all experts, against Mixtral's layer of transformers in each of its forms of products, which has no
exchange; the extra `interop` has it. All must compute the same output and gradients before anything is timed. A ratio
is the median over rounds of ours / peer, each the slowest rank's. Rows that travel are counted: each token once to
every rank that has an expert of it. JSON lines on stdout, a table on stderr.
"""

import argparse
import contextlib
from typing import NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from heap import counted_in_children, peak_bytes

from fmegatron import nn, step
from fmegatron.collectives import Axes, connect
from fmegatron.layout import Mesh
from fmegatron.nn import moe
from fmegatron.nn.moe import expert_weights
from fmegatron.testing.measure import paired_seconds, report
from fmegatron.testing.ranks import RankPool

LIMIT_S = 900


class Sizes(NamedTuple):
    """T tokens of a rank, D width, F hidden width of an expert, E experts, K of a token."""

    tokens: int = 1024
    dim: int = 256
    hidden: int = 512
    experts: int = 8
    top_k: int = 2


def values(sizes: Sizes, rank: int, ranks: int = 2) -> list[torch.Tensor]:
    """(tokens, router, up, down) of this rank."""
    g = torch.Generator().manual_seed(0)
    T, D, H, E, _ = sizes
    shapes = ((2, T, D), (D, E), (E, D, 2 * H), (E, H, D))
    x, router, up, down = (torch.randn(shape, generator=g) / shape[-2] ** 0.5 for shape in shapes)
    return [x[rank] * T**0.5, router, *(w.chunk(ranks)[rank].clone() for w in (up, down))]


def ours(mesh: Mesh, sizes: Sizes, rows: int | None):
    """step(tokens, router, up, down) -> (loss of this rank, gradients, rows given to the exchange)."""
    axes = Axes(mesh)
    ep, (_, _, _, E, K) = axes["ep"], sizes
    choose = nn.Router(E, K, normalised=True)

    def experts(w, x_MD, ends, expert_M):
        gate, up = nn.grouped_matmul(x_MD, w["up"], ends).chunk(2, -1)
        return nn.grouped_matmul(F.silu(gate) * up, w["down"], ends)

    def layer(x, router, up, down):
        leaves = [v.detach().requires_grad_() for v in (x, router, up, down)]
        with torch.enable_grad():
            x, router, up, down = leaves
            routing = choose(x[None] @ router)
            w = expert_weights({"up": up, "down": down}, ep, ep)
            y, found = moe.dropless(x[None], routing, w, experts, ep, ep, axes[()], rows)
            loss = y.square().sum()
        return loss.detach(), torch.autograd.grad(loss, leaves), found["sent"]

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


def by_transformers(sizes: Sizes, form: str, given: list[torch.Tensor]):
    """Mixtral's layer with these weights, run() -> (loss, gradients) of the same form. form: of its products."""
    from transformers import MixtralConfig
    from transformers.models.mixtral.modeling_mixtral import MixtralSparseMoeBlock

    x, router, up, down = given
    config = MixtralConfig(
        hidden_size=sizes.dim, intermediate_size=sizes.hidden, num_local_experts=sizes.experts,
        num_experts_per_tok=sizes.top_k, experts_implementation=form,
    )  # fmt: skip
    block = MixtralSparseMoeBlock(config)
    weights = [block.gate.weight, block.experts.gate_up_proj, block.experts.down_proj]
    with torch.no_grad():
        for to, w in zip(weights, (router, up, down), strict=True):
            to.copy_(w.transpose(-1, -2))

    def run():
        tokens = x.detach().requires_grad_()
        loss = block(tokens[None]).square().sum()
        of_x, *grads = torch.autograd.grad(loss, [tokens, *weights])
        return loss.detach(), (of_x, *(g.transpose(-1, -2) for g in grads))

    return run


FORMS = ("eager", "grouped_mm")  # of transformers: a loop, grouped products; "batched_mm" copies a matrix for each row


def race(rank: int, numbers: tuple[int, int, int, int, int], rows: int | None, rounds: int, backend: str) -> dict:
    """Against the loop: seconds of both in each round, the largest relative difference of loss and gradients, and rows
    that travel, beside how many have to."""
    sizes, mesh = Sizes(*numbers), Mesh(ep=2)
    given = values(sizes, rank)
    with connect(mesh) as world:
        compiled = step.jit(ours(mesh, sizes, rows), world=world, backend=backend, check=False)
        found = compiled(*given)
        error = difference(found, by_loop(*given, sizes))
        works = (lambda: compiled(*given), lambda: by_loop(*given, sizes))
        times, peaks = paired_seconds(*works, rounds, before=dist.barrier), [peak_bytes(work) for work in works]
    x, router = given[:2]
    there = (x @ router).softmax(-1).topk(sizes.top_k, -1).indices // (sizes.experts // 2)
    least = sum(int((there == r).any(-1).sum()) for r in range(2))
    return {"pairs": times, "error": error, "peaks": peaks, "sent": int(found[2]), "least": least}


def race_on_one(rank: int, numbers: tuple[int, int, int, int, int], form: str, rounds: int, backend: str) -> dict:
    """The same against transformers, all experts on this rank."""
    sizes, mesh = Sizes(*numbers), Mesh(ep=1)
    given = values(sizes, 0, 1)
    peer = by_transformers(sizes, form, given)
    with connect(mesh) as world:
        compiled = step.jit(ours(mesh, sizes, None), world=world, backend=backend, check=False)
        error = difference(compiled(*given), peer())
        peaks = [peak_bytes(work) for work in (lambda: compiled(*given), peer)]
        return {"pairs": paired_seconds(lambda: compiled(*given), peer, rounds), "error": error, "peaks": peaks}


def difference(found, wanted) -> float:
    """The largest of loss and gradients, relative to the largest number of each."""
    pairs = zip((found[0], *found[1]), (wanted[0], *wanted[1]), strict=True)
    return max(float((a - b).abs().max() / b.abs().max()) for a, b in pairs)


def report_peak(metric: str, peaks: list[int], against: str, bar: str | None, where: str) -> None:
    """The peak of the heap in one call, ours and theirs."""
    mine, theirs = (peak / 2**20 for peak in peaks)
    note = f"{mine:.1f} of {theirs:.1f} MiB above the arguments"
    report(metric, [mine / theirs], unit="ratio", against=against, bar=bar, where=where, note=note)


def main(arguments: list[str] | None = None, pool: RankPool | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--quick", action="store_true", help="tiny and one round, to see that all runs and is equal")
    parser.add_argument("--backend", default="inductor")
    flags = parser.parse_args(arguments)
    sizes = Sizes(32, 16, 16) if flags.quick else Sizes()
    rounds, bar = 1 if flags.quick else flags.rounds, None if flags.quick else "<= 1.0"
    where = f"gloo ranks of 1 thread, {sizes}, fp32, torch {torch.__version__}"
    balanced = sizes.tokens * sizes.top_k
    with contextlib.ExitStack() as stack:
        if pool is None:
            stack.enter_context(counted_in_children())
            pool = stack.enter_context(contextlib.closing(RankPool(2)))
        for name, rows in (("worst_case", None), ("balanced", balanced * 5 // 4)):
            ranks = pool.run(race, tuple(sizes), rows, rounds, flags.backend, ranks=2, timeout_s=LIMIT_S)
            error = max(r["error"] for r in ranks)
            report(f"moe_{name}_difference", [error], unit="relative", against="loop", bar="<= 1e-4", where=where)
            rows_sent = sum(r["sent"] for r in ranks) / sum(r["least"] for r in ranks)
            report(f"moe_{name}_rows", [rows_sent], unit="ratio", against="routed rows", bar="<= 1.0", where=where)
            slowest = [tuple(max(r["pairs"][i][f] for r in ranks) for f in (0, 1)) for i in range(rounds)]
            ratios, least = [a / b for a, b in slowest], min(b for _, b in slowest) * 1e3
            note = f"{least:.0f} ms of the loop, on 2 ranks"
            report(f"moe_{name}_time", ratios, unit="ratio", against="loop", bar=bar, where=where, note=note)
            report_peak(f"moe_{name}_peak", [max(r["peaks"][f] for r in ranks) for f in (0, 1)], "loop", bar, where)
        for form in FORMS:
            (found,) = pool.run(race_on_one, tuple(sizes), form, rounds, flags.backend, ranks=1, timeout_s=LIMIT_S)
            name, against = f"moe_transformers_{form}", f"transformers, {form}"
            report(f"{name}_difference", [found["error"]], unit="relative", against=against, bar="<= 1e-4", where=where)
            ratios, least = [a / b for a, b in found["pairs"]], min(b for _, b in found["pairs"]) * 1e3
            note = f"{least:.0f} ms of theirs, on 1 rank"
            report(f"{name}_time", ratios, unit="ratio", against=against, bar=bar, where=where, note=note)
            report_peak(f"{name}_peak", found["peaks"], against, bar, where)


if __name__ == "__main__":
    main()
