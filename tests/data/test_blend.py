"""Blends: shares right at every prefix, Megatron's choices by its rule, parts in order, any mesh, any resume."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fmegatron.data import Batches, Blend, SourceBatches, order
from fmegatron.data.shares import Shares
from fmegatron.layout import Mesh
from tests.data.test_batches import COUNTING

weights = st.lists(st.floats(0.001, 1.0) | st.just(0.0), min_size=1, max_size=9).filter(lambda w: sum(w) > 0)


def sources(shares, n):
    return shares.of(np.arange(n))[0]


@settings(max_examples=20, deadline=None)
@given(w=weights, more=st.lists(st.integers(1, 400), max_size=2), data=st.data())
def test_less_than_one_sample_from_the_share_at_every_prefix(w, more, data):
    phases, n = [(0, w)], 900
    for begin in np.cumsum(more).tolist():
        other = data.draw(st.lists(st.floats(0.001, 1), min_size=len(w), max_size=len(w)))
        phases.append((begin, other))
    source, number = Shares(phases, "even").of(np.arange(n))
    due = np.zeros((n, len(w)))
    for begin, now in phases:
        due[begin:] = np.array(now) / np.sum(now)
    due = due.cumsum(0)
    counts = (source[:, None] == np.arange(len(w))).cumsum(0)
    assert np.abs(counts - due).max() <= 1 - 1 / max(2, 2 * len(w) - 2) + 1e-6
    assert np.array_equal(number, np.take_along_axis(counts, source[:, None], 1)[:, 0] - 1)


def greedy(w, size):
    """Megatron's build_blending_indices, as its comments state it, of weights that were divided by their sum twice."""
    w = np.array(w) / np.sum(np.array(w, dtype=np.float64))
    w = w / np.sum(w)
    taken, out = np.zeros(len(w), dtype=np.int64), []
    for i in range(size):
        k = int(np.argmax(w * max(float(i), 1.0) - taken))
        out.append(k)
        taken[k] += 1
    return out


@settings(max_examples=20, deadline=None)
@given(w=weights)
def test_megatrons_choices(w):
    assert sources(Shares([(0, w)], "megatron"), 600).tolist() == greedy(w, 600)


def test_the_greedy_rule_can_be_off_by_more_than_one():
    """Why it is not the default."""
    w = np.array([2.38408836e-02, 9.45177741e-01, 2.39538546e-02, 6.12577599e-03, 9.01744802e-04])
    worst = {}
    for rule in ("megatron", "even"):
        counts = (sources(Shares([(0, w)], rule), 400)[:, None] == np.arange(5)).cumsum(0)
        worst[rule] = np.abs(counts - np.arange(1, 401)[:, None] * w / w.sum()).max()
    assert worst["megatron"] > 1.6 and worst["even"] < 0.9


def test_any_sample_is_found_without_those_before():
    one, two = (Shares([(0, [3, 1, 0.5])], "even") for _ in range(2))
    far = np.array([9_000, 12, 13_000, 4_095, 4_096])
    for x, y in zip(one.of(far), (v[far] for v in two.of(np.arange(13_001))), strict=True):
        assert np.array_equal(x, y)
    assert one.counts(13_000) == np.bincount(sources(two, 13_000)).tolist()


def parts(**more):
    few = Batches(COUNTING[:200], 6, 8, seed=1, **more)
    return few, Batches(COUNTING[1000:3000], 6, 8, seed=2, documents=1500, **more)


