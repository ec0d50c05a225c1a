"""Proof 4: what each strategy holds and sends on a rank is what the formulas say, measured and counted."""

import math

import pytest
import torch

from fmegatron import model, optim, tree
from fmegatron.collectives import Axes
from fmegatron.layout import DataParallel, Layout, Mesh
from fmegatron.layout.data_parallel import DATA_AXES
from fmegatron.step import build_train_step, collectives_of, state_specs, trace
from fmegatron.step.costs import least_traffic, state_bytes
from fmegatron.step.graph.nodes import entry_of
from tests.pairs import few
from tests.step.strategies import STRATEGIES

MESHES = [Mesh(fsdp=4), Mesh(dp=2, fsdp=2), Mesh(dp=2, fsdp=2, tp=2)]
CONFIG = model.llama(vocab_size=64, dim=32, layers=2, heads=4, kv_heads=4, ffn_dim=48, max_seq=8)
OPTIMIZER = optim.adamw(1e-3)
NUMBERS = 4  # a collective of no more elements carries losses, counts or norms, no tensor


def traced(strategy, mesh, microbatches, config=CONFIG):
    """The graph of one step on symbolic axes, of rank 0's shapes."""
    specs, axes = model.specs(config, mesh, strategy=strategy), Axes(mesh)
    layouts = tree.layouts(specs)

    def loss(params, batch):
        return model.loss(params, batch, config, axes, "inputs")

    step = build_train_step(loss, OPTIMIZER, layouts, axes, strategy=strategy, microbatches=microbatches)
    state = tree.init(state_specs(specs, OPTIMIZER, strategy), 0, 0)
    tokens = torch.zeros(2 * microbatches, config.max_seq, dtype=torch.int64)
    return trace(step, (state, {"tokens": tokens, "labels": tokens})).graph_module.graph


def whole_bytes(mesh, itemsize):
    """Bytes of all parameters on the data ranks together: leaves that tp splits count with this rank's part."""
    placed = model.layouts(CONFIG, mesh, strategy=DataParallel.replicated())
    return sum(itemsize * math.prod(layout.local_shape(0)) for layout in tree.leaves(placed))


def accumulated_bytes(graph):
    """Bytes of gradients that wait while the last microbatch runs: made before it, read after it, numbers left out."""
    order = {node: i for i, node in enumerate(graph.nodes)}
    last = max(order[node] for node in graph.nodes if entry_of(node) is not None)
    waiting = [
        node
        for node in graph.nodes
        if node.op == "call_function" and order[node] < last and any(order[user] > last for user in node.users)
    ]
    values = [node.meta["val"] for node in waiting]
    return sum(x.numel() * x.element_size() for x in values if isinstance(x, torch.Tensor) and x.dim())


@pytest.mark.long
@pytest.mark.parametrize("mesh", MESHES, ids=str)
@pytest.mark.parametrize("name", STRATEGIES)
def test_state(name, mesh):
    """Table A2: whole bytes over the ranks that shard a kind; the tensors that exist have exactly these bytes."""
    strategy = STRATEGIES[name]
    specs = model.specs(CONFIG, mesh, strategy=strategy)
    formula = state_bytes(specs, OPTIMIZER)
    P, G, S = whole_bytes(mesh, 4), whole_bytes(mesh, 4), whole_bytes(mesh, 8)

    def over(axes):
        return mesh.extent(tuple(a for a in axes if a in mesh))

    assert formula.params == P // over(strategy.params)
    assert formula.grads == G // over(strategy.grads)
    assert formula.optim == S // over(strategy.optim) + 8  # the count
    for rank in (0, mesh.size - 1):
        state = tree.init(state_specs(specs, OPTIMIZER, strategy), 0, rank)
        held = [sum(x.numel() * x.element_size() for x in tree.leaves(kind)) for kind in (state.params, state.opt)]
        assert held == [formula.params, formula.optim]


