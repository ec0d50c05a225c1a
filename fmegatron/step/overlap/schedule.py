"""Overlap of communication and computation: its options, and what a lowered graph becomes under them."""

from __future__ import annotations

import functools
from collections.abc import Iterable
from dataclasses import dataclass
from types import MappingProxyType

from torch import fx

from fmegatron.collectives import World
from fmegatron.step.durations import is_product
from fmegatron.step.gloo_all_to_all import beside_exchange
from fmegatron.step.graph.memory import Memory, materialized, peak_bytes
from fmegatron.step.graph.nodes import entry_of, is_layer, is_start, is_wait, start_of, waits_of
from fmegatron.step.graph.order import sort_by
from fmegatron.step.lower import copy_module
from fmegatron.step.overlap.gathers import keep_last, separate_groups
from fmegatron.step.overlap.limit import within
from fmegatron.step.overlap.merge import join_ends, merge_reductions
from fmegatron.step.overlap.order import Order, is_number

__all__ = ["KEEP_ORDER", "KEEP_WAITS", "Overlap", "hides", "overlap_of", "overlapped", "planned_peak"]

# It would move every wait to its reader, so that reduce-scatters keep a layer's full gradients alive until the end of
# the step.
KEEP_WAITS = MappingProxyType({"reorder_for_locality": False})
# The other one would move starts of gathers back to their waits.
KEEP_ORDER = MappingProxyType({"reorder_for_peak_memory": False, **KEEP_WAITS})


@dataclass(frozen=True)
class Overlap:
    """How communication is ordered in a lowered step, beside computation. What is computed does not change, to the bit
    (but for `bucket_bytes`): only when collectives start and are waited for. `jit` does it by default; overlap=False
    there is the order of the graph.

    depth: how many layers ahead the gather of weights starts; 1: while a layer computes, the next layer's weights
    travel. 0: no reordering of gathers. Each unit of depth costs one more layer of gathered weights.
    late_reductions: wait for a layer's reduce-scatter when the next layer's starts, not at once; costs one more layer
    of full gradients.
    bucket_bytes: independent all-reduces over one group and of one dtype travel as one, up to so many bytes together
    (losses, norms, gradients of vectors); an array that is larger travels alone, because concatenating it costs more
    than a message. 0: none. Over two ranks sums keep their bits; over more, a library that divides a buffer among
    ranks may add in another order: by default none travel together.
    join_ends: the embedding travels with the first block, forward (gather) and backward (reduce-scatter), whatever
    their dtypes: nothing could hide either. As one coalesced collective without a copy; reductions that are exchanges
    (sums of 16 bits in fp32) share one buffer, between two ranks with sums that the library would make, too; over more,
    these have an order of their own and travel apart. The embedding then lives as long as the first block.
    keep_last: the block that ends the forward begins the backward: its weights are kept instead of gathered twice.
    separate_groups: gathers get process groups of their own, so that they and reductions do not queue behind each
    other (one communicator runs its collectives in order).
    ahead_bytes: no gather starts early while more than so many bytes of gathered weights travel or wait; None: any.

    peak: how many times the planned peak of the order of the graph the one with overlap may be, both above the
    arguments (1.05). What travels is allowed or not one by one: where memory is highest, gathers then start when they
    are needed and reductions are waited for at once; if that is not enough, the ends are not joined; if nothing is, the
    order of the graph stays. None: any. Counted is what Inductor makes of the order, with what layers and the library
    take meanwhile: it is what `plan.exact` counts, to some per cent, in milliseconds.

    Where no layer and no product would run beside what travels, nothing is moved, and Inductor may order the graph.
    Overlap(depth=0, late_reductions=False, join_ends=False) changes nothing.
    Raises ValueError for a negative number.
    """

    depth: int = 1
    late_reductions: bool = True
    bucket_bytes: int = 0
    join_ends: bool = True
    keep_last: bool = False
    separate_groups: bool = False
    ahead_bytes: int | None = None
    peak: float | None = 1.05

    def __post_init__(self):
        for name in ("depth", "bucket_bytes", "ahead_bytes", "peak"):
            value = getattr(self, name)
            if value is not None and value < 0:
                raise ValueError(f"Overlap: got {name}={value}, wanted 0 or more")
            if name != "peak" and value is not None and not isinstance(value, int):
                raise ValueError(f"Overlap: got {name}={value}, wanted a whole number")

    @property
    def reorders(self) -> bool:
        """Whether any node is moved for the sake of overlap."""
        return self.depth > 0 or self.late_reductions

    @property
    def options(self) -> dict:
        """Settings of Inductor under which generated code keeps the order of the graph."""
        return dict(KEEP_ORDER) if self.reorders else {}


