"""Deterministic mode: on inside of a run, the same bits each time, and nothing of it is left behind."""

import os

import pytest
import torch

from fmegatron import data, loop, tree
from fmegatron.layout import Layout, Mesh
from fmegatron.loop.determinism import VARIABLES


def seen():
    """All that the mode changes."""
    variables = tuple(os.environ.get(name) for name, _ in VARIABLES)
    flags = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    return (*flags, torch.backends.cudnn.benchmark, *variables)


def run_in(folder, end=None, deterministic=True):
    """(state after 6 updates, what was seen in each) of a run whose sums threads may do in any order."""
    inside, generator = [], torch.Generator().manual_seed(0)
    where = torch.randint(0, 7, (200_000,), generator=generator)
    rows = torch.randn(200_000, generator=generator)

    def step(state, batch):
        inside.append(seen())
        if batch == end:
            raise ValueError("the end")
        w = state["w"].index_put((where,), rows, accumulate=True)
        return {"w": w * 0.5}, {"loss": w.sum()}

    specs = {"w": tree.ArraySpec(Layout((7,), torch.float32, Mesh()), 1.0)}
    run = loop.Run(folder, step, specs, options=loop.Options(deterministic=deterministic))
    for _ in run(data.source(lambda position: position), 6):
        pass
    return run.state["w"], inside


@pytest.mark.parametrize("warns", [False, True])
def test_a_run_has_the_same_bits_and_leaves_nothing(tmp_path, monkeypatch, warns):
    for name, _ in VARIABLES:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("NCCL_PROTO", "LL")  # the user's own stays
    monkeypatch.setattr(torch.backends.cudnn, "benchmark", True)
    torch.set_num_threads(2)
    torch.use_deterministic_algorithms(warns, warn_only=warns)
    try:
        before = seen()
        assert before[:3] == (warns, warns, True)
        states, inside = zip(*(run_in(tmp_path / name) for name in "ab"), strict=True)
        assert torch.equal(*states)
        assert {one for each in inside for one in each} == {(True, False, False, ":4096:8", "Ring", "LL")}
        assert seen() == before
        with pytest.raises(ValueError, match="the end"):
            run_in(tmp_path / "c", end=3)
        assert seen() == before
        _, off = run_in(tmp_path / "d", deterministic=False)
        assert set(off) == {before}
    finally:
        torch.use_deterministic_algorithms(False)


def test_around_more_than_a_run():
    before = seen()
    with loop.deterministic(), loop.deterministic(False):
        assert seen()[:3] == (True, False, False)
    assert seen() == before
