"""Replica placement: cliques of ranks on different nodes that keep each other's shards, by integer arithmetic."""

from __future__ import annotations

from collections.abc import Sequence


def cliques(world_size: int, copies: int, spacing: int | Sequence[int]) -> tuple[tuple[int, ...], ...]:
    """Groups of ranks that keep each other's shards; every rank is in exactly one, ordered by their first rank.

    spacing: ranks of a node, counted up node by node; or the number on each node where they differ.  copies: wanted
    size of a group.

    No two members are on one node: a second copy there would be lost together with the first. Groups have at least
    `copies` members (and less than twice as many) wherever that leaves it possible: when no node has more ranks than
    `world_size // copies`. Otherwise they are as even as can be, and some are smaller. With nodes of one size, the
    members of a group are at the same place on neighbouring nodes. Raises ValueError for numbers that do not fit.

    >>> cliques(8, copies=2, spacing=2)
    ((0, 2), (1, 3), (4, 6), (5, 7))
    >>> cliques(8, copies=2, spacing=(3, 2, 1, 2))
    ((0, 4), (1, 6), (2, 7), (3, 5))
    >>> cliques(4, copies=2, spacing=4)
    ((0,), (1,), (2,), (3,))
    """
    if world_size < 1 or copies < 1:
        raise ValueError(f"cliques: got {copies} copies for {world_size} ranks, wanted at least 1 of both")
    nodes = _nodes(world_size, spacing)
    if len({len(node) for node in nodes}) > 1:
        blocks = [nodes]
    else:  # neighbours: blocks of `copies` nodes, the last with what is left over
        starts = [i * copies for i in range(max(1, len(nodes) // copies))]
        blocks = [nodes[a:b] for a, b in zip(starts, [*starts[1:], len(nodes)], strict=True)]
    return tuple(sorted(tuple(sorted(group)) for block in blocks for group in _deal(block, copies)))


def _nodes(world_size: int, spacing: int | Sequence[int]) -> list[range]:
    """The ranks of every node."""
    if not isinstance(spacing, int):
        sizes = spacing
    elif spacing < 1:
        raise ValueError(f"cliques: got spacing {spacing}, wanted the number of ranks of a node, at least 1")
    else:
        sizes = [min(spacing, world_size - first) for first in range(0, world_size, spacing)]
    if sum(sizes) != world_size or any(n < 1 for n in sizes):
        raise ValueError(f"cliques: got nodes of {tuple(sizes)} ranks, wanted sizes whose sum is {world_size} ranks")
    ends = [sum(sizes[: i + 1]) for i in range(len(sizes))]
    return [range(end - size, end) for end, size in zip(ends, sizes, strict=True)]


def _deal(nodes: list[range], copies: int) -> list[list[int]]:
    """Assign the ranks in turn to as many groups as the largest node has ranks, or more: a node's ranks never meet."""
    ordered = [rank for node in sorted(nodes, key=lambda node: (-len(node), node.start)) for rank in node]
    count = max(max(map(len, nodes)), len(ordered) // copies)
    return [ordered[i::count] for i in range(count)]


def check_groups(groups: Sequence[Sequence[int]], world_size: int) -> tuple[tuple[int, ...], ...]:
    """Groups that the user wrote down, as tuples. Raises ValueError unless every rank is in exactly one."""
    groups = tuple(tuple(group) for group in groups)
    if sorted(rank for group in groups for rank in group) != list(range(world_size)):
        raise ValueError(f"groups: got {groups}, wanted every rank from 0 to {world_size - 1} in exactly one group")
    return groups
