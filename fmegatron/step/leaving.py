"""Activations on their way to host memory, while the next layer is computed.

In a lowered graph `to_host` copies what a layer keeps, where it was made (`step.offload`). Here the copies of a layer
begin there, into memory of the host that is made for them, and are over before those of the next layer begin, or one
of them is read again: what is copied is an argument of that wait, so that its memory is nobody else's until then. The
copies back are `step.arriving`'s, which begins them one layer ahead.
"""

from __future__ import annotations

import hashlib
import operator
from collections.abc import Callable, Iterator

import torch
from torch import fx

from fmegatron.step import buckets
from fmegatron.step.copied import is_copied
from fmegatron.step.graph.nodes import is_light, node_of
from fmegatron.step.lower import copy_module
from fmegatron.step.operators import Begun
from fmegatron.step.torch_private import Op, opname

__all__ = ["Travel", "is_brought", "leaving"]


class Travel:
    """What begins the copies of a graph between a device and its host, and waits for them.

    names: of the operators that do. move: begins copies, pairs of memory and what is copied there. end: waits for them.
    held: whether the wait takes what is copied, too, so that its memory is nobody else's until then.
    """

    def __init__(self, device: torch.device, names: tuple[str, str], move: Callable, end: Callable, held: bool):
        self.device, self._move, self._end = device, move, end
        self._copies: buckets.Copies | None = None
        rooms, both = "(Tensor(a!)[] rooms) -> ()", "(Tensor(a!)[] rooms, Tensor[] sources) -> ()"
        self.begin = Begun(names[0], self._begin, both)
        self.wait = Begun(names[1], self._wait, both if held else rooms)

    @property
    def copies(self) -> buckets.Copies:
        """How they are made."""
        if self._copies is None:
            self._copies = buckets.copies_on(self.device, False)
        return self._copies

    def _begin(self, *tensors: torch.Tensor) -> None:
        half = len(tensors) // 2
        self._move(self.copies, list(zip(tensors[:half], tensors[half:], strict=True)))

    def _wait(self, *tensors: torch.Tensor) -> None:
        del tensors
        self._end(self.copies)


def is_brought(node: fx.Node) -> bool:
    """Whether a node copies to the device what rests in host memory: a parameter, or what a layer has sent there."""
    if is_copied(node):
        return True
    return _is(node, "from_host") and _is(_made_by(node_of(node.args[0])), "rooms_on_host")


def leaving(graph_module: fx.GraphModule) -> fx.GraphModule:
    """A copy of a lowered graph whose layers send what they keep to host memory while the next one is computed; a graph
    of which nothing goes there and back is returned as it is."""
    if not any(_groups(graph_module.graph)):
        return graph_module
    module = copy_module(graph_module)
    graph, groups = module.graph, list(_groups(module.graph))
    position = {node: i for i, node in enumerate(graph.nodes)}
    digest = hashlib.sha256(graph_module.code.encode()).hexdigest()[:16]
    device, names = node_of(groups[0][0].args[0]).meta["val"].device, (f"leave_{digest}", f"left_{digest}")
    run = Travel(device, names, lambda copies, pairs: copies.store(pairs), lambda copies: copies.left(), held=True)
    ends = [group[-1].next for group in groups]  # where they begin
    for number, (group, at) in enumerate(zip(groups, ends, strict=True)):
        sources, values = [node_of(node.args[0]) for node in group], [node.meta["val"] for node in group]
        readers = [user for node in group for user in node.users if _is(user, "from_host")]
        with graph.inserting_before(at):
            rooms = graph.call_function(torch.ops.fmegatron_step.rooms_on_host.default, (sources,))
            items = [graph.call_function(operator.getitem, (rooms, i)) for i in range(len(values))]
            begin = graph.call_function(run.begin.op, (items, sources))
        # Inserted before what begins the next ones, which stands there once its turn has come.
        until = min([*readers, *ends[number + 1 : number + 2]], key=lambda node: position[node])
        with graph.inserting_before(until):
            wait = graph.call_function(run.wait.op, (items, sources))
        for node in (rooms, begin, wait):
            node.meta |= {"val": values if node is rooms else None, "at": group[0].meta.get("at", "?"), "keeps": run}
        for node, item, value in zip(group, items, values, strict=True):
            item.meta |= {**node.meta, "val": value}
            node.replace_all_uses_with(item)
    for node in reversed([node for group in groups for node in group]):
        graph.erase_node(node)
    graph.lint()
    module.recompile()
    return module


def _groups(graph: fx.Graph) -> Iterator[list[fx.Node]]:
    """Copies to the host that come back, between which nothing is computed."""
    group: list[fx.Node] = []
    for node in graph.nodes:
        if group and not is_light(node) and not _is(node, "to_host"):
            yield group
            group = []
        if _is(node, "to_host") and _comes_back(node):
            group.append(node)
    if group:
        yield group


def _comes_back(node: fx.Node) -> bool:
    """Whether only copies to the device read what a copy on the host holds; other nodes may come after it."""
    readers = [user for user in node.users if user.args[0] is node]
    return bool(readers) and all(_is(user, "from_host") for user in readers)


def _made_by(node: fx.Node) -> fx.Node:
    return node_of(node.args[0]) if node.target is operator.getitem else node


def _is(node: fx.Node, name: str) -> bool:
    of_ours = isinstance(node.target, Op) and node.target.namespace == "fmegatron_step"
    return of_ours and opname(node.target) == name


# ---- the op ----------------------------------------------------------------------------------------------------------
def _rooms_on_host(like: list[torch.Tensor]) -> list[torch.Tensor]:
    return [torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device="cpu", pin_memory=x.is_cuda) for x in like]


def _define_ops() -> torch.library.Library:
    library = torch.library.Library("fmegatron_step", "FRAGMENT")
    library.define("rooms_on_host(Tensor[] like) -> Tensor[]")
    library.impl("rooms_on_host", _rooms_on_host, "CompositeExplicitAutograd")
    torch.library.register_fake(
        "fmegatron_step::rooms_on_host",
        lambda like: [torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device="cpu") for x in like],
        lib=library,
    )
    return library


_LIBRARY = _define_ops()
