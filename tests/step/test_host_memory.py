"""State in host memory: the same numbers, pieces that neither come too late nor leave too early, mistakes by line."""

import functools
import math
import operator

import pytest
import torch

from fmegatron import checkpoint, model, optim, step, testing, tree
from fmegatron.collectives import Axes, connect
from fmegatron.layout import DataParallel, Layout, Mesh
from fmegatron.optim import contrib
from fmegatron.step import buckets, jit, offload
from fmegatron.step.every_rank import interpret
from fmegatron.step.graph.nodes import entry_of
from fmegatron.step.streamed import How, Streamed, streamed
from fmegatron.step.torch_private import FakeTensorMode
from fmegatron.step.write_back import donated_leaves
from tests.pairs import each_value
from tests.step import tiny

NAME = operator.attrgetter("__name__")
CONFIG = tiny.config_with(torch.bfloat16)
ONE = Mesh()
OPTIMIZERS = {
    "adamw": lambda: optim.adamw(1e-2),
    "lion": lambda: optim.lion(1e-2),
    "momentum": lambda: optim.sgd(1e-2, momentum=0.9),
    "average": lambda: optim.averaged(optim.adamw(1e-2), 0.9),
    "skipped": lambda: optim.skip_nonfinite(optim.adamw(1e-2), loss_scale=optim.LossScale()),
    "groups": lambda: optim.grouped(
        1e-2, [("embed", optim.Group(frozen=True)), ("head", optim.Group(lr=0.5))], adam=optim.scale_by_adam()
    ),
    "muon": lambda: optim.muon(1e-2),  # products of matrices: fetched whole
    "adafactor": lambda: contrib.adafactor(1e-2),  # rows, columns, and the norm of a leaf
    "8 bits": lambda: contrib.compressed(optim.adamw(1e-2), [("adam/m", contrib.int8())]),
}


def batches(count=3, rows=4):
    """Rows of tokens."""
    return [tiny.decoder_batch(CONFIG, rows=rows, seed=i) for i in range(count)]


def made(optimizer, memory, mesh=ONE, strategy=None, config=CONFIG, **how):
    """(train step, specs of its state)."""
    specs = model.specs(config, mesh, strategy=strategy)
    axes = Axes(mesh) if strategy is None else Axes(mesh, data=mesh.axes(strategy.tokens))
    run = step.build_train_step(functools.partial(loss_of, config, axes), optimizer, specs, axes, **how)
    return run, step.state_specs(specs, optimizer, memory=memory)


def loss_of(config, axes, params, batch):
    """Of the decoder."""
    return model.loss(params, batch, config, axes)


def trained(optimizer, memory, count=3, backend="eager", host_bytes=700, donate=0, config=CONFIG, **how):
    """(state, metrics, the jit) after some updates."""
    run, specs = made(optimizer, memory, config=config, **how)
    run = jit(run, donate=donate, backend=backend, host_bytes=host_bytes)
    state, seen = tree.init(specs, 0, 0), []
    for batch in batches(count):
        state, metrics = run(state, batch)
        seen.append(metrics)
    return state, seen, run


@functools.cache
def on_device(count: int = 3):
    """The state after some updates of AdamW whose state is on the device: not to be donated."""
    return trained(optim.adamw(1e-2), "device", count=count)[0]


def assert_same(a, b):
    """Bit for bit."""
    for path, x, y in zip(tree.paths(a), tree.leaves(a), tree.leaves(b), strict=True):
        assert torch.equal(x, y), path


def memory_of(x):
    """The memory of an array, by its layout."""
    found = tree.layout_of(x)
    assert found is not None
    return found.memory


def node_of(run):
    """The nodes of a jit that update leaves in host memory."""
    return [node for node in run.graph("stream").nodes if isinstance(entry_of(node), Streamed)]


class Late(buckets.InOrder):
    """Copies that are made as late as they may be: a fetch reads the host when it has to have arrived, a store reads
    the device when its memory may be taken, or when the host reads. events: what was asked, in order."""

    def __init__(self):
        self.events, self.coming, self.leaving = [], [], []

    def fetch(self, sources):
        self.events.append("fetch")
        found = [torch.full_like(x, torch.nan) for x in sources]
        self.coming += zip(found, sources, strict=True)
        return found

    def arrived(self):
        self.events.append("arrived")
        for into, x in self.coming:
            into.copy_(x)
        self.coming = []

    def store(self, pairs):
        self.events.append("store")
        self.leaving += pairs

    def left(self):
        self.events.append("left")
        for into, x in self.leaving:
            into.copy_(x)
        for _, x in self.leaving:
            x.fill_(torch.nan)  # it may be taken for something else
        self.leaving = []

    def landed(self):
        self.arrived()
        self.left()
        self.events[-2:] = ["landed"]


