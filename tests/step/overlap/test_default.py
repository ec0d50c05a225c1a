"""What `jit` does when nobody asks: collectives overlap, within a limit of memory, and nothing else changes."""

import inspect

import pytest
import torch
from torch import nn as modules

from fmegatron import model, nn, optim, plan, step, tree
from fmegatron.collectives import connect
from fmegatron.layout import DataParallel, Mesh
from fmegatron.step import Overlap, jit
from fmegatron.step.overlap.schedule import hides, overlapped, planned_peak
from fmegatron.step.timelines.planned import PaperWorld, launches
from tests.step import tiny
from tests.step.overlap.decoder import free, lowered_of_own
from tests.step.overlap.test_ranks import of_the_decoder, same_bits
from tests.step.own_towers import described, start

LEAF = 1 << 22


# ---- one value, said in one place ------------------------------------------------------------------------------------
def test_true_is_the_default_of_all():
    """Of jit, plans and timelines: True, which is `Overlap()`; False is the order of the graph."""
    fn = tiny.mlp_step()
    assert jit(fn).target.overlap == jit(fn, overlap=True).target.overlap == Overlap() and Overlap().peak == 1.05
    assert jit(fn, overlap=False).target.overlap is None
    for fn in (plan.exact, plan.quick, plan.deep, plan.search, jit):
        assert inspect.signature(fn).parameters["overlap"].default is True


@pytest.mark.parametrize("given", [None, 1, "no"])
def test_what_else_is_refused(given):
    with pytest.raises(ValueError, match=r"overlap: got .*, wanted True, False \(the order of the graph\)"):
        jit(tiny.mlp_step(), overlap=given)


# ---- memory ----------------------------------------------------------------------------------------------------------
@pytest.mark.slow
@pytest.mark.parametrize(
    "way", ["a module", *(pytest.param(way, marks=pytest.mark.slow) for way in ("a loop, each layer", "plain layers"))]
)
def test_the_bar_of_a_module_holds_by_default(way):
    """16 leaves of 4 MiB on fsdp=8: a shard and four leaves, as without overlap; without a limit it is twice that."""
    mesh = Mesh(fsdp=8)
    made = described(mesh, way, blocks=8, dim=512, width=2048, dtype=torch.float32)
    parts = made.function, made.state, made.batch
    by_default, in_order = plan.exact(*parts, mesh), plan.exact(*parts, mesh, overlap=False)
    assert by_default.transient <= 1.05 * in_order.transient and by_default.transient <= 4 * LEAF + (1 << 20)
    assert hides(by_default.graph.nodes) and not hides(in_order.graph.nodes)


LAYERS, DIM = 16, 1024  # of 4 MiB each
ORDINARY = modules.Sequential(
    *[part for _ in range(LAYERS) for part in (modules.Linear(DIM, DIM, bias=False), modules.Tanh())]
)


def by_module(params, batch):
    x = torch.func.functional_call(ORDINARY, params, (batch["x"],))
    return step.mean(x.square().sum(), x.numel())


def by_loop(shards, batch):
    x = batch["x"]
    for name in shards:
        x = torch.tanh(x @ nn.gather_tree({"w": shards[name]})["w"].mT)
    return step.mean(x.square().sum(), x.numel())


def of_own_loss(mesh: Mesh, loss_fn) -> step.Description:
    """Plain SGD under ZeRO-3: the state is a shard of the parameters alone."""
    shapes = {name: tuple(p.shape) for name, p in ORDINARY.named_parameters()}
    specs = tree.specs(shapes, mesh, init=tree.Normal(0.03), strategy=DataParallel.zero3())
    shape = {"x": ((8 * mesh.size, DIM), torch.float32)}
    return step.build(loss_fn, optim.sgd(1e-3), specs, shape, shards=loss_fn is by_loop)


def of_model_loss(mesh: Mesh, save: str | None = "mincut") -> step.Description:
    decoder = model.llama(vocab_size=64, dim=256, layers=LAYERS, heads=4, kv_heads=4, ffn_dim=1024, max_seq=8)
    return model.build(decoder, optim.sgd(1e-3), mesh, (8, 8), strategy="zero3", save=save)


SLOW = ("model.loss", "model.loss, all saved")
OWN = {
    "functional_call": lambda mesh: of_own_loss(mesh, by_module),
    "a loop by hand": lambda mesh: of_own_loss(mesh, by_loop),
    "model.loss": of_model_loss,
    "model.loss, all saved": lambda mesh: of_model_loss(mesh, None),
}


@pytest.mark.medium
@pytest.mark.parametrize("way", [pytest.param(way, marks=[pytest.mark.slow] if way in SLOW else []) for way in OWN])
def test_sixteen_layers_take_a_shard_and_four_layers(way):
    """State included, on fsdp=8, by default, however the step is written: 26 MiB at most, 76 as written."""
    mesh = Mesh(fsdp=8)
    made = OWN[way](mesh)
    assert sum(spec.layout.nbytes for spec in tree.leaves(made.state.params)) >= LAYERS * LEAF
    found = plan.exact(made.function, made.state, made.batch, mesh)
    assert found.peak <= 26 << 20, str(found)
    assert hides(found.graph.nodes)


