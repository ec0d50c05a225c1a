"""One update as a pure function: gradients, layers compiled once, and jit (trace, lower, donate, compile)."""

from fmegatron.moved import no_name as _no_name
from fmegatron.step.checker.entrypoints import check
from fmegatron.step.description import Description
from fmegatron.step.from_loss import build
from fmegatron.step.gradient import value_and_grad
from fmegatron.step.graph.nodes import symbolic_nodes
from fmegatron.step.jitted import jit
from fmegatron.step.layer import layers, remat
from fmegatron.step.microbatches import accumulate
from fmegatron.step.overlap.schedule import Overlap
from fmegatron.step.parts import Part, mean, means
from fmegatron.step.pipeline.marks import stage
from fmegatron.step.pipeline.options import Pipeline, Pipelining
from fmegatron.step.pipeline.pipeline import pipelined
from fmegatron.step.reduce import reduce_gradients
from fmegatron.step.state import State, averaged_params, state_specs
from fmegatron.step.timelines.measured import timeline
from fmegatron.step.tracing import trace
from fmegatron.step.traffic import collectives_of
from fmegatron.step.train_step import build_train_step

__all__ = [
    "Description",
    "Overlap",
    "Part",
    "Pipeline",
    "Pipelining",
    "State",
    "accumulate",
    "averaged_params",
    "build",
    "build_train_step",
    "check",
    "collectives_of",
    "jit",
    "layers",
    "mean",
    "means",
    "pipelined",
    "reduce_gradients",
    "remat",
    "stage",
    "state_specs",
    "symbolic_nodes",
    "timeline",
    "trace",
    "value_and_grad",
]

globals()["__getattr__"] = _no_name(__name__)
