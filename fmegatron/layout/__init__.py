"""Where arrays live on a mesh: pure integers, no device, no process group."""

from fmegatron.layout.boxes import Box, row_major_strides
from fmegatron.layout.cover import check_cover
from fmegatron.layout.data_parallel import DATA_AXES, SEQUENCE_AXES, DataParallel, Placed
from fmegatron.layout.dtypes import dtype_from_name, dtype_name
from fmegatron.layout.folding import Folded, folded
from fmegatron.layout.layout import Layout
from fmegatron.layout.mesh import STANDARD_AXES, Mesh
from fmegatron.layout.plan import Plan, Transfer, plan_reshard
from fmegatron.layout.rules import Rules
from fmegatron.layout.split import Split, chunk
from fmegatron.layout.zigzag import zigzag

__all__ = [
    "Box",
    "DATA_AXES",
    "SEQUENCE_AXES",
    "DataParallel",
    "Folded",
    "Layout",
    "Mesh",
    "Placed",
    "Plan",
    "Rules",
    "STANDARD_AXES",
    "Split",
    "Transfer",
    "check_cover",
    "chunk",
    "dtype_from_name",
    "dtype_name",
    "folded",
    "plan_reshard",
    "row_major_strides",
    "zigzag",
]
