"""One update as a pure function: gradients, layers compiled once, and jit (trace, lower, donate, compile)."""

from fmegatron.step.accumulate import accumulate
from fmegatron.step.check import Declared, Finding, Report, Unproven, check, check_traced
from fmegatron.step.compile import BACKENDS, compile_graph
from fmegatron.step.costs import StateBytes, Traffic, least_traffic, state_bytes
from fmegatron.step.fresh import barrier
from fmegatron.step.grad import raw_gradient_layout, reduce_gradients, value_and_grad
from fmegatron.step.inline import inline_layers
from fmegatron.step.jit import Compiled, Jitted, jit
from fmegatron.step.layer import compiled_layer, remat
from fmegatron.step.lower import lower
from fmegatron.step.opaque import Entry, entry_of, opaque_entries
from fmegatron.step.overlap import Event, Overlap, PaperWorld, Rates, Timeline, launches, overlapped
from fmegatron.step.rows import require_rows
from fmegatron.step.timeline import timeline
from fmegatron.step.trace import Traced, symbolic_nodes, trace
from fmegatron.step.traffic import Transfer, bytes_sent, collectives_of
from fmegatron.step.train_step import State, build_train_step, placements, state_specs

__all__ = [
    "BACKENDS",
    "Compiled",
    "Declared",
    "Entry",
    "Event",
    "Finding",
    "Jitted",
    "Overlap",
    "PaperWorld",
    "Rates",
    "Report",
    "State",
    "StateBytes",
    "Timeline",
    "Traced",
    "Traffic",
    "Transfer",
    "Unproven",
    "accumulate",
    "barrier",
    "build_train_step",
    "bytes_sent",
    "check",
    "check_traced",
    "collectives_of",
    "compile_graph",
    "compiled_layer",
    "entry_of",
    "inline_layers",
    "jit",
    "launches",
    "least_traffic",
    "lower",
    "opaque_entries",
    "overlapped",
    "placements",
    "raw_gradient_layout",
    "reduce_gradients",
    "remat",
    "require_rows",
    "state_bytes",
    "state_specs",
    "symbolic_nodes",
    "timeline",
    "trace",
    "value_and_grad",
]
