"""Tokenizers of other projects: each field of their files is honoured, ignored by its name, or refused.

A field that is not known here may change which ids a text has, and ids that are wrong train without an error. Length is
the corpus' concern, so what a file states of truncation and padding is off.
"""

from __future__ import annotations

import ast
import hashlib
import json
import os
import warnings
from collections.abc import Collection, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

from fmegatron.data.subword import SPECIAL, Kind, SubwordTokenizer, open_reader, ranks_of
from fmegatron.data.template import load_template
from fmegatron.files import disk

# Of tokenizer.json: what the package `tokenizers` reads. Truncation and padding are switched off behind it, and a
# post-processor has no part in ids without special tokens.
_OF_JSON = frozenset(
    "version truncation padding added_tokens normalizer pre_tokenizer post_processor decoder model".split()
)
# Of its model, by type, and of an added token. Of the other parts it is asked what the package has read.
_OF_MODEL = MappingProxyType(
    {
        "BPE": "dropout unk_token continuing_subword_prefix end_of_word_suffix fuse_unk byte_fallback ignore_merges "
        "vocab merges",
        "WordPiece": "unk_token continuing_subword_prefix max_input_chars_per_word vocab",
        "WordLevel": "unk_token vocab",
        "Unigram": "unk_id byte_fallback vocab",
    }
)
_OF_ADDED = frozenset("id content single_word lstrip rstrip normalized special".split())
_OLD_NAMES = frozenset(("add_prefix_space", "str_rep"))  # of Metaspace, which has them under others today
_NAMED = frozenset(f"{name}_token" for name in SPECIAL)
_HONOURED = _NAMED | {"added_tokens_decoder", "chat_template"}
# Of tokenizer_config.json and special_tokens_map.json: what changes no id of a text to which nothing is added.
_IGNORED = frozenset(
    """additional_special_tokens extra_special_tokens model_specific_special_tokens cls_token sep_token mask_token
    image_token video_token audio_token boi_token eoi_token boa_token eoa_token vision_bos_token vision_eos_token
    image_break_token image_end_token image_token_id video_token_id audio_token_id
    prefix_token middle_token suffix_token eot_token fill_token trim_offsets
    add_bos_token add_eos_token use_default_system_prompt response_schema response_template
    model_max_length max_length max_len stride truncation_side truncation_strategy padding_side pad_to_multiple_of
    pad_token_type_id model_input_names return_token_type_ids
    clean_up_tokenization_spaces spaces_between_special_tokens errors
    tokenizer_class processor_class auto_map backend is_local local_files_only name_or_path tokenizer_file vocab_file
    merges_file special_tokens_map_file from_slow use_fast legacy transformers_version tokenizer_type
    do_basic_tokenize never_split unsloth_version init_inputs _commit_hash""".split()
)
_LISTS = frozenset(("additional_special_tokens", "extra_special_tokens", "model_specific_special_tokens"))
_OFF = frozenset(("split_special_tokens", "fix_mistral_regex", "sp_model_kwargs", "add_dummy_prefix_space"))
# What a class of transformers writes over that of tokenizer.json: (its kind of part, its field).
_TWICE = MappingProxyType(
    {
        "add_prefix_space": ("ByteLevel", "add_prefix_space"),
        "do_lower_case": ("BertNormalizer", "lowercase"),
        "strip_accents": ("BertNormalizer", "strip_accents"),
        "tokenize_chinese_chars": ("BertNormalizer", "handle_chinese_chars"),
    }
)
_BEFORE = ("normalizer", "pre_tokenizer")  # the parts of tokenizer.json that a text passes before the model
_LLAMA_3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|"
    r"\s*[\r\n]+|\s+(?!\S)|\s+"
)
_ALL_KINDS = (  # a text with characters of all kinds that patterns part by
    " a Bb'll 12345\t\n\r\n  \u00e9e\u0301\u6f22\u5b57\u0623\u0928\u093f\u00bd\u2167_-+$\u20ac"
    "\U0001f642\u200d\u00a0\u00ad\x00\x7f?!  "
)
_GPT_2 = r"'(?:[sdmt]|ll|ve|re)| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_O200K = "|".join(
    (
        r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?",
        r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?",
        r"\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+",
    )
)
# The splitting pattern of ranks whose file has this sha256: of Llama 3; cl100k, o200k, p50k and r50k of OpenAI.
_PATTERNS = MappingProxyType(
    {
        "82e9d31979e92ab929cd544440f129d9ecd797b69e327f80f17e1c50d5551b55": _LLAMA_3,
        "223921b76ee99bde995b7ff738513eef100fb51d18c93597a113bcffe865b2a7": _LLAMA_3,
        "446a9538cb6c348e3516120d7c08b09f57c36495e2acfffe59a5bf8b0cfb1a2d": _O200K,
        "94b5ca7dff4d00767bc256fdd1b27e5b17361d7b8a5f968547f9f23eb70d2069": _GPT_2,
        "306cd27f03c1a714eca7108e03d66b7dc042abe8c258b44c199a7ed9838dd930": _GPT_2,
    }
)


