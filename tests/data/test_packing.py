"""Packing: each label of each document once an epoch, nothing across documents, few cuts, little padding."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fmegatron.data import Batches, load_packing, pack, write_indexed
from tests.data.test_batches import COUNTING


@settings(max_examples=50, deadline=None)
@given(
    lengths=st.lists(st.integers(0, 40), min_size=1, max_size=40), seq_len=st.integers(1, 24), seed=st.integers(0, 9)
)
def test_each_label_once(lengths, seq_len, seed):
    starts = np.cumsum([0, *lengths])
    labels = [t for a, b in zip(starts, starts[1:], strict=False) for t in range(a + 1, b)]
    if not labels:
        return
    plan = pack(starts, seq_len)
    batches = Batches(COUNTING[: starts[-1]], len(plan), seq_len, seed, packing=plan)
    batch = {name: x.numpy() for name, x in batches.at(0).items()}
    mask = batch["mask"]
    assert np.array_equal(np.sort(batch["labels"][mask]), labels) and batches.windows == len(plan)
    assert np.array_equal(batch["labels"][mask], batch["tokens"][mask] + 1)
    document_of = np.searchsorted(starts, np.arange(starts[-1]), side="right")
    for row in range(len(plan)):
        real, ids = mask[row], batch["documents"][row]
        for d in np.unique(ids):
            here = ids == d
            assert len(set(real[here])) == 1 and batch["positions"][row][here].tolist() == list(range(here.sum()))
            assert not real[here][0] or len(set(document_of[batch["tokens"][row][here]])) == 1
    assert plan.padding == pytest.approx(1 - mask.mean())


def test_it_is_tight_and_stored(tmp_path):
    lengths = np.random.default_rng(0).integers(2, 300, 2000)
    starts = np.concatenate([[0], np.cumsum(lengths)])
    plan = pack(starts, 1024)
    assert plan.padding < 0.01 and len(plan) == -(-int((lengths - 1).sum()) // 1024)
    plan.save(tmp_path / "plan")
    again = load_packing(tmp_path / "plan")
    tokens = np.arange(starts[-1])
    one, two = (Batches(tokens, 3, 1024, 5, packing=p).at(9) for p in (plan, again))
    assert all(torch.equal(one[name], two[name]) for name in one) and again.data == plan.data


@pytest.mark.parametrize(
    "make, message",
    [
        (lambda p: pack(np.array([0, 1, 2]), 8), "2 documents without a label"),
        (lambda p: pack(np.array([5, 1]), 8), "wanted rising starts"),
        (lambda p: Batches(COUNTING, 2, 9, 0, packing=pack(np.array([0, 20]), 8)), "plan of rows of 8 .* rows of 9"),
        (lambda p: Batches(COUNTING[:9], 2, 8, 0, packing=pack(np.array([0, 20]), 8)), "up to token 19"),
        (
            lambda p: Batches(COUNTING, 2, 8, 0, packing=pack(np.array([0, 20]), 8), documents=0),
            "got split, documents or",
        ),
        (lambda p: load_packing(p), "damaged plan"),
    ],
)
def test_errors_for_people(tmp_path, make, message):
    tmp_path.joinpath("x").write_bytes(b"fmplan01" + bytes(40))
    with pytest.raises(ValueError, match=message):
        make(tmp_path / "x")


def test_a_plan_of_another_corpus_is_refused(tmp_path):
    corpus = write_indexed(tmp_path / "a", [np.arange(10)] * 5, np.uint16)
    other = write_indexed(tmp_path / "b", [np.arange(7)] * 20, np.uint16)
    plan = pack(corpus.document_starts(), 8)
    Batches(corpus, 2, 8, seed=0, packing=plan)
    with pytest.raises(ValueError, match="packing: got a plan in which tokens .* are of one document, wanted"):
        Batches(other, 2, 8, seed=0, packing=plan)
