"""What a rank makes of its own part as if it were all there is: a finding where nothing from another rank may complete
it, and none where something may, or where no order or number of a part matters."""

import pytest
import torch

from fmegatron import step
from fmegatron.collectives import Axes, all_gather, axis_index, enter, pmax, ppermute, psum
from fmegatron.layout import Layout, Mesh

F64, MESH = torch.float64, Mesh(dp=2, tp=2)
STATE = {"w": Layout((6, 6), F64, MESH), "up": Layout((6, 8), F64, MESH, (None, "tp")), "t": Layout((1,), F64, MESH)}
BATCH = {"x": Layout((8, 6), F64, MESH, ("dp",)), "y": Layout((8, 6), F64, MESH, ("dp",))}


def total(p, b):
    """A count of rows that a weight has seen."""
    return (b["x"] @ p["w"]).square().sum()


def ratio(s, b, dp, tp):
    return total(s, b) / b["y"].square().sum() / dp.size


def not_entered(s, b, dp, tp):
    return (psum(b["x"].T @ (b["x"] @ s["w"]), dp) / 8).square().sum() / dp.size


def recorded_elsewhere(s, b, dp, tp):
    with torch.no_grad():
        scale = psum(total(s, b), dp)
    return total(s, b) / scale + scale.square() / dp.size


def own_pairs(s, b, dp, tp):
    z = b["x"] @ s["w"]
    return (z @ z.T).logsumexp(1).sum() / 8


def own_positives(s, b, dp, tp):
    z = b["x"] @ s["w"]
    every = (z @ all_gather(b["y"], dp, 0).T).logsumexp(1)
    return (every - (z @ b["y"].T).diagonal()).sum() / 8


def ring(s, b, dp, tp):
    z, there, blocks = b["x"] @ s["w"], b["y"], []
    for _ in range(dp.size):
        blocks.append(z @ there.T)
        there = ppermute(there, dp, 1)
    return torch.cat(blocks, 1).logsumexp(1).sum() / 8


def hidden(s, b, tp):
    return enter(b["x"] @ s["w"], tp) @ s["up"]


WRONG = {
    "a ratio of a rank's own sums": ratio,
    "a psum of a parameter's term, its share not entered": not_entered,
    "all pairs are a rank's own": own_pairs,
    "rows mixed with rows of the same rank": lambda s, b, dp, tp: (
        ((b["x"] + b["x"].flip(0)) @ s["w"] - b["y"]).square().sum() / 8
    ),
    "the largest of each part are added up": lambda s, b, dp, tp: (
        psum(hidden(s, b, tp).topk(2).values.sum(1), tp).square().sum() / 8
    ),
    "the count of the first rank": lambda s, b, dp, tp: (
        total(s, b) / all_gather(b["y"].square().sum()[None], dp, 0)[0] / dp.size
    ),
    "one row less of a rank's own": lambda s, b, dp, tp: total(s, b) / (b["x"].shape[0] - 1) / dp.size,
}
RIGHT = {
    "a ratio of sums of all": lambda s, b, dp, tp: total(s, b) / psum(b["y"].square().sum(), dp),
    "entered": lambda s, b, dp, tp: enter(psum(b["x"].T @ (b["x"] @ s["w"]), dp) / 8, dp).square().sum() / dp.size,
    "a share of what autograd does not see": recorded_elsewhere,
    "pairs with all": lambda s, b, dp, tp: ((z := b["x"] @ s["w"]) @ all_gather(z, dp, 0).T).logsumexp(1).sum() / 8,
    "a row's pair with itself": own_positives,
    "blocks that went round": ring,
    "rows in another order in a sum of all": lambda s, b, dp, tp: (b["x"].flip(0) @ s["w"]).square().sum() / 8,
    "turned round and back": lambda s, b, dp, tp: (
        ((b["x"].flip(0) @ s["w"]).tanh().flip(0) - b["y"]).square().sum() / 8
    ),
    "the largest of the largest": lambda s, b, dp, tp: (
        pmax(hidden(s, b, tp).topk(1).values.detach(), tp).square().sum() / 8 + total(s, b)
    ),
    "sums of pieces": lambda s, b, dp, tp: (
        psum(sum(one.square().sum(1) for one in hidden(s, b, tp).chunk(2, 1)), tp).square().sum() / 8
    ),
    "counts of all ranks": lambda s, b, dp, tp: total(s, b) / all_gather(b["y"].square().sum()[None], dp, 0).sum(),
    "one row less of all": lambda s, b, dp, tp: total(s, b) / (b["x"].shape[0] * dp.size - 1),
}


def pieces_in_pairs(s, b, dp, tp):
    return psum(torch.mul(*hidden(s, b, tp).chunk(2, 1)).sum(1), tp).square().sum() / 8


def checked(loss, shown=False):
    axes = Axes(MESH)

    def train(s, b):
        (value, _), grads = step.value_and_grad(lambda p, rows: loss(p, rows, axes["dp"], axes["tp"]))(s, b)
        grads = {name: psum(g, axes["dp"]) for name, g in grads.items()}
        return {name: s[name] - 0.1 * grads[name] for name in s}, {"loss": psum(value, axes["dp"])} if shown else {}

    return step.check(train, STATE, BATCH)


@pytest.mark.parametrize("name", WRONG)
def test_what_nothing_completes_is_found(name):
    report = checked(WRONG[name])
    assert report.findings and all("test_check_completion.py" in one.at for one in report.findings), report


@pytest.mark.long
@pytest.mark.parametrize("name", RIGHT)
def test_its_right_neighbour_is_not(name):
    report = checked(RIGHT[name])
    assert not report.findings and "internal" not in str(report), report


def test_pieces_of_every_shard_that_are_pairs():
    assert "pairs pieces of every shard" in str(checked(pieces_in_pairs, shown=True).findings)
    assert not checked(RIGHT["sums of pieces"], shown=True).findings


def test_places_moved_on_by_a_size_of_a_part_are_not_proven():
    axes = Axes(MESH)

    def of(shift):
        def train(s, b):
            def loss(p):
                n = b["x"].shape[0]
                at = torch.arange(n, device=b["x"].device) + axis_index(axes["dp"]) * n
                at = (at + n) % (n * axes["dp"].size) if shift else at
                scores = (b["x"] @ p["w"]) @ all_gather(b["y"], axes["dp"], 0).T
                return torch.nn.functional.cross_entropy(scores, at, reduction="sum") / 8

            grads = {name: psum(g, axes["dp"]) for name, g in step.value_and_grad(loss)(s)[1].items()}
            return {name: s[name] - 0.1 * grads[name] for name in s}, {}

        return step.check(train, STATE, BATCH)

    assert of(False).ok and not of(True).ok
