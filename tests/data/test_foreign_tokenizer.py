"""Files of other projects' tokenizers: each field is honoured, ignored by its name, or refused."""

import base64
import hashlib
import json

import pytest
import tiktoken
import tokenizers

from fmegatron.data import foreign_tokenizer, load_tokenizer
from fmegatron.data.prepare import prepare
from tests.data.test_subword import QWEN, of_huggingface, of_sentencepiece

WORDS = {"[UNK]": 0, "[PAD]": 1, "</s>": 2} | {f"w{i}": i + 3 for i in range(40)}
TEXTS = [" ".join(f"w{i}" for i in range(30)), "w1 w2 w3"]


def of_words(folder, **config):
    """A tokenizer of words, and its tokenizer_config.json."""
    made = tokenizers.Tokenizer(tokenizers.models.WordLevel(WORDS, unk_token="[UNK]"))
    made.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    made.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": "</s>"} | config))
    return made


def change(path, **fields):
    path.write_text(json.dumps(json.loads(path.read_text()) | fields))


def test_truncation_and_padding_are_off(tmp_path):
    """As of a tokenizer that was saved after a call with both: 30 and 3 words would be 8 and 8 ids."""
    made = of_words(tmp_path)
    plain = load_tokenizer(tmp_path)
    made.enable_truncation(8, direction="left")
    made.enable_padding(pad_id=1, pad_token="[PAD]", length=8)
    made.save(str(tmp_path / "tokenizer.json"))
    tokenizer = load_tokenizer(tmp_path)
    for text in (*TEXTS, ""):
        assert tokenizer.encode(text).tolist() == plain.encode(text).tolist()
        assert [x.tolist() for x in tokenizer.located(text)] == [x.tolist() for x in plain.located(text)]
    assert tokenizer.encode_many(TEXTS)[1].tolist() == [30, 3]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in TEXTS))
    assert prepare([tmp_path / "a.jsonl"], tmp_path / "corpus", str(tmp_path))["tokens"] == 33
    saved = tmp_path / "saved.json"
    tokenizer.save(saved)
    assert load_tokenizer(saved).encode_many(TEXTS)[1].tolist() == [30, 3]


@pytest.mark.parametrize(
    "file, field, words",
    [
        ("tokenizer.json", {"sampling": 0.1}, r"tokenizer.json: got sampling=0.1, wanted fields that are known"),
        ("tokenizer_config.json", {"reverse_text": True}, r"tokenizer_config.json: got reverse_text=True, wanted"),
        ("tokenizer_config.json", {"split_special_tokens": True}, "split_special_tokens=True, which is not known here"),
        ("tokenizer_config.json", {"add_prefix_space": True}, "add_prefix_space=True, and ByteLevel with .*=False in"),
        ("tokenizer_config.json", {"eos_token": "<none>"}, "got '<none>' as eos_token, which tokenizer.json has not"),
        ("tokenizer_config.json", {"eos_token": 5}, "got 5 as eos_token, wanted a text"),
        (
            "tokenizer_config.json",
            {"added_tokens_decoder": {"900": {"content": "<x>"}}},
            "added token '<x>' of id 900, which tokenizer.json has not",
        ),
        ("tokenizer_config.json", {"added_tokens_decoder": {"1": {"content": "<s>"}}}, "'<s>' of id 1, .* has as 0"),
        ("tokenizer_config.json", {"added_tokens_decoder": {"x": {}}}, "got no added tokens"),
        ("added_tokens.json", {"<x>": 900}, "added token '<x>' of id 900, which tokenizer.json has not"),
        ("special_tokens_map.json", {"unk_token": "<none>"}, "got '<none>' as unk_token"),
        ("special_tokens_map.json", {"what": "<s>"}, "special_tokens_map.json: got what='<s>'"),
    ],
)
def test_fields_that_are_refused(tmp_path, file, field, words):
    of_huggingface(tmp_path)
    (tmp_path / file).write_text("{}") if not (tmp_path / file).exists() else None
    change(tmp_path / file, **field)
    with pytest.raises(ValueError, match=words):
        load_tokenizer(tmp_path)


