"""ZeRO on meshes that divide no dim: proven, equal to one rank, zeros stay zeros, every rank holds its share."""

import math

import pytest
import torch

from fmegatron import model, nn, optim, step, tree
from fmegatron.collectives import Axes, connect, psum
from fmegatron.layout import DataParallel, Layout, Mesh, Split
from fmegatron.optim import contrib
from fmegatron.testing import assert_parity, join, split
from fmegatron.testing.compare_ranks import relative_error
from tests.pairs import few, mixed
from tests.step import strategies
from tests.step.strategies import STRATEGIES, make_config, make_step, simulated

NAMES = ("zero1", "zero2", "zero3", "hsdp", "hybrid")


# ---- a module of one's own: dims of 7, 13 and 1 ----------------------------------------------------------------------
SHAPES = {"w": (7, 12), "norm": (13,), "v": (12, 13), "scale": (1,)}


def specs_on(mesh, strategy):
    layouts = {name: strategy.params_layout(Layout(shape, torch.float64, mesh)) for name, shape in SHAPES.items()}
    return tree.map(lambda layout: tree.ArraySpec(layout, tree.Normal(1.0)), layouts)


def loss_of(mesh, layouts, rows):
    axes = Axes(mesh)

    def loss(params, batch):
        w = nn.gather_tree(params, layouts, axes[axes.data])
        y = torch.tanh(batch["x"] @ w["w"]) @ w["v"] * w["norm"] + w["scale"]
        loss = y.square().sum() / rows
        return loss, {"loss": psum(loss.detach(), axes[axes.data])}

    return loss


OPTIMIZERS = {
    "adamw": optim.adamw(1e-2, weight_decay=0.1),
    "sgd": optim.sgd(1e-2, momentum=0.9),
    "lion": optim.lion(1e-3, weight_decay=0.1),
    "average": optim.averaged(optim.adamw(1e-2), 0.8),
    "frozen": optim.grouped(1e-2, [("w", optim.Group(frozen=True))], adam=optim.scale_by_adam()),
    "guarded": optim.skip_nonfinite(optim.adamw(1e-2)),
}


