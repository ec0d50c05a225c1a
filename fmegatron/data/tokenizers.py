"""Tokenizers that need no files: bytes, and the characters of a text.

A tokenizer is a frozen value with `vocab_size`, `encode(text) -> numpy array`, `decode(ids) -> str`, `describe() ->
dict` (plain JSON, the inverse of `open_tokenizer.tokenizer_from`) and `save(path)` (the inverse of `load_tokenizer`).
"""

import json
import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np


def smallest_dtype(vocab_size: int) -> np.dtype:
    """The narrowest of uint8, uint16 and uint32 that holds every id below `vocab_size`; ValueError above 2**32.

    >>> smallest_dtype(256), smallest_dtype(257)
    (dtype('uint8'), dtype('uint16'))
    """
    for dtype in (np.uint8, np.uint16, np.uint32):
        if vocab_size <= np.iinfo(dtype).max + 1:
            return np.dtype(dtype)
    raise ValueError(
        f"vocab_size: got {vocab_size:,}, wanted at most 2**32 = {2**32:,}, the widest id that is stored (uint32)"
    )


@dataclass(frozen=True)
class ByteTokenizer:
    """UTF-8 bytes as tokens: 256 ids, every text can be encoded, nothing has to be saved with a model.

    >>> ByteTokenizer().decode(ByteTokenizer().encode("naïve"))
    'naïve'
    """

    @property
    def vocab_size(self) -> int:
        """Number of ids: 256."""
        return 256

    def encode(self, text: str) -> np.ndarray:
        """The UTF-8 bytes of a text: uint8 [bytes]."""
        return np.frombuffer(text.encode("utf-8"), dtype=np.uint8)

    def encode_many(self, texts: Sequence[str]) -> tuple[np.ndarray, np.ndarray]:
        """(ids of all texts, one after the other; how many are of each: int64 [texts])."""
        parts = [text.encode("utf-8") for text in texts]
        return np.frombuffer(b"".join(parts), dtype=np.uint8), np.array([len(part) for part in parts], np.int64)

    def located(self, text: str) -> tuple[np.ndarray, np.ndarray]:
        """(ids int64 [n], characters int64 [n, 2]: start, stop in the text of what each id is of)."""
        points = _code_points(text)
        character = np.repeat(np.arange(len(text)), 1 + (points > 0x7F) + (points > 0x7FF) + (points > 0xFFFF))
        return self.encode(text).astype(np.int64), np.stack([character, character + 1], 1)

    def decode(self, ids: Iterable[int]) -> str:
        """The text of UTF-8 bytes (any integer array or tensor); bytes that are no UTF-8 become U+FFFD."""
        return checked_ids(ids, self.vocab_size).astype(np.uint8).tobytes().decode("utf-8", errors="replace")

    def describe(self) -> dict:
        """What `tokenizer_from` needs to make this tokenizer again, as plain JSON."""
        return {"kind": "byte"}

    def save(self, path: str | os.PathLike) -> None:
        """Write `describe()` as a JSON file, which `load_tokenizer` reads."""
        _save(self, path)


