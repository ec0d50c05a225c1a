"""Stacked leaves taken apart: of ops that treat each layer by itself, one for each layer, so that a stage has its own.

A leaf [L, ...] of which blocks read one layer each (`unbind`, or `w[i]` for each i) may be read in other ways too: cast
or scaled as a whole, or squared and summed as a penalty. Where each of these ops treats every layer by itself, or sums
over layers, it is replaced by one op a layer; the gradient of the leaf is then one of each layer. A leaf that is read
in another way stays whole.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import torch
from torch import fx
from torch.fx.node import map_arg

from fmegatron.step.torch_private import opname

__all__ = ["layers_apart"]

_aten, _CAST = torch.ops.aten, torch.ops.prims.convert_element_type.default
_SAME = frozenset({"detach", "alias", "_to_copy", "convert_element_type", "clone"})  # or in another dtype
_VIEWS = frozenset({"view", "_unsafe_view", "reshape", "expand"})  # by the shape of what they give
_REDUCED = frozenset({"sum", "mean", "amax", "amin"})  # over dims, or all of them


def layers_apart(
    graph: fx.Graph, takes: Sequence[str], gives: Sequence[str], grads: str
) -> tuple[dict[fx.Node, str], dict[str, fx.Node]]:
    """({placeholder: path}, {path of an output: node}), with a placeholder "layer i of path" for each layer of a leaf
    that the graph takes apart (`_apart`), and an output of this name for the gradient of each. Changes the graph.

    grads: how paths of gradients begin. The graph has no outputs of its own any more.
    """
    given = list(zip(graph.find_nodes(op="placeholder"), takes, strict=True))
    output: Any = graph.output_node()
    outs: dict[str, Any] = dict(zip(gives, output.args[0], strict=True))
    gradients = {path.removeprefix(grads): node for path, node in outs.items() if path.startswith(grads)}
    layers, inputs = _Layers(graph), dict[fx.Node, str]()
    stacked: list[str] = []
    for node, path in given:
        own = path.removeprefix("0/") if path.startswith("0/") else None
        if own is not None and _apart(node, gradients.get(own)):
            stacked.append(own)
            for i, layer in enumerate(layers.of_leaf(node)):
                inputs[layer] = f"layer {i} of {path}"
        else:
            inputs[node] = path
    for n in graph.find_nodes(op="call_function", target=_aten.stack.default):
        if (*n.args, 0)[1] == 0 and _apart(n, None):
            layers.known[n] = list(n.args[0])
    layers.follow()
    found: dict[str, fx.Node] = {}
    for path, node in outs.items():
        if path.startswith(grads) and path.removeprefix(grads) in stacked:
            for i, layer in enumerate(layers.of(node)):
                found[f"layer {i} of {path}"] = layer
        else:
            found[path] = node
    output.args = ([*dict.fromkeys(found.values())],)
    graph.eliminate_dead_code()
    for node, path in given:
        if path.removeprefix("0/") in stacked and node not in inputs:
            graph.erase_node(node)
    alive = set(graph.nodes)
    return {n: path for n, path in inputs.items() if n in alive}, found


def _apart(leaf: fx.Node, gradient: fx.Node | None) -> bool:
    """Whether all that is made of a leaf treats each layer by itself, up to sums over layers and to blocks that read
    one layer each; of these there is one for every layer. gradient: of the leaf, if there is one."""
    shape = leaf.meta["val"].shape
    if not shape:
        return False
    todo: list[Any] = [leaf]
    seen, read = {leaf}, set[int]()
    while todo:
        n = todo.pop()
        for user in n.users:
            if user.op == "output":
                if n is not gradient:
                    return False
            elif (kind := _kind(user, n, shape[0])) is None:
                return False
            elif kind == "layers":
                if user not in seen:
                    todo.append(user)
            elif kind == "apart":
                read |= {item.args[1] for item in user.users}
            elif kind == "one":
                read.add(user.args[2] % shape[0])
            seen.add(user)
    return len(read) == shape[0]


def _kind(node: Any, of: Any, count: int) -> str | None:
    """How a node reads a value [L, ...] of so many layers: "layers" (what it gives is one, too, of the same layers),
    "apart" (`unbind`), "one" (`select`), "sum" over the layers; None: in another way."""
    name, v = opname(node.target), node.meta.get("val")
    if node.op != "call_function" or node.kwargs.get("out") is not None or node.args[:1] == ():
        return None
    if name == "unbind":
        return "apart" if (*node.args, 0)[1] == 0 else None
    if name == "select":
        return "one" if node.args[1] == 0 else "layers"
    if not isinstance(v, torch.Tensor):
        return None
    if name in _REDUCED:
        dims = _dims(node)
        if 0 in dims:
            return "sum" if name in ("sum", "mean") else None
        return "layers"
    same = v.dim() > 0 and v.shape[0] == count
    if name in _VIEWS:
        return "layers" if same and (name != "expand" or v.dim() == of.meta["val"].dim()) else None
    if name in ("transpose", "permute", "unsqueeze", "squeeze"):
        return "layers" if same and 0 not in _turned(node) else None
    pointwise = torch.Tag.pointwise in getattr(node.target, "tags", ())
    if (pointwise or name in _SAME) and same and v.dim() == of.meta["val"].dim():
        return "layers"
    return None


def _dims(node: Any) -> list[int]:
    """The dims over which a reduction goes."""
    rank = node.args[0].meta["val"].dim()
    given = node.args[1] if len(node.args) > 1 else None
    if given is None or given == []:
        return list(range(rank))
    return [d % rank for d in ([given] if isinstance(given, int) else given)]


def _turned(node: Any) -> set[int]:
    """The dims that a view turns, inserts or takes out; of a permutation those that are elsewhere now."""
    name, rank = opname(node.target), node.args[0].meta["val"].dim()
    if name == "permute":
        return {i for i, d in enumerate(node.args[1]) if i != d % rank}
    given = node.args[1:] or [[d for d in range(rank) if node.args[0].meta["val"].shape[d] == 1]]
    rank += name == "unsqueeze"
    return {d % rank for x in given for d in (x if isinstance(x, list | tuple) else [x])}


class _Layers:
    """Values [L, ...] of a graph as one node for each layer; None: a layer of zeros."""

    def __init__(self, graph: fx.Graph):
        self.graph = graph
        self.known: dict[fx.Node, list[fx.Node | None]] = {}

    def of_leaf(self, leaf: fx.Node) -> list[fx.Node]:
        """Placeholders for the layers of a leaf."""
        v, last, found = leaf.meta["val"], leaf, []
        for i in range(v.shape[0]):
            with self.graph.inserting_after(last):
                last = self.graph.placeholder(f"{leaf.name}_l{i}")
            last.meta = {**leaf.meta, "val": v.new_empty(v.shape[1:])}
            found.append(last)
        self.known[leaf] = list(found)
        return found

    def follow(self) -> None:
        """Put layers in the place of what reads values whose layers are known, in the order of the graph."""
        for n in list(self.graph.nodes):
            if n in self.known or n.op != "call_function" or not any(m in self.known for m in n.all_input_nodes):
                continue
            name = opname(n.target)
            of = next(m for m in n.all_input_nodes if m in self.known)
            kind = _kind(n, of, len(self.known[of]))
            if kind == "layers":
                self.known[n] = self._each(n)
            elif kind == "apart":
                for item in list(n.users):
                    item.replace_all_uses_with(self._whole(of, item.args[1]))
            elif kind == "one":
                n.replace_all_uses_with(self._whole(of, n.args[2] % len(self.known[of])))
            elif kind == "sum":
                n.replace_all_uses_with(self._summed(n, name))

    def of(self, node: Any) -> list[fx.Node]:
        """The layers of any value [L, ...]."""
        return [self._whole(node, i) for i in range(node.meta["val"].shape[0])]

    def _layers(self, node: Any) -> list[fx.Node | None]:
        if node not in self.known:
            name, v = opname(node.target), node.meta["val"]
            if name == "stack" and (*node.args, 0)[1] == 0:
                self.known[node] = list(node.args[0])
            elif name == "select_backward" and node.args[2] == 0:
                at, zero = node.args[3] % v.shape[0], v.shape[0]
                self.known[node] = [node.args[0] if i == at else None for i in range(zero)]
            elif name in _SAME or node.target is _aten.add.Tensor and not node.kwargs and self._alike(node):
                self.known[node] = self._each(node)
            else:
                found = [self.graph.call_function(_aten.select.int, (node, 0, i)) for i in range(v.shape[0])]
                for i, new in enumerate(found):
                    new.meta = {**node.meta, "val": v[i]}
                    node.append(new)
                self.known[node] = list(found)
        return self.known[node]

    def _alike(self, node: Any) -> bool:
        return all(isinstance(x, fx.Node) and x.meta["val"].shape == node.meta["val"].shape for x in node.args)

    def _whole(self, node: Any, i: int) -> fx.Node:
        """Layer i of a value, zeros where it has none."""
        found = self._layers(node)[i]
        if found is None:
            v = node.meta["val"]
            how = {"dtype": v.dtype, "device": v.device}
            found = self._made(node, _aten.full.default, (list(v.shape[1:]), 0), v[i], how)
            self.known[node][i] = found
        return found

    def _each(self, node: Any) -> list[fx.Node | None]:
        """The layers of what an op gives that treats each layer by itself."""
        v, name = node.meta["val"], opname(node.target)
        count, found, one = v.shape[0], [], v[0]
        of = {m: self._layers(m) for m in node.all_input_nodes if self._has_layers(m, v)}
        for i in range(count):
            own = {m: layers[i if len(layers) == count else 0] for m, layers in of.items()}
            if node.target is _aten.add.Tensor and not node.kwargs and None in own.values():
                found.append(next((x for x in own.values() if x is not None), None))
                continue
            if name in _SAME and None in own.values():
                found.append(None)
                continue
            layer = {m: self._whole(m, i if len(layers) == count else 0) for m, layers in of.items()}
            args, kwargs = _of_one(node, name)
            args = map_arg(args, lambda m, of=layer: of.get(m, m))
            kwargs = map_arg(kwargs, lambda m, of=layer: of.get(m, m))
            found.append(self._made(node, node.target, args, one, kwargs))
        return found

    def _has_layers(self, m: Any, v: torch.Tensor) -> bool:
        """Whether an argument has the dim of layers of what is made of it (else it is the same for all layers)."""
        return m in self.known or (m.meta["val"].dim() == v.dim() and v.dim() > 0)

    def _summed(self, node: Any, name: str) -> fx.Node:
        """The sum, or mean, of a value over all its layers and perhaps other dims, added layer by layer."""
        x, v, dims = node.args[0], node.meta["val"], _dims(node)
        keep = len(node.args) > 2 and bool(node.args[2])
        inside = [d - 1 for d in dims if d]
        terms = []
        for layer in self.of(x):
            if inside:
                target, val = (
                    (_aten.sum.dim_IntList, _aten.mean.dim)[name == "mean"],
                    layer.meta["val"].sum(inside, keep),
                )
                layer = self._made(node, target, (layer, inside, keep), val.to(v.dtype), dict(node.kwargs))
            elif layer.meta["val"].dtype != v.dtype:
                layer = self._made(node, _CAST, (layer, v.dtype), layer.meta["val"].to(v.dtype))
            terms.append(layer)
        total = functools.reduce(lambda a, b: self._made(node, _aten.add.Tensor, (a, b), a.meta["val"]), terms)
        if name == "mean":
            total = self._made(node, _aten.div.Tensor, (total, len(terms)), total.meta["val"])
        if keep:
            total = self._made(node, _aten.unsqueeze.default, (total, 0), v)
        return total

    def _made(self, before: Any, target: Any, args: tuple, val: torch.Tensor, kwargs: dict | None = None) -> fx.Node:
        with self.graph.inserting_before(before):
            new = self.graph.call_function(target, args, kwargs or {})
        new.meta = {**before.meta, "val": val}
        return new


def _of_one(node: Any, name: str) -> tuple[tuple, dict]:
    """The arguments of an op on one layer, whose dims are one less."""
    args, rank = list(node.args), node.args[0].meta["val"].dim() if isinstance(node.args[0], fx.Node) else 0
    if name in _REDUCED:
        args[1:2] = [[d - 1 for d in _dims(node)]]
    elif name in _VIEWS:
        args[1] = list(node.args[1])[1:]
    elif name == "permute":
        args[1] = [d % rank - 1 for d in node.args[1][1:]]
    elif name in ("transpose", "unsqueeze", "squeeze"):
        rank += name == "unsqueeze"
        args[1:] = [[d % rank - 1 for d in x] if isinstance(x, list | tuple) else x % rank - 1 for x in node.args[1:]]
    elif name == "select":
        args[1] = node.args[1] % rank - 1
    return tuple(args), dict(node.kwargs)
