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
from fmegatron.layout import Mesh

__all__ = ["REPLICATED", "Collective", "Own", "Partial", "Permuted", "RankIndex", "Sharded", "Terms", "collective_of"]
__all__ += ["linear", "require_mesh_of_graph"]

NAMESPACE = "fmegatron"
Argument = Sequence[Place] | Sequence[int] | int | bool | str | Tensor  # of a collective, besides its list and axes


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
        transpose = self.transpose
        if transpose is None:
            return self.emit([x.detach() for x in xs], axis, *arguments)
        dtypes = [x.dtype for x in xs]

        def back(gs, needed):
            return transpose([g.to(dtype) for g, dtype in zip(gs, dtypes, strict=True)], axis, *arguments)

        return linear(lambda given: self.emit(given, axis, *arguments), back, xs)

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
    return found if isinstance(found, Collective) else None


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
class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx, there, back, *xs):
        ctx.back = back
        ys, needed = tuple(there(xs)), ctx.needs_input_grad[2:]
        if any(needed):  # else the results of frozen tensors would ask for gradients beside those of trained ones
            ctx.mark_non_differentiable(*[y for y, need in zip(ys, needed, strict=True) if not need])
        return ys

    @staticmethod
    def backward(ctx, *gs):
        return None, None, *ctx.back(gs, ctx.needs_input_grad[2:])


def linear(there: Callable, back: Callable, xs: Sequence[Tensor]) -> list[Tensor]:
    """`there(xs)`, a linear function of a list of tensors that autograd does not look into: a result for each of them,
    which needs a gradient where its tensor does.

    back: its transpose, (gradients of the results, whether each of xs needs one) -> gradients of xs.
    """
    return list(_Linear.apply(there, back, *xs)) if xs else []
