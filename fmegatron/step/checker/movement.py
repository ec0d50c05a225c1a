"""Rules for data movement: views, permutes, slices, concatenations, pads.

A piece of every shard (a slice or an index of a sharded dim) is a suspect where it is all that is used, and open where
all pieces together are; of the batch, whose rows may be assigned in any order, pieces that together are all are rows.
"""

from __future__ import annotations

import itertools
import math
import operator
from collections.abc import Callable, Sequence
from dataclasses import replace
from types import MappingProxyType

import torch

from fmegatron.step.checker import chunks
from fmegatron.step.checker.arithmetic import as_numbered, elementwise, may_shard, not_on
from fmegatron.step.checker.completion import is_sent_on
from fmegatron.step.checker.context import GO_ON, Rule, Rules, Scope, goes_round, line_of, op_name, shape_of, suspected
from fmegatron.step.checker.dims import (
    UNIFORM,
    Atom,
    Dim,
    canonical,
    folds_of,
    interleaved,
    joined,
    met,
    over,
    plain,
    size_of,
    viewed,
    viewed_with_ones,
)
from fmegatron.step.checker.pieces import covering
from fmegatron.step.checker.reductions import along
from fmegatron.step.checker.values import Mark, Somewhere, Unknown, Value, Wrong
from fmegatron.step.graph.nodes import int_of, items_of, node_of

Node = torch.fx.Node


def reshaped(scope: Scope, node: Node, x: Value, shape: Sequence[int]) -> Value:
    """A view to another shape. Where sharded factors do not line up, it is sharded on a dim that is not known."""
    found = viewed(x.dims, shape)
    x = elsewhere(x, _kept_at(x, shape))
    if found is not None:
        return _lost(x.with_dims(found.dims), found.lost)
    axes = [axis for axis in scope.mesh.names if x.shards(axis)]
    return _lost(x.with_dims(plain(n) for n in shape), {(axis,): None for axis in axes})


