"""Layout: how one global array lies on a mesh, with integers only."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, fields
from functools import cached_property, lru_cache
from typing import Any

import torch

from fmegatron.layout.boxes import Box, range_boxes, row_major_strides, segment_boxes
from fmegatron.layout.dtypes import dtype_from_name, dtype_name
from fmegatron.layout.mesh import Mesh
from fmegatron.layout.picture import picture_svg, picture_text
from fmegatron.layout.split import Segment, Split, nested_chunk, segments

Entry = None | str | tuple[str, ...] | Split


@dataclass(frozen=True)
class Layout:
    """Where the elements of a global array lie on a mesh.

    shape, dtype: of the global array.  spec: per dim None, an axis, a tuple of axes (major first) or a `Split`; missing
    trailing dims are None. Uneven dims are cut by torch's chunk rule, axis after axis.  unreduced: axes over which the
    value is still a pending sum.  flat: axes over which the block that is left after the dims are split is flattened
    (row-major) and cut into ranges; the local tensor is then 1-D.

    Raises ValueError for an unknown axis, an axis used twice, too many entries, parts that do not make up their dim.

    >>> layout = Layout((8192, 28672), torch.bfloat16, Mesh(pp=2, fsdp=4, tp=2), ("fsdp", "tp"))
    >>> layout
    bf16[8192@fsdp, 28672@tp] on pp2·fsdp4·tp2
    >>> layout.local_shape(3), layout.replicas, layout.boxes(3)[0].slices
    ((2048, 14336), 2, (slice(2048, 4096, None), slice(14336, 28672, None)))
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    mesh: Mesh
    spec: tuple[Entry, ...] = ()
    unreduced: tuple[str, ...] = field(default=(), kw_only=True)
    flat: tuple[str, ...] = field(default=(), kw_only=True)

    def __post_init__(self):
        put = object.__setattr__
        put(self, "shape", tuple(int(n) for n in self.shape))
        put(self, "spec", tuple(_entry(entry) for entry in self.spec))
        put(self, "unreduced", _names(self.unreduced))
        put(self, "flat", _names(self.flat))
        if not isinstance(self.mesh, Mesh):
            raise ValueError(f"layout {self.shape}: got mesh {self.mesh!r}, wanted a Mesh, e.g. Mesh(fsdp=2, tp=2)")
        if not isinstance(self.dtype, torch.dtype):
            raise ValueError(f"layout {self.shape}: got dtype {self.dtype!r}, wanted a torch.dtype")
        if any(n < 0 for n in self.shape):
            raise ValueError(f"layout: got shape {self.shape}, wanted sizes of 0 or more")
        if len(self.spec) > len(self.shape):
            raise ValueError(
                f"layout {self.shape}: got {len(self.spec)} spec entries {self.spec}, wanted at most one for each"
                f" of the {len(self.shape)} dims; remove entries or add dims"
            )
        put(self, "spec", self.spec + (None,) * (len(self.shape) - len(self.spec)))
        used: dict[str, str] = {}
        for where, names in self._uses():
            for name in names:
                if name not in self.mesh:
                    raise ValueError(
                        f"layout {self.shape}: {where} got axis {name!r}, wanted one of"
                        f" {', '.join(self.mesh.names) or '(no axes)'} of the mesh {self.mesh};"
                        " name an axis of the mesh, or add it there with size 1"
                    )
                if name in used:
                    raise ValueError(
                        f"layout {self.shape}: got axis {name!r} twice, in {used[name]} and in {where};"
                        " wanted every axis at most once: an axis can split only one dim"
                    )
                used[name] = where
        try:
            self._parts  # noqa: B018  the parts are computed here so that a wrong one is an error now
        except ValueError as error:
            raise ValueError(f"layout {self.shape}: {error}") from None

    def _uses(self):
        for dim in range(len(self.shape)):
            yield f"dim {dim}", self.axes(dim)
        yield "flat", self.flat
        yield "unreduced", self.unreduced

    def __reduce__(self):  # cached values and the hash must not travel
        return _rebuild, (self.shape, self.dtype, self.mesh, self.spec, self.unreduced, self.flat)

    @cached_property
    def _hash(self) -> int:
        return hash((self.shape, self.dtype, self.mesh, self.spec, self.unreduced, self.flat))

    def __hash__(self) -> int:
        return self._hash

    # ---- which axes do what

    def axes(self, dim: int) -> tuple[str, ...]:
        """The axes that split a dim, major first, as written (size-1 axes included)."""
        entry = self.spec[dim]
        if entry is None:
            return ()
        return entry.names if isinstance(entry, Split) else _names(entry)

    @cached_property
    def sharded(self) -> tuple[str, ...]:
        """Axes of size > 1 that split the array (by dims, then flat), in the order of the mesh."""
        used = {name for dim in range(len(self.shape)) for name in self.axes(dim)}.union(self.flat)
        return tuple(name for name in self.mesh.names if name in used and self.mesh[name] > 1)

    @cached_property
    def replicated(self) -> tuple[str, ...]:
        """Axes of size > 1 along which ranks hold the same elements with the same values, in the order of the mesh."""
        used = set(self.sharded).union(self.unreduced)
        return tuple(name for name in self.mesh.names if name not in used and self.mesh[name] > 1)

    # ---- how the dims are cut

    @cached_property
    def _parts(self) -> tuple[tuple[int, ...], ...]:
        """Per dim the sizes of its interleaved parts; one part for a plain dim."""
        return tuple(
            entry.sizes(n) if isinstance(entry, Split) else (n,) for entry, n in zip(self.spec, self.shape, strict=True)
        )

    @cached_property
    def _counts(self) -> tuple[tuple[int, ...], ...]:
        """Per dim the sizes of the axes that split it; size-1 axes dropped (they cut nothing)."""
        return tuple(self._sizes(self.axes(dim)) for dim in range(len(self.shape)))

    @cached_property
    def _flat_counts(self) -> tuple[int, ...]:
        return self._sizes(self.flat)

    def _sizes(self, names: tuple[str, ...]) -> tuple[int, ...]:
        return tuple(self.mesh[name] for name in names if self.mesh[name] > 1)

    def dim_index(self, rank: int, dim: int) -> int:
        """Position of a rank along the axes that split a dim."""
        return self.mesh.index(rank, self.axes(dim))

    def segments(self, rank: int, dim: int) -> tuple[Segment, ...]:
        """The pieces of a dim that a rank holds, before any flattening: (global start, local start, length)."""
        return segments(self._parts[dim], self._counts[dim], self.dim_index(rank, dim))

    def block_shape(self, rank: int) -> tuple[int, ...]:
        """Shape of a rank's block after the dims are split and before it is flattened."""
        found = (self.segments(rank, dim) for dim in range(len(self.shape)))
        return tuple(s[-1].local + s[-1].length if s else 0 for s in found)

    def flat_range(self, rank: int) -> tuple[int, int]:
        """(start, length) of the rank's range in its flattened block; the whole block when nothing is flattened."""
        return nested_chunk(math.prod(self.block_shape(rank)), self._flat_counts, self.mesh.index(rank, self.flat))

    # ---- what a rank holds

    def local_shape(self, rank: int) -> tuple[int, ...]:
        """Shape of the rank's local tensor."""
        return (self.flat_range(rank)[1],) if self.flat else self.block_shape(rank)

    def boxes(self, rank: int) -> tuple[Box, ...]:
        """Which global boxes the rank holds and where they lie in its contiguous local tensor. No box is empty."""
        self.mesh.check_rank(rank)
        indices = tuple(self.dim_index(rank, dim) for dim in range(len(self.shape)))
        return _boxes(self._parts, self._counts, self._flat_counts, indices, self.mesh.index(rank, self.flat))

    @cached_property
    def is_even(self) -> bool:
        """Whether all ranks have the same local shape."""
        dims_even = all(
            part % math.prod(counts) == 0
            for parts, counts in zip(self._parts, self._counts, strict=True)
            for part in parts
        )
        if not self.flat:
            return dims_even
        size, blocks = math.prod(self.shape), math.prod(math.prod(counts) for counts in self._counts)
        return size == 0 or (dims_even and size // blocks % math.prod(self._flat_counts) == 0)

    @cached_property
    def nbytes(self) -> int:
        """Bytes of the global array, once."""
        return math.prod(self.shape) * self.dtype.itemsize

    def local_nbytes(self, rank: int) -> int:
        """Bytes of the rank's local tensor."""
        return math.prod(self.local_shape(rank)) * self.dtype.itemsize

    # ---- replicas

    @cached_property
    def replicas(self) -> int:
        """How many ranks hold each element with the same value."""
        return self.mesh.extent(self.replicated)

    def replica(self, rank: int) -> int:
        """Number of this rank among those that hold the same elements."""
        return self.mesh.index(rank, self.replicated)

    def owner(self, rank: int, turn: int = 0) -> bool:
        """Whether this rank writes (or sends) its boxes: exactly one of the replicas does.

        All ranks agree without communication. `turn` moves the duty on, e.g. the number of the leaf in its tree.
        """
        return self.replica(rank) == turn % self.replicas

    # ---- other layouts

    def replace(self, **changes) -> Layout:
        """This layout with some fields changed; checked again."""
        unknown = set(changes) - {f.name for f in fields(self)}
        if unknown:
            raise ValueError(
                f"Layout.replace: got {sorted(unknown)}, wanted fields among {[f.name for f in fields(self)]}"
            )
        return Layout(**{f.name: changes.get(f.name, getattr(self, f.name)) for f in fields(self)})

    def without(self, axis: str | tuple[str, ...]) -> Layout:
        """The layout after a gather over `axis` (and after the sum, where it was unreduced): the axis is not used."""
        gone = self.mesh.axes(axis)

        def keep(names):
            return tuple(name for name in names if name not in gone)

        spec = []
        for dim, entry in enumerate(self.spec):
            left = keep(self.axes(dim))
            spec.append(Split(left, entry.parts) if isinstance(entry, Split) and left else left or None)
        return self.replace(spec=tuple(spec), flat=keep(self.flat), unreduced=keep(self.unreduced))

    # ---- for people and files

    def __repr__(self) -> str:
        dims = ", ".join(_dim_text(n, self.spec[d], self.axes(d)) for d, n in enumerate(self.shape))
        flat = f" flat@{'·'.join(self.flat)}" if self.flat else ""
        unreduced = f" unreduced@{'·'.join(self.unreduced)}" if self.unreduced else ""
        return f"{dtype_name(self.dtype)}[{dims}]{flat}{unreduced} on {self.mesh}"

    def show(self) -> str:
        """A text picture of which ranks hold which boxes."""
        return picture_text(self)

    def _repr_svg_(self) -> str:
        return picture_svg(self)

    def to_json(self) -> dict:
        """A dict of lists, strings and integers; `from_json` is its inverse."""

        def entry(e):
            if isinstance(e, Split):
                return {"axes": list(e.names), "parts": e.parts if isinstance(e.parts, int) else list(e.parts)}
            return list(e) if isinstance(e, tuple) else e

        return {
            "shape": list(self.shape),
            "dtype": dtype_name(self.dtype),
            "mesh": self.mesh.to_json(),
            "spec": [entry(e) for e in self.spec],
            "unreduced": list(self.unreduced),
            "flat": list(self.flat),
        }

    @staticmethod
    def from_json(value: dict) -> Layout:
        """The layout that `to_json` wrote."""

        def entry(e):
            if isinstance(e, dict):
                return Split(tuple(e["axes"]), e["parts"])
            return tuple(e) if isinstance(e, list) else e

        return Layout(
            tuple(value["shape"]),
            dtype_from_name(value["dtype"]),
            Mesh.from_json(value["mesh"]),
            tuple(entry(e) for e in value["spec"]),
            unreduced=tuple(value["unreduced"]),
            flat=tuple(value["flat"]),
        )


def _rebuild(shape, dtype, mesh, spec, unreduced, flat) -> Layout:
    return Layout(shape, dtype, mesh, spec, unreduced=unreduced, flat=flat)


def _names(names: str | tuple[str, ...]) -> tuple[str, ...]:
    return (names,) if isinstance(names, str) else tuple(names)


def _entry(entry: Any) -> Entry:
    """One spelling for each meaning: None, an axis, a tuple of at least two axes, or a Split over at least one axis."""
    if entry is None or isinstance(entry, str):
        return entry
    if isinstance(entry, Split):
        if not entry.names:
            return None
        names = entry.names if len(entry.names) > 1 else entry.names[0]
        return names if entry.parts == 1 else Split(names, entry.parts)
    if isinstance(entry, (tuple, list)) and all(isinstance(name, str) for name in entry):
        return None if not entry else entry[0] if len(entry) == 1 else tuple(entry)
    raise ValueError(
        f"got spec entry {entry!r}, wanted None, an axis name, a tuple of axis names, or Split(axes, parts)"
    )


def _dim_text(size: int, entry: Entry, axes: tuple[str, ...]) -> str:
    if entry is None:
        return str(size)
    if isinstance(entry, Split):
        if isinstance(entry.parts, int):
            return f"({entry.parts}×{size // entry.parts})@{'·'.join(axes)}"
        return f"({'+'.join(map(str, entry.parts))})@{'·'.join(axes)}"
    return f"{size}@{'·'.join(axes)}"


@lru_cache(maxsize=65536)
def _boxes(
    parts: tuple[tuple[int, ...], ...],
    counts: tuple[tuple[int, ...], ...],
    flat_counts: tuple[int, ...],
    indices: tuple[int, ...],
    flat_index: int,
) -> tuple[Box, ...]:
    """The boxes at one position of a layout: `indices` along the axes of each dim, `flat_index` along the flat axes."""
    per_dim = [segments(p, c, i) for p, c, i in zip(parts, counts, indices, strict=True)]
    block = tuple(s[-1].local + s[-1].length if s else 0 for s in per_dim)
    strides = row_major_strides(block)
    if not flat_counts:
        return tuple(segment_boxes(per_dim, strides, 0, (0,) * len(block), block))
    start, length = nested_chunk(math.prod(block), flat_counts, flat_index)
    return tuple(
        box
        for at, shape in range_boxes(block, start, start + length)
        for box in segment_boxes(per_dim, strides, start, at, tuple(a + n for a, n in zip(at, shape, strict=True)))
    )
