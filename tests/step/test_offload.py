"""Activations in host memory: the same numbers, and nothing of a layer on its device between forward and backward."""

import functools
import itertools
import re

import pytest
import torch
from torch._inductor.utils import run_and_get_code

from fmegatron import model, tree
from fmegatron.collectives import Axes
from fmegatron.layout import Layout, Mesh
from fmegatron.step import buckets, build_train_step, check, jit, trace
from fmegatron.step.graph.memory import memory_of
from fmegatron.step.graph.nodes import entry_of
from fmegatron.step.jitted import Compiled
from fmegatron.step.layer import compiled_layer
from fmegatron.step.offload import from_host, is_worth_moving, to_host
from fmegatron.step.passes import Target
from fmegatron.step.torch_private import FakeTensorMode, opname
from tests.fresh_state import fresh_state
from tests.step import tiny

SLOW = pytest.mark.slow
LAYERS = 2
CONFIG = tiny.config_with(layers=LAYERS)
TO, FROM = torch.ops.fmegatron_step.to_host.default, torch.ops.fmegatron_step.from_host.default


def step_of(save, offload):
    """The decoder's train step."""
    layouts, axes = model.layouts(CONFIG, tiny.ONE), Axes(tiny.ONE)
    return build_train_step(lambda p, b: model.loss(p, b, CONFIG, axes, save, offload), tiny.OPTIMIZER, layouts, axes)


@functools.cache
def traced(save, offload):
    """The graph of the step; only to be looked at."""
    return trace(step_of(save, offload), (tiny.decoder_state(CONFIG), tiny.decoder_batch(CONFIG))).graph_module.graph


def kept_bytes(graph):
    """(bytes on the device, bytes of copies on the host) that were made before the last layer's forward is through, its
    copies included, and are read once the first backward begins; what lies in an argument's memory is none of them."""
    order, memory = {node: i for i, node in enumerate(graph.nodes)}, memory_of(graph.nodes)
    calls = [node for node in graph.nodes if entry_of(node)]
    last = max(order[n] for n in graph.nodes if n in calls[LAYERS - 1].users or n.target is TO)
    first = min(order[n] for n in graph.nodes if n is calls[LAYERS] or n.target is FROM)
    alive = {}
    for node in graph.nodes:
        value = node.meta.get("val")
        if isinstance(value, torch.Tensor) and order[node] <= last and any(order[user] >= first for user in node.users):
            alive[memory[node]] = node.target is TO, value.numel() * value.element_size()
    alive = [kept for place, kept in alive.items() if getattr(place, "op", "") != "placeholder"]
    return tuple(sum(size for on_host, size in alive if on_host is where) for where in (False, True))


@pytest.mark.long
@pytest.mark.parametrize("save", ["inputs", "mincut"])
def test_nothing_of_a_layer_stays(save):
    (before, none), (left, there) = (kept_bytes(traced(save, offload)) for offload in (None, 0))
    stream = tiny.decoder_batch(CONFIG)["tokens"].numel() * CONFIG.dim * 8
    assert none == 0 and (there == LAYERS * stream if save == "inputs" else there > 4 * LAYERS * stream)
    assert left == before - there < stream  # the angles of RoPE, which are arguments of all layers


@pytest.mark.slow
@pytest.mark.long
def test_small_values_stay():
    _, all_of_them = kept_bytes(traced("mincut", 0))
    stream = tiny.decoder_batch(CONFIG)["tokens"].numel() * CONFIG.dim * 8
    _, large = kept_bytes(traced("mincut", stream + 1))
    assert 0 < large < all_of_them
    assert kept_bytes(traced("mincut", 1 << 30)) == kept_bytes(traced("mincut", None))


def ordered(names):
    """What moves, in order: forward and backward of layers, and when copies begin and are over."""
    kinds = ("_fwd_", "_bwd_", "leave_", "left_", "begin_", "wait_")
    found = [kind.strip("_") for name in names for kind in kinds if kind in name]
    return [name for name, _ in itertools.groupby(found)]


def wanted_order(layers=LAYERS):
    """Copies leave while the next layer is computed, and come back while the one before is."""
    there = ["fwd", "leave", *["fwd", "left", "leave"] * (layers - 1), "left"]
    return [*there, "begin", *["wait", "begin", "bwd"] * (layers - 1), "wait", "bwd"]


