"""How far is a plan from a real run? Memory by schedule and by formula against the heap, and meshes in order of time.

    make bench-plan
    python experiments/benchmarks/plan.py [--only=memory,own,seconds,check,order] [--cases=NAME,...]

Memory: each case of CASES runs on 1, 2 or 4 gloo ranks with the whole heap counted (heap.py), the peak of the rank
where it is highest, above the state; shapes "wide" and "long" were not used while the formulas were written. Own: an
`nn.Module` under ZeRO-3, planned and measured. Seconds: of the processor, of plans of 405B on 16,384 ranks, of a search
of 1,000 meshes, of exact plans against a cold compile, and of 126 layers against 12. Check: of 64 layers on 16,384
ranks, by a ring beside tp, fsdp and dp, dense and with experts over an axis of their own. Order: the Spearman
correlation of the steps' times on 4 ranks with those that `plan.quick` predicts from rates measured on the same ranks
in the same run. JSON lines on stdout, a table on stderr.
Expected: exact within 2% of state + transients, quick within 15%; the order at 0.8 or more where the machine is quiet.
"""

import argparse
import dataclasses
import functools
import os
import statistics
import subprocess
import sys
import tempfile
import time
from typing import NamedTuple

import torch
from heap import counted_in_children, peak_bytes

from fmegatron import model, nn, optim, plan, step, tree
from fmegatron.collectives import Axes, Precision, connect
from fmegatron.layout import DataParallel, Mesh
from fmegatron.plan.rates import measured_rates
from fmegatron.step.checker.context import Report
from fmegatron.step.timelines.planned import Rates
from fmegatron.testing.measure import report
from fmegatron.testing.ranks import RankPool

LIMIT_S = 3600  # of one case, compiling included
SHAPES = {
    "base": {"dim": 256, "layers": 4, "heads": 8, "kv_heads": 4, "ffn_dim": 704, "vocab_size": 4096, "max_seq": 256},
    "deep": {"dim": 256, "layers": 12, "heads": 4, "kv_heads": 2, "ffn_dim": 704, "vocab_size": 1024, "max_seq": 128},
    "wide": {"dim": 384, "layers": 3, "heads": 6, "kv_heads": 6, "ffn_dim": 1024, "vocab_size": 2048, "max_seq": 128},
    "long": {"dim": 192, "layers": 6, "heads": 6, "kv_heads": 2, "ffn_dim": 512, "vocab_size": 1536, "max_seq": 512},
}
HELD_OUT = ("wide", "long")
ROWS = {"base": 8, "deep": 8, "wide": 16, "long": 4}
AHEAD = step.Overlap(bucket_bytes=1 << 22, separate_groups=True, peak=None)


class Case(NamedTuple):
    """shape, sizes of the mesh, name of the strategy, policy of layers, microbatches, bf16 on the wire, overlap."""

    shape: str
    mesh: Mesh
    strategy: str = "replicated"
    save: str = "mincut"
    microbatches: int = 1
    bf16: bool = False
    overlap: step.Overlap | bool = True


ONE, DP2, FSDP2, TP2 = Mesh(), Mesh(dp=2), Mesh(fsdp=2), Mesh(tp=2)
DP4, FSDP4, BOTH, HSDP = Mesh(dp=4), Mesh(fsdp=4), Mesh(fsdp=2, tp=2), Mesh(dp=2, fsdp=2)
CASES = {
    "one": Case("base", ONE),
    "one_inputs": Case("base", ONE, save="inputs"),
    "one_all_mb2": Case("base", ONE, save="all", microbatches=2),
    "replicated": Case("base", DP2),
    "zero1": Case("base", DP2, "zero1", overlap=AHEAD),
    "zero2_inputs_mb4": Case("base", DP2, "zero2", "inputs", 4, overlap=AHEAD),
    "zero3": Case("base", FSDP2, "zero3", overlap=AHEAD),
    "zero3_bf16": Case("base", FSDP2, "zero3", bf16=True, overlap=AHEAD),
    "tp2": Case("base", TP2),
    "tp2_inputs_mb2": Case("base", TP2, save="inputs", microbatches=2),
    "deep_zero3_inputs": Case("deep", FSDP2, "zero3", "inputs", overlap=AHEAD),
    "deep_hsdp_bf16": Case("deep", HSDP, "hsdp", bf16=True, overlap=AHEAD),
    "wide_one": Case("wide", ONE),
    "wide_one_bf16_inputs": Case("wide", ONE, save="inputs", bf16=True),
    "wide_zero1_mb2": Case("wide", DP2, "zero1", microbatches=2),
    "wide_zero3_all": Case("wide", FSDP2, "zero3", "all", overlap=AHEAD),
    "wide_tp2_bf16": Case("wide", TP2, bf16=True),
    "wide_replicated_4": Case("wide", DP4, save="inputs"),
    "wide_zero3_tp_4": Case("wide", BOTH, "zero3", overlap=AHEAD),
    "long_one_all": Case("long", ONE, save="all"),
    "long_one_inputs_mb4": Case("long", ONE, save="inputs", microbatches=4),
    "long_zero2_mb2": Case("long", DP2, "zero2", microbatches=2, overlap=AHEAD),
    "long_zero3_bf16_inputs": Case("long", FSDP2, "zero3", "inputs", bf16=True, overlap=AHEAD),
    "long_tp2_inputs": Case("long", TP2, save="inputs"),
    "long_zero3_4": Case("long", FSDP4, "zero3", overlap=AHEAD),
    "long_hybrid_4": Case("long", HSDP, "hybrid", "inputs", overlap=AHEAD),
}


