"""Interpretation of a graph by the rule of each op; an op without one is decomposed, and what remains is unproven.

Nothing here may hang or guess: what a rule states is compared with the shapes of the graph, and where they disagree
nothing is claimed. An op that writes gives all arrays that share the written memory their new value.
"""

from __future__ import annotations

import functools
import itertools
import operator
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import replace
from types import MappingProxyType
from typing import Any

import torch

from fmegatron.collectives import kinds, torch_private
from fmegatron.step.checker import (
    attention,
    chunks,
    collectives,
    kernels,
    lookups,
    movement,
    padding,
    pointwise,
    positions,
    ranges,
    reductions,
    sizes,
    turns,
)
from fmegatron.step.checker.arithmetic import elementwise
from fmegatron.step.checker.context import GO_ON, Rule, Rules, Scope, Signature, line_of, op_name
from fmegatron.step.checker.dims import UNIFORM, Misfit, plain, size_of
from fmegatron.step.checker.marks import strongest
from fmegatron.step.checker.values import OWED, Suspect, Value, of_constant
from fmegatron.step.graph.nodes import entry_of, int_of, items_of, node_of, storage_of, written_by
from fmegatron.step.torch_private import (
    FakeTensorMode,
    Op,
    decomposition_of,
    make_fx,
    outside_of_tracing,
    overload_name,
)

RULES: Rules = MappingProxyType(
    {**pointwise.RULES, **movement.RULES, **reductions.RULES, **lookups.RULES, **kernels.RULES, **attention.RULES}
)
# How ops on lists name what the ops on single tensors call otherwise.
_ALIKE = MappingProxyType({"scalar": "other", "scalars": "other", "tensor": "other"})
# What a rule that meets something it was not made for may raise: the op is unproven then, and the report states so.
_FAULTS = (Misfit, LookupError, TypeError, ValueError, AttributeError, ArithmeticError, AssertionError)
_DEEPEST = 6  # so often an op of a decomposition is taken apart again
# What a decomposition raises for arguments that it does not take: then the op stays one.
_REFUSALS = (RuntimeError, TypeError, ValueError, AttributeError, AssertionError, LookupError)
# Ops whose result is no gradient where an operand is one, or (barrier) their first operand as it is.
_SCALE_FREE = frozenset("sign sgn isnan isinf isfinite eq ne ones_like zeros_like empty_like full_like barrier".split())
Node = torch.fx.Node


def interpreted(scope: Scope, graph: torch.fx.Graph, arguments: Iterable[Value]) -> list[Any]:
    """The Values that a graph returns. A value is dropped after its last use: many live objects would make Python's
    garbage collector go through all memory of the process."""
    kinds.require_mesh_of_graph(graph, scope.mesh, "check", "the layouts")
    values, arguments = scope.values, iter(arguments)
    read = sizes.read(graph)
    inputs = {node: node.all_input_nodes for node in graph.nodes}
    scope.positions = positions.begin(scope.mesh, inputs)
    _mark_live(scope, inputs, read)
    uses = Counter(itertools.chain.from_iterable(inputs.values()))
    for node, sources in inputs.items():
        if node.op == "output":
            if scope.chunks and not scope.depth:
                chunks.at_outputs(scope, sources)
            # An op of several results, taken apart, may have none somewhere: the gradient of an absent weight.
            return [None if source is None else values[source] for source in items_of(node.args[0])]
        if node.op == "placeholder":
            values[node] = next(arguments)
        elif node not in scope.live:  # no output depends on it
            continue
        elif node.op == "get_attr":
            constant = functools.reduce(getattr, node.target.split("."), graph.owning_module)
            assert isinstance(constant, torch.Tensor), f"{node.target} is a tensor"
            values[node] = of_constant(constant)
        elif hasattr(node.target, "entry"):  # a compiled layer
            values[node] = _layer(scope, entry_of(node).graph_module.graph, [values[n] for n in node.args[0]])
        else:
            scope.order[node] = len(scope.order)
            values[node] = _after(scope, node, sources)
            if "sums" in node.meta:
                values[node] = sizes.by_own_size(scope, node, values[node])
            if "made" in node.meta:
                values[node] = sizes.of_places(scope, node, values[node])
            if scope.asked:
                values[node] = sizes.of_asked(scope, node, values[node])
            known = scope.positions is not None and positions.after(scope, node)
            if scope.chunks and not known:
                chunks.after(scope, node)
            _write(scope, node)
        if node.name in read and node in values:
            sizes.note(scope, node, values[node])
        for source in sources:
            uses[source] -= 1
            if not uses[source] and scope.positions is None:
                del values[source]
    raise AssertionError("graph: no output node")


