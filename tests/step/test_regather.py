"""Where a step gathers weights: before the first use, dropped behind the forward, again for the backward."""

import collections
import functools
import importlib
import itertools

import pytest
import torch

from fmegatron import optim, plan, step, testing, tree
from fmegatron.collectives import Axes, Precision, connect, psum
from fmegatron.collectives.kinds import collective_of
from fmegatron.layout import DataParallel, Mesh
from fmegatron.step.graph.nodes import is_light
from fmegatron.step.regather import regathered
from fmegatron.step.tracing import trace
from tests.pairs import each_value
from tests.step.own_towers import WAYS, described, start
from tests.step.proven import proven_and_equal

LEAF = 1 << 22  # bytes of a large leaf in fp64
LITTLE = {"dim": 16, "width": 32}  # a leaf of 4 KiB


def traced(made):
    arrays = tree.map(lambda of: torch.empty(of.local_shape(0), dtype=of.dtype), tree.layouts((made.state, made.batch)))
    return trace(made.function, arrays)


def sent(graph, mesh):
    return collections.Counter(one.op for one in step.collectives_of(graph, mesh))


TRACING = importlib.import_module("fmegatron.step.tracing")


@pytest.fixture
def as_written(monkeypatch):
    """Steps that are traced are left as they are written."""
    return lambda: monkeypatch.setattr(TRACING, "regathered", lambda graph_module: graph_module)


@pytest.fixture
def little(monkeypatch):
    """A leaf of 4 KiB is a large one: the same graphs, of small numbers."""
    monkeypatch.setattr(TRACING, "regathered", functools.partial(regathered, together=LEAF >> 10))


# ---- memory ----------------------------------------------------------------------------------------------------------
@pytest.mark.slow
@pytest.mark.long
@pytest.mark.parametrize(("way", "leaves"), [("a module", 4), (WAYS[2], 4), ("plain layers", 5)])
def test_memory_does_not_depend_on_how_gathers_are_written(way, leaves):
    """8 leaves of 4 MiB on fsdp=8: a shard and four leaves, where as written it is all 8 and a shard.

    The gradients of a stack, a shard or two leaves, are there from the first layer on.
    """
    mesh = Mesh(fsdp=8)
    made = described(mesh, way, blocks=4, dim=512, width=2048, dtype=torch.float32)
    found = plan.exact(made.function, made.state, made.batch, mesh)
    assert found.transient <= leaves * LEAF + (1 << 20), str(found)


@pytest.mark.slow
@pytest.mark.long
def test_as_written_all_weights_are_kept(as_written):
    as_written()
    mesh = Mesh(fsdp=8)
    made = described(mesh, "a module", blocks=4, dim=512, width=2048, dtype=torch.float32)
    assert plan.exact(made.function, made.state, made.batch, mesh).transient > 8 * LEAF


# ---- values ----------------------------------------------------------------------------------------------------------
def proven_and_equal_tower(mesh, steps=2, **how):
    state, batch = start(**how)
    made = described(mesh, **how)
    at = (made.state, made.batch)
    return proven_and_equal(lambda m: described(m, **how), mesh, state, batch, layouts=at, steps=steps)


@pytest.mark.long
@pytest.mark.parametrize(("mesh", "way"), each_value([Mesh(fsdp=2), Mesh(dp=2, fsdp=2)], WAYS))
def test_on_a_mesh(mesh, way, little):
    found = proven_and_equal_tower(mesh, way=way, strategy="hsdp", **LITTLE)
    assert sent(found.sharded.traced.graph_module.graph, mesh)["all_gather"] > 6


@pytest.mark.long
@pytest.mark.parametrize("way", WAYS)
def test_the_same_bits_as_written(way, little, as_written):
    mesh = Mesh(fsdp=2)
    (state, batch), made = start(way=way, **LITTLE), described(mesh, way, **LITTLE)
    placed = testing.simulate(made.function, mesh, state, batch, layouts=(made.state, made.batch))
    as_written()
    plain = testing.simulate(made.function, mesh, state, batch, layouts=(made.state, made.batch))
    assert len(placed.traced.graph_module.graph.nodes) != len(plain.traced.graph_module.graph.nodes)
    for a, b in zip(tree.leaves(list(placed.outputs)), tree.leaves(list(plain.outputs)), strict=True):
        assert torch.equal(a, b)


