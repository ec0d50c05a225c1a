"""One pipeline: the outer graph of a jit and the graphs of its layers go through the same passes."""

import torch

from fmegatron.step import jit
from fmegatron.step.graph.nodes import opaque_entries
from fmegatron.step.passes import PASSES, Program, Target
from fmegatron.step.tracing import trace
from tests.fresh_state import fresh_state
from tests.step import tiny


def test_layers_go_through_the_passes_of_the_graph_around_them():
    step = jit(tiny.mlp_step("mincut"), donate=0, backend="eager")
    step(fresh_state(tiny.mlp_params(), tiny.OPTIMIZER), tiny.mlp_batch())
    (compiled,) = step.cache.values()
    bound = opaque_entries(step.graph("exchange"))
    programs = [compiled.program, *(entry.program for entry in bound)]
    assert len(programs) == 3  # a forward and a backward, however many layers there are
    assert {tuple(program.stages) for program in programs} == {("trace", *(name for name, _ in PASSES))}
    assert {program.target.backend for program in programs} == {"eager"}


def test_a_pass_takes_a_graph_and_leaves_it_as_it_is():
    traced = trace(lambda x: (x * 2, x.detach()), (torch.ones(3),))
    program = Program(traced.graph_module, traced.fakes, traced.fake_mode, Target(backend="eager"))
    graph_module = traced.graph_module
    for name, run in PASSES:
        before = str(graph_module.graph)
        after = run(graph_module, program)
        assert str(graph_module.graph) == before, name
        assert str(after.graph) == str(program.stages[name].graph), name
        graph_module = after
