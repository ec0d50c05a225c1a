"""A State that nobody has looked into is donated whole; looked into, leaf by leaf. The values are the same."""

import copy
import os
import pickle
import signal
import sys
from typing import Any, NamedTuple

import optree
import pytest
import torch

from fmegatron import tree
from fmegatron.checkpoint.dicts.flat import flatten, rebuilt
from fmegatron.step import State, jit
from fmegatron.step import donation as donations
from tests.fresh_state import fresh_state
from tests.step import tiny
from tests.step.test_donated_faults import happens  # noqa: F401  a fixture


def begin(n=3):
    return State(
        torch.zeros((), dtype=torch.int64), [torch.full((2,), float(i)) for i in range(n)], {"m": torch.ones(2)}
    )


def update(state, x):
    params = [p * 2 + x for p in state.params]
    return State(state.step + 1, params, {"m": state.opt["m"] + params[0]}), {"loss": params[0].sum(), "name": "update"}


@pytest.fixture
def asked(monkeypatch):
    """How many leaves were taken one by one, per call."""
    counts, memory = [], donations.Donation._memory
    monkeypatch.setattr(
        donations.Donation,
        "_memory",
        lambda self, old, tensors: (counts.append(len(old)), memory(self, old, tensors))[1],
    )
    return counts


@pytest.mark.parametrize("backend", ["eager", "aot_eager", pytest.param("inductor", marks=pytest.mark.slow)])
def test_nothing_is_asked_of_a_leaf(backend, asked):
    step, x = jit(update, donate=0, backend=backend), torch.ones(2)
    looked, whole = begin(), begin()
    for i in range(5):
        looked, _ = step(looked, x)
        assert looked.step == i + 1  # a look
    assert len(asked) == 5
    del asked[:]
    for _ in range(5):
        whole, metrics = step(whole, x)
    assert len(asked) == 1  # the first, which a user made
    assert metrics["name"] == "update" and all(map(torch.equal, tree.leaves(whole), tree.leaves(looked)))


def test_the_tensors_go_on_and_the_given_state_is_dead():
    step, x = jit(update, donate=0, backend="eager"), torch.ones(2)
    first, _ = step(begin(), x)
    second, _ = step(first, x)
    for look in (
        lambda: first.params, lambda: first.step, lambda: [*first], lambda: tree.leaves(first), lambda: first[0],
        lambda: tree.map(torch.clone, first), lambda: copy.deepcopy(first), lambda: pickle.dumps(first),
        lambda: first._replace(step=0), lambda: step(first, x), lambda: first == second, lambda: hasattr(first, "opt"),
        lambda: torch.utils._pytree.tree_flatten(first),
    ):  # fmt: skip
        with pytest.raises(ValueError, match="got a State that was donated to update, .* use what update returned"):
            look()
    assert "donated to update" in repr(first)
    assert second.step == 2


def test_a_look_in_between_and_what_was_kept_stays():
    step, x = jit(update, donate=0, backend="eager"), torch.ones(2)
    state, _ = step(begin(), x)
    kept = state.params[0].detach()
    state, _ = step(state, x)
    view = tree.leaves(state)[1][:1]
    state, _ = step(state, x)
    assert kept.tolist() == [1, 1] and view.tolist() == [3] and state.params[0].tolist() == [7, 7]


@pytest.mark.medium
def test_a_metric_that_is_memory_of_the_state_is_not_written():
    def with_view(state, x):
        new, metrics = update(state, x)
        return new, {**metrics, "m": new.opt["m"], "row": new.params[1][:1]}

    for backend in ("eager", "aot_eager", "inductor"):
        step, x = jit(with_view, donate=0, backend=backend), torch.ones(2)
        state, seen = begin(), []
        for _ in range(4):
            state, metrics = step(state, x)
            seen.append((metrics["m"], metrics["m"].tolist(), metrics["row"], metrics["row"].tolist()))
        assert all(m.tolist() == then and row.tolist() == was for m, then, row, was in seen)


def test_another_batch_and_another_jit():
    step, other = jit(update, donate=0, backend="eager"), jit(update, donate=0, backend="eager")
    state, _ = step(begin(), torch.ones(2))
    with pytest.warns(UserWarning, match="compiled again"):
        state, _ = step(state, torch.ones(1))
    state, _ = other(state, torch.ones(1))
    state, _ = step(state, torch.ones(2))
    state, _ = step(state, torch.ones(1))
    assert state.step == 5 and state.params[0].tolist() == [31, 31]


