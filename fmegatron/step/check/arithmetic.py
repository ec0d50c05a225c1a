"""What arithmetic makes of values: elementwise ops, contractions, reductions. The rules of ops are made of these."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch

from fmegatron.step.check.scope import Scope, op_name
from fmegatron.step.check.values import UNIFORM, Partial, Value, filled, met, over, size_of


def elementwise(scope: Scope, node: torch.fx.Node, kind: str, values: Sequence[Value | None]) -> Value:
    """kind: "sum" (all or none are pending), "beside" (as a sum, or all in one way: they are put side by side),
    "product" (one is), "quotient" (only the first is), "select" (first is the condition, the others as in a sum),
    "function" (none is). None stands for a number.
    """
    tensors = [v for v in values if v is not None]
    rank = max([len(v.dims) for v in tensors])
    dims, clash = [()] * rank, frozenset()
    for v in tensors:
        for d, dim in enumerate(v.dims, rank - len(v.dims)):
            dims[d], bad = met(dims[d], dim)
            clash |= bad
    if any([v.constant == 0 for v in tensors]) and _is_zero(node, kind, values):
        return filled([size_of(dim) for dim in dims], 0)
    clash -= frozenset().union(*[v.drawn for v in tensors])
    terms = kind in ("sum", "beside", "same", "product", "quotient") and any([v.equal_terms for v in tensors])
    if terms and kind in ("sum", "beside"):  # one of equal terms and a whole make a whole
        terms = all(v is not None and (v.equal_terms or v.partial or v.constant == 0) for v in values)
    if not clash and all([v.settled for v in tensors]):
        return Value(tuple(dims), equal_terms=terms)
    out = Value(
        tuple(dims),
        varying=frozenset().union(*(v.varying for v in tensors)),
        tainted=frozenset().union(*(v.tainted for v in tensors)),
        equal_terms=terms,
    )
    # What is sharded on an unknown dim fits what is sharded on a known one.
    vague = frozenset().union(*(v.somewhere for v in tensors)) - out.varying - out.tainted
    partial, hurt = {}, set()
    for axis in sorted(set().union(*(v.partial for v in tensors))):
        if axis in out.tainted:
            continue
        pending = [v.partial[axis] for v in tensors if axis in v.partial]
        problem = _misuse(kind, values, axis)
        if problem:
            scope.find(node, axis, *problem, pending[0].birth)
            hurt.add(axis)
        elif kind == "select" and values[0] is not None and values[0].state(axis) != "replicated":
            scope.find(node, axis, "picks from a pending sum by a condition that differs between ranks",
                       "reduce first, pick after", pending[0].birth)  # fmt: skip
            hurt.add(axis)
        else:
            partial[axis] = pending[0]
    for axis in sorted(clash - hurt - out.varying - out.tainted - set(partial) - vague):
        states = " and ".join(sorted({v.state(axis) for v in tensors if v.dims}))
        states += "" if " and " in states else ", but in another order of axes"
        scope.find(node, axis, f"combines values that are {states}", "gather the one, or shard the other")
        hurt.add(axis)
    for axis in sorted(vague - clash):
        if any(v.state(axis) == "replicated" and _as_large(v, out) for v in tensors):
            what = "combines values that are replicated and sharded"
            scope.find(node, axis, what, "gather the one, or shard the other")
            hurt.add(axis)
    somewhere = vague - {axis for axis in vague if out.shards(axis)}
    out = replace(out, partial=partial, somewhere=somewhere, drawn=_drawn(tensors, out, clash))
    out = out.without(hurt, tainted=hurt)
    # A value that varies has no dim that is known to be sharded over the same axis.
    return out.without(out.varying, varying=out.varying) if out.varying else out


def _is_zero(node: torch.fx.Node, kind: str, values: Sequence[Value | None]) -> bool:
    """Whether it is 0 whatever the other factors are: the gradient of an unused parameter, squared or scaled."""
    factors = {"product": values, "quotient": values[:1]}.get(kind, ())
    if op_name(node) == "pow" and isinstance(node.args[1], (int, float)) and node.args[1] > 0:
        factors = values[:1]
    return any(v is not None and v.constant == 0 for v in factors)


def _drawn(tensors: Sequence[Value], out: Value, clash: frozenset[str]) -> dict[str, torch.fx.Node]:
    """Where the result is still each rank's own draw: not over axes that shard what the draw is as large as."""
    left = {}
    for axis, birth in (item for v in tensors for item in v.drawn.items()):
        mine = [v for v in tensors if axis in v.drawn]
        others = [v for v in tensors if axis not in v.drawn]
        if axis in out.varying or axis in out.tainted:
            continue
        fits = all(any(size_of(v.dims[d - len(out.dims)]) == size_of(out.dims[d]) for v in mine
                       if len(v.dims) >= len(out.dims) - d) for d in out.shards(axis))  # fmt: skip
        if not (fits and any(v.state(axis).startswith("sharded") for v in others)):
            left[axis] = birth
    return left


