"""The impure shell around a pure step: launching, the loop, logs, signals, faults."""

from fmegatron.loop.config import UsageError, check, field
from fmegatron.loop.curves import plot_loss, plot_losses
from fmegatron.loop.deterministic import deterministic
from fmegatron.loop.engines import Engines, engines
from fmegatron.loop.events import Events, read_events
from fmegatron.loop.experiment import Experiment, load_experiment
from fmegatron.loop.faults import Injection, Patience, Pulse, watched
from fmegatron.loop.flags import parse, set_up
from fmegatron.loop.hardware import Peak, peak_of
from fmegatron.loop.launch import launch
from fmegatron.loop.loggers import JsonLines, Loggers, Table, progress, read_metrics
from fmegatron.loop.losses import BadLossError, LossSpike, LossStuck
from fmegatron.loop.meter import Meter
from fmegatron.loop.metrics import fetch, mean
from fmegatron.loop.nonfinite import NonFiniteError
from fmegatron.loop.options import Faults, Local, Log, Memory, Options, Policies, Save
from fmegatron.loop.reading import own_rows
from fmegatron.loop.replicas import ReplicasDifferError, hashes
from fmegatron.loop.report import Recorded, read_run, report_page
from fmegatron.loop.rerun import RerunError
from fmegatron.loop.restart import Restart
from fmegatron.loop.resume import Begun, Changes, Settings
from fmegatron.loop.run import Run
from fmegatron.loop.services import MLflow, OpenTelemetry, TensorBoard, WeightsAndBiases
from fmegatron.loop.signals import Stop, catch
from fmegatron.loop.startup import startup
from fmegatron.loop.train import StepInfo, evaluate, train
from fmegatron.loop.until import Until
from fmegatron.loop.windows import Window, windows

__all__ = [
    "BadLossError",
    "Begun",
    "Changes",
    "Engines",
    "Events",
    "Experiment",
    "Faults",
    "Injection",
    "JsonLines",
    "Local",
    "Log",
    "Loggers",
    "LossSpike",
    "LossStuck",
    "MLflow",
    "Memory",
    "Meter",
    "NonFiniteError",
    "OpenTelemetry",
    "Options",
    "Patience",
    "Peak",
    "Policies",
    "Pulse",
    "Recorded",
    "ReplicasDifferError",
    "RerunError",
    "Restart",
    "Run",
    "Save",
    "Settings",
    "StepInfo",
    "Stop",
    "Table",
    "TensorBoard",
    "Until",
    "UsageError",
    "WeightsAndBiases",
    "Window",
    "catch",
    "check",
    "deterministic",
    "engines",
    "evaluate",
    "fetch",
    "field",
    "hashes",
    "launch",
    "load_experiment",
    "mean",
    "own_rows",
    "parse",
    "peak_of",
    "plot_loss",
    "plot_losses",
    "progress",
    "read_events",
    "read_metrics",
    "read_run",
    "report_page",
    "set_up",
    "startup",
    "train",
    "watched",
    "windows",
]
