"""plan_reshard: who sends which boxes to whom to turn one layout of an array into another."""

from __future__ import annotations

from typing import NamedTuple

from fmegatron.layout.boxes import Box
from fmegatron.layout.layout import Layout, Shard


class Transfer(NamedTuple):
    """One box that moves between this rank and `peer`.

    src, dst: the same global indices, as they are in the sender's local tensor and in the receiver's.
    """

    peer: int
    src: Box
    dst: Box


class Plan(NamedTuple):
    """What one rank does in a reshard.

    sends, receives: with other ranks. The k-th send of a to b is the k-th receive of b from a, so a pair needs no
    further agreement.  local: boxes that this rank already holds (peer is the rank itself).
    """

    sends: tuple[Transfer, ...]
    receives: tuple[Transfer, ...]
    local: tuple[Transfer, ...]


def plan_reshard(src: Layout, dst: Layout, rank: int) -> Plan:
    """What `rank` sends, receives and copies so that an array laid out as `src` becomes laid out as `dst`.

    The meshes may differ, also in size: a rank outside one of them holds nothing there. A rank takes what it holds
    itself; the rest is asked from the replicas of `src` in turn. Integer arithmetic over overlapping neighbours only:
    every rank makes its own plan without communication, and the plans fit together.
    Raises ValueError for different shapes and for unreduced layouts (sum first: `collectives.reshard`).

    >>> import torch
    >>> from fmegatron.layout import Mesh
    >>> x = Layout((8, 4), torch.float32, Mesh(tp=2), ("tp",))
    >>> plan = plan_reshard(x, x.replace(spec=(None, "tp")), 0)
    >>> [(t.peer, t.src.slices) for t in plan.sends]
    [(1, (slice(0, 4, None), slice(2, 4, None)))]
    """
    if src.shape != dst.shape:
        raise ValueError(f"reshard from {src} to {dst}: got shapes {src.shape} and {dst.shape}, wanted the same shape")
    for layout in (src, dst):
        if any(layout.mesh[name] > 1 for name in layout.unreduced):
            raise ValueError(
                f"reshard from {src} to {dst}: got a value that is still a sum over {layout.unreduced}, wanted layouts"
                " without unreduced axes; sum it first (collectives.reshard does both)"
            )
    if not 0 <= rank < max(src.mesh.size, dst.mesh.size):
        raise ValueError(f"got rank {rank}, wanted one of the meshes {src.mesh} and {dst.mesh}")
    mine = src.shard(rank) if rank < src.mesh.size else None
    receives, local = _receives(src, dst, rank, mine)
    return Plan(_sends(src, dst, rank, mine), receives, local)


def _receives(src: Layout, dst: Layout, rank: int, mine: Shard | None):
    if rank >= dst.mesh.size:
        return (), ()
    receives, local = [], []
    turn = _turn(src, dst.shard(rank), dst, dst.replica(rank))
    for box in dst.boxes(rank):
        for shard, found in src.overlapping(box.start, box.stop):
            peer = rank if shard == mine else src.rank_of(shard, turn)
            for piece in found:
                transfer = Transfer(peer, piece, _inside(box, piece))
                (local if shard == mine else receives).append(transfer)
    return tuple(sorted(receives, key=_order)), tuple(sorted(local, key=_order))


def _sends(src: Layout, dst: Layout, rank: int, mine: Shard | None):
    if mine is None:
        return ()
    replica, replicas, sends = src.replica(rank), src.replicas, []
    for box in src.boxes(rank):
        for shard in dst.candidates(box.start, box.stop):
            peers = []
            # The replicas of the receiving shard whose `_turn` is this rank's replica: one in each run of `replicas`.
            shift = _turn(src, shard, dst, 0)
            for run in range(-(-dst.replicas // replicas)):
                taker = run * replicas + (replica - run - shift) % replicas
                if taker >= dst.replicas:
                    continue
                peer = dst.rank_of(shard, taker)
                if peer >= src.mesh.size or src.shard(peer) != mine:  # else it has these elements itself
                    peers.append(peer)
            for piece in dst.intersection(shard, box.start, box.stop) if peers else ():
                own = _inside(box, piece)
                sends.extend(Transfer(peer, own, piece) for peer in peers)
    return tuple(sorted(sends, key=_order))


def _inside(box: Box, piece: Box) -> Box:
    """The elements of a piece of a box, as the box has them."""
    found = box.intersect(piece.start, piece.stop)
    assert found is not None
    return found


def _turn(src: Layout, shard: Shard, dst: Layout, replica: int) -> int:
    """Which replica of `src` serves a receiver. Diagonal, so that takers at regular distances spread over all."""
    number = 0
    for index, count in zip(shard, dst.shard_counts, strict=True):
        number = number * count + index
    return (number + number // src.replicas + replica + replica // src.replicas) % src.replicas


def _order(transfer: Transfer) -> tuple:
    return transfer.peer, transfer.dst.start
