"""Peak of the heap of a whole process: all threads and libraries, counted where malloc hands memory out."""

import ctypes
import os
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from fmegatron.testing.measure import peak_bytes as peak_bytes_of_testing

__all__ = ["counted_in_children", "peak_bytes"]


@contextmanager
def counted_in_children() -> Iterator[bool]:
    """Processes started within have their heap counted (heap.c, preloaded); False where that cannot be built here."""
    before = os.environ.get("LD_PRELOAD")
    with tempfile.TemporaryDirectory() as folder:
        library = Path(folder, "heap.so")
        source = Path(__file__).with_name("heap.c")
        command = [os.environ.get("CC", "cc"), "-O2", "-shared", "-fPIC", str(source), "-o", str(library)]
        try:
            built = subprocess.run(command, capture_output=True).returncode == 0
        except OSError:
            built = False
        if built:
            os.environ["LD_PRELOAD"] = f"{library}:{before}" if before else str(library)
        try:
            yield built
        finally:
            if before is not None:
                os.environ["LD_PRELOAD"] = before
            else:
                os.environ.pop("LD_PRELOAD", None)


def peak_bytes(work: Callable[[], Any]) -> int:
    """Largest size of this process's heap during one call, above that before it.

    Where the heap is not counted: what torch's profiler says of this thread (`testing.peak_bytes`).
    """
    process = ctypes.CDLL(None)
    if not hasattr(process, "heap_top"):
        return peak_bytes_of_testing(work)
    process.heap_live.restype = process.heap_top.restype = ctypes.c_long
    process.heap_reset()
    before = process.heap_live()
    work()
    return process.heap_top() - before
