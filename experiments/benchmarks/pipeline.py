"""A step by stages on gloo ranks of one thread each, against torch.distributed.pipelining; and what needs no clock.

    make bench-pipeline
    python experiments/benchmarks/pipeline.py [--rounds=7] [--only=NAME,...] [--quick]

Model `small` (peers/decoder.py), fp32, 2 ranks, 4 microbatches. Two forms alternate on both ranks; a time ratio is the
median over rounds of ours / the other, each the slowest rank's. Before anything is timed, both must print the same
losses. Exact lines: messages and bytes of a step, layers that are compiled, clocks of tables, how often weights travel
where they are gathered once, and the time that the host takes for an action beside what it computes. Deep: seconds of
the processor until a step of 126 blocks on 32 stages is traced, cut and checked. JSON lines on stdout, a table on
stderr. --quick: a tiny model in fp64 and one round, to see that everything runs and is equal.
"""

import contextlib
import itertools
import time

import torch
import torch.distributed as dist
from peers.decoder import Sizes
from peers.stages import staged_step
from races import flags_of

from fmegatron import model, optim, step, tree
from fmegatron.collectives import connect
from fmegatron.layout import Mesh
from fmegatron.step.graph.nodes import items_of, opaque_entries
from fmegatron.step.pipeline import schedules
from fmegatron.step.pipeline.clock import clock
from fmegatron.step.pipeline.entry import PipelineEntry, RankOfPipeline
from fmegatron.step.pipeline.table import Message, messages, programs
from fmegatron.testing.measure import paired_seconds, report
from fmegatron.testing.ranks import RankPool

LR, M, STEPS, LIMIT_S = 3e-4, 4, 3, 1800
PEERS = {"torch_1f1b": False, "torch_zbv": True}  # whether it is a V
# (ours, the other, bar of time)
RACES = [("1f1b", "torch_1f1b", 1.0), ("zb_v", "torch_zbv", 0.9), ("zb_v", "1f1b", 1.0), ("zb_h1", "1f1b", None)]


def described(schedule: str, sizes: Sizes, ranks: int) -> step.Description:
    """Our step by stages."""
    config, _, batch = sizes.setup()
    parts = step.Pipelining(schedule).of(M)
    return model.build(
        config, optim.adamw(LR), Mesh(pp=ranks), (len(batch["tokens"]), config.max_seq), microbatches=parts
    )


# ---- on a rank -------------------------------------------------------------------------------------------------------
def form(name: str, sizes: Sizes, backend: str):
    """One way to train on this rank: () -> the loss of a step."""
    config, params, batch = sizes.setup()
    if name in PEERS:
        vee = PEERS[name]
        peer = staged_step(config, params, LR, None if vee else backend, M, vee)
        return lambda: float(peer(batch))
    value = described(name, sizes, dist.get_world_size())
    world = connect(value_mesh := Mesh(pp=dist.get_world_size()))
    train, rows = step.jit(value.function, donate=0, world=world, backend=backend), tree.layouts(value.batch)
    held = [tree.init(value.state, 0, world.rank)]
    given = tree.place(dict(batch), rows, world.rank)
    assert tree.leaves(rows)[0].mesh == value_mesh

    def one() -> float:
        held[0], metrics = train(held[0], given)
        return float(metrics["loss"])

    return one


def race(rank: int, names: tuple[str, str], sizes: Sizes, backend: str, rounds: int) -> dict:
    """Losses of the first steps of both forms, and seconds in each round."""
    forms = [form(name, sizes, backend) for name in names]
    losses = [[one() for _ in range(STEPS)] for one in forms]
    return {"losses": losses, "pairs": paired_seconds(forms[0], forms[1], rounds, before=dist.barrier)}


