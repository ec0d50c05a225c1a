"""`Collective`: everything about one collective in one value, from its op in a graph to the bytes that it sends.

A step is traced with symbolic ops, which name axes and know no group, device or rank. The same graph is then checked,
simulated, counted, or lowered to real collectives; each of these asks the op of a node for its entry (`collective_of`).
There is no registry: to add a collective is to make one `Collective`, in this package or outside of it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fmegatron.collectives.axes import Axis
from fmegatron.collectives.places import Place
from fmegatron.collectives.real import Group
from fmegatron.collectives.torch_private import is_transformed
from fmegatron.layout import Mesh

__all__ = ["REPLICATED", "Collective", "Own", "Partial", "Permuted", "RankIndex", "Sharded", "Terms", "collective_of"]
__all__ += ["linear", "require_mesh_of_graph"]

NAMESPACE = "fmegatron"
Argument = (
    Sequence[Place] | Sequence[int] | Place | int | bool | str | Tensor
)  # of a collective, besides its list and axes


# ---- types: what a value is over the axes of a collective ------------------------------------------------------------
class Partial(NamedTuple):
    """`x{U_a}`: a reduction over the axes is pending. kind: "sum", "max" or "min"."""

    kind: str


class Sharded(NamedTuple):
    """`x[S_a]`: sharded as a `Place` describes."""

    place: Place


class Replicated(NamedTuple):
    """`x`: the same on all ranks of the axes."""


class Permuted(NamedTuple):
    """The value of another rank of the axes: what was sharded is somewhere else, terms of a sum stay terms."""


class Own(NamedTuple):
    """A part that is this rank's own, in an order or at a place that no layout describes: routed rows, a block of keys
    that goes round a ring."""


class Terms(NamedTuple):
    """Terms of a sum that may be equal (`ops.as_terms`). backward: their gradients, behind which the terms stand.
    rows: each is counted by a number that may be that of its rank's rows."""

    backward: bool
    rows: bool


class RankIndex(NamedTuple):
    """The rank's position along the axes."""


REPLICATED = Replicated()


# ---- the entry -------------------------------------------------------------------------------------------------------
def _like(x: Tensor, sizes: Sequence[int], *arguments: Any) -> Tensor:
    """An empty tensor like x."""
    return x.new_empty(x.shape)


@dataclass(frozen=True, eq=False)
class Collective:
    """A collective of a list of tensors over axes. Called as `COLLECTIVE(xs, axis, *arguments)` -> list of results.

    Making one registers its op `fmegatron::NAME` with torch, as a C extension does when it is loaded: a graph needs an
    op to name, and torch keeps ops by name for the whole process. A second one of a name is a RuntimeError of torch.

    Every function but `real` and `transpose` is about one tensor; `arguments` are then its own. sizes: the numbers of
    ranks along each of the axes, whose product n is the size of a group.

    Args:
        name: of the op, and in messages.
        arguments: what the op takes besides tensors and axes, as in a torch schema ("Place[] places, bool exact"). Of
            a list each tensor has one element, anything else is the same for all of them. A Tensor (counts) is data
            of the rank: `type` learns nothing of it, `simulated` gets the list of those of a group.
        type: (*arguments) -> (before, after): what the value must be over the axes, and is then. before None: whatever
            it was; the check believes what is said of it after.
        real: (xs, group, *arguments) -> the results of this rank, by functional collectives on a process group.
        simulated: (x of each rank of a group, sizes, *arguments) -> the result of each of these ranks.
        sent: (bytes of x, n) -> bytes that a rank sends, at least; None if nothing is sent. Where counts decide, the
            bytes are those of x or of the result, whichever are fewer.
        transpose: (gradients, axis, *arguments) -> gradients of xs; None if no gradient passes.
        result: (x, sizes, *arguments) -> an empty tensor of the shape and dtype of the result; by default those of x.
        functional: name of torch's functional collective that does just this, if there is one.
    """

    name: str
    arguments: str
    type: Callable[..., tuple[Any, Any]]
    real: Callable[..., Sequence[Tensor]]
    simulated: Callable[..., Sequence[Tensor]]
    sent: Callable[[int, int], float] | None
    transpose: Callable[..., Sequence[Tensor]] | None = None
    result: Callable[..., Tensor] = _like
    functional: str = ""
    op: Any = field(init=False, repr=False)

    def __post_init__(self):
        object.__setattr__(self, "op", _define(self))

    def __call__(self, xs: Sequence[Tensor], axis: Axis, *arguments: Argument) -> list[Tensor]:
        """The results, differentiable if there is a transpose; over an axis of size 1 the tensors themselves."""
        if axis.size == 1:
            return list(xs)
        beside = {i: one for i, one in enumerate(arguments) if isinstance(one, Tensor)}
        dtypes, transpose = [x.dtype for x in xs], self.transpose

        def own(which, tensors):
            """The arguments of the tensors at these places."""
            given = dict(zip(beside, tensors, strict=True))
            columns = ([one[i] for i in which] if isinstance(one, list | tuple) else one for one in arguments)
            return [given.get(i, one) for i, one in enumerate(columns)]

        def there(given, which, tensors):
            return self.emit(given, axis, *own(which, tensors))

        def back(gs, which, tensors):
            assert transpose is not None, "its results have a gradient"
            return transpose([g.to(dtypes[i]) for g, i in zip(gs, which, strict=True)], axis, *own(which, tensors))

        xs = xs if transpose is not None else [x.detach() for x in xs]
        return linear(
            there,
            None if transpose is None else back,
            xs,
            *beside.values(),
            name=f"{self.name} over {axis}",
            flat=any(is_flat(one) for one in arguments),
        )

    def emit(self, xs: Sequence[Tensor], axis: Axis, *arguments: Argument) -> list[Tensor]:
        """The results without a gradient: a symbolic node, or functional collectives on the group of the axis."""
        if not xs:
            return []
        if axis.world is not None:
            return list(self.real(list(xs), Group(axis.world, axis.names), *arguments))
        return self.op(list(xs), axis.names, axis.sizes, *map(_as_given, arguments), mesh=axis.mesh.fingerprint)

    def read(self, given: Sequence[Any]) -> list[Any]:
        """The arguments from those that a node has after the tensors, axes and sizes."""
        return [
            [Place.parse(text) for text in one] if kind == "Place[]" else one
            for kind, one in zip(self._kinds, given, strict=True)
        ]

    def each(self, given: Sequence[Any], count: int) -> list[tuple]:
        """For each of `count` tensors its own arguments, from those that a node has."""
        columns = [
            one if kind.endswith("[]") else [one] * count
            for kind, one in zip(self._kinds, self.read(given), strict=True)
        ]
        return list(zip(*columns, strict=True)) if columns else [()] * count

    @property
    def counted(self) -> bool:
        """Whether what is sent depends on tensors of counts."""
        return "Tensor" in self._kinds

    @property
    def _kinds(self) -> list[str]:
        return [one.split()[0] for one in self.arguments.split(",") if one]


