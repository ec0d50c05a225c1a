"""Where arrays live on a mesh: pure integers, no device, no process group."""

from fmegatron.layout.boxes import Box
from fmegatron.layout.cover import check_cover
from fmegatron.layout.data_parallel import DataParallel
from fmegatron.layout.layout import Layout
from fmegatron.layout.mesh import Mesh
from fmegatron.layout.plan import plan_reshard
from fmegatron.layout.rules import Rules
from fmegatron.layout.split import Split
from fmegatron.moved import no_name as _no_name

__all__ = [
    "Box",
    "DataParallel",
    "Layout",
    "Mesh",
    "Rules",
    "Split",
    "check_cover",
    "plan_reshard",
]

globals()["__getattr__"] = _no_name(__name__)