def in_bf16(mesh, precision):
    """Three products in bf16 of matrices that travel in 16 or 8 bits."""
    specs = tree.specs({n: (2048, 2048) for n in "abc"}, mesh, init=tree.Normal(0.02), strategy=DataParallel.zero3())

    def loss_fn(w, batch):
        x = batch["x"]
        for name in "abc":
            x = x + torch.tanh(x.to(torch.bfloat16) @ w[name]).to(x.dtype)
        return step.mean(x.square().sum(), x.numel())

    shape = {"x": ((8, 2048), torch.float32)}
    return step.build(loss_fn, optim.sgd(0.1), specs, shape, precision=precision)


@pytest.mark.slow
@pytest.mark.long
@pytest.mark.parametrize(
    "precision", [Precision.bf16(), Precision.bf16_wire(), Precision.fp8_wire()], ids=["bf16", "bf16 wire", "fp8 wire"]
)
def test_the_same_bits_in_other_dtypes_on_the_wire(precision, as_written):
    """Scales of 8 bits are made once, casts where each gather is.

    Only the second matrix is gathered again: the backward does not read the first, and begins with the third.
    """
    mesh, (made, one) = Mesh(fsdp=2), (in_bf16(m, precision) for m in (Mesh(fsdp=2), Mesh()))
    state, batch = tree.init(one.state, key=0, rank=0), {"x": torch.randn(8, 2048)}
    assert step.check(*made).ok
    found = traced(made).graph_module.graph
    assert sent(found, mesh)["all_gather"] == 4 and sent(found, mesh)["pmax"] <= 1
    placed = testing.simulate(made.function, mesh, state, batch, layouts=(made.state, made.batch))
    as_written()
    plain = testing.simulate(made.function, mesh, state, batch, layouts=(made.state, made.batch))
    for a, b in zip(tree.leaves(list(placed.outputs)), tree.leaves(list(plain.outputs)), strict=True):
        assert torch.equal(a, b)


def on_ranks(rank, overlaps):
    """Two steps under each setting on two real ranks: whether states and metrics are equal, and the last metrics."""
    mesh = Mesh(fsdp=2)
    with connect(mesh) as world:
        (_, batch), made, found = start(way=WAYS[1]), described(mesh, WAYS[1]), []
        local = tree.place(tree.local(batch, made.batch, rank), made.batch, rank)
        for overlap in overlaps:
            run = step.jit(made.function, donate=0, world=world, backend="eager", overlap=overlap)
            state = tree.init(made.state, key=0, rank=rank)
            for _ in range(2):
                state, metrics = run(state, local)
            found.append([x.clone() for x in tree.leaves((state, metrics))])
        same = all(torch.equal(a, b) for other in found[1:] for a, b in zip(found[0], other, strict=True))
        return same, metrics["loss"].item(), metrics["grad_norm"].item()


@pytest.mark.slow
def test_on_real_ranks(ranks):
    mesh, (state, batch) = Mesh(fsdp=2), start(way=WAYS[1])
    made = described(mesh, WAYS[1])
    sim = testing.simulate(made.function, mesh, state, batch, layouts=(made.state, made.batch))
    sim = sim.again(testing.Ranks(of_rank[0] for of_rank in sim.outputs), batch)
    settings = (False, True, step.Overlap(peak=None), step.Overlap(depth=2, keep_last=True))
    for same, *numbers in ranks.run(on_ranks, settings, ranks=2):
        assert same and numbers == [sim.metrics["loss"], sim.metrics["grad_norm"]]


@pytest.mark.long
@pytest.mark.parametrize(
    ("strategy", "microbatches"), each_value(["replicated", "zero1", "zero2", "zero3", "hybrid"], [1, 2])
)
def test_strategies(strategy, microbatches, little):
    proven_and_equal_tower(Mesh(dp=2, fsdp=2), way=WAYS[1], strategy=strategy, microbatches=microbatches, **LITTLE)


# ---- what is placed --------------------------------------------------------------------------------------------------
def collectives(way="a module", **how):
    mesh = Mesh(fsdp=2)
    return sent(traced(described(mesh, way, **how)).graph_module.graph, mesh)


