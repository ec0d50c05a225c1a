"""Documents inside of windows, and the zigzag order: what a batch states of its tokens is true of each of them."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fmegatron.data import Batches, EvaluationBatches
from fmegatron.layout import Mesh
from fmegatron.layout.zigzag import zigzag
from fmegatron.testing import split
from tests.data.test_batches import COUNTING

EOD = 0


class Known:
    """Tokens that know where their documents begin."""

    def __init__(self, ids, starts):
        self.ids, self.starts = ids, np.asarray(starts, dtype=np.int64)

    def __len__(self):
        return len(self.ids)

    def __getitem__(self, index):
        return self.ids[index]

    def bounds(self, start, stop):
        """Beginnings of documents strictly between."""
        return np.unique(self.starts[(self.starts > start) & (self.starts < stop)])


@settings(max_examples=40, deadline=None)
@given(starts=st.lists(st.integers(0, 200), max_size=60), seq_len=st.integers(1, 30), seed=st.integers(0, 99))
def test_each_token_has_its_document_its_position_and_its_label(starts, seq_len, seed):
    document_of = np.searchsorted(np.sort(starts), np.arange(200), side="right")
    first_of = np.concatenate([[0], np.sort(starts)])[document_of]
    batches = Batches(Known(COUNTING[:200], starts), 3, seq_len, seed, documents=True)
    batch = {name: x.numpy() for name, x in batches.at(seed).items()}
    for row in range(3):
        at, begin = batch["tokens"][row], batch["tokens"][row, 0]
        ids = document_of[at]
        assert np.array_equal(batch["positions"][row], at - np.maximum(first_of[at], begin))
        assert np.array_equal(batch["mask"][row], ids == document_of[batch["labels"][row]])
        same = ids[:, None] == ids[None]
        assert np.array_equal(same, batch["documents"][row][:, None] == batch["documents"][row][None])


@settings(max_examples=30, deadline=None)
@given(ids=st.lists(st.integers(0, 3), min_size=40, max_size=90), seed=st.integers(0, 99))
def test_an_id_that_ends_documents_is_a_bound_behind_it(ids, seed):
    ids = np.array(ids)
    by_id, known = (
        Batches(tokens, 2, 7, seed, documents=documents).at(1)
        for tokens, documents in ((ids, EOD), (Known(ids, np.flatnonzero(ids == EOD) + 1), True))
    )
    assert by_id.keys() == known.keys() == {"tokens", "labels", "documents", "positions", "mask"}
    assert all(torch.equal(by_id[name], known[name]) for name in by_id)


@pytest.mark.parametrize("n", [2, 3, 6])
@pytest.mark.parametrize("documents", [False, 7])
def test_zigzag_is_an_order_of_the_columns(n, documents):
    ids = COUNTING % 11
    for kind in ({"batch_size": 12, "seq_len": 36}, {"batch_size": 10, "seq_len": 12, "windows": 9}):
        make = EvaluationBatches if "windows" in kind else Batches
        more = {} if "windows" in kind else {"seed": 4}
        plain, batches = (make(ids, **kind, **more, documents=documents, zigzag=z) for z in (1, n))
        order = torch.cat([torch.arange(a, b) for a, b in zigzag(kind["seq_len"], n)])
        wanted = {"positions": torch.arange(kind["seq_len"]).expand(kind["batch_size"], -1)} | plain.at(0)
        got = batches.at(0)
        assert got.keys() == wanted.keys()
        assert all(torch.equal(got[name], wanted[name][:, order]) for name in got)
        mesh = Mesh(dp=2, cp=n)
        parts = split(got, {name: batches.layout(mesh).replace(dtype=x.dtype) for name, x in got.items()})
        for rank in range(mesh.size):
            mine = batches.for_rank(batches.layout(mesh), rank).at(0)
            assert all(torch.equal(mine[name], parts[rank][name]) for name in got)


def test_evaluation_counts_the_tokens_that_have_a_label():
    evaluation = EvaluationBatches(COUNTING[:100] % 5, 4, 9, documents=0)
    assert [evaluation.real_tokens(n) for n in range(3)] == [int(evaluation.at(n)["mask"].sum()) for n in range(3)]
    assert sum(evaluation.real_tokens(n) for n in range(3)) == 11 * 9 - sum(t % 5 == 0 for t in range(99))


@pytest.mark.parametrize(
    "make, message",
    [
        (lambda: Batches(COUNTING, 4, 8, 0, documents=True), "got True and tokens of ndarray, .* documents=tokenizer"),
        (lambda: Batches(COUNTING, 4, 8, 0, documents=-1), "documents: got -1, wanted True, False or the id"),
        (lambda: Batches(COUNTING, 4, 8, 0, documents="eod"), "documents: got 'eod'"),
        (lambda: Batches(COUNTING, 4, 6, 0, zigzag=2), "zigzag: got 6 positions for 2 ranks, wanted a multiple of 4"),
        (lambda: Batches(COUNTING, 4, 8, 0, zigzag=0), "zigzag: got 8 positions for 0 ranks"),
        (
            lambda: (b := Batches(COUNTING, 4, 8, 0, zigzag=2)).for_rank(b.layout(Mesh(dp=2)), 0),
            r"for 2 ranks and a layout that splits its sequences over 1, wanted a multiple; give .*zigzag=1",
        ),
    ],
)
def test_errors_for_people(make, message):
    with pytest.raises(ValueError, match=message):
        make()
