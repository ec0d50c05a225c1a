"""Axes of a mesh as values that a step is given: what a collective works over, and how it is bound."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, NoReturn, cast

import optree

from fmegatron.layout import Mesh, data_parallel
from fmegatron.tree import checks, structure, torch_private

if TYPE_CHECKING:
    from fmegatron.collectives.world import World

__all__ = ["Axes", "Axis"]


@dataclass(frozen=True)
class Axis:
    """One axis, or several joined (major first), without the axes of size 1. Made by `Axes`.

    names: the axes of size > 1 that it stands for; empty when every collective over it is the identity.
    size: number of ranks along it, which knows that it is that (`rank_counts`). mesh: that it belongs to; symbolic
    collectives carry its fingerprint into the graph.
    world: None for the symbolic binding. sizes: number of ranks along each of `names`.
    """

    names: tuple[str, ...]
    size: int
    mesh: Mesh
    world: World | None = None
    sizes: tuple[int, ...] = ()

    def only(self, names: tuple[str, ...]) -> Axis:
        """The axis of some of its names, in the order given."""
        sizes = tuple(self.sizes[self.names.index(name)] for name in names)
        return replace(self, names=tuple(names), size=self.mesh.extent(names), sizes=sizes)

    def require(self, layouts: structure.Tree, who: str) -> None:
        """ValueError, naming the leaf, unless all layouts (or ArraySpecs) of a tree are on the mesh of this axis."""
        checks.require_mesh(layouts, self.mesh, who, "the axis")

    def __str__(self) -> str:
        return "+".join(self.names) or "(size 1)"

    def _no_number(self, other: Any) -> NoReturn:
        """TypeError: an axis is no number; the number of its ranks is."""
        del other
        name = f"axes[{', '.join(map(repr, self.names))}]"
        raise TypeError(f"got arithmetic with the axis {self}, wanted a number; the number of its ranks is {name}.size")

    __add__ = __radd__ = __mul__ = __rmul__ = __truediv__ = __rtruediv__ = __floordiv__ = __rfloordiv__ = _no_number


@dataclass(frozen=True)
class Axes:
    """The axes of a mesh, bound symbolically (`Axes(mesh)`) or to process groups (`Axes(mesh, connect(mesh))`).

    `axes["tp"]` is one axis, `axes["dp", "fsdp"]` two joined: their ranks act as one group, `dp` major.
    data: the axes over which the tokens of a batch are split, those of the strategy (`DataParallel.tokens`) that the
    mesh has. `axes[axes.data]` is the axis over which a loss is summed.
    Raises ValueError for an axis that is neither of the mesh nor a standard one (`Mesh`), and for a world that was
    connected for another mesh.
    """

    mesh: Mesh
    world: World | None = None
    data: tuple[str, ...] = (*data_parallel.DATA_AXES, *data_parallel.SEQUENCE_AXES)

    def __post_init__(self):
        data = (self.data,) if isinstance(self.data, str) else self.data
        object.__setattr__(self, "data", self.mesh.axes(data))
        if self.world is not None:
            self.world.mesh.require_same(self.mesh, "Axes", "the world", "axes")

    def __getitem__(self, names: str | tuple[str, ...]) -> Axis:
        names = (names,) if isinstance(names, str) else tuple(names)
        if len(set(names)) != len(names):
            raise ValueError(f"axes: got {names}, wanted each axis once")
        kept = tuple(name for name in names if self.mesh[name] > 1)
        sizes = tuple(int(self.mesh[name]) for name in kept)
        return Axis(kept, self.mesh.extent(kept), self.mesh, self.world, sizes)

    @property
    def sequence(self) -> Axis:
        """What splits sequences: `layout.SEQUENCE_AXES`, cp and inside of it cpi."""
        return self[data_parallel.SEQUENCE_AXES]

    def require(self, layouts: structure.Tree, who: str) -> None:
        """ValueError, naming the leaf, unless all layouts (or ArraySpecs) of a tree are on the mesh of these axes."""
        checks.require_mesh(layouts, self.mesh, who, "the axes")


# A constant of the trees that it is in, and no leaf: what is told of tokens (`model.At`) goes through layers, which
# take tensors only.
cast("Any", optree.register_pytree_node)(  # its types want a Collection
    Axes, lambda axes: ((), axes, ()), lambda axes, _: axes, namespace=torch_private.EVERY_NAMESPACE
)
