"""How fast are checkpoints? Shares of plain I/O and of the peers, by as many processes, digests and commit included.

    make bench-checkpoint        python experiments/benchmarks/checkpoint.py [--mib=512] [--rounds=7] [--only=...]

Plain is `write` of the same bytes from memory into one file, and `readinto` fresh tensors, by as many processes as save
together; durable: `write` and fsync. Both sides alternate in one process, ratios are paired. Peers are processes of
their own that take turns with ours in the same run; those that this environment lacks come from .venv-peers
(`make bench-peers-env`), and one that cannot be started is left out and named. Memory-backed storage (/dev/shm), so
that the disk is not what is measured, but for the durable save.
"""

import argparse
import os
import pathlib
import platform
import shutil
import statistics
import tempfile
import time

import torch
from peers.process import started

from fmegatron import checkpoint, tree
from fmegatron.checkpoint.writing.plan import boxes_to_write, plan
from fmegatron.collectives import connect
from fmegatron.layout import Layout, Mesh, Split
from fmegatron.testing.measure import paired_seconds, report, seconds
from fmegatron.testing.ranks import RankPool

PEERS = ("dcp", "safetensors", "orbax", "megatron")


def state_of(mib: int, mesh: Mesh | None = None, spec=()) -> tuple[dict, dict]:
    """(state, layouts): bf16 and fp32 matrices of 32 MiB, 500 leaves of 4 KiB; the matrices cut by `spec`."""
    mesh, n = mesh or Mesh(), max(1, mib // 64)
    layouts = {
        "bf16": {str(i): Layout((4096, 4096), torch.bfloat16, mesh, spec) for i in range(n)},
        "fp32": {str(i): Layout((2048, 4096), torch.float32, mesh, spec) for i in range(n)},
        "small": {str(i): Layout((1024,), torch.float32, mesh) for i in range(500)},
    }
    return tree.map(lambda x: torch.randn(x.local_shape(0)).to(x.dtype), layouts), layouts


class Plain:
    """Write and read the bytes of tensors in one file, one thread."""

    def __init__(self, file: pathlib.Path, state: dict, durable: bool = False):
        self.file, self.durable = file, durable
        self.buffers = [x.view(torch.uint8).numpy() for x in tree.leaves(state)]
        self.nbytes = sum(b.nbytes for b in self.buffers)

    def write(self) -> None:
        with open(self.file, "wb", 0) as f:
            for b in self.buffers:
                f.write(b)
            if self.durable:
                os.fsync(f.fileno())

    def read(self) -> list:
        fresh = [torch.empty(b.shape, dtype=torch.uint8) for b in self.buffers]  # all alive, as a restored state is
        with open(self.file, "rb", 0) as f:
            for x in fresh:
                f.readinto(x.numpy())
        return fresh


def memory_folder() -> tempfile.TemporaryDirectory:
    return tempfile.TemporaryDirectory(dir="/dev/shm" if os.path.isdir("/dev/shm") else None, prefix="bench-")


def where(flags, ranks=1, place="memory-backed") -> str:
    cores = len(os.sched_getaffinity(0))
    text = f"{place}, {ranks} rank{'s' * (ranks > 1)} on {cores} cores ({platform.machine()})"
    return f"{text}, {flags.mib} MiB, torch {torch.__version__}"


def shares(name: str, pairs: list[tuple[float, float]], nbytes: int, **line) -> float:
    """Report plain seconds over ours, and the rate for people."""
    rate = nbytes / statistics.median(ours for _, ours in pairs) / 1e9
    return report(name, [a / b for a, b in pairs], unit="ratio", note=f"{rate:.2f} GB/s", **line)


# ---- one process


def plain(flags) -> None:
    """Save and restore of one rank against plain I/O."""
    state, layouts = state_of(flags.mib)
    with memory_folder() as folder:
        base = pathlib.Path(folder)
        simple, ours = Plain(base / "plain", state), base / "ours"

        def fresh():
            shutil.rmtree(ours, ignore_errors=True)
            simple.file.unlink(missing_ok=True)

        at = where(flags)
        pairs = paired_seconds(simple.write, lambda: checkpoint.save(ours, state, layouts), flags.rounds, fresh)
        shares("save_vs_plain_write", pairs, simple.nbytes, against="plain write()", bar=">= 1.2", where=at)
        simple.write()
        checkpoint.save(ours, state, layouts)
        for verify, name, bar in ((True, "restore", ">= 1.05"), (False, "unverified_restore", ">= 1.3")):
            restore = lambda verify=verify: checkpoint.restore(ours, layouts, verify=verify)  # noqa: E731
            pairs = paired_seconds(simple.read, restore, flags.rounds)
            shares(f"{name}_vs_plain_read", pairs, simple.nbytes, against="plain readinto()", bar=bar, where=at)
        restored = checkpoint.restore(ours, layouts)
        assert all(torch.equal(a, b) for a, b in zip(tree.leaves(restored), tree.leaves(state), strict=True))


def durable(flags) -> None:
    """A durable save on the disk against write + fsync of one file."""
    state, layouts = state_of(flags.mib)
    with tempfile.TemporaryDirectory(dir=flags.disk, prefix=".bench-") as folder:
        base = pathlib.Path(folder)
        simple, ours = Plain(base / "plain", state, durable=True), base / "ours"

        def fresh():
            shutil.rmtree(ours, ignore_errors=True)
            simple.file.unlink(missing_ok=True)
            os.sync()

        pairs = paired_seconds(simple.write, lambda: checkpoint.save(ours, state, layouts), flags.rounds, fresh)
        shares("durable_save_vs_plain_write_fsync", pairs, simple.nbytes, against="plain write() + fsync",
               bar=">= 1.0", where=where(flags, place="disk"))  # fmt: skip


# ---- several processes


def rank_seconds(rank: int, size: int, folder: str, mib: int, rounds: int) -> list[list[tuple[float, float]]]:
    """On every rank: [pairs of save, pairs of restore], plain against ours; all ranks start each one together."""
    torch.set_num_threads(1)
    mesh, base = Mesh(fsdp=size), pathlib.Path(folder)
    state, layouts = state_of(mib, mesh, ("fsdp",))
    simple, ours = Plain(base / f"plain{rank}", state), base / "ours"
    with connect(mesh) as world:

        def fresh():
            world.barrier()
            simple.file.unlink(missing_ok=True)
            if rank == 0:
                shutil.rmtree(ours, ignore_errors=True)
            world.barrier()

        def together(work):
            def run():
                work()
                world.barrier()  # the slowest rank counts, on both sides

            return run

        save = together(lambda: checkpoint.save(ours, state, layouts, world))
        saved = paired_seconds(together(simple.write), save, rounds, fresh)
        simple.write()
        checkpoint.save(ours, state, layouts, world)
        restore = together(lambda: checkpoint.restore(ours, layouts, world=world))
        return [saved, paired_seconds(together(simple.read), restore, rounds, world.barrier)]


def ranks(flags) -> None:
    """2 and 4 ranks against as many plain processes."""
    for size, save_bar, restore_bar in ((2, None, None), (4, ">= 0.90", ">= 0.80")):
        with memory_folder() as folder, RankPool(size, timeout_s=1200) as pool:
            saved, restored = pool.run(rank_seconds, size, folder, flags.mib, flags.rounds, ranks=size)[0]
        line = {"against": f"{size} plain processes", "where": where(flags, size)}
        nbytes = flags.mib << 20
        shares(f"save_{size}_ranks_vs_plain", saved, nbytes, bar=save_bar, **line)
        shares(f"restore_{size}_ranks_vs_plain", restored, nbytes, bar=restore_bar, **line)


# ---- other layouts


def reshard(flags) -> None:
    """Restore one rank's part under another layout against readinto of as many bytes; and the bytes that are read."""
    n = max(1, flags.mib // 128)
    wide = Mesh(fsdp=4)
    layouts = {str(i): Layout((8192, 8192), torch.bfloat16, wide, ("fsdp",)) for i in range(n)}
    with memory_folder() as folder:
        base = pathlib.Path(folder)
        single = tree.map(lambda x: x.replace(mesh=Mesh(fsdp=1)), layouts)
        checkpoint.save(base / "ours", tree.map(lambda x: torch.randn(x.shape).bfloat16(), single), single)
        cases = {
            "aligned": (tree.map(lambda x: x.replace(mesh=Mesh(fsdp=2)), layouts), 1, ">= 0.75"),
            "uneven_rows_half_columns": (
                tree.map(lambda x: x.replace(mesh=Mesh(dp=3, tp=2), spec=("dp", "tp")), layouts), 3, ">= 0.60",
            ),
        }  # fmt: skip
        for name, (target, rank, bar) in cases.items():
            simple = Plain(base / "plain", tree.map(lambda x, r=rank: torch.randn(x.local_shape(r)).bfloat16(), target))
            simple.write()
            restore = lambda target=target, rank=rank: checkpoint.restore(base / "ours", target, rank=rank)  # noqa: E731
            pairs = paired_seconds(simple.read, restore, flags.rounds)
            shares(f"reshard_{name}_vs_plain_read", pairs, simple.nbytes, against="plain readinto()", bar=bar,
                   where=where(flags))  # fmt: skip


def over_read(flags) -> None:
    """Bytes that all ranks read over the bytes that they need, for changes of mesh."""
    shape, bf16 = (8192, 8192), torch.bfloat16
    cases = {
        "tp2_to_tp4_rows": (Layout(shape, bf16, Mesh(tp=2), ("tp",)), Layout(shape, bf16, Mesh(tp=4), ("tp",)), 1.05),
        "tp2_to_tp4_columns": (
            Layout(shape, bf16, Mesh(tp=2), (None, "tp")), Layout(shape, bf16, Mesh(tp=4), (None, "tp")), 1.05,
        ),
        "fsdp4_to_tp2": (Layout(shape, bf16, Mesh(fsdp=4), ("fsdp",)), Layout(shape, bf16, Mesh(tp=2), ("tp",)), 1.05),
        "fsdp4_to_3_uneven": (
            Layout(shape, bf16, Mesh(fsdp=4), ("fsdp",)), Layout(shape, bf16, Mesh(fsdp=3), ("fsdp",)), 1.30,
        ),
    }  # fmt: skip
    with RankPool(4, timeout_s=300) as pool, memory_folder() as folder:
        for name, (source, target, bar) in cases.items():
            pool.run(save_one, f"{folder}/{name}", source, ranks=source.mesh.size)
            target_ranks = range(target.mesh.size)
            reads = [checkpoint.explain(f"{folder}/{name}", {"w": target}, rank) for rank in target_ranks]
            ratio = sum(r.nbytes for read in reads for r in read) / sum(map(target.local_nbytes, target_ranks))
            report(f"bytes_read_{name}", [ratio], unit="ratio", against="bytes needed", bar=f"<= {bar}",
                   where=where(flags, source.mesh.size))  # fmt: skip


def save_one(rank: int, path: str, layout: Layout) -> None:
    """Save one leaf from all ranks of its mesh."""
    with connect(layout.mesh) as world:
        checkpoint.save(path, {"w": torch.zeros(layout.local_shape(rank), dtype=layout.dtype)}, {"w": layout}, world)


# ---- peers


def peers(flags) -> None:
    """Save and restore against torch DCP, safetensors, Orbax and Megatron's format, all in turns."""
    state, layouts = state_of(flags.mib)
    with memory_folder() as folder:
        ours = pathlib.Path(folder) / "ours"
        found = started("checkpoint.py", PEERS, flags.mib, folder, own=("dcp", "safetensors"))
        kept: list = []
        for what, bar in (("save", ">= 1.1"), ("restore", ">= 1.1")):
            theirs, own = {peer.name: [] for peer in found}, []
            for _ in range(flags.rounds + 1):
                for peer in found:
                    theirs[peer.name].append(peer.ask(what))
                if what == "save":
                    shutil.rmtree(ours, ignore_errors=True)
                    own.append(seconds(lambda: checkpoint.save(ours, state, layouts)))
                else:
                    kept.clear()  # as the peers do: the last state lives until the next restore begins
                    own.append(seconds(lambda: kept.append(checkpoint.restore(ours, layouts))))
            for name, times in theirs.items():
                report(f"{what}_vs_{name}", [a / b for a, b in list(zip(times, own, strict=True))[1:]], unit="ratio",
                       against=name, bar=bar, where=where(flags))  # fmt: skip
        for peer in found:
            if peer.end():
                raise RuntimeError(f"the peer {peer.name} restored other bits than it saved")


# ---- asynchronous saves


def background(flags) -> None:
    """How long an asynchronous save stops the trainer, and how much slower its steps are while the writer works."""
    state, layouts = state_of(flags.mib)
    copies = tree.map(torch.empty_like, state)
    tree.map(lambda to, x: to.copy_(x), copies, state)  # touched, as the saver's memory is
    a = torch.randn(1024, 1024)

    def step():
        for _ in range(8):
            a @ a

    with memory_folder() as folder, checkpoint.AsyncSaver() as saver:
        saver.reserve(layouts)
        handles, quiet, busy = [], [], []

        def begin():
            handles.append(checkpoint.save_async(f"{folder}/ours", state, layouts, saver=saver))

        def ended():
            for handle in handles:
                handle.result()
            handles.clear()

        pairs = paired_seconds(begin, lambda: tree.map(lambda to, x: to.copy_(x), copies, state), flags.rounds, ended)
        report("async_stall_vs_memcpy", [ours / copy for ours, copy in pairs], unit="ratio", bar="<= 1.15",
               against="one memcpy of the state", where=where(flags))  # fmt: skip
        for _ in range(flags.rounds):
            ended()
            alone = [seconds(step) for _ in range(20)]
            begin()
            during = []
            while not handles[0].poll():
                during.append(seconds(step))
            quiet.append(statistics.median(alone))
            busy.append(statistics.median(during))
        report("step_time_during_async_save", [b / q for b, q in zip(busy, quiet, strict=True)], unit="ratio",
               against="the same steps without a save", bar="<= 1.10", where=where(flags))  # fmt: skip
        ended()


# ---- scale


def scale(flags) -> None:
    """The plan of one rank of 16,384; 100,000 small leaves."""
    mesh = Mesh(pp=8, dp=16, fsdp=16, tp=8)
    experts = mesh.view(order=("pp", "dp", "fsdp", "tp"), pp=8, edp=32, ep=64)
    leaves = {}
    for i in range(500):
        n = 64 * (100 + i)
        leaves[f"{i}/qkv"] = Layout(
            (64, 8192, 2 * n), torch.bfloat16, mesh, ("pp", "fsdp", Split("tp", (n, n // 2, n // 2)))
        )
        leaves[f"{i}/out"] = Layout((64, n, 8192), torch.bfloat16, mesh, ("pp", "tp", "fsdp"))
        leaves[f"{i}/experts"] = Layout((64, 128, 1024, n), torch.bfloat16, experts, ("pp", "ep"))
        leaves[f"{i}/norm"] = Layout((64, n), torch.float32, mesh, ("pp",))

    def once() -> float:
        start = time.process_time()
        plans = plan(list(leaves), list(leaves.values()))
        boxes_to_write(plans, 9731)
        return time.process_time() - start

    report("plan_16384_ranks_2000_leaves", [once() for _ in range(3)], unit="s", bar="< 1.0", where="processor time")
    times = {}
    for count in (25_000, 100_000):
        layouts = {f"{i:06d}": Layout((16,), torch.float32, Mesh()) for i in range(count)}
        state = {name: torch.full((16,), float(i)) for i, name in enumerate(layouts)}
        with memory_folder() as folder:
            start = time.perf_counter()
            checkpoint.save(f"{folder}/many", state, layouts)
            checkpoint.restore(f"{folder}/many", layouts)
            times[count] = time.perf_counter() - start
    at = where(flags)
    report("save_restore_100000_small_leaves", [times[100_000]], unit="s", bar="< 20", where=at)
    report("time_100000_over_25000_leaves", [times[100_000] / times[25_000]], unit="ratio", bar="<= 5.0", where=at)


def main() -> None:
    """Run the sections that were asked for."""
    sections = {f.__name__: f for f in (plain, ranks, durable, reshard, over_read, peers, background, scale)}
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mib", type=int, default=512, help="size of the state")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--disk", default=".", help="a folder on the disk that the durable save is measured on")
    parser.add_argument("--only", default=",".join(sections), help="sections, of: " + ", ".join(sections))
    flags = parser.parse_args()
    chosen = flags.only.split(",")
    if unknown := set(chosen) - set(sections):
        parser.error(f"--only: got {', '.join(sorted(unknown))}, wanted some of {', '.join(sections)}")
    for name in chosen:
        sections[name](flags)


if __name__ == "__main__":
    main()
