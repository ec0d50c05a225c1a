"""How fast `tree.init` draws normal values on one core, against torch.randn; the bar is half of its rate.

    python experiments/benchmarks/init.py

Alternating repetitions in one process and one thread; the ratio of each pair is the rate of `tree.init` over torch's.
`fresh` allocates the result each time, as init does; `in_place` fills memory that was touched before, so that page
faults hide nothing. Other lines: boxes with short rows, an odd start, bf16, uniform values against torch.rand.
"""

import platform
import statistics

import torch

from fmegatron import tree
from fmegatron.layout import Layout, Mesh
from fmegatron.testing.measure import paired_seconds, report
from fmegatron.tree.initialize import fill

ROUNDS = 9
N = 1 << 24
NORMAL, UNIFORM = "Tensor.normal_, f32", "Tensor.uniform_, f32"


def main() -> None:
    """Print one JSON line for each case."""
    torch.set_num_threads(1)

    def spec(shape, tp=1, entries=(), dtype=torch.float32, init=None):
        return tree.ArraySpec(Layout(shape, dtype, Mesh(tp=tp), entries), init or tree.Normal(1.0))

    touched = torch.zeros(N)
    whole = spec((N // 4096, 4096))
    narrow = spec((N // 8, 64), 8, (None, "tp"))  # this rank's rows have 8 elements
    odd = spec((N // 1001, 7007), 7, (None, "tp"))  # rows of 1001, every second one starts odd
    half = spec((N // 4096, 4096), dtype=torch.bfloat16)
    uniform = spec((N // 4096, 4096), init=tree.Uniform(0.0, 1.0))
    cases = {
        "init_vs_randn_fresh": (lambda: tree.init(whole, 0, 0), lambda: torch.randn(N), "torch.randn, f32"),
        "init_vs_randn_in_place": (lambda: fill(touched, whole, 0, 0), touched.normal_, NORMAL),
        "init_rows_8_vs_randn_in_place": (lambda: fill(touched, narrow, 0, 3), touched.normal_, NORMAL),
        "init_rows_1001_vs_randn_in_place": (
            lambda: fill(touched[: N // 1001 * 1001], odd, 0, 1), touched.normal_, NORMAL,
        ),
        "init_bf16_vs_randn_fresh": (
            lambda: tree.init(half, 0, 0), lambda: torch.randn(N, dtype=torch.bfloat16), "torch.randn, bf16",
        ),
        "init_uniform_vs_uniform_in_place": (lambda: fill(touched, uniform, 0, 0), touched.uniform_, UNIFORM),
    }  # fmt: skip
    for name, (ours, peer, against) in cases.items():
        pairs = paired_seconds(ours, peer, ROUNDS)
        own, theirs = (statistics.median(column) / N * 1e9 for column in zip(*pairs, strict=True))
        report(
            name,
            [theirs / own for own, theirs in pairs],
            unit="ratio",
            against=against,
            bar=">= 0.5" if "randn" in name and "bf16" not in name else None,
            where=f"1 core, {N} values, {platform.machine()}, torch {torch.__version__}",
            note=f"{own:.2f} ns/value, {against} {theirs:.2f}",
        )


if __name__ == "__main__":
    main()