def from_foreign(path: str | os.PathLike) -> SubwordTokenizer:
    """The tokenizer of another project's file or folder, by what it holds.

    tokenizer.json; *.model of SentencePiece; lines of base64 and rank of tiktoken (Llama 3's tokenizer.model), whose
    splitting pattern is known from the file's digest, or stands in PATH.pattern or a tokenization_*.py beside it.
    Special tokens are those that tokenizer_config.json names, else special_tokens_map.json. The chat template is that
    of the folder (`load_template`).
    Raises ValueError for other content, and for a field that is neither honoured nor known to change no id;
    FileNotFoundError for no file.
    """
    path = Path(path)
    if (there := disk.listed(path)) is not None:
        names = [name for name in ("tokenizer.json", "tokenizer.model", "spiece.model") if name in there]
        if not names:
            raise ValueError(
                f"{path}: got a folder without tokenizer.json, tokenizer.model and spiece.model, wanted one of them; "
                "name the file"
            )
        path = path / names[0]
    content = path.read_bytes()
    kind, chat = _kind_of(path, content), load_template(path.parent)
    own = _object_of(path, content) if kind == "huggingface" else {}
    named, added = _named_beside(path, own)
    if kind == "tiktoken":
        ranks = ranks_of(path, content)
        settings = {"pattern": _pattern_of(path, content), "special": added}
        _require_whole(path, content, settings["pattern"])
        ids = {**{k.decode(errors="replace"): v for k, v in ranks.items()}, **added}
        _require_room(path, added, {rank: token for token, rank in ranks.items()})
    else:
        settings, reader = {}, open_reader(kind, content, {})
        _require_read(path, own, reader)
        of = reader.token_to_id if kind == "huggingface" else lambda text: _piece(reader, text)
        ids = {text: of(text) for text in {*named.values(), *added}}
        for text, number in added.items():
            if ids[text] != number:
                raise ValueError(
                    f"{path.parent}: got the added token {text!r} of id {number}, which {path.name} has "
                    f"{'not' if ids[text] is None else f'as {ids[text]}'}, wanted it there; save the tokenizer anew "
                    "(transformers: tokenizer.save_pretrained)"
                )
    special = {}
    if kind == "sentencepiece":
        known = {name: getattr(reader, f"{name}_id")() for name in SPECIAL}
        special = {name: value for name, value in known.items() if value >= 0}
    for name, text in named.items():
        if (number := ids.get(text)) is None:
            raise ValueError(
                f"{path.parent}: got {text!r} as {name}_token, which {path.name} has not, wanted one of its tokens; "
                "save the tokenizer anew, or take the field out"
            )
        special[name] = number
    return SubwordTokenizer(kind, content, special, settings, chat)


def _kind_of(path: Path, content: bytes) -> Kind:
    start = content[:512].lstrip()
    if start.startswith(b"{"):
        return "huggingface"
    first = start.split(b"\n")[0].split()
    if len(first) == 2 and first[1].isdigit():
        return "tiktoken"
    if content[:1] == b"\n":  # field 1 of its protocol buffer: the first piece
        return "sentencepiece"
    raise ValueError(
        f"{path}: got a file of {len(content)} bytes that is no tokenizer known here, wanted tokenizer.json, a model "
        "of SentencePiece or the ranks of tiktoken"
    )


# ---- fields of Hugging Face's files
def _object_of(path: Path, content: bytes) -> dict[str, Any]:
    """tokenizer.json as an object, whose fields are known."""
    try:
        found = json.loads(content, object_pairs_hook=_each_once)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path}: got no JSON ({error}), wanted a tokenizer.json") from None
    _require_known(path, found, _OF_JSON)
    model = found.get("model")
    if isinstance(model, dict) and model.get("dropout"):
        raise ValueError(
            f"{path}: got dropout {model['dropout']!r} of its model, by which a text has other ids each time, wanted "
            "none; write null"
        )
    if isinstance(model, dict):  # of an old file without a type all that one of them has
        known = _OF_MODEL.get(str(model.get("type")), " ".join(_OF_MODEL.values()))
        _require_known(path, model, {"type", *known.split()})
    for one in found.get("added_tokens") or ():
        if isinstance(one, dict):
            _require_known(path, one, _OF_ADDED)
    return found


def _each_once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """An object of a file; ValueError for one with a key twice, of which readers take the first, or the last."""
    found = dict(pairs)
    if len(found) < len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise ValueError(f"got the key {twice!r} twice in an object, wanted each once; take one of them out")
    return found


