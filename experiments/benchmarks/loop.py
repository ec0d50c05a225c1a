"""What does the loop cost? `Run` with all that it logs by default, against the bare compiled step of about 20 ms.

    python experiments/benchmarks/loop.py [--rounds=9] [--steps=60] [--backend=inductor]

One process, 1 thread. The step is compiled once and called by both: by a bare `for`, which reads the last loss back as
often as `Run` does, and by `Run` with its table, metrics.jsonl, events.jsonl, clocks, memory and MFU (no checkpoint and
no evaluation: what those cost is theirs). Blocks of both alternate; a ratio is of one pair of blocks. JSON lines on
stdout. Where other programs make the ratio of two blocks uncertain, the third line still holds: the processor time of
the loop's thread over that which it spends inside of the steps, in one and the same run. Expected: at most 1.01.
"""

import argparse
import contextlib
import os
import sys
import tempfile
import time

import torch

from fmegatron import data, step, tree
from fmegatron.layout import Layout, Mesh
from fmegatron.loop import Log, Options, Run, Save
from fmegatron.step.clock import matmul_seconds
from fmegatron.testing.measure import report

LOG_EVERY = 10


def work_of(seconds: float, backend: str):
    """(compiled step of about so many seconds, its specs, its batch): as many products of matrices as it takes."""
    n = 256
    specs = {"w": tree.ArraySpec(Layout((n, n), torch.float32, Mesh()), 1.0)}
    count = max(1, round(seconds / min(matmul_seconds(torch.device("cpu"), torch.float32, n, 50))))

    def train_step(state, batch):
        w = state["w"]
        for _ in range(count):
            w = w @ batch * (1 / n)
        return {"w": w}, {"loss": w.mean()}

    return step.jit(train_step, backend=backend, check=False), specs, torch.ones(n, n)


def now() -> tuple[float, float]:
    """(wall clock, processor time of this process)."""
    return time.perf_counter(), time.process_time()


def bare(compiled, batch, steps: int) -> tuple[float, float]:
    """Seconds, of the clock and of the processor, of a loop with only the step, and the loss each `LOG_EVERY` steps."""
    state = {"w": torch.ones_like(batch)}
    began = now()
    for number in range(1, steps + 1):
        state, metrics = compiled(state, batch)
        if number == 1 or number % LOG_EVERY == 0:
            float(metrics["loss"])
    return took(began)


def took(began: tuple[float, float]) -> tuple[float, float]:
    """The same since then."""
    wall, own = now()
    return wall - began[0], own - began[1]


def looped(compiled, specs, batch, steps: int, folder: str) -> tuple[float, float, float]:
    """The same of the same steps in a `Run`, from the first to the last that it yields, its last save not counted.

    The third is processor time of the loop's thread over that inside of the step, in this very run.
    """
    inside = [0.0]

    def timed(state, batch):
        began = time.thread_time()
        out = compiled(state, batch)
        inside[0] += time.thread_time() - began
        return out

    run = Run(
        folder,
        timed,
        specs,
        options=Options(log=Log(every=LOG_EVERY, peak_flops=1e12, flops_per_token=1e6), save=Save(every=10**9)),
    )
    with open(os.devnull, "w") as nowhere, contextlib.redirect_stdout(nowhere):
        for info in run(data.source(lambda position: batch), steps=steps + 2):
            if info.step == 1:
                began, thread, inside[0] = now(), time.thread_time(), 0.0
            if info.step == steps + 1:  # the last save comes with the update behind
                seconds = *took(began), (time.thread_time() - thread) / inside[0]
    return seconds


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--seconds", type=float, default=0.02, help="of one step")
    parser.add_argument("--backend", default="inductor")
    flags = parser.parse_args()
    torch.set_num_threads(1)
    compiled, specs, batch = work_of(flags.seconds, flags.backend)
    bare(compiled, batch, 5)
    walls, owns, inside, each = [], [], [], []
    for number in range(flags.rounds):
        with tempfile.TemporaryDirectory() as folder:
            alone = bare(compiled, batch, flags.steps) if number % 2 else None
            ours = looped(compiled, specs, batch, flags.steps, folder)
            alone = alone or bare(compiled, batch, flags.steps)
        walls.append(ours[0] / alone[0])
        owns.append(ours[1] / alone[1])
        inside.append(ours[2])
        each.append(alone[1] / flags.steps)
    middle = 1e3 * sorted(each)[len(each) // 2]
    where = f"CPU, 1 thread, step of {middle:.1f} ms of the processor, {flags.backend}, torch {torch.__version__}"
    report("loop_vs_bare_step", walls, unit="ratio", where=where, against="for loop over the step", bar="<= 1.01")
    report("loop_vs_bare_step_processor_time", owns, unit="ratio", where=where, against="the same", bar="<= 1.01")
    report("loop_thread_over_its_steps", inside, unit="ratio", where=where, against="its own steps", bar="<= 1.01")
    return 0


if __name__ == "__main__":
    sys.exit(main())
