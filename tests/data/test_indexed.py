""".bin/.idx: what others wrote is read, what is written others read, and no header leads anywhere but to an error."""

import os
import struct

import numpy as np
import pytest
import tensorstore as ts
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fmegatron.data import Batches, IndexedTokens, write_indexed
from fmegatron.data.indexed_writer import IndexedWriter, merge_indexed, token_dtype

DTYPES = {1: "u1", 2: "i1", 3: "<i2", 4: "<i4", 5: "<i8", 6: "<f8", 7: "<f4", 8: "<u2"}


def independent(documents, code, modes=None):
    """(idx, bin) as Megatron's builder writes them, by struct alone."""
    size = np.dtype(DTYPES[code]).itemsize
    lengths = [len(sequence) for document in documents for sequence in document]
    offsets = [sum(lengths[:i]) * size for i in range(len(lengths))]
    bounds = [0]
    for document in documents:
        bounds.append(bounds[-1] + len(document))
    idx = b"MMIDIDX\0\0" + struct.pack("<QBQQ", 1, code, len(lengths), len(bounds))
    idx += struct.pack(f"<{len(lengths)}i", *lengths) + struct.pack(f"<{len(offsets)}q", *offsets)
    idx += struct.pack(f"<{len(bounds)}q", *bounds) + (b"" if modes is None else struct.pack(f"<{len(modes)}b", *modes))
    data = b"".join(np.array(s, dtype=DTYPES[code]).tobytes() for d in documents for s in d)
    return idx, data


def parsed(idx, data):
    """(tokens, starts of the documents) that these bytes mean; None where they mean nothing. By struct alone."""
    try:
        magic, version, code, N, D = struct.unpack("<9sQBQQ", idx[:34])
        assert magic == b"MMIDIDX\0\0" and version == 1 and code in DTYPES and D > 0
        assert len(idx) in (34 + 12 * N + 8 * D, 34 + 13 * N + 8 * D)
        lengths = struct.unpack(f"<{N}i", idx[34 : 34 + 4 * N])
        offsets = struct.unpack(f"<{N}q", idx[34 + 4 * N : 34 + 12 * N])
        bounds = struct.unpack(f"<{D}q", idx[34 + 12 * N : 34 + 12 * N + 8 * D])
        ends = [0]
        for length in lengths:
            assert length >= 0
            ends.append(ends[-1] + length)
        size = np.dtype(DTYPES[code]).itemsize
        assert list(offsets) == [end * size for end in ends[:-1]] and len(data) == ends[-1] * size
        assert bounds[0] == 0 and bounds[-1] == N and list(bounds) == sorted(bounds)
    except (struct.error, AssertionError, OverflowError, MemoryError):
        return None
    return np.frombuffer(data, DTYPES[code]), [ends[b] for b in bounds]


def put(prefix, idx, data):
    prefix.with_suffix(".idx").write_bytes(idx)
    prefix.with_suffix(".bin").write_bytes(data)


texts = st.lists(st.lists(st.lists(st.integers(0, 100), max_size=5), max_size=4), max_size=6)


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    return tmp_path_factory.mktemp("indexed") / "corpus"


@settings(max_examples=60, deadline=None)
@given(documents=texts, code=st.sampled_from(sorted(DTYPES)), modes=st.booleans(), data=st.data())
def test_both_ways(place, documents, code, modes, data):
    sequences = [s for d in documents for s in d]
    marks = [data.draw(st.integers(0, 3)) for _ in sequences] if modes else None
    put(place, *independent(documents, code, marks))
    tokens = IndexedTokens(place, verify=True)
    flat = np.array([t for s in sequences for t in s], dtype=DTYPES[code])
    assert tokens.dtype == flat.dtype and np.array_equal(tokens[:], flat) and len(tokens) == len(flat)
    starts = np.cumsum([0, *(sum(map(len, d)) for d in documents)])
    assert (tokens.documents, tokens.sequences) == (len(documents), len(sequences))
    assert np.array_equal(tokens.document_starts(), starts)
    assert [tokens.document(i) for i in range(len(documents))] == list(zip(starts, starts[1:], strict=False))
    a, b = sorted((data.draw(st.integers(0, len(flat))), data.draw(st.integers(0, len(flat)))))
    assert tokens.bounds(a, b).tolist() == sorted({s for s in starts[:-1].tolist() if a < s < b})
    mine = place.with_name("mine")
    if modes and sequences:
        assert tokens.modes[:].tolist() == marks
        with IndexedWriter(mine, tokens.dtype) as writer:
            writer.extend(tokens)
    else:
        write_indexed(mine, documents, DTYPES[code])
    for suffix in (".idx", ".bin"):
        assert mine.with_suffix(suffix).read_bytes() == place.with_suffix(suffix).read_bytes()
    assert sorted(p.name for p in place.parent.iterdir()) == ["corpus.bin", "corpus.idx", "mine.bin", "mine.idx"]


