"""Corpora in an object store: a local S3 server gives what the files give, in few requests, and its errors are said."""

import json

import numpy as np
import pytest
import tensorstore as ts

from fmegatron.data import Batches, ByteTokenizer, IndexedTokens, ranged, write_indexed
from fmegatron.data.fingerprint import fingerprint
from tests.checkpoint.s3_server import s3_endpoint

RANDOM = np.random.default_rng(0)
LENGTHS = RANDOM.integers(0, 4000, 350)
IDS = RANDOM.integers(0, 60_000, int(LENGTHS.sum()), dtype=np.uint16)  # two blocks


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """(the corpus in files, options of its store, the store)."""
    folder = tmp_path_factory.mktemp("corpus")
    tokens = write_indexed(folder / "c", np.split(IDS, np.cumsum(LENGTHS)[:-1]), np.uint16)
    (folder / "c.json").write_text(json.dumps({"tokenizer": {"kind": "byte"}}))
    with s3_endpoint() as url:
        options = {"endpoint": url, "aws_region": "us-east-1", "aws_credentials": {"type": "environment"}}
        store = ts.KvStore.open({"driver": "s3", "bucket": "ckpt", **options}).result()
        for kind in ("idx", "bin", "json"):
            store.write(f"a/c.{kind}", (folder / f"c.{kind}").read_bytes()).result()
        yield tokens, options, store


def test_an_object_store_gives_what_files_give(place, monkeypatch):
    tokens, options, _ = place
    asked, real = [], ranged.ranged
    monkeypatch.setattr(ranged, "ranged", lambda store, key, a, n: asked.append((key, a, n)) or real(store, key, a, n))
    there = IndexedTokens("s3://ckpt/a/c", options=options, verify=True)
    assert len(there) == len(tokens) == len(IDS) and there.documents == 350 and there.dtype == np.uint16
    asked.clear()
    for at in RANDOM.integers(0, len(IDS) - 3000, 40).tolist():
        assert np.array_equal(there[at : at + 3000], IDS[at : at + 3000])
    assert len(asked) == len({a for _, a, _ in asked}) == 2 and max(n for _, _, n in asked) <= 1 << 20
    assert there.document(17) == tokens.document(17)
    assert np.array_equal(there.bounds(10_000, 90_000), tokens.bounds(10_000, 90_000))
    assert np.array_equal(there.document_starts(), tokens.document_starts())
    for n in (0, 5):
        for name, x in Batches(tokens, 4, 512, 1, documents=True).at(n).items():
            assert bool((Batches(there, 4, 512, 1, documents=True).at(n)[name] == x).all()), name
    assert there.tokenizer == ByteTokenizer()
    assert Batches(there, 4, 512, 1).describe() == Batches(tokens, 4, 512, 1).describe()
    assert [x.tolist() for x in there.pieces([7, 600_000], 5)] == [IDS[a : a + 5].tolist() for a in (7, 600_000)]


def test_a_fingerprint_reads_places_and_no_blocks(tmp_path, monkeypatch):
    tokens = write_indexed(tmp_path / "c", [np.arange(1_200_000) % 9001], np.uint16)
    store = ts.KvStore.open("memory://").result()
    for kind in ("idx", "bin"):
        store.write(f"c.{kind}", (tmp_path / f"c.{kind}").read_bytes()).result()
    there = IndexedTokens("c", store=store)
    monkeypatch.setattr(ranged, "ranged", lambda *_: pytest.fail("a block was read"))
    assert fingerprint(there) == fingerprint(tokens) == fingerprint(tokens[:])


def test_the_cache_has_a_limit(place, monkeypatch):
    _, options, _ = place
    asked, real = [], ranged.ranged
    monkeypatch.setattr(ranged, "ranged", lambda store, key, a, n: asked.append(a) or real(store, key, a, n))
    there = IndexedTokens("s3://ckpt/a/c", options=options, cache_bytes=1 << 20)
    asked.clear()
    for at in (0, 9, 600_000, 0):
        there[at : at + 5]
    assert asked == [0, 1 << 20, 0]


def test_errors_of_a_store(place):
    _, options, store = place
    with pytest.raises(FileNotFoundError, match="is missing"):
        IndexedTokens("s3://ckpt/a/none", options=options)
    quick = {**options, "context": {"s3_request_retries": {"max_retries": 1, "initial_delay": "1ms"}}}
    with pytest.raises(OSError, match="NoSuchBucket|is missing"):
        IndexedTokens("s3://other/a/c", options=quick)
    with pytest.raises(OSError, match="cannot be read"):
        IndexedTokens("s3://ckpt/a/c", options={**quick, "endpoint": "http://127.0.0.1:9"})
    there = IndexedTokens("s3://ckpt/a/c", options=options)
    whole = store.read("a/c.bin").result().value
    for name, content in (("b", whole[:-1]), ("d", whole + b"\0")):
        store.write(f"a/{name}.idx", store.read("a/c.idx").result().value).result()
        store.write(f"a/{name}.bin", content).result()
        with pytest.raises(ValueError, match=rf"a/{name}.bin: got another size, wanted {len(whole):,}"):
            IndexedTokens(f"s3://ckpt/a/{name}", options=options)
    store.write("a/c.bin", whole[: len(whole) // 2]).result()  # while it is read
    try:
        with pytest.raises(OSError, match="cannot be read"):
            there[len(there) - 9 :]
        with pytest.raises(OSError, match="cannot be read"):
            there.pieces([0, len(there) - 9], 9)
    finally:
        store.write("a/c.bin", whole).result()
