"""Token files: what was written is read, damage is found and named, and a failed write leaves nothing behind."""

import numpy as np
import pytest
import torch

from fmegatron.data import ByteTokenizer, CharTokenizer
from fmegatron.data.tokens import TokenArray, write_tokens


@pytest.fixture
def path(tmp_path):
    return tmp_path / "train.tokens"


@pytest.mark.parametrize("largest, dtype", [(255, "uint8"), (256, "uint16"), (65_535, "uint16"), (65_536, "uint32")])
def test_round_trip_in_the_narrowest_dtype(path, largest, dtype):
    ids = np.random.default_rng(0).integers(0, largest + 1, 5000)
    ids[17] = largest
    tokens = TokenArray(write_tokens(path, ids), verify=True)
    assert tokens.dtype == np.dtype(dtype) and len(tokens) == 5000
    assert (tokens[:] == ids).all() and (tokens[100:200] == ids[100:200]).all()
    assert repr(tokens).endswith(f"train.tokens', 5,000 x {dtype})")


def test_ids_from_a_tensor_and_from_a_stream_make_the_same_file(path):
    ids = np.arange(1000)
    whole = write_tokens(path, torch.from_numpy(ids), dtype="uint16").read_bytes()
    streamed = write_tokens(path, (ids[i : i + 300] for i in range(0, 1000, 300)), dtype=np.uint16).read_bytes()
    assert whole == streamed


def test_the_tokenizer_travels_with_the_ids(path):
    tokenizer = CharTokenizer.from_text("".join(map(chr, range(32, 6000))))  # a header longer than a page
    text = "to be or not to be"
    tokens = TokenArray(write_tokens(path, tokenizer.encode(text), tokenizer=tokenizer))
    assert tokens.tokenizer == tokenizer and tokens.tokenizer.decode(tokens[:]) == text
    assert tokens.dtype == np.uint16
    assert TokenArray(write_tokens(path, tokenizer.encode(text))).tokenizer is None


def test_empty(path):
    assert len(TokenArray(write_tokens(path, np.zeros(0, np.int64)), verify=True)) == 0


def test_tokens_are_read_only(path):
    tokens = TokenArray(write_tokens(path, np.arange(9)))
    with pytest.raises(ValueError, match="read-only"):
        tokens[:][0] = 1


def test_the_data_starts_on_a_page_and_is_plain(path):
    write_tokens(path, np.arange(256))
    assert np.fromfile(path, np.uint8, offset=4096).tolist() == list(range(256))


@pytest.mark.parametrize("cut", [1, 200, 256 + 4090])
def test_a_truncated_file_is_named(path, cut):
    write_tokens(path, np.arange(256))
    path.write_bytes(path.read_bytes()[:-cut])
    with pytest.raises(ValueError, match=r"train\.tokens: .*(cut off|no token file)"):
        TokenArray(path)


def test_a_prolonged_file_is_named(path):
    write_tokens(path, np.arange(256))
    path.write_bytes(path.read_bytes() + b"x")
    with pytest.raises(ValueError, match="4,353 bytes, wanted 4,352 for the 256 ids of uint8.*appended"):
        TokenArray(path)


def test_a_changed_id_is_found(path):
    write_tokens(path, np.arange(256))
    data = bytearray(path.read_bytes())
    data[-7] ^= 1
    path.write_bytes(data)
    TokenArray(path)
    with pytest.raises(ValueError, match="xxh3"):
        TokenArray(path, verify=True)


@pytest.mark.parametrize(
    "content", [b"", b"to be or not to be, that is", b"fmtokens" + (9).to_bytes(8, "little") + b'{"a": 1} ']
)
def test_other_files_are_refused(path, content):
    path.write_bytes(content)
    with pytest.raises(ValueError, match="no token file|damaged"):
        TokenArray(path)


@pytest.mark.parametrize(
    "ids, options, message",
    [
        (np.array([1.0]), {}, "wanted integers"),
        (np.array([[1]]), {}, "wanted integers"),
        (np.array([-1, 2]), {}, "from -1 to 2"),
        (np.array([256]), {"dtype": "uint8"}, "wanted 0 to 255"),
        (np.array([200]), {"tokenizer": CharTokenizer("abc")}, "wanted 0 to 2"),
        (np.array([1]), {"dtype": "int64"}, "uint8, uint16, uint32"),
        (iter([np.array([1])]), {}, "a stream of ids"),
        (iter([np.array([1]), np.array([1000])]), {"tokenizer": ByteTokenizer()}, "wanted 0 to 255"),
    ],
)
def test_bad_ids_leave_the_old_file_and_no_other(path, ids, options, message):
    before = write_tokens(path, np.arange(5)).read_bytes()
    with pytest.raises(ValueError, match=message):
        write_tokens(path, ids, **options)
    assert path.read_bytes() == before
    assert list(path.parent.iterdir()) == [path]


def test_a_full_disk_leaves_the_old_file_and_no_other(path, monkeypatch):
    before = write_tokens(path, np.arange(5)).read_bytes()

    def full(descriptor):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.fsync", full)
    with pytest.raises(OSError, match="No space"):
        write_tokens(path, np.arange(9))
    assert path.read_bytes() == before
    assert list(path.parent.iterdir()) == [path]