def test_merged_and_appended(tmp_path):
    parts = [[[[1, 2], [3]], [[4]]], [], [[[]], [[5, 6, 7]]]]
    for i, part in enumerate(parts):
        put(tmp_path / str(i), *independent(part, 8))
    merged = merge_indexed(tmp_path / "all", [tmp_path / str(i) for i in range(3)])
    assert tmp_path.joinpath("all.idx").read_bytes() == independent(sum(parts, []), 8)[0]
    assert merged[:].tolist() == list(range(1, 8)) and merged.documents == 4
    again = write_indexed(tmp_path / "0", [np.array([9, 9])], np.uint16, append=True)
    assert again[:].tolist() == [1, 2, 3, 4, 9, 9] and again.document(2) == (4, 6)
    assert merged[:].tolist() == list(range(1, 8)) and token_dtype(65499) == np.uint16


CORPUS = [[[5, 1, 2], []], [[3]], [], [[4, 4, 4, 4]]]


@pytest.mark.medium
@pytest.mark.parametrize("count", [2_000, pytest.param(10_000, marks=pytest.mark.slow)])
def test_fuzzed_headers_are_right_or_an_error(tmp_path, count):
    """Bytes of the index changed, cut off, inserted: what opens is what the bytes mean; nothing is written."""
    random = np.random.default_rng(count)
    good, data = independent(CORPUS, 4, [1, 0, 2, 0])
    right = 0
    prefix = tmp_path / "x"
    prefix.with_suffix(".bin").write_bytes(data)
    for _ in range(count):
        idx = bytearray(good)
        for _ in range(random.integers(1, 4)):
            kind, at = random.integers(5), random.integers(34 if random.random() < 0.6 else len(idx))
            at = min(at, len(idx) - 1)
            if kind < 2:
                idx[at] = random.choice([0, 1, 2, 4, 8, 127, 128, 255, random.integers(256)])
            elif kind == 2:
                idx[at : at + 8] = random.integers(-(2**63), 2**63 - 1, dtype=np.int64).tobytes()
            else:
                idx = idx[:at] or idx if kind == 3 else idx[:at] + random.bytes(random.integers(1, 9)) + idx[at:]
        prefix.with_suffix(".idx").write_bytes(bytes(idx))
        wanted = parsed(bytes(idx), data)
        try:
            tokens = IndexedTokens(prefix)
            got = tokens[:], tokens.document_starts(), tokens.bounds(0, len(tokens))
        except ValueError as error:
            assert wanted is None and str(prefix) in str(error), error
        else:
            assert wanted is not None
            assert np.array_equal(got[0], wanted[0], equal_nan=got[0].dtype.kind == "f")
            assert got[1].tolist() == wanted[1]
            right += 1
    assert 0 < right < count and prefix.with_suffix(".bin").read_bytes() == data
    assert sorted(os.listdir(tmp_path)) == ["x.bin", "x.idx"]


