"""A donated state is all new after a Ctrl-C in the middle of the call; after an error it is all old, or dead."""

import os
import signal
import sys
import threading

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from fmegatron import tree
from fmegatron.collectives.interrupt import held_interrupt
from fmegatron.step import jit
from tests.fresh_state import fresh_state
from tests.step import tiny
from tests.step.test_donated_leaves import BACKENDS, doubled, twice


# ---- errors ----------------------------------------------------------------------------------------------------------
def library(name, run):
    """An operator of [n] tensors that does `run` when it is executed."""
    lib = torch.library.Library("test_donated", "FRAGMENT")
    lib.define(f"{name}(Tensor x) -> Tensor")
    lib.impl(name, run, "CompositeExplicitAutograd")
    lib.impl(name, torch.empty_like, "Meta")
    return lib


def in_the_middle(x):
    """Fails, or is interrupted, as HAPPENS says."""
    HAPPENS[-1]()
    return x.clone()


HAPPENS: list = [lambda: None]
LIBRARY = library("happens", in_the_middle)


@pytest.fixture
def happens():
    """What happens in the middle of the steps that call `torch.ops.test_donated.happens`."""
    yield HAPPENS.append
    del HAPPENS[1:]


def fails():
    raise RuntimeError("Connection closed by peer")


def after_writes(state):
    """One leaf is written in place of the old one before the other is made, when the graph runs in order."""
    return {"a": state["a"] + 1, "b": torch.ops.test_donated.happens(state["b"] * 2)}


