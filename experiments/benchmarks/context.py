"""Causal attention over a sequence that ranks share, forward and backward, against torch's ring attention.

    make bench-context
    python experiments/benchmarks/context.py [--rounds=7] [--quick]

2 gloo ranks of one thread each, fp32. Ours: `nn.ring_attention` (balanced and not) and `nn.gathered_attention` in one
compiled step. The peer: the ring of torch.distributed.tensor.experimental (`_templated_ring_attention` and its
backward), with and without its balancing, in eager mode, as it hides collectives in a context manager. torch has no
entry for the CPU's flash kernel there: the peer's ring is given that kernel here, ours uses it too. Outputs and
gradients must be equal before anything is timed. A ratio is the median over rounds of ours / peer, each the slowest
rank's; bytes are counted in the graph, peaks are of the whole heap (heap.py). JSON lines on stdout, a table on stderr.
"""

import argparse
import contextlib
from typing import NamedTuple

import torch
import torch.distributed as dist
from heap import counted_in_children, peak_bytes
from torch.distributed.tensor.experimental._context_parallel import _attention as torch_ring

from fmegatron import nn, step
from fmegatron.collectives import Axes, connect
from fmegatron.layout import Mesh
from fmegatron.nn.attention_masks import Causal
from fmegatron.nn.context_parallel import gathered_attention, zigzag
from fmegatron.testing.measure import paired_seconds, report
from fmegatron.testing.ranks import RankPool

LIMIT_S = 900
RANKS = 2


class Sizes(NamedTuple):
    """B rows, S positions of all ranks, H heads, K their width."""

    rows: int = 2
    length: int = 2048
    heads: int = 8
    width: int = 64


def values(sizes: Sizes) -> list[torch.Tensor]:
    """Queries, keys, values [B, S, H, K] in the order of the sequence, and the gradient of the result."""
    g = torch.Generator().manual_seed(0)
    return [torch.randn(sizes, generator=g) for _ in range(4)]


def ours(mesh: Mesh, form: str):
    """step(q, k, v, gradient, positions) -> (output, gradients)."""
    cp = Axes(mesh)["cp"]

    def attention(q, k, v, gradient, positions):
        leaves = [x.detach().requires_grad_() for x in (q, k, v)]
        with torch.enable_grad():
            attention = gathered_attention if form == "gathered" else nn.ring_attention
            out = attention(*leaves, Causal(positions, zigzag=form == "balanced"), cp)
        return out.detach(), *torch.autograd.grad(out, leaves, gradient)

    return attention


def _forward(query, key, value, is_causal, **_):
    return torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(query, key, value, 0.0, is_causal)


def _backward(grad_out, query, key, value, out, logsumexp, is_causal, **_):
    op = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
    return op(grad_out, query, key, value, out, logsumexp, 0.0, is_causal)


def by_torch(q, k, v, gradient, balanced: bool):
    """The same by torch's ring over the default group."""
    torch_ring._cp_options.enable_load_balance = balanced
    group = dist.group.WORLD
    q, k, v, gradient = (x.transpose(1, 2) for x in (q, k, v, gradient))
    out, lse = torch_ring._templated_ring_attention(group, 2, _forward, q, k, v, is_causal=True)
    given = (group, 2, _backward, gradient, "grad_out", q, k, v, out, lse, True)
    return [x.transpose(1, 2) for x in (out, *torch_ring._templated_ring_attention_backward(*given)[:3])]


def race(rank: int, numbers: tuple[int, ...], form: str, rounds: int, backend: str) -> dict:
    """Seconds of both in each round, the largest relative difference, bytes that ours sends."""
    sizes, mesh, balanced = Sizes(*numbers), Mesh(cp=RANKS), form == "balanced"
    order = zigzag(sizes.length, RANKS) if balanced else torch.arange(sizes.length)
    positions = order.chunk(RANKS)[rank].contiguous()
    given = [x[:, positions].contiguous() for x in values(sizes)]
    with connect(mesh) as world:
        compiled = step.jit(ours(mesh, form), world=world, backend=backend, check=False)

        def peer():
            return by_torch(*given, balanced=balanced)

        found, wanted = compiled(*given, positions), peer()
        error = max(float((a - b).abs().max() / b.abs().max()) for a, b in zip(found, wanted, strict=True))
        sent = sum(c.sent for c in step.collectives_of(compiled.graph("overlap"), mesh))
        works = (lambda: compiled(*given, positions), peer)
        times, peaks = paired_seconds(*works, rounds, before=dist.barrier), [peak_bytes(work) for work in works]
    return {"pairs": times, "error": error, "sent": sent, "peaks": peaks}


def main(arguments: list[str] | None = None, pool: RankPool | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--quick", action="store_true", help="tiny and one round, to see that all runs and is equal")
    parser.add_argument("--backend", default="inductor")
    flags = parser.parse_args(arguments)
    sizes = Sizes(1, 32, 2, 8) if flags.quick else Sizes()
    rounds = 1 if flags.quick else flags.rounds
    where = f"{RANKS} gloo ranks, 1 thread each, {sizes}, fp32, torch {torch.__version__}"
    block = 4 * sizes.rows * sizes.length // RANKS * sizes.heads * sizes.width  # bytes of this rank's part of one array
    positions = 8 * sizes.length // RANKS
    # A ring: n - 1 hops of k, v and positions forward, again backward, and n hops of their gradients.
    # Balanced without documents and window it makes no mask of positions, which stay.
    hops = 2 * (RANKS - 1) + RANKS
    ring = hops * 2 * block + 2 * (RANKS - 1) * positions
    formula = {"ring": ring, "balanced": hops * 2 * block, "gathered": (RANKS - 1) * (4 * block + positions)}
    with contextlib.ExitStack() as stack:
        if pool is None:
            stack.enter_context(counted_in_children())
            pool = stack.enter_context(contextlib.closing(RankPool(RANKS)))
        for form in formula:
            ranks = pool.run(race, tuple(sizes), form, rounds, flags.backend, ranks=RANKS, timeout_s=LIMIT_S)
            error = max(r["error"] for r in ranks)
            report(f"cp_{form}_difference", [error], unit="relative", against="torch", bar="<= 1e-4", where=where)
            sent = ranks[0]["sent"] / formula[form]
            report(f"cp_{form}_bytes", [sent], unit="ratio", against="formula", bar="<= 1.0", where=where)
            slowest = [tuple(max(r["pairs"][i][f] for r in ranks) for f in (0, 1)) for i in range(rounds)]
            ratios, least = [a / b for a, b in slowest], min(b for _, b in slowest) * 1e3
            bar = "<= 1.0" if form == "balanced" and not flags.quick else None  # the form for work that is even
            name = "torch's balanced ring" if form == "balanced" else "torch's ring"
            report(f"cp_{form}_time", ratios, unit="ratio", against=name, bar=bar, where=where, note=f"{least:.0f} ms")
            mine, theirs = (max(r["peaks"][f] for r in ranks) / 2**20 for f in (0, 1))
            note = f"{mine:.1f} of {theirs:.1f} MiB above the arguments"
            report(f"cp_{form}_peak", [mine / theirs], unit="ratio", against=name, bar=bar, where=where, note=note)


if __name__ == "__main__":
    main()
