"""Share of plain I/O that a checkpoint reaches: save (digests, commit and all) and whole, verified restore; one rank.

    make bench-checkpoint        python experiments/benchmarks/checkpoint.py [MiB=512] [rounds=7]

Plain is one file and one thread: `write` of the same bytes from memory, `readinto` fresh tensors. Both sides alternate
in one process; the ratios are paired. On memory-backed storage (/dev/shm), so that the disk is not what is measured.
"""

import json
import os
import pathlib
import platform
import shutil
import statistics
import sys
import tempfile
import time

import torch

from fmegatron import checkpoint, tree
from fmegatron.layout import Layout, Mesh


def state_of(mib: int) -> dict:
    """bf16 matrices of 32 MiB, fp32 ones of 32 MiB, 500 leaves of 4 KiB."""
    n = max(1, mib // 64)
    return {
        "bf16": {str(i): torch.randn(4096, 4096).bfloat16() for i in range(n)},
        "fp32": {str(i): torch.randn(2048, 4096) for i in range(n)},
        "small": {str(i): torch.randn(1024) for i in range(500)},
    }


def seconds(work) -> float:
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def main(mib: int = 512, rounds: int = 7) -> None:
    """Print one JSON line per metric on stdout, a table on stderr."""
    base = pathlib.Path("/dev/shm" if os.path.isdir("/dev/shm") else tempfile.gettempdir()) / f"bench-{os.getpid()}"
    base.mkdir()
    state = state_of(mib)
    layouts = tree.map(lambda x: Layout(tuple(x.shape), x.dtype, Mesh()), state)
    buffers = [x.view(torch.uint8).numpy() for x in tree.leaves(state)]
    total = sum(b.nbytes for b in buffers)

    def plain_write():
        with open(base / "plain", "wb", 0) as f:
            for b in buffers:
                f.write(b)

    def plain_read():
        with open(base / "plain", "rb", 0) as f:
            return [f.readinto(torch.empty(b.shape, dtype=torch.uint8).numpy()) for b in buffers]

    def save():
        checkpoint.save(base / "ours", state, layouts)

    pairs = {
        "save_vs_plain_write": (plain_write, save, "plain write()"),
        "restore_vs_plain_read": (plain_read, lambda: checkpoint.restore(base / "ours", layouts), "plain readinto()"),
        "unverified_restore_vs_plain_read": (
            plain_read,
            lambda: checkpoint.restore(base / "ours", layouts, verify=False),
            "plain readinto()",
        ),
    }
    bars = {"save_vs_plain_write": 0.90, "restore_vs_plain_read": 0.90}
    where = f"{base.parent}, 1 rank, {os.cpu_count()} cores ({platform.processor() or platform.machine()}), "
    try:
        for name, (plain, ours, against) in pairs.items():
            ratios, rates = [], []
            for _ in range(rounds + 1):  # the first round warms up
                for old in (base / "plain", base / "ours"):
                    if plain is plain_write and old.exists():
                        shutil.rmtree(old) if old.is_dir() else old.unlink()
                a, b = seconds(plain), seconds(ours)
                ratios.append(a / b)
                rates.append(total / b / 1e9)
            ratios, rate, bar = ratios[1:], statistics.median(rates[1:]), bars.get(name)
            value = statistics.median(ratios)
            line = {
                "metric": name,
                "value": round(value, 3),
                "unit": "ratio",
                "against": against,
                "bar": bar and f">= {bar}",
                "holds": bar and value >= bar,
                "n": rounds,
                "spread": [round(min(ratios), 3), round(max(ratios), 3)],
                "where": f"{where}torch {torch.__version__}, {total >> 20} MiB",
            }
            print(json.dumps(line), flush=True)
            print(f"{name:34s} {value:5.2f}  [{min(ratios):.2f}-{max(ratios):.2f}]  {rate:.2f} GB/s", file=sys.stderr)
        restored = checkpoint.restore(base / "ours", layouts)
        assert all(torch.equal(a, b) for a, b in zip(tree.leaves(restored), tree.leaves(state), strict=True))
    finally:
        shutil.rmtree(base)


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
