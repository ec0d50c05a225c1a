"""Megatron's order: sample by sample what an independent rewrite of its GPTDataset gives; stored once, read again."""

import itertools
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from fmegatron.data import Batches, Megatron, megatron_split, write_indexed
from fmegatron.layout import Mesh

S = 16


def gpt_dataset(lengths, tokens, chosen, seed, wanted, extra):
    """Samples [n, S + 1] (S without extra) of a GPTDataset, made as its three index files say: documents shuffled,
    (document, offset) of each sample found by a walk, samples shuffled."""
    chosen, starts = list(chosen), np.concatenate([[0], np.cumsum(lengths)])
    per_epoch, epochs = int(sum(lengths[d] for d in chosen)), 1
    while wanted is not None and epochs * per_epoch < wanted * S + extra:
        epochs += 1
    separate, before = False, 0
    if epochs > 1:
        before = ((epochs - 1) * per_epoch - extra) // S
        separate = wanted - before < int(0.80 * ((per_epoch - extra) // S))
    random = np.random.RandomState(seed)
    documents = []
    for count in (epochs - 1, 1) if separate else (epochs,):
        index = np.mgrid[0:count, 0 : len(chosen)][1]
        index[:] = chosen
        index = index.reshape(-1).astype(np.int32)
        random.shuffle(index)
        documents += index.tolist()
    total = (epochs * per_epoch - extra) // S
    index, place, offset = [(0, 0)], 0, 0
    for _ in range(total):  # as build_sample_idx: documents are left as they are used up
        remaining = S + extra
        while remaining:
            there = lengths[documents[place]] - offset
            remaining -= there
            if remaining <= 0:
                offset += remaining + there - extra
                remaining = 0
            else:
                place, offset = place + 1, 0
        index.append((place, offset))
    first = before if separate else total
    shuffle = np.arange(first, dtype=np.uint32)
    random.shuffle(shuffle)
    rest = np.arange(first, total, dtype=np.uint32)
    if first != total:
        random.shuffle(rest)
    samples = []
    for number in [*shuffle.tolist(), *rest.tolist()]:
        (place, offset), sample = index[number], []
        while len(sample) < S + extra:
            start = starts[documents[place]]
            sample += tokens[start + offset : start + lengths[documents[place]]].tolist()
            place, offset = place + 1, 0
        samples.append(sample[: S + extra])
    return np.array(samples)


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    random = np.random.default_rng(3)
    lengths = random.integers(1, 40, 120)
    path = tmp_path_factory.mktemp("megatron") / "corpus"
    ids = random.integers(0, 60000, int(lengths.sum()))
    return write_indexed(path, np.split(ids, np.cumsum(lengths)[:-1]), np.uint16), lengths


SPLITS = megatron_split(SimpleNamespace(sequences=120), "900, 60, 40")
WANTED = [None, 40, 130, 300, 360, 410]
CASES = list(itertools.product((1234, 0, 2**32 - 1), (None, SPLITS[0]), WANTED, (True, False)))


def test_every_sample(corpus):
    tokens, lengths = corpus
    separate = 0
    for seed, split, wanted, extra in CASES:
        samples = gpt_dataset(lengths, tokens[:], range(*(split or (0, 120))), seed, wanted, int(extra))
        order = Megatron(wanted, split, extra, keep=False)
        batches = Batches(tokens, 1, S, seed, order=order)
        assert batches.windows == len(samples)
        got = batches.read(np.arange(len(samples)))
        assert np.array_equal(got["tokens"], samples[:, :S]), (seed, split, wanted, extra)
        if extra:
            assert np.array_equal(got["labels"], samples[:, 1:]) and "mask" not in got
        else:
            assert np.array_equal(got["labels"][:, :-1], samples[:, 1:]) and not got["mask"][:, -1].any()
            assert got["mask"][:, :-1].all()
        separate += wanted == 410
    assert separate and SPLITS == [(0, 108), (108, 115), (115, 120)]


def test_documents_ranks_and_the_end(corpus):
    tokens, lengths = corpus
    batches = Batches(tokens, 4, S, 7, order=Megatron(100, keep=False), documents=True)
    batch, layout = batches.at(3), batches.layout(Mesh(dp=2))
    parts = [batches.for_rank(layout, rank).at(3) for rank in range(2)]
    assert all(torch.equal(torch.cat([part[n] for part in parts]), batch[n]) for n in batch)
    known = {tuple(tokens[a:b].tolist()) for a, b in map(tokens.document, range(120))}
    inner = []
    many = batches.read(np.arange(100))
    for row, ids in enumerate(many["documents"]):
        inner += [tuple(many["tokens"][row][ids == d].tolist()) for d in range(1, int(ids[-1]))]
        assert np.array_equal(many["mask"][row][:-1], ids[1:] == ids[:-1])
    assert inner and known.issuperset(inner)
    with pytest.raises(ValueError, match=r"got sample .*, wanted 0 to .* Megatron\(samples=steps \* batch_size\)"):
        batches.at(200)
    later = Batches(tokens, 6, S, 7, order=Megatron(100, keep=False)).after(batches.samples(3), 3)
    assert torch.equal(later.at(3)["tokens"][:4], batch["tokens"])


def test_a_rest_is_padded(corpus):
    tokens, lengths = corpus
    batches = Batches(tokens, 1, S, 1, order=Megatron(drop_last=False, keep=False))
    got = batches.read(np.arange(batches.windows))
    assert batches.windows == -(-(len(tokens) - 1) // S)
    assert int(got["mask"].sum()) == len(tokens) - 1 and sorted(got["mask"].sum(1))[1] == S


def test_it_is_stored_beside_the_data(corpus):
    tokens, _ = corpus
    folder = {p.name for p in Path(tokens.prefix).parent.iterdir()}
    first = Batches(tokens, 2, S, 5, order=Megatron(200)).at(4)
    (made,) = [p for p in Path(tokens.prefix).parent.iterdir() if p.name not in folder]
    before = made.stat().st_mtime_ns
    assert made.suffix == ".order" and torch.equal(
        Batches(tokens, 2, S, 5, order=Megatron(200)).at(4)["tokens"], first["tokens"]
    )
    assert made.stat().st_mtime_ns == before
    made.write_bytes(made.read_bytes()[:-300])
    with pytest.warns(RuntimeWarning, match="made anew: .*damaged plan"):
        again = Batches(tokens, 2, S, 5, order=Megatron(200)).at(4)
    assert torch.equal(again["tokens"], first["tokens"]) and made.stat().st_mtime_ns > before
    made.unlink()


@pytest.mark.parametrize(
    "make, message",
    [
        (lambda t: Batches(t[:], 1, S, 0, order="megatron"), "tokens of ndarray, wanted data.IndexedTokens"),
        (lambda t: Batches(t, 1, S, 0, order="random"), "order: got 'random', wanted 'own', 'megatron'"),
        (lambda t: Batches(t, 1, S, 2**32, order=Megatron(keep=False)), "seed: got 4294967296"),
        (lambda t: Batches(t, 1, S, 0, split=(0, 50), order="megatron"), "got split, documents or another order"),
        (lambda t: Batches(t, 1, S, 0, order=Megatron(sequences=(5, 500))), r"sequences: got \(5, 500\)"),
        (lambda t: Batches(t, 1, 99999, 0, order=Megatron(keep=False)), "wanted one window of 100,000"),
        (lambda t: Megatron(samples=0), "samples: got 0"),
        (lambda t: megatron_split(t, "0, 0"), "wanted shares of 0 or more"),
    ],
    ids=["tokens", "order", "seed", "split", "sequences", "short", "samples", "shares"],
)
def test_errors_for_people(corpus, make, message):
    with pytest.raises(ValueError, match=message):
        make(corpus[0])


def test_tokens_and_labels_of_one_row_are_apart(tmp_path):
    tokens = write_indexed(tmp_path / "c", [np.arange(1, 40)], np.uint16)
    batch = Batches(tokens, 1, 8, seed=0, order=Megatron(keep=False)).at(0)
    labels = batch["labels"].clone()
    batch["tokens"].fill_(0)
    assert batch["labels"].equal(labels)
