"""Rules for the collectives, and for the one statement that is believed: `declare`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from types import MappingProxyType

import torch

from fmegatron.layout import Mesh
from fmegatron.step.check.scope import Rule, Rules, Scope, op_name
from fmegatron.step.check.values import UNIFORM, Atom, Partial, Value, canonical, cut, filled, over, size_of, stripped

OWN = frozenset(("varying", "drawn anew on each rank"))  # states of which `declare` says what they mean


def over_axes(rule: Callable) -> Rule:
    """A rule(scope, node, name, x, axes, other arguments) for the axes of size > 1; without any, a collective is the
    identity."""

    def collective(scope: Scope, node: torch.fx.Node, given: dict) -> Value:
        axes = tuple(a for a in given["axes"] if scope.mesh[a] > 1)
        return rule(scope, node, op_name(node), given["x"], axes, given) if axes else given["x"]

    return collective


def axis_index(scope: Scope, node: torch.fx.Node, given: dict) -> Value:
    """This rank's position: it differs between the ranks of these axes, in a way that indexing knows."""
    axes = tuple(a for a in given["axes"] if scope.mesh[a] > 1)
    return Value((), varying=frozenset(axes), index_of=axes)


def reduced(scope: Scope, node: torch.fx.Node, name: str, x: Value, axes: tuple[str, ...], given: dict) -> Value:
    """What a reduction over these axes leaves; only a pending one may be made. A reduce_scatter takes its part, too."""
    wanted = "max" if name == "pmax" else "sum"
    for axis in axes:
        state = x.state(axis)
        if axis in x.tainted or state == f"partial ({wanted})" or (name == "pmax" and state == "replicated"):
            continue
        if x.constant == 0 or (x.equal_terms and state == "replicated" and wanted == "sum"):
            continue
        birth = x.partial[axis].birth if axis in x.partial else None
        if state == "replicated":
            what = f"{name} of a value that is already replicated: {scope.mesh[axis]} times too large"
            scope.find(node, axis, what, "remove it")
        elif state == "varying" and name == "pmax":
            continue
        else:
            scope.find(node, axis, f"{name} of a value that is {state}",
                       f"only a pending {wanted} may be reduced over {axis!r}; wrong axis?", birth)  # fmt: skip
    out = replace(x.without(axes), equal_terms=False)
    if name == "reduce_scatter":
        out = _scattered(out, given["dim"], axes, scope.mesh.extent(axes))
    return filled([size_of(dim) for dim in out.dims], 0) if x.constant == 0 else out


def _scattered(x: Value, dim: int, axes: tuple[str, ...], n: int) -> Value:
    """What is left when each rank keeps its part of a dim."""
    dims, atoms = list(x.dims), x.dims[dim]
    whole = tuple(Atom(atom.size, ()) if atom.axes is UNIFORM else atom for atom in atoms)
    dims[dim] = cut(canonical(whole), axes, n)
    return x.with_dims(dims)


def _gathered(scope, node, name, x, axes, given):
    dim, n = given["dim"], scope.mesh.extent(axes)
    atoms = x.dims[dim]
    first = atoms[0] if atoms else Atom(1, ())
    held = over(atoms) | x.somewhere
    hurt = set()
    for axis in axes:
        if axis in x.tainted or axis in x.varying or axis in x.drawn:
            continue
        if axis in x.partial or axis not in held:
            birth = x.partial[axis].birth if axis in x.partial else None
            scope.find(node, axis, f"all_gather of dim {dim} of a value that is {x.state(axis)}",
                       "remove it, or gather the axis that shards the dim", birth)  # fmt: skip
            hurt.add(axis)
    own = first.axes or ()
    left = tuple(a for a in own if a not in axes)
    if set(axes) <= set(own) and own[len(own) - len(axes) :] != axes and first.plain and not hurt:
        scope.find(node, axes[0], f"all_gather over {'+'.join(axes)} of a dim that is sharded over {'+'.join(own)}",
                   "gather the minor axes first, or all in their order")  # fmt: skip
        hurt |= set(axes)
    if first.inner and not left:
        after = first.inner
    elif first.inner and own == left + axes:
        after = (Atom(first.size * n, left, frozenset(), first.inner),)
    elif first.plain and not first.cuts and set(axes) <= set(own):
        after = (*_filled_in(own, axes, scope.mesh, first.size), *atoms[1:])
    else:  # rank by rank
        after = (Atom(n, ()), *stripped(atoms, axes))
    out = x.without(axes, tainted=hurt)
    dims = list(out.dims)
    dims[dim] = after
    return out.with_dims(dims)


