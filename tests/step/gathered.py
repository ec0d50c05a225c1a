"""Bytes of gathered weights in a lowered graph."""

from torch import fx

from fmegatron.step.graph.memory import Memory
from fmegatron.step.overlap.gathers import units


def gathered_bytes(graph: fx.Graph) -> int:
    """The most bytes of gathered weights that are alive at one time: buffers of gathers from their start on, and the
    arrays that are laid out from them, until the last node that reads them."""
    return max(Memory(graph, {n for unit in units(graph) for n in unit.after}).alive(graph.nodes), default=0)


def largest_unit_bytes(graph: fx.Graph) -> int:
    """The bytes of the largest set of weights that one gather (or several, for one computation) brings."""
    return max((unit.nbytes for unit in units(graph)), default=0)