def own(mesh, name, optimizer, microbatches=1):
    """(step, specs of its state, layouts of its batch) of the module."""
    strategy, rows = STRATEGIES[name], 2 * microbatches * 105
    specs = specs_on(mesh, strategy)
    layouts = tree.layouts(specs)
    train_step = step.build_train_step(
        loss_of(mesh, layouts, rows // microbatches), optimizer, layouts, Axes(mesh), strategy=strategy, clip_norm=0.1,
        microbatches=microbatches,
    )  # fmt: skip
    batch = {"x": strategy.batch_layout((rows, 7), torch.float64, mesh, microbatches)}
    return train_step, step.state_specs(specs, optimizer, strategy), batch


def prove(mesh, name, optimizer, microbatches=1):
    train_step, state, batch = own(mesh, name, optimizer, microbatches)
    report = step.check(train_step, state, batch)
    assert report.ok, str(report)
    x = torch.randn(batch["x"].shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    whole = tree.init(own(Mesh(), name, optimizer, microbatches)[1], key=0, rank=0)
    assert_parity(
        lambda m: own(m, name, optimizer, microbatches)[0], mesh, whole, {"x": x}, layouts=(state, batch), steps=3
    )


MESHES = (Mesh(fsdp=3), Mesh(fsdp=5), Mesh(fsdp=7), Mesh(dp=2, fsdp=3), Mesh(dp=3, fsdp=5), Mesh(fsdp=6))
OWN = mixed(NAMES, MESHES, OPTIMIZERS, (1, 2))
QUICK_OWN = [
    ("zero3", Mesh(fsdp=3), "adamw", 1),
    ("hybrid", Mesh(dp=2, fsdp=3), "average", 2),
    ("zero1", Mesh(fsdp=5), "frozen", 1),
]


@pytest.mark.long
@pytest.mark.parametrize("name, mesh, optimizer, microbatches", QUICK_OWN, ids=str)
def test_own_module(name, mesh, optimizer, microbatches):
    prove(mesh, name, OPTIMIZERS[optimizer], microbatches)


@pytest.mark.slow
@pytest.mark.parametrize("case", [case for case in OWN if case not in QUICK_OWN], ids=str)
def test_own_module_all(case):
    name, mesh, optimizer, microbatches = case
    prove(mesh, name, OPTIMIZERS[optimizer], microbatches)


def test_a_mistake_beside_ranges_is_blamed():
    """A leaf in ranges of the flattened block has no rows that microbatches could cut."""
    layout = Layout((6, 7), torch.float64, Mesh(fsdp=4), flat=("fsdp",), padded=True)
    with pytest.raises(AssertionError, match=r"meaning is lost at\n  test_padded.py"):
        assert_parity(
            lambda mesh: lambda x: x.square().sum() * mesh.size, Mesh(fsdp=4), torch.ones(6, 7, dtype=torch.float64),
            layouts=(layout,),
        )  # fmt: skip


# ---- a decoder, against torch.optim ----------------------------------------------------------------------------------
DECODER = mixed(NAMES, (Mesh(fsdp=3), Mesh(fsdp=6), Mesh(dp=2, fsdp=3), Mesh(fsdp=3, tp=2)), (1, 2), (None, 0.05))


@pytest.mark.slow
@pytest.mark.parametrize("name, mesh, microbatches, clip_norm", few(1, DECODER, map(str, DECODER)))
def test_decoder_equals_torch(name, mesh, microbatches, clip_norm):
    """Tied weights, a mask that leaves rows few tokens, several microbatches."""
    config, strategy = make_config(), STRATEGIES[name]
    train_step = make_step(config, mesh, strategy, microbatches=microbatches, clip_norm=clip_norm)
    specs = strategies.specs_of(config, mesh, strategy)
    assert any(layout.padded for layout in tree.leaves(tree.layouts(specs)))
    report = step.check(train_step, specs, strategies.batch_layouts(mesh, microbatches))
    assert report.ok, str(report)
    got = simulated(config, mesh, strategy, 3, microbatches=microbatches, clip_norm=clip_norm)
    losses, norms, params = strategies.by_torch(config, 3, clip_norm)
    assert got[0] == pytest.approx(losses, rel=1e-10) and got[1] == pytest.approx(norms, rel=1e-10)
    for path, a, b in zip(tree.paths(params), tree.leaves(got[2].params), tree.leaves(params), strict=True):
        assert relative_error(a, b) <= 1e-10, path


OF_MATRICES = {
    "muon": optim.muon(1e-2), "adafactor": contrib.adafactor(1e-2),
    "soap": contrib.soap(1e-2, eps=1e-3, matrices=["blocks"]),
}  # fmt: skip


def with_optimizer(mesh, name, optimizer, config):
    """(step, specs of its state, layouts of its batch) for an optimizer that looks at layouts."""
    strategy = STRATEGIES[name]
    specs = model.specs(config, mesh, strategy=strategy)
    train_step = make_step(config, mesh, strategy, clip_norm=0.1, optimizer=optimizer)
    return train_step, step.state_specs(specs, optimizer, strategy), strategies.batch_layouts(mesh)


EXPERTS = model.llama(
    vocab_size=30, dim=32, layers=1, heads=4, kv_heads=2, ffn_dim=22, max_seq=6, vocab_multiple=16,
    param_dtype=torch.float64, compute_dtype=torch.float64,
    mlp=model.MoE(nn.Router(4, 2), 22, balance=0.01, ep=("dp",)),
)  # fmt: skip
# SOAP's state has eigenvectors, which rounding turns: after one step by 1.1e-8 here, by 1.0e-8 on the even fsdp=2.
TURNED = 1e-6
OTHERS = [
    ("zero3", Mesh(fsdp=3), "muon", make_config()), ("hybrid", Mesh(dp=2, fsdp=3), "muon", make_config()),
    ("zero1", Mesh(fsdp=3, tp=2), "muon", make_config()), ("zero3", Mesh(fsdp=3, tp=2), "adafactor", make_config()),
    ("zero3", Mesh(dp=2, fsdp=3), "adafactor", EXPERTS), ("zero3", Mesh(fsdp=3), "soap", make_config()),
]  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("name, mesh, kind, config", OTHERS, ids=map(str, range(len(OTHERS))))
def test_matrices_and_experts(name, mesh, kind, config):
    train_step, state, batch = with_optimizer(mesh, name, OF_MATRICES[kind], config)
    report = step.check(train_step, state, batch)
    assert report.ok, str(report)
    whole = tree.init(with_optimizer(Mesh(), name, OF_MATRICES[kind], config)[1], key=0, rank=0)
    assert_parity(
        lambda m: with_optimizer(m, name, OF_MATRICES[kind], config)[0], mesh, whole, strategies.batch_at(config, 0),
        layouts=(state, batch), steps=3, tolerance=TURNED if kind == "soap" else 1e-10,
    )  # fmt: skip


@pytest.mark.parametrize("name", ["zero3", pytest.param("zero1", marks=pytest.mark.slow)])
def test_8_bit_state_of_padded_rows(name):
    """Rows that are full on every rank, of which the last rank has fewer: to the rounding of float32."""
    optimizer = contrib.compressed(optim.adamw(1e-2), [("adam/m", contrib.int8(block=64, smallest=2000))])
    strategy, mesh = STRATEGIES[name], Mesh(fsdp=3)

    def parts(mesh):
        shapes, axes = {"w": (250, 14), "v": (14, 9)}, Axes(mesh)
        layouts = tree.map(lambda s: strategy.params_layout(s), {
            name: Layout(shape, torch.float32, mesh) for name, shape in shapes.items()
        })  # fmt: skip

        def loss(params, batch):
            w = nn.gather_tree(params, layouts, axes[axes.data])
            loss = (torch.tanh(batch["x"] @ w["w"]) @ w["v"]).square().sum() / 210
            return loss, {"loss": psum(loss.detach(), axes[axes.data])}

        specs = tree.map(lambda layout: tree.ArraySpec(layout, tree.Normal(1.0)), layouts)
        train_step = step.build_train_step(loss, optimizer, layouts, axes, strategy=strategy, clip_norm=0.1)
        batch = {"x": strategy.batch_layout((210, 250), torch.float32, mesh)}
        return train_step, step.state_specs(specs, optimizer, strategy), batch

    train_step, state, batch = parts(mesh)
    stored = state.opt["adam"]["m"]["w"]
    assert str(stored["codes"].layout) == "i8[250@fsdp, 14] padded on fsdp3" and stored["scale"].layout.padded
    report = step.check(train_step, state, batch)
    assert report.ok, str(report)
    x = torch.randn(batch["x"].shape, generator=torch.Generator().manual_seed(0))
    whole = tree.init(parts(Mesh())[1], key=0, rank=0)
    assert_parity(
        lambda m: parts(m)[0], mesh, whole, {"x": x}, layouts=(state, batch), steps=3, tolerance=1e-5
    )  # fmt: skip


def test_8_bit_state_of_rows_cut_into_padded_pieces_is_refused():
    formats = [("adam/m", contrib.int8(block=8))]
    config = model.llama(vocab_size=58, dim=40, layers=2, heads=4, kv_heads=2, ffn_dim=22, max_seq=16)
    with pytest.raises(ValueError, match="an edge of a shard every 27 .*give the strategy the block, .* in Float32"):
        with_optimizer(
            Mesh(fsdp=3), "zero1", contrib.compressed(optim.adamw(1e-2), formats), config,
        )  # fmt: skip


# ---- the share of a rank ---------------------------------------------------------------------------------------------
SIZES_8B = {"dim": 4096, "layers": 32, "heads": 32, "kv_heads": 8, "ffn_dim": 14336, "max_seq": 8192}
DECODERS = {
    "8B": model.llama(vocab_size=128256, **SIZES_8B),
    "70B": model.llama(
        vocab_size=128256, dim=8192, layers=80, heads=64, kv_heads=8, ffn_dim=28672, max_seq=8192
    ),
    "Mixtral": model.llama(vocab_size=32000, mlp=model.MoE(nn.Router(8, 2), 14336), **SIZES_8B),
}  # fmt: skip
RANKS = (3, 6, 12, 24, 40, 72, 96, 768)


def share(size, name, mesh) -> float:
    """Elements that a rank holds of parameters, and of the optimizer's state, relative to its share: the larger."""
    strategy = DataParallel.named(name)
    specs = model.specs(DECODERS[size], mesh, strategy=strategy)
    state, found = step.state_specs(specs, optim.adamw(1e-3), strategy), []
    for axes, part in ((strategy.params, state.params), (strategy.optim, state.opt)):
        leaves = tree.leaves(tree.layouts(part))
        held = sum(math.prod(x.local_shape(0)) for x in leaves) * mesh.extent(mesh.axes((*axes, "tp")))
        found.append(held / sum(math.prod(x.shape) for x in leaves))
    return max(found)


def meshes_of(name, n, tps):
    if name.startswith("zero"):
        return [Mesh(fsdp=n, tp=tp) for tp in tps]
    return [mesh for tp in tps for mesh in (Mesh(dp=2, fsdp=n, tp=tp), Mesh(dp=n, fsdp=8, tp=tp))]


GRID = [(size, name) for size in DECODERS for name in NAMES]


@pytest.mark.long
@pytest.mark.parametrize("size, name", few(5, GRID))
def test_every_rank_holds_its_share(size, name):
    """On paper: nothing is allocated. Worst: 1.0121, of Mixtral, hybrid, dp=40·fsdp=8·tp=8."""
    for n in RANKS:
        for mesh in meshes_of(name, n, (1, 4, 8)):
            assert share(size, name, mesh) <= 1.02, mesh


def test_boxes_of_a_range_within_the_layer_are_few():
    mesh = Mesh(fsdp=768)
    layout = model.specs(DECODERS["8B"], mesh, strategy=DataParallel.zero3())["blocks"]["mlp"]["w_down"].layout
    assert str(layout) == "f32[32, 14336, 4096] flat@fsdp from dim 1 padded on fsdp768"
    assert layout.local_shape(5) == (32, -(-14336 * 4096 // 768))
    assert all(len(layout.boxes(rank)) <= 3 for rank in (0, 1, 400, 766, 767))


def test_what_divides_is_never_padded():
    for name in NAMES:
        for mesh in (Mesh(fsdp=8), Mesh(dp=2, fsdp=4), Mesh(dp=2, fsdp=2, tp=2)):
            specs = model.specs(
                model.llama(vocab_size=1024, max_seq=64, dim=64, layers=4, heads=8, kv_heads=8, ffn_dim=128), mesh,
                strategy=DataParallel.named(name),
            )  # fmt: skip
            state = step.state_specs(specs, optim.adamw(1e-3), DataParallel.named(name))
            assert not any(layout.padded for layout in tree.leaves(tree.layouts(state)))


# ---- the rule of DataParallel ----------------------------------------------------------------------------------------
def placed(shape, mesh, *spec, whole=(), name="zero3"):
    return DataParallel.named(name).params_layout(Layout(shape, torch.float32, mesh, spec), whole)


def test_a_dim_that_divides_then_ranges_that_divide_then_least_padding():
    mesh = Mesh(fsdp=6)
    assert str(placed((7, 12), mesh)) == "f32[7, 12@fsdp] on fsdp6"
    assert str(placed((9, 4), mesh)) == "f32[9, 4] flat@fsdp on fsdp6"
    assert str(placed((128, 1000), mesh)) == "f32[128, 1000@fsdp] padded on fsdp6"  # 1002
    assert str(placed((7, 13), mesh)) == "f32[7, 13] flat@fsdp padded on fsdp6"
    assert str(placed((4, 7, 13), mesh, whole=(0,))) == "f32[4, 7, 13] flat@fsdp from dim 1 padded on fsdp6"
    assert str(placed((4, 6, 14), Mesh(fsdp=4), whole=(0,))) == "f32[4, 6, 14] flat@fsdp from dim 1 on fsdp4"
    assert str(placed((4, 128, 1000), mesh, whole=(0,))) == "f32[4, 128, 1000@fsdp] padded on fsdp6"  # a matrix
    assert str(placed((13,), mesh)) == "f32[13@fsdp] padded on fsdp6"
    assert str(placed((1,), mesh)) == "f32[1] on fsdp6"  # there is nothing to share
    assert str(placed((64, 32), Mesh(fsdp=24), whole=(0,))) == "f32[64, 32@fsdp] padded on fsdp24"


def test_an_axis_of_size_one_changes_no_placement():
    wide = (4096, 6144)
    with_tp = placed(wide, Mesh(fsdp=768, tp=1), None, Split("tp", (4096, 1024, 1024)))
    assert with_tp.local_shape(0) == placed(wide, Mesh(fsdp=768)).local_shape(0)


def test_a_large_leaf_that_would_stay_whole_is_an_error():
    mesh = Mesh(fsdp=3, tp=2)
    with pytest.raises(ValueError, match="every rank along fsdp would hold all .* do not split it over tp"):
        placed((1 << 20, 2), mesh, Split("tp", 2), whole=(1,))
    assert not placed((1 << 10, 2), mesh, Split("tp", 2), whole=(1,)).axes(0) == ("tp", "fsdp")  # a small one may


# ---- real ranks ------------------------------------------------------------------------------------------------------
def on_rank(rank, mesh, name):
    """Three donated, jitted and checked steps: (metrics, parameters, whether all padding is zero, open lines)."""
    config, strategy = make_config(), STRATEGIES[name]
    with connect(mesh) as world:
        train_step = step.jit(make_step(config, mesh, strategy, clip_norm=0.05), donate=0, world=world, backend="eager")
        specs = strategies.specs_of(config, mesh, strategy)
        state, metrics = tree.init(specs, 0, rank), []
        for i in range(3):
            local = split(strategies.batch_at(config, i), strategies.batch_layouts(mesh))[rank]
            state, found = train_step(state, local)
            metrics.append((found["loss"].item(), found["grad_norm"].item()))
        zero = True
        for x, layout in zip(tree.leaves(state), tree.leaves(tree.layouts(specs)), strict=True):
            held = sum(box.view(x.contiguous()).count_nonzero().item() for box in layout.boxes(rank))
            zero &= held == x.count_nonzero().item()
        report = next(iter(train_step.cache.values())).report
        return metrics, state.params, zero, str(report) if not report.ok else ""


@pytest.mark.medium
@pytest.mark.parametrize("name", ["zero3", pytest.param("zero1", marks=pytest.mark.slow)])
def test_three_real_ranks(ranks, name):
    mesh = Mesh(fsdp=3)
    got = ranks.run(on_rank, mesh, name, ranks=3)
    losses, norms, params = strategies.by_torch(make_config(), 3, 0.05)
    layouts = tree.layouts(strategies.specs_of(make_config(), mesh, STRATEGIES[name])).params
    assert tree.leaves(got[0][1])[0].dtype is torch.float64
    for metrics, _, zero, unproven in got:
        assert zero and not unproven, unproven
        assert [m[0] for m in metrics] == pytest.approx(losses, rel=1e-10)
        assert [m[1] for m in metrics] == pytest.approx(norms, rel=1e-10)
    joined = join([rank[1] for rank in got], layouts)
    for path, a, b in zip(tree.paths(params), tree.leaves(joined), tree.leaves(params), strict=True):
        assert relative_error(a, b) <= 1e-10, path