@pytest.mark.parametrize(
    "config, words",
    [
        ({"added_tokens_decoder": {"1": {"content": "[PAD]", "lstrip": True}}}, r"lstrip=True .* and False in"),
        ({"added_tokens_decoder": {"1": {"content": "[PAD]", "rstrip": True}}}, r"rstrip=True .* and False in"),
        ({"additional_special_tokens": ["w7"]}, "got 'w7' in additional_special_tokens, which tokenizer.json has not"),
        ({"extra_special_tokens": {"image_token": {"content": "<new>"}}}, "got '<new>' in extra_special_tokens"),
        ({"cls_token": "w7"}, "got 'w7' in cls_token"),
        ({"additional_special_tokens": ["[PAD]"], "cls_token": {"content": "[PAD]"}, "sep_token": None}, None),
        ({"added_tokens_decoder": {"1": {"content": "[PAD]", "normalized": True, "lstrip": False}}}, None),
    ],
)
def test_tokens_that_transformers_adds_or_finds_in_another_way(tmp_path, config, words):
    made = of_words(tmp_path, **config)
    made.add_special_tokens(["[PAD]"])
    made.save(str(tmp_path / "tokenizer.json"))
    if words is None:
        assert load_tokenizer(tmp_path).encode("w1 [PAD] w2").tolist() == [4, 1, 5]
        return
    with pytest.raises(ValueError, match=words):
        load_tokenizer(tmp_path)


def test_tokens_that_only_the_special_tokens_map_names(tmp_path):
    """transformers adds them, unless the configuration has added_tokens_decoder: then it does not read the file."""
    of_words(tmp_path)
    (tmp_path / "special_tokens_map.json").write_text(json.dumps({"additional_special_tokens": ["w7"]}))
    with pytest.raises(ValueError, match=r"special_tokens_map.json: got 'w7' in additional_special_tokens, which"):
        load_tokenizer(tmp_path)
    change(tmp_path / "tokenizer_config.json", added_tokens_decoder={})
    assert load_tokenizer(tmp_path).encode("w1").tolist() == [4]


MODEL = {"type": "WordLevel", "vocab": WORDS, "unk_token": "[UNK]"}
LOWERCASE = {"type": "Lowercase"}
TOKEN = {"id": 1, "content": "[PAD]", "single_word": False, "lstrip": False, "rstrip": False, "normalized": False}


@pytest.mark.parametrize(
    "fields, words",
    [
        ({"model": MODEL | {"lower": 1}}, "got lower=1, wanted"),
        ({"model": MODEL | {"merges": []}}, r"got merges=\[\], wanted"),
        ({"pre_tokenizer": {"type": "WhitespaceSplit", "longest": 3}}, "pre_tokenizer: got longest=3, wanted"),
        ({"normalizer": {"type": "Sequence", "normalizers": [LOWERCASE, LOWERCASE | {"only": "a"}]}}, "got only='a'"),
        ({"added_tokens": [TOKEN | {"special": True, "ignore_case": True}]}, "got ignore_case=True, wanted"),
        ({"added_tokens": [TOKEN | {"special": True}], "normalizer": LOWERCASE}, None),
        ({"pre_tokenizer": {"type": "Metaspace", "replacement": "_", "add_prefix_space": False, "prepend_scheme":
                            "never", "str_rep": "_"}}, None),
    ],
)  # fmt: skip
def test_fields_inside_the_parts(tmp_path, fields, words):
    """The package passes over those that it does not know."""
    of_words(tmp_path)
    change(tmp_path / "tokenizer.json", **fields)
    if words is None:
        assert load_tokenizer(tmp_path).vocab_size == len(WORDS)
        return
    with pytest.raises(ValueError, match=words):
        load_tokenizer(tmp_path)


