"""Numbers that are not finite end a run within one log interval, by leaf and step, and cost nothing before that."""

import math
import re
import warnings

import pytest
import torch

from fmegatron import checkpoint, optim, step, tree
from fmegatron.collectives import Axes
from fmegatron.data import source
from fmegatron.layout import Layout, Mesh
from fmegatron.loop import nonfinite, train
from fmegatron.loop.losses import BadLoss
from fmegatron.loop.nonfinite import NonFiniteError
from tests.loop.test_train import Ranks

SPECS = {
    "w": tree.ArraySpec(Layout((4, 3), torch.float32, Mesh()), tree.Normal(0.5)),
    "b": tree.ArraySpec(Layout((3,), torch.float32, Mesh()), 0.0),
}


def bad_from(at, bad=math.nan, name="loss"):
    """A step whose state and metric are broken from update `at` on."""

    def update(state, batch):
        state = {"a": {"w": state["a"]["w"] + 1}, "b": state["b"] + 1, "count": state["count"] + 1}
        if batch + 1 == at:
            state["a"]["w"][1] = bad
        return state, {name: state["a"]["w"].sum(), "count": state["count"]}

    return update


def begin():
    return {"a": {"w": torch.zeros(3)}, "b": torch.zeros(2, dtype=torch.bfloat16), "count": torch.tensor(0)}


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("name", ["loss", "grad_norm", "nll"])
def test_a_run_stops_within_one_log_interval(bad, name):
    seen = []
    with pytest.raises(NonFiniteError) as raised:
        for info in train(bad_from(13, bad, name), begin(), source(int), steps=40, log_every=5):
            seen.append(info.step)
            assert info.finite() == (info.step < 13)
    assert seen[-1] == 14 and raised.value.step == 15 and raised.value.paths == ("a/w",)
    words = f"step 15: {name} is {bad} (finite at step 10); not finite in the state: a/w, 1 of 3 leaves; go back to"
    assert str(raised.value).startswith(words)


def test_an_update_that_breaks_the_state_loses_no_run(tmp_path):
    """Loss and norm of step 5 are of the parameters before its update (a rate of NaN, say), so they are finite.

    What it saves is not taken for good: the checkpoint before stays, also with keep=1, and the next start has it.
    """
    layouts = {"w": Layout((4,), torch.float32, Mesh())}

    def run(broken_at):
        def update(state, batch):
            w, rate = state["w"], math.nan if batch + 1 == broken_at else 0.1
            return {"w": w - rate * 2 * w}, {"loss": w.square().sum(), "grad_norm": (2 * w).norm()}

        with checkpoint.Manager(tmp_path, keep=1) as manager:
            start, state = 0, {"w": torch.ones(4)}
            if manager.latest() is not None:
                start, state, _ = manager.restore_latest(layouts)
            for info in train(update, state, source(int), steps=7, start=start, log_every=1):
                manager.save(info.step, info.state, layouts, finite=info.finite())
        return start

    with pytest.raises(NonFiniteError):
        run(broken_at=5)
    assert checkpoint.Manager(tmp_path).steps() == [4, 5]
    with pytest.warns(RuntimeWarning, match="skipped .* step 5"), pytest.warns(RuntimeWarning, match="5 were set"):
        assert run(broken_at=None) == 4
    assert checkpoint.Manager(tmp_path).steps() == [7]


def test_other_metrics_may_be_anything():
    def update(state, batch):
        return state, {"loss": torch.tensor(1.0), "margin": torch.tensor(math.inf)}

    assert [info.finite() for info in train(update, begin(), source(int), steps=3, log_every=1)] == [True] * 3


def test_a_user_may_say_otherwise():
    with pytest.warns(RuntimeWarning, match=r"step [234]: loss is nan.*training goes on, as nonfinite='warn' says"):
        infos = list(train(bad_from(2), begin(), source(int), steps=4, log_every=1, bad=BadLoss("warn")))
    assert [info.finite() for info in infos] == [True, False, False, False]


