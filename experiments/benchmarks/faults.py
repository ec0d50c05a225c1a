"""How soon does a run go on after a fault, or end? Against its limits, and against a warm start of the same job.

    make bench-faults
    python experiments/benchmarks/faults.py [--rounds=3] [--quick] [--backend=inductor]

Jobs of two gloo ranks under torchrun, one after another; each has three faults. An exception in an update, after which
the ranks meet again in their processes (`Restart`); a SIGKILL, after which torchrun starts all again; then a rank
sleeps, or is stopped (SIGSTOP), and the job ends. All jobs compile with one cache, which a job before them fills; what
a restart is compared with is the start of the same job. JSON lines on stdout, a table on stderr.
"""

import argparse
import contextlib
import functools
import itertools
import json
import os
import platform
import re
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

from fmegatron import data, loop, model, optim, step, tree
from fmegatron.collectives import Axes, connect
from fmegatron.layout import Mesh
from fmegatron.loop import Faults, Options, Restart, Run, Save
from fmegatron.testing.measure import report

SAVE_EVERY, EXCEPTION, KILL, HANG = 4, 6, 10, 16  # updates
LIMIT_S = 600  # of a job
PAUSE_S = 0.1  # of the updates before the hang, so that the others see a rank in more than its first one


@dataclass(frozen=True)
class Job:
    """One job. last: its third fault, "hang" (a sleep) or "stop". limit_s: of an update."""

    folder: str = ""
    last: str = "hang"
    backend: str = "inductor"
    limit_s: float = 3.0


# ---- a rank of a job -------------------------------------------------------------------------------------------------
def child(job: Job) -> None:
    """Train a small decoder; what happens when is written into `times-RANK`."""

    def note(what: str, at: float | None = None) -> None:
        with open(f"{job.folder}/times-{os.environ['RANK']}", "a") as file:
            file.write(f"{what} {time.time() if at is None else at}\n")

    note("process", started_at())
    note("imported")
    mesh = Mesh(fsdp=2)
    world, axes = connect(mesh, timeout_s=60), Axes(mesh)
    decoder = model.llama(vocab_size=256, dim=128, layers=2, heads=4, kv_heads=2, ffn_dim=256, max_seq=64)
    specs, optimizer = model.specs(decoder, mesh), optim.adamw(1e-3)
    layouts = tree.layouts(specs)
    loss = functools.partial(model.loss, decoder=decoder, axes=axes)
    update = step.build_train_step(loss, optimizer, layouts, axes)
    compiled = step.jit(update, donate=0, world=world, backend=job.backend)
    batches = data.Batches(data.ByteTokenizer().encode("To be, or not to be. " * 99), batch_size=8, seq_len=64, seed=0)

    def noted(state, batch):
        number = int(state.step) + 1
        note(f"begins-{number}")
        if number > KILL:
            time.sleep(PAUSE_S)
        return compiled(state, batch)

    faults = {"exception": (1, EXCEPTION), "kill": (1, KILL), job.last: (1, HANG)}
    run = Run(
        f"{job.folder}/run",
        noted,
        step.state_specs(specs, optimizer),
        world=world,
        options=Options(
            save=Save(every=SAVE_EVERY),
            faults=Faults(
                patience=f"step={job.limit_s},save=60,caller=60",
                restart=Restart(),
                inject="+".join(f"{kind}:rank={rank},step={at}" for kind, (rank, at) in faults.items()),
            ),
        ),
    )
    for info in run(batches, steps=HANG + 4):
        note(f"ends-{info.step}")


def started_at() -> float:
    """When this process was started, of time.time()."""
    ticks = int(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19])
    return time.time() - time.clock_gettime(time.CLOCK_BOOTTIME) + ticks / os.sysconf("SC_CLK_TCK")


# ---- a job -----------------------------------------------------------------------------------------------------------
@dataclass(frozen=True)
class Measured:
    """Seconds of a job. hang, end: beyond the limit, until all stacks are on the disk, and until torchrun has ended.

    process: the start of a process to its first update. again: a fault to the end of the next update, in the process.
    job: the start of torchrun to the first update. restarted: a fault to the next update, in new processes. split: of
    that, and started: of the start of the job.
    """

    hang: float
    end: float
    process: float
    again: float
    job: float
    restarted: float
    split: tuple[float, ...]
    started: tuple[float, ...]


SPLIT = ("until processes are started", "imports", "set-up", "first update")


def run_job(job: Job) -> Measured:
    """A job from its start to its end. Its folder is empty, or missing; the cache of compilations lies beside it."""
    folder = Path(job.folder)
    folder.mkdir(exist_ok=True)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "--max-restarts=1"]
    command += [os.path.abspath(__file__), f"--child={json.dumps(asdict(job))}"]
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    environment["TORCHINDUCTOR_CACHE_DIR"] = str(folder.parent / "cache")
    with open(folder / "said", "w") as said:
        began = time.time()
        process = subprocess.Popen(command, stdout=said, stderr=said, env=environment, start_new_session=True)
        try:
            process.wait(timeout=LIMIT_S)
            ended = time.time()
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
    try:
        return measured(folder, job.last, began, ended)
    except (OSError, KeyError, IndexError, ValueError) as error:
        raise RuntimeError(
            f"{job}: its faults are not all there: {error!r}\n{(folder / 'said').read_text()}"
        ) from error