@dataclass(frozen=True)
class CharTokenizer:
    """Characters as tokens: id i is the i-th character of `vocab`. Make one from a text with `CharTokenizer.from_text`.

    Raises ValueError when `vocab` is empty or holds a character twice.

    >>> tokenizer = CharTokenizer.from_text("to be or not")
    >>> tokenizer.vocab, tokenizer.encode("note").tolist()
    (' benort', [3, 4, 6, 2])
    """

    vocab: str

    def __post_init__(self) -> None:
        if not self.vocab:
            raise ValueError(
                "CharTokenizer: got an empty vocab, wanted the characters that the model will see; use"
                " CharTokenizer.from_text(text)"
            )
        if len(set(self.vocab)) != len(self.vocab):
            twice = sorted({c for c in self.vocab if self.vocab.count(c) > 1})
            raise ValueError(
                f"CharTokenizer: got a vocab with {_quote(twice)} more than once, wanted each once; use "
                "CharTokenizer.from_text(text)"
            )

    @classmethod
    def from_text(cls, text: str) -> "CharTokenizer":
        """The tokenizer of all characters in `text`, in the order of their code points."""
        return cls("".join(sorted(set(text))))

    @property
    def vocab_size(self) -> int:
        """Number of ids: the length of `vocab`."""
        return len(self.vocab)

    def encode(self, text: str) -> np.ndarray:
        """Ids of the characters: [characters], uint8, uint16 or uint32, whichever holds `vocab_size` ids.

        ValueError names the characters that are not in the vocabulary and where the first one stands.
        """
        vocab, points = _code_points(self.vocab), _code_points(text)
        order = np.argsort(vocab)
        found = order[np.minimum(np.searchsorted(vocab, points, sorter=order), len(vocab) - 1)]
        unknown = vocab[found] != points
        if unknown.any():
            where = int(unknown.argmax())
            raise ValueError(
                f"CharTokenizer.encode: got {int(unknown.sum())} of {len(text)} characters that are not among the "
                f"{self.vocab_size} of the vocabulary: {_quote(sorted({text[i] for i in unknown.nonzero()[0]}))}, the "
                f"first at position {where} (…{text[max(0, where - 10) : where + 10]!r}…), wanted none; remove them "
                "from the text, or build the tokenizer from a text that has them (CharTokenizer.from_text), or use "
                "ByteTokenizer, which knows every text"
            )
        return found.astype(smallest_dtype(self.vocab_size))

    def encode_many(self, texts: Sequence[str]) -> tuple[np.ndarray, np.ndarray]:
        """(ids of all texts, one after the other; how many are of each: int64 [texts])."""
        return self.encode("".join(texts)), np.array([len(text) for text in texts], np.int64)

    def located(self, text: str) -> tuple[np.ndarray, np.ndarray]:
        """(ids int64 [n], characters int64 [n, 2]: start, stop in the text of what each id is of)."""
        character = np.arange(len(text))
        return self.encode(text).astype(np.int64), np.stack([character, character + 1], 1)

    def decode(self, ids: Iterable[int]) -> str:
        """The text of ids (any integer array or tensor); ValueError when an id is outside of the vocabulary."""
        points = _code_points(self.vocab)[checked_ids(ids, self.vocab_size)]
        return points.astype("<u4").tobytes().decode("utf-32-le", errors="surrogatepass")

    def describe(self) -> dict:
        """What `tokenizer_from` needs to make this tokenizer again, as plain JSON."""
        return {"kind": "char", "vocab": self.vocab}

    def save(self, path: str | os.PathLike) -> None:
        """Write `describe()` as a JSON file, which `load_tokenizer` reads."""
        _save(self, path)


def _save(tokenizer: ByteTokenizer | CharTokenizer, path: str | os.PathLike) -> None:
    with open(path, "w", encoding="utf-8") as file:
        json.dump(tokenizer.describe(), file)
        file.write("\n")


def _code_points(text: str) -> np.ndarray:
    return np.frombuffer(text.encode("utf-32-le", errors="surrogatepass"), dtype="<u4")


def checked_ids(ids: Iterable[int], vocab_size: int) -> np.ndarray:
    """Ids as one row of integers; ValueError for other ones, and for one outside of the vocabulary."""
    ids = np.asarray(ids)
    if ids.size == 0:
        return np.zeros(0, dtype=np.int64)
    if ids.ndim != 1 or ids.dtype.kind not in "iu":
        raise ValueError(f"decode: got {ids.dtype}{list(ids.shape)}, wanted one row of integer ids")
    if ids.min() < 0 or ids.max() >= vocab_size:
        raise ValueError(
            f"decode: got ids from {ids.min()} to {ids.max()}, wanted 0 to {vocab_size - 1}, those of the vocabulary;"
            " a model with a padded vocabulary must mask the padded logits before it samples"
        )
    return ids


def _quote(characters: list[str]) -> str:
    shown = ", ".join(f"{c!r} (U+{ord(c):04X})" for c in characters[:8])
    return shown + (f" and {len(characters) - 8} more" if len(characters) > 8 else "")