def _require_read(path: Path, own: Mapping[str, Any], reader: Any) -> None:
    """Refuse a field of a part that the package has passed over: what it has read is what it writes."""
    for name in ("normalizer", "pre_tokenizer", "decoder"):
        part = getattr(reader, name, None) if own.get(name) is not None else None
        if part is not None:
            _require_fields(f"{path}: {name}", own[name], json.loads(part.__getstate__()))


def _require_fields(where: str, given: Any, read: Any) -> None:
    if isinstance(given, dict) and isinstance(read, dict):
        known = read.keys() | (_OLD_NAMES if given.get("type") == "Metaspace" else set())
        if odd := sorted(given.keys() - known):
            raise ValueError(
                f"{where}: got {', '.join(f'{key}={given[key]!r:.40}' for key in odd)}, wanted fields of "
                f"{given.get('type', 'it')!r}, {', '.join(sorted(read))}: one that is not read may change ids; take it "
                "out of a copy, if it changes none"
            )
        for key in given.keys() & read.keys():
            _require_fields(where, given[key], read[key])
    elif isinstance(given, list) and isinstance(read, list):
        for one, other in zip(given, read, strict=False):
            _require_fields(where, one, other)


def _named_beside(path: Path, own: Mapping[str, Any]) -> tuple[dict[str, str], dict[str, int]]:
    """({"eos": text, ...}, {text of an added token: id}) of the files of Hugging Face beside a tokenizer."""
    at = path.with_name("tokenizer_config.json")
    config, more = _beside(at), _beside(path.with_name("special_tokens_map.json"))
    _require_known(at, config, _HONOURED | _IGNORED | _OFF | _TWICE.keys())
    _require_known(path.with_name("special_tokens_map.json"), more, _NAMED | _IGNORED)
    for field in sorted(_OFF & config.keys()):
        if config[field]:
            raise ValueError(
                f"{at}: got {field}={config[field]!r}, which is not known here, wanted it off or not there"
            )
    for field in sorted(_TWICE.keys() & config.keys()):
        kind, name = _TWICE[field]
        values = {part[name] for part in _parts([own.get(x) for x in _BEFORE], kind) if name in part}
        if config[field] is not None and values and values != {config[field]}:
            raise ValueError(
                f"{at}: got {field}={config[field]!r}, and {kind} with {name}={values.pop()!r} in {path.name}, wanted "
                "them equal: programs differ in which they take; save the tokenizer anew"
            )
    if own:
        _require_same_added(at, config, own)
        if "added_tokens_decoder" not in config:  # transformers reads the other file then, and adds what it names
            _require_same_added(path.with_name("special_tokens_map.json"), more, own)
    first, second = _texts(at, config), _texts(at, more)
    for name in first.keys() & second.keys():
        if first[name] != second[name]:
            text = f"{at}: got {name}_token {first[name]!r}, and {second[name]!r} in special_tokens_map.json"
            warnings.warn(f"{text}, which is not read, as transformers does not", RuntimeWarning, stacklevel=4)
    try:
        decoder = config.get("added_tokens_decoder") or {}
        added = {decoder[i]["content"]: int(i) for i in sorted(decoder, key=int)}
        added |= {str(text): int(i) for text, i in _beside(path.with_name("added_tokens.json")).items()}
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{at}: got no added tokens ({error}), wanted ids and their contents") from None
    return {**second, **first}, added


def _require_same_added(path: Path, config: Mapping[str, Any], own: Mapping[str, Any]) -> None:
    """Refuse tokens that transformers adds to those of tokenizer.json, or finds in another way, by a configuration."""
    known = {one.get("content"): one for one in own.get("added_tokens") or () if isinstance(one, dict)}
    decoder, flags = config.get("added_tokens_decoder"), ["lstrip", "rstrip", "single_word"]
    flags += ["normalized"] if own.get("normalizer") else []
    for one in decoder.values() if isinstance(decoder, dict) else ():
        text = one.get("content") if isinstance(one, dict) else None
        for field in flags if text in known else ():
            if one.get(field, known[text].get(field)) != known[text].get(field):
                raise ValueError(
                    f"{path}: got {field}={one[field]!r} for the added token {text!r}, and {known[text].get(field)!r} "
                    "in tokenizer.json, wanted them equal: transformers takes the first, others the second; save the "
                    "tokenizer anew"
                )
    for field in sorted(_IGNORED & config.keys()):
        if field not in _LISTS and not field.endswith("_token"):
            continue
        for text in _tokens_in(config[field]):
            if text not in known:
                raise ValueError(
                    f"{path}: got {text!r} in {field}, which tokenizer.json has not among its added tokens, wanted it "
                    "there: transformers adds it, and texts have other ids; save the tokenizer anew, or take it out"
                )


