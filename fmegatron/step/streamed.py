"""State in host memory, streamed: what updates leaves that are there goes through the device piece by piece.

In a trace a leaf in host memory is fetched whole (`from_host`) and its new value stored whole (`to_host`). What is
between the two element by element, as most optimizers' updates are, is taken out of the graph here and becomes one node
that computes it for one bucket of pieces after the other (`step.buckets`). Of a leaf whose update is not element by
element (a product of matrices, a norm of the leaf) the whole is fetched where it is read, and its new value stored by
the same node, in pieces.

Of leaves that are updated on the host (memory "host-update") the same node computes a piece there: what it is given
travels down (gradients), what is to be on the device travels up (parameters), and the leaves stay where they are.
"""

from __future__ import annotations

import dataclasses
import hashlib
import itertools
import operator
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import fx

from fmegatron.collectives import torch_private
from fmegatron.step import buckets
from fmegatron.step.compile import compile_graph
from fmegatron.step.graph.memory import memory_of
from fmegatron.step.graph.nodes import OPAQUE, RUNS, items_of, meta_of, node_of
from fmegatron.step.graph.order import ancestors
from fmegatron.step.lower import copy_module
from fmegatron.step.operators import defined, free_name
from fmegatron.step.output_buffers import with_own_outputs
from fmegatron.step.torch_private import Op, below_autograd, graph_module_of, opname, outside_of_tracing
from fmegatron.step.write_back import behind_aliases, read_before

__all__ = ["How", "Part", "Streamed", "streamed"]

_CASTS = frozenset({"_to_copy", "convert_element_type", "detach", "alias", "clone"})


@dataclass(frozen=True, eq=False)
class Part:
    """What is computed of one leaf, or of several of one shape that are updated together.

    shape: of all of them. nodes: what computes, in order; none where values are only stored. fetched: of `nodes`, the
    fetches. given: values on the device, of this shape or broadcast to it. outs: what is stored, or read by others.
    """

    shape: torch.Size
    nodes: tuple[fx.Node, ...]
    fetched: tuple[fx.Node, ...]
    given: tuple[fx.Node, ...]
    outs: tuple[fx.Node, ...]

    @property
    def on_host(self) -> bool:
        """Whether the host computes it: where all that it fetches is of leaves that are updated there."""
        return bool(self.fetched) and all(node.args[2:] == (True,) for node in self.fetched)

    @property
    def travels(self) -> tuple[fx.Node, ...]:
        """What comes to where it is computed."""
        return self.given if self.on_host else self.fetched

    @property
    def there(self) -> tuple[fx.Node, ...]:
        """What else is read."""
        return self.fetched if self.on_host else self.given

    @property
    def computed(self) -> list[fx.Node]:
        """The nodes that compute."""
        return [node for node in self.nodes if node not in self.fetched]

    def piece(self, cut: buckets.Cut, fake_mode: Any) -> tuple[fx.GraphModule, list[torch.Tensor]]:
        """(the graph of one piece, its arguments: what travels, then what is there)."""
        graph, made, fakes = fx.Graph(), {}, []
        host = torch.device("cpu")
        with outside_of_tracing(), fake_mode:
            for node in (*self.travels, *self.there):
                value = buckets.cut_of(node.meta["val"], self.shape, cut)
                device = host if self.on_host else value.device
                if node in self.travels:  # it arrives in memory of its own
                    value = torch.empty(value.shape, dtype=value.dtype, device=device)
                elif value.device != device:
                    value = torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=device)
                made[node] = graph.placeholder(f"arg{len(fakes)}_1")
                made[node].meta["val"] = value
                fakes.append(value)
            for node in self.computed:
                copy = made[node] = graph.node_copy(node, lambda n: made[n])
                if self.on_host and "device" in copy.kwargs:  # of a cast
                    copy.kwargs = {**copy.kwargs, "device": host}
                values = fx.map_arg((copy.args, dict(copy.kwargs)), lambda n: n.meta["val"])
                assert isinstance(node.target, Op), "`_is_elementwise` has looked"
                copy.meta["val"] = node.target(*values[0], **values[1])
        graph.output([made[node] for node in self.outs])
        return graph_module_of(torch.nn.Module(), graph), fakes