def assert_frees(code):
    """Generated code keeps the order."""
    assert ordered(re.findall(r"torch\.ops\.fmegatron_(?:compiled|step)\.(\w+)", code)) == wanted_order()


class Late(buckets.InOrder):
    """Copies that are made as late as they may be, into memory that is not a number until then."""

    def __init__(self):
        self.coming, self.leaving = [], []

    def store(self, pairs):
        self._begin(self.leaving, pairs)

    def bring(self, pairs):
        self._begin(self.coming, pairs)

    def left(self):
        self._end(self.leaving)

    def arrived(self):
        self._end(self.coming)

    @staticmethod
    def _begin(under_way, pairs):
        for into, _ in pairs:
            into.fill_(torch.nan if into.is_floating_point() else 111)
        under_way += pairs

    @staticmethod
    def _end(under_way):
        for into, x in under_way:
            into.copy_(x)
        under_way.clear()


@pytest.mark.long
@pytest.mark.parametrize(
    "save, backend",
    [
        ("inputs", "eager"),
        ("mincut", "eager"),
        pytest.param("inputs", "inductor", marks=SLOW),
        pytest.param("mincut", "inductor", marks=SLOW),
    ],
)
def test_the_same_numbers(save, backend, monkeypatch):
    """Bit for bit, with copies as late as they may be; what is copied is nobody else's until it has left."""
    monkeypatch.setattr(buckets, "copies_on", lambda device, host_computes=False: Late())
    results, codes = [], []
    for offload in (None, 0):
        run, state = jit(step_of(save, offload), backend=backend), tiny.decoder_state(CONFIG)
        for i in range(2):
            (state, metrics), code = run_and_get_code(run, state, tiny.decoder_batch(CONFIG, seed=i))
            codes += code
        results.append((state, metrics))
    for path, a, b in zip(tree.paths(results[0]), *map(tree.leaves, results), strict=True):
        assert torch.equal(a, b), path
    graph = run.graph("stream")
    assert ordered(opname(node.target) or "" for node in graph.nodes) == wanted_order()
    for node in graph.nodes:
        if (opname(node.target) or "").startswith("leave_"):
            assert any(other.args[1] == node.args[1] for other in node.args[0][0].users if "left_" in other.name)
    if backend == "inductor":
        assert_frees(codes[-1])


@pytest.mark.slow
@pytest.mark.long
def test_the_order_of_compiled_code():
    args = (fresh_state(tiny.mlp_params(LAYERS), tiny.OPTIMIZER), tiny.mlp_batch())
    step = Compiled(tiny.mlp_step("mincut", offload=0), args, (), Target())
    assert_frees(tiny.generated_code(step)[-1])


@pytest.mark.medium
def test_check_knows_the_copies():
    mesh = Mesh(dp=2)
    layouts, axes = model.layouts(CONFIG, mesh), Axes(mesh)
    step = build_train_step(lambda p, b: model.loss(p, b, CONFIG, axes, "mincut", 0), tiny.OPTIMIZER, layouts, axes)
    batch = tree.map(lambda x: Layout(x.shape, x.dtype, mesh, ("dp",)), tiny.decoder_batch(CONFIG))
    report = check(step, tiny.decoder_layouts(CONFIG, mesh), batch)
    assert report.ok


def test_devices_and_strides():
    """As a compiler sees them, of tensors on a device that this machine may not have."""
    with FakeTensorMode():
        x = torch.empty(4, 6, device="cuda").t()
        (there,), y = to_host([x], torch.empty(3, device="cuda"))
        here = from_host(there, y)
    assert (there.device.type, y.device.type, here.device.type) == ("cpu", "cuda", "cuda")
    assert there.stride() == here.stride() == x.stride() and there.shape == x.shape
    assert is_worth_moving(x, 96) and not is_worth_moving(x, 97)
    assert not is_worth_moving(torch.empty(6, 1).expand(6, 9), 0)  # its elements share memory


@pytest.mark.parametrize("offload", [True, -1, 0.5])
def test_wrong_sizes(offload):
    with pytest.raises(ValueError, match="offload=.* wanted bytes"):
        compiled_layer(offload=offload)