def _filled_in(own: tuple[str, ...], gathered: tuple[str, ...], mesh: Mesh, size: int) -> tuple[Atom, ...]:
    """Atoms of a dim of `size` sharded by `own` when some of these axes are gathered: each takes its place in order."""
    out, before = [], ()
    for axis in own:
        if axis in gathered:
            out.append(Atom(mesh[axis], before))
            before = ()
        else:
            before += (axis,)
    return (*out, Atom(size, before))


def exchanged(scope, node, name, x, axes, given):
    """all_to_all over `axes`: one dim is gathered, another cut."""
    split_dim, concat_dim, n = given["split_dim"], given["concat_dim"], scope.mesh.extent(axes)
    hurt = set()
    for axis in axes:
        held = any(axis in (atom.axes or ()) for atom in x.dims[concat_dim][:1])
        known = axis not in x.tainted | x.varying | x.somewhere and axis not in x.drawn
        if not known or (held and axis not in x.partial):
            continue
        birth = x.partial[axis].birth if axis in x.partial else None
        scope.find(node, axis, f"all_to_all gathers dim {concat_dim} of a value that is {x.state(axis)}",
                   "gather the dim that the axis shards; a pending sum goes through reduce_scatter", birth)  # fmt: skip
        hurt.add(axis)
    whole = x.without(axes)
    dims = list(whole.dims)
    dims[concat_dim] = canonical(_whole_again(x.dims[concat_dim], axes, n))
    out = _scattered(whole.with_dims(dims), split_dim, axes, n)
    return out.without(hurt, tainted=hurt) if hurt else out


def _whole_again(atoms, axes, n):
    """A dim after an exchange that gathers it: what was cut before, if it is known."""
    first = atoms[0] if atoms else Atom(1, ())
    left = tuple(a for a in (first.axes or ()) if a not in axes)
    if first.inner and not left:
        return first.inner
    inner = first.inner if first.axes == left + axes else ()
    return (Atom(first.size * n, left, frozenset(), inner), *atoms[1:])


def _permuted(scope, node, name, x, axes, given):
    # What is sharded lies elsewhere now: `declare` says what the sum of a ring means.
    moved = [a for a in axes if x.state(a).startswith("sharded")]
    return x.without(moved, varying=moved)


def _declared(scope, node, name, x, axes, given):
    kind, dim = given["kind"], given["dim"]
    out = x
    for axis in axes:
        state = x.state(axis)
        if axis in x.tainted:
            continue
        if state == "replicated" and x.constant != 0:
            scope.find(node, axis, f"declared {kind}, but it does not depend on the rank",
                       "the axis_index in it belongs to another axis?")  # fmt: skip
        if kind == "partial" and state in OWN:
            out = replace(out.without([axis]), partial={**out.partial, axis: Partial("sum", node)})
    if kind == "sharded":
        turned = tuple(a for a in axes if x.state(a) in OWN and a not in x.tainted)
        if turned:
            out = out.without(turned)
            dims, atoms = list(out.dims), out.dims[dim]
            before = (atoms[0].axes or ()) if atoms else ()
            dims[dim] = canonical((Atom(size_of(atoms), before + turned),))
            out = out.with_dims(dims)
    return out


RULES: Rules = MappingProxyType(
    dict.fromkeys(("psum", "pmax", "reduce_scatter"), over_axes(reduced))
    | {
        "all_gather": over_axes(_gathered),
        "all_to_all": over_axes(exchanged),
        "ppermute": over_axes(_permuted),
        "declare": over_axes(_declared),
        "axis_index": axis_index,
    }
)