def _as_large(value: Value, out: Value) -> bool:
    """Whether no dim of it is broadcast (where one is, the shard may lie on that dim) nor constant along itself."""
    if [size_of(d) for d in value.dims] != [size_of(d) for d in out.dims]:
        return False
    return not any(atom.axes is UNIFORM for dim in value.dims for atom in dim)


def _misuse(kind: str, values: Sequence[Value | None], axis: str) -> tuple[str, str] | None:
    """(what, fix) when operands of which some are pending over the axis are combined wrongly."""
    pending = [v for v in values if v is not None and axis in v.partial]
    others = [v for v in values if v is None or axis not in v.partial]
    if kind == "beside" and len({v.partial[axis].kind for v in pending}) == 1 and not others:
        return None
    if any(v.partial[axis].kind != "sum" for v in pending) and kind != "same":
        return f"a pending {pending[0].partial[axis].kind} is used", f"pmax over {axis!r} before it"
    if kind == "same":
        return None
    if kind in ("sum", "beside", "select"):
        terms = values[1:] if kind == "select" else values
        others = [v for v in terms if v is None or not (axis in v.partial or v.constant == 0 or v.equal_terms)]
        if kind == "select" and values[0] is not None and axis in values[0].partial:
            return "a pending sum is the condition", f"psum over {axis!r} before it"
        if others:
            return (
                "adds a pending sum and a complete value, which then counts once per rank",
                "reduce first, add after",
            )
        return None
    if kind == "product" or (kind == "quotient" and axis not in getattr(values[1], "partial", ())):
        mixed = next((v for v in others if v is not None and v.state(axis) != "replicated"), None)
        if len(pending) > 1:
            return "multiplies two pending sums", "reduce one of them first"
        if mixed is not None:
            return f"multiplies a pending sum by a value that is {mixed.state(axis)}", "reduce first"
        return None
    return "a pending sum goes into a non-linear op", f"psum or reduce_scatter over {axis!r} before it"


def contraction(scope: Scope, node: torch.fx.Node, a: Value, b: Value, batch: int) -> Value:
    """a[..batch, m, k] @ b[..batch, k, n]; a or b may lack m or n (vectors)."""
    k, clash = met(a.dims[-1], b.dims[batch])
    lead = []
    for d in range(batch):
        dim, bad = met(a.dims[d], b.dims[d])
        lead.append(dim)
        clash |= bad
    out = Value(
        (*lead, *a.dims[batch:-1], *b.dims[batch + 1 :]),
        varying=a.varying | b.varying,
        tainted=a.tainted | b.tainted,
        equal_terms=a.equal_terms or b.equal_terms,
    )
    partial, hurt = {}, set()
    summed = over(atom for dim in (k, a.dims[-1], b.dims[batch]) for atom in dim)
    drawn = {**a.drawn, **b.drawn}
    vague, lost = (a.somewhere | b.somewhere) - out.varying - out.tainted, set()
    for axis in sorted((a.axes() | b.axes()) - out.tainted - set(drawn)):
        pending = [v.partial[axis] for v in (a, b) if axis in v.partial]
        others = [v.state(axis) for v in (a, b) if axis not in v.partial]
        if axis in vague and axis not in a.partial and axis not in b.partial:
            # Known to be sharded on the dim that is summed, or (without a batch dim) both must be sharded there.
            if axis in summed or (batch == 0 and {a.state(axis), b.state(axis)} == {"sharded"}):
                partial[axis] = Partial("sum", node)
            else:
                lost.add(axis)
        elif axis in clash and axis not in out.varying:
            what = f"contracts values that are {a.state(axis)} and {b.state(axis)}"
            scope.find(node, axis, what, f"all_gather the sharded one over {axis!r}, or shard the other")
            hurt.add(axis)
        elif pending and (len(pending) > 1 or others != ["replicated"] or pending[0].kind != "sum"):
            scope.find(node, axis, f"multiplies a pending {pending[0].kind} by a value that is not replicated",
                       "reduce first", pending[0].birth)  # fmt: skip
            hurt.add(axis)
        elif pending:
            partial[axis] = pending[0]
        elif axis in summed and axis not in out.varying:
            partial[axis] = Partial("sum", node)
        elif len(out.shards(axis)) > 1:
            scope.find(node, axis, "both operands are sharded over the same axis, on dims that both stay",
                       f"all_gather one of them over {axis!r} first")  # fmt: skip
            hurt.add(axis)
    out = out.without(set(partial) if vague else ()).without(drawn)
    if not (partial or lost or drawn or hurt):
        return out
    return replace(out, partial=partial, somewhere=frozenset(lost), drawn=drawn).without(hurt, tainted=hurt)


