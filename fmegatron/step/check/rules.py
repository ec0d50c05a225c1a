"""One entry for each op: which class of rule it belongs to. An op that stands nowhere is reported as unproven."""

from __future__ import annotations

import operator
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch

from fmegatron.collectives import is_symbolic
from fmegatron.step.check import arithmetic, fused, lookups, shapes
from fmegatron.step.check.collectives import collective
from fmegatron.step.check.scope import Scope, line_of
from fmegatron.step.check.values import Value, size_of

REDUCTIONS = {"sum": "sum", "mean": "mean", "amax": "max", "any": "max", "max": "max", "amin": "min", "all": "all",
              "argmax": "argmax", "argmin": "argmin", "prod": "prod", "var": "var", "std": "std", "min": "min",
              "linalg_vector_norm": "norm", "norm": "norm", "logsumexp": "logsumexp"}  # fmt: skip
LINEAR_ALONG = frozenset("cumsum flip roll".split())
WHOLE_DIM = (
    LINEAR_ALONG
    | frozenset("_softmax _log_softmax _safe_softmax cumprod sort topk".split())
    | frozenset("_softmax_backward_data _log_softmax_backward_data".split())
)
MADE = frozenset("full zeros ones empty new_zeros new_ones new_full new_empty zeros_like ones_like full_like empty_like"
                 " scalar_tensor empty_strided new_empty_strided".split())  # fmt: skip
COUNTED = frozenset("arange iota eye linspace tril_indices triu_indices".split())


def value_after(scope: Scope, node: torch.fx.Node) -> Any:
    """The Value (or list of them) of a call_function node."""
    if node.target is operator.getitem:
        source = scope.values[node.args[0]]
        return source[node.args[1]] if isinstance(source, list) else source
    given = _arguments(node)
    name = node.target._schema.name.split("::")[1]
    symbolic = is_symbolic(node.target)
    if symbolic:
        first = "like" if symbolic == "axis_index" else "x"
        x = scope.values[given.pop(first)]
        return collective(scope, node, symbolic, x, given)
    if name.startswith("_foreach_"):
        return _foreach(scope, node, name.removeprefix("_foreach_").rstrip("_"), given)
    base = name.rstrip("_") if node.target._schema.is_mutable and name.endswith("_") else name
    rule = _RULES.get(base)
    if rule is not None:
        found = rule(scope, node, given)
        return found if found is not None else _unproven(scope, node)
    if torch.Tag.pointwise in node.target.tags or base in ("fma", "gelu_backward", "silu_backward", "sigmoid_backward"):
        return _pointwise(scope, node, base, given)
    return _unproven(scope, node)


def _arguments(node: torch.fx.Node) -> dict[str, Any]:
    """Arguments by the names of the schema, defaults included."""
    given = {a.name: a.default_value for a in node.target._schema.arguments if a.has_default_value()}
    given |= {a.name: v for a, v in zip(node.target._schema.arguments, node.args, strict=False)}
    return given | dict(node.kwargs)


def _shape(node: torch.fx.Node) -> tuple[int, ...]:
    return tuple(node.meta["val"].shape)


def _unproven(scope: Scope, node: torch.fx.Node) -> Any:
    scope.unproven.setdefault(str(node.target), line_of(node))
    sources = [scope.values[n] for n in node.all_input_nodes]
    flat = [v for s in sources for v in (s if isinstance(s, list) else [s])]
    unknown = frozenset().union(*(v.axes() for v in flat))

    def blank(meta):
        return Value(arithmetic.counted(meta.shape).dims, tainted=unknown)

    found = node.meta["val"]
    return [blank(m) for m in found] if isinstance(found, (list, tuple)) else blank(found)


def _operand(scope: Scope, argument: Any) -> Value | None:
    return scope.values[argument] if isinstance(argument, torch.fx.Node) else None


def _number(value: Any) -> Value | None:
    """A literal zero takes no part in a sum; any other number is None."""
    return Value((), constant=0) if isinstance(value, (int, float)) and value == 0 else None


