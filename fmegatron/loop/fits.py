"""Whether a run fits: the plan of its step against the memory of a rank, before anything is written.

A rank has the memory of its device; on a CPU its share of that of the machine, or of the container (cgroup), beside
what the process holds already. State in host memory is compared with that share, and on a CPU counts as all else. The
formulas of `plan.quick` take milliseconds; where they come near the limit, or count no activations, the step that is
compiled is counted exactly (`plan.exact`, some 20 s of a processor).
"""

from __future__ import annotations

import math
import os
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path

import torch

from fmegatron import plan, tree
from fmegatron.collectives import World
from fmegatron.files import disk
from fmegatron.layout import Mesh
from fmegatron.loop.config import UsageError
from fmegatron.loop.options import Memory
from fmegatron.loop.sources import mesh_text
from fmegatron.plan import from_trace
from fmegatron.step import Description, State

NEAR = 0.5  # of the limit: from here on formulas are not trusted
_MOST_RANKS = 1024  # of meshes that are tried where none of as many ranks fits
_CGROUPS, _OWN_GROUPS = "/sys/fs/cgroup", "/proc/self/cgroup"


def planned_bytes(
    described: Description,
    world: World,
    options: Memory,
    describe: Callable[[Mesh], Description],
    overlap: bool = True,
) -> float | None:
    """The bytes that the step is planned to take on a rank, None where that was not asked for. All ranks call it.

    describe: the same step on another mesh. overlap: as `step.jit` is given it. Raises UsageError where it cannot fit:
    with the three largest parts, and a mesh that would.
    """
    if options.plan == "off":
        return options.planned_bytes
    limit, of = _limit(options, world)
    limit = int(world.minimum(torch.tensor([math.floor(limit)])))  # all ranks decide the same
    together = world.device.type != "cuda"
    state = _state_parts(described, ("device", "host") if together else ("device",))
    if not together and (on_host := _state_parts(described, ("host",))):
        _require_room(on_host, world)
    peak, parts, how = sum(size for _, size in state), state, "its state alone"
    if options.planned_bytes is not None:
        parts = [*state, ("beside them", options.planned_bytes - peak)]
        peak, how = options.planned_bytes, "as planned before"
    elif peak <= limit:
        peak, parts, how = _planned(described, options.plan, limit, state, overlap, together)
    if peak <= limit:
        return peak
    mesh = described_mesh(described)
    fix = "give that of this step" if options.planned_bytes else _another(describe, mesh, limit, overlap)
    where = f"on each rank of {mesh}" if mesh.size > 1 else "on one rank"
    largest = "; ".join(
        f"{from_trace.in_mib(size)} {name}" for name, size in sorted(parts, key=lambda part: -part[1])[:3]
    )
    raise UsageError(
        f"memory: got a step that takes {_in_words(peak)} {where} ({how}), wanted at most {_in_words(limit)}, {of}. "
        f"The largest parts: {largest}; {fix}, or --run.memory.plan=off"
    )


def _in_words(nbytes: float) -> str:
    """In MiB; what is less, in bytes."""
    return from_trace.in_mib(nbytes) if nbytes >= 2**20 else f"{nbytes:,.0f} bytes"


def described_mesh(described: Description) -> Mesh:
    """The mesh of a step."""
    return tree.leaves(tree.layouts(described.state))[0].mesh


def _limit(options: Memory, world: World) -> tuple[float, str]:
    """(bytes of this rank, of what)."""
    if options.limit_bytes is not None:
        return options.limit_bytes, "as --run.memory.limit_bytes says"
    if world.device.type == "cuda":
        return _device_share(world.device)
    return _host_share()


def _require_room(on_host: list[tuple[str, float]], world: World) -> None:
    """UsageError where the state that is to be in host memory has no room there."""
    share, of = _host_share()
    share, size = int(world.minimum(torch.tensor([math.floor(share)]))), sum(size for _, size in on_host)
    if size > share:
        raise UsageError(
            f"memory: got a state of which {from_trace.in_mib(size)} on each rank are to be in host memory, wanted at "
            f"most {from_trace.in_mib(share)}, {of}; keep less there (state_specs(..., memory=)), run fewer ranks on a "
            "machine, or shard the state over more ranks; --run.memory.plan=off does not look"
        )


def _device_share(device: torch.device) -> tuple[float, str]:
    """(bytes of a CUDA device that this process may take, of what): what is free, and what it holds itself."""
    free, total = torch.cuda.mem_get_info(device)
    held = torch.cuda.memory_reserved(device)
    others = total - free - held
    return free + held, f"the {from_trace.in_mib(total)} of {device} without the {from_trace.in_mib(others)} in use"


