"""ZeRO-0 to 3, HSDP and hybrid train as torch.optim does on one rank, with microbatches, clips and uneven masks."""

import functools

import pytest
import torch

from fmegatron import checkpoint, model, optim, tree
from fmegatron.collectives import Axes, Precision, connect, reshard
from fmegatron.collectives.reshard_plan import reshard_moves
from fmegatron.layout import DataParallel, Layout, Mesh
from fmegatron.step import build_train_step, check, jit, state_specs
from fmegatron.step.state import placements
from fmegatron.testing import Ranks, simulate, split
from fmegatron.testing.compare_ranks import relative_error
from tests.checkpoint.fake_world import assert_same_bits, run, save_all, small_sizes
from tests.pairs import few, mixed
from tests.step import strategies
from tests.step.strategies import LR, OPTIMIZER, STRATEGIES, make_config, make_step, simulated

MESHES = [Mesh(dp=1), Mesh(fsdp=2), Mesh(dp=2), Mesh(dp=2, fsdp=2), Mesh(fsdp=4), Mesh(dp=2, fsdp=2, tp=2)]
ALL = mixed(STRATEGIES, MESHES, (1, 3), (None, 0.05))
# Each strategy on four ranks with everything on, and each mesh, count and clip with some strategy: two run by default.
QUICK = [(name, Mesh(dp=2, fsdp=2), 3, 0.05) for name in STRATEGIES] + [
    ("zero1", Mesh(fsdp=4), 1, None),
    ("zero3", Mesh(dp=1), 3, None),
    ("hybrid", Mesh(dp=2, fsdp=2, tp=2), 1, 0.05),
]
FIELDS = "name, mesh, microbatches, clip_norm"


@functools.lru_cache
def wanted(steps, clip_norm, dtype=torch.float64):
    return strategies.by_torch(make_config(dtype), steps, clip_norm)


def check_fp64(name, mesh, microbatches, clip_norm, steps):
    got = simulated(make_config(), mesh, STRATEGIES[name], steps, microbatches=microbatches, clip_norm=clip_norm)
    losses, norms, params = wanted(steps, clip_norm)
    assert got[0] == pytest.approx(losses, rel=1e-10) and got[1] == pytest.approx(norms, rel=1e-10)
    assert min(norms) > 0.05  # the clip is active
    for path, a, b in zip(tree.paths(params), tree.leaves(got[2].params), tree.leaves(params), strict=True):
        assert relative_error(a, b) <= 1e-10, path


@pytest.mark.medium
@pytest.mark.parametrize(FIELDS, few(2, QUICK, map(str, QUICK)))
def test_five_steps_equal_torch(name, mesh, microbatches, clip_norm):
    check_fp64(name, mesh, microbatches, clip_norm, steps=5)


@pytest.mark.slow
@pytest.mark.parametrize("case", [case for case in ALL if case not in QUICK], ids=str)
def test_ten_steps_equal_torch_all(case):
    check_fp64(*case, steps=10)


ON_RANKS = [case for case in ALL if case[1].size > 1]


@pytest.mark.slow
@pytest.mark.long
@pytest.mark.parametrize(FIELDS, few(1, ON_RANKS, map(str, ON_RANKS)))
def test_losses_in_fp32(name, mesh, microbatches, clip_norm):
    losses, _, _ = simulated(
        make_config(torch.float32), mesh, STRATEGIES[name], 5, microbatches=microbatches, clip_norm=clip_norm
    )
    assert losses == pytest.approx(wanted(5, clip_norm, torch.float32)[0], rel=1e-5)


# ---- bf16 ------------------------------------------------------------------------------------------------------------
POLICIES = {
    "bf16": Precision.bf16(),
    "bf16 wire": Precision.bf16_wire(),
    "bf16 weights": Precision.bf16(param=torch.bfloat16, reduce=torch.bfloat16, exact=True),  # and fp32 masters
}
IN_ORDER = mixed(["zero1", "zero2"], POLICIES)


@functools.lru_cache
def in_bf16(name, mesh, policy="bf16", microbatches=1, clip_norm=None):
    config = make_config(precision=POLICIES[policy])
    return simulated(config, mesh, STRATEGIES[name], 5, microbatches=microbatches, clip_norm=clip_norm)


@pytest.mark.medium
@pytest.mark.parametrize("name, policy", few(1, IN_ORDER, map(" ".join, IN_ORDER)))
def test_bf16_is_bitwise_the_same_where_sums_have_the_same_order(name, policy):
    """On two ranks a sum has one order: where the gradients lie, and who updates them, changes no bit."""
    mesh = Mesh(dp=2)
    first = in_bf16("replicated", mesh, policy)  # no clip: a norm adds its squares shard by shard
    losses, norms, state = in_bf16(name, mesh, policy)
    assert losses == first[0]
    assert norms == pytest.approx(first[1], rel=1e-6)
    for a, b in zip(tree.leaves(state.params), tree.leaves(first[2].params), strict=True):
        assert torch.equal(a, b)


BF16 = [case for case in mixed(STRATEGIES, MESHES, POLICIES, (1, 3), (None, 0.05)) if case[1].size > 1]


