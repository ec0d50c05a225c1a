"""Offload: two ops that copy activations and state to host memory and back, kept in place by compilers.

`fetched` and `stored` are for state that is at rest there, which the pass `step.streamed` moves piece by piece, and
`brought` for parameters, whose copies `step.regather` puts before their uses and `step.arriving` begins one bucket
earlier. The copies of activations run beside the next layer (`step.leaving`), and back beside the layer before: on
streams of their own, from and to page-locked memory, and no buffer is used again before its copy is done. Those of a
stage of a pipeline, whose backward is a graph of its own, leave on the stream that computes.
Without CUDA they are plain copies, which save nothing and are for tests; on CUDA they were not run yet.
Rajbhandari et al. 2021 (ZeRO-Infinity, arXiv 2104.07857, section 5.1.2) offload activations of checkpointed layers so.
"""

from __future__ import annotations

from typing import Any

import torch

from fmegatron import tree
from fmegatron.layout import Layout
from fmegatron.step.output_buffers import barrier
from fmegatron.tree import labels, structure

__all__ = ["brought", "fetched", "from_host", "is_worth_moving", "on_device", "stored", "to_host"]


def to_host(xs: list[torch.Tensor], y: torch.Tensor) -> tuple[list[torch.Tensor], torch.Tensor]:
    """(copies of xs on the CPU, of the same strides and page-locked where they come from CUDA; y once they are made).

    Whatever reads that y comes after the copies. Without it Inductor makes them just before they are read again. It
    costs a copy of y, on the device, which is nothing beside the bus.
    """
    out = []
    for x in xs:
        out.append(torch.ops.fmegatron_step.to_host(x, out[-1] if out else y))
    return out, barrier(y, out[-1]) if out else y


def from_host(x: torch.Tensor, after: torch.Tensor) -> torch.Tensor:
    """A copy of x on the device of `after`, made after `after` exists: not as early as its argument would allow."""
    return torch.ops.fmegatron_step.from_host(x, after)


def fetched(state: structure.Tree, after: torch.Tensor) -> structure.Tree:
    """A tree of arrays, of which those in host memory (by their layouts) are on the device of `after`, once that
    exists. What a step computes of one of the memory "host-update", element by element, is computed on the host, and
    it is not copied: `step.streamed`."""

    def one(x: torch.Tensor) -> torch.Tensor:
        layout = labels.layout_of(x)
        if layout is None or layout.memory == "device":
            return x
        there = layout.memory == "host-update"
        y = torch.ops.fmegatron_step.from_host(x, after, True) if there else from_host(x, after)
        return labels.labelled(y, layout.replace(memory="device"))

    return tree.map(one, state)


def brought(params: structure.Tree, beside: structure.Tree) -> structure.Tree:
    """A tree of arrays to compute with, of which those in host memory (by their layouts) are on the device of the first
    tensor in `beside` that is on one. Where a step is traced each copy is made before its first use, and again for the
    backward (`step.regather`).

    Raises ValueError, naming an array, where `beside` has no such tensor.
    """
    known = [labels.layout_of(x) if isinstance(x, torch.Tensor) else None for x in tree.leaves(params)]
    if not any(layout is not None and layout.on_host for layout in known):
        return params
    there = (x for x in tree.leaves(beside) if isinstance(x, torch.Tensor) and not _is_on_host(x))
    after = next(there, None)
    if after is None:
        path = next(path for path, of in zip(tree.paths(params), known, strict=True) if of is not None and of.on_host)
        raise ValueError(
            f"parameter {path!r}: got an array in host memory, and no other argument that is on a device, wanted one, "
            "to know where to compute; give the rows of a batch"
        )

    def one(x: Any) -> Any:
        layout = labels.layout_of(x)
        return x if layout is None or not layout.on_host else labels.labelled(from_host(x, after), on_device(layout))

    return tree.map(one, params)


def on_device(layout: Layout) -> Layout:
    """The layout of the same array on the device."""
    return layout.replace(memory="device") if layout.on_host else layout


def _is_on_host(x: torch.Tensor) -> bool:
    layout = labels.layout_of(x)
    return layout is not None and layout.on_host


def stored(new: structure.Tree, old: structure.Tree) -> structure.Tree:
    """New values of a tree of arrays, each in the memory in which the old one is (by its layout).

    A tree of another structure comes back as it is: whoever calls a step with it is told so there.
    """

    def one(x: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
        layout = labels.layout_of(like)
        if layout is None or layout.memory == "device" or x is like:
            return x
        return labels.labelled(torch.ops.fmegatron_step.to_host(x, x), layout)

    alike = structure.flatten(new)[2] == structure.flatten(old)[2]
    return tree.map(one, new, old) if alike else new


def is_worth_moving(x: torch.Tensor, smallest: int) -> bool:
    """Whether x has that many bytes, and memory for each of its elements."""
    own = all(stride or size == 1 for size, stride in zip(x.shape, x.stride(), strict=True))
    return own and x.numel() * x.element_size() >= smallest


def _empty(x: torch.Tensor, device: torch.device, **options) -> torch.Tensor:
    return torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device=device, **options)


def _to_host(x, after):
    return _empty(x, torch.device("cpu"), pin_memory=x.is_cuda).copy_(x, non_blocking=x.is_cuda)


def _from_host(x, after, there=False):
    del there  # it tells the pass "stream" where to compute
    return _empty(x, after.device).copy_(x, non_blocking=after.is_cuda)


def _define_ops():
    library = torch.library.Library("fmegatron_step", "FRAGMENT")
    library.define("to_host(Tensor x, Tensor after) -> Tensor")
    library.define("from_host(Tensor x, Tensor after, bool there=False) -> Tensor")
    library.impl("to_host", _to_host, "CompositeExplicitAutograd")
    library.impl("from_host", _from_host, "CompositeExplicitAutograd")
    # Fake implementations and not Meta kernels: those give the result the device of the argument.
    torch.library.register_fake("fmegatron_step::to_host", lambda x, after: _empty(x, torch.device("cpu")), lib=library)
    torch.library.register_fake(
        "fmegatron_step::from_host", lambda x, after, there=False: _empty(x, after.device), lib=library
    )
    return library


_LIBRARY = _define_ops()