class Early(buckets.InOrder):
    """Copies that are made at once, after which the source of a fetch is lost: it is written later or never."""

    def fetch(self, sources):
        found = [x.clone() for x in sources]
        for x in sources:
            x.fill_(torch.nan)
        return found


# ---- the same numbers ------------------------------------------------------------------------------------------------
@pytest.mark.medium
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_the_same_numbers(name):
    wanted, before, _ = trained(OPTIMIZERS[name](), "device")
    on_host, after, run = trained(OPTIMIZERS[name](), "host")
    assert_same((wanted, before), (on_host, after))
    assert len(node_of(run)) == 1
    dims = {path: x for path, x in zip(tree.paths(on_host.opt), tree.leaves(on_host.opt), strict=True) if x.dim()}
    assert dims and all(memory_of(x) == "host" for x in dims.values())


@pytest.mark.slow
@pytest.mark.parametrize("how", [{"microbatches": 2}, {"clip_norm": None}, {"clip_norm": 1e-3}], ids=str)
def test_the_same_numbers_of_steps(how):
    assert_same(*(trained(optim.adamw(1e-2), memory, **how)[:2] for memory in ("device", "host")))


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.slow)])
def test_the_same_numbers_compiled(backend):
    """Of float32: between 16-bit values Inductor keeps more digits where it fuses more."""
    config = tiny.config_with(torch.float32)
    runs = [trained(optim.adamw(1e-2), m, backend=backend, config=config, host_bytes=4000) for m in ("device", "host")]
    assert_same(*(run[:2] for run in runs))


@pytest.mark.medium
@pytest.mark.parametrize("donate", [0, pytest.param(None, marks=pytest.mark.slow)])
def test_leaves_stay_where_they_are_if_donated(donate):
    run, specs = made(optim.adamw(1e-2), "host")
    run, state = jit(run, donate=donate, backend="eager", host_bytes=700), tree.init(specs, 0, 0)
    held = tree.copies(state)
    where = [x.data_ptr() for x in tree.leaves(state)]
    new, _ = run(state, batches(1)[0])
    assert ([x.data_ptr() for x in tree.leaves(new)] == where) == (donate == 0)
    again, _ = jit(made(optim.adamw(1e-2), "device")[0], backend="eager")(_placed(held, "device"), batches(1)[0])
    assert_same(new, again)
    if donate is None:
        assert_same(state, held)


def _placed(state, memory):
    """The same arrays, said to be in a memory."""
    return tree.map(lambda x: tree.place(x.detach(), tree.layouts(x).replace(memory=memory)), state)


SWAPS = {
    "swapped": lambda m, v: (v, m),
    "swapped and changed": lambda m, v: (2 * v, 3 * m),
    "one value twice": lambda m, v: (m + v, m + v),
    "a sum of the leaf": lambda m, v: (m / v.sum(), v * m.sum()),
    "unchanged": lambda m, v: (m, v + 1),
    "one of them": lambda m, v: (m, m),
    "new": lambda m, v: (torch.ones_like(m), m),
}


@pytest.mark.long
@pytest.mark.parametrize("name", SWAPS)
@pytest.mark.parametrize("donate", [0, None])
@pytest.mark.parametrize(
    ("memory", "copies"), [("host", Late), ("host", Early), ("host", buckets.InOrder), ("host-update", Late)]
)
def test_leaves_that_read_each_other(monkeypatch, name, donate, memory, copies):
    """Each old value is read before it is overwritten, whatever becomes of it."""
    if copies is Early and (donate is None or name in ("unchanged", "one of them", "new", "a sum of the leaf")):
        return  # a leaf that is read and not written keeps its value, which these copies take away
    monkeypatch.setattr(buckets, "copies_on", lambda device, host_computes: copies())
    values = [torch.arange(12.0).view(3, 4) + 1, torch.ones(3, 4)]
    place = Layout((3, 4), torch.float32, ONE, memory=memory)
    state = tuple(tree.place(x.clone(), place) for x in values)

    def fn(state, w):
        return offload.stored(SWAPS[name](*offload.fetched(state, w)), state), w + 1

    new, _ = jit(fn, donate=donate, backend="eager", host_bytes=17)(state, torch.zeros(()))
    assert_same(new, SWAPS[name](*values))


@pytest.mark.medium
def test_moments_alone():
    state, _, run = trained(optim.adamw(1e-2), [("adam", "host")])
    for path, x in zip(tree.paths(state), tree.leaves(state), strict=True):
        assert memory_of(x) == ("host" if "adam" in path else "device")
    assert_same(state, on_device())
    assert len(node_of(run)) == 1


