"""As much communication beside computation as a limit of memory allows.

What travels early or late takes memory for longer: the weights of the next layer while this one computes, gradients
until they have arrived. Each of these is allowed or not, by the bytes that are alive meanwhile where nothing travels.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from torch import fx

from fmegatron.step.graph.memory import Memory
from fmegatron.step.graph.nodes import is_start, kind, waits_of
from fmegatron.step.overlap.order import Order

__all__ = ["within"]


class _Loan(NamedTuple):
    """Bytes that are alive from `begin` to before `end`, positions of the order in which nothing travels, if `what`
    travels: the anchor of a unit whose gathers start early, or a reduction that is waited for late."""

    begin: int
    end: int
    nbytes: int
    what: fx.Node


def within(order: Order, memory: Memory, limit: int) -> list[fx.Node]:
    """The order in which all travels whose bytes keep to a limit, in the order of the graph: what does not is started
    when it is needed, or waited for at once.

    The peak is above the limit only where it is when nothing travels.
    """
    free = order.run()
    if max(memory.alive(free)) <= limit:
        return free
    units = {unit.anchor: unit.gathers for unit in order.units}
    at_once = {*units, *(node for node in order.nodes if _is_reduction(node, order))}
    plain = order.run(at_once)
    alive = memory.alive(plain)
    for loan in sorted(_loans(order, memory, units, free, plain), key=lambda loan: (loan.begin, loan.end)):
        if max(alive[loan.begin : loan.end], default=0) + loan.nbytes <= limit:
            alive[loan.begin : loan.end] = [nbytes + loan.nbytes for nbytes in alive[loan.begin : loan.end]]
            at_once.remove(loan.what)
    while True:  # a reduction that follows another one is no loan of its own
        found = order.run(at_once)
        alive = memory.alive(found)
        at = max(range(len(alive)), key=alive.__getitem__)
        more = set() if alive[at] <= limit else _travelling(order, units, found, at) - at_once
        if not more:
            return found
        at_once |= more


def _is_reduction(node: fx.Node, order: Order) -> bool:
    return bool(order.late) and is_start(node) and kind(node) != "gather" and bool(waits_of(node))


def _loans(
    order: Order,
    memory: Memory,
    units: dict[fx.Node, list[fx.Node]],
    free: Sequence[fx.Node],
    plain: Sequence[fx.Node],
) -> list[_Loan]:
    """What travels in the order `free` and not in `plain`; the nodes that are not placed on demand follow each other
    in both."""
    place = {node: i for i, node in enumerate(plain)}
    at: dict[fx.Node, int] = {}  # node of `free` -> the place in `plain` of the next one that is not placed on demand
    following = len(plain)
    for node in reversed(free):
        if node not in order.held and node not in order.late:
            following = place[node]
        at[node] = following
    found = []
    for anchor, gathers in units.items():
        begin, end = min(at[g] for g in gathers), min(place[g] for g in gathers)
        found.append(_Loan(begin, end, sum(memory.in_flight(g) for g in gathers), anchor))
    for start in plain:
        if _is_reduction(start, order):
            waits = waits_of(start)
            begin, end = max(place[w] for w in waits) + 1, max(at[w] for w in waits)
            found.append(_Loan(begin, end, memory.in_flight(start), start))
    return found


def _travelling(order: Order, units: dict[fx.Node, list[fx.Node]], found: list[fx.Node], at: int) -> set[fx.Node]:
    """What is on its way at a position and need not be: anchors of units, starts of reductions."""
    position = {node: i for i, node in enumerate(found)}
    gathered = {a for a, gathers in units.items() if min(position[g] for g in gathers) <= at < position[a]}
    reduced = {
        start
        for start in found
        if _is_reduction(start, order) and position[start] <= at <= min(position[w] for w in waits_of(start))
    }
    return gathered | reduced
