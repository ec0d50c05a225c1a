"""Meter: what a run's records hold beside its metrics: MFU, memory, energy, and where the time of a step goes."""

import contextlib
import time
from collections.abc import Mapping
from typing import Any

import torch

from fmegatron.loop.hardware import Peak, energy_reader, memory_reader, peak_of
from fmegatron.loop.training import StepInfo

SECTIONS = ("data", "log", "save", "evaluation", "caller")  # and "step", which `train` measures
# What the records hold of it beside `mfu`; the table on a terminal leaves it out.
QUIET = ("memory_gb", "joules", "time_exposed", "time_step", *(f"time_{name}" for name in SECTIONS))


class _Section(contextlib.AbstractContextManager[None]):
    """A block whose time is added to `seconds[name]`; three of them a step, so no generator."""

    __slots__ = ("_began", "_name", "_seconds")

    def __init__(self, seconds: dict[str, float], name: str):
        self._seconds, self._name, self._began = seconds, name, 0.0

    def __enter__(self) -> None:
        self._began = time.perf_counter()

    def __exit__(self, *_: object) -> None:
        self._seconds[self._name] += time.perf_counter() - self._began


class Meter:
    """The clocks of one rank's loop. `record(info)` at log points: numbers since the log point before.

    mfu: model FLOPs of all ranks a second, over the peak of all their devices (PaLM, arXiv 2204.02311, appendix B).
    memory_gb: 10^9 bytes, what `memory_reader` names. joules: that this rank's device took, per step. time_data,
    time_step, time_log, time_save, time_evaluation, time_caller: seconds per step that the host waited for the batch,
    spent in the step (at log points until the device had finished it), wrote logs, saved, evaluated, and was in the
    body of the caller's loop. time_exposed: the part of time_step in which computation waited for communication, where
    it was measured (`measured_exposed`). Only clocks and counters of the host are read: nothing waits for the device.

    Args:
        device: of this rank.
        ranks: that compute together.
        flops_per_token: forward and backward (`model.flops_per_token`); None: no MFU.
        peak: of one device; None: `peak_of`, when there are FLOPs to compare.
        active: whether this rank's numbers are read; only then is a peak measured.
        start: updates that were made before.
    """

    def __init__(
        self,
        device: torch.device,
        ranks: int = 1,
        flops_per_token: float | None = None,
        peak: Peak | None = None,
        active: bool = True,
        start: int = 0,
    ):
        if peak is not None and not isinstance(peak, Peak):
            raise ValueError(
                f"Meter: peak: got {peak!r:.60}, wanted a Peak; write Peak(989e12, 'dense bf16 of an H100')"
            )
        self.ranks, self.flops_per_token = ranks, flops_per_token
        self.peak = (peak or peak_of(device)) if flops_per_token and active else None
        self._bytes, self.memory = memory_reader(device)
        self._joules, self._taken, self._exposed = energy_reader(device) if active else None, 0.0, None
        self._seconds: dict[str, float] = {name: 0.0 for name in SECTIONS}
        self._at = start
        if self._joules is not None:
            self._taken = self._joules()

    def about(self) -> dict[str, Any]:
        """What the numbers are based on, as JSON values."""
        found = {"memory": self.memory, "energy": "NVML, of this rank's device" if self._joules else None}
        return {**found, "peak": None if self.peak is None else str(self.peak), "ranks": self.ranks}

    def section(self, name: str) -> contextlib.AbstractContextManager[None]:
        """Count the time of this block as one of `SECTIONS`."""
        return _Section(self._seconds, name)

    def measured_exposed(self, seconds: float) -> None:
        """The next record states these seconds per step of exposed communication: `step.timeline(...).waiting`."""
        self._exposed = float(seconds)

    def record(self, info: StepInfo) -> dict[str, float]:
        """`info.record()` at a log point, with the numbers above; the clocks begin anew."""
        record, steps = info.record(), max(1, info.step - self._at)
        self._seconds["data"] = info.waited * steps
        if self.peak is not None and record.get("tokens_per_second") and self.flops_per_token:
            rate = record["tokens_per_second"] * self.flops_per_token
            record["mfu"] = rate / (self.peak.flops * self.ranks)
        record["memory_gb"] = self._bytes() / 1e9
        if self._joules is not None:
            taken = self._joules()
            record["joules"], self._taken = (taken - self._taken) / steps, taken
        record["time_step"] = max(0.0, info.seconds - self._seconds["data"] / steps)
        record |= {f"time_{name}": seconds / steps for name, seconds in self._seconds.items()}
        if self._exposed is not None:
            record["time_exposed"], self._exposed = self._exposed, None
        self._seconds, self._at = {name: 0.0 for name in SECTIONS}, info.step
        return record


def split_of(record: Mapping[str, Any]) -> dict[str, float]:
    """Seconds per step by section, of a record; empty for a record without them.

    >>> split_of({"loss": 1.0, "time_step": 0.5, "time_data": 0.25})
    {'data': 0.25, 'step': 0.5}
    """
    found = {name: record.get(f"time_{name}") for name in ("data", "step", *SECTIONS[1:])}
    return {name: value for name, value in found.items() if isinstance(value, int | float)}
