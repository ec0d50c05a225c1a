"""`python -m fmegatron.doctor`: whether a machine, or all ranks of a job, are fit to train, and what to fix.

    python -m fmegatron.doctor                                        # one process
    torchrun --nproc-per-node=8 -m fmegatron.doctor                   # all ranks; `srun python -m fmegatron.doctor` too

It prints versions, devices and links; multiplies matrices and sums over all ranks, compares the results with exact ones
and the times of the ranks with each other, and names ranks and hosts that are slow. It says which command installs
fmegatron beside the torch that is there, also where the other packages are missing. Nothing is written and nothing is
changed. Exit status: 0 nothing to fix; 1 something; 2 wrong use.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import os
import platform
import re
import resource
import shutil
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from typing import Any, TextIO

import fmegatron

try:
    import torch
    from torch.cuda import nccl as torch_nccl

    from fmegatron.collectives import Axes, World, connect, psum
    from fmegatron.layout import Mesh
    from fmegatron.loop import hardware
    from fmegatron.step import clock
except ModuleNotFoundError as missing:
    if __name__ != "__main__":
        raise
    sys.exit(f"doctor: {missing.name} is missing; in the folder of pyproject.toml: {fmegatron.install_command()}")

LEAST = (
    ("torch", fmegatron.TORCH[0]), ("optree", "0.14"), ("numpy", "1.26"), ("xxhash", "3.4"), ("tensorstore", "0.1.70")
)  # fmt: skip
SLOW = 1.25  # times the median
OPEN_FILES, SHARED_BYTES = 4096, 2**30  # least that is fit for a run
_SETTINGS = re.compile(r"(NCCL|GLOO|TORCH|PYTORCH|CUDA|OMP|MKL|SLURM_(JOB|STEP)|FMEGATRON)_?\w*")
_ALLOCATOR = ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF")  # the second: its name from torch 2.9 on
_SECRET = re.compile(r"KEY|TOKEN|SECRET|PASS", re.I)


def main(argv: Sequence[str] | None = None, out: TextIO | None = None, err: TextIO | None = None) -> int:
    """Look at this machine and the ranks; returns the exit status. argv: without the program's name."""
    out, err = out or sys.stdout, err or sys.stderr
    parser = argparse.ArgumentParser(
        prog="python -m fmegatron.doctor", description="Whether a machine, or all ranks of a job, are fit to train."
    )
    parser.add_argument("--json", action="store_true", help="what was found as one JSON object")
    parser.add_argument("--size", type=int, default=0, help="rows of the matrices (default 1024 on a CPU, else 8192)")
    parser.add_argument("--mib", type=int, default=16, help="MiB that are summed over the ranks")
    try:
        options = parser.parse_args(argv)
    except SystemExit as stop:  # --help, or wrong use, of which argparse has told
        return int(stop.code or 0)
    if options.size < 0 or options.mib < 1:
        print("doctor: got a size below 0 or mib below 1, wanted sizes of 1 or more", file=err)
        return 2
    ranks = _ranks()
    with connect(Mesh(dp=ranks) if ranks > 1 else Mesh()) as world:
        own = examine(world, options.size, options.mib)
        found = [json.loads(world.broadcast_text(json.dumps(own), rank)) for rank in range(world.size)]
        fixes = verdict(found)
        if world.rank == 0:
            print(json.dumps({"ranks": found, "fix": fixes}) if options.json else _text(found, fixes), file=out)
    return 1 if fixes else 0


def _ranks() -> int:
    from_slurm = os.environ.get("SLURM_STEP_NUM_TASKS", "1") if "SLURM_STEP_ID" in os.environ else "1"
    return int(os.environ.get("WORLD_SIZE", from_slurm))