@pytest.mark.parametrize("backend", BACKENDS)
def test_an_error_before_the_call_leaves_the_state_alive(backend):
    state = {"a": torch.ones(2)}
    with pytest.raises(ValueError, match="got a new value of"):
        jit(lambda s: {"a": s["a"].double()}, donate=0, backend=backend)(state)
    with pytest.raises(ZeroDivisionError):
        jit(lambda s: {"a": s["a"] * (1 // 0)}, donate=0, backend=backend)(state)
    assert state["a"].tolist() == [1, 1]


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_an_error_before_anything_is_written_leaves_the_state_alive(backend, happens):
    """Where the graph runs op by op, so that this can be told."""
    step = jit(after_writes, donate=0, backend=backend)
    state = step({"a": torch.ones(2), "b": torch.ones(2)})
    happens(fails)
    with pytest.raises(RuntimeError, match="Connection closed"):
        step(state)
    assert state["a"].tolist() == [2, 2] and state["b"].tolist() == [2, 2]
    happens(lambda: None)
    assert step(state)["b"].tolist() == [4, 4]


@pytest.mark.medium
def test_an_error_after_a_write_ends_the_state(happens, monkeypatch):
    """A peer that dies in the middle of a collective, say: what is then in memory is neither old nor new."""
    step = jit(after_writes, donate=0)
    state = step({"a": torch.ones(2), "b": torch.ones(2)})
    happens(fails)
    with pytest.raises(RuntimeError, match="Connection closed") as caught:
        step(state)
    assert "had begun to write into its donated argument" in caught.value.__notes__[0]
    for leaf in state.values():
        with pytest.raises(
            ValueError,
            match="was donated to after_writes, which failed after it had begun to write .RuntimeError: Connection "
            "closed by peer.*restore a checkpoint",
        ):
            leaf.sum()
    assert repr(state["a"]) == "<donated to after_writes: '0/a'>"


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_an_error_between_two_writes_ends_the_state(backend):
    """No op fails there; what does is an out of memory, or a debugger."""
    step, writes = jit(doubled, donate=0, backend=backend), []
    state = step({"a": torch.ones(2), "b": torch.ones(2)})

    class Failing(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            writes.extend([func] * (func is torch.ops.aten.copy_.default))
            if len(writes) == 2:
                raise RuntimeError("out of luck")
            return func(*args, **(kwargs or {}))

    with pytest.raises(RuntimeError, match="out of luck"), Failing():
        step(state)
    with pytest.raises(ValueError, match="failed after it had begun to write"):
        state["a"].sum()


def test_an_error_while_the_result_is_put_together(monkeypatch):
    """All is written by then, so the given state lives on, all new."""
    step = twice()
    state = step({"a": torch.ones(2), "b": torch.nn.Parameter(torch.ones(2))})
    state["b"] = torch.nn.Parameter(state["b"])
    monkeypatch.setattr(next(iter(step.cache.values())).traced, "result", lambda tensors: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        step(state)
    assert state["a"].tolist() == [4, 4] and state["b"].tolist() == [4, 4]
    assert isinstance(state["b"], torch.nn.Parameter) and state["b"].requires_grad


# ---- Ctrl-C ----------------------------------------------------------------------------------------------------------
def press():
    os.kill(os.getpid(), signal.SIGINT)


@pytest.mark.parametrize("backend", BACKENDS)
def test_ctrl_c_is_raised_after_the_call_and_the_state_is_all_new(backend, happens):
    step = jit(after_writes, donate=0, backend=backend)
    state = step({"a": torch.ones(2), "b": torch.ones(2)})
    kept = state["b"].detach()
    happens(press)
    with pytest.raises(KeyboardInterrupt):
        step(state)
    assert state["a"].tolist() == [3, 3] and state["b"].tolist() == [4, 4] and kept.tolist() == [2, 2]
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    happens(lambda: None)
    state = step(state)
    assert state["a"].tolist() == [4, 4] and state["b"].tolist() == [8, 8]


def test_a_second_ctrl_c_comes_at_once_and_ends_the_state(happens):
    step = jit(after_writes, donate=0)
    state = step({"a": torch.ones(2), "b": torch.ones(2)})
    happens(lambda: (press(), press()))
    with pytest.raises(KeyboardInterrupt):
        step(state)
    with pytest.raises(ValueError, match="failed after it had begun to write .KeyboardInterrupt"):
        state["a"].sum()


def test_within_a_block_that_holds_it_the_result_comes_first(happens):
    step = jit(after_writes, donate=0)
    state = step({"a": torch.ones(2), "b": torch.ones(2)})
    happens(press)
    with pytest.raises(KeyboardInterrupt):
        with held_interrupt() as pressed:
            state = step(state)
            assert len(pressed) == 1
    assert state["a"].tolist() == [3, 3]


def test_a_handler_that_only_notes_is_called_and_the_call_goes_on(happens):
    noted, before = [], signal.signal(signal.SIGINT, lambda *_: noted.append(1))
    try:
        step = jit(after_writes, donate=0)
        state = step({"a": torch.ones(2), "b": torch.ones(2)})
        happens(press)
        assert step(state)["a"].tolist() == [3, 3] and noted == [1]
    finally:
        signal.signal(signal.SIGINT, before)


def test_other_threads_donate_too():
    found = []
    thread = threading.Thread(target=lambda: found.append(twice()({"a": torch.ones(2)})))
    thread.start()
    thread.join()
    assert found[0]["a"].tolist() == [2, 2]


@pytest.mark.long
@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_ctrl_c_at_any_line_leaves_all_old_or_all_new(backend):
    """At each line of the package that a call goes through: three of 60 tries left a training state torn before."""
    step = jit(tiny.mlp_step(), donate=0, backend=backend)
    state, batch = step(fresh_state(tiny.mlp_params(), tiny.OPTIMIZER), tiny.mlp_batch())[0], tiny.mlp_batch()
    old = tiny.copied(state)
    new = tiny.copied(step(tiny.copied(state), batch)[0])
    ends, at = [], 0
    while True:
        state, passed = tiny.copied(old), iter(range(10**6))

        def trace(frame, event, arg, passed=passed, at=at):
            if "fmegatron" not in frame.f_code.co_filename:
                return None
            if event == "line" and next(passed) == at:
                press()
            return trace

        before = sys.gettrace()
        try:
            sys.settrace(trace)
            got = step(state, batch)[0]
        except KeyboardInterrupt:
            got = state
        finally:
            sys.settrace(before)
        if next(passed) <= at:
            break  # the call has no such line
        equal = [
            all(torch.equal(x, y) for x, y in zip(tree.leaves(got), tree.leaves(wanted), strict=True))
            for wanted in (old, new)
        ]
        assert sum(equal) == 1, f"line {at}: neither the old nor the new state"
        ends.append("old" if equal[0] else "new" if got is state else "returned")
        at += 1
    assert ends == sorted(ends, key=["old", "new", "returned"].index) and {"old", "new"} <= set(ends)
