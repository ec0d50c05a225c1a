"""Tokenizers: every text comes back, files come back, and unknown characters are named with the fix."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fmegatron.data import ByteTokenizer, CharTokenizer, load_tokenizer
from fmegatron.data.open_tokenizer import tokenizer_from
from fmegatron.data.tokenizers import smallest_dtype


@pytest.mark.medium
@given(st.text())
def test_bytes_round_trip(text):
    ids = ByteTokenizer().encode(text)
    assert ids.dtype == np.uint8
    assert ByteTokenizer().decode(ids) == text


@given(st.text(min_size=1))
def test_characters_round_trip(text):
    tokenizer = CharTokenizer.from_text(text)
    ids = tokenizer.encode(text)
    assert tokenizer.decode(ids) == text
    assert tokenizer.decode(torch.from_numpy(ids.astype(np.int64))) == text
    assert ids.max() == tokenizer.vocab_size - 1


def test_the_vocabulary_may_have_any_order():
    tokenizer = CharTokenizer("zab")
    assert tokenizer.encode("abz").tolist() == [1, 2, 0]
    assert tokenizer.decode([1, 2, 0]) == "abz"


def test_a_cut_character_is_replaced_not_raised():
    assert ByteTokenizer().decode(ByteTokenizer().encode("aé")[:-1]) == "a\ufffd"


def test_empty_text():
    assert ByteTokenizer().decode(ByteTokenizer().encode("")) == ""
    assert CharTokenizer("a").decode(CharTokenizer("a").encode("")) == ""


def test_many_characters_need_wider_ids():
    tokenizer = CharTokenizer.from_text("".join(map(chr, range(1, 300))))
    assert tokenizer.encode("abc").dtype == np.uint16
    assert smallest_dtype(2**16) == np.uint16 and smallest_dtype(2**16 + 1) == np.uint32
    with pytest.raises(ValueError, match="vocab_size"):
        smallest_dtype(2**32 + 1)


@pytest.mark.parametrize("tokenizer", [ByteTokenizer(), CharTokenizer("añ😀\n")])
def test_saved_and_loaded(tokenizer, tmp_path):
    tokenizer.save(tmp_path / "tokenizer.json")
    assert load_tokenizer(tmp_path / "tokenizer.json") == tokenizer
    assert tokenizer_from(tokenizer.describe()) == tokenizer


def test_unknown_characters_are_named():
    with pytest.raises(ValueError) as error:
        CharTokenizer.from_text("hello world").encode("hello ★ wörld")
    for part in ("2 of 13", "'ö' (U+00F6)", "'★' (U+2605)", "position 6", "from_text", "ByteTokenizer"):
        assert part in str(error.value)


@pytest.mark.parametrize("ids", [[3], [-1], [[0, 1]], [0.5]])
def test_bad_ids(ids):
    with pytest.raises(ValueError, match="decode"):
        CharTokenizer("abc").decode(ids)


@pytest.mark.parametrize("vocab", ["", "aba"])
def test_bad_vocabulary(vocab):
    with pytest.raises(ValueError, match="CharTokenizer"):
        CharTokenizer(vocab)


@pytest.mark.parametrize("content", ["", "[]", '{"kind": "bpe"}', '{"kind": "char"}', "{"])
def test_bad_files(content, tmp_path):
    (tmp_path / "t.json").write_text(content)
    with pytest.raises(ValueError, match=r"t\.json: got no tokenizer file"):
        load_tokenizer(tmp_path / "t.json")