def test_a_state_alone_and_undonated_calls():
    step = jit(lambda s: State(s.step + 1, s.params, s.opt), donate=0, backend="eager")
    read = jit(lambda s: s.params[0].sum(), backend="eager")
    state = step(step(begin()))
    assert read(state) == 0 and read(state) == 0
    assert step(step(state)).step == 4


def test_it_is_used_as_a_named_tuple():
    state = begin()
    step, params, opt = state
    assert (state[0] is step, state[1] is params, len(state), state._fields) == (
        True,
        True,
        3,
        ("step", "params", "opt"),
    )
    assert tree.paths(state) == ["step", "params/0", "params/1", "params/2", "opt/m"]
    assert tree.leaves(State(*state))[0] is step and state._replace(step=1).params is params
    for other in (copy.deepcopy(state), pickle.loads(pickle.dumps(state)), tree.map(torch.clone, state)):
        assert isinstance(other, State) and all(map(torch.equal, tree.leaves(other), tree.leaves(state)))
    assert State(1, 2, 3) == State(1, 2, 3) != State(1, 2, 4) and State(1, 2, 3) != (1, 2, 3)
    assert repr(State(1, 2, 3)) == "State(step=1, params=2, opt=3)"
    with pytest.raises(AttributeError):
        state.step = 1
    grads, value = torch.func.grad_and_value(lambda s: s.params[1].square().sum())(state._replace(step=torch.zeros(())))
    assert isinstance(grads, State) and grads.params[1].tolist() == [2, 2] and value == 2
    with pytest.raises(ValueError, match="got a State of step, params, opt, wanted a dict of a"):
        tree.map(lambda a, b: a, {"a": 1}, state)
    assert optree.tree_structure(state) == optree.tree_structure(begin())


def test_files_are_those_of_a_named_tuple():
    class Fields(NamedTuple):
        step: Any
        params: Any
        opt: Any

    assert str(flatten({"state": begin()})) == str(flatten({"state": Fields(*begin())}))
    found = rebuilt(begin(), flatten(tree.map(lambda x: x + 1, begin())).leaves, in_place=False)
    assert isinstance(found, State) and found.step == 1 and found.params[2].tolist() == [3, 3]


# ---- faults ----------------------------------------------------------------------------------------------------------
def after_writes(state, x):
    b = torch.ops.test_donated.happens(state.params[1] * 2)
    return State(state.step + 1, [state.params[0] + x, b], state.opt), {}


def fails():
    raise RuntimeError("Connection closed by peer")


def test_an_error_before_anything_is_written_leaves_it_alive(happens):  # noqa: F811
    step, x = jit(after_writes, donate=0, backend="eager"), torch.ones(2)
    state, _ = step(begin(2), x)
    happens(fails)
    with pytest.raises(RuntimeError, match="Connection closed"):
        step(state, x)
    happens(lambda: None)
    state, _ = step(state, x)
    assert state.step == 2 and state.params[1].tolist() == [4, 4]


@pytest.mark.medium
def test_an_error_after_a_write_ends_it(happens):  # noqa: F811
    step, x = jit(after_writes, donate=0), torch.ones(2)
    state, _ = step(begin(2), x)
    happens(fails)
    with pytest.raises(RuntimeError, match="Connection closed") as caught:
        step(state, x)
    assert "had begun to write into its donated argument" in caught.value.__notes__[0]
    with pytest.raises(
        ValueError, match="a State that was donated .* failed after it had begun to write .RuntimeError"
    ):
        state.step  # noqa: B018


@pytest.mark.medium
def test_ctrl_c_at_any_line_leaves_all_old_or_all_new():
    step, batch = jit(tiny.mlp_step(), donate=0, backend="eager"), tiny.mlp_batch()
    start = fresh_state(tiny.mlp_params(), tiny.OPTIMIZER)
    old = tiny.copied(step(tiny.copied(start), batch)[0])
    new = tiny.copied(step(tiny.copied(old), batch)[0])
    ends, at = [], 0
    while True:
        state, passed = step(tiny.copied(start), batch)[0], iter(range(10**6))

        def trace(frame, event, arg, passed=passed, at=at):
            if "fmegatron" not in frame.f_code.co_filename:
                return None
            if event == "line" and next(passed) == at:
                os.kill(os.getpid(), signal.SIGINT)
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
            break
        equal = [all(map(torch.equal, tree.leaves(got), tree.leaves(wanted))) for wanted in (old, new)]
        assert sum(equal) == 1, f"line {at}: neither the old nor the new state"
        ends.append("old" if equal[0] else "new" if got is state else "returned")
        at += 1
    assert ends == sorted(ends, key=["old", "new", "returned"].index) and {"old", "new"} <= set(ends)