@dataclass
class Code:
    """The graph of one piece, its arguments, and what it is compiled to."""

    module: fx.GraphModule
    fakes: list[torch.Tensor]
    run: Callable[..., Any] | None = None

    @property
    def text(self) -> str:
        """What is compiled, as text."""
        return repr((self.module.code, [meta_of(x) for x in self.fakes]))


class Rooms:
    """Memory for arrays that are new, and the operator that makes it. new: their meta. device: on which is computed."""

    def __init__(self, name: str, new: list, device: torch.device):
        self.new, self.device = new, device
        self.op, self.library = defined("fmegatron_step", free_name(f"{name}_", "fmegatron_step"), self, new)

    def run(self, *like: torch.Tensor) -> list[torch.Tensor]:
        """The arrays, of any values; those of the host are page-locked beside a device of CUDA."""
        del like
        found = []
        for shape, stride, dtype, device in self.new:
            pinned = device.type == "cpu" and self.device.type == "cuda"
            found.append(torch.empty_strided(shape, stride, dtype=dtype, device=device, pin_memory=pinned))
        return found


class Streamed:
    """What the node runs that updates leaves in host memory, and the operator that stands for it.

    parts: what is computed. places: of each, where it finds and puts its arrays. table: their pieces, in buckets,
    `on_device`, which the device updates, then `on_host`.
    codes: (number of a part, shape of a piece) -> what computes it. counts: of arrays that are written in place, of new
    ones that are written too, and of what is read; it is given them in this order. device: on which it computes. rooms:
    of what is new. how: backend and settings.
    """

    def __init__(
        self,
        parts: Sequence[Part],
        places: Sequence[buckets.Places],
        counts: tuple[int, int, int],
        new: list,
        how: How,
        fake_mode: Any,
    ):
        self.parts, self.places, self.counts, self.how = parts, places, counts, how
        self.device = next(x.meta["val"].device for part in parts for x in (*part.nodes, *part.given))
        sizes = [(part.shape, at.bytes_per_element) for part, at in zip(parts, places, strict=True)]
        tables = [
            buckets.table({i: sizes[i] for i, part in enumerate(parts) if part.on_host is on_host}, how.host_bytes)
            for on_host in (False, True)
        ]
        self.on_device, self.on_host = tables
        self.table = (*self.on_device, *self.on_host)
        self.codes: dict[tuple[int, tuple[int, ...]], Code] = {}
        alike: dict[str, Code] = {}
        for piece in (piece for bucket in self.table for piece in bucket):
            key, part = (piece.part, piece.shape), parts[piece.part]
            if part.computed and key not in self.codes:
                module, fakes = part.piece(piece.cut, fake_mode)
                with_own_outputs(module)
                code = Code(module, fakes)
                self.codes[key] = alike.setdefault(code.text, code)
        text = repr((sizes, places, new, self.table, [(key, code.text) for key, code in self.codes.items()]))
        self.label, self.called_at = "update in host memory", ""
        self.name = f"host_update_{hashlib.sha256(text.encode()).hexdigest()[:16]}"
        self.rooms = Rooms(f"rooms_of_{self.name}", new, self.device)
        schema = "(Tensor(a!)[] wholes, Tensor(b!)[] new, Tensor[] given) -> ()"
        self.op, self.library = defined(OPAQUE[1], free_name(f"{self.name}_"), self, None, schema)

    def compile(self) -> None:
        """Compile the graphs of its pieces."""
        for code in self.codes.values():
            if code.run is None:
                code.run = compile_graph(code.module, code.fakes, self.how.backend, dict(self.how.patches))
                code.run = code.run if self.how.backend == "inductor" else below_autograd(code.run)

    def run(self, *tensors: torch.Tensor) -> None:
        """Update all leaves."""
        self.compile()
        rest = iter(tensors)
        arrays = {name: [*itertools.islice(rest, n)] for name, n in zip(buckets.ARRAYS, self.counts, strict=True)}
        shapes = [part.shape for part in self.parts]
        for table, host_computes in ((self.on_device, False), (self.on_host, True)):
            if table:
                copies = buckets.copies_on(self.device, host_computes)
                buckets.run(table, shapes, self.places, arrays, self._update, copies)

    def _update(self, piece: buckets.Piece, tensors: list[torch.Tensor]) -> list[torch.Tensor]:
        code = self.codes.get((piece.part, piece.shape))
        if code is None:  # it is only stored, perhaps as several leaves
            return tensors * len(self.places[piece.part].outs)
        assert code.run is not None, "it is compiled"
        return list(code.run(*tensors))