def _kept_at(x: Value, shape: Sequence[int]) -> list[Sequence[int] | None]:
    """Where each dim may be after a view, by the sizes in front of it: None where it was split. One of one element
    begins a dim, or ends one."""
    sizes = [size_of(dim) for dim in x.dims]
    ends = list(itertools.accumulate(shape, operator.mul))
    front = list(itertools.accumulate(sizes, operator.mul, initial=1))
    more, found = len(shape) - len(sizes), []
    for d in range(len(sizes)):
        inside = [e for e, end in enumerate(ends) if end // shape[e] <= front[d] and front[d + 1] <= end]
        kept = sizes[: d + 1] == list(shape[: d + 1])
        behind = d + more >= 0 and sizes[d:] == list(shape[d + more :])
        found.append([d] if kept else [d + more] if behind else inside or None)
    return found


def _lost(x: Value, lost: dict) -> Value:
    marks = {a: Somewhere(d, axes) for axes, d in lost.items() for a in axes}
    return replace(x, marks={**x.marks, **marks}) if marks else x


def elsewhere(x: Value, positions: Sequence[int | Sequence[int] | None] | None) -> Value:
    """A value of which dim d goes to positions[d], or one of them; None: somewhere. Of axes whose dim is not known."""
    marks = {}
    for axis, mark in x.marks.items():
        if isinstance(mark, Somewhere) and mark.dims is not None:
            at = [None if positions is None else positions[d] for d in mark.dims]
            known = {e for d in at if d is not None for e in ([d] if isinstance(d, int) else d)}
            marks[axis] = mark._replace(dims=tuple(sorted(known)) if None not in at else None)
    return replace(x, marks={**x.marks, **marks}) if marks else x


def permuted(x: Value, order: Sequence[int]) -> Value:
    """Dims in another order."""
    positions = [0] * len(order)
    for new, old in enumerate(order):
        positions[old] = new
    return elsewhere(x, positions).with_dims(x.dims[d] for d in order)


def transposed(x: Value, a: int = 0, b: int = 1) -> Value:
    """Two dims exchanged."""
    if len(x.dims) < 2:
        return x
    order = list(range(len(x.dims)))
    order[a], order[b] = order[b], order[a]
    return permuted(x, order)


def unsqueezed(x: Value, dim: int) -> Value:
    """A new dim of size 1."""
    dim %= len(x.dims) + 1
    positions = [d + (d >= dim) for d in range(len(x.dims))]
    return replace(elsewhere(x, positions).with_dims((*x.dims[:dim], (), *x.dims[dim:])), ramp=x.ramp)


def squeezed(x: Value, dims: Sequence[int] | int | None) -> Value:
    """Dims of size 1 removed: all (None), one, or those listed. One that a single shard makes up hands its axes to the
    dim that follows."""
    dims = range(len(x.dims)) if dims is None else [dims] if isinstance(dims, int) else dims
    gone, out, carried = {d % max(1, len(x.dims)) for d in dims}, [], ()
    gone = {d for d in gone if d < len(x.dims) and size_of(x.dims[d]) == 1}
    known = not any(isinstance(m, Somewhere) and m.dims is not None and gone & set(m.dims) for m in x.marks.values())
    positions = [d - sum(g < d for g in gone) for d in range(len(x.dims))]
    for d, dim in enumerate(x.dims):
        if d in gone:
            carried += dim
        else:
            out.append(canonical(_merged(carried, dim)))
            carried = ()
    if carried and out:
        out[-1] = canonical(out[-1] + carried)
    return replace(elsewhere(x, positions if known else None).with_dims(out), ramp=x.ramp)


def _merged(carried: Dim, dim: Dim) -> Dim:
    """A carried shard in front of a dim: of a full dim it takes the major part, a sharded one is cut once more."""
    if not carried:
        return dim
    axes = tuple(a for atom in carried for a in atom.axes or ())
    if len(dim) == 1 and not dim[0].inner and not dim[0].fold and dim[0].axes is not UNIFORM:
        return (Atom(dim[0].size, axes + (dim[0].axes or ()), dim[0].cuts),)
    return (Atom(1, axes), *dim)


def expanded(x: Value, shape: Sequence[int]) -> Value:
    """Dims of size 1 repeated, and new ones in front: constant along them."""
    new = len(shape) - len(x.dims)
    dims = []
    for d, n in enumerate(shape):
        dim = x.dims[d - new] if d >= new else ()
        dims.append(dim if n == size_of(dim) else (*dim, Atom(n, UNIFORM)))
    return elsewhere(x, [d + new for d in range(len(x.dims))]).with_dims(dims)


def sliced(
    scope: Scope, node: Node, x: Value, dim: int, start: int, stop: int, step: int = 1, covered: bool = False
) -> Value:
    """x[start:stop:step] of one dim. A sharded dim may be cut where its interleaved parts meet.

    covered: whether this and other slices take all of the dim together.
    """
    atoms = interleaved(x.dims[dim])
    size = size_of(atoms)
    if (start, stop, step) == (0, size, 1):
        return x
    count = max(0, -(-(stop - start) // step))
    x = replace(x, ramp=False)
    first = atoms[0] if atoms else Atom(1, ())
    folds = {atom.fold.axis: atom.fold for atom in atoms if atom.fold}
    if folds and atoms[0].fold and atoms[0].fold.kind == "copies" and step == 1:
        copy = size // atoms[0].size
        if count == copy and start % copy == 0:  # one of them
            return _with_dim(x, dim, atoms[1:])
    what = "takes a part of what a collective brought together"
    for axis, fold in folds.items():
        copies = fold.kind == "copies"
        x = x.marked({axis: suspected(node, what, "take one copy") if copies else scope.unknown(node, what)})
    if not any(atom.sharded for atom in atoms):
        uniform = all(a.axes is UNIFORM for a in atoms) and atoms
        counted = start == 0 and step == 1 and all(a.counted for a in atoms) and atoms
        return _with_dim(x, dim, canonical((Atom(count, UNIFORM if uniform else (), counted=bool(counted)),)))
    if first.runs and len(atoms) == 1 and step == 1:
        within, at = [], 0
        for run in first.runs:
            if start <= at and at + size_of(run) <= stop:
                within.append(run)
            at += size_of(run)
        if sum(map(size_of, within)) == count:
            return _with_dim(x, dim, within[0] if len(within) == 1 else (Atom(count, runs=tuple(within)),))
    edges = {0, size} | first.cuts
    if step == 1 and len(atoms) == 1 and {start, stop} <= edges:
        inner_cuts = frozenset(c - start for c in first.cuts if start < c < stop)
        return _with_dim(x, dim, (Atom(count, first.axes, inner_cuts, first.inner),))
    if x.data and covered and chunks.begin(scope, node, x, dim, range(start, stop, step)):
        return _with_dim(x, dim, (Atom(count, first.axes),))
    what = f"takes [{start}:{stop}] of dim {dim}, which is sharded: a piece of every shard"
    return _with_dim(_piece(scope, node, x, atoms, what, dim, covered), dim, plain(count))


def _piece(scope: Scope, node: Node, x: Value, atoms: Dim, what: str, dim: int, covered: bool) -> Value:
    marks = {}
    for axis in sorted(over(atoms)):
        fix = f"all_gather the dim over {axis!r} first, or shard it in parts that meet there"
        sent = covered or goes_round(node, axis)
        marks[axis] = mark = scope.unknown(node, what) if sent else suspected(node, what, fix)
        if isinstance(mark, Unknown) and covered and not x.data and not node.meta.get("backward"):
            scope.cuts |= dict.fromkeys(mark.origins, (node_of(node.args[0]), dim, what))
    return x.marked(marks)


def _with_dim(x: Value, dim: int, atoms: Dim) -> Value:
    return x.with_dims(atoms if d == dim else own for d, own in enumerate(x.dims))


def padded(x: Value, shape: Sequence[int], dim: int, start: int, stop: int) -> Value:
    """The gradient of a slice: zeros around it along one dim (a new dim when x has one less)."""
    dims = list(x.dims)
    if len(shape) > len(dims):
        dims.insert(dim, ())
        x = elsewhere(x, [d + (d >= dim) for d in range(len(x.dims))])
    atoms = interleaved(dims[dim])
    first = atoms[0] if atoms else Atom(1, ())
    if first.axes:
        cuts = ({start, stop} | {c + start for c in first.cuts}) - {0, shape[dim]}
        dims[dim] = (Atom(shape[dim], first.axes, frozenset(cuts)),)
    else:
        dims[dim] = plain(shape[dim])
    return replace(x.with_dims(dims), constant=x.constant if x.constant == 0 else None)


def concatenated(scope: Scope, node: Node, xs: Sequence[Value], dim: int, sizes: Sequence[int]) -> Value:
    """Values one after another along a dim; sharded pieces make an interleaved dim. A finding where one piece is
    sharded along the dim and another is not."""
    vague = frozenset().union(*(x.having(Somewhere) for x in xs))
    if vague:  # pieces that are sharded along the dim itself fit those of which it is not known
        xs = [x.marked(dict.fromkeys(over(x.dims[dim]) & vague, Somewhere())) for x in xs]
    bare = [x.with_dims(() if d == dim else a for d, a in enumerate(x.dims)) for x in xs]
    xs = [_with_dim(x, dim, joined(x.dims[dim])) for x in xs]
    heads = [x.dims[dim][0] if x.dims[dim] else Atom(1, ()) for x in xs]
    out = elementwise(scope, node, "beside", bare)
    labels = {(h.axes or ()) for h in heads}
    dims = list(out.dims)
    runs = tuple(x.dims[dim] for x in xs)
    mixed = any(len(run) > 1 and any(a.sharded for a in run) for run in runs)
    mixed |= len(labels) > 1 and all(h.axes is UNIFORM for h in heads if not h.axes)  # shards, zeros behind each
    if mixed or not all(h.plain for h in heads) or (len(xs[0].dims) == 1 and len(labels) > 1):
        dims[dim] = (Atom(sum(sizes), runs=runs),)
    elif len(labels) > 1:
        hurt = set().union(*map(set, labels)) - set.intersection(*map(set, labels)) - set(out.marks)
        what = "joins pieces of which one is sharded and another is not"
        out = out.marked(dict.fromkeys(hurt, Wrong(node, what, "gather the one, or shard the other")))
        dims = list(out.dims)
        dims[dim] = plain(sum(sizes))
    elif heads[0].axes:
        cuts, at = set(), 0
        for head, n in zip(heads, sizes, strict=True):
            cuts |= {at} | {at + c for c in head.cuts}
            at += n
        dims[dim] = (Atom(at, heads[0].axes, frozenset(cuts - {0})),)
    else:
        dims[dim] = plain(sum(sizes)) if len(xs) > 1 else runs[0]
    constants = {x.constant for x in xs}
    return replace(out.with_dims(dims), constant=0 if constants == {0} else None)


# ---- rules -----------------------------------------------------------------------------------------------------------
def view(scope: Scope, node: Node, given: dict) -> Value:
    """view, reshape; an axis_index stays one when it only gets dims of size 1, and arange counts on."""
    x, shape = given["self"], shape_of(node)
    dim = _selected_dim(node, shape)
    if dim is not None:
        parts = shape[dim : dim + 2]
        found = viewed((x.dims[dim],), parts)
        split = found.dims if found else map(plain, parts)
        lost = [a for axes in found.lost for a in axes] if found else over(x.dims[dim])
        x = x.with_dims((*x.dims[:dim], *split, *x.dims[dim + 1 :]))
        return replace(x, marks={**x.marks, **dict.fromkeys(lost, Somewhere())})
    if node.meta.get("sizes") == "ones" and not x.having(Somewhere) and (dims := viewed_with_ones(x.dims, shape)):
        return replace(x.with_dims(dims), ramp=False)
    out = _as_in_forward(scope, node, x, reshaped(scope, node, x, shape))
    out = as_numbered(node, out, shape) if "made" in node.meta else out
    return replace(out, index_of=x.index_of if math.prod(shape) == 1 else (), scale=x.scale, ramp=x.ramp)


def _as_in_forward(scope: Scope, node: Node, x: Value, out: Value) -> Value:
    """The gradient of what was viewed lies as that did, where shapes alone leave several dims."""
    line, back, found = line_of(node), " (backward)", shape_of(node)
    before, source = tuple(map(size_of, x.dims)), node_of(node.args[0])
    if _of_matmul(node, x, found):  # [..., m, k] to [batch, m, k]
        scope.views[(node,)] = x.dims[:-2]
        axes = over(a for dim in x.dims[:-2] for a in dim)
        ends = x.with_dims(((), *x.dims[-2:]))
        joint = viewed((tuple(a for dim in x.dims[:-2] for a in dim),), (found[0],))
        if joint is not None and not joint.lost and axes and not axes & ends.sharded:
            return replace(ends, dims=(joint.dims[0], *ends.dims[1:]), marks={a: out.marks[a] for a in x.marks})
        return out
    if op_name(source) == "bmm":
        return _batches_again(scope, source, x, out)
    if not line.endswith(back):
        key = (line, before, found)
        lies = Value(x.dims, {axis: x.marks[axis] for axis in x.having(Somewhere)})
        scope.views[key] = lies if scope.views.get(key, lies) == lies else None
        return out
    return _as_that(out, scope.views.get((line.removesuffix(back), found, before)))


def _batches_again(scope: Scope, product: Node, x: Value, out: Value) -> Value:
    """The result of a product, its batch dims as those of the operands were before they were joined."""
    each = [scope.views.get((one,)) for one in product.all_input_nodes]
    wanted = [size_of(dim) for dim in out.dims[:-2]]
    if any([one is None or [size_of(dim) for dim in one] != wanted for one in each]):
        return out
    dims = [met(a, b) for a, b in zip(*each, strict=True)]
    rows = over(a for one in dims for a in one.dim)
    if any([one.clash or one.unclear for one in dims]) or rows != over(x.dims[0]):
        return out
    marks = {axis: out.marks[axis] for axis in x.marks}
    return replace(x.with_dims((*[one.dim for one in dims], *x.dims[1:])), marks=marks)


def _of_matmul(node: Node, x: Value, found: tuple[int, ...]) -> bool:
    """Whether a view joins the batch dims of an operand of a product, as torch.matmul does behind an expand."""
    source = node_of(node.args[0])
    source = node_of(source.args[0]) if source.op == "call_function" and op_name(source) == "clone" else source
    if source.op != "call_function" or op_name(source) != "expand" or not len(found) == 3 < len(x.dims):
        return False
    users = [user for user in node.users if user.op == "call_function"]
    users += [one for user in users if op_name(user) in ("permute", "transpose") for one in user.users]  # of a backward
    return any([op_name(user) == "bmm" for user in users])


def _as_that(out: Value, of: Value | None) -> Value:
    """A value that lies as another of its shape, where shapes leave several dims, or fewer where they do for both."""
    for axis in out.having(Somewhere) if of is not None else ():
        mark = out.marks.get(axis)
        if of is None or not isinstance(mark, Somewhere) or mark.reduced or mark.or_sum:
            continue
        at = [d for d in may_shard(of, axis) if mark.may_be(d)]
        axes = mark.group or (axis,)
        if len(at) == 1 and over(of.dims[at[0]]) >= set(axes):
            out = out.without(axes)
            out = _with_dim(out, at[0], met(out.dims[at[0]], of.dims[at[0]]).dim)
        elif at and of.is_(axis, Somewhere):
            for d in {*may_shard(out, axis)} - {*at}:
                out = not_on(out, d, [axis])
    return out


def _selected_dim(node: Node, shape: tuple[int, ...]) -> int | None:
    """The dim that a view splits so that one part of it is selected, as `shard` does. Shapes alone do not always
    determine it: a new dim of size 1 may belong to the dim before it or to the dim behind it."""
    old = node_of(node.args[0]).meta["val"].shape
    dims = [int_of(user.args[1]) for user in node.users if user.target is torch.ops.aten.index_select.default]
    fits = [d for d in dims if old == (*shape[:d], math.prod(shape[d : d + 2]), *shape[d + 2 :])]
    return fits[0] if fits and len(old) + 1 == len(shape) else None


def _rule(of: Callable[..., Value], *names: str) -> Rule:
    """The rule of an op that is `of` of its first argument and those of these names."""
    return lambda scope, node, given: of(given["self"], *map(given.get, names))


def expand(scope: Scope, node: Node, given: dict) -> Value:
    """Dims of size 1 repeated."""
    return expanded(given["self"], shape_of(node))


def _taken(scope: Scope, node: Node, given: dict) -> tuple[Value, int, bool]:
    """(value, dim of which something is taken, whether this and other ops take all of it)."""
    x, dim = given["self"], given["dim"] % len(given["self"].dims)
    pieces = covering(scope, node, dim) if over(x.dims[dim]) else []
    if len({scope.reached(one) for one in pieces}) > 1:  # rows of a rank that some outputs are made of, and others not
        x = replace(x, data=False)
    return x, dim, bool(pieces)


def slice_of(scope: Scope, node: Node, given: dict) -> Value:
    """x[start:end:step] of one dim."""
    x, dim, covered = _taken(scope, node, given)
    size, end = size_of(x.dims[dim]), given["end"]
    start, stop, step = *slice(given["start"], end).indices(size)[:2], given["step"]
    if (start, stop, step) == (0, size, 1) and end == size and (axes := over(x.dims[dim]) | x.may_shard(dim)):
        why = f"takes [:{size}] of dim {dim}, which is sharded: all of a rank's part, or a number that is no rank's"
        fix = f"Leave it out, or write [:x.shape[{dim}]] as [:]. {GO_ON}"
        return x.marked({axis: scope.vague(node, why, fix) for axis in axes})
    return sliced(scope, node, x, dim, start, stop, step, covered)


def split(scope: Scope, node: Node, given: dict) -> list[Value]:
    """split, split_with_sizes, chunk."""
    x, dim, covered = _taken(scope, node, given)
    ends = list(itertools.accumulate((m.shape[dim] for m in node.meta["val"]), initial=0))
    return [sliced(scope, node, x, dim, start, stop, 1, covered) for start, stop in itertools.pairwise(ends)]


def unbind(scope: Scope, node: Node, given: dict) -> list[Value]:
    """All indices of a dim."""
    return [select(scope, node, given)] * len(node.meta["val"])


def select(scope: Scope, node: Node, given: dict) -> Value:
    """One index of a dim (the dim goes)."""
    x, dim, covered = _taken(scope, node, given)
    atoms, x = x.dims[dim], replace(x, ramp=False)
    x = not_on(x, dim, x.may_shard(dim))
    rest = [d for i, d in enumerate(x.dims) if i != dim]
    x = elsewhere(x, [d - (d > dim) for d in range(len(x.dims))])
    what = "takes one of what a collective brought together"
    marks: dict[str, Mark] = {
        fold.axis: suspected(node, what, f"{fold.kind} along the dim") if _alone(scope, node, fold.node)
        else scope.unknown(node, what)
        for fold in folds_of(atoms) if fold.kind != "copies"
    }  # fmt: skip
    what = f"takes one index of dim {dim}, which is sharded"
    for axis in sorted(over(atoms)):
        fix = f"all_gather the dim over {axis!r} first, or use axis_index and declare"
        sent = covered or goes_round(node, axis) or is_sent_on(scope, node, axis)
        marks[axis] = scope.unknown(node, what) if sent else suspected(node, what, fix)
    return x.marked(marks).with_dims(rest)


def _alone(scope: Scope, node: Node, gather: Node) -> bool:
    """Whether what a collective brought together is used by this node alone, which takes one index of it."""
    while node is not gather:
        source = node.args[0] if node.args else None
        if not isinstance(source, Node) or len([user for user in source.users if user in scope.live]) != 1:
            return False
        node = source
    return True


def slice_backward(scope: Scope, node: Node, given: dict) -> Value:
    """Zeros around the gradient of a slice."""
    dim = given["dim"] % len(given["input_sizes"])
    start, stop, _ = slice(given["start"], given["end"]).indices(given["input_sizes"][dim])
    return padded(given["grad_output"], given["input_sizes"], dim, start, stop)


def select_backward(scope: Scope, node: Node, given: dict) -> Value:
    """Zeros around the gradient of one index."""
    dim, at = given["dim"] % len(given["input_sizes"]), given["index"]
    return padded(given["grad_output"], given["input_sizes"], dim, at, at + 1)


def cat(scope: Scope, node: Node, given: dict) -> Value:
    """Pieces along a dim; empty ones are left out."""
    dim, shapes_of = given["dim"] % len(shape_of(node)), [tuple(n.meta["val"].shape) for n in items_of(node.args[0])]
    pairs = list(zip(given["tensors"], shapes_of, strict=True))
    pairs = [(x, shape) for x, shape in pairs if math.prod(shape)] or pairs
    return concatenated(scope, node, [x for x, _ in pairs], dim, [shape[dim] for _, shape in pairs])


def stack(scope: Scope, node: Node, given: dict) -> Value:
    """Values along a new dim."""
    xs = given["tensors"]
    out = unsqueezed(elementwise(scope, node, "beside", list(xs)), given["dim"])
    numbers = {x.constant for x in xs}
    number = numbers.pop() if len(numbers) == 1 and not out.marks else None
    out = _with_dim(out, given["dim"] % len(out.dims), plain(len(xs), UNIFORM if number else ()))
    return replace(out, constant=number)


def repeat(scope: Scope, node: Node, given: dict) -> Value:
    """Copies one after another: constant from copy to copy."""
    x, times = replace(given["self"], ramp=False), given["repeats"]
    dims = ((),) * (len(times) - len(x.dims)) + x.dims
    return x.with_dims((*(Atom(n, UNIFORM) for n in (r,) if n > 1), *d) for r, d in zip(times, dims, strict=True))


def pad(scope: Scope, node: Node, given: dict) -> Value:
    """Zeros around full dims, or behind each shard of a split one; other constants are no part of a pending sum."""
    x = given["self"]
    for i, (before, after) in enumerate(zip(given["pad"][::2], given["pad"][1::2], strict=True)):
        dim = len(x.dims) - 1 - i
        if after > 0 == before and given.get("value", 0) == 0 and over(x.dims[dim]):
            runs = (x.dims[dim], plain(after, UNIFORM))  # which a slice takes apart again
            x = x.with_dims((Atom(shape_of(node)[dim], runs=runs),) if d == dim else a for d, a in enumerate(x.dims))
        elif before or after:
            x = _with_dim(along(scope, node, x, dim, "a pad"), dim, plain(shape_of(node)[dim]))
    x = replace(x, constant=0 if x.constant == 0 else None, ramp=False)
    return x if given.get("value", 0) == 0 else elementwise(scope, node, "function", [x])


RULES: Rules = MappingProxyType(
    dict.fromkeys("view _unsafe_view reshape _reshape_alias".split(), view)
    | dict.fromkeys("split split_with_sizes unsafe_split".split(), split)
    | {
        "t": _rule(transposed),
        "transpose": _rule(transposed, "dim0", "dim1"),
        "permute": _rule(permuted, "dims"),
        "unsqueeze": _rule(unsqueezed, "dim"),
        "squeeze": _rule(squeezed, "dim"),
        "expand": expand,
        "slice": slice_of,
        "unbind": unbind,
        "select": select,
        "slice_backward": slice_backward,
        "select_backward": select_backward,
        "cat": cat,
        "stack": stack,
        "repeat": repeat,
        "constant_pad_nd": pad,
    }
)
