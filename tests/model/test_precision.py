"""Policies of dtypes in the decoder: what travels in which dtype, what arrives, and that the mesh changes nothing."""

import dataclasses
import functools

import pytest
import torch

from fmegatron import model, optim, step, tree
from fmegatron.collectives import Axes, Precision, connect
from fmegatron.layout import Layout, Mesh
from fmegatron.model.array_specs import init
from fmegatron.model.weights import gather_weights
from fmegatron.step import collectives_of, trace, value_and_grad
from fmegatron.testing import simulate, split
from fmegatron.tree.structure import map_with_path
from tests.model.test_reference import leaves_that_differ, make_batch
from tests.model.test_sharded import CONFIG, batch_layouts, check, make_step, raw_layouts, small
from tests.pairs import few

F8, B16, F32 = torch.float8_e4m3fn, torch.bfloat16, torch.float32
FP8 = Precision.fp64(gather=F8)


def config_of(precision, **changes):
    return small(precision=precision, **changes)


# ---- 8 bits ----------------------------------------------------------------------------------------------------------
FP8_MESHES = [Mesh(fsdp=2), Mesh(tp=2), Mesh(dp=2, fsdp=2, tp=2)]


@pytest.mark.medium
@pytest.mark.parametrize("mesh", few(1, [(mesh,) for mesh in FP8_MESHES], map(str, FP8_MESHES)))
def test_weights_gathered_in_fp8(mesh):
    """The same roundings on every mesh: loss and each gradient equal one rank's under the same policy, fp64, 1e-10."""
    check(config_of(FP8, tied=mesh["fsdp"] == 2 if "fsdp" in mesh else False), mesh)


@pytest.mark.slow
@pytest.mark.long
def test_weights_gathered_in_fp8_by_compiled_layers():
    check(config_of(FP8), Mesh(fsdp=2, tp=2), save="inputs")


def test_fp8_rounds_to_nearest_and_passes_gradients_straight_through():
    params, batch = leaves_that_differ(init(CONFIG, Mesh(), key=3)), make_batch(CONFIG, batch_size=2)
    grads, loss, _ = make_step(config_of(FP8))(Mesh())(params, batch)

    def rounded(path, x):
        if x.dim() - path.startswith("blocks") < 2:
            return x
        dims = tuple(range(path.startswith("blocks"), x.dim()))
        scale = x.abs().amax(dims, keepdim=True).float() / 448
        return ((x.float() / scale).to(F8).float() * scale).double()

    quantised = map_with_path(rounded, params)
    wanted, exact_loss, _ = make_step(CONFIG)(Mesh())(quantised, batch)
    assert torch.equal(loss, exact_loss)
    assert all(torch.equal(a, b) for a, b in zip(tree.leaves(grads), tree.leaves(wanted), strict=True))
    assert not torch.equal(params["blocks"]["mlp"]["w_down"], quantised["blocks"]["mlp"]["w_down"])


@functools.cache
def wire(precision, mesh):
    """The collectives in loss and gradients of a decoder of one layer."""
    config = config_of(precision, layers=1)
    params = split(init(config, Mesh(), 0), model.layouts(config, mesh))[0]
    batch = make_batch(config, batch_size=4)
    local = split(batch, batch_layouts(batch, mesh))[0]
    return collectives_of(trace(make_step(config)(mesh), (params, local)).graph_module.graph, mesh)


def sent(precision, mesh, op):
    """(those of one op, bytes that a rank sends by them)."""
    found = [one for one in wire(precision, mesh) if one.op == op]
    return found, sum(one.sent for one in found)


@pytest.mark.medium
def test_bytes_of_the_wire():
    mesh = Mesh(fsdp=4)
    gathers, full = sent(Precision.fp32(), mesh, "all_gather")
    for precision, ratio in ((Precision.bf16(), 2), (Precision.bf16_wire(), 2), (Precision.fp8_wire(), 4)):
        found, nbytes = sent(precision, mesh, "all_gather")
        assert len(found) == len(gathers) and nbytes * ratio == full
    assert [len(sent(Precision.fp8_wire(), mesh, op)[0]) for op in ("pmax", "psum")] == [1, 2], "scales; counts, totals"
    back = {p: sent(p, mesh, "reduce_scatter")[1] for p in (Precision.bf16(), Precision.bf16_wire())}
    assert back[Precision.bf16()] == full == 2 * back[Precision.bf16_wire()]


# ---- sums ------------------------------------------------------------------------------------------------------------
def gradients(precision, mesh, dtype=None):
    """Simulated gradients of the decoder, global arrays, before replicas are summed."""
    config = config_of(precision)
    layouts, axes = model.layouts(config, mesh), Axes(mesh)
    f = value_and_grad(lambda params, batch: model.loss(params, batch, config, axes), dtype)
    params = leaves_that_differ(init(config, Mesh(), key=3))
    batch = make_batch(config, batch_size=4)
    given = (layouts, batch_layouts(batch, mesh))
    sim = simulate(
        lambda p, b: f(p, b)[1], mesh, params, batch, layouts=given, out_layouts=raw_layouts(config, mesh)[0]
    )
    return sim.globals()


