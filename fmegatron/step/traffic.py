"""What a traced or lowered graph sends: its collectives one by one, with axes, elements and bytes per rank."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from types import MappingProxyType

import torch
from torch import fx

from fmegatron.collectives import is_symbolic, require_mesh_of_graph
from fmegatron.layout import Mesh
from fmegatron.step.graph.nodes import entry_of
from fmegatron.step.torch_private import opname

__all__ = ["Collective", "bytes_sent", "collectives_of"]

# real op (without the endings of its variants) -> (name of the symbolic op, position of the group's name)
_REAL = MappingProxyType(
    {
        "all_gather_into_tensor": ("all_gather", 2),
        "reduce_scatter_tensor": ("reduce_scatter", 3),
        "all_reduce": ("psum", 2),
        "all_to_all_single": ("all_to_all", 3),
        "ppermute": ("ppermute", 1),
    }
)
_ENDINGS = ("_out", "_coalesced", "_")
_LOCAL = ("axis_index", "declare")  # symbolic ops that send nothing


@dataclass(frozen=True)
class Collective:
    """One collective of a graph, as one rank sees it.

    op: "all_gather", "reduce_scatter", "psum", "pmax", "all_to_all" or "ppermute"; of a symbolic graph also their
    "..._many" forms. axes: mesh axes of size > 1 of its group; size: ranks in it. dtype, elements: of the local
    argument; uint8 and bytes where several dtypes travel in one buffer. sent: bytes that a rank sends, at least: what
    ring algorithms send, n - 1 of n parts of the whole array (twice for psum and pmax). at: line of the step.
    """

    op: str
    axes: tuple[str, ...]
    size: int
    dtype: torch.dtype
    elements: int
    sent: int
    at: str

    @property
    def nbytes(self) -> int:
        """Bytes of the local argument."""
        return self.elements * self.dtype.itemsize

    def __str__(self) -> str:
        dtype = str(self.dtype).removeprefix("torch.")
        return f"{self.op} over {'+'.join(self.axes)}: {dtype}[{self.elements}], sends {self.sent} B ({self.at})"


def collectives_of(graph: fx.Graph, mesh: Mesh) -> list[Collective]:
    """All collectives of a graph in its order, those inside of opaque layers once for each call.

    graph: as traced (`Jitted.graph("trace")`, `trace(...).graph_module.graph`) or lowered (`Jitted.graph("lower")` and
    what passes made of it). mesh: the mesh that its axes belong to (ValueError where a traced graph has another).
    """
    require_mesh_of_graph(graph, mesh, "collectives_of", "the argument")
    found = []
    for node in graph.nodes:
        if node.op != "call_function":
            continue
        entry, symbolic = entry_of(node), is_symbolic(node.target)
        if entry is not None:
            found += collectives_of(entry.graph_module.graph, mesh)
        elif symbolic and symbolic not in _LOCAL:
            found.append(_collective(node, symbolic, tuple(node.args[1]), mesh))
        elif (real := _real_name(node)) is not None:
            op, group_at = _REAL[real]
            if op == "psum" and node.args[1] == "max":
                op = "pmax"
            found.append(_collective(node, op, _axes_of(node.args[group_at]), mesh))
    return found


def bytes_sent(collectives: Iterable[Collective]) -> dict[str, int]:
    """Bytes that a rank sends, per axes: {"fsdp": 1024, "dp+fsdp": 16}."""
    total: dict[str, int] = {}
    for one in collectives:
        name = "+".join(one.axes)
        total[name] = total.get(name, 0) + one.sent
    return total


def _collective(node: fx.Node, op: str, axes: tuple[str, ...], mesh: Mesh) -> Collective:
    axes = tuple(name for name in axes if mesh[name] > 1)
    size, given = mesh.extent(axes), node.args[0]
    tensors = [n.meta["val"] for n in (given if isinstance(given, (list, tuple)) else [given])]
    dtypes = {t.dtype for t in tensors}
    nbytes = sum(t.numel() * t.dtype.itemsize for t in tensors)
    dtype = dtypes.pop() if len(dtypes) == 1 else torch.uint8
    sent = _sent(op.removesuffix("_many"), nbytes, size)
    return Collective(op, axes, size, dtype, nbytes // dtype.itemsize, sent, node.meta.get("at", "?"))


def _sent(op: str, nbytes: int, n: int) -> int:
    if op == "all_gather":
        return (n - 1) * nbytes
    if op == "ppermute":
        return nbytes
    return math.ceil((2 if op in ("psum", "pmax") else 1) * (n - 1) * nbytes / n)


def _real_name(node: fx.Node) -> str | None:
    """The key of _REAL for a functional collective on a process group, else None."""
    if getattr(node.target, "namespace", "") not in ("_c10d_functional", "fmegatron_real"):
        return None
    name = opname(node.target)
    for ending in _ENDINGS:
        name = name.removesuffix(ending)
    return name if name in _REAL else None


def _axes_of(group: str) -> tuple[str, ...]:
    """The axes in the name of a group (`World.group_name`); what follows a "#" tells groups of the same axes apart."""
    return tuple(group.removeprefix("fmegatron:").split("#")[0].split("+"))
