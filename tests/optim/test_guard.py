"""Skipped steps and loss scales: bitwise no change, all ranks alike, counted, and no host synchronisation."""

import pytest
import torch

from fmegatron import optim, tree
from fmegatron.collectives import Axes
from fmegatron.layout import Layout, Mesh
from fmegatron.optim import LossScale, skip_nonfinite
from fmegatron.optim.clipping import GradNorm, group_norms
from fmegatron.optim.guard import Spike
from fmegatron.step import build_train_step, jit, symbolic_nodes, trace
from fmegatron.testing import assert_parity, simulate
from fmegatron.tree.structure import flatten, unflatten
from tests.fresh_state import fresh_state
from tests.optim.table import DTYPES, ONE, assert_same, grads_of, make_params, make_specs

BAD = [float("nan"), float("inf"), -float("inf")]


def spoiled(grads, value, at=-1):
    """The gradients with one element, of the last leaf or another, that is not finite."""
    leaves, spec = flatten(grads)[1:]
    leaves = [leaf.clone() for leaf in leaves]
    leaves[at].view(-1)[-1] = value
    return unflatten(spec, leaves)


@pytest.mark.long
@pytest.mark.parametrize("value", BAD)
@pytest.mark.parametrize("dtypes", DTYPES.values(), ids=DTYPES)
def test_a_step_that_is_not_finite_changes_nothing_and_is_counted(value, dtypes):
    opt = skip_nonfinite(optim.adamw(1e-2), clip_norm=1.0)
    params = make_params(dtypes)
    state = opt.init(params)
    params, state = opt.update(grads_of(params), state, params)
    for at in range(len(tree.leaves(params))):
        new, after = opt.update(spoiled(grads_of(params, 1), value, at), state, params)
        assert_same(new, params)
        assert_same(after["opt"], state["opt"])
        assert after["skipped"] == 1 and not after["norm"].isfinite()
    onwards, _ = opt.update(grads_of(params, 1), after, new)
    assert_same(onwards, opt.update(grads_of(params, 1), state, params)[0])


def test_without_bad_steps_it_is_the_optimizer():
    plain, guarded = optim.adamw(1e-2), skip_nonfinite(optim.adamw(1e-2), clip_norm=1.0)
    params = others = make_params(DTYPES["fp64"])
    state, other = plain.init(params), guarded.init(params)
    for step in range(4):
        grads = grads_of(params, step)
        others, other = guarded.update(grads, other, others)
        norm = optim.global_norm(grads)
        params, state = plain.update(optim.clip(grads, norm, 1.0), state, params)
        assert_same(params, others)
        assert other["norm"] == norm and other["skipped"] == 0


def test_a_norm_that_the_caller_has_is_not_computed_again():
    """Bit for bit the same step; the lower of the two limits clips; spikes are judged before clipping."""
    opt = skip_nonfinite(optim.adamw(1e-2), clip_norm=2.0, spike=Spike(warmup=1, factor=2.0))
    params = make_params(DTYPES["fp64"])
    state, grads = opt.init(params), grads_of(params)
    norm = optim.global_norm(grads)
    assert_same(opt.update(grads, state, params, GradNorm(norm)), opt.update(grads, state, params))
    unclipped = skip_nonfinite(optim.adamw(1e-2), spike=Spike(warmup=1, factor=2.0))
    low, high = GradNorm(norm, 0.5), GradNorm(norm, 5.0)
    assert_same(opt.update(grads, state, params, low), unclipped.update(grads, state, params, low))
    assert_same(opt.update(grads, state, params, high), opt.update(grads, state, params))
    params, state = opt.update(grads, state, params, GradNorm(norm, 1.0))
    _, state = opt.update(tree.scale(grads, 100), state, params, GradNorm(100 * norm, 1.0))
    assert state["skipped"] == 1 and state["norm"] == 100 * norm


@pytest.mark.medium
@pytest.mark.parametrize("known", [True, False])
def test_the_norm_costs_its_collectives_once(known):
    mesh = Mesh(dp=2, fsdp=2, tp=2)
    layouts = tree.layouts(make_specs(DTYPES["fp32"], mesh))
    opt = skip_nonfinite(optim.adamw(1e-2))
    params = tree.init(make_specs(DTYPES["fp32"], mesh), key=0, rank=0)

    def step(grads, state, params):
        norm = optim.global_norm(grads)
        return opt.update(grads, state, params, GradNorm(norm) if known else None), norm

    found = symbolic_nodes(trace(step, (params, opt.init(params), params)).graph_module.graph)
    sets = {layout.sharded for layout in tree.leaves(layouts)} - {()}
    assert len(found) == (1 if known else 2) * len(sets)