@pytest.mark.medium
def test_parameters_are_written_in_place_too():
    """No whole array is made for the update: all that the node writes is there already."""
    *_, run = trained(optim.adamw(1e-2), "host", count=1)
    (node,) = node_of(run)
    wholes, new, _ = node.args
    state = step.state_specs(model.specs(CONFIG, ONE), optim.adamw(1e-2))
    assert not new and len(wholes) == sum(len(x.shape) > 0 for x in tree.leaves(state))
    assert torch.ops.fmegatron_step.from_host.default not in {n.target for n in run.graph("stream").nodes}
    whole = max(math.prod(piece.shape) for bucket in entry_of(node).table for piece in bucket)
    assert whole * 12 <= 700


def updated(monkeypatch, memory, optimizer):
    """(state after an update, what the node runs, who computed), with copies as late as may be."""
    computed = []
    monkeypatch.setattr(buckets, "copies_on", lambda device, host: computed.append(host) or Late())
    state, _, run = trained(optimizer, memory, count=1)
    (node,) = node_of(run)
    return state, entry_of(node), computed


@pytest.mark.medium
def test_the_host_updates(monkeypatch):
    """Gradients travel, and parameters; moments and masters stay where they are."""
    state, run, computed = updated(monkeypatch, "host-update", optim.adamw(1e-2))
    assert_same(on_device(1), state)
    assert computed == [True] and run.table == run.on_host
    assert {memory_of(x) for x in tree.leaves(state.opt) if x.dim()} == {"host-update"}
    for part, at in zip(run.parts, run.places, strict=True):
        travels = {x.meta["val"].dtype for x in part.travels if x.meta["val"].dim()}
        assert travels == {torch.bfloat16} and sum(at.stored) == 1 and len(at.outs) == 4


@pytest.mark.slow
def test_who_updates_what_is_in_both(monkeypatch):
    """The host what is all its own; the device a leaf of which a moment is to be fetched."""
    state, run, computed = updated(monkeypatch, [("adam/m", "host-update"), (".*", "host")], optim.adamw(1e-2))
    assert computed == [False] and not run.on_host
    assert_same(on_device(1), state)
    rows = [("adam/.*/head|master/head", "host"), (".*", "host-update")]
    state, run, computed = updated(monkeypatch, rows, optim.adamw(1e-2))
    assert computed == [False, True]
    assert_same(on_device(1), state)


@pytest.mark.slow
def test_what_is_not_element_by_element_is_updated_on_the_device(monkeypatch):
    state, *_ = updated(monkeypatch, "host-update", optim.muon(1e-2))
    assert_same(trained(optim.muon(1e-2), "device", count=1)[0], state)


def simulated(strategy, memory, mesh, streams, optimizer):
    """The state after two updates on simulated ranks, of the graph with or without the pass."""
    run, specs = made(optimizer, memory, mesh, strategy, tiny.config_with(torch.float64))
    ranks = [tree.init(specs, 0, rank) for rank in range(mesh.size)]
    layouts = {name: strategy.batch_layout((8, CONFIG.max_seq), torch.int64, mesh) for name in ("tokens", "labels")}
    ahead = [testing.split(batch, layouts) for batch in batches(2, rows=8)]
    traced = step.trace(run, (ranks[0], ahead[0][0]))
    module = traced.graph_module
    if streams:
        donated = donated_leaves(traced, (ranks[0], ahead[0][0]), (0,))
        module = streamed(module, donated, How("eager", (), 900), traced.fake_mode)
        assert any(isinstance(entry_of(node), Streamed) for node in module.graph.nodes)
    for rows in ahead:
        columns = [tree.leaves(args) for args in zip(ranks, rows, strict=True)]
        outs, _ = interpret(module.graph, mesh, [list(column) for column in zip(*columns, strict=True)])
        results = [traced.result([out[r] for out in outs]) for r in range(mesh.size)]
        ranks = [tree.place(new, specs, r) for r, (new, _) in enumerate(results)]
    return ranks


@pytest.mark.medium
@pytest.mark.parametrize(("strategy", "name"), each_value(["zero1", "zero2", "zero3", "hybrid"], ["adamw", "muon"]))
def test_ranks(strategy, name):
    mesh = Mesh(dp=2, fsdp=2)
    by = DataParallel.named(strategy)
    runs = [simulated(by, m, mesh, streams, OPTIMIZERS[name]()) for m, streams in (("device", False), ("host", True))]
    for a, b in zip(*runs, strict=True):
        assert_same(a, b)