@pytest.mark.slow
@pytest.mark.long
@pytest.mark.parametrize("name, mesh, policy, microbatches, clip_norm", few(1, BF16, map(str, BF16)))
def test_bf16_stays_near_one_rank(name, mesh, policy, microbatches, clip_norm):
    """bf16 has 8 bits: five losses stay within 2^-7 of those of the same policy on one rank."""
    one = in_bf16("replicated", Mesh(dp=1), policy, 1, clip_norm)
    losses, _, state = in_bf16(name, mesh, policy, microbatches, clip_norm)
    assert losses == pytest.approx(one[0], rel=2**-7)
    assert {x.dtype for x in tree.leaves(state.opt["adam"])} == {torch.float32}


# ---- real ranks ------------------------------------------------------------------------------------------------------
def on_rank(rank, mesh, name, microbatches, backend):
    """Three donated, jitted and checked steps with compiled layers: (metrics, this rank's state, findings)."""
    config, strategy = make_config(), STRATEGIES[name]
    with connect(mesh) as world:
        step = make_step(config, mesh, strategy, microbatches, 0.05, save="inputs")
        step = jit(step, donate=0, world=world, backend=backend)
        specs = model.specs(config, mesh, strategy=strategy)
        state, metrics = tree.init(state_specs(specs, OPTIMIZER, strategy), 0, rank), []
        pointers = [x.data_ptr() for x in tree.leaves(state)]
        for i in range(3):
            local = split(strategies.batch_at(config, i), strategies.batch_layouts(mesh, microbatches))[rank]
            state, found = step(state, local)
            metrics.append((found["loss"].item(), found["grad_norm"].item()))
        assert [x.data_ptr() for x in tree.leaves(state)] == pointers and len(step.cache) == 1
        return metrics, state, [str(f) for f in next(iter(step.cache.values())).report.findings]


REAL = [
    ("zero1", Mesh(dp=2), 2, "aot_eager"),
    ("hybrid", Mesh(dp=2, fsdp=2), 1, "eager"),
    ("zero3", Mesh(fsdp=2), 1, "aot_eager"),
]
MORE = [
    pytest.param("hybrid", Mesh(dp=2, fsdp=2), 1, "aot_eager", marks=pytest.mark.slow),
    pytest.param("zero3", Mesh(dp=2, fsdp=2), 1, "aot_eager", marks=pytest.mark.slow),
]


@pytest.mark.slow
@pytest.mark.parametrize("name, mesh, microbatches, backend", [*few(1, REAL), *MORE])
def test_real_ranks(ranks, name, mesh, microbatches, backend):
    got = ranks.run(on_rank, mesh, name, microbatches, backend, ranks=mesh.size)
    losses, norms, params = strategies.by_torch(make_config(), 3, 0.05)
    specs = strategies.specs_of(make_config(), mesh, STRATEGIES[name])
    for rank, (metrics, state, findings) in enumerate(got):
        assert not findings
        assert [m[0] for m in metrics] == pytest.approx(losses, rel=1e-10), rank
        assert [m[1] for m in metrics] == pytest.approx(norms, rel=1e-10), rank
        wanted = split(params, specs.params)[rank]
        for path, a, b in zip(tree.paths(wanted), tree.leaves(state.params), tree.leaves(wanted), strict=True):
            assert relative_error(a, b) <= 1e-10, (rank, path)


# ---- awkward arrays --------------------------------------------------------------------------------------------------
AWKWARD = {
    "uneven": (7, 5), "prime": (7,), "one": (1,), "scalar": (), "rows": (2, 8), "ranges": (6, 2), "even": (8, 4),
    "unused": (4, 4), "frozen": (4, 3), "twice": (4, 4),
}  # fmt: skip


def awkward_loss(params, batch):
    """Uses one array twice and one never; this rank's part of the mean over eight rows."""
    p = params
    x = batch["x"] @ p["uneven"] @ torch.ones(5, dtype=torch.float64)
    x = x + (batch["x"] * p["prime"]).sum(-1) * p["one"] + p["scalar"] * p["rows"].sum()
    x = x + p["ranges"].sin().sum() + p["even"].square().sum() + (p["twice"] @ p["twice"].t() @ p["frozen"]).sum()
    return x.square().sum() / 8