@pytest.mark.parametrize("file", ["tokenizer.json", "tokenizer_config.json"])
def test_a_key_that_stands_twice(tmp_path, file):
    of_words(tmp_path)
    text = (tmp_path / file).read_text().rstrip()
    (tmp_path / file).write_text(text[:-1] + ', "normalizer": null, "normalizer": {"type": "Lowercase"}}')
    with pytest.raises(ValueError, match="the key 'normalizer' twice"):
        load_tokenizer(tmp_path)


def test_dropout_of_the_model_is_refused(tmp_path):
    of_huggingface(tmp_path)
    path = tmp_path / "tokenizer.json"
    change(path, model=json.loads(path.read_text())["model"] | {"dropout": 0.1})
    with pytest.raises(ValueError, match=r"got dropout 0.1 of its model.*wanted none; write null"):
        load_tokenizer(tmp_path)


def test_fields_that_are_ignored_and_honoured(tmp_path):
    of_huggingface(tmp_path)
    more = {"add_prefix_space": False, "model_max_length": 8, "truncation_side": "left", "add_bos_token": True}
    more |= {"added_tokens_decoder": {"0": {"content": "<s>"}, "1": {"content": "</s>"}}, "tokenizer_class": "Own"}
    change(tmp_path / "tokenizer_config.json", bos_token=None, **more)
    names = {"bos_token": "<s>", "eos_token": {"content": "</s>"}, "additional_special_tokens": []}
    (tmp_path / "special_tokens_map.json").write_text(json.dumps(names))
    assert dict(load_tokenizer(tmp_path).special) == {"bos": 0, "eos": 1}
    change(tmp_path / "special_tokens_map.json", eos_token="<s>")
    with pytest.warns(
        RuntimeWarning, match="eos_token '</s>', and '<s>' in special_tokens_map.json, which is not read"
    ):
        assert dict(load_tokenizer(tmp_path).special) == {"bos": 0, "eos": 1}


def test_a_lowercase_that_two_files_differ_in(tmp_path):
    made = of_words(tmp_path, do_lower_case=False)
    made.normalizer = tokenizers.normalizers.BertNormalizer(lowercase=True)
    made.save(str(tmp_path / "tokenizer.json"))
    with pytest.raises(ValueError, match="do_lower_case=False, and BertNormalizer with lowercase=True"):
        load_tokenizer(tmp_path)
    change(tmp_path / "tokenizer_config.json", do_lower_case=True, strip_accents=None)
    assert load_tokenizer(tmp_path).encode("W1").tolist() == [4]


def test_added_tokens_of_a_model_of_sentencepiece(tmp_path):
    """Which is read alone: a token that transformers adds behind it would be text here."""
    of_sentencepiece(tmp_path)
    known = {"added_tokens_decoder": {"1": {"content": "<s>"}}, "eos_token": "</s>", "sp_model_kwargs": {}}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(known))
    assert load_tokenizer(tmp_path).eos == 2
    change(tmp_path / "tokenizer_config.json", pad_token="<pad>")
    with pytest.raises(ValueError, match="got '<pad>' as pad_token, which tokenizer.model has not"):
        load_tokenizer(tmp_path)
    change(tmp_path / "tokenizer_config.json", added_tokens_decoder={"350": {"content": "<pad>"}})
    with pytest.raises(ValueError, match="added token '<pad>' of id 350, which tokenizer.model has not"):
        load_tokenizer(tmp_path)


# ---- ranks of tiktoken
RANKS = {bytes([i]): i for i in range(256)} | {b"12": 256, b"34": 257, b"1234": 258}
LINES = "".join(f"{base64.b64encode(token).decode()} {rank}\n" for token, rank in RANKS.items())


def of_tiktoken(pattern):
    return tiktoken.Encoding("own", pat_str=pattern, mergeable_ranks=RANKS, special_tokens={})


