"""Two factorings of the same ranks as one mesh: attention over dp, cp, tp, its experts over edp, ep, etp."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from fmegatron.layout.mesh import Mesh

__all__ = ["Folded", "folded"]


@dataclass(frozen=True)
class Folded:
    """The common refinement of two meshes. first, second: of each of their axes, the axes of `mesh` that it is made of,
    major first; none for an axis of size 1. `axes[folded.second["ep"]]` is that axis in a step."""

    mesh: Mesh
    first: Mapping[str, tuple[str, ...]]
    second: Mapping[str, tuple[str, ...]]


def folded(first: Mesh, second: Mesh) -> Folded:
    """The mesh of fewest axes of which the axes of both meshes are joint axes, with the names of both.

    A step works on one mesh: layouts and collectives of both kinds name its axes. An axis keeps the name that it has in
    `first`, else that in `second`; a part of one of either is named after both.
    Raises ValueError where the numbers of ranks differ, where a mesh numbers its ranks in another order than its axes,
    and where boundaries of the two cross (2 x 3 and 3 x 2 ranks).

    >>> fold = folded(Mesh(dp=4, tp=2), Mesh(edp=2, ep=2, etp=2))
    >>> fold.mesh, fold.first["dp"], fold.second["etp"]
    (Mesh(edp=2, ep=2, tp=2), ('edp', 'ep'), ('tp',))
    """
    if first.size != second.size or len(first.digits) > 1 or len(second.digits) > 1:
        raise ValueError(
            f"folded: got {first} and {second}, wanted two meshes of the same ranks, each in the order of its axes; "
            "build both with Mesh(...), of as many ranks"
        )
    ends = [_ends(mesh) for mesh in (first, second)]
    cuts = sorted({1, *ends[0].values(), *ends[1].values()})
    for below, above in zip(cuts, cuts[1:], strict=False):
        if above % below:
            raise ValueError(
                f"folded: got {first} and {second}, whose axes cross: one ends after {below} ranks, one after {above}, "
                f"wanted {above} to be a multiple of {below}; choose sizes that divide each other"
            )
    parts = list(zip(cuts, cuts[1:], strict=False))[::-1]  # major first
    owners = [[_owner(mesh, found, part) for part in parts] for mesh, found in zip((first, second), ends, strict=True)]
    names = [_name(owners, i) for i in range(len(parts))]
    mesh = Mesh(**{name: above // below for name, (below, above) in zip(names, parts, strict=True)})
    made = [
        {axis: tuple(name for name, owner in zip(names, of, strict=True) if owner == axis) for axis in given.names}
        for given, of in zip((first, second), owners, strict=True)
    ]
    return Folded(mesh, MappingProxyType(made[0]), MappingProxyType(made[1]))


def _ends(mesh: Mesh) -> dict[str, int]:
    """How many ranks the axis and all below it have."""
    found, size = {}, 1
    for name in reversed(mesh.names):
        size *= int(mesh[name])
        found[name] = size
    return found


def _owner(mesh: Mesh, ends: dict[str, int], part: tuple[int, int]) -> str:
    """The axis that a part belongs to."""
    return next(name for name in mesh.names if ends[name] >= part[1] and ends[name] // mesh[name] <= part[0])


def _name(owners: list[list[str]], i: int) -> str:
    first, second = owners[0][i], owners[1][i]
    if owners[0].count(first) == 1:
        return first
    return second if owners[1].count(second) == 1 else f"{first}_{second}"
