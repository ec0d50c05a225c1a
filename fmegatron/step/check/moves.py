"""Rules for data movement: views, permutes, slices, concatenations, pads."""

from __future__ import annotations

import math
from dataclasses import replace
from types import MappingProxyType

import torch

from fmegatron.step.check import shapes
from fmegatron.step.check.arithmetic import elementwise
from fmegatron.step.check.atoms import UNIFORM, Atom, over, plain, size_of, viewed
from fmegatron.step.check.reductions import along
from fmegatron.step.check.scope import Rules, Scope, op_name, shape_of
from fmegatron.step.check.values import Somewhere, Value


def view(scope: Scope, node: torch.fx.Node, given: dict) -> Value:
    """view, reshape; an axis_index stays one when it only gets dims of size 1, and arange counts on."""
    x, shape = given["self"], shape_of(node)
    dim = _dealt(node, shape)
    if dim is not None:
        parts = shape[dim : dim + 2]
        found = viewed((x.dims[dim],), parts)
        split, lost = (
            (found.dims, [a for axes in found.lost for a in axes]) if found else (map(plain, parts), over(x.dims[dim]))
        )
        return replace(
            x.with_dims((*x.dims[:dim], *split, *x.dims[dim + 1 :])),
            marks={**x.marks, **{a: Somewhere() for a in lost}},
        )
    out = shapes.reshaped(scope, node, x, shape)
    return replace(out, index_of=x.index_of if math.prod(shape) == 1 else (), scale=x.scale, ramp=x.ramp)


def _dealt(node: torch.fx.Node, shape: tuple[int, ...]) -> int | None:
    """The dim that a view splits so that one part of it is selected, as `shard` does. Shapes alone do not always tell:
    a new dim of size 1 may belong to the dim before it or to the dim behind it."""
    old = node.args[0].meta["val"].shape
    dims = [user.args[1] for user in node.users if user.target is torch.ops.aten.index_select.default]
    fits = [d for d in dims if old == (*shape[:d], math.prod(shape[d : d + 2]), *shape[d + 2 :])]
    return fits[0] if fits and len(old) + 1 == len(shape) else None


def t(scope: Scope, node: torch.fx.Node, given: dict) -> Value:
    """The transpose of a matrix; a vector as it is."""
    return shapes.transposed(given["self"]) if len(given["self"].dims) > 1 else given["self"]


def transpose(scope: Scope, node: torch.fx.Node, given: dict) -> Value:
    """Two dims exchanged."""
    return shapes.transposed(given["self"], given["dim0"], given["dim1"])


def permute(scope: Scope, node: torch.fx.Node, given: dict) -> Value:
    """Dims in another order."""
    return shapes.permuted(given["self"], given["dims"])


def unsqueeze(scope: Scope, node: torch.fx.Node, given: dict) -> Value:
    """A new dim of size 1."""
    return shapes.unsqueezed(given["self"], given["dim"])


def squeeze(scope: Scope, node: torch.fx.Node, given: dict) -> Value:
    """Dims of size 1 removed: all, one, or those listed."""
    dims = given.get("dim", range(len(given["self"].dims)))
    return shapes.squeezed(given["self"], [dims] if isinstance(dims, int) else dims)


def expand(scope: Scope, node: torch.fx.Node, given: dict) -> Value:
    """Dims of size 1 repeated."""
    return shapes.expanded(given["self"], shape_of(node))


def slice_of(scope: Scope, node: torch.fx.Node, given: dict) -> Value:
    """x[start:end:step] of one dim."""
    x, dim = given["self"], given["dim"] % len(given["self"].dims)
    start, stop, _ = slice(given["start"], given["end"]).indices(size_of(x.dims[dim]))
    covered = bool(over(x.dims[dim])) and _covered(scope, node, dim)
    return shapes.sliced(scope, node, x, dim, start, stop, given["step"], covered)


def split(scope: Scope, node: torch.fx.Node, given: dict) -> list[Value]:
    """split, split_with_sizes, chunk."""
    dim = given["dim"] % len(given["self"].dims)
    covered = bool(over(given["self"].dims[dim])) and _covered(scope, node, dim)
    return shapes.pieces(scope, node, given["self"], dim, [m.shape[dim] for m in node.meta["val"]], covered)


def unbind(scope: Scope, node: torch.fx.Node, given: dict) -> list[Value]:
    """All indices of a dim."""
    dim = given["dim"] % len(given["self"].dims)
    covered = bool(over(given["self"].dims[dim])) and _covered(scope, node, dim)
    return [shapes.selected(scope, node, given["self"], dim, covered)] * len(node.meta["val"])


def select(scope: Scope, node: torch.fx.Node, given: dict) -> Value:
    """One index of a dim."""
    dim = given["dim"] % len(given["self"].dims)
    covered = bool(over(given["self"].dims[dim])) and _covered(scope, node, dim)
    return shapes.selected(scope, node, given["self"], dim, covered)


_ALL = frozenset(("split", "split_with_sizes", "unsafe_split", "unbind"))
_SOME = frozenset(("slice", "select"))


def _covered(scope: Scope, node: torch.fx.Node, dim: int) -> bool:
    """Whether what is taken of a dim, here and by others that are used, is all of it, and nothing of it twice."""
    source = node.args[0]
    size, taken = source.meta["val"].shape[dim], []
    for user in source.users:
        name = op_name(user) if user.op == "call_function" else ""
        if name not in _ALL | _SOME or user not in scope.live or _dim_of(user) % source.meta["val"].dim() != dim:
            continue
        if name == "select":
            taken.append(user.args[2] % size)
        elif name == "slice":
            taken += range(*slice(*(*user.args[2:], None, None, None)[:3]).indices(size))
        else:
            used = {item.args[1] for item in user.users if item in scope.live}
            if len(used) == len(user.meta["val"]):
                taken += range(size)
    return sorted(taken) == list(range(size))