def test_one_rank_decides_for_all():
    """A NaN that only one of eight ranks holds stops every rank, as it stops one rank that holds everything."""
    mesh = Mesh(dp=2, fsdp=2, tp=2)
    layouts = tree.layouts(make_specs(DTYPES["fp64"], mesh))

    def make_step(mesh):
        opt = skip_nonfinite(optim.adamw(1e-2), spike=Spike(warmup=1), clip_norm=1.0)

        def step(carry, grads):
            params, state = opt.update(grads, carry["state"], carry["params"])
            return {"params": params, "state": state}, {"skipped": state["skipped"]}

        return step

    params = make_params(DTYPES["fp64"])
    opt = skip_nonfinite(optim.adamw(1e-2), spike=Spike(warmup=1))
    carry = {"params": params, "state": opt.init(params)}
    of_state = tree.layouts(opt.init(make_specs(DTYPES["fp64"], mesh)))

    def grads_at(step):
        grads = grads_of(params, step)
        return spoiled(grads, float("nan"), at=0) if step == 1 else tree.scale(grads, 1e3 if step == 3 else 1.0)

    result = assert_parity(
        make_step, mesh, carry, grads_at, steps=5, layouts=({"params": layouts, "state": of_state}, layouts),
        out_layouts=({"params": layouts, "state": of_state}, {"skipped": Layout((), torch.int64, mesh)}),
    )  # fmt: skip
    assert result.sharded.metrics["skipped"] == 2


def test_spikes_are_skipped_and_a_new_level_is_accepted():
    opt = skip_nonfinite(optim.sgd(1e-3), spike=Spike(factor=3.0, decay=0.9, warmup=5))
    params = {"w": torch.zeros(4, dtype=torch.float64)}
    state, skipped = opt.init(params), []
    norms = [100.0] + [1.0] * 20 + [1e6] + [1.0] * 5 + [50.0] * 60
    for norm in norms:
        before, opt_before = params, state["opt"]
        params, state = opt.update({"w": torch.full((4,), norm / 2, dtype=torch.float64)}, state, params)
        if skipped and state["skipped"] > skipped[-1]:
            assert_same((params, state["opt"]), (before, opt_before))
        skipped.append(int(state["skipped"]))
    assert skipped[20] == 0  # the first ones pass, large or not
    assert skipped[21:27] == [1] * 6
    assert skipped[-1] == skipped[-10] and 2 < skipped[-1] < 20  # the mean has followed the new level


def test_the_running_mean_is_corrected_from_the_first_norm_on():
    state = Spike(warmup=1).init(torch.zeros(()))
    for norm in (2.0, 2.0, 2.0):
        used, state = Spike(warmup=1, factor=1.01).update(state, torch.tensor(norm))
        assert used
    assert not Spike(warmup=1, factor=1.01).update(state, torch.tensor(2.1))[0]
    same = Spike().update(state, torch.tensor(float("nan")))[1]
    assert_same(same, state)


# ---- loss scale ------------------------------------------------------------------------------------------------------
def test_the_dynamic_scale_is_torchs():
    """hysteresis = 1, no floor: torch's own kernel of GradScaler."""
    rule = LossScale(initial=2.0**10, growth_interval=3, least=2.0**-40)
    state = rule.init(torch.zeros(()))
    scale, tracker = torch.tensor(2.0**10), torch.tensor(0, dtype=torch.int32)
    generator = torch.Generator().manual_seed(0)
    for _ in range(200):
        finite = torch.rand((), generator=generator) < 0.8
        torch._amp_update_scale_(scale, tracker, (~finite).float(), 2.0, 0.5, 3)
        state = rule.update(state, finite)
        assert state["factor"] == scale and state["finite"] == tracker


def test_hysteresis_is_megatrons():
    rule = LossScale(initial=8.0, growth_interval=2, hysteresis=2, least=2.0)
    state, seen = rule.init(torch.zeros(())), []
    for finite in (False, False, False, False, True, True, False, False):
        state = rule.update(state, torch.tensor(finite))
        seen.append(state["factor"].item())
    assert seen == [8, 4, 2, 2, 2, 4, 4, 2]


def test_a_constant_scale_stays():
    rule = LossScale(initial=4.0, growth_interval=0)
    state = rule.init(torch.zeros(()))
    assert rule.update(state, torch.tensor(False)) is state and state["factor"] == 4


def quadratic(params, batch):
    loss = sum((x - 0.3).square().sum() for x in tree.leaves(params)) * batch.mean()
    return loss, {"loss": loss.detach()}