def test_a_step_that_an_optimizer_skips_is_no_end():
    """`skip_nonfinite` keeps the norm as it was in its state: one number, which breaks nothing."""
    optimizer = optim.skip_nonfinite(optim.adamw(1e-2))

    def loss_fn(params, batch):
        loss = ((batch @ params["w"] + params["b"]) ** 2).mean()
        return loss, {"loss": loss.detach()}

    layouts = tree.layouts(SPECS)
    update = step.jit(step.build_train_step(loss_fn, optimizer, layouts, Axes(Mesh())), donate=0, backend="eager")
    state = tree.init(step.state_specs(SPECS, optimizer), 0, 0)

    @source
    def batch_at(position):
        return torch.full((2, 4), math.nan if position == 2 else 1.0)

    infos, losses = train(update, state, batch_at, steps=5, log_every=1), []
    with pytest.warns(RuntimeWarning, match=r"step 3: loss is nan, .*every leaf of the state is finite; training goes"):
        for info in infos:
            losses.append(info.metrics["loss"])
    assert [math.isfinite(x) for x in losses] == [True, True, False, True, True] and losses[4] < losses[3] < losses[1]


def test_all_ranks_learn_of_it_by_the_question_that_they_ask_anyway():
    """Another rank saw it at step 5; here nothing is wrong."""
    world = Ranks(*[(False,) * 3] * 4, (False, False, True))
    with pytest.warns(RuntimeWarning, match="step 5: a metric of another rank is not finite.*every leaf of the state"):
        infos = list(
            train(
                lambda s, b: (s, {"loss": torch.tensor(1.0)}), begin(), source(int), steps=8, log_every=5, world=world
            )
        )
    assert len(infos) == 8
    assert [event for event in world.noted if event == "minimum"] == ["minimum"]
    assert world.noted.index("minimum") == world.noted.index("asks 6") + 1


def test_on_several_ranks_the_last_step_is_judged_before_it_is_shown():
    seen = []
    with pytest.raises(NonFiniteError, match=re.escape("step 5: loss is nan (finite at step 4)")):
        for info in train(bad_from(5), begin(), source(int), steps=5, log_every=1, world=Ranks()):
            seen.append(info.step)
    assert seen == [1, 2, 3, 4]


@pytest.mark.parametrize(
    "leaf, bad",
    [
        (torch.tensor([1.0, math.nan], dtype=torch.float16), True),
        (torch.tensor([1.0, 2.0], dtype=torch.float8_e5m2), False),
        (torch.tensor([1.0, math.inf]).to(torch.float8_e5m2), True),
        (torch.tensor([complex(1, math.nan)]), True),
        (torch.tensor([complex(1, 2)]).conj(), False),
        (torch.empty(0), False),
        (torch.tensor([1, 2]), False),
        (torch.tensor([[-1e38, 3e38], [3e38, 3e38]]), False),  # finite, though their sum is not
        (torch.tensor(math.nan), False),  # one number beside larger leaves: a note of a norm
    ],
)
def test_leaves_of_every_kind(leaf, bad):
    def update(state, batch):
        return {**state, "leaf": leaf}, {"loss": torch.tensor(math.nan)}

    infos = train(update, {"w": torch.zeros(2), "leaf": torch.zeros(())}, source(int), steps=1)
    if bad:
        with pytest.raises(NonFiniteError, match="not finite in the state: leaf, 1 of 2 leaves"):
            list(infos)
    else:
        with pytest.warns(RuntimeWarning, match="every leaf of the state is finite"):
            list(infos)


def test_a_state_of_single_numbers_is_looked_at_too():
    with pytest.raises(NonFiniteError, match="not finite in the state: x"):
        list(
            train(
                lambda s, b: ({"x": s["x"] * math.inf}, {"loss": s["x"] * math.inf}),
                {"x": torch.tensor(1.0)},
                source(int),
                steps=9,
            )
        )


def test_a_sound_run_is_not_looked_at(monkeypatch):
    """No pass over the state, no agreement beside the stop question, no fetch between log points."""
    monkeypatch.setattr(torch, "aminmax", None)
    world = Ranks()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert len(list(train(bad_from(99), begin(), source(int), steps=20, log_every=5, world=world))) == 20
    assert len(world.noted) == 2 * 20


def test_overflow_of_experts_is_named():
    """A step that is refused because experts had too few rows ends with that as its reason."""
    metrics = {"loss": math.nan, "grad_norm": math.nan, "overflow": 12, "margin": 1.0}
    shown = nonfinite.broken(metrics)
    assert shown["overflow"] == 12 and "margin" not in shown
    assert nonfinite.broken({"loss": 1.0, "overflow": 0}) == {}
    with pytest.raises(NonFiniteError, match="overflow is 12 .*raise MoE.rows"):
        nonfinite.judge({"w": torch.tensor([math.nan])}, 3, shown, None)
