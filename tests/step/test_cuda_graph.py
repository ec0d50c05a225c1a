"""A step as one CUDA graph, without CUDA: what a device would record is a tape here, which does it again at the same
addresses, and does nothing while it is recorded."""

import contextlib
import ctypes
from typing import NamedTuple

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

from fmegatron import tree
from fmegatron.collectives import World
from fmegatron.layout import Mesh
from fmegatron.plan.paper import SizedWorld
from fmegatron.step import cuda_graph, jit
from fmegatron.step.jitted import Compiled
from fmegatron.step.passes import Target
from fmegatron.testing import split
from tests.fresh_state import fresh_state
from tests.nn import moe_step
from tests.step import tiny

CUDA = torch.device("cuda", 0)


class There(NamedTuple):
    """A tensor that was there before, by address alone: a recorded graph keeps nobody's memory."""

    address: int
    nbytes: int
    layout: tuple
    offset: int

    @classmethod
    def of(cls, x):
        memory = x.untyped_storage()
        return cls(memory.data_ptr(), memory.nbytes(), (x.shape, x.stride(), x.dtype), x.storage_offset())

    @property
    def memory(self):
        return torch.frombuffer((ctypes.c_char * self.nbytes).from_address(self.address), dtype=torch.uint8)

    @property
    def tensor(self):
        shape, stride, dtype = self.layout
        return self.memory.view(dtype).as_strided(shape, stride, self.offset)


class Tape(TorchDispatchMode):
    """The operators that run within it, each with the memory of its arguments and results. made: memory of its own, by
    address. before: what memory held that was there before, and was written."""

    def __init__(self):
        super().__init__()
        self.calls, self.made, self.before = [], {}, {}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        given = tensors_in((args, kwargs))
        for x in given if func._schema.is_mutable else ():
            there = There.of(x)
            if there.address not in self.made and there.address not in self.before:
                self.before[there.address] = there, there.memory.clone()
        out = func(*args, **kwargs)
        addresses = {There.of(x).address for x in given}
        new = [x for x in tensors_in(out) if There.of(x).address not in addresses]
        self.made |= {There.of(x).address: x for x in new}
        self.calls.append((func, *tree_map(self._kept, (args, kwargs)), new))
        return out

    def _kept(self, x):
        return There.of(x) if isinstance(x, torch.Tensor) and There.of(x).address not in self.made else x

    def undo(self):
        for there, then in self.before.values():
            there.memory.copy_(then)

    def again(self):
        for func, args, kwargs, new in self.calls:
            args, kwargs = tree_map(lambda x: x.tensor if isinstance(x, There) else x, (args, kwargs), is_leaf=is_there)
            found = tensors_in(func(*args, **kwargs))
            for into, x in zip(new, found if new else (), strict=True):
                into.copy_(x)


def is_there(x):
    return isinstance(x, There)


def tensors_in(values):
    return [x for x in tree_leaves(values) if isinstance(x, torch.Tensor)]


class Tapes:
    """A recorder of tapes, all of which stay here. replays: how often one was run."""

    def __init__(self):
        self.tapes, self.replays = [], 0

    def record(self, run):
        with Tape() as tape:
            outs = run()
        tape.undo()
        for out in outs:
            out.fill_(0 if out.dtype is torch.bool or not out.is_floating_point() else torch.nan)
        self.tapes.append(tape)
        return outs, lambda: self._again(tape)

    def _again(self, tape):
        self.replays += 1
        tape.again()


@pytest.fixture
def tapes(monkeypatch):
    found = Tapes()
    monkeypatch.setattr(cuda_graph, "recorder_on", lambda device, graph, world: found)
    return found


def state():
    return fresh_state(tiny.mlp_params(), tiny.OPTIMIZER)


def same(a, b):
    for path, x, y in zip(tree.paths(a), tree.leaves(a), tree.leaves(b), strict=True):
        assert torch.equal(x, y), path


def addresses(state):
    return [x.data_ptr() for x in tree.leaves(state)]


@pytest.mark.parametrize("backend", ["eager", pytest.param("aot_eager", marks=pytest.mark.medium)])
@pytest.mark.parametrize("save", [None, "inputs"])
def test_the_same_bits_at_the_same_addresses(tapes, backend, save):
    """Six calls, of which one runs, one is recorded, and five are launched; each batch is another."""
    plain = jit(tiny.mlp_step(save), donate=0, backend=backend)
    graph = jit(tiny.mlp_step(save), donate=0, backend=backend, cuda_graph=True)
    (a, b), at, metrics = (state(), state()), None, []
    for i in range(6):
        batch = tiny.mlp_batch(seed=i)
        given = tree.copies(batch)
        a, wanted = plain(a, batch)
        b, found = graph(b, given)
        metrics.append((wanted, found))
        same(given, batch)  # what is not donated stays the caller's
        assert at is None or addresses(b) == at
        at = addresses(b)
    same(a, b)
    for wanted, found in metrics:  # no later launch has written them
        same(wanted, found)
    assert len(tapes.tapes) == 1 and tapes.replays == 5