def _mark_live(scope: Scope, inputs: dict[Node, list[Node]], read: frozenset[str]) -> None:
    """The nodes on which outputs depend, or whose sizes are numbers: all else may be as wrong as it likes."""
    live = scope.live
    for node, sources in reversed(inputs.items()):
        if node.op == "output" or node in live or node.name in read or written_by(node):
            live.update((node, *sources))


def _after(scope: Scope, node: Node, sources: list[Node]) -> Any:
    """The Value of a node by its rule; without one, by those of the ops that it is made of. sources: its inputs."""
    found = _value_after(scope, node, sources)
    if found is not None or node.meta.get("val") is None:
        return _still_owed(scope, node, sources, found)
    graph = _decomposed(scope, node)
    if graph is None:
        return unproven(scope, node, f"no rule for {node.target}", GO_ON)
    inner = replace(scope, values={}, sizes={}, asked={}, depth=scope.depth + 1)
    result = _result_of(node, interpreted(inner, graph, [scope.values[n] for n in sources]))
    return _still_owed(scope, node, sources, result)


def _still_owed(scope: Scope, node: Node, sources: list[Node], found: Any) -> Any:
    """What is made of a gradient of which a sum is still to be made, where the rule of an op does not say so itself; a
    backward is linear in the one that it is given."""
    owed: dict[str, str] = {}
    for source in sources:
        value = scope.values.get(source)
        for axis, one in value.portion.items() if isinstance(value, Value) and value.portion else ():
            if one in ("mixed", *OWED):
                owed[axis] = "mixed" if axis in owed else one
    if not owed or kinds.collective_of(node.target) or op_name(node).rstrip("_") in _SCALE_FREE:
        return found
    first = scope.values.get(sources[0])
    linear = op_name(node).endswith("_backward") and isinstance(first, Value) and owed.keys() <= first.portion.keys()
    return [_owing(v, owed, linear) for v in found] if isinstance(found, list) else _owing(found, owed, linear)


def _owing(value: Any, owed: dict[str, str], linear: bool) -> Any:
    if not isinstance(value, Value) or value.constant == 0:
        return value
    kept = value.portion
    lost = {axis: one if linear else "mixed" for axis, one in owed.items() if axis not in kept or linear}
    return replace(value, portion={**value.portion, **lost}) if lost else value


def _layer(scope: Scope, graph: torch.fx.Graph, arguments: list[Value]) -> list[Value]:
    """What a compiled layer returns; for arguments as before what it did before, so that depth costs nothing."""
    calls = scope.layers.setdefault(graph, [])
    for given, found in calls:
        if given == arguments:
            return found
    calls.append((arguments, interpreted(replace(scope, values={}, sizes={}, asked={}), graph, arguments)))
    return calls[-1][1]


def _value_after(scope: Scope, node: Node, sources: list[Node]) -> Any:
    """The Value (or list of them) of a call_function node, None where no rule covers it."""
    if node.target is operator.getitem:
        source = scope.values[node_of(node.args[0])]
        found = source[int_of(node.args[1])] if isinstance(source, list) else source
        if isinstance(found, Value) and found.index_of:
            ranges.noted(scope, node, ranges.Range("index", found.index_of, 1))
        return found
    if node in scope.ahead:
        return scope.ahead.pop(node)
    signature = scope.signatures.get(node.target)
    if signature is None:
        assert isinstance(node.target, Op), "a graph of tensors calls operators"
        signature = scope.signatures[node.target] = _signature(node.target)
    if signature.rule is None:
        return None
    given, values = dict(signature.defaults), scope.values
    for name, argument in itertools.chain(zip(signature.names, node.args, strict=False), node.kwargs.items()):
        given[name] = values[argument] if isinstance(argument, Node) else _with_values(scope, argument)
    try:
        found = _beside(scope, node, given, signature.rule) if node in scope.beside else None
        found = signature.rule(scope, node, given) if found is None else found
    except _FAULTS as fault:
        return unproven(scope, node, f"internal: its rule fails ({type(fault).__name__}: {fault}); please report it")
    if found is None or _fits(found, node.meta.get("val")):
        return padding.after(scope, node, sources, found)
    return unproven(scope, node, f"internal: its rule gives {_sizes(found)}, not the shape it has; please report it")


