"""The smallest experiment runs, learns, and stays small."""

import functools
import math
from pathlib import Path

import pytest

from experiments import minimal
from fmegatron import step, tree
from fmegatron.loop.nonfinite import NonFiniteError


@pytest.fixture(params=["eager", pytest.param("inductor", marks=pytest.mark.slow)])
def _backend(request, monkeypatch):
    monkeypatch.setattr(step, "jit", functools.partial(step.jit, backend=request.param))


@pytest.mark.usefixtures("_backend")
def test_it_learns(capsys):
    assert minimal.main(steps=60) < 3.3  # 4.17 is chance
    assert capsys.readouterr().out.startswith("step 1: 4.1")


@pytest.mark.usefixtures("_backend")
def test_it_does_not_train_numbers_that_are_not_finite(monkeypatch):
    draw = tree.init
    monkeypatch.setattr(tree, "init", lambda *args, **kw: tree.map(lambda x: x * math.inf, draw(*args, **kw)))
    with pytest.raises(NonFiniteError, match="step 1: loss is nan; not finite in the state: head, hidden, letters"):
        minimal.main(steps=5)


def test_it_is_small():
    assert len(Path(minimal.__file__).read_text().splitlines()) <= 40