def _pointwise(scope: Scope, node: torch.fx.Node, name: str, given: dict) -> Value:
    operands = [a for a in given.values() if isinstance(a, torch.fx.Node)]
    values = [scope.values[a] for a in operands]
    if name in arithmetic.SAME:
        return arithmetic.elementwise(scope, node, "same", values)
    if name in arithmetic.SUM:
        pair = [_operand(scope, given["self"]), _operand(scope, given["other"]) or _number(given["other"])]
        positions = arithmetic.positions(*pair) if name == "add" else None
        return positions or arithmetic.elementwise(scope, node, "sum", pair)
    if name in ("mul", "div"):
        pair = [_operand(scope, given["self"]), _operand(scope, given["other"])]
        if name == "mul" and pair[0] is not None and pair[0].index_of and isinstance(given["other"], int):
            return replace(pair[0], scale=pair[0].scale * given["other"])
        return arithmetic.elementwise(scope, node, "product" if name == "mul" else "quotient", pair)
    if name in ("where", "masked_fill"):
        if name == "where":
            triple = [scope.values[given["condition"]], scope.values[given["self"]], scope.values[given["other"]]]
        else:
            triple = [scope.values[given["mask"]], scope.values[given["self"]],
                      _operand(scope, given["value"]) or _number(given["value"])]  # fmt: skip
        return arithmetic.elementwise(scope, node, "select", triple)
    if name == "fma":
        factors = [_operand(scope, given["a"]), _operand(scope, given["b"])]
        product = arithmetic.elementwise(scope, node, "product", factors)
        return arithmetic.elementwise(scope, node, "sum", [product, _operand(scope, given["c"])])
    if name in ("addcmul", "addcdiv"):
        kind = "product" if name == "addcmul" else "quotient"
        product = arithmetic.elementwise(
            scope, node, kind, [scope.values[given["tensor1"]], scope.values[given["tensor2"]]]
        )
        return arithmetic.elementwise(scope, node, "sum", [scope.values[given["self"]], product])
    if name == "lerp":
        both = [scope.values[given["self"]], scope.values[given["end"]]]
        return arithmetic.elementwise(scope, node, "sum", both)
    if name.endswith("_backward"):  # linear in the gradient, which comes first
        rest = arithmetic.elementwise(scope, node, "function", values[1:]) if values[1:] else None
        return arithmetic.elementwise(scope, node, "product", [values[0], rest])
    return arithmetic.elementwise(scope, node, "function", values)


def _foreach(scope: Scope, node: torch.fx.Node, name: str, given: dict) -> list[Value]:
    lists = {
        k: v for k, v in given.items() if isinstance(v, (list, tuple)) and any(isinstance(x, torch.fx.Node) for x in v)
    }
    count = len(next(iter(lists.values())))
    return [
        _pointwise(scope, node, name, {k: (v[i] if k in lists else v) for k, v in given.items()}) for i in range(count)
    ]


# ---- the table -------------------------------------------------------------------------------------------------------
Rule = Callable[[Scope, torch.fx.Node, dict], Any]


