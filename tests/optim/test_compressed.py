"""Compressed optimizer state: bytes, errors, guards, and how well a model trains with it."""

import pytest
import torch

from fmegatron import optim, tree
from fmegatron.layout import Layout, Mesh
from fmegatron.optim.contrib import compressed, float8, int8
from fmegatron.optim.contrib.blockwise import float16
from fmegatron.optim.contrib.formats import Bfloat16, Float32, NoMaster, Remainder
from fmegatron.optim.contrib.rounding import join_master
from fmegatron.tree import ArraySpec
from tests.optim.table import assert_same, grads_of

MANY = 1 << 20  # elements of one leaf: scales count as they do in a model
EIGHT = [("m", int8()), ("v", int8(root=True)), ("master", Remainder())]
BYTES = {  # per bfloat16 parameter: moments, and what the master costs beside it
    "fp32": ([], 12),
    "bf16": ([("adam", Bfloat16())], 8),
    "bf16, remainder": ([("adam", Bfloat16()), ("master", Remainder())], 6),
    "fp16": ([("m", float16()), ("v", float16(root=True)), ("master", Remainder())], 6 + 2 / 64),
    "fp8": ([("m", float8()), ("v", float8(root=True)), ("master", Remainder())], 4 + 2 / 64),
    "int8": (EIGHT, 4 + 2 / 64),
    "int8, no master": ([*EIGHT[:2], ("master", NoMaster())], 2 + 2 / 64),
}


