"""Triton kernels of Inductor's code assembled for a device, by triton's own ptxas: nothing is launched."""

from __future__ import annotations

import hashlib
import json
import os
import re
import subprocess
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from fmegatron.files import whole
from fmegatron.plan.cuda.devices import Device
from fmegatron.plan.torch_private import compiled_kernels

__all__ = ["Cubin", "assembled"]


@dataclass(frozen=True)
class Cubin:
    """One configuration of a kernel, as machine code.

    config: block sizes and warps. nbytes: of the code. registers: of a thread. stack: bytes of a thread that registers
    spill into, or that arrays of its own take. shared: bytes of a block.
    """

    config: str
    nbytes: int
    registers: int
    stack: int
    shared: int


def assembled(source: str, device: Device, most: int = 1, folder: str | os.PathLike | None = None) -> list[Cubin]:
    """The first configurations that Inductor would try of a Triton kernel, as machine code of a device.

    source: of the kernel, as it is in a wrapper (`codegen.Code.kernels`). most: how many configurations. folder: where
    what was found is remembered by the digest of the source; None: nowhere.

    Raises what triton raises, with ptxas' words, for a kernel that cannot be assembled.
    """
    import triton

    text = re.sub(r"\btriton_\w+?_\d+\b", "triton_kernel", source)
    text = re.sub(r"'(cubin|kernel)_?\w*hash': '\w+'", "", text)
    key = hashlib.sha256(f"{triton.__version__} {device.arch} {most}\n{text}".encode()).hexdigest()[:24]
    known = None if folder is None else Path(folder, f"{key}.json")
    if known is not None and known.exists():
        return [Cubin(**one) for one in json.loads(known.read_text())]
    with tempfile.TemporaryDirectory() as there:
        path = Path(there, f"kernel_{key}.py")
        path.write_text(source)
        kind = (device.arch, device.shared_optin, device.multiprocessors)
        found = [_measured(binary, config, there) for config, binary in compiled_kernels(path, kind, most)]
    if known is not None:
        known.parent.mkdir(parents=True, exist_ok=True)
        whole.write_whole(known, json.dumps([asdict(one) for one in found]).encode(), durable=False)
    return found


def _measured(binary: Any, config: str, folder: str) -> Cubin:
    import triton.knobs

    path = Path(folder, "kernel.cubin")
    path.write_bytes(binary.asm["cubin"])
    command = [triton.knobs.nvidia.cuobjdump.path, "--dump-resource-usage", str(path)]
    said = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    usage = {name: int(value) for name, value in re.findall(r"\b(REG|STACK|LOCAL):(\d+)", said)}
    stack = usage["STACK"] + usage.get("LOCAL", 0)
    return Cubin(config, path.stat().st_size, usage["REG"], stack, binary.metadata.shared)