class How(NamedTuple):
    """How a graph is compiled: backend and Inductor's settings (`compile_graph`), and the bytes of a bucket."""

    backend: str
    patches: tuple[tuple[str, Any], ...]
    host_bytes: int


def streamed(graph_module: fx.GraphModule, donated: Mapping[int, int], how: How, fake_mode: Any) -> fx.GraphModule:
    """A copy of a lowered graph whose leaves in host memory are updated by one node, written in place where they are
    donated; a graph without such leaves is returned as it is.

    donated: output -> input.
    """
    if not _stores(items_of(graph_module.graph.output_node().args[0])):
        return graph_module
    copy = copy_module(graph_module)
    graph = copy.graph
    outs = [*items_of(graph.output_node().args[0])]
    inputs = graph.find_nodes(op="placeholder")
    own = {i: inputs[position] for i, position in donated.items()}
    _forget_unchanged(graph, outs, own)
    stores = _stores(outs)
    if stores:
        _replace(graph, outs, stores, own, how, fake_mode)
    graph.output_node().args = (outs,)
    graph.eliminate_dead_code()
    copy.recompile()
    return copy


def _is(node: fx.Node, name: str) -> bool:
    return isinstance(node.target, Op) and node.target.namespace == "fmegatron_step" and opname(node.target) == name


def _stores(outs: Sequence[fx.Node]) -> dict[int, fx.Node]:
    """Output -> the node that stores it in host memory."""
    found = {i: behind_aliases(out) for i, out in enumerate(outs)}
    return {i: node for i, node in found.items() if _is(node, "to_host")}


def _source(fetch: fx.Node) -> fx.Node:
    return behind_aliases(node_of(fetch.args[0]))


def _forget_unchanged(graph: fx.Graph, outs: list[fx.Node], own: Mapping[int, fx.Node]) -> None:
    """A leaf that is fetched and stored as it is stays where it is."""
    for i, store in _stores(outs).items():
        value = behind_aliases(node_of(store.args[0]))
        if i in own and _is(value, "from_host") and _source(value) is own[i]:
            outs[i] = own[i]


