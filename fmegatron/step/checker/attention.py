"""Rules for fused attention: torch's kernels, and `nn.tiled_attention`."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace
from types import MappingProxyType

import torch

from fmegatron.step.checker.arithmetic import elementwise, not_on, settled
from fmegatron.step.checker.completion import comes_from_another
from fmegatron.step.checker.context import Rules, Scope, op_name
from fmegatron.step.checker.dims import UNIFORM, Atom, Dim, over, plain, size_of, viewed
from fmegatron.step.checker.reductions import along
from fmegatron.step.checker.values import Mark, Pending, Somewhere, Suspect, Value, Wrong, counted
from fmegatron.step.graph.nodes import node_of

Node = torch.fx.Node
_ATTENTION = tuple(
    f"_scaled_dot_product_{kernel}"
    for kernel in ("flash_attention_for_cpu", "flash_attention", "efficient_attention", "cudnn_attention")
) + ("tiled_attention",)


def attention(scope: Scope, node: Node, given: dict) -> list[Value | None]:
    """q[B, H, S, E], k and v[B, H, T, E] -> [output, logsumexp, ...]: heads, batch run along; T and E must be whole.

    The signatures of torch's CPU, flash, memory-efficient and cuDNN kernels, and of `nn.tiled_attention`, agree in what
    matters here.
    """
    q, k, v = _located(scope, node, given)
    parts = over(k.dims[2]) & over(v.dims[2])
    k, v = (_all_of(scope, node, t, (2, 3), what) for t, what in ((k, "attention keys"), (v, "attention values")))
    q = _all_of(scope, node, q, (3,), "attention queries")
    masked = _masked(scope, node, given, q)
    out = elementwise(scope, node, "function", [_heads(t, q) for t in (masked, k, v)])
    full = replace(out, dims=(*out.dims[:2], q.dims[2], v.dims[3]))
    rows = replace(out, dims=(*out.dims[:2], q.dims[2]))
    known = [axis for axis in parts if rows.is_(axis, Suspect)]  # what combines the parts of ranks
    rows = rows.marked({axis: Pending("logsumexp", node) for axis in known})
    rest = [counted(m.shape) if isinstance(m, torch.Tensor) else None for m in node.meta["val"][2:]]
    return [full, rows, *rest]


def _located(scope: Scope, node: Node, given: dict) -> list[Value]:
    """Queries, keys and values; what one of them shows of dims that shapes leave open holds for the others."""
    q, k, v = (given[name] for name in ("query", "key", "value"))
    for mask in (_mask_of(given), given.get("at_key")):
        if mask is None or size_of(mask.dims[-1]) == 1 or _constant_somewhere(mask.dims[-1]):
            continue
        k, v = (not_on(t, 2, [a for a in t.may_shard(2) if mask.replicated(a)]) for t in (k, v))  # all of T is there
    for _ in range(2):
        k, v = (settled(scope, node, t, 3, q, 3, 2) for t in (k, v))
        q = settled(scope, node, q, 3, k, 3, 2)
    return [q, k, v]


def _all_of(scope: Scope, node: Node, x: Value, dims: tuple[int, ...], what: str) -> Value:
    for dim in dims:
        x = along(scope, node, x, dim, what)
    return x


def attention_backward(scope: Scope, node: Node, given: dict) -> list[Value | None]:
    """Gradients of q, k, v: linear in that of the output."""
    g = given["grad_out" if "grad_out" in given else "grad_out_"]
    q, k, v = _located(scope, node, given)
    masked = _masked(scope, node, given, q)
    rest = elementwise(scope, node, "function", [_heads(t, q) for t in (masked, k, v)])
    out = elementwise(scope, node, "product", [_heads(g, q), rest])
    count = len(node.meta["val"])
    rows = over(q.dims[2]) - over(k.dims[2])  # each rank has queries of its own, and all keys
    grads = [_as_it_lies(scope, node, t, out).marked({**_vague(t), **out.marks}) for t in (q, k, v)]
    pending = {axis: Pending("sum", node) for axis in rows if axis not in out.marks}
    return [grads[0], *(g.marked(pending) for g in grads[1:])] + [None] * (count - 3)


def _as_it_lies(scope: Scope, node: Node, t: Value, out: Value) -> Value:
    """The gradient of queries, keys or values: it lies as they do; along batch and heads on which they are constant
    (expanded, one for all heads) as the output does, for there it is not. That of one head which heads of queries of
    several ranks use is a sum over these, expanded or not."""
    rows, heads, *ends = t.dims
    marks: dict[str, Mark] = {}
    if size_of(heads) == 1 < size_of(out.dims[1]) and not over(heads):
        marks = {axis: Pending("sum", node) for axis in over(out.dims[1]) if not t.is_(axis, Somewhere)}
    elif _constant_somewhere(heads):
        split = viewed((out.dims[1],), (size_of(heads), size_of(out.dims[1]) // size_of(heads)))
        if split is None or split.lost:
            marks = {
                axis: scope.vague(node, "heads of which shapes do not tell what they share")
                for axis in over(out.dims[1])
            }
        else:
            marks = {axis: Pending("sum", node) for axis in over(split.dims[1])}
        heads = plain(size_of(heads)) if split is None else split.dims[0]
    ends = [plain(size_of(dim)) if _constant_somewhere(dim) else dim for dim in ends]
    return replace(out, dims=(out.dims[0] if _constant_somewhere(rows) else rows, heads, *ends)).marked(marks)


def _constant_somewhere(dim: Dim) -> bool:
    return any([atom.axes is UNIFORM for atom in dim])


def _vague(t: Value) -> dict[str, Mark]:
    """Of axes whose dim is not known: the gradient lies as the value does, whatever the other operands show."""
    return {axis: mark for axis, mark in t.marks.items() if isinstance(mark, Somewhere)}


def _masked(scope: Scope, node: Node, given: dict, q: Value) -> Value:
    """Queries with what is known of the rows of their mask [.., S, T], all of whose T is there, as of keys, or of what
    it is made of: positions and documents of queries [N, B, S], of keys [N, B, T], words [2, B, S] of dropout."""
    for name in ("at_query", "words"):
        if (rows := given.get(name)) is not None:
            rows = along(scope, node, rows, 0, "kinds of numbers")
            q = _beside(scope, node, q, {0: rows.dims[1], 2: rows.dims[2]}, rows)
    if (keys := given.get("at_key")) is not None:
        keys = _positions_of_keys(scope, node, keys, over(given["key"].dims[2]))
        q = _beside(scope, node, q, {0: keys.dims[1]}, keys)
    if (heads := given.get("first_of_heads")) is not None:
        q = _beside(scope, node, q, {1: heads.dims[0]}, heads)
    mask = _mask_of(given)
    if mask is None:
        return q
    mask = along(scope, node, mask, len(mask.dims) - 1, "attention mask")
    rows = elementwise(scope, node, "function", [q.with_dims((*q.dims[:3], ())), mask.with_dims((*mask.dims[:-1], ()))])
    return replace(q, dims=rows.dims).marked(rows.marks)


def _positions_of_keys(scope: Scope, node: Node, keys: Value, parts: Collection[str]) -> Value:
    """Without what is sharded as the keys are, of whom it is said; wrong where the keys came from another rank, and
    these did not."""
    of_keys = node_of(node.args[2 if op_name(node).endswith("backward") else 1])
    sent = [axis for axis in over(keys.dims[2]) if axis not in parts and comes_from_another(of_keys, axis)]
    keys = keys.without(set(parts) & over(keys.dims[2]))
    for dim, what in ((0, "kinds of numbers"), (2, "positions of attention keys")):
        keys = along(scope, node, keys, dim, what)
    what = "keys came from another rank, positions and documents that say who sees them are the rank's own"
    return keys.marked({axis: Wrong(node, what, "ppermute them with the keys") for axis in sent})


def _beside(scope: Scope, node: Node, q: Value, dims: dict[int, Dim], x: Value) -> Value:
    """Queries with what is known along some of their dims of a value that decides who sees whom."""
    own = q.with_dims(dim if d in dims else () for d, dim in enumerate(q.dims))
    both = elementwise(scope, node, "function", [own, x.with_dims(dims.get(d, ()) for d in range(4))])
    return replace(q, dims=tuple(both.dims[d] if d in dims else dim for d, dim in enumerate(q.dims))).marked(both.marks)


def _mask_of(given: dict) -> Value | None:
    return given.get("attn_mask", given.get("attn_bias"))


def _heads(t: Value, q: Value) -> Value:
    """Batch and heads; a head of keys that several heads of queries use is the same for all of these."""
    group = size_of(q.dims[1]) // size_of(t.dims[1])
    return t.with_dims((t.dims[0], (*t.dims[1], *((Atom(group, UNIFORM),) if group > 1 else ())), (), ()))


RULES: Rules = MappingProxyType(
    dict.fromkeys(_ATTENTION, attention)
    | dict.fromkeys((f"{kernel}_backward" for kernel in _ATTENTION), attention_backward)
)