# ---- what is exact ---------------------------------------------------------------------------------------------------
def plan_of(value: step.Description):
    """How our step by stages is computed."""
    empty = tree.map(
        lambda of: torch.empty(of.local_shape(0), dtype=of.dtype, device="meta"),
        tree.layouts((value.state, value.batch)),
    )
    placed = [tree.place(x, tree.layouts(of)) for x, of in zip(empty, (value.state, value.batch), strict=True)]
    graph = step.trace(value.function, tuple(placed)).graph_module.graph
    (entry,) = [e for e in opaque_entries(graph) if isinstance(e, PipelineEntry)]
    assert entry.plan is not None, "who made it knows how it is computed"
    return entry.plan


def counts(sizes: Sizes, where: str) -> None:
    """Messages, bytes, compiled layers, clocks."""
    config, _, batch = sizes.setup()
    for schedule, ranks in (("1f1b", 2), ("zb_h1", 2)):
        plan = plan_of(described(schedule, sizes, ranks))
        sent = messages(plan.table)
        report(f"{schedule}_messages", [len(sent)], unit="messages", bar=f"<= {2 * (ranks - 1) * M}", where=where)
        pairs = {"F": plan.parts.forward, "B": plan.parts.backward}
        nbytes = sum(plan.like(m.kind, m.stage, pair[0]).nbytes for m in sent if (pair := pairs[m.kind][m.stage]))
        least = 2 * (ranks - 1) * batch["tokens"].numel() * config.dim * config.compute_dtype.itemsize
        report(f"{schedule}_bytes", [nbytes / least], unit="ratio", against="activations and gradients", bar="<= 1.0",
               where=where)  # fmt: skip
        layers = {e.name.rpartition("_")[0] for part in plan.parts.of.values() for e in opaque_entries(part.graph)}
        report(f"{schedule}_layers", [len(layers)], unit="graphs", bar="<= 3", where=where, note="fwd, dx, dw")
    clocks = [clock(of(4, 8)).duration for of in (schedules.zb_h1, schedules.one_f_one_b)]
    report(
        "clock_zb_h1",
        [clocks[0] / clocks[1]],
        unit="ratio",
        against="1f1b, equal costs",
        bar="<= 0.93",
        where="p=4 m=8",
    )
    gathers(where)
    host(plan_of(described("zb_h1", Sizes("least"), 2)), where)


def deep(quick: bool) -> None:
    """How long a step of many blocks is traced, cut and checked, in seconds of the processor."""
    layers, ranks = (4, 2) if quick else (126, 16)
    decoder, parts = model.llama(256, 32, layers, 4, 4, 64, 16), step.Pipelining("interleaved", chunks=2).of(2 * ranks)
    value = model.build(decoder, optim.adamw(LR), Mesh(pp=ranks), (2 * ranks, decoder.max_seq), microbatches=parts)
    began = time.process_time()
    found = step.check(value)
    taken = time.process_time() - began
    assert found.ok, found
    bar = None if quick else "<= 10"
    report(
        "trace_cut_check", [taken], unit="s", bar=bar, where=f"{layers} blocks, p={ranks} v=2", note="processor time"
    )


def moves_weights(node) -> bool:
    """Whether a node gathers or reduces."""
    return any(name in str(node.target) for name in ("all_gather", "reduce_scatter"))


def run_by(table, rank: int) -> list[tuple[str, int]]:
    """The parts that a rank runs in a step."""
    pairs = zip(table.rows[rank], table.parts(rank), strict=True)
    return [(kind, action.stage) for action, kinds in pairs for kind in kinds]


def gathers(where: str) -> None:
    """Collectives of a step on the busiest rank, of weights and gradients under ZeRO-3, by how often they are made."""
    for schedule, often, bar in (("1f1b", "step", 1.1 / M), ("interleaved", "burst", 1.0)):
        found = {}
        for each in ("use", often):
            parts, mesh = step.Pipelining(schedule, gather=each).of(M), Mesh(pp=2, fsdp=2)
            value = model.build(model.llama(256, 32, 4, 4, 4, 64, 16), optim.adamw(LR), mesh, (16, 16),
                                strategy="zero3", microbatches=parts)  # fmt: skip
            plan = plan_of(value)
            calls = {key: sum(map(moves_weights, part.graph.nodes)) for key, part in plan.parts.of.items()}
            found[each] = max(
                sum(
                    calls[kind, a.stage] for a, kinds in zip(row, plan.table.parts(rank), strict=True) for kind in kinds
                )
                for rank, row in enumerate(plan.table.rows)
            )
        name, note = (
            {"step": "gathers_once", "burst": "gathers_by_runs"}[often],
            f"{found[often]} calls of {found['use']}",
        )
        ratio = found[often] / found["use"]
        report(name, [ratio], unit="ratio", against="by each action", bar=f"<= {bar}", where=f"{schedule}, {where}",
               note=note)  # fmt: skip