def _tokens_in(value: Any) -> list[str]:
    """The texts of tokens that a field gives, alone, in lists, or by name."""
    if isinstance(value, dict):
        value = value["content"] if "content" in value else list(value.values())
    if isinstance(value, list):
        return [text for one in value for text in _tokens_in(one)]
    return [value] if isinstance(value, str) else []


def _beside(path: Path) -> dict[str, Any]:
    """The object of a file; {} where there is none."""
    if (content := disk.content_of(path)) is None:
        return {}
    try:
        found = json.loads(content, object_pairs_hook=_each_once)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path}: got no configuration of a tokenizer ({error}), wanted Hugging Face's JSON") from None
    if not isinstance(found, dict):
        raise ValueError(f"{path}: got a {type(found).__name__}, wanted Hugging Face's JSON object")
    return found


def _texts(path: Path, found: Mapping[str, Any]) -> dict[str, str]:
    """{"eos": text, ...} of what is named."""
    texts = {}
    for name in SPECIAL:
        value = found.get(f"{name}_token")
        value = value.get("content") if isinstance(value, dict) else value
        if value is not None and not isinstance(value, str):
            raise ValueError(f"{path}: got {value!r:.60} as {name}_token, wanted a text")
        if value is not None:
            texts[name] = value
    return texts


def _require_known(path: Path, found: Mapping[str, Any], known: Collection[str]) -> None:
    if odd := sorted(found.keys() - set(known)):
        raise ValueError(
            f"{path}: got {', '.join(f'{name}={found[name]!r:.40}' for name in odd[:8])}, wanted fields that are known "
            "here: one that is not may change ids; take it out of a copy, if it changes none"
        )


def _parts(found: Any, kind: str) -> list[dict[str, Any]]:
    """All parts of this type, however deep."""
    if isinstance(found, dict):
        return [found] * (found.get("type") == kind) + _parts(list(found.values()), kind)
    return [part for one in found for part in _parts(one, kind)] if isinstance(found, list) else []


def _piece(reader: Any, text: str) -> int | None:
    """Of a model of SentencePiece, which gives a text that it has not the id of the unknown."""
    number = reader.piece_to_id(text)
    return number if reader.id_to_piece(number) == text else None


# ---- ranks of tiktoken
def _require_room(path: Path, added: Mapping[str, int], ranks: Mapping[int, bytes]) -> None:
    for text, number in added.items():
        if ranks.get(number, text.encode()) != text.encode():
            raise ValueError(
                f"{path.parent}: got the added token {text!r} of id {number}, which is a rank of {path.name}, wanted "
                f"one of {len(ranks)} or more; look at tokenizer_config.json"
            )


def _pattern_of(path: Path, content: bytes) -> str:
    """The regular expression that splits a text before its parts are merged."""
    if (given := disk.content_of(path.with_name(f"{path.name}.pattern"))) is not None:
        return given.decode("utf-8").removesuffix("\n").removesuffix("\r")
    digest = hashlib.sha256(content).hexdigest()
    if digest in _PATTERNS:
        return _PATTERNS[digest]
    names = [name for name in disk.names_in(str(path.parent)) if name.startswith("tokenization_")]
    for name in names:
        if name.endswith(".py") and (found := _assigned(path.with_name(name), "PAT_STR")) is not None:
            return found
    raise ValueError(
        f"{path}: got ranks of tiktoken (sha256 {digest[:12]}) whose splitting pattern is not known, wanted it: by "
        f"another one a text has other ids; write the model's regular expression into {path.name}.pattern beside it"
    )


def _require_whole(path: Path, content: bytes, pattern: str) -> None:
    """ValueError for a pattern that leaves characters out, or finds pieces of none: a text would come back cut."""
    try:
        reader = open_reader("tiktoken", content, {"pattern": pattern, "special": {}})
        back = reader.decode(reader.encode_ordinary(_ALL_KINDS))
    except BaseException as error:  # a panic of Rust is no Exception
        if isinstance(error, ValueError | ImportError | KeyboardInterrupt | SystemExit | MemoryError):
            raise
        back = f"{type(error).__name__}: {error}"
    if back != _ALL_KINDS:
        raise ValueError(
            f"{path}: got the splitting pattern {pattern!r:.60}, by which {_ALL_KINDS!r} comes back as {back!r:.80}, "
            "wanted one that finds every character, in pieces of one or more; write the model's own, whole"
        )


def _assigned(path: Path, name: str) -> str | None:
    """The text that a Python file gives a name, as a literal; nothing is run."""
    try:
        tree = ast.parse(path.read_bytes())
    except (SyntaxError, ValueError):
        return None
    for node in tree.body:
        if isinstance(node, ast.Assign) and any(isinstance(x, ast.Name) and x.id == name for x in node.targets):
            if isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
                return node.value.value
    return None
