"""How fast is one compiled functional step? Against a straight nn.Module + torch.compile(model) + fused AdamW + clip.

    python experiments/benchmarks/step.py [--sizes=tiny,small,deep] [--rounds=9] [--only=time,memory,first_call]

One process, 2 threads, fp32, CPU. Forms alternate in one process (order reversed every other round); a ratio is
the median over rounds of ours / peer's. JSON lines on stdout, as DESIGN.md section 10 has them; a table on stderr.
Expected on 2 cores of a shared x86 machine: ratios about 1.0 (min-cut) and 1.2 to 1.3 (inputs only).
"""

import argparse
import functools
import os
import statistics
import subprocess
import sys
import tempfile
import time

import torch
from peers.decoder import Sizes, peer_step

from fmegatron import model, optim, step, tree
from fmegatron.collectives import Axes
from fmegatron.layout import Mesh
from fmegatron.step.ambient import ambient
from fmegatron.testing.measure import peak_bytes, report

THREADS = 2
WHERE = f"CPU, 1 process, {THREADS} threads, fp32, torch {torch.__version__}"
BARS = {("mincut", "tiny"): 1.00, ("mincut", "small"): 1.02, ("mincut", "deep"): 1.00}
BARS |= {("inputs", size): 1.28 for size in ("tiny", "small", "deep")}
PEAK_BARS = {"mincut": 1.00, "inputs": 0.60}


# ---- ours, and how both are measured ---------------------------------------------------------------------------------
def our_step(config, params, save, **jit_options):
    """(step(batch) -> loss, holder): the project's own train step, state donated."""
    mesh = Mesh(dp=1)
    axes, specs = Axes(mesh), model.specs(config, mesh)
    layouts = tree.layouts(specs)
    loss = functools.partial(model.loss, decoder=config, axes=axes, save=save)
    optimizer = optim.adamw(3e-4)
    train = step.jit(step.build_train_step(loss, optimizer, layouts, axes), donate=0, **jit_options)
    holder = [tree.init(step.state_specs(specs, optimizer), 0, rank=0, given=tree.map(torch.clone, params))]

    def run(batch):
        holder[0], metrics = train(holder[0], batch)
        return metrics["loss"]

    run.jitted = train
    return run, holder


def forms(size, layers=None):
    """name -> zero-argument function that makes one step and reads the loss back."""
    config, params, batch = Sizes(size, layers).setup()
    runs = {
        "peer": peer_step(config, params, 3e-4)[0],
        "mincut": our_step(config, params, "mincut")[0],
        "inputs": our_step(config, params, "inputs")[0],
    }
    return {name: functools.partial(lambda run: float(run(batch)), run) for name, run in runs.items()}


def ratios(runs: dict, rounds: int) -> dict:
    """name -> list of seconds; forms alternate, the order is reversed every other round."""
    seconds = {name: [] for name in runs}
    for r in range(rounds):
        for name in list(runs)[:: 1 if r % 2 else -1]:
            start = time.perf_counter()
            runs[name]()
            seconds[name].append(time.perf_counter() - start)
    return seconds


def time_and_memory(sizes, rounds, with_memory):
    for size in sizes:
        runs = forms(size)
        losses = {name: [run() for _ in range(3)] for name, run in runs.items()}
        worst = max(abs(a - b) for n in losses for a, b in zip(losses[n], losses["peer"], strict=True))
        print(f"{size}: losses of the first 3 steps differ by at most {worst:.1e}", file=sys.stderr)
        seconds = ratios(runs, rounds)
        for name in ("mincut", "inputs"):
            r = sorted(a / b for a, b in zip(seconds[name], seconds["peer"], strict=True))
            report(f"step_time_{name}_{size}", r, unit="ratio", against="torch.compile(model) + fused AdamW",
                   bar=f"<= {BARS[name, size]}", where=WHERE)  # fmt: skip
        for name, s in seconds.items():
            print(f"{size:6s} {name:7s} {statistics.median(s) * 1e3:8.1f} ms  min {min(s) * 1e3:8.1f}", file=sys.stderr)
        if with_memory:
            peaks = {name: peak_bytes(run) for name, run in runs.items()}
            for name in ("mincut", "inputs"):
                report(f"peak_above_state_{name}_{size}", [peaks[name] / peaks["peer"]], unit="ratio", where=WHERE,
                       against=f"{peaks['peer'] / 2**20:.0f} MiB of the peer", bar=f"<= {PEAK_BARS[name]}")  # fmt: skip


