"""Tokenizers with a vocabulary in a file: Hugging Face's tokenizer.json, SentencePiece, tiktoken.

Each is a frozen value, equal to every other of the same bytes: it keeps the bytes of its file and their digest, so that
what is saved with a model is what encoded its text. The packages that read the files are optional.
"""

from __future__ import annotations

import base64
import binascii
import functools
import hashlib
import importlib
import itertools
import json
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import numpy as np

from fmegatron.data.template import ChatTemplate
from fmegatron.data.tokenizers import checked_ids, smallest_dtype

Kind = Literal["huggingface", "sentencepiece", "tiktoken"]
KINDS: tuple[Kind, ...] = ("huggingface", "sentencepiece", "tiktoken")
_PACKAGES = ("tokenizers", "sentencepiece", "tiktoken")  # which read them
SPECIAL = ("bos", "eos", "pad", "unk")


@dataclass(frozen=True)
class SubwordTokenizer:
    """Subwords as tokens, by the file of another project. Make one with `load_tokenizer(path)`.

    kind: which package reads it. content: the file's bytes. special: ids of "bos", "eos", "pad", "unk" that there are
    (attributes `bos`, `eos`, `pad`, `unk`, None where there is none). settings: what else its maths needs; of tiktoken
    "pattern" and "special", text -> id. Nothing is added to a text: bos and eos are the caller's. chat: the template of
    chats, which is saved with it, and changes neither an id nor the digest.
    """

    kind: Kind
    content: bytes = field(repr=False)
    special: Mapping[str, int] = field(default_factory=dict)
    settings: Mapping[str, Any] = field(default_factory=dict, repr=False)
    chat: ChatTemplate | None = field(default=None, repr=False, compare=False)

    def __hash__(self) -> int:
        return hash(self.digest)

    def __reduce__(self):  # the package's own object, which is made when it is needed, does not travel
        return SubwordTokenizer, (self.kind, self.content, dict(self.special), dict(self.settings), self.chat)

    @functools.cached_property
    def digest(self) -> str:
        """sha256 of the file and the settings, hexadecimal."""
        text = json.dumps([self.kind, dict(self.special), dict(self.settings)], sort_keys=True)
        return hashlib.sha256(self.content + text.encode()).hexdigest()

    @property
    def bos(self) -> int | None:
        """Id of the beginning of a text, or None."""
        return self.special.get("bos")

    @property
    def eos(self) -> int | None:
        """Id of the end of a text, or None."""
        return self.special.get("eos")

    @property
    def pad(self) -> int | None:
        """Id of padding, or None."""
        return self.special.get("pad")

    @property
    def unk(self) -> int | None:
        """Id of what the vocabulary lacks, or None."""
        return self.special.get("unk")

    @functools.cached_property
    def _reader(self) -> Any:
        return open_reader(self.kind, self.content, self.settings)

    @functools.cached_property
    def _size(self) -> int:
        if self.kind == "huggingface":  # its own size is a count, and there may be gaps
            return 1 + max(self._reader.get_vocab(with_added_tokens=True).values(), default=-1)
        return self._reader.vocab_size() if self.kind == "sentencepiece" else self._reader.n_vocab

    @property
    def vocab_size(self) -> int:
        """Number of ids, special ones and gaps included: one more than the largest."""
        return self._size

    def encode(self, text: str) -> np.ndarray:
        """Ids of a text, nothing added: [tokens], uint8, uint16 or uint32, whichever holds `vocab_size` ids.

        Names of special tokens in the text become these with Hugging Face's files, and stay text with the others.
        """
        if self.kind == "huggingface":
            ids = self._reader.encode(text, add_special_tokens=False).ids
        elif self.kind == "sentencepiece":
            ids = self._reader.encode(text)
        else:
            ids = self._reader.encode(text, disallowed_special=())
        return np.asarray(ids, dtype=smallest_dtype(self.vocab_size))

    def encode_many(self, texts: Sequence[str]) -> tuple[np.ndarray, np.ndarray]:
        """(ids of all texts, one after the other; how many are of each: int64 [texts])."""
        if self.kind == "huggingface":
            rows = [one.ids for one in self._reader.encode_batch_fast(list(texts), add_special_tokens=False)]
        elif self.kind == "sentencepiece":
            rows = self._reader.encode(list(texts))
        else:
            rows = [self._reader.encode(text, disallowed_special=()) for text in texts]
        lengths, dtype = np.array([len(row) for row in rows], np.int64), smallest_dtype(self.vocab_size)
        return np.fromiter(itertools.chain.from_iterable(rows), dtype, int(lengths.sum())), lengths

    def located(self, text: str) -> tuple[np.ndarray, np.ndarray]:
        """(ids int64 [n], characters int64 [n, 2]: start, stop in the text of what each id is of); names of special
        tokens become these.

        ValueError for SentencePiece's files, whose special tokens no text has.
        """
        if self.kind == "huggingface":
            found = self._reader.encode(text, add_special_tokens=False)
            return np.array(found.ids, np.int64), np.array(found.offsets, np.int64).reshape(-1, 2)
        if self.kind == "tiktoken":
            ids = self._reader.encode(text, allowed_special="all")
            starts = self._reader.decode_with_offsets(ids)[1]
            places = np.array([*starts, len(text)], np.int64)
            return np.array(ids, np.int64), np.stack([places[:-1], places[1:]], 1)
        raise ValueError(
            f"tokenizer: got one of kind {self.kind!r} and a text with names of special tokens, wanted a "
            "tokenizer.json; most models of Hugging Face have one: load_tokenizer(folder)"
        )

    def decode(self, ids: Iterable[int]) -> str:
        """The text of ids (any integer array or tensor), special ones included; ValueError for one of `vocab_size`
        or more. An id in a gap of the vocabulary has no text.
        """
        known = checked_ids(ids, self.vocab_size).tolist()
        if self.kind == "huggingface":
            return self._reader.decode(known, skip_special_tokens=False)
        return self._reader.decode(known)

    def describe(self) -> dict:
        """Kind, digest, size and special ids, as plain JSON: what names it beside data. The file is not in it."""
        return {
            "kind": self.kind, "digest": self.digest, "vocab_size": self.vocab_size, "special": dict(self.special)
        }  # fmt: skip

    def save(self, path: str | os.PathLike) -> None:
        """Write a JSON file, which `load_tokenizer` reads: `describe()`, settings, chat template, the file's bytes."""
        saved = {**self.describe(), "settings": dict(self.settings)}
        if self.chat is not None:
            saved["chat"] = {"text": self.chat.text, "special": dict(self.chat.special)}
            saved["chat"] |= {} if self.chat.date is None else {"date": self.chat.date}
        content = base64.b64encode(self.content).decode("ascii")
        Path(path).write_text(json.dumps({**saved, "content": content}) + "\n", "utf-8")


