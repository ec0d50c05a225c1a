"""Layouts, owners and plans for one rank of 16,384: 1,000 leaves must take less than a second.

    python experiments/benchmarks/layout.py

Every leaf has a shape of its own, so nothing is answered from a cache. Seconds are
processor time, which is wall time on an idle core: nothing here waits. Three reshards of all 1,000 leaves: to more
tensor parallelism, to another pipeline and data split, and from plain to flattened (ZeRO) ranges. One JSON line each.
"""

import platform
import time

import torch

from fmegatron.layout import Layout, Mesh, Split, plan_reshard
from fmegatron.testing.measure import report

LEAVES = 1000
RANK = 9_731


def leaves(mesh: Mesh, variant: int, kind: str) -> list[Layout]:
    """1,000 layouts as a large decoder has them: stacked matrices, fused QKV, norms; all shapes different."""
    found = []
    flat = {"flat": ("dp",)} if kind == "flat" else {}
    for i in range(LEAVES):
        n = 64 * (200 + i) + variant
        fused = Split("tp", parts=(n, n // 4, n - n // 4))
        form = i % 4
        if form == 0:
            shape, spec = (64, 8192, 2 * n), ("pp", "fsdp", fused)
        elif form == 1:
            shape, spec = (64, n, 8192), ("pp", "tp", "fsdp")
        elif form == 2:
            shape, spec = (n, 8192), ("tp", "fsdp")
        else:
            shape, spec = (64, n), ("pp", None)
        found.append(Layout(shape, torch.float32, mesh, spec, **flat))
    return found


def one_round(src_mesh: Mesh, dst_mesh: Mesh, kind: str, variant: int) -> tuple[float, int]:
    """Processor seconds for layouts, owners, boxes and plans of one rank; and how many transfers the plans hold."""
    start = time.process_time()
    transfers = 0
    src, dst = leaves(src_mesh, variant, "plain"), leaves(dst_mesh, variant, kind)
    for turn, (a, b) in enumerate(zip(src, dst, strict=True)):
        a.owner(RANK, turn)
        a.boxes(RANK)
        plan = plan_reshard(a, b, RANK)
        transfers += len(plan.sends) + len(plan.receives) + len(plan.local)
    return time.process_time() - start, transfers


def main() -> None:
    """Print one JSON line for each reshard."""
    src = Mesh(pp=8, dp=16, fsdp=16, tp=8)
    cases = {
        "tp8_to_tp4": (Mesh(pp=8, dp=16, fsdp=32, tp=4), "plain"),
        "pp8_to_pp16": (Mesh(pp=16, dp=8, fsdp=16, tp=8), "plain"),
        "plain_to_flat": (src, "flat"),
    }
    where = (
        f"rank {RANK} of {src.size}, 1 thread, processor time, {platform.machine()}, python {platform.python_version()}"
    )
    for name, (dst, kind) in cases.items():
        rounds = [one_round(src, dst, kind, variant) for variant in range(5)]
        report(
            f"plan_1000_leaves_16384_ranks_{name}",
            [s for s, _ in rounds],
            unit="s",
            bar="< 1.0",
            where=where,
            note=f"{rounds[0][1] / LEAVES:.1f} transfers a leaf",
        )


if __name__ == "__main__":
    main()
