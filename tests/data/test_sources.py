"""Other people's data: sources and iterators as batches, fill-in-the-middle, descriptions."""

import dataclasses
import functools
import json

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fmegatron import data, loop
from fmegatron.checkpoint import rank_state
from fmegatron.data import Batches, Blend, FillInTheMiddle, Mapped, SourceBatches, Stream
from fmegatron.data.reader import ahead
from fmegatron.layout import Mesh
from tests.data.test_batches import COUNTING

ROWS = [np.arange(i, i + 2 + i % 5) for i in range(0, 230, 10)]


def test_each_item_once_an_epoch_on_any_mesh():
    batches = SourceBatches(ROWS, 6, 8, seed=4)
    first = torch.cat([batches.at(step)["tokens"][:, 0] for step in range(8)])
    for epoch in range(2):
        assert first[epoch * 23 : epoch * 23 + 23].sort().values.tolist() == [int(row[0]) for row in ROWS]
    batch, layout = batches.at(3), batches.layout(Mesh(dp=3))
    parts = [batches.for_rank(layout, rank).at(3) for rank in range(3)]
    assert all(torch.equal(torch.cat([part[n] for part in parts]), batch[n]) for n in batch)
    assert torch.equal(batch["labels"][batch["mask"]], batch["tokens"][batch["mask"]] + 1)
    assert batch["mask"].sum(1).tolist() == [len(ROWS[int(t) // 10]) - 1 for t in batch["tokens"][:, 0]]
    blend = Blend([(1, SourceBatches(ROWS, 4, 8, 0)), (1, Batches(COUNTING, 4, 8, 0))])
    assert blend.at(5)["mask"].shape == (4, 8)


def test_items_may_be_mappings():
    items = [{"tokens": [1, 2, 3], "mask": [False, True, True], "text": "abc"}] * 2
    batch = SourceBatches(items, 1, 5, 0).at(0)
    assert batch.keys() == {"tokens", "labels", "mask", "padding"}
    assert batch["padding"].tolist() == [[False, False, False, True, True]]
    assert batch["tokens"].tolist() == [[1, 2, 3, 0, 0]] and batch["labels"].tolist() == [[2, 3, 0, 0, 0]]
    assert batch["mask"].tolist() == [[False, True, False, False, False]]
    items = [{"tokens": np.array([7, 8]), "labels": [8, 9], "positions": [4, 5]}]
    batch = SourceBatches(items, 1, 2, 0, zigzag=1).at(0)
    assert batch["labels"].tolist() == [[8, 9]] and batch["positions"].tolist() == [[4, 5]] and batch["mask"].all()


@pytest.mark.parametrize(
    "mask",
    [[0.0, 1.0, 1.0], np.uint8([0, 1, 1]), torch.tensor([0, 1, 1]).bool(), torch.tensor([0, 1, 1]).bfloat16()],
    ids=["floats", "uint8", "bool", "bfloat16"],
)  # fmt: skip
def test_a_mask_is_of_any_dtype(mask):
    row = {"tokens": [1, 2, 3], "labels": [2, 3, 4], "mask": mask}
    assert SourceBatches([row], 1, 4, 0).at(0)["mask"].tolist() == [[False, True, True, False]]


def test_labels_that_are_none_are_masked():
    rows = [{"tokens": [1, 2, 3], "labels": [-100, 3, -100]}, {"tokens": [1, 2, 3], "labels": [2, -100, 4]}]
    batch = SourceBatches(rows, 2, 3, 0, shuffle=False).at(0)
    assert batch["labels"].tolist() == [[0, 3, 0], [2, 0, 4]]
    assert batch["mask"].tolist() == [[False, True, False], [True, False, True]]
    assert not SourceBatches([np.array([5])], 1, 3, 0).at(0)["mask"].any(), "one token has no label"


def test_items_without_tokens_have_the_fields_of_the_others():
    rows = [{"tokens": [1, 2], "positions": [4, 5]}, {"tokens": [], "positions": []}]
    assert SourceBatches(rows, 2, 3, 0, shuffle=False).at(0)["positions"].tolist() == [[4, 5, 0], [0, 0, 0]]


@pytest.mark.parametrize("seed", [np.int64(7), torch.tensor(7)], ids=["numpy", "torch"])
def test_seeds_are_integers_of_any_kind(seed):
    for make in (lambda seed: Batches(COUNTING, 4, 8, seed), lambda seed: SourceBatches(ROWS, 4, 8, seed)):
        assert torch.equal(make(seed).at(1)["tokens"], make(7).at(1)["tokens"])
        assert json.dumps(make(seed).describe()) == json.dumps(make(7).describe())
        for wrong in (None, 0.5, "7"):
            with pytest.raises(ValueError, match=r"(Source)?Batches: seed: got .*, wanted a whole number"):
                make(wrong)


class Loader:
    """As torchdata's: iterates, and knows where it is."""

    def __init__(self, count):
        self.count, self.at = count, 0

    def __iter__(self):
        while self.at < self.count:
            self.at += 1
            yield {"tokens": torch.tensor([self.at])}
        self.at = 0

    def state_dict(self):
        return {"at": self.at}

    def load_state_dict(self, state):
        self.at = state["at"]


def test_a_stream_goes_on_from_its_state():
    stream = Stream(Loader(5))
    got = [int(stream.at(n)["tokens"]) for n in range(12)]
    assert got == [1, 2, 3, 4, 5, 1, 2, 3, 4, 5, 1, 2]
    first = Stream(Loader(5))
    assert [int(first.at(n)["tokens"]) for n in range(8)] == got[:8]
    leaf, again = rank_state.pack(first.state()), Stream(Loader(5))  # a JSON value
    again.restore(rank_state.unpack(leaf))
    assert [int(again.at(n)["tokens"]) for n in (8, 9, 10)] == got[8:11]
    with ahead(Stream(Loader(5))) as batch_at:
        assert [int(batch_at(n)["tokens"]) for n in range(6)] == got[:6]
    with pytest.raises(ValueError, match="got position 3, wanted 12, as an iterable only goes on"):
        stream.at(3)
    with pytest.raises(ValueError, match="got a list.* without state_dict, wanted an iterable with state_dict"):
        Stream([1, 2])
    with pytest.raises(RuntimeError, match="no item in a new epoch"):
        Stream(Loader(0)).at(0)


def test_a_stream_keeps_states_of_their_time():
    """Also of an iterable whose state is one dict that it changes."""

    class Own:
        def __init__(self):
            self.now = {"n": 0}

        def __iter__(self):
            while True:
                self.now["n"] += 1
                yield self.now["n"]

        def state_dict(self):
            return self.now

        def load_state_dict(self, state):
            self.now = state

    stream, states = Stream(Own()), []
    for n in range(6):
        states.append(stream.state())
        assert stream.at(n) == n + 1
    assert states == [{"next": n, "iterable": {"n": n}} for n in range(6)]
    again = Stream(Own())
    again.restore(states[2])
    assert again.at(2) == 3 and states[2] == {"next": 2, "iterable": {"n": 2}}


@settings(max_examples=40, deadline=None)
@given(seed=st.integers(0, 2**40), sample=st.integers(0, 10**9), spm=st.sampled_from([0.0, 0.5, 1.0]))
def test_fill_in_the_middle_moves_tokens_and_loses_only_the_end(seed, sample, spm):
    ids = COUNTING[100:141].copy()
    ids[[12, 30]] = 50
    fim = FillInTheMiddle(prefix=1, suffix=2, middle=3, seed=seed, rate=1.0, spm=spm, eod=50)
    row = {"tokens": ids[:-1], "labels": ids[1:]}
    new, again = fim(row, sample), fim(row, sample)
    assert all(np.array_equal(new[name], again[name]) for name in new)
    out = np.append(new["tokens"], new["labels"][-1])
    assert len(out) == 41 and np.array_equal(out[1:], new["labels"])
    document = out[: out.tolist().index(50)].tolist()
    cut = [document.index(i) for i in (1, 2, 3)]
    if cut[1] == cut[0] + 1 and document[0] == 1 and spm == 1.0:
        last, first = document[2 : cut[2]], document[cut[2] + 1 :]
        assert first + last == list(range(100, 112))
    if spm == 0.0:
        first, last, middle = document[1 : cut[1]], document[cut[1] + 1 : cut[2]], document[cut[2] + 1 :]
        assert first + middle + last == list(range(100, 112))
    plain = FillInTheMiddle(1, 2, 3, seed, rate=0.0, eod=50)(row, sample)
    assert np.array_equal(plain["tokens"], row["tokens"])


def test_mapped_batches():
    fim = FillInTheMiddle(1, 2, 3, seed=9, eod=7, rate=1.0)
    plain = Batches(COUNTING % 97, 4, 24, seed=1)
    batches = Mapped(plain, fim)
    batch = batches.at(2)
    rank = [batches.for_rank(batches.layout(Mesh(dp=2)), r).at(2)["tokens"] for r in range(2)]
    assert torch.equal(torch.cat(rank), batch["tokens"]) and not torch.equal(batch["tokens"], plain.at(2)["tokens"])
    one = fim({name: x[1].numpy() for name, x in plain.at(2).items()}, 9)
    assert np.array_equal(batch["tokens"][1], one["tokens"])
    half, row = FillInTheMiddle(200, 201, 202, seed=9), {name: x[0].numpy() for name, x in plain.at(2).items()}
    assert 150 < sum(200 in half(row, n)["tokens"] for n in range(400)) < 250
    later = Mapped(Batches(COUNTING % 97, 6, 24, seed=1), fim).after(8, 2)
    assert torch.equal(later.at(2)["tokens"][:4], batch["tokens"])
    with pytest.raises(ValueError, match="got rows of tokens, labels, documents, positions, mask, wanted"):
        Mapped(Batches(COUNTING % 97, 4, 24, seed=1, documents=7), fim).at(0)


@dataclasses.dataclass(frozen=True)
class Config:
    """Of a run without settings."""


def changes(before, now):
    was, is_ = (loop.Settings(Config(), data=batches.describe()) for batches in (before, now))
    return is_.changes(json.loads(json.dumps(was.metadata(0)))).refused


def test_a_resume_on_other_data_names_what_differs(tmp_path):
    ids = [np.arange(9) + i for i in range(50)]
    tokens = data.write_indexed(tmp_path / "a", ids, "uint16")
    other = data.write_indexed(tmp_path / "b", [*ids[:-1], ids[-1] + 1], "uint16")
    base = Batches(tokens, 4, 8, 1)
    assert changes(base, Batches(data.IndexedTokens(tmp_path / "a"), 8, 8, 1)) == ()
    named = {
        "tokens": Batches(other, 4, 8, 1),
        "seed": Batches(tokens, 4, 8, 2),
        "order": Batches(tokens, 4, 8, 1, order=data.Megatron(keep=False)),
        "documents": Batches(tokens, 4, 8, 1, documents=True),
        "packing": Batches(tokens, 4, 8, 1, packing=data.pack(tokens.document_starts(), 8)),
        "parts": Blend([(1, base)]),
        "function": Mapped(base, FillInTheMiddle(1, 2, 3, 4)),
        "items": SourceBatches(ids, 4, 10, 1),
    }
    for name, batches in named.items():
        (found,) = changes(base, batches)
        assert f'"{name}"' in found, (name, found)
    before = base.describe()
    (tmp_path / "a.json").write_text(json.dumps({"tokenizer": {"kind": "byte"}}))
    assert {n for n, x in base.describe().items() if x != before[n]} == {"tokenizer"}
    (found,) = changes(Blend([(1, base), (2, base)]), Blend([(1, base), (3, base)]))
    assert '"weight": 2' in found and '"weight": 3' in found
    (found,) = changes(named["items"], SourceBatches([*ids[:-1], ids[0]], 4, 10, 1))
    assert "digest" in found


@pytest.mark.parametrize(
    "make, message",
    [
        (lambda: SourceBatches([], 2, 8, 0), "wanted items by number, source.i., and a length above 0"),
        (lambda: SourceBatches(iter(ROWS), 2, 8, 0), "give an iterable to data.Stream"),
        (lambda: SourceBatches([np.arange(12)], 1, 8, 0).at(0), "item 0: got 11 of 'tokens', 11 of 'labels'"),
        (lambda: SourceBatches([{"text": "a"}], 1, 8, 0).at(0), "got the fields text, wanted 'tokens'"),
        (lambda: SourceBatches([np.zeros(3)], 1, 8, 0).at(0), "item 0: got .*, wanted ids"),
        (
            lambda: SourceBatches([{"tokens": [1, 2], "mask": [0.0, 0.5]}], 1, 8, 0).at(0),
            "item 0: got 0.5 in 'mask', wanted 0 and 1",
        ),
        (lambda: SourceBatches([{"tokens": [1], "mask": [[1]]}], 1, 8, 0).at(0), "item 0: got 'mask' as .*numbers 0"),
        (
            lambda: SourceBatches([{"tokens": [1], "labels": [1.5]}], 1, 8, 0).at(0),
            "item 0: got 'labels' as .*integers",
        ),
        (lambda: SourceBatches([{"tokens": [1], "labels": [-1]}], 1, 8, 0).at(0), "item 0: got -1 in 'labels', wanted"),
        (lambda: SourceBatches([{"tokens": [1, -100]}], 1, 8, 0).at(0), "item 0: got -100 in 'tokens', wanted ids"),
        (lambda: SourceBatches([[1, 2, -100]], 1, 8, 0).at(0), "item 0: got -100 in 'tokens', wanted ids"),
        (
            lambda: SourceBatches([{"tokens": [1, 2], "a": [1, 2]}, {"tokens": [1]}], 2, 8, 0, shuffle=False).at(0),
            "item 1: got the fields labels, mask, padding, tokens, wanted .* item 0, a, labels, mask, padding, tokens",
        ),
        (lambda: Mapped(COUNTING, len), "wanted Batches"),
        (lambda: Mapped(Batches(COUNTING, 4, 8, 0).after(9, 2), len), r"got batches with after\(...\), wanted"),
        (lambda: FillInTheMiddle(1, 2, 3, 4, rate=2), "got rate=2"),
    ],
)
def test_errors_for_people(make, message):
    with pytest.raises(ValueError, match=message):
        make()


# ---- what a mapped function is described by
def shifted(k, also=None):
    def shift(row, number):
        return {name: x + k for name, x in row.items()} if also is None else also(row, number)

    return shift


def itself():
    def function(row, number):
        return function

    return function


class Shift:
    def __init__(self, k):
        self.k = k

    def __repr__(self):
        return f"Shift({self.k})"

    def apply(self, row, number):
        return {name: x + self.k for name, x in row.items()}


@pytest.mark.parametrize(
    "pair",
    [
        (shifted(1), shifted(2)),
        (shifted(np.arange(3)), shifted(np.arange(1, 4))),
        (shifted(torch.ones(2)), shifted(torch.ones(2, dtype=torch.bfloat16))),
        (shifted(1, shifted(1)), shifted(1, shifted(2))),
        (functools.partial(shifted, k=np.arange(3)), functools.partial(shifted, k=np.arange(4))),
        (Shift(1).apply, Shift(2).apply),
        (shifted([np.zeros(5000)]), shifted([np.eye(1, 5000, 2500)[0]])),
        (shifted({"a": (torch.zeros(5000),)}), shifted({"a": (torch.eye(1, 5000),)})),
    ],
)
def test_functions_that_close_over_other_values_are_told_apart(pair):
    """Else a resume with other rows would see no change."""
    batches = Batches(COUNTING % 97, 4, 24, seed=1)
    first, second = (Mapped(batches, function).describe()["function"] for function in pair)
    assert first != second and first == Mapped(batches, pair[0]).describe()["function"]


def test_functions_without_a_text_are_refused():
    batches = Batches(COUNTING % 97, 4, 24, seed=1)
    for function, words in (
        (lambda row, number: row, "got a lambda, which another one cannot be told from"),
        (shifted(object()), "whose text is another in every process"),
        (shifted(lambda: 1), "got a lambda"),
        (itself(), "got a function, which closes over itself"),
    ):
        with pytest.raises(ValueError, match=words):
            Mapped(batches, function).describe()

    def plain(row, number):
        return row

    words = {"a", "b", "c", "d", "e"}  # its repr is another in every process
    assert "k': \"set('a', 'b', 'c', 'd', 'e')\"" in Mapped(batches, shifted(words)).describe()["function"]
    named = Mapped(batches, plain).describe()["function"]
    assert named == plain.__qualname__  # as before: a run that was begun goes on