def _replace(
    graph: fx.Graph, outs: list, stores: dict[int, fx.Node], own: Mapping[int, fx.Node], how: How, mode: Any
) -> None:
    """Put the node in the place of the parts, with the outputs that it makes."""
    parts = _parts(graph, stores)
    inside = {node for part in parts for node in part.nodes} | set(stores.values())
    given = list(dict.fromkeys(x for part in parts for x in part.given))
    needed = set(given) | ancestors(given, {n: n.all_input_nodes for n in graph.nodes})
    memory = memory_of(graph.nodes)
    views = {memory[x] for x in given if memory[x] is not x}

    def writable(i: int, part: Part) -> bool:
        """Whether the leaf of output i may be written piece by piece: who else than the part that writes it reads its
        old value has done so before the node runs; another part would read what is new."""
        leaf = own.get(i)
        if leaf is None or not leaf.meta["val"].is_contiguous() or leaf in views or leaf in outs:
            return False
        return read_before(leaf, needed, set(given), set(part.nodes))

    wholes: dict[fx.Node, buckets.Place] = {}
    new: list[fx.Node] = []
    renewed: list[tuple[int, fx.Node | int]] = []  # output -> the leaf, or the number of what is new
    read: list[tuple[fx.Node, int]] = []  # a value that others read -> the same
    found, places = [], []
    for part in parts:
        fetched = tuple(_source(fetch) for fetch in part.fetched)
        ends: list[tuple[fx.Node, buckets.Place, bool]] = []
        for i, store in stores.items():
            value = node_of(store.args[0])
            if value not in part.outs:
                continue
            if writable(i, part):
                renewed.append((i, own[i]))
                ends.append((value, wholes.setdefault(own[i], ("whole", len(wholes))), True))
            else:
                renewed.append((i, len(new)))
                ends.append((value, ("new", len(new)), True))
                new.append(store)
        for value in part.nodes:
            others = [user for user in value.users if user not in inside]
            at = [i for i, out in enumerate(outs) if out is value]
            if len(at) == 1 and [user.op for user in others] == ["output"] and writable(at[0], part):
                renewed.append((at[0], own[at[0]]))
                ends.append((value, wholes.setdefault(own[at[0]], ("whole", len(wholes))), False))
            elif others:
                read.append((value, len(new)))
                ends.append((value, ("new", len(new)), False))
                new.append(value)
        found.append((dataclasses.replace(part, outs=tuple(value for value, *_ in ends)), fetched, ends))
    given = [x for x in given if x not in wholes]
    where: dict[fx.Node, buckets.Place] = {x: ("given", i) for i, x in enumerate(given)} | wholes
    for part, fetched, ends in found:
        for source in fetched:
            if source not in where:
                where[source] = ("given", len(given))
                given.append(source)
        here = [where[x] for x in part.given], [where[x] for x in fetched]
        travels, there = here if part.on_host else here[::-1]
        leaves = [stored is not part.on_host for *_, stored in ends]
        come = sum(x.meta["val"].element_size() for x in part.travels if x.meta["val"].shape == part.shape)
        go = sum(value.meta["val"].element_size() for (value, *_), leave in zip(ends, leaves, strict=True) if leave)
        at = tuple(place for _, place, _ in ends), tuple(leaves)
        places.append(buckets.Places(tuple(travels), tuple(there), *at, max(come, go, 1)))
    made = [meta_of(x.meta["val"]) for x in new]
    run = Streamed([part for part, *_ in found], places, (len(wholes), len(new), len(given)), made, how, mode)
    _insert(graph, outs, run, [*wholes], given, [x.meta["val"] for x in new], renewed, read)


def _insert(
    graph: fx.Graph,
    outs: list,
    run: Streamed,
    wholes: list[fx.Node],
    given: list[fx.Node],
    values: list[torch.Tensor],
    renewed: list[tuple[int, fx.Node | int]],
    read: list[tuple[fx.Node, int]],
) -> None:
    position = {node: i for i, node in enumerate(graph.nodes)}
    last = max([*wholes, *given], key=position.__getitem__)
    if last.op == "placeholder":
        last = graph.find_nodes(op="placeholder")[-1]
    with graph.inserting_after(last):
        node = graph.call_function(run.op, (wholes, [], given))
    node.meta |= {"val": None, "at": "host", RUNS: run}
    items: list[fx.Node] = []
    if values:
        with graph.inserting_before(node):
            rooms = graph.call_function(run.rooms.op, (given[:1] or wholes[:1],))
            items = [graph.call_function(operator.getitem, (rooms, i)) for i in range(len(values))]
        rooms.meta |= {"val": values, "at": "host"}
        for item, value in zip(items, values, strict=True):
            item.meta |= {"val": value, "at": "host"}
        node.args = (wholes, items, given)
    _move_readers(graph, [value for value, _ in read], node)
    for i, leaf in renewed:
        outs[i] = leaf if isinstance(leaf, fx.Node) else items[leaf]
    for value, i in read:
        value.replace_all_uses_with(items[i])
        outs[:] = [items[i] if out is value else out for out in outs]