def is_flat(argument: Argument) -> bool:
    """Whether an argument puts a tensor's dims in a row."""
    places = argument if isinstance(argument, list | tuple) else [argument]
    return any(isinstance(one, Place) and bool(one.block) for one in places)


def _as_given(argument: Argument) -> Any:
    """An argument as a node has it: places as text."""
    if isinstance(argument, list | tuple):
        return [str(one) if isinstance(one, Place) else one for one in argument]
    return argument


def _define(collective: Collective) -> Any:
    name = collective.name

    def empty(xs, axes, sizes, *given, mesh):
        own = collective.each(given, len(xs))
        return [collective.result(x, sizes, *mine) for x, mine in zip(xs, own, strict=True)]

    def refuse(xs, axes, sizes, *given, mesh):
        raise RuntimeError(
            f"{name} over {'+'.join(axes)}: met a real tensor {tuple(xs[0].shape)}, but these axes are symbolic, "
            "they have no process group; run the step through fmegatron.step.jit(..., world=connect(mesh)), look at it "
            "with fmegatron.testing.simulate(...), or call it with Axes(mesh, connect(mesh))"
        )

    library = torch.library.Library(NAMESPACE, "FRAGMENT")
    own = "".join(f", {one.strip()}" for one in collective.arguments.replace("Place", "str").split(",") if one)
    library.define(f"{name}(Tensor[] xs, str[] axes, int[] sizes{own}, *, str mesh) -> Tensor[]")
    library.impl(name, empty, "Meta")
    for key in ("CPU", "CUDA"):
        library.impl(name, refuse, key)
    op = getattr(getattr(torch.ops, NAMESPACE), name).default
    op.collective, op.library = collective, library  # the operator keeps its library, and so itself, alive
    return op


def collective_of(target: object) -> Collective | None:
    """The collective of a target of an fx node; None for anything else."""
    found = getattr(target, "collective", None)
    return found if found is not None and isinstance(found, Collective) else None


def require_mesh_of_graph(graph: torch.fx.Graph, mesh: Mesh, who: str, whose: str) -> None:
    """ValueError, naming op and line, unless all symbolic collectives of a graph are over axes of `mesh`.

    who: what was called; whose: what was given to it that has this mesh.
    """
    for node in graph.nodes:
        found = collective_of(node.target)
        if found and node.kwargs["mesh"] != mesh.fingerprint:
            raise ValueError(
                f"{who}: {found.name} over {'+'.join(node.args[1])} at {node.meta.get('at', '?')}: got axes of "
                f"{node.kwargs['mesh']}, wanted {mesh.fingerprint}, the mesh of {whose}; make both of one Mesh"
            )


