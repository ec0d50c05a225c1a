"""Parameters in host memory: the same numbers, copies that come in time and are made again, mistakes by line."""

import functools
import importlib
import itertools

import pytest
import torch

from fmegatron import checkpoint, model, optim, plan, step, testing, tree
from fmegatron.layout import DataParallel, Mesh
from fmegatron.step import buckets, jit, offload
from fmegatron.step.copied import is_copied
from fmegatron.step.regather import regathered
from fmegatron.step.torch_private import opname
from tests.pairs import each_value
from tests.step import tiny
from tests.step.test_host_memory import Late, assert_same, batches, made, memory_of

ALL = [("params", "host"), (".*", "host")]
CONFIG = tiny.config_with(torch.float32)
TRACING = importlib.import_module("fmegatron.step.tracing")


@pytest.fixture(autouse=True)
def little(monkeypatch):
    """An array of 512 bytes is a large one: the same graphs, of small numbers."""
    monkeypatch.setattr(TRACING, "regathered", functools.partial(regathered, together=512))


class LateParameters(Late):
    """Copies into memory that is not a number until they have to have arrived."""

    def bring(self, pairs):
        self.events.append("begin")
        for into, _ in pairs:
            into.fill_(torch.nan)
        self.coming += pairs


def trained(memory, count=2, optimizer=None, donate=0, config=CONFIG, host_bytes=4000, **how):
    """(state, metrics, the jit) after some updates."""
    run, specs = made(optimizer or optim.adamw(1e-2), memory, config=config, **how)
    run = jit(run, donate=donate, backend="eager", host_bytes=host_bytes)
    state, seen = tree.init(specs, 0, 0), []
    for batch in batches(count):
        state, metrics = run(state, batch)
        seen.append(metrics)
    return state, seen, run


def names_of(graph):
    return [opname(node.target) or "" for node in graph.nodes]


@pytest.mark.medium
def test_the_same_numbers(monkeypatch):
    """With copies as late as may be; all that has dims rests in host memory, before and after."""
    wanted, before, _ = trained("device")
    monkeypatch.setattr(buckets, "copies_on", lambda device, host_computes=False: LateParameters())
    state, after, run = trained(ALL)
    assert_same((wanted, before), (state, after))
    assert {memory_of(x) for x in tree.leaves((state.params, state.opt)) if x.dim()} == {"host"}
    graph = run.graph("stream")
    assert not any(map(is_copied, graph.nodes))
    order = [name[:5] for name in names_of(graph) if name.startswith(("begin_", "wait_"))]
    assert order == ["begin", *["wait_", "begin"] * (order.count("begin") - 1), "wait_"] and len(order) > 20


@pytest.mark.slow
@pytest.mark.long
@pytest.mark.parametrize("how", [{"microbatches": 2}, {"memory": [("params", "host")]}, {"donate": None}], ids=str)
def test_the_same_numbers_otherwise(monkeypatch, how):
    """Several microbatches, whose gradient is a node of its own; the optimizer's state on the device; not donated."""
    monkeypatch.setattr(buckets, "copies_on", lambda device, host_computes=False: LateParameters())
    memory = how.pop("memory", ALL)
    assert_same(trained("device", 1, **how)[:2], trained(memory, 1, **how)[:2])


@pytest.mark.slow
def test_frozen_weights_rest_there(monkeypatch):
    """They are never stored, and no gradient of them is made."""
    monkeypatch.setattr(buckets, "copies_on", lambda device, host_computes=False: LateParameters())

    def optimizer():
        return optim.grouped(1e-2, [("head|blocks", optim.Group(frozen=True))], adam=optim.scale_by_adam())

    rows = [("params/blocks|params/head", "host")]
    wanted, got = (trained(memory, 1, optimizer()) for memory in ("device", rows))
    assert_same(wanted[:2], got[:2])
    assert not [name for name in names_of(got[2].graph("trace")) if name == "to_host"]


@pytest.mark.medium
def test_each_layer_has_its_own_copies_in_the_forward_and_again_in_the_backward():
    """Of a stack no more than a layer is on the device: between the copies of two layers stands the first one."""
    described = model.build(CONFIG, optim.adamw(1e-2), Mesh(), (4, CONFIG.max_seq), memory=ALL)
    arrays = tree.map(lambda of: tree.place(torch.empty(of.local_shape(0), dtype=of.dtype), of),
                      tree.layouts((described.state, described.batch)))  # fmt: skip
    graph = step.trace(described.function, arrays).graph_module.graph
    copies = [node for node in graph.nodes if is_copied(node)]
    stacks = {tuple(x.shape) for x in tree.leaves(tree.layouts(described.state.params["blocks"]))}
    assert not stacks & {tuple(node.meta["val"].shape) for node in copies}
    forward, backward = ([n for n in copies if bool(n.meta.get("backward")) is of] for of in (False, True))
    assert len(forward) == len(tree.leaves(described.state.params["embed"])) + len(
        tree.leaves((described.state.params["head"], described.state.params["final_norm"]))
    ) + CONFIG.layers * len(tree.leaves(described.state.params["blocks"]))
    assert backward
    position = {node: i for i, node in enumerate(graph.nodes)}
    layers = [i for i, node in enumerate(graph.nodes) if "_fwd" in (opname(node.target) or "")]
    of_layers = [position[n] for n in forward if n.meta["val"].nbytes >= 512]
    assert all(any(a < at < b for at in of_layers) for a, b in itertools.pairwise(layers))