def _host_share() -> tuple[float, str]:
    """(bytes of the host that this rank may take, of what)."""
    ranks = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    whole = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    limit = min(whole, container_bytes() or whole)
    held = resident_bytes()
    what = "of the container (cgroup)" if limit < whole else "of the machine"
    each = f", which {ranks} ranks share" if ranks > 1 else ""
    share = max(0, limit / ranks - held)
    return share, f"the {from_trace.in_mib(limit)} {what}{each} without what a process holds already"


def resident_bytes() -> int:
    """What this process holds in memory now."""
    text = disk.look(Path("/proc/self/statm").read_text, "0 0")
    return int(text.split()[1]) * os.sysconf("SC_PAGE_SIZE")


def container_bytes(root: str | Path = _CGROUPS, groups: str | Path = _OWN_GROUPS) -> int | None:
    """The least limit of the cgroups that this process is in, of version 1 or 2; None without any."""
    return min(_limits(Path(root), Path(groups)), default=None)


def _limits(root: Path, groups: Path) -> Iterator[int]:
    for line in disk.look(groups.read_text, "").splitlines():
        _, controllers, inside = line.split(":", 2)
        if controllers and "memory" not in controllers.split(","):
            continue
        top, name = (root / "memory", "memory.limit_in_bytes") if controllers else (root, "memory.max")
        folder = top / inside.lstrip("/")
        for one in (folder, *folder.parents):  # a group is limited by those that it is in
            if not one.is_relative_to(top):
                break
            text = disk.look((one / name).read_text, "max").strip()
            if text.isdigit():
                yield int(text)


def _state_parts(described: Description, memories: tuple[str, ...]) -> list[tuple[str, float]]:
    """(name, bytes of rank 0) of what the state is made of, as far as it is in these memories."""
    state = tree.layouts(described.state)
    named = {"of the state": state}
    if isinstance(state, State):
        named = {"of parameters": state.params, "of the optimizer's state": state.opt}
    leaves = {
        name: [x for x in tree.leaves(part) if ("host" if x.on_host else "device") in memories]
        for name, part in named.items()
    }
    return [(name, sum(x.local_nbytes(0) for x in found)) for name, found in leaves.items() if found]


def _planned(
    described: Description,
    how: str,
    limit: float,
    state: list[tuple[str, float]],
    overlap: bool,
    together: bool,
) -> tuple[float, list[tuple[str, float]], str]:
    """(peak, its parts, how it was found). together: whether host and device are one memory."""
    if how != "exact":
        try:
            by_formula = plan.quick(described, overlap=overlap)
        except ValueError:  # no State
            by_formula = None
        known = by_formula is not None and not by_formula.unknown_memory
        peak = sum(size for _, size in state) if by_formula is None else by_formula.peak + together * by_formula.host
        if peak <= limit * (NEAR if known else NEAR / 2):
            return peak, state, "by formulas"
    try:
        parts = described.function, described.state, described.batch
        counted = plan.exact(*parts, described_mesh(described), overlap=overlap)
    except (ValueError, RuntimeError) as error:
        warnings.warn(f"memory: the step is not planned: {error}; it is not known to fit", RuntimeWarning, stacklevel=3)
        return sum(size for _, size in state), state, "its state alone"
    held: dict[str, float] = {}
    for one in counted.held:
        name = f"of {one.op} at {one.at}"
        held[name] = held.get(name, 0) + one.nbytes
    return (
        counted.peak + together * counted.host,
        [*state, ("of the batch", counted.batch), *held.items()],
        "planned exactly",
    )


def _another(describe: Callable[[Mesh], Description], mesh: Mesh, limit: float, overlap: bool) -> str:
    """In words, a mesh that would fit, by formulas."""
    ranks = mesh.size
    while ranks <= max(_MOST_RANKS, mesh.size):
        meshes = (x for x in plan.meshes_of(ranks) if x != mesh)
        found = plan.search(describe, meshes, round(limit), overlap=overlap)
        if found.found:
            one = found.found[0].mesh
            more = "" if ranks == mesh.size else f" of {ranks} ranks with as much memory each"
            return f"--mesh={mesh_text(one)}{more} would fit"
        if found.undecided:
            break
        ranks *= 2
    command = f"python -m fmegatron.plan EXPERIMENT --search {mesh.size} --memory {limit / 2**30:.4g}"
    return f"{command} looks for a mesh that fits"