# ---- gradients -------------------------------------------------------------------------------------------------------
Map = Callable[[list[Tensor], Sequence[int], list[Tensor]], Sequence[Tensor]]


class Untransformable(ValueError):
    """A collective that cannot follow a transform of torch.func; a trace adds the user's line."""


class _Maps(NamedTuple):
    """A linear function of a list of tensors and its transpose, see `linear`."""

    there: Map
    back: Map | None
    again: Map | None
    flat: bool
    name: str

    @property
    def transposed(self) -> _Maps:
        assert self.back is not None, "its results need no gradient"
        return self._replace(there=self.back, back=self.again or self.there, again=None)

    def apply(self, xs: Sequence[Tensor], which: Sequence[int], beside: Sequence[Tensor]) -> list[Tensor]:
        return list(_Linear.apply(self, tuple(which), *xs, *beside)) if xs else []


class _Linear(torch.autograd.Function):
    """`there` of tensors that stand at the places `which` of the list of a collective; those behind them stay beside.

    Its backward is a `_Linear` again, so gradients of gradients pass what gradients pass.
    """

    @staticmethod
    def forward(maps: _Maps, which: tuple[int, ...], *xs):
        n = len(which)
        found = maps.there(list(xs[:n]), which, list(xs[n:]))
        return tuple(y.view_as(y) if any(y is x for x in xs) else y for y in found)

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.maps, ctx.which, *xs = inputs
        needed = ctx.needs_input_grad[2 : 2 + len(ctx.which)]
        ctx.save_for_backward(*xs[len(ctx.which) :])
        ctx.save_for_forward(*xs[len(ctx.which) :])
        if ctx.maps.back is None:
            ctx.mark_non_differentiable(*output)
        elif any(needed):  # else the results of frozen tensors would ask for gradients beside those of trained ones
            ctx.mark_non_differentiable(*[y for y, need in zip(output, needed, strict=True) if not need])

    @staticmethod
    def backward(ctx, *gs):
        needed = [i for i in range(len(gs)) if ctx.needs_input_grad[2 + i]]
        which, beside, maps = [ctx.which[i] for i in needed], list(ctx.saved_tensors), ctx.maps.transposed
        given = [gs[i] for i in needed]
        # A function of autograd's within the backward would move the numbers by which lines are found.
        apply = maps.apply if torch.is_grad_enabled() or is_transformed() else maps.there
        found = dict(zip(needed, apply(given, which, beside), strict=True))
        return None, None, *[found.get(i) for i in range(len(gs))], *[None] * len(beside)

    @staticmethod
    def jvp(ctx, *tangents):
        own, maps = tangents[2 : 2 + len(ctx.which)], ctx.maps
        if maps.back is None:
            return (None,) * len(own)
        given = [i for i, t in enumerate(own) if t is not None]
        maps = maps._replace(there=maps.again or maps.there, again=None)
        found = maps.apply([own[i] for i in given], [ctx.which[i] for i in given], list(ctx.saved_tensors))
        found = dict(zip(given, found, strict=True))
        return tuple(found.get(i) for i in range(len(own)))

    @staticmethod
    def vmap(info, in_dims, maps, which, *xs):
        n, dims = len(which), in_dims[2:]
        if maps.flat or any(dim is not None for dim in dims[n:]):
            what = "a flattened shard" if maps.flat else "counts or scales that differ by row"
            raise Untransformable(
                f"{maps.name}: got torch.func.vmap over {what}, wanted one that it maps over a value alone; call it "
                "outside of vmap, or write the rows as a dim of the value"
            )
        # Behind all dims that a collective names; these are counted from the front.
        given = [x if dim is None else x.movedim(dim, -1) for x, dim in zip(xs, dims, strict=True)]
        found = maps.apply(given[:n], which, given[n:])
        return tuple(found), tuple(None if d is None else y.dim() - 1 for y, d in zip(found, dims, strict=False))


def linear(
    there: Map,
    back: Map | None,
    xs: Sequence[Tensor],
    *beside: Tensor,
    name: str,
    flat: bool = False,
    again: Map | None = None,
) -> list[Tensor]:
    """`there(xs)`, a linear function of a list of tensors that autograd does not look into: a result for each of them,
    which needs a gradient where its tensor does. Its gradient has one too, as often as is asked for.

    Args:
        there: (tensors, their places in the list, beside) -> a result for each. Results are new, or views.
        back: its transpose, the same of gradients of results: gradients of xs. Of the list only those are given that
            are asked for. None: no gradient passes.
        xs: the list.
        beside: tensors that both need and that have no gradient.
        name: of the collective, in messages.
        flat: whether a dim more behind the others would not stay apart.
        again: the transpose of `back`, where `there` rounds; None: `there`.
    """
    return _Maps(there, back, again, flat, name).apply(xs, range(len(xs)), beside)