def test_beyond_32_bits(tmp_path):
    """3 x 2**31 - 3 tokens in a sparse file of 24 GiB: bounds, slices and batches near its end are exact."""
    lengths, size = [2**31 - 1, 2**31 - 1, 7, 2**31 - 8], 4
    ends = np.cumsum([0, *lengths])
    idx = b"MMIDIDX\0\0" + struct.pack("<QBQQ", 1, 4, 4, 5) + struct.pack("<4i", *lengths)
    idx += struct.pack("<4q", *(ends[:-1] * size).tolist()) + struct.pack("<5q", *range(5))
    tmp_path.joinpath("far.idx").write_bytes(idx)
    with open(tmp_path / "far.bin", "wb") as file:
        file.truncate(int(ends[-1]) * size)
        file.seek(int(ends[2] - 3) * size)
        file.write(np.arange(20, dtype="<i4").tobytes())
    tokens = IndexedTokens(tmp_path / "far")
    at = int(ends[2])
    assert at > 2**32 - 3 and at * size > 2**33 and len(tokens) == ends[-1]
    assert tokens[at - 3 : at + 4].tolist() == [0, 1, 2, 3, 4, 5, 6] and tokens[at + 5] == 8
    assert tokens.bounds(at - 3, at + 9).tolist() == [at, at + 7] and tokens.document(2) == (at, at + 7)
    batch = Batches(tokens, 1, 8, 0, split=(at - 2, at + 7), documents=True).at(0)
    assert batch["tokens"].tolist() == [[1, 2, 3, 4, 5, 6, 7, 8]]
    assert batch["documents"].tolist() == [[0, 0, 1, 1, 1, 1, 1, 1]]


def test_in_an_object_store(tmp_path):
    ids = [np.arange(n) % 251 for n in (5, 700_000, 0, 90_000)]
    here = write_indexed(tmp_path / "corpus", ids, np.int32)
    store = ts.KvStore.open({"driver": "file", "path": f"{tmp_path}/"}).result()
    there = IndexedTokens("corpus", store=store, cache_bytes=2 << 20)
    assert len(there) == len(here) and there.documents == 4 and np.array_equal(there.ids[-5:], here.ids[-5:])
    for a, b in ((0, 9), (262_100, 262_200), (500_000, 790_005), (790_000, 790_005), (3, 3)):
        assert np.array_equal(there[a:b], here[a:b]) and there.bounds(a, b).tolist() == here.bounds(a, b).tolist()
    mine, theirs = (Batches(tokens, 3, 40, 1, documents=True).at(2) for tokens in (here, there))
    assert all(torch.equal(mine[name], theirs[name]) for name in mine)
    assert len(there.ids._blocks) <= 2
    os.truncate(tmp_path / "corpus.bin", 100)
    with pytest.raises(ValueError, match="corpus.bin: got another size, wanted 3,160,020"):
        IndexedTokens("corpus", store=store)
    with pytest.raises(FileNotFoundError):
        IndexedTokens("missing", store=store)


@pytest.mark.parametrize(
    "make, message",
    [
        (lambda p: IndexedTokens("ftp://a/b"), "no URL of an object, wanted s3"),
        (lambda p: write_indexed(p, [[1]], "uint32"), "got dtype uint32, wanted one of uint8, int8"),
        (
            lambda p: write_indexed(p, [[70000]], "uint16"),
            "got ids from 70000 to 70000, wanted 0 to 65535; use a wider",
        ),
        (lambda p: write_indexed(p, [[1.5]], "uint16"), "got ids float64"),
        (lambda p: merge_indexed(p, []), "got no corpus"),
    ],
    ids=["url", "dtype", "range", "floats", "nothing"],
)
def test_errors_leave_nothing(tmp_path, make, message):
    with pytest.raises(ValueError, match=message):
        make(tmp_path / "x")
    assert not list(tmp_path.iterdir())


def test_a_pair_that_does_not_fit(tmp_path):
    prefix = tmp_path / "x"
    put(prefix, *independent(CORPUS, 4))
    for name, change, message in (
        ("x.bin", lambda b: b[:-4], "got 28 bytes, wanted 32 for the 8 tokens of int32"),
        ("x.bin", lambda b: b + b"\0" * 4, "got 36 bytes, wanted 32"),
        ("x.idx", lambda b: b[:-8], "got a file of 114 bytes, wanted 122, or with modes 126"),
        ("x.idx", lambda b: b"x" + b[1:], "wanted an index that begins with"),
    ):
        before = (tmp_path / name).read_bytes()
        (tmp_path / name).write_bytes(change(before))
        with pytest.raises(ValueError, match=message):
            IndexedTokens(prefix)
        (tmp_path / name).write_bytes(before)
    with pytest.raises(IndexError, match="got document 4, wanted 0 to 3"):
        IndexedTokens(prefix).document(4)
    with pytest.raises(ValueError, match="2 sequences behind the last document"), IndexedWriter(prefix, "u1") as writer:
        writer.add([1])
        writer.add([2])
    assert len(IndexedTokens(prefix)) == 8