@pytest.mark.parametrize("rule", ["even", "megatron"])
def test_rows_are_those_of_the_parts_on_any_mesh(rule):
    few, many = parts()
    blend = Blend([(1, few), (2, many)], rule=rule, changes=[(50 * 8, [5, 1])])
    rows = [blend.at(step) for step in range(30)]
    tokens = torch.cat([batch["tokens"] for batch in rows])
    for part, wanted in ((tokens[:, 0] < 1000, few), (tokens[:, 0] >= 1000, many)):
        got = tokens[part]
        steps = -(-len(got) // 6)
        assert torch.equal(got, torch.cat([wanted.at(step)["tokens"] for step in range(steps)])[: len(got)])
    assert sum(blend.counts(30)) == 180 and blend.counts(30)[0] == int((tokens[:, 0] < 1000).sum())
    share = lambda a, b: float((tokens[a:b, 0] < 1000).float().mean())  # noqa: E731
    assert abs(share(0, 50) - 1 / 3) < 0.04 and abs(share(50, 180) - 5 / 6) < 0.03
    batch = blend.at(4)
    assert batch.keys() == many.at(0).keys() and batch["mask"][batch["tokens"][:, 0] < 1000].all()
    for mesh in (Mesh(dp=2), Mesh(fsdp=3), Mesh(dp=2, cp=2)):
        ranks = [blend.for_rank(blend.layout(mesh), rank).at(4) for rank in range(mesh.size)]
        whole = torch.cat([torch.cat([r["labels"] for r in ranks[i : i + mesh["cp"]]], 1)
                           for i in range(0, mesh.size, mesh["cp"])])  # fmt: skip
        assert torch.equal(whole, batch["labels"])
    later = Blend([(1, few), (2, many)], batch_size=9, rule=rule, changes=[(50 * 8, [5, 1])])
    later = later.after(blend.samples(4), 4)
    assert torch.equal(later.at(4)["tokens"][:6], batch["tokens"])


def test_epochs_of_parts_and_zigzag():
    few, many = parts(zigzag=2)
    blend = Blend.of_epochs([(3, few), (1, many)])
    total = 3 * few.windows + many.windows
    assert blend._shares.counts(total) == [3 * few.windows, many.windows]
    assert blend.at(0)["positions"].shape == (6, 8) and blend.zigzag == 2


def test_blends_may_be_parts():
    few, many = parts()
    nested = Blend([(1, few), (1, Blend([(1, few), (1, many)]))])
    assert nested.counts(10) == [30, 30] and nested.at(9)["tokens"].shape == (6, 8)


@pytest.mark.parametrize(
    "make, message",
    [
        (lambda few: Blend([]), "wanted .weight, Batches. one or more"),
        (lambda few: Blend([(1, COUNTING)]), "parts: got none, or other things"),
        (lambda few: Blend([(1, few.after(9, 1))]), r"Blend: parts: got batches with after"),
        (lambda few: Blend([(0, few)]), r"weights: got \[0\] from token 0 on"),
        (lambda few: Blend([(-1, few), (2, few)]), "wanted a number of 0 or more"),
        (lambda few: Blend([(1, few)], changes=[(50, [1, 2])]), r"got \[1, 2\] from token 50 on, .* each of 1 parts"),
        (lambda few: Blend([(1, few)], changes=[(50, [1]), (9, [1])]), "from token 9 on, .* rising"),
        (lambda few: Blend([(1, few), (1, Batches(COUNTING, 6, 4, 0))]), r"seq_len: got parts of \[4, 8\]"),
        (lambda few: Blend([(1, few)], rule="random"), "rule: got 'random'"),
        (lambda few: Blend([(1, few)]).at(-1), "Blend.at: got step -1"),
        (lambda few: Blend.of_epochs([(1, Blend([(1, few)]))]), "got Blend, wanted Batches"),
    ],
)
def test_errors_for_people(make, message):
    with pytest.raises(ValueError, match=message):
        make(parts()[0])


def test_every_rank_and_step_has_the_entries_of_all_parts():
    """Found by a reviewer: ranks whose rows were all of one part had no mask, and the others one."""
    items = [{"tokens": np.arange(8), "labels": np.arange(8), "mask": np.arange(8) > 3}] * 50
    blend = Blend([(0.9, Batches(np.arange(4000), 8, 8, seed=0)), (0.1, SourceBatches(items, 8, 8, seed=0))])
    layout = blend.layout(Mesh(dp=2))
    for step in range(6):
        ranks = [blend.for_rank(layout, rank).at(step) for rank in range(2)]
        assert {tuple(sorted(batch)) for batch in (blend.at(step), *ranks)} == {("labels", "mask", "padding", "tokens")}
        assert torch.equal(torch.cat([batch["mask"] for batch in ranks]), blend.at(step)["mask"])


def test_many_parts_cost_what_few_do(monkeypatch):
    """Their orders are kept: found by a reviewer, where 33 parts took a thousand times as long as 30."""
    blend = Blend([(1, Batches(np.arange(20000), 64, 8, seed=k)) for k in range(64)])
    blend.at(0)
    made = order._order.cache_info().misses
    for step in range(1, 5):
        blend.at(step)
    assert order._order.cache_info().misses == made