def test_the_pattern_of_ranks_is_asked_for(tmp_path):
    """By Llama 3's, "1234" would be two ids, and by Qwen's four."""
    path = tmp_path / "qwen.tiktoken"
    path.write_text(LINES)
    with pytest.raises(ValueError, match=r"splitting pattern is not known.*into qwen.tiktoken.pattern beside it"):
        load_tokenizer(path)
    (tmp_path / "tokenization_qwen.py").write_text(f"import os\nPAT_STR = r'''{QWEN}'''\nraise SystemExit\n")
    assert load_tokenizer(path).encode("1234 a1").tolist() == of_tiktoken(QWEN).encode("1234 a1")
    (tmp_path / "qwen.tiktoken.pattern").write_text(r"\p{N}+|\P{N}+")
    opened = load_tokenizer(path)
    assert opened.encode("1234").tolist() == [258]
    opened.save(tmp_path / "saved.json")
    assert load_tokenizer(tmp_path / "saved.json").encode("1234").tolist() == [258]


@pytest.mark.parametrize(
    "pattern", [r"\p{L}+", "", r"\S+", r"\p{N}*|\P{N}+"], ids=["letters", "none", "words", "of none"]
)
def test_a_pattern_that_leaves_characters_out(tmp_path, pattern):
    """tiktoken drops what it does not find, and panics at a piece of nothing."""
    (tmp_path / "a.tiktoken").write_text(LINES)
    (tmp_path / "a.tiktoken.pattern").write_text(pattern)
    with pytest.raises(ValueError, match="comes back as .*wanted one that finds every character"):
        load_tokenizer(tmp_path / "a.tiktoken")


def test_the_pattern_of_known_ranks(tmp_path, monkeypatch):
    path = tmp_path / "tokenizer.model"
    path.write_text(LINES)
    digest = hashlib.sha256(path.read_bytes()).hexdigest()
    llama = foreign_tokenizer._PATTERNS["82e9d31979e92ab929cd544440f129d9ecd797b69e327f80f17e1c50d5551b55"]
    monkeypatch.setattr(foreign_tokenizer, "_PATTERNS", {digest: llama})
    assert load_tokenizer(tmp_path).encode("1234").tolist() == of_tiktoken(llama).encode("1234") != [258]


def test_known_patterns_are_those_of_tiktoken(monkeypatch):
    """Of the encodings that the package has: its patterns, which it writes in another way, split alike."""
    import regex
    from tiktoken_ext import openai_public

    monkeypatch.setattr(openai_public, "load_tiktoken_bpe", lambda place, expected_hash: {"hash": expected_hash})
    text = "I'm 12345 naïve\n\n  ÀB cD's 日本語 x=1;//\r\n\t end   "
    for name in ("r50k_base", "p50k_base", "cl100k_base", "o200k_base"):
        made = getattr(openai_public, name)()
        ours = foreign_tokenizer._PATTERNS[made["mergeable_ranks"]["hash"]]
        assert regex.findall(ours, text) == regex.findall(made["pat_str"], text), name


def test_ids_of_added_tokens_are_those_of_their_file(tmp_path):
    """Not places behind the ranks: there may be gaps."""
    path = tmp_path / "tokenizer.model"
    path.write_text(LINES)
    (tmp_path / "tokenizer.model.pattern").write_text(QWEN)
    added = {"300": {"content": "<|e|>"}, "270": {"content": "<|b|>"}}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<|e|>", "added_tokens_decoder": added}))
    opened = load_tokenizer(tmp_path)
    assert opened.eos == 300 and opened.vocab_size == 301 and opened.located("<|b|>")[0].tolist() == [270]
    added["258"] = {"content": "<|c|>"}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"added_tokens_decoder": added}))
    with pytest.raises(ValueError, match=r"added token '<\|c\|>' of id 258, which is a rank of tokenizer.model"):
        load_tokenizer(tmp_path)