def _table() -> dict[str, Rule]:
    x = lambda scope, given, name="self": scope.values[given[name]]  # noqa: E731
    table: dict[str, Rule] = {}
    for name in arithmetic.SAME:
        table[name] = lambda s, n, g: (
            x(s, g) if not isinstance(x(s, g), Value) else replace(x(s, g), index_of=x(s, g).index_of)
        )
    table["barrier"] = lambda s, n, g: x(s, g, "x")
    for name in MADE:
        table[name] = lambda s, n, g: arithmetic.filled(_shape(n), _constant(n, g))
    for name in COUNTED:
        table[name] = lambda s, n, g: arithmetic.counted(_shape(n), _is_ramp(g))
    table["fill"] = lambda s, n, g: arithmetic.filled(_shape(n), _constant(n, g))
    table["zero"] = lambda s, n, g: arithmetic.filled(_shape(n), 0)
    table["copy"] = lambda s, n, g: shapes.expanded(x(s, g, "src"), _shape(n))
    for name in ("view", "_unsafe_view", "reshape", "_reshape_alias"):
        table[name] = _view
    table["t"] = lambda s, n, g: shapes.transposed(x(s, g)) if len(x(s, g).dims) > 1 else x(s, g)
    table["transpose"] = lambda s, n, g: shapes.transposed(x(s, g), g["dim0"], g["dim1"])
    table["permute"] = lambda s, n, g: shapes.permuted(x(s, g), g["dims"])
    table["unsqueeze"] = lambda s, n, g: shapes.unsqueezed(x(s, g), g["dim"])
    table["squeeze"] = lambda s, n, g: shapes.squeezed(x(s, g), _dims(g, x(s, g)))
    table["expand"] = lambda s, n, g: shapes.expanded(x(s, g), _shape(n))
    table["slice"] = _slice
    table["split"] = table["split_with_sizes"] = table["unsafe_split"] = _split
    table["unbind"] = lambda s, n, g: shapes.selected(s, n, x(s, g), g["dim"] % len(x(s, g).dims), len(n.meta["val"]))
    table["select"] = lambda s, n, g: shapes.selected(s, n, x(s, g), g["dim"] % len(x(s, g).dims))
    table["slice_backward"] = _slice_backward
    table["select_backward"] = _select_backward
    table["cat"] = _cat
    table["stack"] = lambda s, n, g: shapes.stacked(s, n, [s.values[t] for t in g["tensors"]], g["dim"])
    table["constant_pad_nd"] = _padded
    table["tril"] = table["triu"] = _triangle
    for name in REDUCTIONS:
        table[name] = _reduction
    for name in WHOLE_DIM:
        table[name] = _along
    table["mm"] = lambda s, n, g: arithmetic.contraction(s, n, x(s, g), x(s, g, "mat2"), 0)
    table["bmm"] = lambda s, n, g: arithmetic.contraction(s, n, x(s, g), x(s, g, "mat2"), 1)
    table["mv"] = lambda s, n, g: arithmetic.contraction(s, n, x(s, g), x(s, g, "vec"), 0)
    table["dot"] = lambda s, n, g: arithmetic.contraction(s, n, x(s, g), x(s, g, "tensor"), 0)
    table["addmm"] = lambda s, n, g: _added(s, n, g, "mat1", "mat2", 0)
    table["baddbmm"] = lambda s, n, g: _added(s, n, g, "batch1", "batch2", 1)
    table["embedding"] = lambda s, n, g: lookups.embedding(s, n, x(s, g, "weight"), x(s, g, "indices"))
    table["embedding_dense_backward"] = lambda s, n, g: lookups.accumulated(
        s, n, _shape(n), 0, x(s, g, "indices"), x(s, g, "grad_output"), True
    )
    table["index_select"] = lambda s, n, g: lookups.index_select(s, n, x(s, g), g["dim"], x(s, g, "index"))
    table["gather"] = lambda s, n, g: lookups.gathered(s, n, x(s, g), g["dim"], x(s, g, "index"))
    table["index"] = _index
    table["index_put"] = _index_put
    return table | fused.table()


def _is_ramp(given: dict) -> bool:
    return given.get("start", 0) == 0 and given.get("step", 1) == 1 and "n" not in given


def _constant(node: torch.fx.Node, given: dict) -> float | None:
    name = node.target._schema.name.split("::")[1]
    if "zeros" in name:
        return 0
    if "ones" in name:
        return 1
    value = given.get("fill_value", given.get("value", given.get("s")))
    return value if isinstance(value, (int, float)) else None


def _dims(given: dict, x: Value) -> list[int]:
    dims = given.get("dim", given.get("dims"))
    if dims is None:
        return list(range(len(x.dims)))
    return list(dims) if isinstance(dims, (list, tuple)) else [dims]


def _view(scope, node, given):
    x = scope.values[given["self"]]
    out = shapes.reshaped(scope, node, x, _shape(node))
    return replace(out, index_of=x.index_of if shapes.numel(_shape(node)) == 1 else ())


def _slice(scope, node, given):
    x, dim = scope.values[given["self"]], given["dim"]
    dim %= len(x.dims)
    size = size_of(x.dims[dim])
    start, stop, _ = slice(given["start"], given["end"]).indices(size)
    return shapes.sliced(scope, node, x, dim, start, stop, given["step"])


def _split(scope, node, given):
    x = scope.values[given["self"]]
    dim = given["dim"] % len(x.dims)
    return shapes.pieces(scope, node, x, dim, [m.shape[dim] for m in node.meta["val"]])