def reduction(scope: Scope, node: torch.fx.Node, x: Value, dims: Sequence[int] | None, keep: bool, kind: str) -> Value:
    """kind: "sum", "mean", "max" (any, all, amax, ...), or the name of another reduction, which may not cross ranks."""
    gone = {d % max(1, len(x.dims)) for d in dims} if dims else set(range(len(x.dims)))
    if x.constant == 0 and kind == "sum":
        return replace(x, dims=tuple(() if d in gone else dim for d, dim in enumerate(x.dims) if keep or d not in gone))
    if x.settled and not any(x.dims[d] and over(x.dims[d]) for d in gone if d < len(x.dims)):
        left = tuple([(() if d in gone else dim) for d, dim in enumerate(x.dims) if keep or d not in gone])
        return Value(left, equal_terms=_counts(x, gone, kind))
    partial, hurt = dict(x.partial), set()
    for axis in sorted(x.axes() - x.tainted):
        crosses = any(d in gone for d in x.shards(axis)) or (axis in x.somewhere and len(gone) == len(x.dims))
        if axis in partial and (kind not in ("sum", "mean") or partial[axis].kind != "sum"):
            scope.find(node, axis, f"{kind} of a pending {partial[axis].kind}", "reduce over the ranks first",
                       partial[axis].birth)  # fmt: skip
            hurt.add(axis)
        elif crosses and kind == "mean":
            scope.find(node, axis, "mean over a sharded dim divides by the local size only",
                       "sum, psum, then divide by the global size")  # fmt: skip
            hurt.add(axis)
        elif crosses and kind not in ("sum", "max"):
            scope.find(node, axis, f"{kind} over a sharded dim", f"all_gather the dim over {axis!r} first")
            hurt.add(axis)
        elif crosses:
            partial[axis] = Partial(kind, node)
    left = [(() if d in gone else dim) for d, dim in enumerate(x.dims) if keep or d not in gone]
    out = Value(tuple(left), partial, x.varying, x.tainted, x.somewhere - set(partial), x.drawn)
    out = replace(out, equal_terms=_counts(x, gone, kind))
    return out.without(hurt, tainted=hurt)


def _counts(x: Value, gone: set[int], kind: str) -> bool:
    """Whether a sum runs along a dim on which x is constant, and which may therefore be a part of a larger one."""
    constant = any(atom.axes is UNIFORM for d in gone if d < len(x.dims) for atom in x.dims[d])
    return x.equal_terms or (kind == "sum" and constant)


def along(scope: Scope, node: torch.fx.Node, x: Value, dim: int, what: str) -> Value:
    """An op that needs the whole of a dim (softmax, sort, cumsum): a finding when it is sharded."""
    sharded = over(x.dims[dim]) if x.dims else frozenset()
    hurt = sharded - x.tainted
    for axis in sorted(hurt):
        scope.find(node, axis, f"{what} over a sharded dim", "all_gather it, or work with pmax and psum as in "
                   "vocabulary-parallel cross-entropy")  # fmt: skip
    return x.without(hurt, tainted=hurt)