@pytest.mark.parametrize(("rules", "wanted"), BYTES.values(), ids=BYTES)
def test_bytes_per_parameter(rules, wanted):
    spec = {"w": ArraySpec(Layout((1024, MANY // 1024), torch.bfloat16, Mesh()))}
    state = compressed(optim.adamw(1e-2), rules).init(spec) if rules else optim.adamw(1e-2).init(spec)
    bytes_of = sum(leaf.layout.nbytes for path, leaf in zip(tree.paths(state), tree.leaves(state), strict=True)
                   if path != "count")  # fmt: skip
    assert bytes_of / MANY == wanted


def test_the_first_rule_that_matches_and_small_leaves():
    rules = [("embed", Float32()), ("m", int8(block=8, smallest=16)), ("adam", Bfloat16())]
    params = {name: torch.ones(shape) for name, shape in {"embed": (4, 8), "norm": (8,), "w": (4, 8)}.items()}
    state = compressed(optim.adamw(1e-2), rules).init(params)
    dtypes = {path: leaf.dtype for path, leaf in zip(tree.paths(state), tree.leaves(state), strict=True)}
    assert dtypes == {
        "adam/m/embed": torch.float32, "adam/v/embed": torch.float32,
        "adam/m/norm": torch.float32, "adam/v/norm": torch.bfloat16,
        "adam/m/w/codes": torch.int8, "adam/m/w/scale": torch.float32, "adam/v/w": torch.bfloat16,
        "count": torch.int64,
    }  # fmt: skip


def test_the_remainder_changes_nothing_but_ties():
    """AdamW whose master is parameter and remainder is AdamW with a float32 master, bit for bit."""
    params = {"w": torch.randn(64, 32, generator=torch.Generator().manual_seed(0)).to(torch.bfloat16)}
    plain, small = optim.adamw(1e-3), compressed(optim.adamw(1e-3), [("master", Remainder())])
    a, b = (params, plain.init(params)), (params, small.init(params))
    for i in range(20):
        grads = grads_of(params, i)
        a, b = plain.update(grads, a[1], a[0]), small.update(grads, b[1], b[0])
        master = join_master(b[0]["w"], b[1]["master"]["w"])
        assert_same(master, a[1]["master"]["w"])
        ties = (master.view(torch.int32) & 0xFFFF) == 0x8000
        assert torch.equal(a[0]["w"][~ties], b[0]["w"][~ties])
    assert_same(a[1]["adam"], b[1]["adam"])


def test_a_skipped_step_changes_no_bit():
    rules = [("m", int8(block=4, smallest=0)), ("v", float8(root=True, block=4, smallest=0)), ("master", NoMaster())]
    opt = optim.skip_nonfinite(compressed(optim.adamw(1e-2), rules))
    params = {"w": torch.randn(4, 8).to(torch.bfloat16)}
    params, state = opt.update(grads_of(params), opt.init(params), params)
    bad = {"w": torch.full((4, 8), float("nan"), dtype=torch.bfloat16)}
    same, after = opt.update(bad, state, params)
    assert_same(same, params)
    assert_same(after["opt"], state["opt"])
    assert after["skipped"] == 1


def test_frozen_leaves_have_neither_state_nor_noise():
    inner = optim.grouped(1e-2, [("table", optim.Group(frozen=True))], adam=optim.scale_by_adam())
    opt = compressed(inner, [("adam", Bfloat16(stochastic=True)), ("master", NoMaster())])
    params = {"table": torch.randn(4, 4).to(torch.bfloat16), "w": torch.randn(4, 4).to(torch.bfloat16)}
    state = opt.init(params)
    assert set(tree.paths(state)) == {"count", "adam/m/w", "adam/v/w"}
    new, _ = opt.update({"table": None, "w": params["w"]}, state, params)
    assert new["table"] is params["table"] and not torch.equal(new["w"], params["w"])


def test_every_leaf_has_noise_of_its_own():
    opt = compressed(optim.sgd(0.1, momentum=0.9), [("momentum", Bfloat16(stochastic=True)), ("master", NoMaster())])
    params = {name: torch.ones(64, dtype=torch.bfloat16) for name in "ab"}
    grads = {name: torch.full((64,), 0.0101) for name in "ab"}
    new, state = opt.update(grads, opt.init(params), params)
    assert not torch.equal(new["a"], new["b"]) and not torch.equal(state["momentum"]["a"], state["momentum"]["b"])


def test_ranges_of_a_flattened_leaf_cut_no_block():
    mesh = Mesh(fsdp=4)
    specs = {"w": ArraySpec(Layout((2, 6), torch.float32, mesh, flat=("fsdp",)))}  # ranges of 3, rows of 6
    with pytest.raises(ValueError, match="every 3 and 6 elements.*block=1"):
        compressed(optim.adamw(1e-2), [("m", int8(block=2, smallest=0))]).init(specs)


def test_errors_for_people():
    mesh = Mesh(fsdp=2)
    split = {"w": ArraySpec(Layout((8, 6), torch.bfloat16, mesh, (None, "fsdp")))}
    whole = {"w": torch.ones(8, 6, dtype=torch.bfloat16)}
    adam, half = optim.adamw(1e-2), {"w": torch.ones(8, 6, dtype=torch.float16)}
    blocks = int8(block=2, smallest=0)
    for make, message in [
        (lambda: compressed(adam, [("mm", blocks)]).init(whole), "rule 'mm', which matches no path.*adam/m/w"),
        (lambda: compressed(adam, [("m", Remainder()), ("v", blocks), ("m/x", blocks)]).init(whole), "rule 'm/x'"),
        (lambda: compressed(adam, [("master", Remainder())]).init(half), "master/w: got Remainder.*float16"),
        (lambda: compressed(adam, [("master", NoMaster())]).init(half), "master/w: got NoMaster.*float16"),
        (lambda: compressed(adam, [("m", blocks)]).init(split), "every 3 elements.*block=1"),
        (lambda: compressed(adam, [("m", blocks)]).init({"w": tree.place(
            torch.ones(8, 3, dtype=torch.bfloat16), split["w"]), "v": torch.ones(2)}), "v: got a tensor whose layout"),
        (lambda: compressed(optim.skip_nonfinite(adam), [("m", blocks)]).init(whole), "put|wrap the optimizer first"),
    ]:  # fmt: skip
        with pytest.raises(ValueError, match=message):
            make()
    fits = compressed(adam, [("m", int8(block=2, smallest=0, fit=True))]).init(split)
    assert fits["adam"]["m"]["w"]["scale"].layout.shape == (8, 6)


# ---- quality ---------------------------------------------------------------------------------------------------------
BLOCKED = {"block": 64, "smallest": 0}
QUALITY = {
    "bf16": [("adam", Bfloat16())],
    "bf16-stochastic": [("adam", Bfloat16(stochastic=True))],
    "fp16": [("m", float16(**BLOCKED)), ("v", float16(root=True, **BLOCKED))],
    "fp8": [("m", float8(**BLOCKED)), ("v", float8(root=True, **BLOCKED))],
    "int8": [("m", int8(**BLOCKED)), ("v", int8(root=True, **BLOCKED))],
    "int8-linear": [("m", int8(linear=True, **BLOCKED)), ("v", int8(linear=True, root=True, **BLOCKED))],
}


def trained(opt, dtype=torch.float32, steps=150):
    """Loss of a two-layer network that learned a random teacher from noisy batches; on data that it has not seen."""
    generator = torch.Generator().manual_seed(0)

    def draw(*shape):
        return torch.randn(shape, generator=generator)

    teacher = {"a": draw(16, 32) / 4, "b": draw(32, 4) / 5}
    params = tree.map(lambda x: (draw(*x.shape) * 0.3 * x.std()).to(dtype), teacher)

    def outputs(p, x):
        return torch.tanh(x @ p["a"].float()) @ p["b"].float()

    state = opt.init(params)
    for _ in range(steps):
        x = draw(64, 16)
        leaves = tree.map(lambda p: p.detach().requires_grad_(), params)
        loss = (outputs(leaves, x) - outputs(teacher, x) - 0.1 * draw(64, 4)).square().mean()
        grads = dict(zip(("a", "b"), torch.autograd.grad(loss, tree.leaves(leaves)), strict=True))
        params, state = opt.update(grads, state, params)
    x = draw(2048, 16)
    return (outputs(params, x) - outputs(teacher, x)).square().mean().item()


@pytest.fixture(scope="module")
def with_fp32():
    return trained(optim.adamw(1e-2, b2=0.99))


@pytest.mark.long
@pytest.mark.parametrize("rules", QUALITY.values(), ids=QUALITY)
def test_moments_train_as_float32_does(rules, with_fp32):
    """Within 2 % of the loss that float32 moments reach, which is far below that of the start."""
    got = trained(compressed(optim.adamw(1e-2, b2=0.99), rules))
    assert abs(got / with_fp32 - 1) < 0.02, (got, with_fp32)
    assert with_fp32 < 0.1 * trained(optim.adamw(1e-2), steps=0)


@pytest.mark.medium
def test_parameters_without_a_master_train_as_those_with_one():
    small = compressed(optim.adamw(1e-2, b2=0.99), [*QUALITY["int8"], ("master", NoMaster())])
    wanted = trained(optim.adamw(1e-2, b2=0.99), torch.bfloat16)
    assert abs(trained(small, torch.bfloat16) / wanted - 1) < 0.02


SECOND = {
    "bf16": (Bfloat16(), 0.5, 0.8),
    "bf16-stochastic": (Bfloat16(stochastic=True), 0.99, 1.01),
    "float32": (Float32(), 0.999, 1.001),
}


@pytest.mark.long
@pytest.mark.parametrize(("form", "low", "high"), SECOND.values(), ids=SECOND)
def test_a_slow_average_needs_random_rounding(form, low, high):
    """b2 = 0.999 in bfloat16: to nearest the average stands still below its value, at random it does not."""
    opt = compressed(optim.adamw(0.0, b2=0.999), [("v", form)])
    params = {"w": torch.zeros(1024)}
    state = opt.init(params)
    for i in range(300):
        _, state = opt.update({"w": torch.full((1024,), 0.1 if i else 1.0)}, state, params)
    wanted = 0.001 * 0.999**299 + 0.01 * (1 - 0.999**299)
    assert low < state["adam"]["v"]["w"].float().mean().item() / wanted < high