def _slice_backward(scope, node, given):
    g, dim = scope.values[given["grad_output"]], given["dim"] % len(given["input_sizes"])
    start, stop, _ = slice(given["start"], given["end"]).indices(given["input_sizes"][dim])
    return shapes.padded(g, given["input_sizes"], dim, start, stop)


def _select_backward(scope, node, given):
    g, dim = scope.values[given["grad_output"]], given["dim"] % len(given["input_sizes"])
    return shapes.padded(g, given["input_sizes"], dim, given["index"], given["index"] + 1)


def _cat(scope, node, given):
    nodes = [t for t in given["tensors"] if shapes.numel(t.meta["val"].shape)] or list(given["tensors"])
    xs = [scope.values[t] for t in nodes]
    dim = given["dim"] % len(_shape(node))
    return shapes.concatenated(scope, node, xs, dim, [t.meta["val"].shape[dim] for t in nodes])


def _padded(scope, node, given):
    """Zeros around whole dims; other constants are no part of a pending sum."""
    x = scope.values[given["self"]]
    for i, (before, after) in enumerate(zip(given["pad"][::2], given["pad"][1::2], strict=True)):
        dim = len(x.dims) - 1 - i
        if before or after:
            x = shapes.windows(arithmetic.along(scope, node, x, dim, "a pad"), dim, _shape(node)[dim])
    x = replace(x, constant=0 if x.constant == 0 else None)
    return x if given.get("value", 0) == 0 else arithmetic.elementwise(scope, node, "function", [x])


def _triangle(scope, node, given):
    x = scope.values[given["self"]]
    for dim in (-2, -1):
        x = arithmetic.along(scope, node, x, dim, "a triangle")
    return replace(x, constant=None).with_dims(
        d if i < len(x.dims) - 2 else arithmetic.counted([size_of(d)]).dims[0] for i, d in enumerate(x.dims)
    )


def _reduction(scope, node, given):
    name = node.target._schema.name.split("::")[1]
    x = scope.values[given["self"]]
    out = arithmetic.reduction(scope, node, x, _dims(given, x), given.get("keepdim", False), REDUCTIONS[name])
    return [out] * len(node.meta["val"]) if isinstance(node.meta["val"], (list, tuple)) else out


def _along(scope, node, given):
    name = node.target._schema.name.split("::")[1]
    if name.endswith("_backward_data"):
        g, y = scope.values[given["grad_output"]], scope.values[given["output"]]
        out = arithmetic.elementwise(scope, node, "product", [g, y])
    else:
        kind = "same" if name in LINEAR_ALONG else "function"
        out = arithmetic.elementwise(scope, node, kind, [scope.values[given["self"]]])
    dims = given.get("dim", given.get("dims", -1))
    for dim in dims if isinstance(dims, (list, tuple)) else [dims]:
        out = arithmetic.along(scope, node, out, dim, name.strip("_"))
    return [out] * len(node.meta["val"]) if isinstance(node.meta["val"], (list, tuple)) else out


def _added(scope, node, given, a, b, batch):
    product = arithmetic.contraction(scope, node, scope.values[given[a]], scope.values[given[b]], batch)
    return arithmetic.elementwise(scope, node, "sum", [scope.values[given["self"]], product])


def _index(scope, node, given):
    x, indices = scope.values[given["self"]], given["indices"]
    used = [d for d, i in enumerate(indices) if i is not None]
    if len(used) != 1:
        return _unproven(scope, node)
    index = scope.values[indices[used[0]]]
    dim = used[0]
    after = lambda dims: ((*dims[:dim], *index.dims, *dims[dim + 1 :]), frozenset())  # noqa: E731
    return lookups.looked_up(scope, node, x, dim, index, after)


def _index_put(scope, node, given):
    base, indices = scope.values[given["self"]], given["indices"]
    if len(indices) != 1 or base.constant != 0 or not given["accumulate"]:
        return _unproven(scope, node)
    return lookups.accumulated(
        scope, node, _shape(node), 0, scope.values[indices[0]], scope.values[given["values"]], True
    )


_RULES = _table()
