"""Other people's states: DTensor state dicts, torch.distributed.checkpoint and Megatron torch_dist directories."""

from fmegatron.interop.dtensor import layout_of, mesh_of, to_dtensor
from fmegatron.interop.state_dict import from_state_dict, load_state_dict, save_state_dict, to_state_dict

__all__ = [
    "from_state_dict",
    "layout_of",
    "load_state_dict",
    "mesh_of",
    "save_state_dict",
    "to_dtensor",
    "to_state_dict",
]