# ---- what a rank finds out about itself ------------------------------------------------------------------------------
def examine(world: World, size: int = 0, mib: int = 16) -> dict[str, Any]:
    """All that this rank can see of itself, as JSON values; all ranks call it, as they sum together."""
    device = world.device
    world.barrier()
    return {
        "rank": world.rank,
        "host": socket.gethostname(),
        "versions": versions(),
        "device": _device(device),
        "machine": machine(),
        "settings": {k: v for k, v in sorted(os.environ.items()) if _SETTINGS.fullmatch(k) and not _SECRET.search(k)},
        "links": links(device) if int(os.environ.get("LOCAL_RANK", "0")) == 0 else None,
        "matmul": matmul(device, size),
        "sum": summed(world, mib),
    }


def versions() -> dict[str, str | None]:
    """Of fmegatron, Python, the packages that it needs, CUDA, NCCL and the kernel."""
    found: dict[str, str | None] = {"fmegatron": fmegatron.__version__, "python": platform.python_version()}
    for name, _ in LEAST:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            found[name] = None
    nccl = torch_nccl.version() if torch.cuda.is_available() else ()
    found |= {"cuda": torch.version.cuda, "nccl": ".".join(map(str, nccl)) or None, "kernel": platform.release()}
    return found


def _device(device: torch.device) -> dict[str, Any]:
    if device.type != "cuda":
        return {"kind": "cpu", "name": platform.processor() or platform.machine(), "threads": torch.get_num_threads()}
    about, (free, total) = torch.cuda.get_device_properties(device), torch.cuda.mem_get_info(device)
    name, read = about.name, {"gb": total / 1e9, "free_gb": free / 1e9}
    return {
        "kind": "cuda",
        "name": name,
        "capability": f"{about.major}.{about.minor}",
        "peak": hardware.of_table(name),
        "fp32": torch.get_float32_matmul_precision(),
        **read,
    }