def test_what_is_not_brought_is_found():
    specs = model.specs(CONFIG, Mesh())
    specs = tree.map(lambda of: of.replace(memory="host"), specs)

    def right(params, rows):
        return model.logits(offload.brought(params, rows), rows["tokens"], CONFIG)

    def wrong(params, rows):
        return model.logits(params, rows["tokens"], CONFIG)

    rows = {"tokens": DataParallel().batch_layout((2, 4), torch.int64, Mesh())}
    assert step.check(right, specs, rows).ok
    found = step.check(wrong, specs, rows)
    assert not found.ok and "host memory" in str(found) and "test_host_parameters.py" in str(found)


def test_arrays_that_are_brought_beside_nothing():
    x = tree.place(torch.zeros(3), tree.specs({"w": (3,)}, Mesh())["w"].layout.replace(memory="host"))
    with pytest.raises(ValueError, match="parameter 'w': got an array in host memory, and no other argument"):
        offload.brought({"w": x}, {"w": x})


def test_rows_and_specs_say_where_parameters_rest():
    specs, adam = model.specs(CONFIG, Mesh()), optim.adamw(1e-2)
    found = step.state_specs(specs, adam, memory=[("params/blocks", "host"), ("adam/m", "host-update")])
    memories = {path: of.layout.memory for path, of in zip(tree.paths(found), tree.leaves(found), strict=True)}
    assert {m for p, m in memories.items() if p.startswith("params/blocks")} == {"host"}
    assert memories["params/head/w"] == memories["opt/adam/v/head/w"] == "device"
    assert memories["opt/adam/m/head/w"] == "host-update"
    there = step.state_specs(tree.map(lambda of: of.replace(memory="host"), specs), adam)
    assert {of.layout.memory for of in tree.leaves(there.params)} == {"host"}
    assert {of.layout.memory for of in tree.leaves(there.opt)} == {"device"}
    assert {of.layout.memory for of in tree.leaves(step.state_specs(specs, adam, memory="host").params)} == {"device"}
    with pytest.raises(ValueError, match="got 'params/none', which decides no array"):
        step.state_specs(specs, adam, memory=[("params/none", "host")])


@pytest.mark.slow
def test_a_checkpoint_goes_between_the_memories(tmp_path):
    state, _, run = trained(ALL, 1)
    checkpoint.save(tmp_path / "a", state)
    on_device = step.state_specs(model.specs(CONFIG, Mesh()), optim.adamw(1e-2))
    back = checkpoint.restore(tmp_path / "a", on_device)
    assert_same(state, back)
    assert {memory_of(x) for x in tree.leaves(back)} == {"device"}
    checkpoint.save(tmp_path / "b", back)
    again = checkpoint.restore(
        tmp_path / "b", step.state_specs(model.specs(CONFIG, Mesh()), optim.adamw(1e-2), memory=ALL)
    )
    assert_same(run(state, batches(2)[1])[0], run(again, batches(2)[1])[0])


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["zero1", "zero3", "hybrid"])
def test_ranks(strategy):
    """Proven, and in fp64 what one rank has with all on its device."""
    config = tiny.config_with(torch.float64)

    def made_of(mesh):
        shape = (12, CONFIG.max_seq)
        return model.build(config, optim.adamw(1e-2), mesh, shape, memory=ALL, strategy=strategy)

    mesh, (batch,) = Mesh(fsdp=3), batches(1, rows=12)
    described = made_of(mesh)
    assert step.check(*described).ok
    state = tree.init(made_of(Mesh()).state, 0, 0)
    testing.assert_parity(
        lambda m: made_of(m).function, mesh, state, batch, layouts=(described.state, described.batch), steps=2
    )


@pytest.mark.slow
def test_the_plan_counts_them_on_the_host():
    """Of six layers two are on the device at most, the one that is used and the next, by what Inductor allocates."""
    decoder = model.llama(vocab_size=64, dim=512, layers=8, heads=4, kv_heads=4, ffn_dim=2048, max_seq=16)
    found = {}
    for memory in ("host", ALL):
        described = model.build(decoder, optim.adamw(1e-3), Mesh(), (1, 16), memory=memory, save="inputs")
        found[str(memory)] = plan.exact(*described, Mesh(), host_bytes=1 << 22)
        quick = plan.quick(described)
        assert abs(quick.host - found[str(memory)].host) < 1e-3 * quick.host
    some, all_ = found["host"], found[str(ALL)]
    params = sum(x.nbytes for x in tree.leaves(tree.layouts(described.state.params)))
    assert all_.host == some.host + params and all_.state + params == some.state
    assert some.peak - all_.peak > params / 2, (str(some), str(all_))