def overlap_of(given: Overlap | bool) -> Overlap | None:
    """The setting that somebody means: True is `Overlap()`, False None, the order of the graph.

    Raises ValueError for anything else.
    """
    if isinstance(given, Overlap):
        return given
    if not isinstance(given, bool):
        raise ValueError(
            f"overlap: got {given!r}, wanted True, False (the order of the graph), or a setting such as "
            "Overlap(depth=2)"
        )
    return Overlap() if given else None


def overlapped(graph_module: fx.GraphModule, setting: Overlap | None, world: World | None = None) -> fx.GraphModule:
    """A copy of a lowered graph whose collectives are merged and ordered as `setting` states; it computes the same.

    A graph without collectives is returned as it is, and one that would take more than the limit of the setting.
    """
    if setting is None or not any(map(is_start, graph_module.graph.nodes)):
        return graph_module
    limit = None
    if setting.reorders and setting.peak is not None:
        limit = int(setting.peak * planned_peak(graph_module.graph, world))
    # Joined, the embedding lives as long as the first block, and the shard of its gradient is there before all blocks'
    # are stacked.
    for joins in ((True, True), (True, False), (False, False)) if setting.join_ends else ((False, False),):
        module = copy_module(graph_module)
        _ordered(module.graph, setting, limit, world, joins)
        if limit is None or planned_peak(module.graph, world) <= limit:
            break
    else:
        return graph_module
    if setting.separate_groups and world is not None:
        separate_groups(module.graph, world)
    module.graph.lint()
    module.recompile()
    return module


def planned_peak(graph: fx.Graph, world: World | None) -> int:
    """The most bytes of a lowered graph that are alive at one time besides its arguments, as it runs on a world."""
    return peak_bytes(graph, functools.partial(_beside, world=world))


def hides(order: Iterable[fx.Node]) -> bool:
    """Whether a layer or a product computes while arrays travel. (That of a number is hidden wherever it may be.)"""
    flying: set[fx.Node] = set()
    for node in order:
        if is_start(node):
            if waits_of(node) and not is_number(node):
                flying.add(node)
        elif is_wait(node):
            flying.discard(start_of(node))
        elif flying and (is_layer(node) or is_product(node)):
            return True
    return False


def _ordered(
    graph: fx.Graph, setting: Overlap, limit: int | None, world: World | None, joins: tuple[bool, bool]
) -> None:
    """Change a graph. joins: whether the ends of the forward, those of the backward are joined."""
    if setting.keep_last:
        keep_last(graph)
    if setting.bucket_bytes:
        merge_reductions(graph, setting.bucket_bytes)
    if joins[0]:
        join_ends(graph, joins[1])
    if setting.reorders:
        order = Order(graph, setting.depth, setting.late_reductions, setting.ahead_bytes)
        if limit is None:
            found = order.run()
        else:
            memory = Memory(graph, materialized(graph), functools.partial(_beside, world=world))
            found = within(order, memory, limit)
        if hides(found):  # else the compiler orders better
            sort_by(graph, found)


def _beside(node: fx.Node, world: World | None) -> int:
    """Bytes that a node of a lowered graph takes beside its arguments and results."""
    if is_layer(node):
        return entry_of(node).beside
    return beside_exchange(node, world) if is_start(node) else 0