def _move_readers(graph: fx.Graph, values: Iterable[fx.Node], node: fx.Node) -> None:
    """Put what is made of these values behind the node that will make them, in its order."""
    made = set(values)
    for one in graph.nodes:
        if one.op != "output" and any(x in made for x in one.all_input_nodes):
            made.add(one)
    last = node
    for one in itertools.takewhile(lambda one: one is not node, list(graph.nodes)):
        if one in made:
            last.append(one)
            last = one


# ---- parts -----------------------------------------------------------------------------------------------------------
def _parts(graph: fx.Graph, stores: Mapping[int, fx.Node]) -> list[Part]:
    """What is computed of leaves in host memory element by element; and what else is stored, as it is."""
    values = list(dict.fromkeys(node_of(store.args[0]) for store in stores.values()))
    inside = _elementwise(graph)
    groups = [group for group in _connected(graph, inside) if any(node in values for node in group)]
    groups = [group for group in groups if not any(_is_read_whole(node, group) for node in group)]
    inputs = {node: node.all_input_nodes for node in graph.nodes}
    while True:  # what is given must not depend on what comes out
        kept = {node for group in groups for node in group}
        parts = [_part(group) for group in groups]
        parts += [Part(x.meta["val"].shape, (), (), (x,), (x,)) for x in values if x not in kept]
        given = {x for part in parts for x in part.given}
        early = given | ancestors(given, inputs)
        if not early & kept:
            return parts
        groups = [group for group in groups if not early & set(group)]


def _elementwise(graph: fx.Graph) -> set[fx.Node]:
    """Fetches of leaves, what is computed of them element by element, and what is so computed for these alone."""
    found = {
        node
        for node in graph.nodes
        if _is(node, "from_host") and _source(node).op == "placeholder" and node.meta["val"].is_contiguous()
    }
    for node in graph.nodes:
        if _is_elementwise(node) and any(x in found and _alike(x, node) for x in node.all_input_nodes):
            found.add(node)
    for node in reversed(graph.nodes):
        if _is_elementwise(node) and node.users and all(user in found and _alike(user, node) for user in node.users):
            found.add(node)
    return found


def _is_elementwise(node: fx.Node) -> bool:
    value = node.meta.get("val")
    if node.op != "call_function" or not isinstance(node.target, Op) or not isinstance(value, torch.Tensor):
        return False
    if not value.dim() or torch_private.schema_of(node.target).is_mutable:
        return False
    return torch.Tag.pointwise in node.target.tags or opname(node.target) in _CASTS


def _alike(x: fx.Node, y: fx.Node) -> bool:
    return x.meta["val"].shape == y.meta["val"].shape


def _connected(graph: fx.Graph, inside: set[fx.Node]) -> list[list[fx.Node]]:
    """The groups of nodes of one shape that read each other, each in the order of the graph."""
    groups: dict[fx.Node, list[fx.Node]] = {}
    for node in graph.nodes:
        if node not in inside:
            continue
        joined = list(
            {id(g): g for x in node.all_input_nodes if x in groups and _alike(x, node) for g in [groups[x]]}.values()
        )
        group = [*(n for g in joined for n in g), node]
        groups |= dict.fromkeys(group, group)
    position = {node: i for i, node in enumerate(graph.nodes)}
    return [sorted(g, key=position.__getitem__) for g in {id(g): g for g in groups.values()}.values()]


def _is_read_whole(node: fx.Node, group: Iterable[fx.Node]) -> bool:
    """Whether a fetch is read by others too: then the whole leaf is on the device anyhow."""
    return _is(node, "from_host") and any(user not in group for user in node.users)


def _part(group: list[fx.Node]) -> Part:
    fetched = tuple(node for node in group if _is(node, "from_host"))
    mine = set(group)
    given = dict.fromkeys(x for node in group if node not in fetched for x in node.all_input_nodes if x not in mine)
    ends = tuple(node for node in group if any(user not in mine for user in node.users))
    return Part(group[0].meta["val"].shape, tuple(group), fetched, tuple(given), ends)
