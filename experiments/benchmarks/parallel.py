"""One compiled step over ranks, against FSDP2 with compiled layers, DDP and `parallelize_module` + torch.compile.

    make bench-parallel
    python experiments/benchmarks/parallel.py [--ranks=2] [--rounds=7] [--only=NAME,...] [--quick]

Model `small` (peers/decoder.py), fp32, gloo ranks of one thread each. Two forms alternate on all ranks; a time ratio
is the median over rounds of ours / peer, each the slowest rank's. Peaks are above the state (parameters and moments at
rest) of the rank where they are highest, of the whole process (heap.py); DDP's buckets count. Before anything is timed,
both forms must print the same losses. JSON lines on stdout, a table on stderr. Bars are for 2 ranks; --ranks=4 is a
report without them. --quick: a tiny model in fp64 and one round, to see that everything runs and is equal.
Expected on 2 quiet cores: time ratios 0.8 to 1.0, counts as the bars say.
"""

import contextlib
import dataclasses
import functools
import statistics
from typing import NamedTuple

import torch
import torch.distributed as dist
from heap import counted_in_children, peak_bytes
from peers.decoder import Sizes
from peers.distributed import bucket_bytes, ddp_step, fsdp2_step
from peers.tensor_parallel import tp_step
from races import flags_of

from fmegatron import model, optim, step, tree
from fmegatron.collectives import Axes, connect
from fmegatron.layout import DataParallel, Mesh
from fmegatron.step.costs import least_traffic, state_bytes
from fmegatron.step.timelines.planned import launches as launches_of_step
from fmegatron.testing.measure import paired_seconds, report
from fmegatron.testing.ranks import RankPool

LR = 3e-4
ENDS = step.Overlap(depth=0, late_reductions=False, bucket_bytes=1 << 22)  # fewest messages, no order of its own
AHEAD = step.Overlap(bucket_bytes=1 << 22, separate_groups=True, peak=None)  # as much as there is, without a limit


class Ours(NamedTuple):
    """A form of ours: the axis, the strategy of the data, what a layer saves, the optimizer, how collectives run.

    Over tp the sequence is split too, and all ranks have the full batch.
    """

    axis: str
    strategy: DataParallel
    save: str = "mincut"
    optimizer: str = "adamw"
    overlap: step.Overlap | bool = ENDS


ZERO3 = DataParallel.zero3("fsdp")
OURS = {
    "zero3_mincut": Ours("fsdp", ZERO3, overlap=AHEAD),
    "zero3_inputs": Ours("fsdp", ZERO3, save="inputs", overlap=AHEAD),
    "replicated": Ours("dp", DataParallel.replicated("dp")),
    "zero1": Ours("dp", DataParallel.zero1("dp"), overlap=AHEAD),
    "zero3_muon": Ours("fsdp", ZERO3, optimizer="muon", overlap=AHEAD),
    "tensor": Ours("tp", DataParallel.replicated("dp")),
    "overlap_mincut": Ours("fsdp", ZERO3, overlap=AHEAD),
    "overlap_inputs": Ours("fsdp", ZERO3, save="inputs", overlap=AHEAD),
    "plain_mincut": Ours("fsdp", ZERO3),
    "plain_inputs": Ours("fsdp", ZERO3, save="inputs"),
}
# What `jit` does by default, and the order of the graph.
OURS |= {
    f"{how}_{name}": Ours(axis, strategy, save, overlap=overlap)
    for how, overlap in (("default", True), ("order", False))
    for name, axis, strategy, save in (
        ("zero3_mincut", "fsdp", ZERO3, "mincut"),
        ("zero3_inputs", "fsdp", ZERO3, "inputs"),
        ("replicated", "dp", DataParallel.replicated("dp"), "mincut"),
        ("zero1", "dp", DataParallel.zero1("dp"), "mincut"),
        ("tensor", "tp", DataParallel.replicated("dp"), "mincut"),
    )
}
PEERS = {"fsdp2": fsdp2_step, "ddp": ddp_step, "parallelize_module": tp_step}
# (ours, the other, bar of time, bar of peak)
RACES = [
    ("zero3_mincut", "fsdp2", 0.88, 1.10),
    ("zero3_inputs", "fsdp2", 0.95, 0.70),
    ("replicated", "ddp", 1.00, 0.80),
    ("zero1", "ddp", 1.05, None),
    ("tensor", "parallelize_module", 1.00, 1.00),
    ("zero3_muon", "zero3_mincut", 1.3, None),
    ("overlap_mincut", "plain_mincut", None, 1.05),
    ("overlap_inputs", "plain_inputs", None, 1.05),
    *((f"default_{name}", f"order_{name}", 1.03, 1.05) for name in ("zero3_mincut", "zero3_inputs", "replicated")),
    *((f"default_{name}", f"order_{name}", 1.03, 1.05) for name in ("zero1", "tensor")),
]
STEPS = 3  # whose losses are compared before anything is timed
PEAKS = 5  # measurements of a peak
LIMIT_S = 1800  # of one race, compiling included


