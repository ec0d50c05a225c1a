"""Where arrays live on a mesh: pure integers, no device, no process group."""

from fmegatron.layout.boxes import Box, row_major_strides
from fmegatron.layout.dtypes import dtype_from_name, dtype_name
from fmegatron.layout.layout import Layout
from fmegatron.layout.mesh import Mesh
from fmegatron.layout.rules import Rules
from fmegatron.layout.split import Segment, Split, chunk

__all__ = [
    "Box",
    "Layout",
    "Mesh",
    "Rules",
    "Segment",
    "Split",
    "chunk",
    "dtype_from_name",
    "dtype_name",
    "row_major_strides",
]
