"""What a traced or lowered graph sends: its collectives one by one, with axes, elements and bytes per rank."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from types import MappingProxyType

import torch
from torch import fx

from fmegatron.collectives import World, kinds, table, torch_private
from fmegatron.layout import Mesh
from fmegatron.step.graph.nodes import entry_of, items_of, node_of
from fmegatron.step.torch_private import Op, opname

__all__ = ["Transfer", "bytes_sent", "collectives_of"]

_FUNCTIONAL = MappingProxyType({one.functional: one for one in table.COLLECTIVES if one.functional})
_ENDINGS = ("_out", "_coalesced", "_")  # of the variants of a functional collective


@dataclass(frozen=True)
class Transfer:
    """What one collective of a graph sends, as one rank sees it.

    op: its name ("all_gather", "psum", "pmax"). axes: mesh axes of size > 1 of its group; size: ranks in it. dtype,
    elements: of the local argument; uint8 and bytes where several dtypes travel in one buffer. sent: bytes that a rank
    sends, at least (`Collective.sent`). at: line of the step.
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


def collectives_of(graph: fx.Graph, mesh: Mesh) -> list[Transfer]:
    """All collectives of a graph in its order, those inside of opaque layers once for each call.

    graph: as traced (`Jitted.graph("trace")`, `trace(...).graph_module.graph`) or lowered (`Jitted.graph("lower")` and
    what passes made of it). mesh: the mesh that its axes belong to (ValueError where a traced graph has another).
    """
    kinds.require_mesh_of_graph(graph, mesh, "collectives_of", "the argument")
    found = []
    for node in graph.nodes:
        entry, symbolic = entry_of(node), kinds.collective_of(node.target)
        if entry is not None:
            found += collectives_of(entry.graph_module.graph, mesh)
        elif symbolic is not None and symbolic.sent is not None:
            found.append(_transfer(node, symbolic, symbolic.name, tuple(items_of(node.args[1])), mesh))
        elif (group := _group_of(node)) is not None:
            found.append(_transfer(node, *_real(node), World.axes_of(group), mesh))
    return found


def bytes_sent(collectives: Iterable[Transfer]) -> dict[str, int]:
    """Bytes that a rank sends, per axes: {"fsdp": 1024, "dp+fsdp": 16}."""
    total: dict[str, int] = {}
    for one in collectives:
        name = "+".join(one.axes)
        total[name] = total.get(name, 0) + one.sent
    return total


def _transfer(node: fx.Node, collective: kinds.Collective, op: str, axes: tuple[str, ...], mesh: Mesh) -> Transfer:
    axes = tuple(name for name in axes if mesh[name] > 1)
    size, given = mesh.extent(axes), node.args[0]
    tensors = [n.meta["val"] for n in (items_of(given) if isinstance(given, (list, tuple)) else [node_of(given)])]
    dtypes = {t.dtype for t in tensors}
    nbytes = sum(t.numel() * t.dtype.itemsize for t in tensors)
    dtype = dtypes.pop() if len(dtypes) == 1 else torch.uint8
    if collective.counted:  # of room for more rows than there are, no more is sent than fits there
        result = node.meta["val"]
        rooms = result if isinstance(result, (list, tuple)) else [result]
        nbytes = min(nbytes, sum(t.numel() * t.dtype.itemsize for t in rooms))
    assert collective.sent is not None, f"{op} sends bytes"
    sent = math.ceil(collective.sent(nbytes, size))
    return Transfer(op, axes, size, dtype, nbytes // dtype.itemsize, sent, node.meta.get("at", "?"))


def _group_of(node: fx.Node) -> str | None:
    """The name of the process group that a node of a lowered graph communicates over, else None."""
    if getattr(node.target, "namespace", "") not in ("_c10d_functional", "fmegatron_real"):
        return None
    assert isinstance(node.target, Op), "what has a namespace is an operator"
    names = [argument.name for argument in torch_private.schema_of(node.target).arguments]
    found = [node.args[names.index(name)] for name in ("group_name", "group") if name in names]
    return str(found[0]) if found else None


def _real(node: fx.Node) -> tuple[kinds.Collective, str]:
    """The collective that counts the bytes of a lowered node, and its name.

    That is what torch's op does, whatever it was made for (an exact reduce_scatter is an all_to_all); of an op that is
    that of no entry, the one that it was lowered from.
    """
    name = opname(node.target)
    for ending in _ENDINGS:
        name = name.removesuffix(ending)
    found = _FUNCTIONAL.get(name) or node.meta["collective"]
    return (
        found,
        f"p{node.args[1]}" if found is table.PSUM else found.name,
    )  # an all_reduce has the reduction as an argument