def test_a_state_elsewhere_runs_before_it_is_recorded(tapes):
    """A restore gives arrays at other addresses: what was recorded is not launched with them."""
    plain, graph = (jit(tiny.mlp_step(), donate=0, backend="eager", cuda_graph=of) for of in (False, True))
    a, b = state(), state()
    with pytest.warns(UserWarning, match="cuda_graph: got donated arrays at other addresses 3 times"):
        for i in range(10):
            if i in (3, 5, 8):
                a, b = tree.copies(a), tree.copies(b)
            (a, wanted), (b, found) = (run(x, tiny.mlp_batch(seed=i)) for run, x in ((plain, a), (graph, b)))
            same(wanted, found)
    same(a, b)
    assert len(tapes.tapes) == 4 and tapes.replays == 6


def test_a_renewed_world_is_recorded_again(tapes):
    """Its old communicators, which a recorded graph has, are gone."""
    world = World.alone("cpu")
    graph, now = jit(tiny.mlp_step(), donate=0, world=world, backend="eager", cuda_graph=True, check=False), state()
    for i in range(3):
        now, _ = graph(now, tiny.mlp_batch(seed=i))
    world.begun += 1
    for i in range(2):
        now, _ = graph(now, tiny.mlp_batch(seed=i))
    assert len(tapes.tapes) == 2


def test_what_cannot_be(monkeypatch):
    with pytest.raises(ValueError, match=r"cuda_graph=True, donate=None, wanted True only where .*give donate=0"):
        jit(tiny.mlp_step(), cuda_graph=True)
    with pytest.raises(ValueError, match="cuda_graph='yes'"):
        jit(tiny.mlp_step(), donate=0, cuda_graph="yes")
    with pytest.raises(ValueError, match="cuda_graph: got a step on cpu, wanted one on a device of CUDA"):
        jit(tiny.mlp_step(), donate=0, backend="eager", cuda_graph=True)(state(), tiny.mlp_batch())


def lowered(step, args, world=None):
    return Compiled(step, args, (0,), Target(world, "eager")).program.graph_module.graph


def test_a_host_that_works_is_refused_with_its_line():
    graph = lowered(tiny.mlp_step("inputs"), (state(), tiny.mlp_batch()))
    assert isinstance(cuda_graph.recorder_on(CUDA, graph, None), cuda_graph.OnDevice)
    graph = lowered(tiny.mlp_step("inputs", offload=0), (state(), tiny.mlp_batch()))
    with pytest.raises(ValueError, match=r"got rooms_on_host\w* at .*tiny.py:\d+.* travel to host .*leave out offload"):
        cuda_graph.recorder_on(CUDA, graph, None)


@pytest.mark.medium
@pytest.mark.parametrize(
    ("of", "why"),
    [
        ("dp2 ep2", "got all_to_all_rows.* counts of rows are read on the host; fix their number.*pair_rows"),
        ("from each as many", "got grouped_mm.* ends of groups are read on the host; compute experts in bf16"),
    ],
)
def test_experts_whose_counts_are_read(of, why):
    """With as many rows from each rank to each, only products that are not of bf16 read anything."""
    mesh = moe_step.setting_of(of).mesh
    layouts, step = moe_step.layouts(mesh, of), moe_step.make_step(mesh, of)
    args = tuple(one[0] for one in map(split, moe_step.values(of), layouts))
    with SizedWorld(mesh, 0, "cpu") as world:
        graph = Compiled(step, args, (), Target(world, "eager")).program.graph_module.graph
        with pytest.raises(ValueError, match=why):
            cuda_graph.recorder_on(CUDA, graph, world)


def test_gloo_is_refused():
    graph = lowered(tiny.mlp_step(), (state(), tiny.mlp_batch()))
    with SizedWorld(Mesh(dp=2), 0, "cpu") as world, pytest.raises(ValueError, match="without NCCL"):
        cuda_graph.recorder_on(CUDA, graph, world)


@contextlib.contextmanager
def calls_noted(monkeypatch):
    noted = []

    class Graph:
        replay = "replay"

    @contextlib.contextmanager
    def entered(name, *args, **named):
        noted.append((name, *args, named))
        yield
        noted.append(f"{name} ends")

    monkeypatch.setattr(torch.cuda, "CUDAGraph", Graph)
    monkeypatch.setattr(torch.cuda, "device", lambda device: entered("device", device))
    monkeypatch.setattr(torch.cuda, "graph", lambda graph, **named: entered("graph", type(graph).__name__, **named))
    yield noted


def test_what_is_asked_of_cuda(monkeypatch):
    """Its own device is current, and threads that copy batches meanwhile do not end the recording."""
    with calls_noted(monkeypatch) as noted:
        outs, again = cuda_graph.OnDevice(CUDA).record(lambda: [noted.append("runs")])
    assert again == "replay" and outs == [None]
    assert noted == [
        ("device", CUDA, {}),
        ("graph", "Graph", {"capture_error_mode": "thread_local"}),
        "runs",
        "graph ends",
        "device ends",
    ]
