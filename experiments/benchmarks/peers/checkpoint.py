"""One peer of the checkpoint benchmark as a process of its own: `save` and `restore` on stdin, seconds on stdout.

    PYTHON experiments/benchmarks/peers/checkpoint.py dcp|safetensors|orbax|megatron MIB FOLDER

PYTHON is an interpreter that has the peer (`make bench-peers-env` builds one). fmegatron is not imported. Each peer is
used as its documentation says, with the settings that were fastest for it on this kind of machine.
"""

import os
import shutil
import sys
import time

import numpy as np
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as torch_dcp


def state_of(mib: int) -> dict[str, torch.Tensor]:
    """The same state as the benchmark's: bf16 and fp32 matrices of 32 MiB, 500 leaves of 4 KiB."""
    n = max(1, mib // 64)
    state = {f"bf16/{i}": torch.randn(4096, 4096).bfloat16() for i in range(n)}
    state |= {f"fp32/{i}": torch.randn(2048, 4096) for i in range(n)}
    return state | {f"small/{i}": torch.randn(1024) for i in range(500)}


def dcp(state, path):
    def save():
        torch_dcp.save(state, storage_writer=torch_dcp.FileSystemWriter(path, thread_count=2), no_dist=True)

    def restore():
        target = {name: torch.empty_like(x) for name, x in state.items()}
        torch_dcp.load(target, storage_reader=torch_dcp.FileSystemReader(path), no_dist=True)
        return target

    return save, restore


def safetensors(state, path):
    from safetensors.torch import load_file, save_file

    def save():
        os.makedirs(path)
        save_file(state, f"{path}/state.safetensors")

    def restore():
        # Mapped memory would be read at first use; a copy is what a restore means for the others, too.
        return {name: x.clone() for name, x in load_file(f"{path}/state.safetensors").items()}

    return save, restore


def orbax(state, path):
    import jax
    import orbax.checkpoint as ocp

    def array(x):
        return jax.numpy.asarray(x.view(torch.int16).numpy().view(jax.numpy.bfloat16) if x.dtype.itemsize == 2 else x)

    arrays = {name.replace("/", "_"): array(x) for name, x in state.items()}
    checkpointer = ocp.PyTreeCheckpointer(use_ocdbt=True, use_zarr3=True)
    args = ocp.checkpoint_utils.construct_restore_args(arrays)

    def save():
        checkpointer.save(path, arrays)

    def restore():
        found = checkpointer.restore(path, item=arrays, restore_args=args)
        jax.block_until_ready(found)
        return {name: torch.from_numpy(np.asarray(found[name.replace("/", "_")]).view(np.uint8)) for name in state}

    return save, restore


def megatron(state, path):
    from megatron.core import dist_checkpointing as mcore

    if not torch.cuda.is_available():
        # Its save asks for CUDA whatever the device of the tensors is.
        torch.cuda.synchronize, torch.cuda.current_device = lambda *_: None, lambda: "cpu"
    dist.init_process_group("gloo", init_method=f"file://{path}.rendezvous", rank=0, world_size=1)

    def sharded(tensors):
        return {name: mcore.ShardedTensor.from_rank_offsets(name, x) for name, x in tensors.items()}

    def save():
        os.makedirs(path)
        mcore.save(sharded(state), path)

    def restore():
        return mcore.load(sharded({name: torch.empty_like(x) for name, x in state.items()}), path)

    return save, restore


def main(peer: str, mib: str, folder: str) -> None:
    """Answer `save` and `restore` lines with seconds until stdin ends."""
    answer = os.fdopen(os.dup(1), "w", 1)  # libraries print; what they print goes to stderr
    os.dup2(2, 1)
    path = os.path.join(folder, peer)
    state = state_of(int(mib))
    save, restore = {"dcp": dcp, "safetensors": safetensors, "orbax": orbax, "megatron": megatron}[peer](state, path)
    answer.write("ready\n")
    found = None
    for line in sys.stdin:
        if line.strip() == "save":
            shutil.rmtree(path, ignore_errors=True)
            start = time.perf_counter()
            save()
        else:
            found = None
            start = time.perf_counter()
            found = restore()
        answer.write(f"{time.perf_counter() - start}\n")
    for name, x in (found or {}).items():
        if not torch.equal(x.reshape(-1).view(torch.uint8), state[name].reshape(-1).view(torch.uint8)):
            raise SystemExit(f"{peer}: {name} came back with other bits")


if __name__ == "__main__":
    main(*sys.argv[1:])