def of_rank(rank, mesh, host_bytes):
    """On a gloo rank: sums over the states of two runs under ZeRO-3 that differ in the memory alone."""
    out, world = [], connect(mesh)
    config = tiny.config_with(torch.float32)
    for memory in ("device", "host", "host-update"):
        run, specs = made(optim.adamw(1e-2), memory, world.mesh, DataParallel.named("zero3"), config)
        run = jit(run, donate=0, world=world, backend="eager", host_bytes=host_bytes)
        state = tree.init(specs, 0, world.rank, world.device)
        layout = DataParallel.named("zero3").batch_layout((4, CONFIG.max_seq), torch.int64, world.mesh)
        for batch in batches(2):
            rows = tree.place(tree.local(batch, {n: layout for n in batch}, world.rank), layout, world.rank)
            state, metrics = run(state, rows)
        out.append([x.double().sum().item() for x in tree.leaves((state, metrics))])
    return out


@pytest.mark.slow
def test_gloo_ranks(ranks):
    for on_device, *others in ranks.run(of_rank, Mesh(fsdp=2), 700, ranks=2):
        assert others == [on_device] * 2


def with_copies(monkeypatch, copies, host_bytes=700, count=2, memory="host"):
    monkeypatch.setattr(buckets, "copies_on", lambda device, host_computes: copies)
    return trained(optim.adamw(1e-2), memory, count=count, host_bytes=host_bytes)[0]


@pytest.mark.medium
@pytest.mark.parametrize(("host_bytes", "copies"), each_value([12, 100, 700, 1 << 20], [Late, Early], ids=[str, NAME]))
def test_no_piece_is_read_before_it_arrived_nor_overwritten_before_it_left(monkeypatch, host_bytes, copies):
    assert_same(on_device(1), with_copies(monkeypatch, copies(), host_bytes, count=1))


@pytest.mark.medium
def test_the_next_bucket_travels_while_one_is_updated(monkeypatch):
    copies = Late()
    with_copies(monkeypatch, copies, count=1)
    first, *rest = copies.events
    assert first == "fetch" and rest[-1] == "landed"
    inner = rest[:-1]
    assert len(inner) % 4 in (3, 0)
    rounds = [inner[i : i + 4] for i in range(0, len(inner), 4)]
    assert all(found == ["arrived", "left", "fetch", "store"] for found in rounds[:-1])
    assert rounds[-1] == ["arrived", "left", "store"]


@pytest.mark.medium
@pytest.mark.parametrize("memory", [pytest.param("host", marks=pytest.mark.slow), "host-update"])
@pytest.mark.parametrize("mistake", ["arrived", "left"])
def test_a_wait_that_is_missing_is_seen(monkeypatch, mistake, memory):
    """The fakes catch what they are there for: a piece that is computed with before it arrived, memory of a value that
    is taken before it left."""
    copies = Late()

    def taken(pairs):
        copies.leaving += pairs
        for _, x in pairs:
            x.fill_(torch.nan)

    monkeypatch.setattr(copies, *(("arrived", lambda: None) if mistake == "arrived" else ("store", taken)))
    state = with_copies(monkeypatch, copies, count=1, memory=memory)
    assert any(x.isnan().any() for x in tree.leaves(state) if x.is_floating_point())