@pytest.mark.medium
def test_exact_sums_of_what_travels_in_16_bits():
    """bf16 on the wire and fp32 sums: bit for bit what fp32 on the wire gives, and closer than sums in bf16."""
    mesh = Mesh(fsdp=4)
    wide, exact = (gradients(p, mesh) for p in (Precision.bf16(), Precision.bf16_wire()))
    narrow = gradients(Precision.bf16(reduce=None), mesh)
    same = [torch.equal(a, b) for a, b in zip(tree.leaves(wide), tree.leaves(exact), strict=True)]
    assert all(same) and all(x.dtype == F32 for x in tree.leaves(exact))
    differ = [not torch.equal(a, b) for a, b in zip(tree.leaves(wide), tree.leaves(narrow), strict=True)]
    assert any(differ)


def test_gradients_of_16_bit_parameters():
    """They arrive in 16 bits, or where the gradient is asked for in fp32 as the fp32 sum that was made."""
    mesh, policy = Mesh(fsdp=4), Precision.bf16_wire(param=B16)
    as_params, wide = gradients(policy, mesh), gradients(policy, mesh, F32)
    for path, a, b in zip(tree.paths(wide), tree.leaves(as_params), tree.leaves(wide), strict=True):
        assert (a.dtype, b.dtype) == (B16, F32), path
        if "norm" not in path:  # which are computed with in the dtype that they come in
            assert torch.equal(b.to(B16), a), path
            assert not torch.equal(a.float(), b), path


POLICIES = {
    "fp32": Precision.fp32(), "bf16": Precision.bf16(), "bf16 wire": Precision.bf16_wire(), "fp8": Precision.fp8_wire(),
    "bf16 at rest": Precision.bf16(param=B16), "sums in bf16": Precision.bf16(reduce=None),
}  # fmt: skip


@pytest.mark.medium
@pytest.mark.parametrize("name", few(2, [(name,) for name in POLICIES], POLICIES))
def test_no_finding_under_any_policy(name):
    mesh, config = Mesh(dp=2, fsdp=2, tp=2), config_of(POLICIES[name])
    axes, layouts = Axes(mesh), model.layouts(config, mesh)
    optimizer = optim.adamw(1e-3)
    train = step.build_train_step(lambda p, b: model.loss(p, b, config, axes), optimizer, layouts, axes)
    rows = Layout((8, 8), torch.int64, mesh, (("dp", "fsdp"),))
    specs = step.state_specs(model.specs(config, mesh), optimizer)
    report = step.check(train, specs, {"tokens": rows, "labels": rows})
    assert report.ok, str(report)


# ---- real ranks ------------------------------------------------------------------------------------------------------
def on_rank(rank, mesh, name, params, batch):
    """Loss and gradients of this rank, not compiled; its shards cut from the whole."""
    config = config_of(POLICIES[name])
    with connect(mesh) as world:
        layouts, axes = model.layouts(config, mesh), Axes(mesh, world)
        f = value_and_grad(lambda params, batch: model.loss(params, batch, config, axes), axes=axes)
        return f(split(params, layouts)[rank], split(batch, batch_layouts(batch, mesh))[rank])[1]


REAL = ["bf16 wire", "fp8", "sums in bf16"]


@pytest.mark.slow
@pytest.mark.long
@pytest.mark.parametrize("name", few(1, [(name,) for name in REAL], REAL))
def test_real_ranks(ranks, name):
    """Bit for bit the gradients of simulated ranks."""
    mesh, config = Mesh(fsdp=2), config_of(POLICIES[name])
    params, batch = leaves_that_differ(init(config, Mesh(), key=3)), make_batch(config, batch_size=4)
    layouts, axes = model.layouts(config, mesh), Axes(mesh)
    f = value_and_grad(lambda params, batch: model.loss(params, batch, config, axes))
    given = (layouts, batch_layouts(batch, mesh))
    sim = simulate(
        lambda p, b: f(p, b)[1], mesh, params, batch, layouts=given, out_layouts=raw_layouts(config, mesh)[0]
    )
    for rank, grads in enumerate(ranks.run(on_rank, mesh, name, params, batch, ranks=2)):
        for path, got, want in zip(tree.paths(grads), tree.leaves(grads), tree.leaves(sim.outputs[rank]), strict=True):
            assert got.dtype == want.dtype and torch.equal(got, want), f"{path} on rank {rank}"


# ---- the value -------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"param": torch.int8}, r"Precision.param: got torch.int8, wanted a floating dtype"),
        ({"compute": F8}, "Precision.compute: got torch.float8_e4m3fn, in which nothing is added up"),
        ({"accumulate": B16}, "Precision.accumulate: got torch.bfloat16, wanted torch.float32 or wider"),
        ({"master": 32}, "Precision.master: got 32, wanted a floating dtype such as torch.bfloat16, or None"),
        ({"reduce": F8}, "add exact=True"),
    ],
)
def test_wrong_policies(fields, says):
    with pytest.raises(ValueError, match=says):
        Precision(**fields)


def test_a_config_takes_its_dtypes_from_the_policy():
    config = config_of(Precision.bf16(param=B16))
    assert (config.param_dtype, config.compute_dtype) == (B16, B16)
    assert CONFIG.policy == Precision(param=CONFIG.param_dtype, compute=CONFIG.compute_dtype)
    assert dataclasses.replace(config, precision=Precision.fp32()).compute_dtype == F32
    assert hash(config.precision) == hash(Precision.bf16(param=B16))


def test_a_value_without_a_scale_cannot_travel_in_8_bits():
    mesh, config = Mesh(fsdp=2), config_of(Precision.fp8_wire())
    params = init(config, mesh, 0)
    with pytest.raises(ValueError, match="wanted a scale with it .nn.with_scales."):
        gather_weights(params, model.layouts(config, mesh), config, Axes(mesh))