# ---- one case --------------------------------------------------------------------------------------------------------
def described(case: Case) -> step.Description:
    """The step, the specs of its state, the layouts of its batch."""
    precision = Precision.bf16_wire() if case.bf16 else None
    config = model.llama(**SHAPES[case.shape], precision=precision)
    strategy, mesh = DataParallel.named(case.strategy), case.mesh
    specs, axes, optimizer = model.specs(config, mesh, strategy=strategy), Axes(mesh), optim.adamw(3e-4)
    layouts = tree.layouts(specs)
    loss = functools.partial(model.loss, decoder=config, axes=axes, save=case.save)
    how = {"strategy": strategy, "microbatches": case.microbatches, "precision": precision}
    update = step.build_train_step(loss, optimizer, layouts, axes, **how)
    rows = strategy.batch_layout((ROWS[case.shape], config.max_seq), torch.int64, mesh, case.microbatches)
    state = step.state_specs(specs, optimizer, strategy)
    return step.Description(update, state, {"tokens": rows, "labels": rows}, case.microbatches, config, case.save)


def run_of(case: Case, rank: int, world=None):
    """(zero-argument function that makes a step and reads its loss, bytes of the state)."""
    update, specs, batch = described(case)
    train = step.jit(update, donate=0, world=world, overlap=case.overlap)
    box = [tree.init(specs, 0, rank)]
    held = sum(x.numel() * x.element_size() for x in tree.leaves(box[0]))
    local = {name: torch.zeros(layout.local_shape(rank), dtype=torch.int64) for name, layout in batch.items()}
    local = tree.place(local, batch, rank)

    def once():
        box[0], metrics = train(box[0], local)
        return float(metrics["loss"])

    once()
    return once, held


def heap_on_rank(rank: int, name: str) -> tuple[int, int]:
    """(bytes of the state, peak above it), on a rank of a pool whose heap is counted. name: of a case."""
    case = CASES[name]
    with connect(case.mesh) as world:
        once, held = run_of(case, rank, world if case.mesh.size > 1 else None)
        once()
        return held, int(statistics.median([peak_bytes(once) for _ in range(3)]))


def measured(name: str, pool: RankPool) -> tuple[int, int]:
    """(bytes of the state, peak above it) of the rank that takes most."""
    found = pool.run(heap_on_rank, name, ranks=CASES[name].mesh.size, timeout_s=LIMIT_S)
    return max(found, key=lambda pair: pair[1])


def errors(name: str, pool: RankPool, exact: bool = True) -> dict[str, float]:
    """Relative errors of the plans of a case: "exact", "quick" of transients; with "+" of state and transients."""
    case = CASES[name]
    held, peak = measured(name, pool)
    described_case = described(case)
    transients = {"quick": plan.quick(described_case, overlap=case.overlap).transient}
    if exact:
        transients["exact"] = plan.exact(*described_case, case.mesh, overlap=case.overlap).transient
    found = {}
    for which, bytes_planned in transients.items():
        found[which] = bytes_planned / peak - 1
        found[which + "+"] = (bytes_planned + held) / (peak + held) - 1
    texts = ", ".join(f"{which} {value / 2**20:.1f} ({found[which]:+.1%})" for which, value in transients.items())
    print(
        f"{name:24s} state {held / 2**20:7.1f}  measured {peak / 2**20:7.1f} MiB  {texts}", file=sys.stderr, flush=True
    )
    return found