def train(loss_scale, dtype, start=1.0):
    layouts = {"w": Layout((4, 4), dtype, ONE)}
    opt = skip_nonfinite(optim.sgd(0.1), clip_norm=1.0, loss_scale=loss_scale)
    step = build_train_step(quadratic, opt, layouts, Axes(ONE), clip_norm=None)
    state = fresh_state({"w": torch.full((4, 4), start, dtype=dtype)}, opt)
    compiled, metrics = jit(step, backend="eager"), []
    for _ in range(6):
        state, found = compiled(state, torch.ones(2, dtype=dtype))
        metrics.append(found)
    return state, metrics


def test_a_scaled_step_is_the_plain_step():
    """Powers of two cancel exactly; the loss and the norm that are reported are those without the scale."""
    plain, metrics = train(None, torch.float64)
    scaled, others = train(LossScale(initial=2.0**12, growth_interval=2), torch.float64)
    assert_same(scaled.params, plain.params)
    assert [(m["loss"].item(), m["grad_norm"].item()) for m in metrics] == [
        (m["loss"].item(), m["grad_norm"].item()) for m in others
    ]
    assert scaled.opt["loss_scale"]["factor"] == 2.0**15


def test_an_overflow_in_half_precision_lowers_the_scale_until_it_fits():
    state, metrics = train(LossScale(initial=2.0**18, growth_interval=100), torch.float16)
    assert 0 < state.opt["skipped"] < 6 and metrics[-1]["grad_norm"].isfinite()
    assert state.opt["loss_scale"]["factor"] == 2.0 ** (18 - state.opt["skipped"].item())
    assert not torch.equal(state.params["w"], torch.ones(4, 4, dtype=torch.float16))


def test_a_scale_is_taken_out_in_fp32():
    """Gradients of 1e-6 that fp16 holds 2^16 times as large: in fp16 the scale is infinite and the quotient nothing."""

    def loss(params, batch):
        return (params["w"].float() * batch).sum()

    layouts = {"w": Layout((4,), torch.float16, ONE)}
    opt = skip_nonfinite(optim.sgd(0.1), loss_scale=LossScale(initial=2.0**16))
    step = build_train_step(loss, opt, layouts, Axes(ONE), clip_norm=None)
    _, metrics = step(fresh_state({"w": torch.ones(4, dtype=torch.float16)}, opt), torch.full((4,), 1e-6))
    assert metrics["grad_norm"].item() == pytest.approx(2e-6, rel=2**-11)


# ---- norms of groups -------------------------------------------------------------------------------------------------
def test_norms_by_group_on_a_mesh():
    mesh = Mesh(dp=2, fsdp=2, tp=2)
    layouts, grads = tree.layouts(make_specs(DTYPES["fp64"], mesh)), make_params(DTYPES["fp64"])

    def step(grads):
        return {}, group_norms(grads)

    norms = simulate(step, mesh, grads, layouts=(layouts,)).metrics
    assert set(norms) == {"embed", "blocks", "scale"}
    for name, norm in norms.items():
        assert norm == pytest.approx(optim.global_norm(grads[name]).item(), rel=1e-14)
    assert group_norms(grads)["blocks"] == pytest.approx(norms["blocks"], rel=1e-14)
    whole = sum(norm.square() for norm in group_norms(grads).values()).sqrt()
    assert whole == pytest.approx(optim.global_norm(grads).item(), rel=1e-14)


def test_errors_for_people():
    for make, message in [
        (lambda: Spike(factor=1.0), "factor > 1"),
        (lambda: Spike(decay=1.0), "0 < decay < 1"),
        (lambda: LossScale(initial=0), "initial: got 0"),
        (lambda: LossScale(backoff=1.5), "backoff: got 1.5"),
        (lambda: LossScale(hysteresis=0), "hysteresis: got 0"),
    ]:
        with pytest.raises(ValueError, match=message):
            make()


def test_a_guard_around_a_guard_keeps_its_loss_scale():
    """The scale of the inner one is the scale of the loss, and the inner one judges the same norm."""
    opt = skip_nonfinite(skip_nonfinite(optim.sgd(0.1), loss_scale=LossScale(initial=8.0)), spike=Spike())
    params = make_params(DTYPES["fp64"])
    state = opt.init(params)
    assert opt.loss_scale(state) == 8.0 and optim.sgd(0.1).loss_scale(optim.sgd(0.1).init(params)) is None
    grads = spoiled(grads_of(params), float("nan"))
    new, state = opt.update(grads, state, params)
    assert_same(new, params)
    assert state["skipped"] == 1
