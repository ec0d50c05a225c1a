"""A plan for a device as text: memory with that outside of its allocator, launches, time by roofline, passes.

Every sheet begins with the device that it is for, and says that nothing of it was measured there.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from fmegatron.plan.cuda.devices import Device
from fmegatron.plan.cuda.kernels import Kernel
from fmegatron.plan.from_trace import Exact, in_mib

__all__ = ["Outside", "fits", "outside", "passes", "summary"]

_MIB = 1 << 20
# What a process takes on an H100 beyond torch's allocator before it sends (context, modules, a communicator without
# connections): 1.06 GB (NVIDIA/nccl issue 1685).
CONTEXT = 1_060_000_000
# A connection of one channel, by NCCL's log of allocations (the same issue): 4 MiB of the protocol Simple, those of LL
# and LL128, in pages of 2 MiB. Rings and trees receive over three connections a channel; 16 channels of a node's links.
CONNECTION, CONNECTIONS, CHANNELS = 10 * _MIB, 3, 16
# An exchange opens 32 channels to each peer, with 2 MiB more each (the same issue: 3.3 GB among 8).
EXCHANGE = 32 * 12 * _MIB

_WORDS = (
    ("kernel", "kernels of Triton"),
    ("product", "products"),
    ("attention", "attention"),
    ("operator", "other operators"),
    ("collective", "collectives"),
)
_SHOWN = 40


@dataclass(frozen=True)
class Outside:
    """Bytes on the device beside what a plan counts. workspace: of cuBLAS, in torch's allocator. communicators: name ->
    bytes, an estimate. context: of the process, as measured elsewhere."""

    workspace: int
    communicators: dict[str, int]
    context: int

    @property
    def total(self) -> int:
        """All of it."""
        return self.workspace + sum(self.communicators.values()) + self.context


def outside(plan: Exact) -> Outside:
    """What a process of this plan takes beside it."""
    device, size = _device(plan), plan.mesh.size
    groups = {name: ranks for name, ranks in plan.groups.items() if "#" in name or 1 < ranks < size}
    groups |= {"all ranks": size} if size > 1 else {}
    exchanged = {one.name.rpartition(" over ")[2] for one in plan.kernels if "all_to_all" in one.name}
    sizes = {name: CONNECTION * CONNECTIONS * CHANNELS for name in groups}
    for axes in exchanged:
        name = axes if axes in sizes else "all ranks"
        if name in sizes:
            sizes[name] += EXCHANGE * (groups[name] - 1)
    return Outside(device.workspace, dict(sorted(sizes.items())), CONTEXT)


def fits(plan: Exact, limit: int | None = None) -> tuple[bool, str]:
    """(whether a step fits, in words). limit: bytes; None: the memory of the device."""
    device = _device(plan)
    limit, total = device.memory if limit is None else limit, plan.peak + outside(plan).total
    left = limit - total
    text = f"fits, {in_mib(left)} are left" if left >= 0 else f"does not fit, {in_mib(-left)} are missing"
    return left >= 0, f"{in_mib(total)} of {in_mib(limit)}: {text}"


def summary(plan: Exact, model_flops: float = 0.0) -> str:
    """The sheet of a plan. model_flops: of this rank's part of a step, without recomputation; 0: not known."""
    device, beside = _device(plan), outside(plan)
    lines = [
        f"planned for {device.name} (sm_{device.arch}), one rank: {device.flops / 1e12:,.0f} TFLOP/s of 16 bits, "
        f"{device.flops32 / 1e12:,.4g} of fp32, {device.bandwidth / 1e12:.3g} TB/s of memory, "
        f"{device.links / 1e9:,.0f} GB/s to others, as its data sheet has them; nothing was measured",
        f"  memory     {fits(plan)[1]}",
        f"    {in_mib(plan.state):>14s}  state",
        f"    {in_mib(plan.batch):>14s}  batch",
        f"    {in_mib(plan.transient):>14s}  above them at the peak, in blocks of 512 bytes",
        f"    {in_mib(beside.workspace):>14s}  cuBLAS, as torch gives it on one stream",
    ]
    for name, nbytes in beside.communicators.items():
        lines.append(f"    {in_mib(nbytes):>14s}  NCCL's communicator of {name}, by {CHANNELS} channels: an estimate")
    lines.append(f"    {in_mib(beside.context):>14s}  the process (context, modules), measured by others on an H100")
    lines.append("    not seen: fragments of the allocator, workspaces of cuDNN but for a gradient of q in fp32")
    launches, compute = sum(one.calls for one in plan.kernels), _seconds(plan, False)
    different = len({(one.graph, one.kind, one.name, one.at) for one in plan.kernels})
    lines.append(f"  launches   {launches:,.0f} a step, of {different} lines")
    lines.append(f"  time       {1e3 * compute:,.2f} ms by roofline, without gaps, autotuning or waits")
    for kind, word in _WORDS:
        of = [one for one in plan.kernels if one.kind == kind]
        if of:
            lines.append("  " + _row(word, of, compute, kind == "collective"))
    for name, ranks in plan.groups.items():
        lines.append(f"  group      {name}: {ranks} ranks")
    if model_flops:
        counted = sum(one.flops for one in plan.kernels)
        lines.append(
            f"  work       {model_flops / 1e12:,.2f} TFLOP of the model, {counted / 1e12:,.2f} in products and "
            f"attention; MFU at most {model_flops / device.flops / compute:.1%} of {device.flops / 1e12:,.0f} TFLOP/s"
        )
    return "\n".join(lines)