@pytest.mark.long
@pytest.mark.parametrize("way", WAYS)
def test_what_is_gathered(way):
    """Six large leaves one by one, and again but for that with which the backward begins; small ones once, together.

    A reduction for each large one, and for the small ones as written, or fewer.
    """
    found = collectives(way)
    assert found["all_gather"] == 6 + 5 + 1
    small = {WAYS[0]: 1, WAYS[1]: 1, WAYS[2]: 2}.get(way, 3)
    assert found["reduce_scatter"] == 6 + small


def test_kept():
    assert collectives(keep=True) == {"all_gather": 1, "reduce_scatter": 1, "psum": 2}
    assert collectives("plain layers", keep=True)["all_gather"] == 3


def test_small_weights_stay():
    """What together is less than one large leaf stays as it is written."""
    assert collectives(dim=128, width=256) == {"all_gather": 1, "reduce_scatter": 1, "psum": 2}


@pytest.mark.slow
@pytest.mark.long
@pytest.mark.parametrize("way", WAYS[1:4])
def test_many_small_weights(way, little):
    """16 arrays of 1 KiB travel with their vectors, three at a time, where one more would make it more than 4 KiB.

    Of the last ones the backward finds what the forward gathered.
    """
    mesh = Mesh(fsdp=2)
    found = proven_and_equal_tower(mesh, steps=1, way=way, blocks=8, dim=8, width=16)
    found = sent(found.sharded.traced.graph_module.graph, mesh)
    assert 6 + 3 <= found["all_gather"] <= 6 + 4 and found["reduce_scatter"] <= 9, found


def bytes_for_the_backward(graph):
    """Of the gathers of the forward, the bytes of those of which something, as it is or laid out, is read behind it."""

    def is_kept(node):
        return any(user.meta.get("backward") or is_light(user) and is_kept(user) for user in node.users)

    gathers = [n for n in graph.nodes if (c := collective_of(n.target)) and c.name == "all_gather"]
    forward = [n for n in gathers if not n.meta.get("backward")]
    assert len(forward) < len(gathers)
    return sum(x.nbytes for n in forward if is_kept(n) for x in n.meta["val"])


def test_what_stays_keeps_no_buffer_of_what_is_gathered_again(little):
    """4 KiB with which the backward begins, and 4 KiB of small arrays: the vectors of all layers. They kept matrices,
    too, that had travelled with them."""
    made = described(Mesh(fsdp=2), blocks=8, dim=8, width=16)
    assert bytes_for_the_backward(traced(made).graph_module.graph) <= 8 << 10


def test_an_evaluation_gathers_before_the_use():
    mesh = Mesh(fsdp=2)
    made = described(mesh, WAYS[1])
    assert made.evaluate is not None
    arrays = tree.map(lambda of: torch.empty(of.local_shape(0), dtype=of.dtype), tree.layouts((made.state, made.batch)))
    graph = trace(made.evaluate, arrays).graph_module.graph
    products = [i for i, n in enumerate(graph.nodes) if n.target is torch.ops.aten.mm.default]
    gathers = [i for i, n in enumerate(graph.nodes) if (c := collective_of(n.target)) and c.name == "all_gather"]
    assert len(gathers) == 7 and all(any(a < p < b for p in products) for a, b in itertools.pairwise(gathers[1:]))


def test_layers_that_are_compiled_are_left_alone():
    """Their gathers are there twice already, and both are where they belong."""
    mesh = Mesh(fsdp=2)

    def run(params, x):
        return step.layers(lambda x, w: x @ w["a"], params, layouts, axes)(x).sum(), {}

    layouts, axes = {"a": tree.specs({"a": (4, 1024, 1024)}, mesh, [("a", (None, "fsdp"))])["a"].layout}, Axes(mesh)
    arrays = tree.map(lambda of: torch.empty(of.local_shape(0), dtype=of.dtype), layouts)
    module = trace(step.value_and_grad(run), (arrays, torch.empty(8, 1024))).graph_module
    assert regathered(module) is module


def test_a_wrong_gradient_is_found_after_the_pass():
    """The check proves the graph that runs: parameters that are added up over their shards are none."""
    mesh = Mesh(fsdp=2)
    made = described(mesh, WAYS[1])

    def twice(state, batch):
        new, metrics = made.function(state, batch)
        return new._replace(params=tree.map(lambda x: psum(x, Axes(mesh)["fsdp"]), new.params)), metrics

    assert not step.check(twice, made.state, made.batch).ok
