"""The impure shell around a pure step: launching, the loop, logs, signals, faults."""

from fmegatron.loop.config import check, field
from fmegatron.loop.curves import plot_loss, plot_losses
from fmegatron.loop.engines import Engines, engines
from fmegatron.loop.experiment import load_experiment
from fmegatron.loop.faults import Injection, Patience, Pulse, watched
from fmegatron.loop.flags import UsageError, parse, set_up
from fmegatron.loop.launch import launch
from fmegatron.loop.loggers import JsonLines, Log, Table, TensorBoard, WeightsAndBiases, progress, read_metrics
from fmegatron.loop.losses import BadLossError, LossSpike, LossStuck
from fmegatron.loop.metrics import fetch, mean
from fmegatron.loop.nonfinite import NonFiniteError
from fmegatron.loop.replicas import ReplicasDifferError, hashes
from fmegatron.loop.rerun import RerunError
from fmegatron.loop.restart import Restart
from fmegatron.loop.resume import Begun, Changes, Settings
from fmegatron.loop.run import Run
from fmegatron.loop.signals import Stop, catch
from fmegatron.loop.startup import startup
from fmegatron.loop.train import StepInfo, evaluate, train
from fmegatron.loop.until import Until

__all__ = [
    "BadLossError",
    "Begun",
    "Changes",
    "Engines",
    "Injection",
    "JsonLines",
    "Log",
    "LossSpike",
    "LossStuck",
    "NonFiniteError",
    "Patience",
    "Pulse",
    "ReplicasDifferError",
    "RerunError",
    "Restart",
    "Run",
    "Settings",
    "StepInfo",
    "Stop",
    "Table",
    "TensorBoard",
    "Until",
    "UsageError",
    "WeightsAndBiases",
    "catch",
    "check",
    "engines",
    "evaluate",
    "fetch",
    "field",
    "hashes",
    "launch",
    "load_experiment",
    "mean",
    "parse",
    "plot_loss",
    "plot_losses",
    "progress",
    "read_metrics",
    "set_up",
    "startup",
    "train",
    "watched",
]