def measured(folder: Path, last: str, began: float, ended: float) -> Measured:
    """What a job has left in its folder, read."""
    at, fault = times_of(folder), {}
    for path in (folder / "run/injected").iterdir():
        fault[path.name.partition(":")[0]] = path.stat().st_mtime
    stacks = [path for path in (folder / "run/stacks").glob("rank-*.txt") if path.read_text().startswith("hang: ")]
    if len(stacks) != (1 if last == "stop" else 2):  # one that is stopped cannot write
        raise ValueError(f"got stacks of {len(stacks)} ranks")
    due = fault[last] + float(re.findall(r"\(limit ([\d.]+) s", stacks[0].read_text())[-1])
    on_disk = max(path.stat().st_mtime for path in stacks)
    first, again = f"ends-{EXCEPTION // SAVE_EVERY * SAVE_EVERY + 1}", f"{KILL // SAVE_EVERY * SAVE_EVERY + 1}"
    names = ("process", "imported", f"begins-{again}", f"ends-{again}")
    points = [[began, *(at[name.replace(f"-{again}", "-1")][0] for name in names)]]
    points += [[fault["kill"], *(at[name][1] for name in names)]]
    start, restart = ([b - a for a, b in itertools.pairwise(times)] for times in points)
    return Measured(
        hang=on_disk - due,
        end=ended - due,
        process=at["ends-1"][0] - at["process"][0],
        again=at[first][1] - fault["exception"],
        job=sum(start),
        restarted=sum(restart),
        split=tuple(restart),
        started=tuple(start),
    )


def times_of(folder: Path) -> dict[str, list[float]]:
    """What happened -> when the last of the two ranks came to it, each time that both did."""
    ranks: list[dict[str, list[float]]] = [{}, {}]
    for rank, found in enumerate(ranks):
        for line in (folder / f"times-{rank}").read_text().splitlines():
            found.setdefault(line.split()[0], []).append(float(line.split()[1]))
    return {what: list(map(max, at, ranks[1].get(what, ()))) for what, at in ranks[0].items()}


def said(name: str, values: list[float]) -> str:
    """A name with the median of its values, for a note."""
    return f"{name} {statistics.median(values):.2f} s"


def main(arguments=None) -> None:
    """Print the lines."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3, help="of two jobs each")
    parser.add_argument("--backend", default="inductor")
    parser.add_argument("--quick", action="store_true", help="one job that does not compile, to see that it runs")
    parser.add_argument("--child", default=None)
    flags = parser.parse_args(arguments)
    if flags.child:
        return loop.launch(child, Job(**json.loads(flags.child)), sys.argv[:1])
    backend, found = "eager" if flags.quick else flags.backend, []
    with tempfile.TemporaryDirectory(prefix="bench-faults-") as name:
        if not flags.quick:
            run_job(Job(f"{name}/cold", backend=backend))
        for number in range(1 if flags.quick else 2 * flags.rounds):
            last = ("hang", "stop")[number % 2]
            one = run_job(Job(f"{name}/{number}", last, backend))
            text = f"restarts {one.again:.2f} s, {one.restarted:.2f} s; end {one.end:.2f} s"
            print(f"job {number + 1} ({last}): {text}", file=sys.stderr, flush=True)
            found.append((last, one))
    jobs = [one for _, one in found]
    where = (
        f"2 gloo ranks under torchrun, {backend}, {len(os.sched_getaffinity(0))} cores, load {os.getloadavg()[1]:.0f}, "
    )
    where += f"{platform.machine()}, torch {torch.__version__}"
    for kind, what in (("hang", "sleep"), ("stop", "sigstop")):
        if some := [one for last, one in found if last == kind]:
            report(f"stacks_after_{what}", [one.hang for one in some], unit="s", against="the limit", bar="<= 1.5",
                   where=where)  # fmt: skip
            report(f"end_after_{what}", [one.end for one in some], unit="s", against="the limit", bar="<= 5",
                   where=where)  # fmt: skip
    note = ", ".join([said("restart", [one.again for one in jobs]), said("start", [one.process for one in jobs])])
    report("restart_in_process", [one.again / one.process for one in jobs], unit="ratio", bar="<= 0.1", where=where,
           against="the start of its process to the first step", note=note)  # fmt: skip
    note = [said("restart", [one.restarted for one in jobs]), said("start", [one.job for one in jobs])]
    for what, splits in (("restart", [one.split for one in jobs]), ("start", [one.started for one in jobs])):
        parts = [said(name, list(values)) for name, values in zip(SPLIT, zip(*splits, strict=True), strict=True)]
        note.append(f"{what}: {', '.join(parts)}")
    report("restart_by_torchrun", [one.restarted / one.job for one in jobs], unit="ratio", bar="<= 1.2", where=where,
           against="the start of its job to the first step", note="; ".join(note))  # fmt: skip


if __name__ == "__main__":
    main()
