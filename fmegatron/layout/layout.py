"""Layout: the distribution of one global array over a mesh, with integers only."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import cached_property

import torch

from fmegatron.layout.boxes import Box, Shard, block_of, boxes_of, row_major_strides
from fmegatron.layout.dtypes import dtype_from_name, dtype_name
from fmegatron.layout.label import Label
from fmegatron.layout.mesh import Mesh
from fmegatron.layout.notation import Entry, entry, entry_axes, entry_from_json, entry_to_json, names, on_mesh, one_line
from fmegatron.layout.picture import picture_svg, picture_text
from fmegatron.layout.split import (
    Cut,
    Segment,
    Split,
    nested_chunk,
    overlapping_chunks,
    overlapping_indices,
    rooms,
    segments,
)

MEMORIES = ("device", "host", "host-update")


@dataclass(frozen=True)
class Layout:
    """Where the elements of a global array are on a mesh.

    shape, dtype: of the global array.  spec: per dim None, an axis, a tuple of axes (major first) or a `Split`; missing
    trailing dims are None. Uneven dims are cut by torch's chunk rule, axis after axis, or by the sizes of a `Split`
    (which is written as a plain or interleaved one where that is the same).  unreduced: axes over which the value is
    still a pending sum.  flat: axes over which the block that is left after the dims are split is flattened (row-major)
    and cut into ranges; the local tensor is then 1-D.  flat_from: the first dim that is flattened: in a stack [L, ...]
    ranges from dim 1 are ranges of each layer, and the local tensor is [L, range].  padded: where ranks do not divide,
    every local tensor has the room of the largest, so that all ranks have one shape. Behind the true elements of each
    chunk (of each interleaved part, of a range, of all pieces of a dim cut by sizes) then is padding: zeros, which are
    in no box and no file. False where all divides. A number: ranges, too, where they divide, are multiples of so many
    elements, so that no edge cuts a block of a state in 8 bits; True where they are without it.  memory: where arrays
    rest, "device", "host", or "host-update", on the host and updated there: see `step.state_specs`.

    What the dims mean, beside where elements are: layouts that differ in it alone are equal, and no file has it.  lead:
    how many leading dims count arrays (layers, experts), so that a stack of norms [L, D] is one of vectors.  beside:
    widths of the matrices that are side by side in the last dim (q, k, v), () for one; of an interleaved one its parts.

    Raises ValueError for an unknown axis, an axis used twice, too many entries, parts that do not make up their dim,
    ranges from a dim that is not there.

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
    padded: int = field(default=False, kw_only=True)
    flat_from: int = field(default=0, kw_only=True)
    memory: str = field(default="device", kw_only=True)
    lead: int = field(default=0, kw_only=True, compare=False)
    beside: tuple[int, ...] = field(default=(), kw_only=True, compare=False)

    def __post_init__(self):
        put = object.__setattr__
        put(self, "shape", tuple(int(n) for n in self.shape))
        put(self, "spec", tuple(entry(e) for e in self.spec))
        put(self, "unreduced", names(self.unreduced))
        put(self, "flat", names(self.flat))
        if not isinstance(self.mesh, Mesh):
            raise ValueError(f"layout {self.shape}: got mesh {self.mesh!r}, wanted a Mesh, e.g. Mesh(fsdp=2, tp=2)")
        if not isinstance(self.dtype, torch.dtype):
            raise ValueError(f"layout {self.shape}: got dtype {self.dtype!r}, wanted a torch.dtype")
        if self.memory not in MEMORIES:
            raise ValueError(f"layout {self.shape}: got memory={self.memory!r}, wanted one of {', '.join(MEMORIES)}")
        if any(n < 0 for n in self.shape):
            raise ValueError(f"layout: got shape {self.shape}, wanted sizes of 0 or more")
        if len(self.spec) > len(self.shape):
            raise ValueError(
                f"layout {self.shape}: got {len(self.spec)} spec entries {self.spec}, wanted at most one for each"
                f" of the {len(self.shape)} dims; remove entries or add dims"
            )
        given = self.spec + (None,) * (len(self.shape) - len(self.spec))
        put(self, "spec", tuple(on_mesh(e, self.mesh) for e in given))
        put(self, "flat", entry_axes(on_mesh(self.flat, self.mesh)))
        put(self, "unreduced", entry_axes(on_mesh(self.unreduced, self.mesh)))
        used: dict[str, str] = {}
        for where, axes in self._uses():
            for name in axes:
                if name not in self.mesh:
                    raise ValueError(
                        f"layout {self.shape}: {where}: got axis {name!r}, wanted one of"
                        f" {', '.join(self.mesh.names) or '(no axes)'} of the mesh {self.mesh};"
                        " name an axis of the mesh, or add it there with size 1"
                    )
                if name in used:
                    raise ValueError(
                        f"layout {self.shape}: got axis {name!r} twice, in {used[name]} and in {where},"
                        " wanted every axis at most once; an axis can split only one dim"
                    )
                used[name] = where
        try:
            put(self, "spec", tuple(self._canonical(e, n) for e, n in zip(given, self.shape, strict=True)))
            self.cuts  # noqa: B018  computed here so that parts that do not fit are an error now
        except ValueError as error:
            raise ValueError(f"layout {self.shape}: {error}") from None
        put(self, "flat_from", self.flat_from if self.flat else 0)
        if not 0 <= self.flat_from < max(1, len(self.shape)):
            raise ValueError(
                f"layout {self.shape}: got ranges from dim {self.flat_from} on, wanted one of its dims, or 0; leave "
                "out flat_from, or give the array another dim"
            )
        if self.padded < 0:
            raise ValueError(f"layout {self.shape}: got padded={self.padded}, wanted True, False, or a unit of ranges")
        put(self, "padded", self._unit_of_ranges)
        even = self._divides_otherwise and all(cut.equal_shares for cut in self.cuts)
        put(self, "padded", self.padded if self.padded > 1 else bool(self.padded) and not even)
        if given and isinstance(last := given[-1], Split) and not last.assigned:  # also over an axis of size 1
            put(self, "beside", last.lengths(self.shape[-1]))
        if not 0 <= self.lead <= len(self.shape):
            raise ValueError(f"layout {self.shape}: got lead={self.lead}, wanted how many of its dims count arrays")
        whole = len(self.beside) > 1 and sum(self.beside) == self.shape[-1]  # of another shape these are not the parts
        put(self, "beside", tuple(self.beside) if whole else ())

    @property
    def is_matrix(self) -> bool:
        """Whether it is a matrix, or a stack of matrices: it has two dims or more behind those that count arrays."""
        return len(self.shape) - self.lead > 1

    def _canonical(self, value: Entry, size: int) -> Entry:
        """The entry of a dim: assigned pieces with their sizes, or as the plain split that is the same."""
        found = on_mesh(value, self.mesh)
        if not (isinstance(value, Split) and value.assigned):
            return found
        cut = Cut.of(value, size, self._sizes(value.names))
        if turns := cut.equal_parts():
            return entry(Split(entry_axes(found), turns if cut.counts else 1))
        in_order = len(cut.order) == math.prod(cut.counts) and cut.order == tuple(range(len(cut.order)))
        order = () if in_order else cut.order
        return entry(Split(entry_axes(found), sizes=cut.parts, order=order))

    def _uses(self):
        for dim in range(len(self.shape)):
            yield f"dim {dim}", self.axes(dim)
        yield "flat", self.flat
        yield "unreduced", self.unreduced

    @property
    def on_host(self) -> bool:
        """Whether arrays are in host memory; with the memory "host-update" they are updated there as well."""
        return self.memory != "device"

    @property
    def _values(self) -> tuple:
        own = (self.shape, self.dtype, self.mesh, self.spec, self.unreduced, self.flat, self.padded)
        return (*own, self.flat_from, self.memory) if self.flat_from or self.memory != "device" else own

    def __reduce__(self):  # cached values and the hash must not travel
        return _rebuild, ((*self._values, 0, "device")[:9], self.lead, self.beside)

    @cached_property
    def _hash(self) -> int:
        return hash(self._values)

    def __hash__(self) -> int:
        return self._hash

    @cached_property
    def label(self) -> Label:
        """What arrays of this layout carry (`tree.place`): one object, so that two of them are compared by identity."""
        return Label(self)

    def axes(self, dim: int) -> tuple[str, ...]:
        """The axes that split a dim, major first, as written (size-1 axes included)."""
        return entry_axes(self.spec[dim])

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
    def cuts(self) -> tuple[Cut, ...]:
        """Per dim how it is cut."""
        return tuple(
            Cut.of(e, n, counts) if isinstance(e, Split) else Cut((n,), counts)
            for e, n, counts in zip(self.spec, self.shape, self.counts, strict=True)
        )

    @cached_property
    def parts(self) -> tuple[tuple[int, ...], ...]:
        """Per dim the sizes of its interleaved parts, or assigned pieces; one part for a plain dim."""
        return tuple(cut.parts for cut in self.cuts)

    @cached_property
    def counts(self) -> tuple[tuple[int, ...], ...]:
        """Per dim the sizes of the axes that split it; size-1 axes dropped (they cut nothing)."""
        return tuple(self._sizes(self.axes(dim)) for dim in range(len(self.shape)))

    @cached_property
    def flat_counts(self) -> tuple[int, ...]:
        """Sizes of the flat axes; size-1 axes dropped."""
        return self._sizes(self.flat)

    def _sizes(self, axes: tuple[str, ...]) -> tuple[int, ...]:
        return tuple(int(self.mesh[name]) for name in axes if self.mesh[name] > 1)

    def shard(self, rank: int) -> Shard:
        """Which piece of the array a rank holds: its index along the axes of each dim, then along the flat axes.

        Ranks with the same shard hold the same elements.
        """
        rank, index = self.mesh.check_rank(rank), self.mesh.index
        return tuple([index(rank, axes) if axes else 0 for axes in self._shard_axes])

    def rank_of(self, shard: Shard, replica: int = 0) -> int:
        """The rank that holds a shard as its given replica (and stands first along unreduced axes)."""
        return self.mesh.rank_at((*zip(self._shard_axes, shard, strict=True), (self.replicated, replica)))

    @cached_property
    def _shard_axes(self) -> tuple[tuple[str, ...], ...]:
        return (*(self.axes(dim) for dim in range(len(self.shape))), self.flat)

    @cached_property
    def shard_counts(self) -> tuple[int, ...]:
        """Number of different indices in each place of `shard`."""
        return (*(math.prod(counts) for counts in self.counts), math.prod(self.flat_counts))

    def segments(self, rank: int, dim: int) -> tuple[Segment, ...]:
        """The pieces of a dim that a rank holds, before any flattening: (global start, local start, length)."""
        return segments(self.cuts[dim], self.mesh.index(rank, self.axes(dim)), bool(self.padded))

    def block_shape(self, shard: Shard) -> tuple[int, ...]:
        """Shape of a shard's block after the dims are split and before it is flattened."""
        return block_of(self.cuts, shard, bool(self.padded))[1]

    # ---- what a rank holds

    def local_shape(self, rank: int) -> tuple[int, ...]:
        """Shape of the rank's local tensor, padding included."""
        shard = self.shard(rank)
        block = self.block_shape(shard)
        if not self.flat:
            return block
        size, k = math.prod(block[self.flat_from :]), self.flat_from
        if self.padded:
            return (*block[:k], rooms(size, self.flat_counts, self.padded)[-1])
        return (*block[:k], nested_chunk(size, self.flat_counts, shard[-1])[1])

    def boxes(self, rank: int) -> tuple[Box, ...]:
        """Which global boxes the rank holds and where they are in its contiguous local tensor. No box is empty."""
        return self.shard_boxes(self.shard(rank))

    def shard_boxes(self, shard: Shard) -> tuple[Box, ...]:
        """The boxes of the ranks that hold a shard."""
        return boxes_of(self.cuts, self.flat_counts, shard, self.padded, self.flat_from)

    def overlapping(self, start: Sequence[int], stop: Sequence[int]) -> Iterator[tuple[Shard, list[Box]]]:
        """The shards that hold something of the global indices [start, stop), and what: boxes in their local storage.

        Costs what it returns (with flat axes: at most one look at each range between the first and the last).
        """
        for shard in self.candidates(start, stop):
            found = self.intersection(shard, start, stop)
            if found:
                yield shard, found

    def intersection(self, shard: Shard, start: Sequence[int], stop: Sequence[int]) -> list[Box]:
        """What a shard holds of the global indices [start, stop)."""
        return [box for b in self.shard_boxes(shard) if (box := b.intersect(start, stop))]

    def candidates(self, start: Sequence[int], stop: Sequence[int]) -> Iterator[Shard]:
        """The shards that hold something of [start, stop); with flat axes a few may turn out to hold nothing of it."""
        per_dim = []
        for cut, lo, hi in zip(self.cuts, start, stop, strict=True):
            per_dim.append(overlapping_indices(cut, lo, hi, bool(self.padded)))
        for indices in itertools.product(*per_dim):
            for flat_index in self._flat_indices(indices, start, stop):
                yield (*indices, flat_index)

    def _flat_indices(self, indices: tuple[int, ...], start: Sequence[int], stop: Sequence[int]) -> list[int]:
        """Flat ranges of a block that may hold something of [start, stop)."""
        if not self.flat_counts:
            return [0]
        per_dim, block = block_of(self.cuts, indices, bool(self.padded))
        size = math.prod(block[self.flat_from :])
        strides = [0] * self.flat_from + list(row_major_strides(block[self.flat_from :]))
        first = last = 0
        for found, stride, lo, hi in zip(per_dim, strides, start, stop, strict=True):
            inside = [s for s in found if s.start < hi and s.start + s.length > lo]
            if not inside:
                return []
            a, z = inside[0], inside[-1]
            first += (a.local + max(0, lo - a.start)) * stride
            last += (z.local + min(z.length, hi - z.start) - 1) * stride
        return [i for i, _, _ in overlapping_chunks(size, self.flat_counts, first, last + 1, self.padded)]

    @property
    def is_even(self) -> bool:
        """Whether all ranks have the same local shape, by division or by padding."""
        return bool(self.padded) or (self._divides_otherwise and all(cut.equal_shares for cut in self.cuts))

    @property
    def is_even_otherwise(self) -> bool:
        """Whether ranks that hold equal pieces of the dims that are assigned (stages of a pipeline) have one shape."""
        return bool(self.padded) or self._divides_otherwise

    @cached_property
    def assigned(self) -> tuple[int, ...]:
        """The dims that are assigned in pieces of sizes or an order of their own (`Split`)."""
        return tuple(dim for dim, cut in enumerate(self.cuts) if cut.order)

    @property
    def divides(self) -> bool:
        """Whether all ranks hold equally many elements, without padding, and no dim is assigned in pieces."""
        return not self.assigned and self._divides_otherwise

    @cached_property
    def _divides_otherwise(self) -> bool:
        """Whether ranks that hold equal pieces of the dims that are assigned hold equally many elements."""
        if self.padded > 1:
            return False
        flat = self.flat_from if self.flat else len(self.cuts)
        # Of nothing all ranges are as long, however its dims are cut.
        cuts = self.cuts[:flat] if 0 in self.shape[flat:] else self.cuts
        if any(part % math.prod(cut.counts) for cut in cuts if not cut.order for part in cut.parts):
            return False
        return not self.flat or all(size % math.prod(self.flat_counts) == 0 for size in self._blocks)

    @property
    def _unit_of_ranges(self) -> int:
        """What is given as `padded`; a unit only where it makes other ranges."""
        counts = self.flat_counts
        if self.padded > 1 and all(rooms(n, counts, self.padded)[1:] == rooms(n, counts)[1:] for n in self._blocks):
            return True
        return self.padded

    @cached_property
    def _blocks(self) -> tuple[int, ...]:
        """How many elements are flattened and cut into ranges, if any: one number but for assigned dims."""
        lengths = [
            {cut.length(0, bool(self.padded))} if self.padded or not cut.order else {*cut.shares().values()}
            for cut in self.cuts[self.flat_from :]
        ]
        return tuple(sorted({math.prod(block) for block in itertools.product(*lengths)}))

    @cached_property
    def fullest(self) -> int:
        """The rank with the largest local tensor; the first of several, 0 where no dim is assigned in pieces."""
        most = (max(shares, key=shares.__getitem__, default=0) for shares in (cut.shares() for cut in self.cuts))
        return self.rank_of((*most, 0)) if self.assigned else 0

    @cached_property
    def padding_axes(self) -> tuple[str, ...]:
        """Axes along which some ranks have padding where others have elements, in the order of the mesh."""
        if not self.padded:
            return ()
        cuts = [(self.axes(d), cut.counts, cut.parts, 1) for d, cut in enumerate(self.cuts) if not cut.order]
        found = {name for d, cut in enumerate(self.cuts) if not cut.equal_shares for name in self.axes(d)}
        for axes, counts, parts, unit in [*cuts, (self.flat, self.flat_counts, self._blocks, self.padded)]:
            big = [name for name in axes if self.mesh[name] > 1]
            for room in [rooms(n, counts, unit) for n in parts]:
                found.update(name for i, name in enumerate(big) if room[i] != room[i + 1] * counts[i])
        return tuple(name for name in self.mesh.names if name in found and self.mesh[name] > 1)

    @cached_property
    def nbytes(self) -> int:
        """Bytes of the global array, once; without padding."""
        return math.prod(self.shape) * self.dtype.itemsize

    def local_nbytes(self, rank: int) -> int:
        """Bytes of the rank's local tensor, padding included."""
        return math.prod(self.local_shape(rank)) * self.dtype.itemsize

    @cached_property
    def most_nbytes(self) -> int:
        """Bytes of the largest local tensor."""
        return self.local_nbytes(self.fullest)

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
        """This layout with some fields changed; checked again. Of another number of dims `lead` is 0 if not given."""
        unknown = set(changes) - {f.name for f in fields(self)}
        if unknown:
            raise ValueError(
                f"Layout.replace: got {sorted(unknown)}, wanted fields among {[f.name for f in fields(self)]}"
            )
        if len(changes.get("shape", self.shape)) != len(self.shape):
            changes = {"lead": 0, **changes}
        return Layout(**{f.name: changes.get(f.name, getattr(self, f.name)) for f in fields(self)})

    def meaning(self, other: Layout) -> Layout:
        """This layout; where it states nothing of what its dims mean, and one of the same shape does, with that."""
        if self.lead or self.beside or self.shape != other.shape or not (other.lead or other.beside):
            return self
        return self.replace(lead=other.lead, beside=other.beside)

    def without(self, axis: str | tuple[str, ...]) -> Layout:
        """The layout after a gather over `axis` (and after the sum, where it was unreduced): the axis is not used."""
        gone = self.mesh.axes(axis)

        def keep(axes):
            return tuple(name for name in axes if name not in gone)

        spec = []
        for dim, e in enumerate(self.spec):
            left = keep(entry_axes(e))
            if isinstance(e, Split) and e.assigned and left:
                e = replace(e, order=tuple(self._index(i, e.names, left) for i in self.cuts[dim].order))
            spec.append(e.over(left) if isinstance(e, Split) and left else left)
        return self.replace(spec=tuple(spec), flat=keep(self.flat), unreduced=keep(self.unreduced))

    def _index(self, index: int, axes: tuple[str, ...], kept: tuple[str, ...]) -> int:
        """The index along the axes that are kept, of a joint index along more."""
        at = {}
        for name in reversed(axes):
            index, at[name] = divmod(index, int(self.mesh[name]))
        joint = 0
        for name in kept:
            joint = joint * int(self.mesh[name]) + at[name]
        return joint

    # ---- for people and files

    def __repr__(self) -> str:
        return one_line(self)

    def show(self) -> str:
        """A text picture of which ranks hold which boxes."""
        return picture_text(self)

    def _repr_svg_(self) -> str:
        return picture_svg(self)

    def to_json(self) -> dict:
        """A dict of lists, strings and integers; `from_json` is its inverse, but for the memory, which no file has."""
        return {
            "shape": list(self.shape),
            "dtype": dtype_name(self.dtype),
            "mesh": self.mesh.to_json(),
            "spec": [entry_to_json(e) for e in self.spec],
            "unreduced": list(self.unreduced),
            "flat": list(self.flat),
            **({"padded": self.padded} if self.padded else {}),
            **({"flat_from": self.flat_from} if self.flat_from else {}),
        }

    @staticmethod
    def from_json(value: dict) -> Layout:
        """The layout that `to_json` wrote."""
        spec = tuple(entry_from_json(e) for e in value["spec"])
        shape, dtype, mesh = tuple(value["shape"]), dtype_from_name(value["dtype"]), Mesh.from_json(value["mesh"])
        axes = {"unreduced": tuple(value["unreduced"]), "flat": tuple(value["flat"])}
        how = {name: value[name] for name in ("padded", "flat_from") if name in value}
        return Layout(shape, dtype, mesh, spec, **axes, **how)


def _rebuild(values: tuple, lead: int, beside: tuple[int, ...]) -> Layout:
    shape, dtype, mesh, spec, unreduced, flat, padded, flat_from, memory = values
    how = {"padded": padded, "flat_from": flat_from, "memory": memory, "lead": lead, "beside": beside}
    return Layout(shape, dtype, mesh, spec, unreduced=unreduced, flat=flat, **how)
