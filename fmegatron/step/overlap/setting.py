"""The configuration of overlap, as a value."""

from __future__ import annotations

from dataclasses import dataclass
from types import MappingProxyType

__all__ = ["Overlap"]

# Both would undo the order that the graph has: the first moves starts of gathers back to their waits, the second moves
# every wait to its reader, so that reduce-scatters keep a layer's whole gradients alive until the end of the step.
_KEEP_ORDER = MappingProxyType({"reorder_for_peak_memory": False, "reorder_for_locality": False})


@dataclass(frozen=True)
class Overlap:
    """How communication is ordered in a lowered step. Arithmetic is not changed: only when collectives start and wait.

    depth: how many layers ahead the gather of weights starts; 1: while a layer computes, the next layer's weights
    travel. 0: no reordering of gathers. Each unit of depth costs one more layer of gathered weights.
    late_reductions: wait for a layer's reduce-scatter when the next layer's starts, not at once; costs one more layer
    of full gradients.
    bucket_bytes: independent all-reduces over one group and of one dtype travel as one, up to so many bytes together
    (losses, norms, gradients of vectors); an array that is larger travels alone, because concatenating it costs more
    than a message. 0: none. Over two ranks sums keep their bits; over more, a library that divides a buffer among
    ranks may add in another order.
    join_ends: the embedding travels with the first block, forward (gather) and backward (reduce-scatter), whatever
    their dtypes: nothing could hide either. As one coalesced collective without a copy; reductions that are exchanges
    (sums of 16 bits in fp32) share one buffer. The embedding then lives as long as the first block.
    keep_last: the block that ends the forward begins the backward: its weights are kept instead of gathered twice.
    separate_groups: gathers get process groups of their own, so that they and reductions do not queue behind each
    other (one communicator runs its collectives in order).
    ahead_bytes: no gather starts early while more than so many bytes of gathered weights travel or wait; None: any.

    peak: how many times the planned peak of the graph without overlap the one with it may be (1.05). Where memory is
    highest, gathers then start when they are needed and reductions are waited for at once; if that is not enough, the
    ends of the backward are not joined. None: any. Where nothing is reordered, it is not looked at.

    Overlap(depth=0, late_reductions=False, bucket_bytes=0, join_ends=False) changes nothing.
    Raises ValueError for a negative number.
    """

    depth: int = 1
    late_reductions: bool = True
    bucket_bytes: int = 1 << 22
    join_ends: bool = True
    keep_last: bool = False
    separate_groups: bool = False
    ahead_bytes: int | None = None
    peak: float | None = None

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
        return dict(_KEEP_ORDER) if self.reorders else {}