def memory(names) -> None:
    with counted_in_children() as counted, RankPool(4, timeout_s=LIMIT_S) as pool:
        found = {name: errors(name, pool) for name in names}
    heap = "heap" if counted else "torch's allocations (no compiler for heap.c)"
    where = f"{len(found)} cases, gloo ranks, CPU, torch {torch.__version__}, against the {heap} of real runs"
    for which, bars in (("exact", (0.05, 0.01)), ("exact+", (0.03, None)), ("quick+", (0.15, 0.06))):
        sizes = sorted(abs(one[which]) for one in found.values())
        label = which.replace("+", "_with_state")
        report(f"plan_{label}_worst", [max(sizes)], unit="share", bar=f"<= {bars[0]}", where=where)
        bar = None if bars[1] is None else f"<= {bars[1]}"
        report(f"plan_{label}_median", [statistics.median(sizes)], unit="share", bar=bar, where=where)
    new = sorted(abs(one["quick+"]) for name, one in found.items() if CASES[name].shape in HELD_OUT)
    if new:
        report("plan_quick_with_state_worst_of_new_shapes", [max(new)], unit="share", bar="<= 0.15", where=where)


# ---- a module of one's own -------------------------------------------------------------------------------------------
def own(mesh: Mesh, layers: int = 16, dim: int = 1024) -> step.Description:
    """ZeRO-3 of an `nn.Module` of so many plain layers of 4 MiB, all of whose weights are gathered at the start."""
    parts = [part for _ in range(layers) for part in (torch.nn.Linear(dim, dim, bias=False), torch.nn.Tanh())]
    tower = torch.nn.Sequential(*parts)
    shapes = {name: tuple(p.shape) for name, p in tower.named_parameters()}
    specs = tree.specs(shapes, mesh, init=tree.Normal(0.03), strategy=DataParallel.zero3())

    def loss_fn(params, batch):
        x = torch.func.functional_call(tower, params, (batch["x"],))
        return step.mean(x.square().sum(), x.numel())

    return step.build(loss_fn, optim.sgd(1e-3), specs, {"x": ((8 * mesh.size, dim), torch.float32)})


def heap_of_own(rank: int) -> int:
    """The peak above the state of that step on two ranks, the least of eight calls.

    A thread of gloo drops the buffers of a collective when it is scheduled again, up to 8 MiB later here.
    """
    with connect(FSDP2) as world:
        train_step, specs, rows = own(FSDP2)
        train = step.jit(train_step, donate=0, world=world)
        box, batch = [tree.init(specs, 0, rank)], {"x": torch.ones(rows["x"].local_shape(rank))}
        batch = tree.place(batch, rows, rank)

        def once():
            box[0], metrics = train(box[0], batch)
            return float(metrics["loss"])

        once(), once()
        return min(peak_bytes(once) for _ in range(8))


def own_module() -> None:
    eight = plan.exact(*own(Mesh(fsdp=8)), Mesh(fsdp=8))
    where = f"16 layers of 4 MiB on fsdp=8, gathered at the start, torch {torch.__version__}"
    report("plan_own_module_peak", [eight.peak / 2**20], unit="MiB", bar="<= 26", where=where)
    two = plan.exact(*own(FSDP2), FSDP2).transient
    with counted_in_children(), RankPool(2, timeout_s=LIMIT_S) as pool:
        heap = max(pool.run(heap_of_own, ranks=2, timeout_s=LIMIT_S))
    note = f"planned {two / 2**20:.1f} MiB above the state, measured {heap / 2**20:.1f}"
    report("plan_own_module_off", [abs(two / heap - 1)], unit="share", bar="<= 0.05", where="2 gloo ranks", note=note)


# ---- seconds of the processor ----------------------------------------------------------------------------------------
BIG = {
    "dim": 16384,
    "layers": 126,
    "heads": 128,
    "kv_heads": 8,
    "ffn_dim": 53248,
    "vocab_size": 128256,
    "max_seq": 8192,
}


def large(mesh: Mesh) -> step.Description:
    """405B under HSDP, everything recomputed, bf16 on the wire."""
    config, strategy = model.llama(**BIG, precision=Precision.bf16_wire()), DataParallel.hsdp()
    specs, axes, optimizer = model.specs(config, mesh, strategy=strategy), Axes(mesh), optim.adamw(3e-4)
    layouts = tree.layouts(specs)
    loss = functools.partial(model.loss, decoder=config, axes=axes, save="inputs")
    update = step.build_train_step(loss, optimizer, layouts, axes, strategy=strategy, precision=config.precision)
    rows = strategy.batch_layout((2048, config.max_seq), torch.int64, mesh)
    state = step.state_specs(specs, optimizer, strategy)
    return step.Description(update, state, {"tokens": rows, "labels": rows}, decoder=config, save="inputs")