def first_call(form: str, layers: int, cache: str) -> float:
    """Seconds of trace + compile + run in a fresh process with the given compile cache."""
    environment = {**os.environ, "TORCHINDUCTOR_CACHE_DIR": cache, "OMP_NUM_THREADS": str(THREADS)}
    command = [sys.executable, os.path.abspath(__file__), f"--child={form}:{layers}"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    return float(done.stdout.strip().splitlines()[-1])


def child(spec: str) -> None:
    form, layers = spec.split(":")
    torch.compile(lambda x: x + 1)(torch.zeros(8))  # the precompiled C++ header, once per cache directory
    config, params, batch = Sizes("deep", int(layers)).setup()
    run = peer_step(config, params, 3e-4)[0] if form == "peer" else our_step(config, params, form)[0]
    start = time.perf_counter()
    float(run(batch))
    print(time.perf_counter() - start)


def first_calls():
    with tempfile.TemporaryDirectory() as root:
        cold, warm = {}, {}
        for form, layers in (("peer", 32), ("mincut", 32), ("mincut", 4)):
            cache = os.path.join(root, f"{form}{layers}")
            cold[form, layers] = first_call(form, layers, cache)
            warm[form, layers] = first_call(form, layers, cache)
            both = f"cold {cold[form, layers]:.1f} s, warm {warm[form, layers]:.1f} s"
            print(f"first call {form}, {layers} layers: {both}", file=sys.stderr)
    ours, peer, four = cold["mincut", 32], cold["peer", 32], cold["mincut", 4]
    for name, value, against, bar in (
        ("cold_32_layers", ours / peer, "torch.compile(model), 32 layers", "<= 0.5"),
        ("32_over_4_layers", ours / four, "ours at 4 layers", "<= 1.4"),
        ("warm_over_cold", warm["mincut", 32] / ours, "ours, cold cache", "<= 0.2"),
    ):
        report(f"first_call_{name}", [value], unit="ratio", against=against, bar=bar, where=WHERE)


def overhead():
    """Microseconds per leaf that a call costs outside of the graph, from two jits that differ in their leaves alone:
    of a State that is looked into between the calls, and of one that is not, which is taken whole."""

    def many(state):
        first, *others = state.params
        return step.State(state.step + 1, [first + 1, *others], state.opt)

    def once(n, look):
        run = step.jit(many, donate=0)
        state = run(step.State(torch.zeros((), dtype=torch.int64), [torch.zeros(1) for _ in range(n)], {}))
        times = []
        for _ in range(300):
            if look:
                state.params  # noqa: B018
            start = time.perf_counter()
            state = run(state)
            times.append(time.perf_counter() - start)
        return statistics.median(times)

    against = "slope from 10 to 410 leaves, 300 calls each"
    for name, look, bar in (("jit_call_overhead", True, "<= 2.0"), ("jit_call_overhead_whole", False, "<= 0.15")):
        slope = (once(410, look) - once(10, look)) / 400 * 1e6
        report(name, [slope], unit="us per leaf", against=against, bar=bar, where=WHERE)


def watching():
    """Microseconds of a call in which settings of torch, and what the trace has read of the user's code, are compared:
    100 functions that read three numbers of their own each, and a list of 1,000 numbers."""
    names = {f"number_{i}": i + 0.5 for i in range(300)} | {"numbers": list(range(1000))}
    for i in range(100):
        body = f"lambda x: x * (number_{3 * i} + number_{3 * i + 1} + number_{3 * i + 2})"
        names[f"helper_{i}"] = eval(body, names)
    used = " + ".join(f"helper_{i}(x)" for i in range(100))
    run = step.jit(eval(f"lambda x: {used} + len(numbers)", names), backend="eager")
    run(torch.ones(4))
    read, times = next(iter(run.cache.values())).read, []
    for _ in range(1000):
        start = time.perf_counter()
        changed = (ambient(), read.changed())
        times.append((time.perf_counter() - start) * 1e6)
        assert changed[1] is None
    report("jit_call_watched", [statistics.median(times)], unit="us", against="300 numbers", bar="<= 20", where=WHERE)


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--sizes", default="tiny,small,deep")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--only", default="time,memory,first_call,overhead")
    parser.add_argument("--child", default=None)
    flags = parser.parse_args()
    torch.set_num_threads(THREADS)
    if flags.child:
        return child(flags.child)
    only = flags.only.split(",")
    if "time" in only:
        time_and_memory(flags.sizes.split(","), flags.rounds, "memory" in only)
    if "overhead" in only:
        overhead()
        watching()
    if "first_call" in only:
        first_calls()


if __name__ == "__main__":
    main()