@pytest.mark.long
@pytest.mark.parametrize(
    ("mesh", "strategy"), each_value([Mesh(fsdp=3), Mesh(fsdp=7), Mesh(dp=2, fsdp=5)], ["zero1", "zero3", "hybrid"])
)
def test_padding_stays_zero_on_its_way(mesh, strategy):
    """Of ranks that divide no dim; of moments alone it was not proven either."""
    found = []
    for memory in ("host", ALL):
        specs = tree.specs({"w": (7, 5), "b": (5,)}, mesh, strategy=DataParallel.named(strategy), init=tree.Normal(0.1))
        described = step.build(
            error, optim.adamw(1e-2), specs, {"x": ((4 * mesh.size, 7), torch.float32)}, memory=memory
        )
        found.append(step.check(*described))
    assert all(report.ok for report in found), found


SHAPES = {"a": (7, 12), "s": (3, 12, 12), "n": (13,), "v": (12, 13), "c": (1,)}


def ragged(w, batch):
    """A loop by hand over a stack, one of its layers again and transposed, a matrix that is tied, vectors, a number."""
    x = batch["x"] @ w["a"]
    for layer in w["s"].unbind(0):
        x = torch.tanh(x @ layer) + x
    x = x @ w["s"][1].t()
    y = x @ w["v"] * w["n"] + w["c"] + (x @ w["a"].t()).sum(-1, keepdim=True)
    return step.mean(y.square().sum(), y.numel())


ODD = [
    (Mesh(fsdp=5), "zero3", 1),
    (Mesh(fsdp=7), "zero1", 2),
    (Mesh(dp=2, fsdp=5), "hybrid", 1),
    (Mesh(fsdp=14), "zero2", 1),
]


@pytest.mark.slow
@pytest.mark.parametrize(("mesh", "strategy", "microbatches"), ODD, ids=str)
def test_a_loss_of_ones_own_on_odd_ranks(mesh, strategy, microbatches):
    """Updated on the host, its moments and its parameters."""

    def made_of(mesh):
        how = {"init": tree.Normal(0.1), "strategy": DataParallel.named(strategy), "dtype": torch.float64}
        rows = {"x": ((70, 7), torch.float64)}
        memory = [("params", "host"), (".*", "host-update")]
        adam = optim.adamw(1e-2)
        return step.build(ragged, adam, tree.specs(SHAPES, mesh, **how), rows, memory=memory, microbatches=microbatches)

    described = made_of(mesh)
    assert step.check(*described).ok
    state, batch = tree.init(made_of(Mesh()).state, 0, 0), {"x": torch.randn(70, 7, dtype=torch.float64)}
    testing.assert_parity(
        lambda m: made_of(m).function, mesh, state, batch, layouts=(described.state, described.batch), steps=2
    )


def error(w, batch):
    """Of rows through a matrix."""
    y = torch.tanh(batch["x"] @ w["w"]) + w["b"]
    return step.mean(y.square().sum(), y.numel())


@pytest.mark.slow
def test_rows_that_were_put_in_order_keep_no_copy_from_its_place():
    """A step with numbered samples, of one microbatch: rows are computed, and the copies are placed all the same."""
    described = model.build(CONFIG, optim.adamw(1e-2), Mesh(), (4, CONFIG.max_seq), memory=ALL, samples=True)
    arrays = tree.map(lambda of: tree.place(torch.empty(of.local_shape(0), dtype=of.dtype), of),
                      tree.layouts((described.state, described.batch)))  # fmt: skip
    nodes = list(step.trace(described.function, arrays).graph_module.graph.nodes)
    first = next(i for i, node in enumerate(nodes) if "_fwd" in (opname(node.target) or ""))
    copies = [i for i, node in enumerate(nodes) if is_copied(node)]
    assert len(copies) > 20 and sum(i < first for i in copies) < len(copies) / 2


def test_a_pipeline_refuses_them():
    config = tiny.config_with(torch.float32)
    mesh = Mesh(pp=2)
    described = model.build(config, optim.adamw(1e-2), mesh, (4, CONFIG.max_seq), microbatches=2, memory=ALL)
    with pytest.raises(ValueError, match='in host memory.*leave "params" out of memory='):
        step.check(*described)


@pytest.mark.parametrize(
    ("memory", "words"),
    [
        (None, "got None for '.*', wanted one of device, host, host-update; or, of some arrays, rows"),
        ([("adam",)], r"got \('adam',\) as a row, wanted .* rows of \(pattern, memory\)"),
        (("adam/m", "host"), "got 'adam/m' as a row, wanted .* rows"),
        ({"adam": "host"}, r"got {'adam': 'host'} for '.\*', wanted one of"),
    ],
)
def test_memories_that_are_none(memory, words):
    with pytest.raises(ValueError, match="state_specs: memory: " + words):
        step.state_specs(tree.specs({"w": (3,)}, Mesh()), optim.adamw(1e-2), memory=memory)


def test_rows_for_all_that_is_left_may_find_nothing_left():
    """An optimizer without arrays of its own, given the rows that suit any."""
    found = step.state_specs(tree.specs({"w": (3,)}, Mesh()), optim.sgd(1e-2), memory=ALL)
    assert found.params["w"].layout.memory == "host"
