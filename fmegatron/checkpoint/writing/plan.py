"""The write plan: boxes to chunks to files to writers, by integer arithmetic that gives the same result on every rank.

Three homes for a leaf:
- `grid`: an array in global shape, with a chunk grid that no writer's box crosses. Chunks of one box are together in
  files (shards), so every file has one writer. The rule for nearly everything: even, uneven, interleaved, flattened
  along full rows, replicated, empty. Equal leaves that differ in one number of their path share one (stacks.py).
- `packed`: small, and one of very many or without such a grid; a few bytes in the one file of its owner.
- `piece`: no such grid is coarse enough (a flattened range that ends inside a row), or fine enough (a cut into prime
  numbers of rows). The writer's local storage, verbatim, with the boxes that state which elements are where; above
  64 MiB in several arrays.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, replace
from functools import cache

from fmegatron.checkpoint.files.format import (
    CHUNK_BYTES,
    MOST_CHUNK_BYTES,
    MOST_SMALL,
    SHARD_BYTES,
    SMALL_BYTES,
    Array,
    array_name,
    band_shape,
    dtype_text,
)
from fmegatron.checkpoint.writing.stacks import Entry, stacked
from fmegatron.files import strict_json
from fmegatron.layout import Box, Layout, Split, split
from fmegatron.layout.split import chunk

_FINEST_BYTES = 4 << 10  # no chunk below a page
_SENSIBLE_BYTES = 1 << 20  # a chunk of this size is never refused as too fine
_SPLIT_BYTES = 1 << 20  # a chunk of this size may be cut in two along its last dim,
_SPLIT_ROW_BYTES = 1 << 10  # if its rows have this size
_COLUMN_PARTS = 4  # and is smaller so many times: it is copied before it is written
_MOST_SMALL_CHUNKS = 64  # of a small leaf that has an array of its own
_MOST_PART, _MOST_NAME = 128, 512  # characters of the name of a small leaf's array, and of a part of it
_MOST_DIVISORS_TRIED = 4096
_MOST_SLOTS = 1 << 16  # chunks of a file
_LEAST_FILES = 4  # of what a rank holds: so many are written at a time; to object stores out of memory
_LEAST_BYTES = 16 << 20  # files are not made smaller than this for it
_SPREAD = 4  # files of a replica, so that each writes about as much, of 8 MiB at least,
_MANY_RANKS = 256  # where leaves whose paths differ in one word share arrays, too,
_SOME_RANKS = 8  # and where they have so little on each of so many
_SPREAD_RANKS = 1024  # unless ranks are so many that the number of files counts more


@dataclass(frozen=True, slots=True)
class LeafPlan:
    """How one leaf is stored; the same on every rank.

    home: "grid", "packed" or "piece".  chunk: shape, for "grid".  shard: as of the array, see `Array`.  stack: name of
    the array that holds the leaf with others, which of them it is, how many they are; None: it has one of its own.
    turn: the replica that writes it, if not "grid".  line: of what its replicas write, byte after byte, where this
    array's files begin, the size of one, and the end of all: each replica writes those whose middle is in its part.
    """

    path: str
    layout: Layout
    home: str
    chunk: tuple[int, ...] = ()
    shard: tuple[int, ...] = ()
    stack: tuple[str, int, int] | None = None
    turn: int = 0
    line: tuple[int, int, int] = (0, 0, 1)

    @property
    def at(self) -> tuple[int, ...]:
        """Where the array is a stack, the leading index of this leaf."""
        return () if self.stack is None else (self.stack[1],)


def grid_array(leaf: LeafPlan) -> Array:
    """The array in global shape of a leaf that has one, or is in one with others."""
    layout, band, lead = leaf.layout, band_shape(leaf.chunk, leaf.layout.dtype.itemsize), len(leaf.at) * (1,)
    n, dtype, chunk = (leaf.stack or ())[2:], dtype_text(layout.dtype), (*lead, *leaf.chunk)
    name = array_name(leaf.path) if leaf.stack is None else leaf.stack[0]
    return Array(name, (*n, *layout.shape), dtype, chunk, (*lead, *band), shard=leaf.shard)


def _key(leaf: LeafPlan) -> Hashable:
    """The same for the leaves of one array, and for no others: it needs no name."""
    return leaf.path if leaf.stack is None else leaf.stack[:1]


@strict_json.no_collection()
def plan(paths: Sequence[str], layouts: Sequence[Layout]) -> tuple[LeafPlan, ...]:
    """The plan of a full tree. Costs a few integers per leaf, whatever the number of ranks."""
    unit_of = cache(cut_unit)
    return in_files(homes(paths, layouts, unit_of), lambda leaf: unit_of(leaf.layout))


def homes(
    paths: Sequence[str], layouts: Sequence[Layout], unit_of: Callable[[Layout], tuple[int, ...]] | None = None
) -> list[LeafPlan]:
    """Homes and chunks of a full tree, for `in_files`. unit_of: `cut_unit`, which may be remembered."""
    unit_of = unit_of or cut_unit
    pack = sum(is_small(layout.shape, layout.nbytes) for layout in layouts) > MOST_SMALL
    same: dict[Layout, Layout] = {}  # layers have equal ones: what follows from a layout is computed once
    known: dict[Layout, tuple[str, tuple[int, ...]]] = {}
    found = []
    for path, x in zip(paths, (same.setdefault(x, x) for x in layouts), strict=True):
        if _is_packed(path, x, pack):
            home = "packed", ()  # its cuts need not be known
        elif (home := known.get(x)) is None:
            home = known[x] = home_of(x.shape, x.dtype.itemsize, unit_of(x), x.most_nbytes, x.mesh.size)
        found.append(LeafPlan(path, x, *home))
    return found


def in_files(
    plans: Sequence[LeafPlan],
    unit_of: Callable[[LeafPlan], tuple[int, ...]] = lambda leaf: cut_unit(leaf.layout),
    most: int = SHARD_BYTES,
) -> tuple[LeafPlan, ...]:
    """The plan with stacks, files and their writers.

    The files of all leaves with the same replicas are one line of bytes, cut evenly between the replicas where
    files end. So these are smaller where replicas are many.

    Args:
        plans: homes and chunks of all leaves that are saved together.
        unit_of: the `cut_unit` of a leaf, or its shape where one process writes all.
        most: bytes of a file, one chunk at least.
    """
    placed, lines = _with_stacks(plans), dict[tuple[int, tuple[str, ...]], list[int]]()
    for i, p in enumerate(placed):
        if p.home != "packed" and p.layout.nbytes:
            lines.setdefault((p.layout.replicas, p.layout.replicated), []).append(i)
    for line in lines.values():
        found = [placed[i] for i in line]
        shards = _shards(found, unit_of, most)
        for i, p, (turn, place) in zip(line, found, _turns(found, shards), strict=True):
            # `replace` would take most of the time of a plan.
            placed[i] = LeafPlan(p.path, p.layout, p.home, p.chunk, shards.get(_key(p), ()), p.stack, turn, place)
    return tuple(placed)


def _with_stacks(plans: Sequence[LeafPlan]) -> list[LeafPlan]:
    """Equal leaves whose paths differ in one part share an array."""
    grids = [i for i, p in enumerate(plans) if p.home == "grid"]
    entries = [
        Entry(p.path, (p.layout, p.chunk) if p.layout.nbytes else None, _joins(p.layout))
        for p in map(plans.__getitem__, grids)
    ]
    found = list(plans)
    for n, stack in stacked(entries).items():
        found[grids[n]] = replace(plans[grids[n]], stack=stack)
    return found


def _shards(
    plans: Sequence[LeafPlan], unit_of: Callable[[LeafPlan], tuple[int, ...]], most: int
) -> dict[Hashable, tuple[int, ...]]:
    """What is in a file, for each array of the leaves of a line."""
    layout, counts = plans[0].layout, Counter(p.layout for p in plans)
    held = sum(count * each.most_nbytes for each, count in counts.items())
    limit = min(most, max(_LEAST_BYTES, held // _LEAST_FILES))
    if layout.replicas > 1 and layout.mesh.size <= _SPREAD_RANKS:
        limit = min(limit, max(_LEAST_BYTES // 2, held // (_SPREAD * layout.replicas)))
    found: dict[Hashable, tuple[int, ...]] = {}
    for p in plans:
        if p.home == "grid" and (key := _key(p)) not in found:
            found[key] = _shard(p, unit_of(p), limit)
    return found


def _turns(
    plans: Sequence[LeafPlan], shards: dict[Hashable, tuple[int, ...]]
) -> list[tuple[int, tuple[int, int, int]]]:
    """Who writes the leaves of a line, (turn, line) of each: replica after replica as much of it."""
    replicas, total = int(plans[0].layout.replicas), 0
    if replicas == 1:
        return [(p.turn, p.line) for p in plans]
    places: dict[Hashable, tuple[int, int]] = {}  # by array, where its files begin, and the size of one
    for p in plans:
        if (key := _key(p)) not in places:
            count, size = _files(p, shards[key]) if p.home == "grid" else (1, p.layout.most_nbytes)
            places[key] = total, size
            total += count * size
    found = []
    for p in plans:
        start, size = places[_key(p)]
        turn = 0 if p.home == "grid" else _replica(start, size, replicas, total)
        found.append((turn, (start, size, total)))
    return found


def _grid(leaf: LeafPlan) -> tuple[int, ...]:
    """Chunks along each dim of the leaf's array."""
    return (*(leaf.stack or ())[2:], *(-(-n // c) for n, c in zip(leaf.layout.shape, leaf.chunk, strict=True)))


def _files(leaf: LeafPlan, shard: tuple[int, ...]) -> tuple[int, int]:
    """(number of the files of a leaf's array that a rank holds, bytes of one)."""
    grid, lead, layout = _grid(leaf), len(leaf.at), leaf.layout
    count = -(-grid[0] // (shard[0] if shard else 1)) if lead else 1
    if layout.flat or layout.padded or any(len(parts) > 1 for parts in layout.parts):
        boxes = layout.boxes(layout.fullest)
        count *= sum(math.prod(map(len, ranges)) for ranges in _file_ranges(boxes, leaf.chunk, shard[lead:]))
    else:
        span = _span(leaf.chunk, shard[lead:])
        count *= math.prod(-(-n // c) for n, c in zip(layout.local_shape(layout.fullest), span, strict=True))
    chunks = math.prod(min(k, n) for k, n in zip(shard, grid, strict=bool(shard)))
    return count, chunks * math.prod(leaf.chunk) * layout.dtype.itemsize


def _joins(layout: Layout) -> bool:
    """Whether a leaf shares an array with one whose path differs in one word: each rank writes a little of it."""
    ranks = layout.mesh.size
    return ranks >= _MANY_RANKS or (ranks >= _SOME_RANKS and layout.most_nbytes <= SMALL_BYTES)


def _replica(start: int, size: int, replicas: int, total: int) -> int:
    """Who writes `size` bytes that begin at `start` of a line of `total` bytes. Of uneven boxes some end after it."""
    return min((2 * start + size) * replicas // (2 * total), replicas - 1)


def _shard(leaf: LeafPlan, unit: tuple[int, ...], most: int) -> tuple[int, ...]:
    """Chunks of a file, for each dim of the leaf's array: those between two cuts, or a part of them from dim 0 on."""
    grid, lead, nbytes = _grid(leaf), len(leaf.at), math.prod(leaf.chunk) * leaf.layout.dtype.itemsize
    if math.prod(grid) == 1:
        return ()
    cut = [False] * lead + [u < n for u, n in zip(unit, leaf.layout.shape, strict=True)]
    inner = (u // c for u, c in zip(unit, leaf.chunk, strict=True))
    k = [u if cuts else n for u, n, cuts in zip((*grid[:lead], *inner), grid, cut, strict=True)]
    for d, cuts in enumerate(cut):
        parts = max(-(-math.prod(k) * nbytes // most), -(-math.prod(k) // _MOST_SLOTS))
        if parts > 1:
            tried = range(parts, min(k[d], parts + _MOST_DIVISORS_TRIED if cuts else 2 * parts) + 1)
            parts = next((n for n in tried if k[d] % n == 0), k[d] if cuts else parts)
            k[d] = max(1, -(-k[d] // parts))
    return tuple(k) if math.prod(k) > 1 else ()


def _file_ranges(boxes: Sequence[Box], chunk: tuple[int, ...], shard: tuple[int, ...]) -> list[list[range]]:
    """For each box, per dim of the leaf, the numbers of the files that it touches. shard: (): one chunk each."""
    return [_chunk_ranges(box, _span(chunk, shard)) for box in boxes]


def _span(chunk: tuple[int, ...], shard: tuple[int, ...]) -> tuple[int, ...]:
    """Elements of a file along each dim."""
    return tuple(c * k for c, k in zip(chunk, shard, strict=True)) if shard else chunk


def boxes_to_write(plans: Sequence[LeafPlan], rank: int) -> list[tuple[Box, ...]]:
    """Of each leaf the boxes of the local tensor, if the rank writes all of it.

    None where another replica does, or where replicas share a `grid` leaf: see `chunks_to_write`.
    """
    replicas, boxes = dict[Layout, int](), dict[Layout, tuple[Box, ...]]()  # thousands of leaves share a few
    found = []
    for p in plans:
        layout, mine = p.layout, ()
        if p.home != "grid" or layout.replicas == 1:
            if (replica := replicas.get(layout)) is None:
                replica = replicas[layout] = layout.replica(rank)
            if replica == p.turn and (mine := boxes.get(layout)) is None:
                mine = boxes[layout] = layout.boxes(rank)
        found.append(mine)
    return found


def chunks_to_write(leaf: LeafPlan, rank: int) -> list[tuple[tuple[int, ...], Box]]:
    """(chunk index, the chunk as a box of the local tensor) for every chunk of a `grid` leaf that the rank writes.

    File after file: all chunks of a file, or those of this leaf in it.
    """
    boxes, shape, replicas, found = leaf.layout.boxes(rank), leaf.layout.shape, int(leaf.layout.replicas), []
    shard, (start, size, total) = leaf.shard[len(leaf.at) :] or (1,) * len(leaf.chunk), leaf.line
    files, mine = _file_ranges(boxes, leaf.chunk, leaf.shard[len(leaf.at) :]), leaf.layout.replica(rank)
    if leaf.stack is not None and replicas > 1:  # the files of the leaves before it
        k = leaf.shard[0] if leaf.shard else 1
        start += leaf.stack[1] // k * size * sum(math.prod(map(len, ranges)) for ranges in files)
    for box, ranges in zip(boxes, files, strict=True):
        chunks = _chunk_ranges(box, leaf.chunk)
        for file in itertools.product(*ranges):
            if replicas > 1:
                start += size
                if _replica(start - size, size, replicas, total) != mine:
                    continue
            inside = (
                range(max(f * k, r.start), min((f + 1) * k, r.stop))
                for f, k, r in zip(file, shard, chunks, strict=True)
            )
            for index in itertools.product(*inside):
                low = [i * c for i, c in zip(index, leaf.chunk, strict=True)]
                high = [min(a + c, s) for a, c, s in zip(low, leaf.chunk, shape, strict=True)]
                part = box.intersect(low, high)
                assert part is not None and list(part.start) == low and list(part.stop) == high, (leaf, rank, index)
                found.append((index, part))
    return found


def _chunk_ranges(box: Box, chunk_shape: tuple[int, ...]) -> list[range]:
    """Per dim the chunk numbers that a box touches."""
    return [range(a // c, -(-b // c)) for a, b, c in zip(box.start, box.stop, chunk_shape, strict=True)]


def _is_packed(path: str, layout: Layout, pack: bool) -> bool:
    """Whether a leaf is packed whatever its cuts are. pack: whether there are too many small ones."""
    small = is_small(layout.shape, layout.nbytes)
    return (pack and small) or ((small or not layout.nbytes) and _is_long(path))


def _is_long(path: str) -> bool:
    """Whether a path makes names that not every place takes: a leaf that can do without files has none then."""
    if path.isascii() and len(path) <= _MOST_PART // 3:
        return False
    name = array_name(path)
    return len(name) > _MOST_NAME or max(map(len, name.split("/"))) > _MOST_PART


def is_small(shape: tuple[int, ...], nbytes: int) -> bool:
    """Whether a leaf is packed with others if there are too many of its kind."""
    return 0 < nbytes and (nbytes < SMALL_BYTES or not shape)


def home_of(
    shape: tuple[int, ...], itemsize: int, unit: tuple[int, ...], local: int, ranks: int
) -> tuple[str, tuple[int, ...]]:
    """The home of a leaf and its chunk shape.

    Args:
        shape: of the leaf, in elements.
        itemsize: bytes of an element.
        unit: per dim the step of which every cut is a multiple, see `cut_unit`.
        local: bytes of the largest shard; rank 0 holds as much as any.
        ranks: how many write.
    """
    nbytes = math.prod(shape) * itemsize
    if nbytes == 0:
        return "grid", (1,) * len(shape)
    if is_small(shape, nbytes):
        chunks = math.prod(-(-n // u) for n, u in zip(shape, unit, strict=True))
        few = chunks <= min(_MOST_SMALL_CHUNKS, 4 * -(-nbytes // local))
        return ("grid", unit) if few else ("packed", ())
    if math.prod(-(-n // u) * u for n, u in zip(shape, unit, strict=True)) > 1.25 * math.prod(shape):
        unit = tuple(u if -(-n // u) * u <= 1.1 * n else math.gcd(u, n) for n, u in zip(shape, unit, strict=True))
    if math.prod(unit) * itemsize < max(_FINEST_BYTES, min(_SENSIBLE_BYTES, local // 16)):
        return ("packed" if local < SMALL_BYTES else "piece"), ()
    # A state on one rank stays as it is in memory. Where there are several, other numbers of them will cut its dims.
    ways = shape[-1] // unit[-1]
    columns = 1 if ranks == 1 else 4 if ways == 1 else max(2, 8 // ways)
    chunk = chunk_shape(shape, unit, itemsize, columns)
    return ("piece", ()) if chunk is None else ("grid", chunk)


def chunk_shape(
    shape: tuple[int, ...], unit: tuple[int, ...], itemsize: int, columns: int = 1
) -> tuple[int, ...] | None:
    """A chunk of about 16 MiB that no cut crosses, of at most 64; None where there is none, for any order of dims.

    Rows of the first dim, then of the next: contiguous in the writer's memory. columns: into how many pieces (a power
    of two) the last dim is cut before that, as long as they do not get too small: then half and a quarter of the
    writer's columns can be read without the rest, as rows can. Such chunks are of about 4 MiB.

    A dim that is cut takes a divisor of its unit. One that is not takes any size: the last chunk is padded, by less
    than a row a chunk. A cut dim without a divisor stays as it is, and a later dim is cut instead, to a power of two
    if little of that is padding.
    """
    chunk, most_bytes, stuck = list(unit), CHUNK_BYTES, False
    while columns > 1 and len(chunk) > 1 and chunk[-1] % 2 == 0 and chunk[-1] * itemsize >= _SPLIT_ROW_BYTES:
        if math.prod(chunk) * itemsize < _SPLIT_BYTES:
            break
        chunk[-1], columns, most_bytes = chunk[-1] // 2, columns // 2, CHUNK_BYTES // _COLUMN_PARTS
    for d, n in enumerate(shape):
        size = math.prod(chunk) * itemsize
        if size <= (MOST_CHUNK_BYTES if stuck else 1.5 * most_bytes):
            break
        inner = size // chunk[d]
        if inner >= (MOST_CHUNK_BYTES if stuck else most_bytes):
            chunk[d] = 1
        elif unit[d] < n:
            chunk[d] //= (parts := _parts(chunk[d], size, most_bytes))
            stuck = stuck or parts == 1
        elif stuck:
            step = 1 << ((MOST_CHUNK_BYTES // inner).bit_length() - 1)
            chunk[d] = step if -(-n // step) * step <= n * 17 // 16 else -(-n // -(-n // step))
        else:
            exact = _parts(chunk[d], size, most_bytes)
            near = most_bytes // 2 <= size // exact <= 1.5 * most_bytes
            chunk[d] = chunk[d] // exact if near else -(-chunk[d] // -(-size // most_bytes))
    return tuple(chunk) if math.prod(chunk) * itemsize <= MOST_CHUNK_BYTES else None


def _parts(n: int, size: int, aim: int) -> int:
    """The divisor of n that leaves 1 to 64 MiB of `size` bytes, nearest to the aim; 1 if there is none."""
    least, most = max(2, -(-size // MOST_CHUNK_BYTES)), size // _SENSIBLE_BYTES
    wanted, found = size / aim, 1
    for parts in range(least, min(most, max(least, int(wanted)) + _MOST_DIVISORS_TRIED) + 1):
        if n % parts == 0 and (found == 1 or max(parts / wanted, wanted / parts) < max(found / wanted, wanted / found)):
            found = parts
    return found


# ---- the coarsest grid that no box crosses


def cut_unit(layout: Layout) -> tuple[int, ...]:
    """Per dim the greatest step of which every cut between two boxes, of any ranks, is a multiple (the dim if uncut).

    The end of a dim is no cut: the last chunk may be padded. All ones when a flattened range ends inside a row.
    """
    mesh, units, blocks = layout.mesh, [], [()]
    for dim, (n, entry) in enumerate(zip(layout.shape, layout.spec, strict=True)):
        counts = [mesh[name] for name in layout.axes(dim)]
        parts = entry.lengths(n) if isinstance(entry, Split) else (n,)
        unit, start, order = 0, 0, layout.cuts[dim].order
        for part in parts:
            unit = math.gcd(unit, start, 0 if order else _inner_cuts(part, counts, bool(layout.padded)))
            start += part
        units.append(unit)
        if layout.flat and dim >= layout.flat_from:
            if order:
                cut = {tuple(s.length for s in split.segments(layout.cuts[dim], i)) for i in set(order)}
            elif layout.padded:
                cut = {tuple(split.rooms(n, counts)[-1] for n in parts)}
            else:
                cut = _block_sizes(tuple(parts), counts)
            blocks = [(*block, pieces) for block in blocks for pieces in cut]
            if len(blocks) > 64:
                return (1,) * len(layout.shape)
    for block in blocks if layout.flat else ():
        step = _inner_cuts(math.prod(map(sum, block)), [mesh[name] for name in layout.flat], layout.padded)
        within = _flat_units(block, step) if step else ()
        within = within and ((0,) * layout.flat_from + within)
        if within is None:
            return (1,) * len(layout.shape)
        units = [math.gcd(u, w) for u, w in zip(units, within, strict=True)] if within else units
    return tuple(u or n for u, n in zip(units, layout.shape, strict=True))


def _inner_cuts(n: int, counts: Sequence[int], padded: int = False) -> int:
    """The gcd of all cuts inside [0, n) when it is chunked over `counts`, axis after axis; 0 when there is none.

    padded: into rooms, of which all are of one size, a multiple of this unit (True: of 1).
    """
    if not counts or n == 0:
        return 0
    if padded:
        return math.gcd(*(room for room in split.rooms(n, counts, padded)[1:] if room < n))
    step = -(-n // counts[0])
    unit = step if step < n else 0
    for size in {step, n % step} - {0}:
        unit = math.gcd(unit, _inner_cuts(size, counts[1:]))
    return unit


def _block_sizes(parts: tuple[int, ...], counts: Sequence[int]) -> set[tuple[int, ...]]:
    """All ways in which the parts of a dim are cut together over `counts`, without a walk over all ranks."""
    if not counts:
        return {parts}
    # Along the first axis the sizes change only where a part runs out: at its last, shorter chunk and after it.
    ends = [n // -(-n // counts[0]) for n in parts if n]
    found = set()
    for i in {0, *ends, *(end + 1 for end in ends)}:
        if i < counts[0]:
            found |= _block_sizes(tuple(chunk(n, counts[0], i)[1] for n in parts), counts[1:])
    return found


def _flat_units(block: tuple[tuple[int, ...], ...], step: int) -> tuple[int, ...] | None:
    """Per dim the unit of the cuts at multiples of `step` of the flattened block; None when one is inside a row.

    block: per dim the sizes of its interleaved pieces. A 0 in the answer means that the dim is not cut.
    """
    shape = [sum(pieces) for pieces in block]
    units = [0] * len(shape)
    for d, n in enumerate(shape):
        inner = math.prod(shape[d + 1 :])
        if step % inner == 0:
            units[d] = math.gcd(step // inner, *block[d]) if len(block[d]) > 1 else step // inner
            return tuple(units)
        if n > 1 and inner % step:
            return None
        units[d] = 1
    return None


def split_chunk(shape: tuple[int, ...], itemsize: int, most: int) -> tuple[int, ...]:
    """A chunk shape itself, or a smaller one, in even parts, of at most `most` bytes (or one element).

    >>> split_chunk((7, 10), 4, 280), split_chunk((7, 10), 4, 150), split_chunk((7, 10), 4, 20)
    ((7, 10), (3, 10), (1, 5))
    """
    parts = list(shape)
    for d in range(len(parts)):
        inner = math.prod(parts) // max(parts[d], 1) * itemsize
        if inner * parts[d] <= most:
            break
        parts[d] = -(-parts[d] // -(-parts[d] // max(1, most // inner)))
    return tuple(parts)
