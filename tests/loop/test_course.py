"""The course of a run: every sample is read once, in order, whatever the batch sizes and what is left out."""

import random

import numpy as np
import pytest
import torch

from fmegatron import tree
from fmegatron.data import Batches, source
from fmegatron.layout import Layout, Mesh
from fmegatron.loop import Log, Options, Run, Save
from fmegatron.loop.course import course, joined

DATA = Batches(np.arange(2000) % 97, batch_size=4, seq_len=8, seed=3)


def one_by_one(samples, step, count, batch_sizes, skip):
    """(samples behind the run, batch size) of each update, and what is behind it at last."""
    found, behind, size = [], samples, DATA.batch_size
    for n in range(step, step + count):
        size = next((other for first, other in reversed(batch_sizes) if first <= n), DATA.batch_size)
        for start, stop in joined(skip):
            behind = stop if behind < stop and start < behind + size else behind
        found.append((behind, size))
        behind += size
    return found, behind


@pytest.mark.parametrize("seed", range(30))
def test_each_update_reads_what_is_next(seed):
    draw = random.Random(seed)
    firsts = sorted(draw.sample(range(30), draw.randint(0, 3)))
    sizes = tuple((first, draw.randint(1, 9)) for first in firsts)
    skip = [(start := draw.randint(0, 200), start + draw.randint(1, 30)) for _ in range(draw.randint(0, 3))]
    step, samples = draw.choice([(0, 0), (7, 33), (12, 90)])
    way = course(DATA, samples, step, sizes, skip)
    expected, behind = one_by_one(samples, step, 40, sizes, skip)
    for n, (before, size) in enumerate(expected, step):
        of = way.of(n)
        assert (of.samples(n), of.batch_size, way.tokens(n + 1)) == (before, size, size * 8)
        whole = Batches(DATA.tokens, 1, 8, 3)
        rows = torch.cat([whole.at(before + row)["tokens"] for row in range(size)])
        assert torch.equal(way.at(n)["tokens"], rows)
    assert way.samples(step + 40) == behind
    for wanted in (behind, behind - 1, samples + 1):
        steps = way.steps(wanted)
        assert way.samples(steps) >= wanted and (steps <= step + 1 or way.samples(steps - 1) < wanted)


@pytest.mark.parametrize(
    "settings, words",
    [
        ({"batch_sizes": ((0, 0),)}, "batch_sizes: got"),
        ({"batch_sizes": ((5, 2), (1, 2))}, "rising updates"),
        ({"skip": ((5, 5),)}, r"skip: got \(5, 5\), wanted ranges"),
    ],
)
def test_what_is_no_course(settings, words):
    with pytest.raises(ValueError, match=words):
        course(DATA, 0, 0, **settings)


def run_of(folder):
    """A Run whose state is the sum of the first tokens that it has seen, and how many rows."""
    specs = {
        "sum": tree.ArraySpec(Layout((), torch.int64, Mesh())),
        "rows": tree.ArraySpec(Layout((), torch.int64, Mesh())),
    }

    def update(state, batch):
        first = batch["tokens"][:, 0]
        return {"sum": state["sum"] + first.sum(), "rows": state["rows"] + len(first)}, {"loss": first.double().mean()}

    return Run(folder, update, specs, options=Options(save=Save(every=1000), log=Log(every=1)))


def test_a_run_by_tokens_with_a_schedule_and_gaps_resumes_as_if_it_had_not_stopped(tmp_path, capsys):
    how = {"batch_sizes": ((0, 4), (5, 8)), "skip": ((10, 13), (50, 60))}
    straight = run_of(tmp_path / "a")
    seen = [info.step for info in straight(DATA, tokens=100 * 8, **how)]
    behind = course(DATA, 0, 0, **how)
    assert seen[-1] == behind.steps(100) and behind.samples(seen[-1]) >= 100
    assert "from step 6 on 8 sequences per step" in capsys.readouterr().out
    parts = run_of(tmp_path / "b")
    for _ in parts(DATA, steps=7, **how):
        pass
    again = run_of(tmp_path / "b")
    assert [info.step for info in again(DATA, samples=100, **how)][-1] == seen[-1]
    assert tree.leaves(again.state) == tree.leaves(straight.state)
    assert int(again.state["rows"]) == sum(behind.tokens(step) // 8 for step in seen)


def test_a_length_is_given_once(tmp_path):
    run = run_of(tmp_path)
    for length in ({}, {"steps": 3, "tokens": 5}):
        with pytest.raises(ValueError, match="wanted one of steps=, samples= and tokens="):
            run(DATA, **length)
    with pytest.raises(ValueError, match="tokens: got 5 and _Function, whose samples are not counted, wanted steps="):
        run(source(lambda position: None), tokens=5)
    with pytest.raises(ValueError, match="batch_sizes: got .* wanted data.Batches"):
        run(source(lambda position: None), 5, batch_sizes=((0, 4),))