@pytest.mark.medium
@pytest.mark.parametrize("name", few(2, [(name,) for name in STRATEGIES], STRATEGIES))
def test_awkward_arrays(name):
    """Dims that do not divide, one element, none at all, more ranks than rows; frozen, unused, used twice."""
    strategy = STRATEGIES[name]
    optimizer = optim.grouped(LR, [("frozen", optim.Group(frozen=True))], adam=optim.scale_by_adam(eps=1e-3))

    def specs_on(mesh):
        layouts = {path: Layout(shape, torch.float64, mesh) for path, shape in AWKWARD.items()}
        return {path: tree.ArraySpec(strategy.params_layout(x), tree.Normal(0.5)) for path, x in layouts.items()}

    mesh = Mesh(dp=2, fsdp=2)
    specs, axes = specs_on(mesh), Axes(mesh)
    layouts = tree.layouts(specs)

    def loss_fn(params, batch):
        whole = tree.map(lambda x, layout: reshard(x, layout, layout.without(layout.sharded), axes), params, layouts)
        return awkward_loss(whole, batch)

    step = build_train_step(loss_fn, optimizer, layouts, axes, strategy=strategy, clip_norm=None)
    state = Ranks(tree.init(state_specs(specs, optimizer, strategy), 0, rank) for rank in range(mesh.size))
    x = torch.randn(8, 7, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    rows = Layout((8, 7), x.dtype, mesh, (("dp", "fsdp"),))
    ins = tree.layouts(state_specs(specs, optimizer, strategy)), {"x": rows}
    assert not check(step, *ins).findings
    sim = simulate(step, mesh, state, {"x": x}, layouts=ins, out_layouts=(ins[0], None))
    sim = sim.again(Ranks(out[0] for out in sim.outputs), {"x": x})

    start = tree.init(specs_on(Mesh()), 0, 0)
    params = {path: value.clone().requires_grad_(path != "frozen") for path, value in start.items()}
    trained = [p for p in params.values() if p.requires_grad]
    groups = [{"params": [p for p in trained if p.dim() > 1]}]
    groups += [{"params": [p for p in trained if p.dim() <= 1], "weight_decay": 0}]  # by default matrices decay
    adamw = torch.optim.AdamW(groups, LR, (0.9, 0.95), 1e-3, 0.1)
    for _ in range(2):
        adamw.zero_grad()
        awkward_loss(params, {"x": x}).backward()
        params["unused"].grad = torch.zeros_like(params["unused"])  # a zero gradient: moments and decay go on
        adamw.step()
    got = sim.globals()[0]
    for path, b in params.items():
        assert relative_error(got.params[path], b.detach()) <= 1e-10, path
    assert torch.equal(got.params["frozen"], start["frozen"])


# ---- changing the strategy is a restore ------------------------------------------------------------------------------
CHANGES = [
    (("zero1", Mesh(dp=2)), ("zero3", Mesh(dp=2, fsdp=2))),
    (("zero3", Mesh(fsdp=4)), ("hybrid", Mesh(dp=2, fsdp=2))),
]


@pytest.mark.medium
@pytest.mark.parametrize("source, target", few(1, CHANGES, map(str, CHANGES)))
def test_changing_the_strategy_is_a_restore(tmp_path, source, target):
    """A state saved under one strategy and mesh is, bit for bit, the state of the other; moments included."""
    config = make_config()
    saved = strategies.specs_of(config, source[1], STRATEGIES[source[0]])
    wanted = strategies.specs_of(config, target[1], STRATEGIES[target[0]])
    _, _, state = simulated(config, source[1], STRATEGIES[source[0]], 2)
    assert all(x.any() for x in tree.leaves(state.opt))
    with small_sizes(512, 128):
        assert save_all(tmp_path / "a", state, tree.layouts(saved)) == [None] * source[1].size
        got = run(target[1].size, lambda world: checkpoint.restore(tmp_path / "a", tree.layouts(wanted), world=world))
    for rank, local in enumerate(split(state, wanted)):
        assert_same_bits(got[rank], local, f"rank {rank}")


# ---- layouts ---------------------------------------------------------------------------------------------------------
def test_a_kind_that_is_sharded_less_than_the_one_before():
    with pytest.raises(ValueError, match="got params sharded over 'fsdp' and grads over .*; add the axis to grads"):
        DataParallel(params=("fsdp",))
    with pytest.raises(ValueError, match="got optim sharded over 'tp' and axes over"):
        DataParallel(optim=("tp",))
    assert DataParallel("dp", optim="dp") == DataParallel.zero1("dp")


def test_the_optimizers_layout_goes_on_from_the_gradients():
    """Whatever the order in which axes are named: what is sharded stays where it is, and the rest is cut further."""
    w = Layout((8, 8), torch.float32, Mesh(dp=2, fsdp=2))
    placed = DataParallel(grads=("dp",), optim=("fsdp", "dp")).place(w)
    assert placed.grads.axes(0) == ("dp",) and placed.optim.axes(0) == ("dp", "fsdp")
    assert [str(move) for move in reshard_moves(placed.grads, placed.optim)] == ["reduce_scatter(fsdp dim 0)"]


def test_placements_are_those_of_every_leaf():
    config, mesh = make_config(), Mesh(dp=2, fsdp=2)
    for strategy in STRATEGIES.values():
        layouts = model.layouts(config, mesh, strategy=strategy)
        placed = placements(layouts, strategy)
        for at_rest, grads, seen in zip(*map(tree.leaves, placed), strict=True):
            assert (at_rest, grads, seen) == strategy.place(at_rest)
            assert set(at_rest.sharded) == set(strategy.params) and set(seen.sharded) == set(strategy.optim)
            assert set(grads.sharded) == set(strategy.grads)
            assert set(grads.unreduced) == set(strategy.axes) - set(strategy.grads)
