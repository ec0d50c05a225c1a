"""Triton kernels of Inductor's code assembled for a device, by triton's own ptxas: nothing is launched."""

from __future__ import annotations

import hashlib
import json
import os
import re
import subprocess
import tempfile
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from fmegatron.files import whole
from fmegatron.nn import tiled_attention, tiled_kernels
from fmegatron.plan.cuda.devices import Device
from fmegatron.plan.cuda.lowered import Graph
from fmegatron.plan.torch_private import compiled_kernels, compiled_launch
from fmegatron.step.graph.nodes import items_of

__all__ = ["Cubin", "assembled", "of_attention"]


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


def of_attention(graph: Graph, device: Device, folder: str | os.PathLike | None = None) -> list[tuple[str, Cubin]]:
    """(name, machine code) of the kernels that `nn.tiled_attention` launches in a graph, each once.

    folder: as of `assembled`. Raises what triton raises for a kernel that cannot be assembled.
    """
    import triton

    ours, found = torch.ops.fmegatron_nn, {}
    source = Path(tiled_kernels.__file__).read_text()
    for node in graph.module.graph.nodes:
        if node.target not in (ours.tiled_attention.default, ours.tiled_attention_backward.default):
            continue
        values = [x.meta["val"] if isinstance(x, torch.fx.Node) else x for x in node.args]
        for launch in tiled_attention.launches(values, items_of(node.meta["val"])):
            shown = f"{triton.__version__} {device.arch} {launch.kernel.fn.__name__} {launch.settings}"
            shown += "".join(_shown(launch.arguments))
            key = hashlib.sha256(f"{shown}\n{source}".encode()).hexdigest()[:24]
            if key not in found:
                found[key] = launch.kernel.fn.__name__, _remembered(key, launch, device, folder)
    return [*found.values()]


def _shown(arguments: Iterable[Any]) -> list[str]:
    """What code is made for: dtypes, strides and sizes."""
    return [f" {x.dtype}" if isinstance(x, torch.Tensor) else "".join(_shown(x)) if isinstance(x, tuple) else f" {x}"
            for x in arguments]  # fmt: skip


def _remembered(key: str, launch: Any, device: Device, folder: str | os.PathLike | None) -> Cubin:
    known = None if folder is None else Path(folder, f"{key}.json")
    if known is not None and known.exists():
        return Cubin(**json.loads(known.read_text()))
    with tempfile.TemporaryDirectory() as there:
        kind = (device.arch, device.shared_optin, device.multiprocessors)
        found = _measured(compiled_launch(launch, kind), f"{launch.settings}", there)
    if known is not None:
        known.parent.mkdir(parents=True, exist_ok=True)
        whole.write_whole(known, json.dumps(asdict(found)).encode(), durable=False)
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