def passes(plan: Exact, gradients: int = 0) -> str:
    """Every kernel and product of a plan, the slowest first, and the passes over state, gradients and activations
    against their floor.

    gradients: bytes of this rank's, 0: not known.
    """
    device, compute = _device(plan), _seconds(plan, False)
    lines = [f"passes, planned for {device.name}:", "  " + _HEAD]
    ordered = sorted(plan.kernels, key=lambda one: -one.seconds)
    lines += ["  " + _row(f"{one.kind} {one.name} of {one.graph} at {one.at}", [one], compute, one.kind == "collective")
              for one in ordered[:_SHOWN]]  # fmt: skip
    if rest := ordered[_SHOWN:]:
        lines.append("  " + _row(f"{len(rest)} others", rest, compute, False))
    outer = [one for one in plan.kernels if one.graph == "step" and one.kind in ("kernel", "operator")]
    inner = [one for one in plan.kernels if one.graph != "step" and one.kind in ("kernel", "operator")]
    lines.append("  kernels outside of layers (casts, stacks, loss, update), by file:")
    files = _by(outer, lambda one: one.at.rpartition(":")[0])
    lines += ["  " + _row(name, of, compute, False) for name, of in files]
    lines.append("  kernels inside of layers, by operator and graph:")
    lines += [
        "  " + _row(name, of, compute, False) for name, of in _by(inner, lambda one: f"{one.name} of {one.graph}")
    ]
    read = sum(one.state_read for one in plan.kernels)
    outer_bytes, floor = sum(one.nbytes for one in outer), 2 * plan.state + 2 * gradients
    lines.append(
        f"  state      {_gb(plan.state)} are read {read / plan.state if plan.state else 0:.2f} times; floor: once, and "
        "written once"
    )
    known = "" if gradients else ", of which gradients are not known"
    lines.append(
        f"  outside    {_gb(outer_bytes)} are moved by kernels outside of layers; floor {_gb(floor)}{known}: state "
        f"read and written once, gradients read by their norm and by the update; above it "
        f"{1e3 * max(0.0, outer_bytes - floor) / device.bandwidth:,.2f} ms"
    )
    of_products = sum(one.nbytes for one in plan.kernels if one.kind in ("product", "attention"))
    moved = sum(one.nbytes for one in inner)
    lines.append(
        f"  inside     {_gb(moved)} are moved by kernels of layers; floor 0 (all fused into products): "
        f"{1e3 * moved / device.bandwidth:,.2f} ms; products and attention move {_gb(of_products)}"
    )
    return "\n".join(lines)


# ---- details ---------------------------------------------------------------------------------------------------------
_HEAD = f"{'ms':>9s} {'share':>6s} {'launches':>9s} {'GB':>9s} {'TFLOP':>8s} {'GB sent':>8s}"


def _row(name: str, of: Sequence[Kernel], compute: float, sends: bool) -> str:
    sums = [(k.calls, k.nbytes, k.flops, k.sent, k.seconds, k.state_read) for k in of]
    one = Kernel("", "", "", "", *map(sum, zip(*sums, strict=True)))
    share = "sent" if sends else f"{one.seconds / compute:.1%}" if compute else ""
    return (
        f"{1e3 * one.seconds:9.3f} {share:>6s} {one.calls:9,.0f} {one.nbytes / 1e9:9.3f} {one.flops / 1e12:8.3f} "
        f"{one.sent / 1e9:8.3f}  {name}"
    )


def _by(of: Iterable[Kernel], name: Callable[[Kernel], str]) -> list[tuple[str, list[Kernel]]]:
    """By a name, the slowest first."""
    found: dict[str, list[Kernel]] = {}
    for one in of:
        found.setdefault(name(one), []).append(one)
    return sorted(found.items(), key=lambda item: -sum(one.seconds for one in item[1]))


def _seconds(plan: Exact, sends: bool) -> float:
    return sum(one.seconds for one in plan.kernels if (one.kind == "collective") == sends)


def _gb(nbytes: float) -> str:
    return f"{nbytes / 1e9:,.2f} GB"


def _device(plan: Exact) -> Device:
    if plan.device is None:
        raise ValueError(
            "plan: got a plan for the CPU, wanted one for a device; give exact(..., device=DEVICES['h100'])"
        )
    return plan.device
