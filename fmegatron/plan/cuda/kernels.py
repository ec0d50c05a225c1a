"""What a step launches on a device: kernels, products, attention and collectives, with bytes, FLOP and roofline time.

Read off Inductor's wrappers while they run on fake tensors (`plan.wrapper`). Of a Triton kernel every element that its
indices name is moved once; of all else its arguments and results. The time of a launch is that of its bytes at the
memory's rate or that of its FLOP at the rate of their dtype, whichever is longer, at the rates of the data sheet: no
launch is faster, and few are as fast.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.utils.flop_counter import flop_registry

from fmegatron.collectives import torch_private
from fmegatron.plan.cuda.devices import Device

__all__ = ["Kernel", "added", "called", "continued", "launched", "scratch", "times"]

_SENDS = frozenset({"_c10d_functional", "fmegatron_real"})
_FREE = frozenset({"wait_tensor"})
_COPIES = frozenset({"pack", "unpack"})  # of what is sent, in memory
_ATTENTION = re.compile(r"attention")
_BY_ROWS = re.compile(r"_(flash|efficient)_attention")  # whose arrays are [B, S, H, K]
_PAPER = re.compile(r"[#.]paper\d*$")  # behind the names of groups of a world on paper
_TILED_BACKWARD = re.compile(r"tiled_attention_backward")
_BACKWARD = re.compile(r"_scaled_dot_product_(cudnn|flash)_attention_backward")


@dataclass(frozen=True)
class Kernel:
    """Launches of one kind in a step of one rank.

    graph: "step", or of the layer. kind: "kernel" (of Triton), "product", "attention", "collective", "operator". name:
    of the kernel's last operator, of the product with its sizes, of the operator. at: the line of the step that it is
    for. calls: launches; nbytes: moved in memory; flops: of products; sent: bytes that the rank sends, all of them
    together. seconds: at data-sheet rates. state_read, state_written: of nbytes those of the step's first argument.
    """

    graph: str
    kind: str
    name: str
    at: str
    calls: float = 1.0
    nbytes: float = 0.0
    flops: float = 0.0
    sent: float = 0.0
    seconds: float = 0.0
    state_read: float = 0.0


_SUMS = ("calls", "nbytes", "flops", "sent", "seconds", "state_read")


def times(kernel: Kernel, factor: float) -> Kernel:
    """So many of them."""
    return replace(kernel, **{name: factor * getattr(kernel, name) for name in _SUMS})


def added(kernels: Iterable[Kernel]) -> tuple[Kernel, ...]:
    """One for each graph, kind, name and line, in the order of their first."""
    found: dict[tuple[str, ...], Kernel] = {}
    for one in kernels:
        key = (one.graph, one.kind, one.name, one.at)
        known = found.get(key)
        sums = {} if known is None else {name: getattr(known, name) + getattr(one, name) for name in _SUMS}
        found[key] = replace(one, **sums)
    return tuple(found.values())


def continued(shallow: Sequence[Kernel], deeper: Sequence[Kernel], layers: int, missing: int) -> tuple[Kernel, ...]:
    """Those of a deeper model yet: what `layers` more layers have added is added for `missing` more."""
    more = added([*deeper, *(times(one, -1.0) for one in shallow)])
    return tuple(one for one in added([*deeper, *(times(k, missing / layers) for k in more)]) if one.calls > 0.0)


def launched(graph: str, device: Device, launch: Any, origin: tuple[str, str], inputs: frozenset[str]) -> Kernel:
    """A launch of a Triton kernel.

    launch: as `plan.torch_private` notes it. origin: its last operator and the line. inputs: names of the arguments
    that are the state.
    """
    read, written = sum(launch.read.values()), sum(launch.written.values())
    of_state = sum(n for name, n in launch.read.items() if name in inputs)
    seconds = (read + written) / device.bandwidth
    return Kernel(graph, "kernel", *origin, nbytes=read + written, seconds=seconds, state_read=of_state)


def called(
    graph: str, device: Device, op: Any, short: str, arguments: Sequence[Any], results: Any, at: str
) -> Kernel | None:
    """A call of an operator, or of a kernel of a library; None for one that moves nothing.

    op: the operator, of which torch may know how many FLOP it takes; None: unknown. short: its name. results: a tensor
    or several.
    """
    given, made = list(_tensors(arguments)), list(_tensors(results))
    if short in _FREE or not made:
        return None
    nbytes = sum(x.numel() * x.element_size() for x in [*given, *made])
    if getattr(op, "namespace", "") in _SENDS and short not in _COPIES:
        group = [x for x in arguments if isinstance(x, str)][-1]
        sent = _sent(short, torch_private.group_named(group), given, made)
        name = f"{short} over {_PAPER.sub('', group.removeprefix('fmegatron:'))}"
        return Kernel(graph, "collective", name, at, nbytes=nbytes, sent=sent, seconds=sent / device.links)
    flops = _flops(op, arguments, results)
    if _ATTENTION.search(short):
        kind, sizes = "attention", ""
    elif flops:
        kind, sizes = "product", " " + " @ ".join("x".join(map(str, x.shape)) for x in given[-2:])
    else:
        kind, sizes = "operator", ""
    rate = device.rate(next((x.dtype for x in given if x.is_floating_point()), torch.float32))
    seconds = max(nbytes / device.bandwidth, flops / rate)
    return Kernel(graph, kind, short.strip("_") + sizes, at, 1.0, nbytes, flops, seconds=seconds)


def scratch(op: Any, arguments: Sequence[Any]) -> int:
    """Bytes of the device that an operator takes while it runs besides its results.

    Of attention's backward: the gradient of q in fp32, whose parts are added up, and a number a row (FlashAttention-2,
    arXiv 2307.08691; torch's flash_api.cpp; cuDNN's workspace holds the same); of `nn.tiled_attention`'s the latter.
    """
    if _TILED_BACKWARD.search(str(getattr(op, "__name__", op))):
        q = list(_tensors(arguments[:2]))[1]
        return 4 * q.numel() // q.shape[-1]
    if not _BACKWARD.search(str(getattr(op, "__name__", op))):
        return 0
    q = next(_tensors(arguments[1:]))
    return 4 * q.numel() + 4 * q.numel() // q.shape[-1]


# ---- details ---------------------------------------------------------------------------------------------------------
def _tensors(values: Any) -> Iterator[torch.Tensor]:
    if isinstance(values, torch.Tensor):
        yield values
    elif isinstance(values, list | tuple):
        for value in values:
            yield from _tensors(value)
    elif isinstance(values, Mapping):
        yield from _tensors([*values.values()])


def _flops(op: Any, arguments: Sequence[Any], results: Any) -> float:
    """As torch counts them; attention that is causal looks at half of the pairs, and those on the diagonal."""
    packet = getattr(op, "overloadpacket", op)
    formula = flop_registry.get(packet)
    if formula is None:
        return 0.0
    total = float(formula(*arguments, out_val=results))
    schema = torch_private.schema_of(op)
    named = {} if schema is None else dict(zip((a.name for a in schema.arguments), arguments, strict=False))
    if named.get("is_causal") or named.get("custom_mask_type"):
        first = 1 if "backward" in str(op) else 0
        q, k = list(_tensors(arguments))[first : first + 2]
        along = -3 if _BY_ROWS.search(str(op)) else -2
        total *= (k.shape[along] + 1) / (2 * k.shape[along]) if q.shape[along] == k.shape[along] else 1.0
    return total


def _sent(name: str, group: Any, given: list[torch.Tensor], made: list[torch.Tensor]) -> float:
    """Bytes that a rank sends at least: a ring's share of the whole array, twice for a sum that all have."""
    n = group.size()
    one, other = (sum(x.numel() * x.element_size() for x in xs) for xs in (given, made))
    if name == "ppermute":
        return float(one)
    return max(one, other) * (2 if name.startswith("all_reduce") else 1) * (n - 1) / n
