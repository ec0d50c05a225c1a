"""All-gathers and reduce-scatters as all-to-all exchanges on gloo, which write straight into the receiver's buffer.

gloo makes a reduce-scatter of an all-reduce on a copy, which sends twice the bytes, and copies around its gathers. Its
all-to-all sends from and into the buffers that it is given. So a reduce-scatter is an all-to-all and a sum in the order
of the ranks, a gather an all-to-all of equal parts. Other libraries have good collectives of both kinds, and their
graphs stay as they are.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import fx

from fmegatron.collectives import World, torch_private
from fmegatron.step.graph.nodes import int_of, is_start, is_wait
from fmegatron.step.graph.order import add_call
from fmegatron.step.lower import copy_module
from fmegatron.step.torch_private import opname

__all__ = ["beside_exchange", "exchanged"]

_FORMS = ("all_gather_into_tensor", "reduce_scatter_tensor")
_ENDING = "_coalesced"


def exchanged(graph_module: fx.GraphModule, world: World | None) -> fx.GraphModule:
    """A copy of a lowered graph in the form that suits the library of `world`; starts and waits keep their places.

    The starts of one coalesced collective follow each other. Returns the graph itself where nothing changes.
    """
    if world is None or world.device.type != "cpu" or not any(map(_form, graph_module.graph.nodes)):
        return graph_module
    module = copy_module(graph_module)
    graph = module.graph
    for start in [n for n in graph.nodes if _form(n)]:
        if not opname(start.target).endswith(_ENDING):
            _replace(graph, start, start, start.args[0])
            continue
        for piece in list(start.users):
            _replace(graph, start, piece, start.args[0][piece.args[1]])
        graph.erase_node(start)
    graph.lint()
    module.recompile()
    return module


def beside_exchange(start: fx.Node, world: World | None) -> int:
    """Bytes that a collective of a lowered graph takes in that form beside what it is given and brings, until the wait
    for it: the copies of a shard that are sent to all, and what arrives of others before it is added up."""
    form = None if world is None or world.device.type != "cpu" else _form(start)
    if form is None:
        return 0
    brought = _nbytes(start.meta["val"])
    return brought if form == _FORMS[0] else _nbytes(x.meta["val"] for x in start.all_input_nodes) - brought


def _nbytes(given: torch.Tensor | Iterable[torch.Tensor]) -> int:
    tensors = [given] if isinstance(given, torch.Tensor) else given
    return sum(x.numel() * x.element_size() for x in tensors)


def _form(node: fx.Node) -> str | None:
    """The collective that a node starts, where it is made of an exchange."""
    name = opname(node.target).removesuffix(_ENDING) if is_start(node) else None
    if name == "reduce_scatter_tensor" and node.args[1] != "sum":
        return None
    return name if name in _FORMS else None


def _replace(graph: fx.Graph, start: fx.Node, piece: fx.Node, x: fx.Node) -> None:
    """One tensor's part of a start: an exchange in its place, and behind its waits the sum of what arrived.

    piece: the start itself, or the node that takes this tensor's result out of a coalesced one.
    """
    gather = _form(start) == _FORMS[0]
    n, group = int_of(start.args[-2]), start.args[-1]
    like = next(user for user in piece.users if is_wait(user))
    with graph.inserting_before(start):
        if gather:
            x = add_call(graph, torch.ops.fmegatron_step.repeated.default, (x, n), like)
        rows = x.meta["val"].shape[0] // n
        sizes = [rows] * n
        whole = add_call(
            graph, torch_private.functional_ops().all_to_all_single.default, (x, sizes, sizes, group), like
        )
        whole.meta |= {"symbolic": opname(start.target), "part_of": start.name}
    for wait in [user for user in piece.users if is_wait(user)]:
        with graph.inserting_before(wait):
            done = add_call(graph, wait.target, (whole,), wait)
            if not gather:
                done = add_call(graph, torch.ops.fmegatron_step.sum_rows.default, (done, n), wait)
        wait.replace_all_uses_with(done)
        graph.erase_node(wait)
    graph.erase_node(piece)


# ---- what is sent, and the sum ---------------------------------------------------------------------------------------
def _repeated(x: torch.Tensor, n: int) -> torch.Tensor:
    return x.repeat(n, *[1] * (x.dim() - 1))


def _sum_rows(x: torch.Tensor, n: int) -> torch.Tensor:
    first, *others = x.chunk(n)
    total = first + others[0]
    for row in others[1:]:
        total += row
    return total


def _define_ops() -> torch.library.Library:
    # Operators and no plain copies and additions. A compiler makes one kernel of the copies of a shard for the gathers
    # of forward and backward, and keeps the second until then; and it puts off what it can fuse with the stack of all
    # layers' gradients, and keeps all that arrived until then.
    library = torch.library.Library("fmegatron_step", "FRAGMENT")
    library.define("repeated(Tensor x, int n) -> Tensor")
    library.impl("repeated", _repeated, "CompositeExplicitAutograd")
    library.impl("repeated", lambda x, n: x.new_empty((x.shape[0] * n, *x.shape[1:])), "Meta")
    library.define("sum_rows(Tensor x, int n) -> Tensor")
    library.impl("sum_rows", _sum_rows, "CompositeExplicitAutograd")
    library.impl("sum_rows", lambda x, n: x.new_empty((x.shape[0] // n, *x.shape[1:])), "Meta")
    return library


_LIBRARY = _define_ops()
