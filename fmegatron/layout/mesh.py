"""Mesh: named axes over a number of ranks, with integers only: no device, no process group, no rank of its own."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property

from fmegatron.layout.rank_counts import Along, Told, ranks_along

# The field's names, which every mesh has, with size 1 at least; cpi: the inner axis of cp, where that has two levels.
STANDARD_AXES = ("pp", "dp", "fsdp", "cp", "cpi", "ep", "tp")


@dataclass(frozen=True, init=False)
class Mesh:
    """Named axes, major to minor in rank number: in `Mesh(dp=2, tp=4)` ranks 0..3 are one tp group.

    A mesh is a value: hashable, comparable, picklable, the same on every rank. One program text serves all meshes: a
    name of `STANDARD_AXES` that a mesh lacks is an axis of size 1 everywhere (layouts, rules, strategies, axes of
    collectives). An axis of another name is given size 1 where it is not wanted, so that a misspelled one is an error.
    Raises ValueError for a size below 1.

    >>> mesh = Mesh(dp=2, fsdp=2, tp=2)
    >>> print(mesh, mesh.size, mesh["tp"], mesh.coordinates(5))
    dp2·fsdp2·tp2 8 2 {'dp': 1, 'fsdp': 0, 'tp': 1}
    >>> mesh.group(5, "dp"), mesh.group(5, ("dp", "fsdp"))
    ((1, 5), (1, 3, 5, 7))
    """

    names: tuple[str, ...]
    sizes: tuple[int, ...]
    # How the row-major position over `sizes` becomes a rank: digits of (size, stride), major to minor. One digit
    # (world, 1) when the position is the rank; more only in a view that permutes axes.
    digits: tuple[tuple[int, int], ...]

    def __init__(self, *unnamed: object, **axes: int):
        if unnamed:
            raise ValueError(
                f"Mesh: got {', '.join(map(repr, unnamed))} without a name, wanted sizes of axes by name; "
                "Mesh(dp=2, fsdp=4) has 8 ranks, and no devices"
            )
        for name, size in axes.items():
            if not isinstance(size, int) or isinstance(size, bool) or size < 1:
                raise ValueError(f"mesh axis {name!r}: got size {size!r}, wanted a whole number of at least 1")
        sizes = tuple(map(int, axes.values()))
        self._set(tuple(axes), sizes, ((math.prod(sizes), 1),))

    def _set(self, names, sizes, digits) -> None:
        object.__setattr__(self, "names", names)
        object.__setattr__(self, "sizes", sizes)
        object.__setattr__(self, "digits", digits)

    def __reduce__(self):  # a cached hash must not travel: hashes of strings differ between processes
        return _rebuild, (self.names, self.sizes, self.digits)

    @cached_property
    def _hash(self) -> int:
        return hash((self.names, self.sizes, self.digits))

    def __hash__(self) -> int:
        return self._hash

    @cached_property
    def size(self) -> int:
        """Number of ranks (the world)."""
        return self.extent(self.names)

    @cached_property
    def _ranks(self) -> int:
        """`size`, which knows nothing: for the mesh's own arithmetic."""
        return math.prod(self.sizes)

    @cached_property
    def _strides(self) -> dict[str, int]:
        strides, stride = {}, 1
        for name, size in zip(reversed(self.names), reversed(self.sizes), strict=True):
            strides[name] = stride
            stride *= size
        return strides

    @cached_property
    def _size_of(self) -> dict[str, int]:
        return dict(zip(self.names, self.sizes, strict=True))

    @cached_property
    def _count_of(self) -> dict[str, int]:
        """The sizes of axes, that know that they are numbers of ranks."""
        return {name: ranks_along((self._along[name],), (size,)) for name, size in self._size_of.items()}

    @cached_property
    def _along(self) -> dict[str, Along]:
        return {name: Along(name) for name in self.names}

    @property
    def told(self) -> set[Told]:
        """Lines that asked for numbers of ranks of this mesh as plain numbers, or compared them (`rank_counts`)."""
        return {one for axis in self._along.values() for one in axis.told}

    def __contains__(self, axis: object) -> bool:
        return axis in self._size_of

    def __getitem__(self, axis: str) -> int:
        """Size of an axis, 1 for a standard one that the mesh lacks. Raises ValueError for an unknown one.

        It knows that it is the number of ranks along the axis, as do products and quotients of it (`rank_counts`), so
        that a check of a step knows a division by it. `int(mesh["dp"])` knows nothing: for a file of `torch.save` that
        `torch.load` is to open with weights_only=True.
        """
        try:
            return self._count_of[axis]
        except (KeyError, TypeError):
            if axis in STANDARD_AXES:
                return 1
            raise ValueError(
                f"got mesh axis {axis!r}, wanted one of {', '.join(self.names) or '(no axes)'} of the mesh {self};"
                f" name an axis that it has, or build the mesh with it, e.g. Mesh(..., {axis}=1)"
            ) from None

    def axes(self, axes: str | Iterable[str]) -> tuple[str, ...]:
        """Those of `axes` that the mesh has, as a tuple. Raises ValueError for one that is unknown or named twice."""
        names = (axes,) if isinstance(axes, str) else tuple(axes)
        for i, name in enumerate(names):
            self[name]
            if name in names[:i]:
                raise ValueError(f"mesh: got axis {name!r} twice in {names}, wanted every axis once")
        return tuple(name for name in names if name in self._size_of)

    def extent(self, axes: str | Iterable[str]) -> int:
        """Number of positions along one axis or joint axes, which knows that it is that, as the size of one does."""
        names = (axes,) if isinstance(axes, str) else tuple(axes)
        # Not kept: what is traced with the mesh watches what it holds, and would be traced again.
        mine = [name for name in names if (self._size_of.get(name) or self[name]) > 1]
        return ranks_along([self._along[n] for n in mine], [self._size_of[n] for n in mine])

    def check_rank(self, rank: int) -> int:
        """`rank`, or ValueError when the mesh has no such rank."""
        if not 0 <= rank < self._ranks:
            raise ValueError(f"got rank {rank}, wanted 0 to {self.size - 1}: the mesh {self} has {self.size} ranks")
        return rank

    def _position(self, rank: int) -> int:
        """Row-major position over `sizes` of a rank."""
        self.check_rank(rank)
        if len(self.digits) == 1:
            return rank
        position = 0
        for size, stride in self.digits:
            position = position * size + rank // stride % size
        return position

    def _rank_at(self, position: int) -> int:
        """Rank at a row-major position over `sizes`."""
        if len(self.digits) == 1:
            return position
        rank = 0
        for size, stride in reversed(self.digits):
            position, digit = divmod(position, size)
            rank += digit * stride
        return rank

    def coordinates(self, rank: int) -> dict[str, int]:
        """Position of a rank along every axis."""
        position = self._position(rank)
        return {name: position // self._strides[name] % size for name, size in self._size_of.items()}

    def rank(self, **coordinates: int) -> int:
        """Rank at the given coordinates; axes that are not named are at 0. Raises ValueError outside the mesh."""
        position = 0
        for name, i in coordinates.items():
            if not 0 <= i < self[name]:
                raise ValueError(f"got {name}={i}, wanted 0 to {self[name] - 1} on the mesh {self}")
            position += i * self._strides.get(name, 0)
        return self._rank_at(position)

    def index(self, rank: int, axes: str | Iterable[str]) -> int:
        """Position of a rank along one axis, or along the joint axes (major first)."""
        position, index = self._position(rank), 0
        for name in (axes,) if isinstance(axes, str) else axes:
            size = self._size_of.get(name) or int(self[name])
            index = index * size + position // self._strides.get(name, 1) % size
        return index

    def rank_at(self, places: Iterable[tuple[tuple[str, ...], int]]) -> int:
        """The rank at (axes, joint index) pairs of different axes; it is at 0 along the axes that are not named."""
        position = 0
        for axes, index in places:
            for name in reversed(axes):
                index, digit = divmod(index, int(self[name]))
                position += digit * self._strides.get(name, 0)
        return self._rank_at(position)

    def moved(self, rank: int, axes: str | Iterable[str], index: int) -> int:
        """The rank that differs from `rank` only in standing at `index` along the (joint) axes."""
        position = self._position(rank)
        for name in reversed((axes,) if isinstance(axes, str) else tuple(axes)):
            size, stride = int(self[name]), self._strides.get(name, 1)
            index, digit = divmod(index, size)
            position += (digit - position // stride % size) * stride
        return self._rank_at(position)

    def group(self, rank: int, axes: str | Iterable[str]) -> tuple[int, ...]:
        """The ranks that differ from `rank` only in these axes, in the order of their (joint) index."""
        names = self.axes(axes)
        return tuple(self.moved(rank, names, i) for i in range(self.extent(names)))

    def groups(self, axes: str | Iterable[str]) -> tuple[tuple[int, ...], ...]:
        """All groups over these axes; every rank is in exactly one. Ordered by their first rank."""
        names = self.axes(axes)
        first = [rank for rank in range(self.size) if self.index(rank, names) == 0]
        return tuple(self.group(rank, names) for rank in first)

    def view(self, *, order: Iterable[str] | None = None, **axes: int) -> Mesh:
        """Another naming of the same ranks, e.g. experts folded over dp·cp·tp.

        order: all old axes, permuted before they are regrouped into the new ones (default: as they stand).
        Raises ValueError when the new sizes do not multiply to the number of ranks.

        >>> Mesh(dp=4, tp=2).view(ep=4, etp=2).group(0, "ep")
        (0, 2, 4, 6)
        >>> Mesh(dp=2, tp=2).view(order=("tp", "dp"), ep=4).group(0, "ep")
        (0, 2, 1, 3)
        """
        view = Mesh(**axes)
        if view.size != self.size:
            raise ValueError(
                f"view {view}: got {view.size} ranks, wanted the {self.size} of the mesh {self};"
                f" choose sizes whose product is {self.size}"
            )
        digits = self.digits
        if order is not None:
            order = self.axes(order)
            if len(order) != len(self.names):
                raise ValueError(f"view order: got {order}, wanted every one of {self.names} once")
            of_axis = _digits_of_axes(self)
            digits = _merge(tuple(digit for name in order for digit in of_axis[name]))
        view._set(view.names, view.sizes, digits)
        return view

    @cached_property
    def fingerprint(self) -> str:
        """The axes of more than one rank, and the order of the ranks along them: "Mesh(dp=2, tp=2)".

        Two meshes give every rank the same place exactly where these are equal; axes of size 1 make no difference.
        """
        large = {name: size for name, size in self._size_of.items() if size > 1}
        return repr(_rebuild(tuple(large), tuple(large.values()), self.digits))

    def require_same(self, other: Mesh, who: str, mine: str, others: str) -> None:
        """ValueError unless `other` gives every rank the same place, else ranks would use other shards than they
        hold. who: what was called; mine, others: what is on the two meshes.
        """
        if self.fingerprint != other.fingerprint:
            raise ValueError(
                f"{who}: got {others} of the mesh {other}, wanted {self}, the mesh of {mine}; make both of one Mesh"
            )

    def __str__(self) -> str:
        return "·".join(f"{name}{size}" for name, size in self._size_of.items()) or "one rank"

    def __repr__(self) -> str:
        axes = ", ".join(f"{name}={size}" for name, size in self._size_of.items())
        return f"Mesh({axes})" if len(self.digits) == 1 else f"Mesh({axes}; ranks by {self.digits})"

    def to_json(self) -> dict:
        """A dict of lists, strings and integers; `from_json` is its inverse."""
        return {"names": list(self.names), "sizes": list(self.sizes), "digits": [list(d) for d in self.digits]}

    @staticmethod
    def from_json(value: dict) -> Mesh:
        """The mesh that `to_json` wrote."""
        digits = tuple((size, stride) for size, stride in value["digits"])
        return _rebuild(tuple(value["names"]), tuple(value["sizes"]), digits)


def _rebuild(names: tuple[str, ...], sizes: tuple[int, ...], digits: tuple[tuple[int, int], ...]) -> Mesh:
    mesh = Mesh(**dict(zip(names, sizes, strict=True)))
    assert math.prod(size for size, _ in digits) == mesh.size, (names, sizes, digits)
    mesh._set(names, sizes, digits)
    return mesh


def _merge(digits: tuple[tuple[int, int], ...]) -> tuple[tuple[int, int], ...]:
    """The same mixed-radix number with as few digits as possible."""
    merged: list[tuple[int, int]] = []
    for size, stride in digits:
        if size == 1:
            continue
        if merged and merged[-1][1] == size * stride:
            merged[-1] = (merged[-1][0] * size, stride)
        else:
            merged.append((size, stride))
    return tuple(merged) or ((1, 1),)


def _digits_of_axes(mesh: Mesh) -> dict[str, list[tuple[int, int]]]:
    """The rank digits that each axis is made of; ValueError when an axis cuts a digit in no equal parts."""
    left, result = list(mesh.digits), {}
    for name, want in zip(reversed(mesh.names), reversed(mesh.sizes), strict=True):
        result[name] = []
        while want > 1:
            size, stride = left.pop()
            take = math.gcd(size, want)
            if take == 1 and size > 1 or take not in (size, want):
                raise ValueError(
                    f"view order: got axis {name!r} of the mesh {mesh}, wanted a multiple of the axes it was folded"
                    " from; permute the original mesh instead"
                )
            result[name].insert(0, (take, stride))
            want //= take
            if take < size:
                left.append((size // take, stride * take))
    return result
