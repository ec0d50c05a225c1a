"""A search over meshes: which of them fit a device, the fastest by formula first, and why the others do not."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

from fmegatron.layout import Mesh
from fmegatron.plan.from_formulas import Quick, quick
from fmegatron.plan.from_trace import in_mib
from fmegatron.step import Description, Overlap
from fmegatron.step.timelines import planned

__all__ = ["Found", "Search", "meshes_of", "search"]


@dataclass(frozen=True)
class Found:
    """A mesh that fits: its plan, and the estimated seconds of a step."""

    mesh: Mesh
    plan: Quick
    seconds: float


@dataclass(frozen=True)
class Search:
    """found: fastest first. failed: (mesh, why). memory: bytes of a device. seconds: of the processor.

    undecided: meshes of which what formulas count fits and something else takes memory, too (`Quick.unknown_memory`).
    """

    found: tuple[Found, ...]
    failed: tuple[tuple[Mesh, str], ...]
    memory: int
    seconds: float
    undecided: tuple[Found, ...] = ()

    def __str__(self) -> str:
        lines = [f"{len(self.found)} meshes fit into {in_mib(self.memory)}, {len(self.failed)} do not"]
        if self.undecided:
            lines[0] += f", {len(self.undecided)} are not decided: not all of their memory is counted"
        for one in self.found[:20]:
            rate = one.plan.tokens / one.seconds
            lines.append(
                f"  {one.mesh!s:28s} {one.seconds:10.4g} s a step  {rate:12,.0f} tokens/s  {in_mib(one.plan.peak)}"
            )
        if len(self.found) > 20:
            lines.append(f"  and {len(self.found) - 20} slower ones")
        reasons: dict[str, list[Mesh]] = {}
        for mesh, why in self.failed:
            reasons.setdefault(why, []).append(mesh)
        for why, meshes in list(reasons.items())[:20]:
            more = f" and {len(meshes) - 1} more" if len(meshes) > 1 else ""
            lines.append(f"  {meshes[0]}{more}: {why}")
        if len(reasons) > 20:
            lines.append(f"  and {len(reasons) - 20} other reasons")
        if self.undecided:
            least = min(self.undecided, key=lambda one: one.plan.peak)
            lines.append(
                f"  not decided: {', '.join(str(one.mesh) for one in self.undecided[:20])}"
                f"{', ...' if len(self.undecided) > 20 else ''}; from {in_mib(least.plan.peak)} ({least.mesh}) on, and "
                "what is not counted; the exact plan of one mesh (--mesh, without --quick; `plan.exact`) counts all"
            )
        unknown = dict.fromkeys(what for one in (*self.found, *self.undecided) for what in one.plan.unknown)
        lines += [f"  not counted: {what}" for what in unknown]
        return "\n".join(lines)


def meshes_of(devices: int, axes: Iterable[str] = ("dp", "fsdp", "tp")) -> Iterator[Mesh]:
    """Every mesh of so many devices over these axes, in this order, sizes of 1 left out.

    >>> [str(mesh) for mesh in meshes_of(4, ("fsdp", "tp"))]
    ['tp4', 'fsdp2·tp2', 'fsdp4']
    """
    names = tuple(axes)

    def sizes(left: int, count: int) -> Iterator[tuple[int, ...]]:
        if count == 1:
            yield (left,)
            return
        for size in range(1, left + 1):
            if left % size == 0:
                yield from ((size, *rest) for rest in sizes(left // size, count - 1))

    for found in sizes(devices, len(names)):
        yield Mesh(**{name: size for name, size in zip(names, found, strict=True) if size > 1})


def search(
    describe: Callable[[Mesh], Description],
    meshes: Iterable[Mesh],
    memory: int,
    *,
    rates: planned.Rates | None = None,
    overlap: Overlap | bool = True,
    margin: float = 0.15,
) -> Search:
    """Plan a step on each mesh by formulas and order those that fit by the seconds of a step.

    Args:
        describe: mesh -> the `step.Description`, or ValueError where the mesh cannot be meant.
        meshes: to be tried (`meshes_of`); of one with pp the seconds are those of the clock of its table.
        memory: bytes of a device.
        rates: of a device; None: the assumptions of `Rates()`.
        overlap: as `jit` is given it.
        margin: share of what lives beside the state that is kept free, since formulas err (docs/planning.md).
    """
    began = time.process_time()
    found: list[Found] = []
    undecided: list[Found] = []
    failed: list[tuple[Mesh, str]] = []
    for mesh in meshes:
        try:
            plan = quick(describe(mesh), overlap=overlap)
        except ValueError as error:
            failed.append((mesh, str(error).splitlines()[0]))
            continue
        needed = plan.state + plan.batch + round(plan.transient * (1 + margin))
        if needed > memory:
            failed.append((mesh, _too_large(plan, memory, margin)))
        else:
            which = undecided if plan.unknown_memory else found
            which.append(Found(mesh, plan, plan.step_seconds(rates)["total"]))
    found.sort(key=lambda one: one.seconds)
    return Search(tuple(found), tuple(failed), memory, time.process_time() - began, tuple(undecided))


def _too_large(plan: Quick, memory: int, margin: float) -> str:
    if plan.state > memory:
        return "the state alone is larger than the device"
    at = max(plan.moments, key=lambda name: plan.moments[name])
    free = f"{margin:.0%} of what lives beside the state kept free"
    return f"too large where it is most: {at} ({free})"