@pytest.mark.medium
def test_nothing_travels_when_an_update_fails(monkeypatch):
    copies = Late()
    monkeypatch.setattr(Streamed, "_update", lambda self, piece, tensors: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        with_copies(monkeypatch, copies, count=1)
    assert copies.events[-1] == "landed"


@pytest.mark.parametrize("shape", [(7,), (5, 3), (1, 9), (3, 1, 4), (2, 0), (4, 2, 3, 2)])
@pytest.mark.parametrize("most", [1, 8, 24, 50, 1000])
def test_pieces_cover_an_array_once(shape, most):
    x = torch.zeros(shape)
    found = buckets.cuts(shape, 4, most)
    for cut in found:
        piece = buckets.cut_of(x, shape, cut)
        assert piece.is_contiguous() and tuple(piece.shape) == buckets.cut_shape(shape, cut)
        assert piece.numel() * 4 <= most or piece.numel() == 1
        piece += 1
    assert bool((x == 1).all())


@pytest.mark.parametrize(("memory", "where"), [("host", "cuda"), ("host-update", "cpu")])
def test_devices_on_paper(memory, where):
    """What the update of a trace of CUDA tensors with leaves on the host becomes, on a machine that may have no GPU."""
    optimizer = optim.adamw(1e-2)
    params = tree.specs({"w": (4, 4), "stack": (3, 4, 4)}, ONE, dtype=torch.bfloat16)
    specs = step.state_specs(params, optimizer, memory=memory)

    def update(state, grads):
        new, opt = optimizer.update(grads, offload.fetched(state.opt, state.step), state.params)
        return step.State(state.step + 1, new, offload.stored(opt, state.opt))

    def leaf(spec):
        on = "cpu" if spec.layout.on_host else "cuda"
        return tree.place(torch.empty(spec.shape, dtype=spec.dtype, device=on), spec.layout)

    with FakeTensorMode():
        state, grads = tree.map(leaf, specs), tree.map(leaf, params)
    traced = step.trace(update, (state, grads))
    module = streamed(
        traced.graph_module, donated_leaves(traced, (state, grads), (0,)), How("eager", (), 100), traced.fake_mode
    )
    (found,) = [entry_of(n) for n in module.graph.nodes if isinstance(entry_of(n), Streamed)]
    assert found.device.type == "cuda" and found.counts[:2] == (8, 0)
    assert found.codes and all(x.device.type == where for code in found.codes.values() for x in code.fakes)


# ---- what is said of mistakes ----------------------------------------------------------------------------------------
def test_a_rule_that_decides_nothing():
    with pytest.raises(ValueError, match="memory: got 'momentum', which decides no array, wanted patterns .*adam/m"):
        made(optim.adamw(1e-2), [("momentum", "host")])


@pytest.mark.parametrize("memory", ["cpu", [("adam", "disk")]])
def test_an_unknown_memory(memory):
    with pytest.raises(ValueError, match="wanted one of device, host"):
        made(optim.adamw(1e-2), memory)


def test_an_unknown_memory_of_a_layout():
    with pytest.raises(ValueError, match="got memory='cpu', wanted one of device, host"):
        Layout((2,), torch.float32, ONE, memory="cpu")


@pytest.mark.parametrize("host_bytes", [0, True, 1.5])
def test_wrong_buckets(host_bytes):
    with pytest.raises(ValueError, match="host_bytes=.* wanted a number of bytes"):
        jit(lambda x: x, host_bytes=host_bytes)


MESH = Mesh(dp=2)


def layout(memory, *spec):
    """Of a matrix."""
    return Layout((4, 4), torch.float32, MESH, spec, memory=memory)


WRONG = {
    "used beside values of the device": lambda m, w: (m + w, w),
    "the host computes": lambda m, w: (m * 2, w),
    "its layout says host": lambda m, w: (offload.fetched(m, w), w),
    "its layout says device": lambda m, w: (m, torch.ops.fmegatron_step.to_host(w, w)),
}


@pytest.mark.parametrize("what", WRONG)
def test_check_finds_memories_that_are_mixed(what):
    report = step.check(
        lambda state, _: (WRONG[what](*state), {}), (layout("host"), layout("device")), layout("device")
    )
    (finding,) = report.findings
    assert what in finding.what and finding.at.startswith("test_host_memory.py:") and "fetched" in finding.fix
    with pytest.raises(ValueError, match=what):
        report.require()


def test_check_passes_what_is_right():
    def right(state, _):
        m, w = state
        new = offload.fetched(m, w) * 2
        return (offload.stored(new, m), w + new), {}

    assert step.check(right, (layout("host"), layout("device")), layout("device")).ok


@pytest.mark.slow
@pytest.mark.parametrize(("strategy", "memory"), [("zero1", "host"), ("zero3", "host-update")])
def test_check_passes_the_step(strategy, memory):
    mesh, by = Mesh(fsdp=2, tp=2), DataParallel.named(strategy)
    rows = by.batch_layout((4, CONFIG.max_seq), torch.int64, mesh)
    assert step.check(*made(optim.adamw(1e-2), memory, mesh, by), {"tokens": rows, "labels": rows}).ok


@pytest.mark.slow
@pytest.mark.parametrize("memories", [("host", "device"), ("device", "host-update"), ("host", "host")])
def test_a_run_goes_on_in_another_memory(tmp_path, memories):
    state = on_device(2) if memories[0] == "device" else trained(optim.adamw(1e-2), "host", count=2)[0]
    checkpoint.save(tmp_path / "at_2", state)
    run, specs = made(optim.adamw(1e-2), memories[1])
    state = checkpoint.restore(tmp_path / "at_2", specs)
    assert {memory_of(x) for x in tree.leaves(state.opt) if x.dim()} == {memories[1]}
    state, _ = jit(run, donate=0, backend="eager", host_bytes=700)(state, batches(3)[2])
    assert_same(on_device(), state)
