"""Other people's states: DTensor state dicts, torch.distributed.checkpoint and Megatron torch_dist directories.

save_state_dict(path, {"model": net, "optimizer": optimizer})       # or their state dicts; FSDP2, TP, plain
load_state_dict(path, {"model": net, "optimizer": optimizer})       # in place, on any mesh; both may be fresh
state = restore(source("iter_0000100"), layouts, world=world)       # torch's, Megatron's, Hugging Face's files
save_dcp(path, state, world)                                        # torch.distributed.checkpoint.load reads it
dcp.save(state_dict, storage_writer=FmegatronWriter(path))          # torch plans, our files
python -m fmegatron.interop dcp-to-fmegatron | fmegatron-to-dcp
"""

from fmegatron.interop.convert import dcp_to_fmegatron, fmegatron_to_dcp
from fmegatron.interop.dcp_write import save_dcp
from fmegatron.interop.dense_to_experts import upcycle
from fmegatron.interop.dtensor import to_dtensor
from fmegatron.interop.safetensors_export import export_safetensors
from fmegatron.interop.sources import source
from fmegatron.interop.state_dict import load_state_dict, save_state_dict
from fmegatron.moved import no_name as _no_name

__all__ = [
    "dcp_to_fmegatron",
    "export_safetensors",
    "fmegatron_to_dcp",
    "load_state_dict",
    "save_dcp",
    "save_state_dict",
    "source",
    "to_dtensor",
    "upcycle",
]

globals()["__getattr__"] = _no_name(__name__)