def of_depth(layers: int) -> step.Description:
    """The deep shape on one rank with so many layers."""
    config = model.llama(**{**SHAPES["deep"], "layers": layers})
    mesh = Mesh()
    specs, axes, optimizer = model.specs(config, mesh), Axes(mesh), optim.adamw(3e-4)
    layouts = tree.layouts(specs)
    loss = functools.partial(model.loss, decoder=config, axes=axes, save="mincut")
    update = step.build_train_step(loss, optimizer, layouts, axes)
    rows = DataParallel().batch_layout((8, config.max_seq), torch.int64, mesh)
    return step.Description(
        update, step.state_specs(specs, optimizer), {"tokens": rows, "labels": rows}, decoder=config
    )


def processor_seconds(work) -> float:
    """Of one call, in this process and those that it waited for."""
    before = os.times()
    work()
    after = os.times()
    return sum(after[:4]) - sum(before[:4])


def in_fresh_process(what: str, cache: str) -> float:
    """Processor seconds of `--child=WHAT` above its imports, with an empty compile cache."""
    environment = {**os.environ, "TORCHINDUCTOR_CACHE_DIR": cache, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, os.path.abspath(__file__), f"--child={what}"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    return float(done.stdout.strip().splitlines()[-1])


def child(what: str) -> None:
    torch.compile(lambda x: x + 1)(torch.zeros(8))  # the precompiled header, and Inductor's own imports
    if what == "compile":
        print(processor_seconds(lambda: run_of(CASES["one"], 0)))
    elif what == "exact":
        print(processor_seconds(lambda: plan.exact(*described(CASES["one"]), Mesh())))
    else:
        print(processor_seconds(lambda: plan.deep(of_depth, int(what), Mesh())))


def seconds() -> None:
    where = f"CPU, torch {torch.__version__}"
    mesh = Mesh(dp=16, fsdp=128, tp=8)
    found = [processor_seconds(lambda: plan.quick(large(mesh))) for _ in range(3)]
    report("plan_quick_405b_16384_ranks", found, unit="s", bar="<= 0.5", where=where)
    meshes = [m for n in (16384, 8192) for m in plan.meshes_of(n, ("dp", "fsdp", "cp", "tp"))][:1000]
    took = plan.search(large, meshes, 80 << 30).seconds
    report("plan_search_1000_meshes", [took], unit="s", bar="<= 20", where=f"{len(meshes)} meshes of 405B, {where}")
    with tempfile.TemporaryDirectory() as root:
        compile_s, exact_s, deep_s, twelve_s = (
            in_fresh_process(what, os.path.join(root, what)) for what in ("compile", "exact", "126", "12")
        )
    note = f"{exact_s:.0f} s against {compile_s:.0f} s"
    report("plan_exact_over_cold_compile", [exact_s / compile_s], unit="ratio", bar="<= 0.6", where=where, note=note)
    note = f"{deep_s:.0f} s against {twelve_s:.0f} s"
    report("plan_126_layers_over_12", [deep_s / twelve_s], unit="ratio", bar="<= 1.5", where=where, note=note)


# ---- the check -------------------------------------------------------------------------------------------------------
CHECKED = {"dense": Mesh(dp=16, fsdp=32, cp=4, tp=8), "experts": Mesh(dp=8, fsdp=8, ep=8, cp=4, tp=8)}


def checked(name: str, layers: int = 64) -> Report:
    """The check of a train step of 16,384 ranks: bf16, HSDP, sequence parallelism, a ring over cp; experts over ep."""
    mesh, strategy = CHECKED[name], DataParallel(("dp", "fsdp", "ep"), *[("fsdp",)] * 3)
    mixture = model.MoE(nn.Router(64, 4, normalised=True), 4096, balance=0.01, z_loss=1e-3)
    config = model.llama(
        128256, 4096, layers, 32, 16, 14336, 8192, mlp=mixture if name == "experts" else None, context="ring",
        sequence_parallel=True, compute_dtype=torch.bfloat16,
    )  # fmt: skip
    specs, axes = model.specs(config, mesh, strategy=strategy), Axes(mesh, data=strategy.tokens)
    layouts, optimizer = tree.layouts(specs), optim.adamw(3e-4)
    loss = functools.partial(model.loss, decoder=config, axes=axes, save="mincut")
    update = step.build_train_step(loss, optimizer, layouts, axes, strategy=strategy)
    rows = strategy.batch_layout((2 * mesh.extent(mesh.axes(strategy.axes)), config.max_seq), torch.int64, mesh)
    batch = {"tokens": rows, "labels": rows}
    return step.check(update, step.state_specs(specs, optimizer, strategy), batch)


def check(repetitions: int = 3) -> None:
    for name, mesh in CHECKED.items():
        where = f"64 layers, {mesh}, {mesh.size} ranks, one thread, torch {torch.__version__}"
        reports, wall, processor = [], [], []
        for _ in range(repetitions):
            start = time.perf_counter(), time.process_time()
            reports.append(checked(name))
            wall.append(time.perf_counter() - start[0])
            processor.append(time.process_time() - start[1])
        wrong = max(len(found.findings) + len(found.unproven) for found in reports)
        report(f"check_{name}_findings", [wrong], unit="findings and unproven", bar="<= 0", where=where)
        report(f"check_{name}_wall", wall, unit="s", bar="< 10", where=where)
        report(f"check_{name}_processor", processor, unit="s", bar="< 10", where=where)


# ---- order -----------------------------------------------------------------------------------------------------------
ORDER = [
    Case("base", DP4),
    Case("base", DP4, "zero1"),
    Case("base", FSDP4, "zero3"),
    Case("base", FSDP4, "zero3", "inputs"),
    Case("base", Mesh(tp=4)),
    Case("base", Mesh(dp=2, tp=2)),
    Case("base", BOTH, "zero3", "inputs"),
    Case("base", HSDP, "hsdp"),
    Case("base", DP4, save="inputs", microbatches=2),
    Case("base", Mesh(tp=4), save="inputs"),
]


def timed_on_rank(rank: int, which: int, rounds: int) -> tuple[float, tuple]:
    """(median seconds of a step, rates of this machine with all ranks at work). which: of ORDER."""
    case = ORDER[which]
    with connect(case.mesh) as world:
        rates = measured_rates(world)
        once, _ = run_of(case, rank, world)
        found = []
        for _ in range(rounds):
            world.barrier()
            start = time.perf_counter()
            once()
            found.append(time.perf_counter() - start)
        return statistics.median(found), dataclasses.astuple(rates)


def ranked(values) -> list[int]:
    """The place of each value in their order."""
    order = sorted(range(len(values)), key=values.__getitem__)
    return [order.index(i) for i in range(len(values))]


def spearman(a, b) -> float:
    """Correlation of ranks (Spearman 1904), without ties."""
    n = len(a)
    return 1 - 6 * sum((x - y) ** 2 for x, y in zip(ranked(a), ranked(b), strict=True)) / (n * (n * n - 1))


def order(rounds: int = 7) -> None:
    found, rates = [], []
    with RankPool(4, timeout_s=LIMIT_S) as pool:
        for which in range(len(ORDER)):
            on_ranks = pool.run(timed_on_rank, which, rounds, ranks=4, timeout_s=LIMIT_S)
            found.append(max(took for took, _ in on_ranks))
            rates.append(on_ranks[0][1])
    typical = Rates(*map(statistics.median, zip(*rates, strict=True)))
    planned = [plan.quick(described(case)).step_seconds(typical)["total"] for case in ORDER]
    for case, took, said in zip(ORDER, found, planned, strict=True):
        print(
            f"{case.mesh!s:16s} {case.strategy:10s} {case.save:7s} {took:8.3f} s, planned {said:8.3f} s",
            file=sys.stderr,
        )
    where = f"{len(ORDER)} meshes and strategies on 4 gloo ranks, {typical}"
    report("plan_order_spearman", [spearman(found, planned)], unit="rank correlation", bar=">= 0.8", where=where)


def main(arguments=None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", default="memory,own,seconds,check,order")
    parser.add_argument("--cases", default=",".join(CASES))
    parser.add_argument("--child", default=None)
    flags = parser.parse_args(arguments)
    if flags.child:
        torch.set_num_threads(1)
        return child(flags.child)
    only = flags.only.split(",")
    if "seconds" in only:
        seconds()
    if "check" in only:
        check()
    if "memory" in only:
        memory(flags.cases.split(","))
    if "own" in only:
        own_module()
    if "order" in only:
        order()


if __name__ == "__main__":
    main()