@pytest.mark.slow
def test_the_limit_counts_what_is_measured():
    """The planned peak of an order is what the exact plan counts in it, with the copies that gloo sends from."""
    mesh = Mesh(fsdp=8)
    made = described(mesh, "a module", blocks=2, dim=512, width=2048, dtype=torch.float32)
    found = plan.exact(made.function, made.state, made.batch, mesh, overlap=free(bucket_bytes=0))
    gloo, others = (planned_peak(found.graph, PaperWorld(mesh, device=device)) for device in ("cpu", "cuda"))
    assert gloo == pytest.approx(found.transient, rel=0.03) and others < 0.8 * gloo


@pytest.mark.long
@pytest.mark.parametrize("peak", [1.0, 1.05, 1.2, 1.5])
@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_every_limit_is_kept(peak, device):
    mesh = Mesh(fsdp=8)
    world, lower = PaperWorld(mesh, device=device), lowered_of_own(mesh)
    most = planned_peak(lower.graph, world)
    graph = overlapped(lower, Overlap(peak=peak), world).graph
    assert planned_peak(graph, world) <= peak * most
    assert hides(graph.nodes) or (device, peak) == ("cpu", 1.0)  # else something fits in, of the forward


def test_more_memory_is_more_overlap():
    """Each step of the limit hides what the last one hid, or more."""
    mesh = Mesh(fsdp=8)
    world, lower = PaperWorld(mesh, device="cuda"), lowered_of_own(mesh)
    travelling = []
    for peak in (1.0, 1.2, 1.6, None):
        order = launches(overlapped(lower, Overlap(peak=peak), world).graph).split()
        waits = [order.index(f"w:{n}") - order.index(n) for n in order if n[0] in "GR"]
        travelling.append(sum(w > 1 for w in waits))
    assert travelling == sorted(travelling) and travelling[0] < travelling[-1]


@pytest.mark.slow
def test_nothing_is_moved_where_nothing_would_be_hidden():
    """ZeRO-1 and replicas of one's own module, and one rank: the graph stays what it is, and the compiler may order."""
    for mesh, strategy in ((Mesh(dp=2), "zero1"), (Mesh(dp=2), "replicated"), (Mesh(), "zero3")):
        lower = lowered_of_own(mesh, strategy)
        found = overlapped(lower, Overlap(), PaperWorld(mesh))
        assert str(found.graph) == str(lower.graph) and not hides(found.graph.nodes)


# ---- values ----------------------------------------------------------------------------------------------------------
def two_steps(rank, world, made, overlap):
    run = step.jit(made.function, donate=0, world=world, backend="eager", overlap=overlap)
    (_, batch), state = start(), tree.init(made.state, key=0, rank=rank)
    local = tree.place(tree.local(batch, made.batch, rank), made.batch, rank)
    for _ in range(2):
        state, metrics = run(state, local)
    return [x.clone() for x in tree.leaves((state, metrics))], launches(run.graph("overlap"))


def both(rank, mesh, strategy):
    """(whether all is equal to the bit with and without, the order with, the order without)."""
    with connect(mesh) as world:
        made = described(mesh, "a module", strategy)
        (by_default, ordered), (in_order, plain) = (two_steps(rank, world, made, o) for o in (True, False))
        return same_bits(by_default, in_order), ordered, plain


@pytest.mark.slow
@pytest.mark.long
@pytest.mark.parametrize(("mesh", "strategy"), [(Mesh(fsdp=4), "zero3"), (Mesh(dp=2, fsdp=2), "hsdp")], ids=str)
def test_the_same_bits_on_four_ranks(ranks, mesh, strategy):
    """And the same order on all of them, as a rank that starts another collective would wait for ever."""
    found = ranks.run(both, mesh, strategy, ranks=4)
    assert all(same for same, *_ in found)
    assert len({(ordered, plain) for _, ordered, plain in found}) == 1
    _, ordered, plain = found[0]
    assert ordered != plain


def of_microbatches(rank):
    """The decoder in two microbatches, on this rank: losses, norms and state, for each setting."""
    mesh, found = Mesh(fsdp=2), []
    with connect(mesh) as world:
        for overlap in (True, Overlap(peak=None), False):
            fn, state, batch_at = of_the_decoder(rank, microbatches=2)
            run = jit(fn, donate=0, world=world, backend="eager", overlap=overlap)
            seen = []
            for i in range(2):
                state, metrics = run(state, batch_at(i))
                seen.append(metrics["loss"].clone())
            found.append([*seen, *tree.leaves(state)])
        return all(same_bits(one, found[-1]) for one in found)


@pytest.mark.slow
def test_microbatches(ranks):
    assert ranks.run(of_microbatches, ranks=2) == [True, True]
