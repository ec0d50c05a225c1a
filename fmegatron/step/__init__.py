"""One update as a pure function: gradients, layers compiled once, and jit (trace, lower, donate, compile)."""

from fmegatron.step.accumulate import accumulate
from fmegatron.step.check import Finding, Report, Unproven, check
from fmegatron.step.clock import matmul_seconds, seconds_of
from fmegatron.step.costs import StateBytes, Traffic, WeightTransfer, least_traffic, least_transfers, state_bytes
from fmegatron.step.description import Description
from fmegatron.step.donation import Donated
from fmegatron.step.from_loss import build
from fmegatron.step.gradient import value_and_grad
from fmegatron.step.graph.nodes import symbolic_nodes
from fmegatron.step.jit import Jitted, jit
from fmegatron.step.layer import compiled_layer, layer_layout, layer_of, layers, remat, unstack
from fmegatron.step.overlap import Overlap
from fmegatron.step.partition import Policy
from fmegatron.step.parts import Part, mean, means
from fmegatron.step.reduce import raw_gradient_layout, reduce_gradients
from fmegatron.step.state import State, averaged_params, placements, state_specs
from fmegatron.step.timeline import Event, PaperWorld, Rates, Timeline, launches, timeline
from fmegatron.step.trace import Traced, trace
from fmegatron.step.traffic import Transfer, bytes_sent, collectives_of
from fmegatron.step.train_step import build_train_step

__all__ = [
    "Description",
    "Donated",
    "Event",
    "Finding",
    "Jitted",
    "Overlap",
    "PaperWorld",
    "Part",
    "Policy",
    "Rates",
    "Report",
    "State",
    "StateBytes",
    "Timeline",
    "Traced",
    "Traffic",
    "Transfer",
    "Unproven",
    "WeightTransfer",
    "accumulate",
    "averaged_params",
    "build",
    "build_train_step",
    "bytes_sent",
    "check",
    "collectives_of",
    "compiled_layer",
    "jit",
    "launches",
    "layer_layout",
    "layer_of",
    "layers",
    "least_traffic",
    "least_transfers",
    "matmul_seconds",
    "mean",
    "means",
    "placements",
    "raw_gradient_layout",
    "reduce_gradients",
    "remat",
    "seconds_of",
    "state_bytes",
    "state_specs",
    "symbolic_nodes",
    "timeline",
    "trace",
    "unstack",
    "value_and_grad",
]
