"""Threads that call one jit, or several, at once; and torch's loops that run functions as graphs of their own."""

import threading
from typing import Any

import pytest
import torch
from torch._higher_order_ops import scan as scan_of
from torch._higher_order_ops import while_loop

from fmegatron import step
from fmegatron.collectives import Axes, psum
from fmegatron.layout import Layout, Mesh
from fmegatron.step.layer import compiled_layer


def in_threads(call, n=4):
    """What call(i) gives in n threads that begin together."""
    start = threading.Barrier(n)
    found: list[Any] = [None] * n

    def run(i):
        start.wait()
        try:
            found[i] = call(i)
        except BaseException as error:
            found[i] = error

    threads = [threading.Thread(target=run, args=(i,)) for i in range(n)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for one in found:
        if isinstance(one, BaseException):
            raise one
    return found


def slow(x):
    threading.Event().wait(0.02)  # so that the threads trace at the same time
    return x


def wanted(i, turns, x):
    state = torch.full((8, 8), float(i), dtype=torch.float64)
    for _ in range(turns):
        state = (state + x @ x).tanh()
    return state


@pytest.mark.long
@pytest.mark.parametrize(("donate", "backend"), [(None, "eager"), (0, "eager"), (0, "inductor")])
def test_threads_call_one_jit(donate, backend):
    """Each has a state of its own, which the call takes."""
    jitted = step.jit(lambda s, x: {"a": (slow(s["a"]) + x @ x).tanh()}, donate=donate, backend=backend)
    x = torch.randn(8, 8, generator=torch.Generator().manual_seed(0), dtype=torch.float64) / 8

    def call(i):
        state = {"a": torch.full((8, 8), float(i), dtype=torch.float64)}
        for _ in range(3):
            state = jitted(state, x)
        return state["a"].clone()

    for i, got in enumerate(in_threads(call)):
        assert torch.allclose(got, wanted(i, 3, x), atol=1e-12)
    assert len(jitted.cache) == 1


def test_threads_call_jits_that_call_one_another():
    """One that another one's trace calls, and that is called by itself meanwhile; and layers."""
    inner = step.jit(lambda x: slow(x) * 2, backend="eager")
    layer = compiled_layer("inputs")(lambda x, w: slow(x) * w)
    outer = [step.jit(lambda x, i=i: inner(layer(x, x)) + i, backend="eager") for i in range(3)]
    x = torch.full((3,), 3.0)
    found = in_threads(lambda i: (outer[i] if i < 3 else inner)(x))
    assert [one[0].item() for one in found] == [18, 19, 20, 6]


def loops():
    loop, scan = while_loop, scan_of
    ax = Axes(Mesh(dp=2))["dp"]
    return {
        "cond": lambda x: torch.cond(x.sum() > 0, lambda x: x * 2, lambda x: x + 1, (x,)),
        "cond with a collective": lambda x: torch.cond(x.sum() > 0, lambda x: psum(x, ax), lambda x: x + 1, (x,)),
        "while_loop": lambda x: loop(lambda n, x: n < 3, lambda n, x: (n + 1, x / 2), (x[0].long(), x))[1],
        "scan": lambda x: scan(lambda c, r: (c + r, c.clone()), x[0] * 0, x)[0],
    }


@pytest.mark.parametrize("name", list(loops()))
@pytest.mark.parametrize("how", ["jit", "check", "inside of a layer"])
def test_loops_of_torch_are_refused_by_line(name, how):
    form, x = loops()[name], torch.ones(4)
    with pytest.raises(
        ValueError, match=rf"test_threads\.py:\d+: got {name.split()[0]}, which runs functions as graphs"
    ):
        if how == "jit":
            step.jit(form)(x)
        elif how == "check":
            x = Layout((4,), torch.float32, Mesh(dp=2), ("dp",))
            step.check(lambda state, x: (state, form(x)), x, x)
        else:
            step.jit(lambda x: compiled_layer("inputs")(lambda x, w: form(x) * w)(x, x), backend="eager")(x)
