"""Ctrl-C in a loop by hand whose step donates its state: the newest living state is reachable, its number is known."""

import os
import signal
import threading

import pytest
import torch

from fmegatron import data, loop, optim, tree
from fmegatron.collectives import Axes
from fmegatron.layout import Mesh
from fmegatron.step import build_train_step, jit, state_specs

BATCH = {"x": torch.ones(64, 400)}
SOURCE = data.source(lambda i: BATCH)


def make():
    """(a jitted step, its state)"""
    opt, specs = optim.adamw(1e-3), tree.specs({"w": (400, 400)}, Mesh())
    loss = lambda p, b: ((b["x"] @ p["w"] @ p["w"]).square().mean(), {})  # noqa: E731
    jitted = jit(build_train_step(loss, opt, tree.layouts(specs), Axes(Mesh())), donate=0, backend="eager")
    state = tree.init(state_specs(specs, opt), 0, 0)
    jitted(tree.map(torch.clone, state), BATCH)  # compiled before it is interrupted
    return jitted, state


@pytest.fixture(scope="module")
def made():
    return make()


def copied(state):
    return tree.map(torch.clone, state)


def interrupt_after(seconds):
    threading.Timer(seconds, lambda: os.kill(os.getpid(), signal.SIGINT)).start()


@pytest.mark.parametrize("seconds", [0.05, 0.11, 0.17, 0.3])
def test_a_state_whose_only_name_was_local(made, seconds):
    """The notebook's cell: `state = train(state)`."""
    jitted, state = made[0], copied(made[1])

    def train(state):
        for info in loop.train(jitted, state, SOURCE, steps=10**6):
            state = info.state
        return state

    interrupt_after(seconds)
    with pytest.raises(KeyboardInterrupt):
        train(state)
    last = jitted.last
    assert bool(last.params["w"].isfinite().all()) and int(last.step) > 0
    with pytest.raises(ValueError, match=r"the .last of its jit"):
        state.params["w"].sum()
    info = next(iter(loop.train(jitted, last, SOURCE, steps=10**6, start=int(last.step))))
    assert info.step == int(info.state.step)


@pytest.mark.parametrize("seconds", [0.05, 0.12, 0.19, 0.26])
def test_an_info_has_the_number_of_its_state(made, seconds):
    jitted, state = made[0], copied(made[1])
    interrupt_after(seconds)
    with pytest.raises(KeyboardInterrupt):
        for info in loop.train(jitted, state, SOURCE, steps=10**6):
            assert info.step
    assert info.step == int(info.state.step) == int(jitted.last.step)


def test_a_source_that_is_interrupted(made):
    """The update before has been made and handed over."""
    jitted, state = made[0], copied(made[1])

    def batch_at(i):
        if i == 3:
            os.kill(os.getpid(), signal.SIGINT)
        return BATCH

    with pytest.raises(KeyboardInterrupt):
        for info in loop.train(jitted, state, data.source(batch_at), steps=100):
            assert info.step
    assert info.step == int(info.state.step) == int(jitted.last.step)


def test_of_a_loop_without_train():
    """Leaves in dicts, an argument in another place."""
    jitted = jit(lambda n, tree_: (n + 1, {k: x * 2 for k, x in tree_.items()}), donate=1, backend="eager")
    assert jitted.last is None
    _, new = jitted(torch.ones(()), {"a": torch.ones(3)})
    assert jitted.last is new
    _, newer = jitted(torch.ones(()), new)
    assert jitted.last is newer and newer["a"].tolist() == [4, 4, 4]
    jitted.last = None
    assert jitted.last is None


def test_it_holds_no_second_state(made):
    """What was donated is let go."""
    jitted, state = made[0], copied(made[1])
    memory = state.params["w"].untyped_storage().data_ptr()
    for _ in range(3):
        state, _ = jitted(state, BATCH)
    assert jitted.last is state and state.params["w"].untyped_storage().data_ptr() == memory
