"""A process of its own in which torch believes that a device is there: what plans for it runs in one."""

from __future__ import annotations

import subprocess
import sys
import tempfile
from collections.abc import Sequence
from typing import TextIO

from fmegatron.plan.cuda import guard
from fmegatron.plan.cuda.devices import Device

__all__ = ["run"]


def run(arguments: Sequence[str], device: Device, out: TextIO, err: TextIO) -> int:
    """Run Python with these arguments for a device -> its exit status. What it prints comes line by line.

    Raises GuardError, with what to install, where it cannot be done here.
    """
    guard.require_tools()
    environment = guard.environment(device, guard.build())
    with tempfile.TemporaryFile("w+") as errors:
        process = subprocess.Popen(
            [sys.executable, *arguments], env=environment, stdout=subprocess.PIPE, stderr=errors, text=True
        )
        assert process.stdout is not None, "it is a pipe"
        for line in process.stdout:
            print(line, end="", file=out, flush=True)
        status = process.wait()
        errors.seek(0)
        print(errors.read(), end="", file=err)
    return status
