"""What a step takes before it is launched: memory, traffic, work and time on any mesh, without ranks or devices."""

from fmegatron.moved import no_name as _no_name
from fmegatron.plan.from_formulas import quick
from fmegatron.plan.from_trace import deep, exact
from fmegatron.plan.mesh_search import meshes_of, search

__all__ = [
    "deep",
    "exact",
    "meshes_of",
    "quick",
    "search",
]

globals()["__getattr__"] = _no_name(__name__)