# ---- on a rank -------------------------------------------------------------------------------------------------------
class Form:
    """One way to train on this rank: call it for a step and its loss. persistent: bytes beside the state that stay."""

    def __init__(self, name: str, sizes: Sizes, worlds: dict, backend: str, tensor: bool):
        config, params, batch = sizes.setup()
        config = dataclasses.replace(config, sequence_parallel=tensor)
        ranks = dist.get_world_size()
        self.batch = batch if tensor else {key: x.chunk(ranks)[dist.get_rank()] for key, x in batch.items()}
        self.persistent, self.state, self.train = 0, None, None
        if name in PEERS:
            self.step, module = PEERS[name](config, params, LR, backend)
            self.persistent = bucket_bytes(module) if name == "ddp" else 0
            return
        axis, strategy, save, optimizer, overlap = OURS[name]
        mesh = Mesh(**{axis: ranks})
        world = worlds[axis] = worlds.get(axis) or connect(mesh)
        rows = {key: strategy.batch_layout(tuple(x.shape), x.dtype, mesh) for key, x in batch.items()}
        self.batch = tree.place(self.batch, rows, world.rank)
        specs, axes = model.specs(config, mesh, strategy=strategy), Axes(mesh)
        layouts = tree.layouts(specs)
        optimizer = optimizer_of(optimizer)
        loss = functools.partial(model.loss, decoder=config, axes=axes, save=save)
        update = step.build_train_step(loss, optimizer, layouts, axes, strategy=strategy)
        self.train, self.mesh = step.jit(update, donate=0, world=world, backend=backend, overlap=overlap), mesh
        self.state = tree.init(step.state_specs(specs, optimizer, strategy), 0, world.rank)
        self.formula = state_bytes(specs, optimizer, world.rank)
        if tensor:  # gathers and reduce-scatters of activations, 4 each way a layer, and at both ends of the decoder
            self.least = (8 * config.layers + 4) * batch["tokens"].numel() * config.dim
            self.least *= config.compute_dtype.itemsize * (ranks - 1) // ranks
            return
        least = least_traffic(layouts, strategy, gathers=lambda p: 2 if p.startswith("blocks/") else 1)
        # The count of the tokens and the sum of their losses in fp64, and the norm where no rank has all gradients.
        numbers = 2 * 8 + (config.param_dtype.itemsize if strategy.optim else 0)
        self.least = least.total + 2 * (ranks - 1) * numbers // ranks

    def __call__(self) -> float:
        if self.train is None:
            return float(self.step(self.batch))
        self.state, metrics = self.train(self.state, self.batch)
        return float(metrics["loss"])

    def counted(self) -> dict | None:
        """What our step holds and sends on this rank, beside what it should."""
        if self.train is None:
            return None
        graph = self.train.graph("overlap")
        found = step.collectives_of(graph, self.mesh)
        ops = [c.op for c in found]
        held = sum(x.numel() * x.element_size() for x in tree.leaves((self.state.params, self.state.opt)))
        return {
            "ahead": gathers_ahead(launches_of_step(graph).split()),
            "calls": {op: ops.count(op) for op in sorted(set(ops))},
            "sent": sum(c.sent for c in found),
            "least": self.least,
            "held": held,
            "formula": self.formula.params + self.formula.optim,
        }


def gathers_ahead(launches: list[str]) -> int:
    """How many gathers travel while a layer computes: a forward or backward between their start and their wait."""
    gathers = [name for name in launches if name[0] == "G"]
    between = [launches[launches.index(g) : launches.index(f"w:{g}")] for g in gathers]
    return sum(any(name[0] in "FB" for name in names) for names in between)


def optimizer_of(name: str):
    """The optimizers that are compared."""
    if name == "adamw":
        return optim.adamw(LR)
    return optim.muon(LR)


def race(rank: int, names: tuple[str, str], sizes: Sizes, backend: str, rounds: int) -> dict:
    """Losses of the first steps of both forms, seconds in each round, peaks, and what ours holds and sends."""
    worlds = {}
    forms = [Form(name, sizes, worlds, backend, OURS[names[0]].axis == "tp") for name in names]
    losses = [[form() for _ in range(STEPS)] for form in forms]
    pairs = paired_seconds(*forms, rounds, before=dist.barrier) if rounds else []
    # Several times: a thread of gloo may give a buffer back after the wait for it.
    peaks = [[peak_bytes(form) + form.persistent for _ in range(PEAKS)] for form in forms]
    return {"losses": losses, "pairs": pairs, "peaks": peaks, "counted": forms[0].counted()}