def from_saved(saved: Mapping[str, Any]) -> SubwordTokenizer:
    """The tokenizer of a file that `save` wrote; ValueError where its bytes have another digest."""
    try:
        content = base64.b64decode(saved["content"], validate=True)
        given = saved.get("chat")
        chat = None if given is None else ChatTemplate(given["text"], dict(given["special"]), given.get("date"))
        found = SubwordTokenizer(saved["kind"], content, dict(saved["special"]), dict(saved["settings"]), chat)
    except (KeyError, TypeError, ValueError, binascii.Error) as error:
        raise ValueError(
            f"tokenizer of kind {saved.get('kind')!r}: got no 'content' ({error}), wanted what `save` writes"
        ) from None
    if found.digest != saved.get("digest"):
        raise ValueError(
            f"tokenizer: got bytes of the digest {found.digest[:12]}, wanted {str(saved.get('digest'))[:12]}: the file "
            "was changed; take the one that was saved with the model or the data"
        )
    return found


def ranks_of(path: Path, content: bytes) -> dict[bytes, int]:
    """Of each token's bytes, its id."""
    try:
        lines = [line.split() for line in content.splitlines() if line]
        ranks = {base64.b64decode(token, validate=True): int(rank) for token, rank in lines}
    except ValueError as error:
        raise ValueError(f"{path}: got no ranks of tiktoken ({error}), wanted lines of base64 and a number") from None
    if sorted(ranks.values()) != list(range(len(ranks))):
        raise ValueError(f"{path}: got {len(ranks)} ranks with gaps, wanted 0 to {len(ranks) - 1}, each once")
    return ranks


def open_reader(kind: Kind, content: bytes, settings: Mapping[str, Any]) -> Any:
    """The object of the package that reads this kind. ValueError for content that it cannot read."""
    package = _PACKAGES[KINDS.index(kind)]
    try:
        module = importlib.import_module(package)
    except ImportError:
        raise ImportError(
            f"tokenizer: got one of kind {kind!r} without the package that reads it, wanted it; pip install {package}"
        ) from None
    try:
        if kind == "huggingface":
            found = module.Tokenizer.from_str(content.decode("utf-8"))
            found.no_truncation()  # a file that was saved after a call may cut each text, and fill it up
            found.no_padding()
            return found
        if kind == "sentencepiece":
            return module.SentencePieceProcessor(model_proto=content)
        ranks = ranks_of(Path("tiktoken"), content)
        return module.Encoding(
            "fmegatron", pat_str=settings["pattern"], mergeable_ranks=ranks, special_tokens=dict(settings["special"])
        )
    except Exception as error:  # each package has its own kinds of errors, Exception itself among them
        raise ValueError(f"tokenizer: got content that {package} cannot read ({error}), wanted a whole file") from None
