"""Other people's states: DTensor state dicts, torch.distributed.checkpoint and Megatron torch_dist directories."""

from fmegatron.interop.convert import dcp_to_fmegatron, fmegatron_to_dcp
from fmegatron.interop.dcp_bridge import FmegatronReader, FmegatronWriter
from fmegatron.interop.dcp_read import dcp_layouts, dcp_objects, read_dcp_object, restore_dcp
from fmegatron.interop.dcp_write import save_dcp
from fmegatron.interop.dtensor import layout_of, mesh_of, to_dtensor
from fmegatron.interop.state_dict import from_state_dict, load_state_dict, save_state_dict, to_state_dict

__all__ = [
    "FmegatronReader",
    "FmegatronWriter",
    "dcp_layouts",
    "dcp_objects",
    "dcp_to_fmegatron",
    "fmegatron_to_dcp",
    "from_state_dict",
    "layout_of",
    "load_state_dict",
    "mesh_of",
    "read_dcp_object",
    "restore_dcp",
    "save_dcp",
    "save_state_dict",
    "to_dtensor",
    "to_state_dict",
]
