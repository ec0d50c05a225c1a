"""`make check-cuda`: what an H100 would make of the cover's steps, and whether that is what is promised.

python -m tests.cuda.check [--all] [--jobs=2]        --all: code and machine code of every case, not of some ten
Counts of kernels are compared with tests/golden/cuda; --write writes them.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from fmegatron.plan.cuda import guard
from fmegatron.plan.cuda.devices import DEVICES
from tests.cuda import cover
from tests.house import ROOT

GOLDEN = ROOT / "tests" / "golden" / "cuda" / "code.json"
NOT_SHOWN = """What this does not show: that a kernel launches and what it computes, autotuning, the time of
anything, NCCL and its order over ranks, streams and events, the allocator, workspaces of cuBLAS and cuDNN."""
# Operators that a wrapper may call beside products and kernels of its own.
ALLOWED = (
    "extern_kernels.",
    "torch.ops.aten._scaled_dot_product_",
    "torch.ops.fmegatron_",
    "torch.ops._c10d_functional.",
)


def look(names: Sequence[str], *, code: bool = False, cache: Path | None = None) -> list[dict[str, Any]]:
    """What `tests.cuda.look` prints of these cases, from a process with the guard."""
    environment = guard.environment(DEVICES["h100"], guard.build())
    environment = {**environment, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    flags = (["--code"] if code else []) + ([f"--cache={cache}"] if cache else [])
    command = [sys.executable, "-m", "tests.cuda.look", *flags, *names]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    found = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    if len(found) != len(names):
        raise RuntimeError(f"check-cuda: {' '.join(command)} ended with {done.returncode}: {done.stderr[-3000:]}")
    return found


def wrong(found: Mapping[str, Any], promised: cover.Promise | None) -> list[str]:
    """What of a case is not as it is to be. promised: None: of its attention and waits nothing is."""
    if "error" in found:
        return [f"cannot be traced or lowered for CUDA: {found['error']}"]
    faults = [*found["host"], *found["cpu only"], *found.get("wrapper waits", ())]
    faults += [f"registers spill: {one}" for one in found.get("spills", ())]
    if promised is not None:
        kernels = {name.removeprefix("scaled_dot_product_").partition("_")[0] for name in found["attention"]}
        if kernels != promised.kernels:
            faults.append(f"attention: got the kernels {sorted(kernels)}, promised {sorted(promised.kernels)}")
        faults += [] if promised.waits else found["waits"]
        faults += found["scores"]
        if promised.waits and not found["waits"]:
            faults.append("the host does not wait any more: say so in cover.promise")
    for label, code in found.get("code", {}).items():
        faults += [
            f"{label}: the wrapper calls {name}, which is not allowed"
            for name in code["calls"]
            if not name.startswith(ALLOWED)
        ]
    return faults


def golden() -> dict[str, Any]:
    """What the golden file has: of each case its graphs' counts."""
    return json.loads(GOLDEN.read_text()) if GOLDEN.exists() else {}


def differences(found: Mapping[str, Any], stored: Mapping[str, Any]) -> list[str]:
    """Counts of code that are not those of the golden file, of a case that it has."""
    known = stored.get(found.get("what", ""))
    if known is None:
        return []
    return [
        f"{label}: got {code}, golden {known.get(label)}"
        for label, code in found.get("code", {}).items()
        if code != known.get(label)
    ]


def main(argv: Sequence[str] | None = None) -> int:
    """Look at all cases and print what is wrong; the exit status: 1 where something is."""
    parser = argparse.ArgumentParser(prog="check-cuda", description=__doc__)
    parser.add_argument("--all", action="store_true")
    parser.add_argument("--write", action="store_true")
    parser.add_argument("--jobs", type=int, default=len(os.sched_getaffinity(0)))
    options = parser.parse_args(argv)
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "fmegatron" / "cubins"
    with_code = {"dense", *map(str, cover.coded())}
    names = ["dense", *map(str, range(len(cover.CASES))), *(n for n in cover.experiments() if n not in cover.APART)]
    with_code = set(names) if options.all else with_code
    parts = [[name] for name in names if name in with_code]
    rest = [name for name in names if name not in with_code]
    parts += [rest[i : i + 8] for i in range(0, len(rest), 8)]
    stored, bad, new = golden(), 0, 0
    with concurrent.futures.ThreadPoolExecutor(options.jobs) as pool:
        for group in pool.map(lambda some: look(some, code=some[0] in with_code, cache=cache), parts):
            for found in group:
                name = found["case"]
                case = cover.DENSE if name == "dense" else cover.CASES[int(name)] if name.isdecimal() else None
                faults = wrong(found, cover.promise(case) if case else None)
                if options.write and "code" in found:
                    stored[found["what"]] = found["code"]
                faults += differences(found, stored)
                new += "code" in found and found["what"] not in stored
                bad += bool(faults)
                print(
                    f"{'WRONG' if faults else 'ok':5s} {found['seconds']:6.1f} s  {found.get('what', name)}", flush=True
                )
                for fault in faults[:8]:
                    print(f"      {fault}", flush=True)
    if options.write:
        GOLDEN.parent.mkdir(parents=True, exist_ok=True)
        GOLDEN.write_text(json.dumps(stored, indent=1, sort_keys=True) + "\n")
    if new:
        print(f"{new} cases are not in {GOLDEN.relative_to(ROOT)}: ARGS=--write adds their counts")
    print(f"{len(names) - bad} of {len(names)} cases are as promised; code of {len(with_code)}.\n{NOT_SHOWN}")
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
