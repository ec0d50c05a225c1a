"""0 host synchronisations in a step: for every optimizer, with guard and clip, traced, run, and compiled."""

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from fmegatron import optim, tree
from fmegatron.collectives import Axes, psum
from fmegatron.layout import Mesh
from fmegatron.optim.guard import Spike
from fmegatron.step import State, build_train_step, jit, state_specs, trace
from tests.fresh_state import fresh_state
from tests.optim.table import DTYPES, ONE, TABLE, make_params, make_specs
from tests.pairs import few

# Ops whose result, or its size, is on the host: with an accelerator each waits until all that was launched is done.
SYNC = {
    "_local_scalar_dense", "item", "nonzero", "nonzero_numpy", "is_nonzero", "equal", "masked_select", "unique",
    "_unique2", "unique_consecutive", "unique_dim", "allclose", "repeat_interleave", "bincount", "histc",
}  # fmt: skip


def op_of(target):
    """The name of an op without namespace and overload; "" for what is no op."""
    schema = getattr(target, "_schema", None)
    return "" if schema is None else schema.name.partition("::")[2]


def cases():
    """(how the optimizer is made, largest norm): each bare and with all that looks at the norm; some by default."""
    found = {}
    for name, row in TABLE.items():
        found[f"{name}-bare"] = row.make, None
        if "guarded" not in name:
            found[f"{name}-guard-clip"] = guarded(row.make), 1.0
    return few(5, found.values(), found)


def guarded(make):
    def made():
        options = {"spike": Spike(warmup=1), "loss_scale": optim.LossScale()}
        return optim.skip_nonfinite(make(), **options)

    return made


def make_step(make, clip_norm, mesh):
    """(train step of a quadratic, optimizer) in fp32."""
    layouts, axes = tree.layouts(make_specs(DTYPES["fp32"], mesh)), Axes(mesh, data=("dp",))
    opt = make()

    def loss_fn(params, batch):
        total = 0.0
        for x, layout in zip(tree.leaves(params), tree.leaves(layouts), strict=True):
            total = total + psum((x - 0.3).square().sum(), axes[layout.sharded])
        return total * batch.mean(), {}

    return build_train_step(loss_fn, opt, layouts, axes, clip_norm=clip_norm), opt


@pytest.mark.long
@pytest.mark.parametrize("make, clip_norm", cases())
def test_no_op_of_the_graph_asks_the_host(make, clip_norm):
    mesh = Mesh(dp=2, fsdp=2, tp=2)
    step, opt = make_step(make, clip_norm, mesh)
    state = tree.init(State(*state_specs(make_specs(DTYPES["fp32"], mesh), opt)), key=0, rank=0)
    graph = trace(step, (state, torch.ones(4))).graph_module.graph
    assert not SYNC & {op_of(node.target) for node in graph.nodes}
    for node in graph.nodes:
        value = node.meta.get("val")
        assert not isinstance(value, (torch.SymInt, torch.SymFloat, torch.SymBool, int, float, bool)), node


class Ops(TorchDispatchMode):
    """Names of all ops that run."""

    def __init__(self):
        super().__init__()
        self.seen = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.seen.add(op_of(func))
        return func(*args, **(kwargs or {}))


@pytest.mark.long
@pytest.mark.parametrize("make, clip_norm", cases())
def test_no_op_that_runs_asks_the_host(make, clip_norm):
    """The step that jit made, called a second time: what the trace saw is what runs."""
    step, opt = make_step(make, clip_norm, ONE)
    compiled = jit(step, donate=0, backend="eager")
    state, _ = compiled(fresh_state(make_params(DTYPES["fp32"]), opt), torch.ones(4))
    with Ops() as ops:
        compiled(state, torch.ones(4))
    assert "mul" in ops.seen and not SYNC & ops.seen


def test_an_op_that_asks_the_host_would_be_seen():
    with Ops() as ops:
        float(torch.ones(()))
        torch.ones(3).nonzero()
        torch.equal(torch.ones(2), torch.ones(2))
    assert {"_local_scalar_dense", "nonzero", "equal"} <= ops.seen & SYNC


@pytest.mark.slow  # two compilations
@pytest.mark.parametrize("name", ["adamw", "muon"])
def test_no_compiled_step_asks_the_host(name):
    """Ops that Inductor leaves to torch, and what the compiled code calls, as the profiler sees them."""
    step, opt = make_step(guarded(TABLE[name].make), 1.0, ONE)
    compiled = jit(step, donate=0)
    state, _ = compiled(fresh_state(make_params(DTYPES["fp32"]), opt), torch.ones(4))
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        compiled(state, torch.ones(4))
    names = {event.name.partition("::")[2] for event in profile.events()}
    assert len(profile.events()) > 3 and not SYNC & names
