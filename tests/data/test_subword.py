"""Tokenizers of other projects: each text comes back, ids are those of the package, files and data bring them back."""

import base64
import io
import json
import pickle

import numpy as np
import pytest
import sentencepiece
import tiktoken
import tokenizers

from fmegatron.data import IndexedTokens, load_tokenizer
from fmegatron.data.prepare import prepare
from fmegatron.data.tokens import TokenArray, write_tokens
from tests.house import ROOT

TEXT = (ROOT / "data" / "tinyshakespeare.txt").read_text()[:4000]
HARD = "\n  naïve ★ 日本語 </s> 123456\t<|e|> \u0301x\n\n"
WORDS = {bytes([i]): i for i in range(256)} | {word.encode(): 256 + i for i, word in enumerate((" t", "he", " the"))}

QWEN = (  # a digit at a time
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def of_huggingface(folder):
    made = tokenizers.Tokenizer(tokenizers.models.BPE())
    made.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=300, special_tokens=["<s>", "</s>"], show_progress=False,
        initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
    )  # fmt: skip
    made.train_from_iterator([TEXT], trainer)
    made.save(str(folder / "tokenizer.json"))
    config = {"bos_token": "<s>", "eos_token": {"content": "</s>"}, "pad_token": None}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return lambda text: made.encode(text, add_special_tokens=False).ids, {"bos": 0, "eos": 1}


def of_sentencepiece(folder):
    out = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(TEXT.split("\n")), model_writer=out, vocab_size=350, byte_fallback=True, minloglevel=2,
        remove_extra_whitespaces=False, normalization_rule_name="identity", add_dummy_prefix=False,
    )  # fmt: skip
    (folder / "tokenizer.model").write_bytes(out.getvalue())
    made = sentencepiece.SentencePieceProcessor(model_proto=out.getvalue())
    return made.encode, {"unk": 0, "bos": 1, "eos": 2}


def of_tiktoken(folder):
    lines = [base64.b64encode(word) + b" %d" % rank for word, rank in WORDS.items()]
    (folder / "tokenizer.model").write_bytes(b"\n".join(lines) + b"\n")
    added = {"260": {"content": "<|e|>"}, "259": {"content": "<|b|>"}}
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<|e|>", "added_tokens_decoder": added}))
    (folder / "tokenizer.model.pattern").write_text(QWEN + "\n")
    made = tiktoken.Encoding("own", pat_str=QWEN, mergeable_ranks=WORDS, special_tokens={"<|e|>": 260})
    return lambda text: made.encode(text, disallowed_special=()), {"eos": 260}


@pytest.fixture(
    params=[of_huggingface, of_sentencepiece, of_tiktoken], ids=["huggingface", "sentencepiece", "tiktoken"]
)
def opened(request, tmp_path):
    encode, special = request.param(tmp_path)
    return tmp_path, load_tokenizer(tmp_path), encode, special


def test_ids_are_those_of_the_package_and_texts_come_back(opened):
    _, tokenizer, encode, special = opened
    for text in ("", TEXT, HARD):
        ids = tokenizer.encode(text)
        assert ids.tolist() == encode(text) and ids.dtype == np.uint16 and ids.max(initial=0) < tokenizer.vocab_size
        assert tokenizer.decode(ids) == text
    ids, lengths = tokenizer.encode_many(["", TEXT, HARD])
    assert ids.tolist() == encode(TEXT) + encode(HARD) and ids.dtype == np.uint16
    assert lengths.tolist() == [0, len(encode(TEXT)), len(encode(HARD))] and tokenizer.encode_many([])[0].size == 0
    assert dict(tokenizer.special) == special
    assert (tokenizer.bos, tokenizer.eos, tokenizer.pad) == (special.get("bos"), special["eos"], None)


def test_it_is_a_value(opened):
    folder, tokenizer, _, _ = opened
    for again in (load_tokenizer(folder), pickle.loads(pickle.dumps(tokenizer))):
        assert again == tokenizer and hash(again) == hash(tokenizer)
    tokenizer.save(folder / "saved.json")
    assert load_tokenizer(folder / "saved.json") == tokenizer
    saved = json.loads((folder / "saved.json").read_text())
    assert {"content", "settings"} == saved.keys() - tokenizer.describe().keys()
    for change in ({"digest": "0" * 64}, {"content": "AAAA"}, {"content": "?"}, {"special": {"eos": 7}}):
        (folder / "changed.json").write_text(json.dumps(saved | change))
        with pytest.raises(ValueError, match=r"changed\.json: got no tokenizer file"):
            load_tokenizer(folder / "changed.json")


def test_data_bring_it_back(opened):
    folder, tokenizer, encode, _ = opened
    write_tokens(folder / "a.tokens", tokenizer.encode(TEXT), tokenizer=tokenizer)
    assert TokenArray(folder / "a.tokens").tokenizer == tokenizer
    (folder / "text.txt").write_text(TEXT)
    prepare([folder / "text.txt"], folder / "corpus", tokenizer=str(folder))
    corpus = IndexedTokens(folder / "corpus")
    assert corpus.tokenizer == tokenizer
    (folder / "corpus.tokenizer.json").unlink()
    with pytest.raises(ValueError, match="wanted the file that `save` wrote, .*corpus.tokenizer.json"):
        corpus.tokenizer  # noqa: B018
    assert corpus[:5].tolist() == encode(TEXT)[:5]


def test_a_vocabulary_with_gaps(tmp_path):
    model = tokenizers.models.WordLevel({"a": 0, "b": 1, "c": 7, "<unk>": 2}, unk_token="<unk>")
    made = tokenizers.Tokenizer(model)
    made.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    made.save(str(tmp_path / "tokenizer.json"))
    tokenizer = load_tokenizer(tmp_path)
    assert tokenizer.vocab_size == 8 and tokenizer.encode("a c b ?").tolist() == [0, 7, 1, 2]
    assert tokenizer.decode(tokenizer.encode("c a b c")) == "c a b c" and tokenizer.decode([7, 5]) == "c"
    with pytest.raises(ValueError, match="got ids from 8 to 8, wanted 0 to 7"):
        tokenizer.decode([8])
    made.add_special_tokens(["<e>"])
    made.save(str(tmp_path / "tokenizer.json"))
    more = load_tokenizer(tmp_path)
    ids = more.encode("c<e>")
    assert more.vocab_size == max(made.get_vocab().values()) + 1 > ids.max() and more.decode(ids) == "c <e>"


@pytest.mark.parametrize(
    "content", [b"", b"\x00\x01", b"{}", b'{"model": 1}', b"YQ== 0\nYg== 5\n", b"\n\x05hello", b"YQ== x"]
)
def test_files_that_are_none(content, tmp_path):
    (tmp_path / "tokenizer.model").write_bytes(content)
    for path in (tmp_path / "tokenizer.model", tmp_path):
        with pytest.raises(ValueError, match="got no tokenizer file"):
            load_tokenizer(path)


def test_a_folder_without_one(tmp_path):
    with pytest.raises(ValueError, match="got a folder without tokenizer.json"):
        load_tokenizer(tmp_path)
    with pytest.raises(FileNotFoundError):
        load_tokenizer(tmp_path / "none.json")