def _dim_of(node: torch.fx.Node) -> int:
    at = 2 if op_name(node) in ("split", "split_with_sizes", "unsafe_split") else 1
    return node.args[at] if len(node.args) > at else node.kwargs.get("dim", 0)


def slice_backward(scope: Scope, node: torch.fx.Node, given: dict) -> Value:
    """Zeros around the gradient of a slice."""
    dim = given["dim"] % len(given["input_sizes"])
    start, stop, _ = slice(given["start"], given["end"]).indices(given["input_sizes"][dim])
    return shapes.padded(given["grad_output"], given["input_sizes"], dim, start, stop)


def select_backward(scope: Scope, node: torch.fx.Node, given: dict) -> Value:
    """Zeros around the gradient of one index."""
    dim, at = given["dim"] % len(given["input_sizes"]), given["index"]
    return shapes.padded(given["grad_output"], given["input_sizes"], dim, at, at + 1)


def cat(scope: Scope, node: torch.fx.Node, given: dict) -> Value:
    """Pieces along a dim; empty ones are left out."""
    dim, shapes_of = given["dim"] % len(shape_of(node)), [tuple(n.meta["val"].shape) for n in node.args[0]]
    pairs = list(zip(given["tensors"], shapes_of, strict=True))
    pairs = [(x, shape) for x, shape in pairs if math.prod(shape)] or pairs
    return shapes.concatenated(scope, node, [x for x, _ in pairs], dim, [shape[dim] for _, shape in pairs])


def stack(scope: Scope, node: torch.fx.Node, given: dict) -> Value:
    """Values along a new dim."""
    return shapes.stacked(scope, node, given["tensors"], given["dim"])


def repeat(scope: Scope, node: torch.fx.Node, given: dict) -> Value:
    """Copies one after another: constant from copy to copy."""
    x, times = replace(given["self"], ramp=False), given["repeats"]
    dims = ((),) * (len(times) - len(x.dims)) + x.dims
    return x.with_dims((*(Atom(n, UNIFORM) for n in (r,) if n > 1), *d) for r, d in zip(times, dims, strict=True))


def unfold(scope: Scope, node: torch.fx.Node, given: dict) -> Value:
    """Windows of a whole dim, their positions in a new last dim."""
    x, dim = given["self"], given["dimension"] % len(given["self"].dims)
    x = along(scope, node, x, dim, "windows")
    dims = [plain(shape_of(node)[d]) if d == dim else own for d, own in enumerate(x.dims)]
    return x.with_dims((*dims, plain(given["size"])))


def unfold_backward(scope: Scope, node: torch.fx.Node, given: dict) -> Value:
    """Gradients of windows added up where the windows lie."""
    g, dim = given["grad_in"], given["dim"] % len(given["input_sizes"])
    g = along(scope, node, along(scope, node, g, dim, "windows"), -1, "windows")
    return g.with_dims(plain(given["input_sizes"][d]) if d == dim else own for d, own in enumerate(g.dims[:-1]))


def pad(scope: Scope, node: torch.fx.Node, given: dict) -> Value:
    """Zeros around whole dims, or behind each shard of a split one; other constants are no part of a pending sum."""
    x = given["self"]
    for i, (before, after) in enumerate(zip(given["pad"][::2], given["pad"][1::2], strict=True)):
        dim = len(x.dims) - 1 - i
        if after > 0 == before and given.get("value", 0) == 0 and over(x.dims[dim]):
            runs = (x.dims[dim], plain(after, UNIFORM))  # which a slice takes apart again
            x = x.with_dims((Atom(shape_of(node)[dim], runs=runs),) if d == dim else a for d, a in enumerate(x.dims))
        elif before or after:
            x = shapes.windows(along(scope, node, x, dim, "a pad"), dim, shape_of(node)[dim])
    x = replace(x, constant=0 if x.constant == 0 else None, ramp=False)
    return x if given.get("value", 0) == 0 else elementwise(scope, node, "function", [x])


def triangle(scope: Scope, node: torch.fx.Node, given: dict) -> Value:
    """tril, triu of whole matrices."""
    x = given["self"]
    for dim in (-2, -1):
        x = along(scope, node, x, dim, "a triangle")
    made = all(atom.axes is UNIFORM or atom.counted for dim in x.dims[-2:] for atom in dim)
    ends = [(Atom(size_of(dim), counted=made),) for dim in x.dims[-2:]]
    return replace(x, constant=0 if x.constant == 0 else None).with_dims((*x.dims[:-2], *ends))


RULES: Rules = MappingProxyType(
    dict.fromkeys("view _unsafe_view reshape _reshape_alias".split(), view)
    | dict.fromkeys("split split_with_sizes unsafe_split".split(), split)
    | dict.fromkeys(("tril", "triu"), triangle)
    | {
        "t": t,
        "transpose": transpose,
        "permute": permute,
        "unsqueeze": unsqueeze,
        "squeeze": squeeze,
        "expand": expand,
        "slice": slice_of,
        "unbind": unbind,
        "select": select,
        "slice_backward": slice_backward,
        "select_backward": select_backward,
        "cat": cat,
        "stack": stack,
        "repeat": repeat,
        "unfold": unfold,
        "unfold_backward": unfold_backward,
        "constant_pad_nd": pad,
    }
)
