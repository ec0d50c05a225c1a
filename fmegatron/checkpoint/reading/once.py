"""read="once": ranks that hold the same shard each read a part of it and exchange the parts.

The members of a group (the replicas of a shard) want the same bands. Every member assigns bands, in the order of the
files, to the members in runs of equal bytes, with one result and no communication; reads its own into its tensors; then
they exchange what they have read, from tensor to tensor. The exchange goes in rounds of bounded size; pieces that are
contiguous in the tensor travel from there and to there, others through a staging buffer.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import torch

from fmegatron.checkpoint.calls.ranks import Ranks
from fmegatron.checkpoint.files.format import Leaf, bits
from fmegatron.checkpoint.files.targets import Target
from fmegatron.checkpoint.reading.rounds import in_rounds
from fmegatron.checkpoint.reading.source import Grain, Source
from fmegatron.collectives import interrupt
from fmegatron.layout import Box, Layout

_ROUND_BYTES = 32 << 20  # of all members in a round (a band of each at least), so most that is staged at a time
_IN_PLACE_BYTES = 1 << 18  # a contiguous piece of this size is not staged
_ALIGN_BYTES = 16


@dataclass(frozen=True)
class Want:
    """A target whose layout states which ranks want the same."""

    layout: Layout
    leaf: Leaf
    target: Target


@dataclass
class Exchange:
    """What a group of ranks reads for each other. pieces: for each member the views of this rank's tensors that the
    member has read, in the same order on all members. words: uint8, whether each member is well; nothing is allocated
    to report it."""

    members: tuple[int, ...]
    pieces: list[list[torch.Tensor]]
    words: torch.Tensor

    def run(self, world: Ranks, well: bool, pressed: Sequence[BaseException] = ()) -> tuple[bool, BaseException | None]:
        """Give what this rank has read, get the rest. All members call this; one that failed reports it and no more.

        Returns whether all members are well, and the error of this rank. Before each round, and after the last, they
        report to each other whether they are, so that none waits for bytes that do not come.
        """
        me, error = self.members.index(world.rank), None
        others, rounds = [m for m in range(len(self.members)) if m != me], self._rounds(me)
        while True:
            packets = None
            try:
                if pressed:
                    raise pressed[0]
                packets = next(rounds, None) if well else None
            except BaseException as caught:
                well, error = False, caught
            self.words[me] = well
            world.exchange(
                [(self.members[m], self.words[me : me + 1]) for m in others],
                [(self.members[m], self.words[m : m + 1]) for m in others],
            )
            if not self.words.all():
                return False, error
            if packets is None:
                return True, None
            world.exchange(
                [(self.members[m], x) for m in others for x in packets[me].tensors],
                [(self.members[m], x) for m in others for x in packets[m].tensors],
            )

    def _rounds(self, me: int) -> Iterator[list[_Packet]]:
        """What each member sends in a round, as many rounds on all members; what has come is put in its place."""
        rounds = [list(in_rounds(pieces, _ROUND_BYTES // len(self.members))) for pieces in self.pieces]
        for turn in range(max(map(len, rounds))):
            packets = [_Packet(r[turn]) if turn < len(r) else _Packet([]) for r in rounds]
            packets[me].fill()
            yield packets
            for m, packet in enumerate(packets):
                if m != me:
                    packet.empty()


def exchange_all(exchanges: Sequence[Exchange], world: Ranks) -> bool:
    """Run the exchanges of this rank; all ranks of the world call this.

    An error of this rank is raised when all who wait for its bytes have heard. False: that of another, which `together`
    has to report; then nothing that was to be exchanged counts.
    """
    well, mine = True, None
    with interrupt.held_interrupt() as pressed:
        for exchange in exchanges:  # groups that share a rank hear of an error through it
            well, error = exchange.run(world, well, pressed)
            mine = mine or error
    if mine is not None:
        raise mine
    return well


def deal(source: Source, wants: Sequence[Want], rank: int) -> tuple[list[tuple[Leaf, Target]], list[Exchange]]:
    """What this rank reads of what it wants, and what it exchanges afterwards.

    A want whose layout has no replicas is read by this rank alone; when all are like that there is no exchange.
    """
    mine: list[tuple[Leaf, Target]] = []
    groups: dict[tuple[int, ...], list[Want]] = {}
    for want in wants:
        if want.layout.replicas == 1:
            mine.append((want.leaf, want.target))
        else:
            # Sorted, so that leaves which list the same ranks in another order share bands and messages.
            ranks = tuple(sorted(want.layout.mesh.group(rank, want.layout.replicated)))
            groups.setdefault(ranks, []).append(want)
    exchanges = []
    for members in sorted(groups):
        shares = share(source, groups[members], len(members))
        mine += shares[members.index(rank)]
        pieces = [[target.view for _, target in part] for part in shares]
        exchanges.append(Exchange(members, pieces, torch.ones(len(members), dtype=torch.uint8)))
    return mine, exchanges


def share(source: Source, wants: Sequence[Want], count: int) -> list[list[tuple[Leaf, Target]]]:
    """The wants of a group, cut along what is read at once and assigned to its `count` members, none of it to two."""
    cut = ((want, source.cells(want.leaf.path, want.target.box)) for want in wants)
    pieces = [(grains[0], want, cell) for want, cells in cut for grains, cell in cells]
    reader = _readers(list(dict.fromkeys(grain for grain, _, _ in pieces)), count)
    shares: list[list[tuple[Leaf, Target]]] = [[] for _ in range(count)]
    last: list[tuple[Want, str, Box] | None] = [None] * count
    for grain, want, cell in pieces:
        most = _ROUND_BYTES // count // want.layout.dtype.itemsize
        member = reader[grain]
        if (before := last[member]) and before[0] is want and before[1] == grain.file:
            if (grown := _grown(before[2], cell, most)) is not None:
                last[member] = (want, grain.file, grown)
                continue
        if before:
            shares[member].append(_piece(before[0], before[2]))
        last[member] = (want, grain.file, cell)
    for member, before in enumerate(last):
        if before:
            shares[member].append(_piece(before[0], before[2]))
    return shares


def _readers(grains: Sequence[Grain], count: int) -> dict[Grain, int]:
    """Which member reads a grain: runs of equal bytes of all of them, in the order of the files."""
    # Arrays in the order in which they are wanted, which is the same on all members.
    arrays = {name: i for i, name in enumerate(dict.fromkeys(grain.array for grain in grains))}
    order = sorted(grains, key=lambda grain: (arrays[grain.array], grain.key))
    total, at, readers = sum(grain.nbytes for grain in order), 0, {}
    for grain in order:
        readers[grain] = (2 * at + grain.nbytes) * count // (2 * total)
        at += grain.nbytes
    return readers


def _grown(a: Box, b: Box, most: int) -> Box | None:
    """The union of two boxes if that is a box of at most `most` elements; `b` follows `a`."""
    differ = [d for d in range(len(a.shape)) if (a.start[d], a.shape[d]) != (b.start[d], b.shape[d])]
    if len(differ) != 1 or a.size + b.size > most:
        return None
    d = differ[0]
    if b.start[d] != a.stop[d]:
        return None
    return a._replace(shape=(*a.shape[:d], a.shape[d] + b.shape[d], *a.shape[d + 1 :]))


def _piece(want: Want, box: Box) -> tuple[Leaf, Target]:
    first = want.target.box.start
    at = tuple(slice(a - f, a - f + n) for a, f, n in zip(box.start, first, box.shape, strict=True))
    return want.leaf, replace(want.target, box=box, view=want.target.view[at])


class _Packet:
    """One round's pieces of one member, as the tensors that travel: big contiguous ones, and one buffer for the rest.

    A piece that is contiguous on one member is laid out in the same way on all of them.
    """

    def __init__(self, pieces: Sequence[torch.Tensor]):
        self.tensors = [x for x in pieces if _in_place(x)]
        self.staged: list[tuple[torch.Tensor, int]] = []
        size = 0
        for x in pieces:
            if not _in_place(x):
                self.staged.append((x, size))
                size += -(-x.nbytes // _ALIGN_BYTES) * _ALIGN_BYTES
        self.buffer = torch.empty(size, dtype=torch.uint8)
        if size:
            self.tensors.append(self.buffer)

    def _slots(self) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        for x, at in self.staged:
            yield x, self.buffer[at : at + x.nbytes].view(x.dtype).view(x.shape)

    def fill(self) -> None:
        """Pieces -> buffer."""
        for x, slot in self._slots():
            bits(slot).copy_(bits(x))

    def empty(self) -> None:
        """Buffer -> pieces."""
        for x, slot in self._slots():
            bits(x).copy_(bits(slot))


def _in_place(x: torch.Tensor) -> bool:
    return x.is_contiguous() and x.nbytes >= _IN_PLACE_BYTES
