"""The impure shell around a pure step: launching, the loop, logs, signals, faults."""

from fmegatron.loop.config import check, field
from fmegatron.loop.curves import plot_loss, plot_losses
from fmegatron.loop.determinism import deterministic
from fmegatron.loop.experiment import Experiment
from fmegatron.loop.flags import set_up
from fmegatron.loop.launcher import launch
from fmegatron.loop.loggers import JsonLines, Loggers, read_metrics
from fmegatron.loop.losses import BadLoss
from fmegatron.loop.notebook_ranks import engines
from fmegatron.loop.options import Faults, Local, Log, Options, Policies, Save
from fmegatron.loop.reading import own_rows
from fmegatron.loop.report.page import report_page
from fmegatron.loop.report.read import read_run
from fmegatron.loop.restart import Restart
from fmegatron.loop.resume import Settings
from fmegatron.loop.run import Run
from fmegatron.loop.services import TensorBoard, WeightsAndBiases
from fmegatron.loop.training import evaluate, train
from fmegatron.loop.until import Until
from fmegatron.moved import no_name as _no_name

__all__ = [
    "BadLoss",
    "Experiment",
    "Faults",
    "JsonLines",
    "Local",
    "Log",
    "Loggers",
    "Options",
    "Policies",
    "Restart",
    "Run",
    "Save",
    "Settings",
    "TensorBoard",
    "Until",
    "WeightsAndBiases",
    "check",
    "deterministic",
    "engines",
    "evaluate",
    "field",
    "launch",
    "own_rows",
    "plot_loss",
    "plot_losses",
    "read_metrics",
    "read_run",
    "report_page",
    "set_up",
    "train",
]

globals()["__getattr__"] = _no_name(__name__)
