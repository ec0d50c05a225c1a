"""Staging: copies what one rank has to write into one shared memory region for the writer process.

Both processes compute the same places from the same plan, so no addresses travel. Only what this rank writes is copied:
of a leaf with replicas its own chunks, one after another, otherwise the full local tensor.

What is on a device leaves it on a stream of its own, and the host does not wait: what is computed next, which may write
into donated memory, follows these copies on the device, and the writer process hears of them when they are done.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from fmegatron.checkpoint.files import format
from fmegatron.checkpoint.files.format import ALIGN_BYTES
from fmegatron.checkpoint.files.other_threads import changed
from fmegatron.checkpoint.files.torch_private import copy_all
from fmegatron.checkpoint.reading.rounds import in_rounds
from fmegatron.checkpoint.writing.plan import LeafPlan, boxes_to_write, chunks_to_write, grid_array
from fmegatron.checkpoint.writing.unchanged import Signs, compared, signs
from fmegatron.checkpoint.writing.write import Chunks
from fmegatron.layout import Box, boxes
from fmegatron.tree import arrivals

_GROUP_BYTES = 64 << 20  # written between two signs of progress
_PART_BYTES = 8 << 20  # copied by a thread at a time
_BOUNCE_BYTES = 32 << 20  # of a device, through which strided elements go


@dataclass(frozen=True)
class Slot:
    """The place of a leaf in a portion.

    leaf: its number in the plan.  offset, nbytes: bytes, from the start of the portion.  chunks: those that are here,
    as boxes of the local tensor; None: the full local tensor.
    """

    leaf: int
    offset: int
    nbytes: int
    chunks: Chunks | None = None

    def staged(self) -> list[tuple[tuple[int, ...], Box]]:
        """The same chunks as boxes of the slot, where they are one after another."""
        found, at = [], 0
        for index, box in self.chunks or ():
            found.append((index, Box(box.start, box.shape, at, boxes.row_major_strides(box.shape))))
            at += box.size
        return found


@dataclass(frozen=True)
class Portion:
    """What is staged at a time. nbytes: its size, padding included."""

    slots: tuple[Slot, ...]
    nbytes: int


def portions(plans: Sequence[LeafPlan], rank: int, limit: int | None = None) -> list[Portion]:
    """All that the rank writes, in pieces of at most `limit` bytes; at least one piece, maybe an empty one.

    What goes into one file stays in one portion: chunks, the storage of a leaf that has no grid, all small leaves
    together. One that is larger than the limit makes a portion of its own that is larger.
    """
    done: list[Portion] = []
    slots: list[Slot] = []
    used = 0

    def flush():
        nonlocal slots, used
        if slots:
            done.append(Portion(tuple(slots), used))
        slots, used = [], 0

    def add(leaf, nbytes, chunks=None):
        nonlocal used
        slots.append(Slot(leaf, used, nbytes, chunks))
        used += nbytes + -nbytes % ALIGN_BYTES

    def add_all(chunks):
        for leaf, some in chunks.items():
            add(leaf, sum(box.size for _, box in some) * plans[leaf].layout.dtype.itemsize, tuple(some))

    def fits(nbytes):
        return limit is None or used + nbytes <= limit

    whole = boxes_to_write(plans, rank)
    for i, p in enumerate(plans):
        if p.home == "packed" and whole[i]:
            add(i, p.layout.local_nbytes(rank))
    arrays: dict[str, list[int]] = {}
    for i, p in enumerate(plans):
        if p.home == "piece" and whole[i]:
            nbytes = p.layout.local_nbytes(rank)
            if not fits(nbytes):
                flush()
            add(i, nbytes)
        elif p.home == "grid" and (whole[i] or p.layout.replicas > 1):
            arrays.setdefault(grid_array(p).name, []).append(i)
    for members in arrays.values():
        nbytes = sum(plans[i].layout.local_nbytes(rank) for i in members)
        if plans[members[0]].layout.replicas == 1 and fits(nbytes):
            for i in members:
                add(i, plans[i].layout.local_nbytes(rank))
            continue
        some: dict[int, list] = {}
        size = 0
        for file in files({i: chunks_to_write(plans[i], rank) for i in members}, plans):
            nbytes = sum(box.size for _, _, box in file) * plans[members[0]].layout.dtype.itemsize
            if not fits(size + nbytes):
                add_all(some)
                flush()
                some, size = {}, 0
            for i, index, box in file:
                some.setdefault(i, []).append((index, box))
            size += nbytes
        add_all(some)
    flush()
    return done or [Portion((), 0)]


def files(chunks: Mapping[int, Chunks], plans: Sequence[LeafPlan]) -> Iterator[list[tuple[int, tuple[int, ...], Box]]]:
    """File by file what is in it: (number, index, box). chunks: by number of a leaf in `plans`."""
    found: dict[tuple[str, tuple[int, ...]], list] = {}
    for i, some in chunks.items():
        array = grid_array(plans[i])
        for index, box in some:
            found.setdefault((array.name, array.file_of((*plans[i].at, *index))), []).append((i, index, box))
    yield from found.values()


@dataclass
class Landing:
    """Copies from devices that may be under way: the memory that they fill is read, or moved, when they are done.

    events: of each device, with what is asked of it.
    """

    events: list[tuple[arrivals.Streams, Any]] = field(default_factory=list)

    @property
    def is_done(self) -> bool:
        """Whether all is there."""
        self.events = [(streams, event) for streams, event in self.events if not streams.is_done(event)]
        return not self.events

    def wait(self) -> None:
        """Return when all is there."""
        while self.events:
            streams, event = self.events.pop()
            streams.wait(event)


def stage(
    portion: Portion, plans: Sequence[LeafPlan], tensors: Sequence[torch.Tensor], memory: torch.Tensor, at: int
) -> None:
    """`begin_staging`, complete on return."""
    begin_staging(portion, plans, tensors, memory, at).wait()


def begin_staging(
    portion: Portion,
    plans: Sequence[LeafPlan],
    tensors: Sequence[torch.Tensor],
    memory: torch.Tensor,
    at: int,
    streams: Callable[[torch.device], arrivals.Streams] = arrivals.Streams,
) -> Landing:
    """Copy the portion's bytes out of the local tensors (any device) to `memory[at:]` -> what of it may be under way.

    memory: uint8, host.  at: a multiple of 64. Plain memcpy on as many threads as torch has where both sides are
    contiguous in host memory; strided tensors go through torch. From a device: behind all that is launched on its
    current stream, which follows; memory that is page-locked (`Arena.pin`) is not waited for.
    """
    moves: list[tuple[int, int, int]] = []  # addresses to and from, bytes
    into, source = [], []
    base = memory.data_ptr() + at
    for slot in portion.slots:
        x = tensors[slot.leaf]
        plain = x.is_cpu and x.is_contiguous() and not x.is_conj() and not x.is_neg()
        if plain and slot.chunks is None:
            moves.append((base + slot.offset, x.data_ptr(), slot.nbytes))
            continue
        item, leaf = plans[slot.leaf].layout.dtype.itemsize, bits(x)
        start = at + slot.offset
        place = memory[start : start + slot.nbytes].view(leaf.dtype)
        if slot.chunks is None:
            into.append(place.view(leaf.shape))
            source.append(leaf)
            continue
        leaf = leaf.contiguous()
        for (_, to), (_, box) in zip(slot.staged(), slot.chunks, strict=True):
            if plain and box.strides == to.strides:
                moves.append((base + slot.offset + to.offset * item, x.data_ptr() + box.offset * item, box.size * item))
            else:
                into.append(to.view(place))
                source.append(box.view(leaf))
    _move(moves)
    if here := [pair for pair in zip(into, source, strict=True) if pair[1].is_cpu]:
        copy_all([to for to, _ in here], [x for _, x in here])
    landing = Landing()
    for device in dict.fromkeys(x.device for x in source if not x.is_cpu):
        pairs = [pair for pair in zip(into, source, strict=True) if pair[1].device == device]
        landing.events.append(_leave(streams(device), pairs))
    return landing


def _leave(
    streams: arrivals.Streams, pairs: Iterable[tuple[torch.Tensor, torch.Tensor]]
) -> tuple[arrivals.Streams, Any]:
    """Begin to copy tensors of a device into host memory, contiguous, (into, tensor) of each -> when they have left.

    Strided elements are put in order on the device, some at a time in the same memory, which the stream keeps in turn.
    """
    stream, compute = streams.new(), streams.current()
    streams.follow(stream, streams.mark(compute))
    with streams.on(stream):
        bounce: torch.Tensor | None = None
        for into, x in pairs:
            if x.is_contiguous():
                streams.copy(into, x)
                continue
            bounce = streams.room(_BOUNCE_BYTES) if bounce is None else bounce
            for to, part in _pieces(into, x, _BOUNCE_BYTES):
                room = bounce[: part.nbytes].view(x.dtype).view(part.shape)
                streams.copy(room, part)
                streams.copy(to, room)
        event = streams.mark(stream)
    streams.follow(compute, event)  # so what is freed there is not taken before it has left, and needs no mark
    return streams, event


def _pieces(into: torch.Tensor, x: torch.Tensor, most: int) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Both tensors, of one shape, in pieces of at most so many bytes, each contiguous in the first."""
    if x.nbytes <= most:
        yield into, x
        return
    rows = max(1, most // (x.nbytes // x.shape[0]))
    for start in range(0, x.shape[0], rows):
        parts = into[start : start + rows], x[start : start + rows]
        yield from [parts] if parts[1].nbytes <= most else _pieces(parts[0][0], parts[1][0], most)


def require_as_staged(
    before: Signs,
    cut: Sequence[Portion],
    plans: Sequence[LeafPlan],
    tensors: Sequence[torch.Tensor],
    memory: torch.Tensor,
    at: int,
    landing: Landing | None = None,
) -> None:
    """Raise RuntimeError, naming the leaf, if the state changed after `before`, the `signs` of then.

    cut: what was staged since, the last of it at `memory[at:]`, where it still can be compared. landing: of that.
    """
    moved, written = compared(before, signs(tensors))
    if written and landing is not None:
        landing.wait()
    for slot in cut[-1].slots if written else ():
        if slot.leaf in written:  # or another part of a tensor that it is a view of
            again = torch.empty(slot.nbytes, dtype=torch.uint8)
            stage(Portion((replace(slot, offset=0),), slot.nbytes), plans, tensors, again, 0)
            if not torch.equal(again, memory[at + slot.offset : at + slot.offset + slot.nbytes]):
                raise RuntimeError(changed(plans[slot.leaf].path))
    if gone := moved | (written & {slot.leaf for portion in cut[:-1] for slot in portion.slots}):
        raise RuntimeError(changed(plans[min(gone)].path))


def _move(moves: list[tuple[int, int, int]]) -> None:
    """memcpy, which lets other threads run; large ones in parts."""
    threads = min(torch.get_num_threads(), sum(n for _, _, n in moves) // _PART_BYTES)

    def work(parts):
        for to, source, n in parts:
            ctypes.memmove(to, source, n)

    if threads < 2:
        work(moves)
        return
    parts = iter(
        [(to + i, source + i, min(_PART_BYTES, n - i)) for to, source, n in moves for i in range(0, n, _PART_BYTES)]
    )  # one list iterator for all: `next` is atomic
    with ThreadPoolExecutor(threads - 1) as pool:
        others = [pool.submit(work, parts) for _ in range(threads - 1)]
        work(parts)
        for other in others:
            other.result()


def groups(
    portion: Portion, plans: Sequence[LeafPlan], rank: int, memory: torch.Tensor, at: int
) -> Iterator[tuple[list[LeafPlan], list[torch.Tensor], list[Chunks | None], int]]:
    """(plans, tensors, chunks, bytes) for `write_part`, about 64 MiB at a time; the tensors are views of `memory`."""
    packed = [slot for slot in portion.slots if plans[slot.leaf].home == "packed"]
    if packed:
        views = [_view(slot, plans, rank, memory, at) for slot in packed]
        yield [plans[s.leaf] for s in packed], views, [None] * len(packed), sum(s.nbytes for s in packed)
    slots = [slot for slot in portion.slots if plans[slot.leaf].home != "packed"]
    for run in in_rounds([slot for slot in slots if plans[slot.leaf].home == "piece"], _GROUP_BYTES):
        views = [_view(slot, plans, rank, memory, at) for slot in run]
        yield [plans[slot.leaf] for slot in run], views, [None] * len(run), sum(slot.nbytes for slot in run)
    grids = [slot for slot in slots if plans[slot.leaf].home == "grid"]
    held = {i: chunks_to_write(plans[x.leaf], rank) if x.chunks is None else x.staged() for i, x in enumerate(grids)}
    some: dict[int, list] = {}
    size = 0

    def group() -> tuple[list[LeafPlan], list[torch.Tensor], list[Chunks | None], int]:
        views = [_view(grids[i], plans, rank, memory, at) for i in some]
        return [plans[grids[i].leaf] for i in some], views, [*some.values()], size

    for file in files(held, [plans[slot.leaf] for slot in grids]):
        for i, index, box in file:
            some.setdefault(i, []).append((index, box))
            size += box.size * plans[grids[i].leaf].layout.dtype.itemsize
        if size >= _GROUP_BYTES:
            yield group()
            some, size = {}, 0
    if some:
        yield group()


def bits(x: torch.Tensor) -> torch.Tensor:
    """The elements as integers of the same width, on the same device; the same memory where the tensor is real."""
    return format.bits(x.resolve_conj().resolve_neg())


def _view(slot: Slot, plans: Sequence[LeafPlan], rank: int, memory: torch.Tensor, at: int) -> torch.Tensor:
    """A slot as a tensor of the leaf's dtype: of the local shape, or flat where only some chunks are there."""
    layout = plans[slot.leaf].layout
    x = memory[at + slot.offset : at + slot.offset + slot.nbytes].view(layout.dtype)
    return x.view(layout.local_shape(rank)) if slot.chunks is None else x
