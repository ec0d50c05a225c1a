"""The whole story in minutes: train on 4 ranks, stop, resume on 2 ranks with another mesh, finish, sample, plot.

Claim    A run that is stopped by SIGTERM on one mesh goes on exactly where it was on another, and ends as well.
Command  make demo
Expect   The same held-out loss before the stop and after the resume (to 1e-5), and at most 1.75 nats per character at
         the end; runs/demo/loss.png, metrics.jsonl and checkpoints. About five minutes on 2 cores, set-up aside.
"""

import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import psutil

from fmegatron import loop

SCRIPT = Path(__file__).with_name("shakespeare.py")
ROOT = SCRIPT.parents[1]


@dataclass(frozen=True)
class Config:
    """What the demo varies."""

    folder: str = loop.field("runs/demo", least=1)
    first: str = "fsdp=2,tp=2"  # mesh of the first half
    second: str = "fsdp=2"  # mesh of the second half
    steps: int = 500
    target: float = 1.75  # held-out loss to reach, nats per character
    flags: tuple[str, ...] = ()  # more flags for shakespeare.py


def torchrun(config: Config, mesh: str) -> subprocess.Popen:
    """Start experiments/shakespeare.py on the ranks of `mesh`, in the terminal of this process."""
    ranks = 1
    for axis in mesh.split(","):
        ranks *= int(axis.partition("=")[2])
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}", str(SCRIPT)]
    flags = [f"--mesh={mesh}", f"--run.folder={config.folder}", f"--run.steps={config.steps}", *config.flags]
    shown = ["torchrun", f"--nproc-per-node={ranks}", str(SCRIPT.relative_to(ROOT)), *flags]
    print(f"\n$ {' '.join(shown)}", flush=True)
    # One thread a rank to begin with: the same default torchrun would warn about.
    return subprocess.Popen([*command, *flags], env={**os.environ, "OMP_NUM_THREADS": "1"})


def records(config: Config) -> list[dict]:
    """What the run has written to metrics.jsonl so far."""
    path = Path(config.folder, "metrics.jsonl")
    return loop.read_metrics(path) if path.exists() else []


def stop_when(process: subprocess.Popen, reached: Callable[[], bool]) -> None:
    """Send SIGTERM to one rank of a torchrun as soon as `reached()`; the ranks agree among themselves to stop."""
    while process.poll() is None:
        if reached():
            rank = psutil.Process(process.pid).children()[-1]
            print(f"\n$ kill -TERM {rank.pid}    # one rank of the run", flush=True)
            rank.send_signal(signal.SIGTERM)
            return
        time.sleep(0.1)


def finish(process: subprocess.Popen, what: str) -> None:
    """Wait for a run; end the demo with its status when it failed."""
    try:
        status = process.wait()
    except KeyboardInterrupt:  # the ranks got it too: let them save
        process.wait()
        raise
    if status:
        raise SystemExit(f"demo: {what} ended with status {status}; its message stands above")


def main(config: Config) -> dict[str, float]:
    """Run both halves and print the table; returns its numbers."""
    began, run = time.perf_counter(), Path(config.folder)
    for old in ("checkpoints", "metrics.jsonl", "loss.png"):
        shutil.rmtree(run / old) if (run / old).is_dir() else (run / old).unlink(missing_ok=True)

    first = torchrun(config, config.first)
    stop_when(first, lambda: any(record["step"] >= config.steps // 2 for record in records(config)))
    finish(first, "the first half")
    before = [record for record in records(config) if "heldout_loss" in record][-1]

    finish(torchrun(config, config.second), "the second half")
    written = records(config)
    after = [record for record in written if "resumed_heldout_loss" in record][-1]
    last = [record for record in written if "heldout_loss" in record][-1]
    speeds = [[r["tokens_per_second"] for r in written if r["run"] == n and "loss" in r][1:] for n in (0, 1)]
    speed = [sorted(values)[len(values) // 2] for values in speeds]
    loop.plot_loss(
        run / "metrics.jsonl", run / "loss.png", title="Shakespeare, stopped on one mesh, resumed on another"
    )

    result = {
        "before": before["heldout_loss"],
        "after": after["resumed_heldout_loss"],
        "final": last["heldout_loss"],
    }
    difference = abs(result["after"] - result["before"])
    rows = (
        (f"held-out loss before the stop, step {before['step']}, {before['mesh']}", f"{result['before']:.7f}"),
        (f"the same evaluation after the resume on {after['mesh']}", f"{result['after']:.7f}"),
        ("difference (at most 1e-5)", f"{difference:.1e}"),
        (f"held-out loss at the end, step {last['step']} (at most {config.target})", f"{result['final']:.4f}"),
        ("tokens per second, first and second half", f"{speed[0]:,.0f}, {speed[1]:,.0f}"),
        ("picture", run / "loss.png"),
        ("metrics", run / "metrics.jsonl"),
        ("checkpoints", run / "checkpoints"),
        ("time", f"{time.perf_counter() - began:.0f} s"),
    )
    print("\n" + "\n".join(f"{name:<66} {value}" for name, value in rows))
    print("\nTry next:")
    print("  .venv/bin/python experiments/shakespeare.py --help")
    print(f"  .venv/bin/python experiments/shakespeare.py --run.folder={run} --run.steps={config.steps + 100}")
    print("  .venv/bin/python experiments/minimal.py")
    if difference > 1e-5 or result["final"] > config.target:
        raise SystemExit("demo: a number of the table is not what it should be")
    return result


if __name__ == "__main__":
    os.chdir(ROOT)
    loop.launch(main, Config)
