"""The line that is shown while a step is traced and compiled."""

import contextlib
import io
import sys
import time

import torch

from fmegatron import step
from fmegatron.step.layer import compiled_layer
from fmegatron.step.progress import AFTER_S, progress


class Terminal(io.StringIO):
    def isatty(self):
        return True


def wait_for(out, text):
    limit = time.monotonic() + 60
    while text not in out.getvalue():
        assert time.monotonic() < limit, out.getvalue()
        time.sleep(0.01)


def test_a_line_on_a_terminal_and_gone_at_the_end():
    out = Terminal()
    with progress("train_step", " (hint)", after_s=0, out=out) as tell:
        tell("tracing")
        wait_for(out, "\rtrain_step: tracing, ")
        tell("compiling graph 2 of 3 (block_fwd)")
        wait_for(out, "\rtrain_step: compiling graph 2 of 3 (block_fwd), ")
        wait_for(out, " s (hint)")
    last = out.getvalue().rpartition("(hint)")[2]
    assert set(last) <= {" ", "\r"} and last.endswith(" \r")


def test_none_for_what_is_short_or_not_seen():
    assert AFTER_S == 2.0
    for out, how in ((Terminal(), {}), (io.StringIO(), {"after_s": 0}), (Terminal(), {"active": False, "after_s": 0})):
        with progress("f", out=out, **how) as tell:
            tell("tracing")
        assert out.getvalue() == "", how


def test_a_jit_tells_each_graph(monkeypatch):
    told = []

    @contextlib.contextmanager
    def heard(name, hint, active):
        told.append((name, hint, active))
        yield told.append

    monkeypatch.setattr(sys.modules["fmegatron.step.jitted"], "progress", heard)

    def block(x, w):
        return torch.tanh(x @ w)

    def loss(params, x):
        layer = compiled_layer()(block)
        for w in params["w"].unbind(0):
            x = layer(x, w)
        return x.square().mean()

    def grads(params, x):
        return step.value_and_grad(loss)(params, x)[1]

    step.jit(grads, backend="eager")({"w": torch.ones(3, 4, 4)}, torch.ones(2, 4))
    assert told == [
        ("grads", "", None),
        "tracing",
        "compiling graph 1 of 3 (block_fwd)",
        "compiling graph 2 of 3 (block_bwd)",
        "compiling graph 3 of 3",
    ]
    told.clear()
    step.jit(lambda x: x + 1, backend="aot_eager")(torch.ones(2))
    assert told[1:] == ["tracing", "compiling"]