def _beside(scope: Scope, node: Node, given: dict, rule: Rule) -> Any:
    """What is known of a node because of what its operands are besides their values."""
    found = turns.added(scope, node, lambda x, axis: collectives.summed(scope, node, x, axis))
    return ranges.found(scope, node, given, rule) if found is None else found


def unproven(scope: Scope, node: Node, why: str, fix: str = GO_ON) -> Any:
    """Nothing is claimed about the result over the axes that come in, and those of a collective: what is equal on all
    ranks stays so."""
    sources = [scope.values.get(n) for n in node.all_input_nodes]
    flat = [v for s in sources for v in (s if isinstance(s, Sequence) else [s]) if v is not None]
    made = items_of(node.args[1]) if kinds.collective_of(node.target) else ()  # over these its result may be anything
    axes = sorted(frozenset(axis for axis in made if scope.mesh[axis] > 1).union(*(v.axes() for v in flat)))
    if not axes and any(v.constant != 0 and atom.axes is UNIFORM for v in flat for dim in v.dims for atom in dim):
        # Ones in the shape of a shard are a part of larger ones as well, and so may be what is made of them.
        axes = sorted(name for name in scope.mesh.names if scope.mesh[name] > 1)
    marks = {axis: strongest(scope, node, flat, axis) or scope.unknown(node, why, fix) for axis in axes}
    marks |= {axis: scope.unknown(node, why, fix) for axis, mark in marks.items() if isinstance(mark, Suspect)}

    def blank(meta: Any) -> Value | None:
        return Value(tuple(plain(n) for n in meta.shape)).marked(marks) if isinstance(meta, torch.Tensor) else None

    found = node.meta.get("val")  # an op that only writes returns nothing
    return [blank(m) for m in found] if isinstance(found, (list, tuple)) else blank(found)


def _fits(found: Any, meta: Any) -> bool:
    if isinstance(found, Value):
        if not isinstance(meta, torch.Tensor):
            return False
        dims, shape = found.dims, meta.shape
        if len(dims) != len(shape):
            return False
        for dim, n in zip(dims, shape, strict=True):
            size = 1
            for atom in dim:  # as `size_of`: asked of all nodes
                size *= atom.size
            if size != n:
                return False
        return True
    if isinstance(found, list) and isinstance(meta, (list, tuple)):
        return len(found) >= len(meta) and all(v is None or _fits(v, m) for v, m in zip(found, meta, strict=False))
    return found is None or isinstance(found, list)  # of an op that only writes: what it writes


def _sizes(found: Any) -> str:
    values = found if isinstance(found, list) else [found]
    return ", ".join(str(tuple(map(size_of, v.dims))) for v in values if v is not None)


def _with_values(scope: Scope, argument: Any) -> Any:
    if isinstance(argument, Node):
        return scope.values[argument]
    return [_with_values(scope, a) for a in argument] if isinstance(argument, (list, tuple)) else argument


def _signature(target: Op) -> Signature:
    schema = torch_private.schema_of(target)
    defaults = {a.name: a.default_value for a in schema.arguments if a.has_default_value()}
    return Signature(schema.name, tuple(a.name for a in schema.arguments), defaults, _rule_of(target))


def _rule_of(target: Op) -> Rule | None:
    if kinds.collective_of(target):
        return collectives.rule
    name = torch_private.schema_of(target).name.partition("::")[2]
    name = name.rstrip("_") if torch_private.schema_of(target).is_mutable else name
    overload = f"{name}.{overload_name(target)}"
    if name.startswith("_foreach_"):
        rule = _of_elements(name.removeprefix("_foreach_"), True)
        return rule and _each(rule)
    elements = torch.Tag.pointwise in target.tags
    rule = RULES.get(overload) or RULES.get(name) or _of_elements(name, elements)
    return (
        _of_numbers(rule) if elements and rule is not None and not torch_private.schema_of(target).is_mutable else rule
    )


