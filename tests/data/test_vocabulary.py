"""Ids that a model does not have are refused where its batches are read, by position, entry and row."""

import numpy as np
import pytest

from fmegatron import loop, model, optim
from fmegatron.collectives import World
from fmegatron.data import Batches, EvaluationBatches, SourceBatches, source
from fmegatron.layout import Mesh

V = 40


def described(vocab_size=V):
    of = model.llama(vocab_size, dim=8, layers=1, heads=2, kv_heads=1, ffn_dim=8, max_seq=8)
    return model.build(of, optim.sgd(0.1), Mesh(), (2, 8), save=None)


def read(batches, of=None):
    with World.alone("cpu") as world:
        return loop.own_rows(batches, of or described(), world).at(0)


def row(**changes):
    ids = np.arange(8)
    return {"tokens": ids, "labels": ids + 1, **changes}


WRONG = {
    "a text of another tokenizer": (
        lambda: Batches(np.arange(30, 60), 2, 8, seed=0),
        "'(tokens|labels)': got the id [45]",
    ),
    "one past the end": (lambda: EvaluationBatches(np.full(30, V), 2, 8), "'(tokens|labels)': got the id 40 in row 0"),
    "a label, masked or not": (
        lambda: SourceBatches([row(), row(labels=np.full(8, V), mask=np.zeros(8))], 2, 8, 0, shuffle=False),
        "position 0: 'labels': got the id 40 in row 1 of this rank, wanted 0 to 39, .* or below 0 for none; read data",
    ),
    "of a function": (
        lambda: source(lambda i: {k: x.repeat(2, 1) - 1 for k, x in ids(row()).items()}),
        "'tokens': got the id -1 in row 0 of this rank, wanted 0 to 39, the vocabulary of the model; read data",
    ),
}


def ids(row):
    return {name: x for name, x in SourceBatches([row], 1, 8, 0).at(0).items() if name in ("tokens", "labels")}


@pytest.mark.parametrize("name", WRONG)
def test_wrong(name):
    make, words = WRONG[name]
    with pytest.raises(ValueError, match=words):
        read(make())


def test_right():
    """The last id, and labels that are none."""
    assert int(read(EvaluationBatches(np.full(30, V - 1), 2, 8))["tokens"].max()) == V - 1
    none = source(lambda i: {k: x.repeat(2, 1) - 100 * (k == "labels") for k, x in ids(row()).items()})
    assert int(read(none)["labels"].max()) < 0
    assert int(read(Batches(np.arange(30, 60), 2, 8, seed=0), described(60))["labels"].max()) > V
