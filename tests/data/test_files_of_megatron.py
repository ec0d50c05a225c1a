"""Pairs and orders of megatron-core itself: its builder's files are ours to the byte, its samples those of our order.

Its blends choose as ours do under rule="megatron". What independent rewrites give is in test_indexed.py,
test_megatron_order.py and test_blend.py, which need no other environment.
"""

import itertools
import json
from pathlib import Path

import numpy as np
import pytest
import torch

from fmegatron.data import Batches, IndexedTokens, Megatron
from fmegatron.data.indexed_writer import IndexedWriter, merge_indexed
from fmegatron.data.shares import Shares
from tests import peer_python

DTYPES = ("uint8", "int8", "int16", "int32", "int64", "float32", "float64", "uint16")
KINDS = ("plain", "modes", "empty", "nothing")
SETTINGS = list(itertools.product((1234, 2**32 - 1), ((0, 90), (20, 77)), (None, 40, 200, 330), (True, False)))
LINES = [
    {"corpus": "order.ours", "seed": seed, "sequences": part, "samples": samples, "extra_token": extra,
     "drop_last": True, "seq_len": 16}
    for seed, part, samples, extra in SETTINGS
]  # fmt: skip
LINES += [{**line, "drop_last": False} for line in LINES if line["samples"] is None]

WEIGHTS = [[0.7, 0.3], [0.5, 0.5], [1.0], [0.945, 0.02, 0.015, 0.01, 0.01], [0.25] * 4, [0.6, 0.3, 0.1], [6.0, 3, 1]]
WEIGHTS += (np.random.default_rng(0).integers(1, 20, (50, 4)) / 10).tolist()


def given(dtype, kind):
    """Arrays that describe a corpus: several sequences a document, some empty, documents without any, no document."""
    random = np.random.default_rng(DTYPES.index(dtype) * len(KINDS) + KINDS.index(kind))
    documents = random.integers(1, 4, 0 if kind == "nothing" else 12)
    lengths = random.integers(1, 30, int(documents.sum()))
    if kind == "empty":
        lengths[::3] = 0
        documents = np.insert(documents, [0, 4, 4, 12], 0)
    arrays = {"ids": random.integers(0, 120, int(lengths.sum())).astype(dtype), "lengths": lengths,
              "documents": documents}  # fmt: skip
    return arrays | ({"modes": random.integers(0, 4, len(lengths)).astype(np.int8)} if kind == "modes" else {})


def write_ours(prefix, arrays):
    sequences = iter(np.split(arrays["ids"], np.cumsum(arrays["lengths"])[:-1]) if len(arrays["lengths"]) else [])
    modes = iter(arrays["modes"].tolist() if "modes" in arrays else itertools.repeat(0))
    with IndexedWriter(prefix, arrays["ids"].dtype) as writer:
        for count in arrays["documents"].tolist():
            for _ in range(count):
                writer.add(next(sequences), next(modes))
            writer.end_document()


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """What megatron-core made of these files; it has compared what it read with the arrays."""
    folder = tmp_path_factory.mktemp("megatron")
    for dtype, kind in itertools.product(DTYPES, KINDS):
        np.savez(folder / f"{dtype}-{kind}.npz", **given(dtype, kind))
        write_ours(folder / f"{dtype}-{kind}.ours", given(dtype, kind))
    random = np.random.default_rng(3)
    lengths = random.integers(0, 60, 90)
    ids = random.integers(0, 60_000, int(lengths.sum())).astype(np.uint16)
    write_ours(folder / "order.ours", {"ids": ids, "lengths": lengths, "documents": np.full(30, 3)})
    (folder / "orders.json").write_text(json.dumps(LINES))
    (folder / "weights.json").write_text(json.dumps(WEIGHTS))
    peer_python.run(Path(__file__).with_name("files_of_megatron.py"), folder)
    return folder


@pytest.mark.parametrize("dtype", DTYPES)
def test_pairs_are_equal_to_the_byte_and_read_both_ways(folder, dtype):
    for kind in KINDS:
        theirs, arrays = folder / f"{dtype}-{kind}.theirs", given(dtype, kind)
        for suffix in (".bin", ".idx"):
            ours = folder / f"{dtype}-{kind}.ours{suffix}"
            assert ours.read_bytes() == Path(f"{theirs}{suffix}").read_bytes(), (kind, suffix)
        tokens = IndexedTokens(theirs, verify=True)
        assert tokens.dtype == dtype and np.array_equal(tokens[:], arrays["ids"])
        assert tokens.lengths[:].tolist() == arrays["lengths"].tolist()
        assert (tokens.documents, tokens.sequences) == (len(arrays["documents"]), len(arrays["lengths"]))
        firsts = np.cumsum([0, *arrays["documents"]])
        assert tokens.document_starts().tolist() == np.cumsum([0, *arrays["lengths"]])[firsts].tolist()
        assert "modes" not in arrays or tokens.modes[:].tolist() == arrays["modes"].tolist()


def test_merged_pairs_are_equal_to_the_byte(folder):
    parts = sorted(f"uint16-{kind}.theirs" for kind in KINDS if kind != "modes")
    merge_indexed(folder / "merged.ours", [folder / part for part in parts])
    for suffix in (".bin", ".idx"):
        assert (folder / f"merged.ours{suffix}").read_bytes() == (folder / f"merged.theirs{suffix}").read_bytes()


@pytest.mark.parametrize("number", range(len(LINES)))
def test_every_sample_is_that_of_its_dataset(folder, number):
    line, samples = LINES[number], np.load(folder / "samples.npz")[str(number)]
    tokens = IndexedTokens(folder / line["corpus"])
    order = Megatron(line["samples"], tuple(line["sequences"]), line["extra_token"], line["drop_last"], keep=False)
    batches = Batches(tokens, len(samples), 16, line["seed"], order=order)
    assert batches.windows == len(samples)
    found = batches.at(0)
    real = found.get("mask", torch.ones_like(found["tokens"], dtype=torch.bool)).numpy()
    assert np.array_equal(found["tokens"].numpy(), samples[:, :-1])
    assert np.array_equal(found["labels"].numpy()[real], samples[:, 1:][real])


def test_a_blend_chooses_as_its_helper_does(folder):
    samples = np.load(folder / "samples.npz")
    for number, weights in enumerate(WEIGHTS):
        which, sample = Shares([(0, weights)], "megatron").of(np.arange(2000))
        assert np.array_equal(np.stack([which, sample]), samples[f"blend{number}"]), weights