def _of_elements(name: str, pointwise_op: bool) -> Rule | None:
    if name in RULES or not pointwise_op:
        return RULES.get(name)
    return pointwise.gradient if name.endswith("_backward") else pointwise.function


def _of_numbers(rule: Rule) -> Rule:
    """The rule of a pointwise op; of numbers that are known, the number that it makes is known."""

    def known(scope: Scope, node: Node, given: dict) -> Any:
        out = rule(scope, node, given)
        operands = [v for v in given.values() if isinstance(v, Value)]
        if out is None or not operands or operands[0].constant is None:
            return out
        return pointwise.with_number(scope, node, operands, out)

    return known


def _each(rule: Rule) -> Rule:
    """The rule of an op on lists of tensors, from that on single ones."""

    def each(scope: Scope, node: Node, given: dict) -> list[Value]:
        given = {_ALIKE.get(k, k): v for k, v in given.items()}
        count = max(len(v) for v in given.values() if _is_tensors(v))
        listed = {k for k, v in given.items() if isinstance(v, list) and len(v) == count}
        return [rule(scope, node, {k: (v[i] if k in listed else v) for k, v in given.items()}) for i in range(count)]

    return each


def _is_tensors(argument: Any) -> bool:
    return isinstance(argument, list) and any(isinstance(a, Value) for a in argument)


def _decomposed(scope: Scope, node: Node) -> torch.fx.Graph | None:
    """The graph of a node's op, one step of torch's decompositions, each of its nodes at the line of the node.

    Its placeholders are `node.all_input_nodes`. None where torch has no decomposition, or for an op that writes.
    """
    schema = torch_private.schema_of(node.target)
    if schema is None or schema.is_mutable or scope.depth >= _DEEPEST:
        return None
    key = (node.target, line_of(node), repr((node.args, node.kwargs)), _metas(node))
    if key not in scope.pieces:
        scope.pieces[key] = _traced(node)
    return scope.pieces[key]


def _metas(node: Node) -> str:
    return repr([(tuple(n.meta["val"].shape), n.meta["val"].dtype) for n in node.all_input_nodes if _tensor(n)])


def _tensor(node: Node) -> bool:
    return isinstance(node.meta.get("val"), torch.Tensor)


def _traced(node: Node) -> torch.fx.Graph | None:
    sources = node.all_input_nodes
    apart = decomposition_of(node.target)
    if apart is None or not all(map(_tensor, sources)):
        return None

    def run(*tensors: torch.Tensor) -> list[torch.Tensor]:
        at = dict(zip(sources, tensors, strict=True))
        args, kwargs = _mutable(torch.fx.map_arg((node.args, node.kwargs), lambda n: at[n]))
        out = apart(*args, **kwargs)
        return list(out) if isinstance(out, (list, tuple)) else [out]

    try:
        with outside_of_tracing(), torch.no_grad(), FakeTensorMode() as mode, mode:
            metas = [n.meta["val"] for n in sources]
            fakes = [torch.empty_strided(m.shape, m.stride(), dtype=m.dtype, device=m.device) for m in metas]
            graph = make_fx(run)(*fakes).graph
    except _REFUSALS:
        return None
    if any(n.op == "get_attr" for n in graph.nodes) or any(n.target is node.target for n in graph.nodes):
        return None
    for inner in graph.nodes:
        inner.meta["at"] = line_of(node)
    return graph


def _mutable(args: Any) -> Any:
    """Arguments of a node with plain lists and dicts: some decompositions write into the lists that they are given."""
    if isinstance(args, dict):
        return {key: _mutable(arg) for key, arg in args.items()}
    if isinstance(args, (list, tuple)):
        return (tuple if isinstance(args, tuple) else list)(map(_mutable, args))
    return args


def _result_of(node: Node, values: list[Any]) -> Any:
    """What the interpretation of such a graph returned, in the form that the op has."""
    return values if isinstance(node.meta["val"], (list, tuple)) else values[0]


