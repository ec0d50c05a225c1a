"""What a CUDA device would make of steps, one JSON object a line: python -m tests.cuda.look [--code] CASE ...

Run with the guard (`fmegatron.plan.cuda.guard.environment`). CASE: the number of one of `cover.CASES`, the name of an
experiment, "dense", or of one in a file FILE:FUNCTION, a function that returns (step.Description, Mesh). --code: also
what Inductor writes for an H100, and the machine code of its kernels, which needs triton.
"""

from __future__ import annotations

import json
import runpy
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from fmegatron.layout import Mesh
from fmegatron.plan.cuda import codegen, cubins, faults
from fmegatron.plan.cuda.devices import DEVICES
from fmegatron.plan.cuda.lowered import CUDA, Graph, graphs, lowered
from fmegatron.plan.paper import SizedWorld
from fmegatron.step import Description
from tests.cuda import cover

H100 = DEVICES["h100"]
MOST_STACK = 64  # bytes of a thread: 16 registers, from which on Inductor drops a configuration; sin and cos take 32


def looked(described: Description, mesh: Mesh, of_length: int, code: bool, cache: Path | None) -> dict[str, Any]:
    """(a) to (c) of a step, and (d) and (e) where its code is wanted."""
    with SizedWorld(mesh, 0, CUDA) as world:
        compiled = lowered(described.function, (described.state, described.batch), world)
        found = graphs(compiled.program)
        said: dict[str, Any] = {
            "graphs": {graph.label: graph.calls for graph in found},
            "host": [fault for graph in found for fault in faults.on_host(graph)],
            "cpu only": [fault for graph in found for fault in faults.for_cpu_only(graph)],
            "waits": [fault for graph in found for fault in faults.waits(graph)],
            "attention": faults.attention(found),
            "scores": [fault for graph in found for fault in faults.scores(graph, of_length)],
        }
        return {**said, **(coded(found, cache) if code else {})}


def coded(found: Sequence[Graph], cache: Path | None) -> dict[str, Any]:
    """(d) and (e): counts of each graph's code, lines at which the host waits, kernels whose registers spill."""
    counts, waits, spills = {}, [], []
    for graph in found:
        if any(x.device.type == "cpu" for x in graph.fakes):
            continue  # an update on the host, which is the CPU's code
        code = codegen.written(graph, H100)
        waits += faults.waits_in(graph.label, code)
        for name, source in code.kernels.items():
            for one in cubins.assembled(source, H100, 1, cache):
                spills += [f"{graph.label}: {name}: {one}"] if one.stack > MOST_STACK else []
        for name, one in cubins.of_attention(graph, H100, cache):
            spills += [f"{graph.label}: {name}: {one}"] if one.stack > MOST_STACK else []
        counts[graph.label] = {"kernels": len(code.kernels), "launches": code.launches, "calls": code.calls}
    return {"code": counts, "wrapper waits": waits, "spills": spills}


def case_of(name: str, folder: Path) -> tuple[Description, Mesh, str]:
    """(step, mesh, what it is) of the name of a case."""
    if ":" in name:
        path, _, function = name.partition(":")
        return *runpy.run_path(path)[function](), function
    if name.isdecimal() or name == "dense":
        case = cover.DENSE if name == "dense" else cover.CASES[int(name)]
        return cover.described(case), cover.mesh_of(case), cover.named(case)
    return *cover.experiment(name, folder), name


def main(names: list[str]) -> None:
    """Look at each case."""
    code = "--code" in names
    cache = next((Path(name.partition("=")[2]) for name in names if name.startswith("--cache=")), None)
    for name in (name for name in names if not name.startswith("--")):
        began = time.process_time()
        found: Mapping[str, Any] = {"case": name}
        try:
            with warnings.catch_warnings(), tempfile.TemporaryDirectory() as folder:
                warnings.simplefilter("ignore")
                described, mesh, what = case_of(name, Path(folder))
                found = {**found, "what": what, **looked(described, mesh, cover.PRIME, code, cache)}
        except Exception as error:
            lines = traceback.format_exception(error)
            found = {**found, "error": f"{type(error).__name__}: {error}"[:2000], "trace": "".join(lines)[-3000:]}
        print(json.dumps({**found, "seconds": round(time.process_time() - began, 2)}), flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