def machine() -> dict[str, Any]:
    """Cores, memory, shared memory and limits of this host."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    found: dict[str, Any] = {"cores": cores, "load": os.getloadavg()[0]}
    if os.path.isdir("/dev/shm"):
        found["shared_free_bytes"] = shutil.disk_usage("/dev/shm").free
    found["open_files"] = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    found["heap_bytes"] = hardware.memory_reader(torch.device("cpu"))[0]()
    return found


def links(device: torch.device) -> str:
    """How the devices of this host are connected, as `nvidia-smi topo -m` shows it; on a CPU its network interfaces."""
    if device.type == "cuda" and shutil.which("nvidia-smi"):
        done = subprocess.run(["nvidia-smi", "topo", "-m"], capture_output=True, text=True, timeout=60)
        if done.returncode == 0:
            return done.stdout.rstrip()
    return "interfaces: " + ", ".join(name for _, name in socket.if_nameindex())


def matmul(device: torch.device, size: int = 0) -> dict[str, Any]:
    """A product of whole numbers, whose exact value is known, and the time of some large ones."""
    dtype = torch.float32 if device.type == "cpu" else torch.bfloat16
    n = size or (1024 if device.type == "cpu" else 8192)
    a = (torch.arange(64 * 64, device=device).reshape(64, 64) % 5 - 2).to(dtype)
    b = (torch.arange(64 * 64, device=device).reshape(64, 64) % 7 - 3).to(dtype)
    wanted = a.cpu().long() @ b.cpu().long()  # at most 64 * 6: bf16 rounds above 256, so it is compared in its dtype
    right = torch.equal((a @ b).cpu(), wanted.to(dtype))
    seconds = clock.matmul_seconds(device, dtype, n, 8)
    middle = statistics.median(seconds)
    return {"right": right, "seconds": middle, "worst": max(seconds), "tflops": 2 * n**3 / middle / 1e12, "size": n}


def summed(world: World, mib: int) -> dict[str, Any] | None:
    """A sum over all ranks whose exact value is known, and its time; None for one rank."""
    if world.size == 1:
        return None
    axis, n, seconds = Axes(world.mesh, world)["dp"], mib * 2**18, []
    x, right = torch.full((n,), float(world.rank + 1), device=world.device), True
    for _ in range(6):
        world.barrier()
        began = time.perf_counter()
        total = psum(x, axis)
        right &= bool((total == world.size * (world.size + 1) / 2).all())  # waits for the device
        seconds.append(time.perf_counter() - began)
    middle = statistics.median(seconds[1:])
    sent = 2 * (world.size - 1) / world.size * 4 * n  # of each rank, in a ring
    return {"right": right, "seconds": middle, "worst": max(seconds[1:]), "gb_per_s": sent / middle / 1e9, "mib": mib}


# ---- what follows from it --------------------------------------------------------------------------------------------
def verdict(ranks: Sequence[Mapping[str, Any]]) -> list[str]:
    """What to fix, one line each; [] when nothing is wrong.

    >>> rank = {"rank": 0, "host": "a", "versions": {"torch": "2.13.0"}, "device": {"kind": "cpu"}, "machine": {},
    ...         "matmul": {"right": False, "seconds": 1.0, "worst": 1.0}, "sum": None}
    >>> verdict([rank])
    ['rank 0 (a): a product of whole numbers is wrong: its device computes wrong numbers; take it out of the job']
    """
    found = []
    for rank in ranks:
        who, own = f"rank {rank['rank']} ({rank['host']})", rank["versions"]
        for name, least in LEAST:
            if name in own and (own[name] is None or _parts(own[name]) < _parts(least)):
                found.append(
                    f"{who}: {name} {own[name] or 'is missing'}, wanted {least} or newer; pip install -U {name}"
                )
        if not rank["matmul"]["right"]:
            found.append(
                f"{who}: a product of whole numbers is wrong: its device computes wrong numbers; take it out of the job"
            )
        if rank["sum"] is not None and not rank["sum"]["right"]:
            found.append(f"{who}: the sum over all ranks is wrong: look at the links and the versions of NCCL or gloo")
        files, shared = rank["machine"].get("open_files"), rank["machine"].get("shared_free_bytes")
        if files is not None and 0 <= files < OPEN_FILES:
            found.append(f"{who}: {files} open files are allowed, wanted {OPEN_FILES}; ulimit -n {OPEN_FILES}")
        if shared is not None and shared < SHARED_BYTES:
            found.append(
                f"{who}: {shared / 2**20:.0f} MiB are free in /dev/shm, wanted {SHARED_BYTES // 2**20}; enlarge it"
            )
        free, total = rank["device"].get("free_gb"), rank["device"].get("gb")
        if free is not None and free < 0.9 * total:
            text = f"{who}: {total - free:.1f} of {total:.1f} GB of its device are in use; see nvidia-smi"
            found.append(text)
    return found + _differences(ranks) + _outliers(ranks)


def advice(rank: Mapping[str, Any]) -> list[str]:
    """What a rank on a GPU could be given, though nothing is wrong: settings of the allocator, and of fp32 products.

    >>> advice({"device": {"kind": "cuda", "fp32": "high"}, "settings": {}})[0].partition(";")[0]
    'blocks of the allocator cannot grow, so that freed memory may not fit what comes next'
    """
    if rank["device"]["kind"] != "cuda":
        return []
    found, settings = [], rank["settings"]
    if not any("expandable_segments:True" in settings.get(name, "") for name in _ALLOCATOR):
        found.append(
            "blocks of the allocator cannot grow, so that freed memory may not fit what comes next; "
            f"export {_ALLOCATOR[0]}=expandable_segments:True"
        )
    if rank["device"].get("fp32") == "highest":
        found.append(
            "products of fp32 run without TF32, at less than a fifth of its rate; "
            "torch.set_float32_matmul_precision('high') takes it where 10 bits of the mantissa are enough"
        )
    return found


def _differences(ranks: Sequence[Mapping[str, Any]]) -> list[str]:
    """Versions and devices that are not the same on all ranks."""
    found, rows = [], [{**rank["versions"], "device": rank["device"].get("name")} for rank in ranks]
    for name in rows[0]:
        by_value: dict[str, list[int]] = {}
        for rank, row in zip(ranks, rows, strict=True):
            by_value.setdefault(str(row.get(name)), []).append(rank["rank"])
        if len(by_value) > 1:
            text = "; ".join(f"{value} on ranks {_few(of)}" for value, of in by_value.items())
            found.append(f"{name} differs: {text}; give all nodes the same")
    return found


def _outliers(ranks: Sequence[Mapping[str, Any]]) -> list[str]:
    """Ranks whose product took longer than that of the others, joined where a host is slow as a whole.

    Of a sum over all ranks the times are the same everywhere, so only its worst repetition is looked at.
    """
    found, seconds = [], {rank["rank"]: rank["matmul"]["seconds"] for rank in ranks}
    usual = statistics.median_low(seconds.values())
    slow = [rank for rank in ranks if seconds[rank["rank"]] > SLOW * usual]
    for host in dict.fromkeys(rank["host"] for rank in slow):
        own = [rank["rank"] for rank in slow if rank["host"] == host]
        whole = len(own) == sum(rank["host"] == host for rank in ranks)
        times = max(seconds[rank] for rank in own) / usual
        who = f"host {host}" if whole and len(own) > 1 else f"rank {_few(own)} ({host})"
        why = "clocks, temperature, and what else runs there"
        found.append(f"{who}: a matrix product takes {times:.2f} of the median; look at {why}, or leave it out")
    sums = [rank["sum"] for rank in ranks if rank["sum"] is not None]
    if sums and max(s["worst"] for s in sums) > 10 * sums[0]["seconds"]:
        worst = max(s["worst"] for s in sums)
        found.append(
            f"the sum over all ranks took {worst:.3g} s once, {sums[0]['seconds']:.3g} s usually; look at the links"
        )
    return found


def _parts(version: str) -> list[int]:
    return [int(part) for part in re.findall(r"\d+", version.partition("+")[0])[:3]]


def _few(ranks: Sequence[int]) -> str:
    shown = ", ".join(map(str, ranks[:8]))
    return shown + (f" and {len(ranks) - 8} more" if len(ranks) > 8 else "")


def _text(ranks: Sequence[Mapping[str, Any]], fixes: Sequence[str]) -> str:
    """For people: what rank 0 has, a line for each rank, and what to fix."""
    first = ranks[0]
    lines = [f"versions   {', '.join(f'{k} {v}' for k, v in first['versions'].items() if v)}"]
    lines.append(f"install    {fmegatron.install_command()}    # on such a node: nothing of its torch is touched")
    for name, (_, newest) in (("python", fmegatron.PYTHON), ("torch", fmegatron.TORCH)):
        version = first["versions"].get(name)
        if version and _parts(version)[:2] > _parts(newest):
            lines.append(
                f"note       {name} {version} is newer than any that was tried ({newest}); run the tests: make test"
            )
    lines += [f"note       {line}" for line in advice(first)]
    machines = {rank["host"]: rank["machine"] for rank in ranks}
    for host, of in list(machines.items())[:8]:
        free = of.get("shared_free_bytes")  # no such folder: no line of it
        shared = "" if free is None else f", {free / 1e9:.1f} GB free in /dev/shm"
        lines.append(f"host       {host}: {of['cores']} cores, load {of['load']:.1f}{shared}")
    settings = [f"{name}={value}" for name, value in first["settings"].items()]
    lines += [f"settings   {' '.join(settings)}"] if settings else []
    lines += [f"links      {line}" for line in (first["links"] or "").splitlines()]
    for rank in ranks:
        product, total = rank["matmul"], rank["sum"]
        text = f"rank {rank['rank']:<5} {rank['host']}, {rank['device']['name']}: {product['tflops']:.3g} TFLOP/s"
        if total is not None:
            text += f", sum of {total['mib']} MiB {total['seconds'] * 1e3:.3g} ms ({total['gb_per_s']:.3g} GB/s)"
        lines.append(text)
    lines += [f"to fix     {line}" for line in fixes] or ["to fix     nothing was found"]
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