# ---- what is reported ------------------------------------------------------------------------------------------------
def run_race(pool, flags, where, ours: str, other: str, time_bar, peak_bar) -> None:
    """Time and peak of ours over the other's; counts where they say more."""
    ranks = pool.run(
        race, (ours, other), flags.sizes, flags.backend, flags.rounds, ranks=flags.ranks, timeout_s=LIMIT_S
    )

    def bar(limit):
        return None if limit is None or not flags.bars else f"<= {limit}"

    if OURS[ours].optimizer == "adamw":  # as the other
        worst = max(abs(a - b) / b for a, b in zip(*ranks[0]["losses"], strict=True))
        limit = 1e-10 if flags.sizes.dtype == torch.float64 else 1e-5
        report(f"{ours}_losses", [worst], unit="relative", against=f"{other}, {STEPS} steps", bar=f"<= {limit}",
               where=where)  # fmt: skip
    if flags.rounds:
        slowest = [tuple(max(r["pairs"][i][f] for r in ranks) for f in (0, 1)) for i in range(flags.rounds)]
        report(f"{ours}_time", [a / b for a, b in slowest], unit="ratio", against=other, bar=bar(time_bar), where=where,
               note=f"{min(b for _, b in slowest) * 1e3:.0f} ms of {other}")  # fmt: skip
    highest = [[max(r["peaks"][f][i] for r in ranks) for i in range(PEAKS)] for f in (0, 1)]
    peaks = [statistics.median(of_form) / 2**20 for of_form in highest]
    report(f"{ours}_peak", [a / b for a, b in zip(*highest, strict=True)], unit="ratio", against=other,
           bar=bar(peak_bar), where=where, note=f"{peaks[0]:.1f} of {peaks[1]:.1f} MiB above the state")  # fmt: skip
    counts(ours, ranks[0]["counted"], flags, where)


def counts(ours: str, counted: dict, flags, where) -> None:
    """What is exact and needs no quiet machine: bytes held, bytes sent, number of collectives."""
    where = f"{where}, one step of rank 0"
    state, sent = counted["held"] / counted["formula"], counted["sent"] / counted["least"]
    report(f"{ours}_state_bytes", [state], unit="ratio", against="formula", bar="<= 1.0", where=where,
           note=f"{counted['held'] / 2**20:.2f} MiB")  # fmt: skip
    exchanged = OURS[ours].optimizer == "muon"  # matrices travel to be whole, which the formula does not count
    limit = None if exchanged else "<= 1.0"
    if OURS[ours].axis == "tp":  # numbers of tokens, and gradients of norms, which the formula does not count
        limit = "<= 1.01" if flags.bars else None
    report(f"{ours}_bytes_sent", [sent], unit="ratio", against="minimum", bar=limit, where=where,
           note=f"{counted['sent'] / 2**20:.2f} MiB")  # fmt: skip
    layers = flags.sizes.setup()[0].layers
    wanted = {}
    if OURS[ours].axis == "fsdp" and not exchanged and OURS[ours].overlap is not True:
        # psum: the counts, which come before the backward; the totals, in fp64; the squares of the norm.
        wanted = {"all_gather": 2 * layers + 1, "reduce_scatter": layers + 1, "psum": 3}
    if OURS[ours].overlap == AHEAD:
        report(f"{ours}_gathers_ahead", [counted["ahead"]], unit="calls", bar=f">= {2 * layers - 1}", where=where)
    for op, n in counted["calls"].items():
        limit = f"<= {wanted[op]}" if op in wanted else None
        report(f"{ours}_{op}_calls", [n], unit="calls", bar=limit, where=where)


def main(arguments: list[str] | None = None, pool: RankPool | None = None) -> None:
    flags = flags_of(__doc__, [ours for ours, *_ in RACES], arguments, ranks=2)
    flags.sizes = Sizes("least", dtype=torch.float64) if flags.quick else Sizes("small")
    flags.bars = flags.ranks == 2 and not flags.quick and flags.backend == "inductor"
    dtype = str(flags.sizes.dtype).removeprefix("torch.")
    where = f"{flags.ranks} gloo ranks, 1 thread each, model {flags.sizes.size}, {dtype}, torch {torch.__version__}"
    with contextlib.ExitStack() as stack:
        if pool is None:
            stack.enter_context(counted_in_children())
            pool = stack.enter_context(contextlib.closing(RankPool(flags.ranks)))
        for race_of in RACES:
            if race_of[0] in flags.only:
                run_race(pool, flags, where, *race_of)


if __name__ == "__main__":
    main()
