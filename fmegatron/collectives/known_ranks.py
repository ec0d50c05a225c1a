"""How many ranks there are, as far as it is known, where no array knows its layout: full on one, a part on several."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist

from fmegatron.collectives.torch_private import recorded_root
from fmegatron.layout import Mesh
from fmegatron.tree import labels

__all__ = ["Recorded", "recorded_mesh", "recorded_reads", "recorded_stages", "require_one_rank"]


class Recorded(torch.nn.Module):
    """The root of a graph while it is recorded (`step.tracing`). mesh: of the ranks that will run it; None: not known.
    reads: who notes the functions that are entered meanwhile (`step.watched`), if somebody does. stages: whether marks
    of stages are recorded, for a pipeline (`step.pipeline`). marked: how many blocks have been marked so far.

    It is what torch's recorder has while it records, and nothing remains of it: no state of a module of ours.
    """

    def __init__(self, mesh: Mesh | None, reads: Any = None, stages: bool = False):
        super().__init__()
        self.mesh, self.reads, self.stages, self.marked = mesh, reads, stages, 0


def recorded_mesh() -> Mesh | None:
    """The mesh for which a function is traced right now, in this thread; None: nothing is, or it is not known."""
    root = recorded_root()
    return root.mesh if isinstance(root, Recorded) else None


def recorded_reads() -> Any:
    """Who notes the functions that are entered while one is traced right now, in this thread; None: nobody."""
    root = recorded_root()
    return root.reads if isinstance(root, Recorded) else None


def recorded_stages() -> Recorded | None:
    """What records a function right now, in this thread, that a pipeline will cut; None: nothing does."""
    root = recorded_root()
    return root if isinstance(root, Recorded) and root.stages else None


def require_one_rank(who: str, path: str, what: str, beside: Iterable[object] = ()) -> None:
    """ValueError, naming the path, for an array without a layout, among others without one, where there are ranks of
    which it may be a part: it would be taken as full, and numbers be wrong in silence.

    Known is, in this order: the mesh of arrays `beside` it (gradients, the optimizer's state), of the arguments of a
    function that is traced and of the jit that traces it, and the size of torch's process group. Where nothing is
    known, as in one process that plays one rank of several by hand, nothing is said.
    """
    known = next((layout.mesh for x in beside if (layout := labels.layout_of(x)) is not None), None) or recorded_mesh()
    ranks, where = (1, "") if known is None else (known.size, f"the mesh {known}")
    if known is None and dist.is_available() and dist.is_initialized():
        ranks, where = dist.get_world_size(), f"{dist.get_world_size()} processes"
    if ranks > 1:
        raise ValueError(
            f"{who}: {path}: got a {what} whose layout is not known, as that of no other is, on {where}, wanted those "
            "of all, as it would be taken for a full array; give the tree that knows them (every op gives arrays that "
            f"do not), or place what was computed: tree.place({what}s, layouts)"
        )
