"""The guard: a small library, built here, with which a CPU build of torch traces fake CUDA tensors.

It is loaded before torch into a process of its own (`environment`), so that nothing of it is ever in a run.
"""

from __future__ import annotations

import hashlib
import importlib.util
import os
import shutil
import subprocess
from collections.abc import Mapping
from pathlib import Path

import torch

from fmegatron.files import whole
from fmegatron.plan.cuda.devices import Device

__all__ = ["GuardError", "build", "environment", "require_process", "require_tools"]

_FLAGS = ("-std=c++20", "-O0", "-shared", "-fPIC")


class GuardError(RuntimeError):
    """Code of a CUDA device cannot be planned here: no triton, no g++ that builds the guard, or torch is no build for
    CPUs."""


def require_tools() -> None:
    """GuardError, with what to install, where code of a CUDA device cannot be planned here."""
    if torch.version.cuda is not None:
        raise GuardError(
            f"torch: got {torch.__version__}, wanted a build for CPUs: what stands for a device that is not there "
            "has been tried with those alone; plan in an environment with torch from https://download.pytorch.org/whl/cpu"
        )
    _require_triton()
    _compiler()


def require_process(device: Device) -> None:
    """GuardError, with what to run, in a process that does not believe that this device is there (`environment`)."""
    got = os.environ.get("FMEGATRON_CUDA_ARCH")
    if got != str(device.arch):
        where = "an ordinary process" if got is None else f"a process for a device of architecture {got}"
        raise GuardError(
            f"device: got {device.name} in {where}, wanted one in which torch believes that it is there; "
            "python -m fmegatron.plan EXPERIMENT --mesh dp=2 --device h100 starts one "
            "(it needs pip install 'fmegatron[cuda-check]'), or leave out device=, to plan for the CPU"
        )
    _require_triton()


def _require_triton() -> None:
    if importlib.util.find_spec("triton") is None:
        raise GuardError(
            "environment: got no triton, in which Inductor writes code for CUDA, wanted the release that this torch "
            "is built for (700 MB); pip install 'fmegatron[cuda-check]', or plan for the CPU, without --device"
        )


def _compiler() -> str:
    found = os.environ.get("CXX") or shutil.which("g++")
    if found is None:
        raise GuardError(
            "CXX: got no g++ on the PATH, wanted one, as CUDA code is planned with a library that it builds; install "
            "it (apt install g++), or name another in the variable CXX"
        )
    return found


def build(folder: str | os.PathLike | None = None) -> Path:
    """The library's file for the torch that is installed; it is built (10 s) where the folder does not have it yet.

    folder: of what is built, by the digest of its source, torch's version and the flags; None: "fmegatron" in the
    user's folder of caches. Raises GuardError without g++, and where it fails, with what it wrote; OSError.
    """
    compiler = _compiler()
    caches = os.environ.get("XDG_CACHE_HOME") or os.path.join(os.path.expanduser("~"), ".cache")
    source = Path(__file__).with_name("guard.cpp")
    folder = Path(caches, "fmegatron") if folder is None else Path(folder)
    parts = (source.read_bytes(), torch.__version__.encode(), repr(_FLAGS).encode(), compiler.encode())
    found = folder / f"guard-{hashlib.sha256(b' '.join(parts)).hexdigest()[:16]}.so"
    if found.exists():
        return found
    folder.mkdir(parents=True, exist_ok=True)
    home, beside = Path(torch.__file__).parent, f"{found}.{os.getpid()}"
    command = [compiler, *_FLAGS, f"-I{home}/include", str(source), f"-L{home}/lib", "-lc10", "-ltorch_cpu"]
    try:
        done = subprocess.run([*command, "-o", beside], capture_output=True, text=True, errors="replace")
        status, wrote = done.returncode, done.stderr.strip()[-2000:]
    except OSError as error:
        status, wrote = error.errno, f"it cannot be started ({error.strerror})"
    if status:
        raise GuardError(
            f"{compiler}: got status {status} of {' '.join(command[1:])}, wanted a library for torch "
            f"{torch.__version__}: {wrote}; install a g++ that knows C++20 (11 or newer), or name another in the "
            "variable CXX"
        )
    whole.take_name(beside, found, durable=False)
    return found


def environment(device: Device, guard: Path, cudnn: bool | None = None) -> Mapping[str, str]:
    """The variables of a process in which torch believes that this device is there.

    cudnn: whether torch prefers cuDNN's attention; None: as its builds for CUDA 13 do on this device.
    """
    prefers = device.prefers_cudnn if cudnn is None else cudnn
    library = str(Path(torch.__file__).parent / "lib")
    paths = [library, os.environ.get("LD_LIBRARY_PATH", "")]
    return {
        **os.environ,
        "LD_PRELOAD": str(guard),
        "LD_LIBRARY_PATH": os.pathsep.join(filter(None, paths)),
        "FMEGATRON_CUDA_ARCH": str(device.arch),
        "FMEGATRON_CUDA_CUDNN": str(int(prefers)),
    }