def host(plan, where: str) -> None:
    """The time of rank 0 for an action, of parts that compute nothing."""
    made = {}

    def run(part, values):
        if part not in made:
            outs = items_of(part.graph_module.graph.output_node().args[0])
            made[part] = [torch.zeros(n.meta["val"].shape, dtype=n.meta["val"].dtype) for n in outs]
        return made[part]

    inputs = [torch.zeros(x.shape, dtype=x.dtype) for x in plan.fakes]
    brought = [torch.zeros(plan.shape(path), dtype=plan.layouts[path].dtype) for path in plan.brought]
    program = programs(plan.table)[0]
    count = sum(not isinstance(item, Message) for item in program)

    def once() -> float:
        rank = RankOfPipeline(plan, 0, inputs, brought, run, lambda f, *values: f(*values))
        rank.held.add = lambda *_: None  # sums are no time of the host
        began = time.perf_counter()
        for item in program:
            if not isinstance(item, Message):
                rank.held.do(*item)
            elif item.target == 0:
                rank.held.receive(item, None)
            else:
                rank.held.sent(item)
        return (time.perf_counter() - began) / count * 1e6

    once()
    report(
        "host_of_an_action", [once() for _ in range(20)], unit="us", bar="<= 30", where=where, note="beside its call"
    )


# ---- what is reported ------------------------------------------------------------------------------------------------
def run_race(pool, flags, where, ours: str, other: str, bar) -> None:
    """Losses and time of ours over the other's."""
    ranks = pool.run(race, (ours, other), flags.sizes, flags.backend, flags.rounds, ranks=2, timeout_s=LIMIT_S)
    worst = max(abs(a - b) / b for a, b in zip(*ranks[0]["losses"], strict=True))
    limit = 1e-10 if flags.sizes.dtype == torch.float64 else 1e-5
    name = f"{ours}_{other}"
    report(
        f"{name}_losses", [worst], unit="relative", against=f"{other}, {STEPS} steps", bar=f"<= {limit}", where=where
    )
    slowest = [tuple(max(r["pairs"][i][f] for r in ranks) for f in (0, 1)) for i in range(flags.rounds)]
    report(f"{name}_time", [a / b for a, b in slowest], unit="ratio", against=other, where=where,
           bar=None if bar is None or flags.quick else f"<= {bar}",
           note=f"{min(b for _, b in slowest) * 1e3:.0f} ms of {other}")  # fmt: skip


def main(arguments: list[str] | None = None, pool: RankPool | None = None) -> None:
    names = ["counts", "deep", *dict.fromkeys(itertools.chain(f"{ours}_{other}" for ours, other, _ in RACES))]
    flags = flags_of(__doc__, names, arguments)
    flags.sizes = Sizes("least", layers=4, dtype=torch.float64) if flags.quick else Sizes("small")
    dtype = str(flags.sizes.dtype).removeprefix("torch.")
    where = (
        f"2 gloo ranks, 1 thread each, model {flags.sizes.size}, {dtype}, {M} microbatches, torch {torch.__version__}"
    )
    with contextlib.ExitStack() as stack:
        if "counts" in flags.only:
            counts(flags.sizes, where)
        if "deep" in flags.only:
            deep(flags.quick)
        for ours, other, bar in RACES:
            if f"{ours}_{other}" in flags.only:
                pool = pool or stack.enter_context(contextlib.closing(RankPool(2)))
                run_race(pool, flags, where, ours, other, bar)


if __name__ == "__main__":
    main()