@pytest.mark.medium
@pytest.mark.parametrize("microbatches", [pytest.param(1, marks=pytest.mark.slow), 3])
@pytest.mark.parametrize("mesh", [MESHES[1], *(pytest.param(m, marks=pytest.mark.slow) for m in MESHES[::2])], ids=str)
@pytest.mark.parametrize("name", few(2, [(name,) for name in STRATEGIES], STRATEGIES))
def test_traffic_and_accumulated_gradients(name, mesh, microbatches):
    """The graph sends the fewest bytes over the data axes, and keeps only what the strategy says between microbatches.

    Layers are gathered twice in a microbatch (forward, backward), embedding and head once.
    """
    strategy = STRATEGIES[name]
    graph, specs = traced(strategy, mesh, microbatches), model.specs(CONFIG, mesh, strategy=strategy)
    over_data = [c for c in collectives_of(graph, mesh) if set(c.axes) <= set(DATA_AXES)]
    least = least_traffic(
        tree.layouts(specs), strategy, microbatches, gathers=lambda path: 2 if path.startswith("blocks/") else 1
    )
    assert sum(c.sent for c in over_data if c.elements > NUMBERS) == least.total > 0
    if microbatches > 1:
        assert accumulated_bytes(graph) == state_bytes(specs, OPTIMIZER).grads


def test_the_fewest_bytes_of_one_matrix():
    """Numbers that can be checked by hand: 1024 fp32 elements over 2 x 2 data ranks."""
    w = {"w": Layout((4, 256), torch.float32, Mesh(dp=2, fsdp=2))}

    def bytes_of(strategy, **options):
        return parts_of(least_traffic(tree.map(strategy.params_layout, w), strategy, **options))

    assert bytes_of(STRATEGIES["replicated"]) == (0, 6144, 0)  # 2 · 3/4 of 4096
    assert bytes_of(STRATEGIES["replicated"], microbatches=3) == (0, 6144, 0)  # once a step
    assert bytes_of(STRATEGIES["zero1"], microbatches=3) == (0, 3072, 3072)
    assert bytes_of(STRATEGIES["zero2"], microbatches=3) == (0, 9216, 3072)
    assert bytes_of(STRATEGIES["zero3"], microbatches=3) == (18432, 9216, 0)
    assert bytes_of(STRATEGIES["hsdp"]) == (4096, 2048 + 2048, 0)  # halves over fsdp, then 2 · 1/2 of 2048 over dp
    assert bytes_of(STRATEGIES["hybrid"]) == (4096, 2048 + 1024, 1024)
    assert bytes_of(STRATEGIES["zero3"], gather_dtype=lambda _: torch.bfloat16) == (3072, 3072, 0)
    # bf16 on the wire each time; what was accumulated is fp32
    assert bytes_of(STRATEGIES["hsdp"], microbatches=2, reduce_dtype=lambda _: torch.bfloat16) == (8192, 2048 + 2048, 0)


def test_frozen_leaves_and_narrow_ones():
    """What is frozen has neither gradient nor state, and is not sent; what is updated travels in its own dtype."""
    mesh, strategy = Mesh(dp=2), DataParallel.zero1("dp")
    w = Layout((4, 256), torch.bfloat16, mesh)
    specs = {name: tree.ArraySpec(w, 0, strategy=strategy) for name in ("frozen", "w")}
    opt = optim.grouped(1e-3, [("frozen", optim.Group(frozen=True))], adam=optim.scale_by_adam())
    held = state_bytes(specs, opt)
    # of w alone: gradients in fp32; half of the moments and of the master copy in fp32, and the count
    assert (held.params, held.grads, held.optim) == (2 * 2048, 4096, 3 * 2048 + 8)
    found = least_traffic(tree.layouts(specs), strategy, trains=opt.trains)
    assert parts_of(found) == (0, 1024, 1024)  # half of 2048 bytes each


def parts_of(traffic):
    assert traffic.total == traffic.gather + traffic.reduce + traffic.update
    return traffic.gather, traffic.reduce, traffic.update