def _write(scope: Scope, node: Node) -> None:
    """An op that writes into an argument, or a list of them, gives each the new value.

    What shares its memory, with equal geometry, has the new value; an array of which a slice is written is the old
    one beside the new; of other views nothing is known any more.
    """
    targets = written_by(node)
    if not targets:
        return
    new = scope.values[node]
    if isinstance(node.target, Op) and torch.Tag.inplace_view in node.target.tags:  # only the shape is another
        scope.values[targets[0]] = new
        return
    values = new if isinstance(new, list) else [new]
    if len(values) != len(targets):  # not what it returns is what it writes
        values = [None] * len(targets)
    for target, value in zip(targets, values, strict=True):
        _overwrite(scope, node, target, value)


def _overwrite(scope: Scope, node: Node, target: Node, new: Value | None) -> None:
    memory = target.meta["val"]
    storage = storage_of(memory)
    for other, value in list(scope.values.items()):
        meta = other.meta.get("val")
        if not isinstance(value, Value) or not isinstance(meta, torch.Tensor) or other is node:
            continue
        if storage_of(meta) != storage:
            continue
        if scope.positions is not None:
            positions.written(scope, other)
        if scope.beside:
            ranges.written(scope, other)
            turns.written(scope, other)
        if new is not None and _geometry(meta) == _geometry(memory):
            scope.values[other] = new
            continue
        beside = _with_slice(scope, node, target, other, value, new)
        if beside is not None:
            scope.values[other] = padding.overwritten(beside, value, new)
            continue
        axes = value.axes() | (frozenset(scope.mesh.names) if new is None else new.axes())
        why = f"{node.target} writes into memory that other values share"
        blank = Value(tuple(plain(n) for n in meta.shape))
        both = [value] if new is None else [value, new]
        marks = {axis: strongest(scope, node, both, axis) or scope.unknown(node, why) for axis in axes}
        scope.values[other] = blank.marked({axis: mark for axis, mark in marks.items() if scope.mesh[axis] > 1})


def _with_slice(scope: Scope, node: Node, target: Node, other: Node, value: Value, new: Value | None) -> Value | None:
    """An array after a slice of it, an index or a diagonal was written; None where that is not what the target is, or
    where the dim is sharded."""
    if new is None or target.op != "call_function" or op_name(target) not in ("slice", "select", "diagonal"):
        return None
    source = node_of(target.args[0])
    if _geometry(source.meta["val"]) != _geometry(other.meta["val"]):
        if not isinstance(scope.values.get(source), Value):
            return None
        inner = _with_slice(scope, node, target, source, scope.values[source], new)
        return None if inner is None else _with_slice(scope, node, source, other, value, inner)
    written = [new.dims[-1]] if op_name(target) == "diagonal" else []
    within = sorted([d % len(value.dims) for d in _written_dims(target)])
    old = value.with_dims(() if d in within else atoms for d, atoms in enumerate(value.dims))
    if op_name(target) != "slice":
        new = new.with_dims(new.dims[: len(new.dims) - len(written)])
        for dim in within:
            new = new.with_dims((*new.dims[:dim], (), *new.dims[dim:]))
    part = new.with_dims(() if d in within else atoms for d, atoms in enumerate(new.dims))
    written += [of.dims[dim] for of in (value, new) for dim in within]
    if any(atom.sharded or atom.fold for dim in written for atom in dim):
        return None
    made = old.settled and not old.sharded and (old.constant is not None or _is_empty(source))
    if made and not (old.constant or 0):
        out = part
    elif old.marks == part.marks and not old.excess and not part.excess:
        out = elementwise(scope, node, "beside", [old, part])
    else:  # one part is pending and the other is not
        return None
    dims = [plain(size_of(value.dims[d])) if d in within else atoms for d, atoms in enumerate(out.dims)]
    constant = 0 if (value.constant, new.constant) == (0, 0) else None
    return replace(out.with_dims(dims), constant=constant)


def _written_dims(target: Node) -> list[int]:
    """The dims along which a view is a part of an array."""
    given = target.args[2:4] if op_name(target) == "diagonal" else target.args[1:2]
    dims = [int_of(dim) for dim in given]
    return [*dims, *(0, 1)[len(dims) :]] if op_name(target) == "diagonal" else dims or [0]


def _is_empty(node: Node) -> bool:
    """Whether it is memory that holds nothing yet."""
    return node.op == "call_function" and op_name(node) in ("empty", "empty_like", "new_empty", "empty_strided")


def _geometry(x: torch.Tensor) -> tuple:
    """Where the elements of a tensor are in its storage."""
    return x.shape, x.stride(), x.storage_offset()
