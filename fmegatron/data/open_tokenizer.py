"""Opening a tokenizer: what `save` wrote, or the file or folder of another project, by what it holds."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeAlias

from fmegatron.data.foreign_tokenizer import from_foreign
from fmegatron.data.subword import KINDS, SubwordTokenizer, from_saved
from fmegatron.data.tokenizers import ByteTokenizer, CharTokenizer
from fmegatron.files import disk

Tokenizer: TypeAlias = ByteTokenizer | CharTokenizer | SubwordTokenizer


def beside(data: str | os.PathLike) -> str:
    """Where the tokenizer of a data file is saved whose description does not hold it."""
    return f"{os.fspath(data)}.tokenizer.json"


def keep_beside(tokenizer: Tokenizer | None, data: str | os.PathLike) -> None:
    """Save a tokenizer beside the data that it made, where its description alone would not bring it back."""
    if isinstance(tokenizer, SubwordTokenizer):
        tokenizer.save(beside(data))


def tokenizer_from(description: Mapping[str, Any], data: str | os.PathLike | None = None) -> Tokenizer:
    """The tokenizer that `describe()` described. data: a file with that description, beside which it may
    have been saved.

    ValueError when the kind is unknown, a field is missing, or the file beside the data is gone or another one.
    """
    kind = description.get("kind")
    if kind == "byte":
        return ByteTokenizer()
    if kind == "char" and isinstance(description.get("vocab"), str):
        return CharTokenizer(description["vocab"])
    if kind in KINDS:
        if "content" in description:
            return from_saved(description)
        try:
            found = None if data is None else load_tokenizer(beside(data))
        except FileNotFoundError:
            found = None
        if data is None or found is None:
            raise ValueError(
                f"tokenizer: got the description of one of kind {kind!r}, wanted the file that `save` wrote"
                f"{'' if data is None else f', {beside(data)}'}; load_tokenizer(path) opens the original one"
            )
        if not isinstance(found, SubwordTokenizer) or found.digest != description.get("digest"):
            raise ValueError(
                f"{beside(data)}: got another tokenizer than the one that made {os.fspath(data)}, wanted the digest "
                f"{str(description.get('digest'))[:12]}; put the original file there"
            )
        return found
    kinds = ", ".join(repr(one) for one in KINDS)
    raise ValueError(
        f"tokenizer: got {str(dict(description))[:200]}, wanted {{'kind': 'byte'}}, {{'kind': 'char', 'vocab': '...'}} "
        f"or one of kind {kinds}"
    )


def load_tokenizer(path: str | os.PathLike) -> Tokenizer:
    """The tokenizer in a JSON file that `save` wrote, or of another project (`foreign_tokenizer.from_foreign`):
    tokenizer.json, a model of SentencePiece, ranks of tiktoken, or a folder that has one of them.

    ValueError names the file when it is no such file; FileNotFoundError when there is none.
    """
    try:
        if disk.listed(path) is None and (saved := _saved(Path(path))) is not None:
            return tokenizer_from(saved)
        return from_foreign(path)
    except ValueError as error:
        raise ValueError(
            f"{os.fspath(path)}: got no tokenizer file ({error}), wanted what tokenizer.save(path) writes, or a "
            "tokenizer of Hugging Face, SentencePiece or tiktoken"
        ) from error


def _saved(path: Path) -> dict | None:
    """The object of a file that is JSON and not Hugging Face's; None for other files."""
    content = path.read_bytes()
    if content.lstrip()[:1] not in (b"{", b"["):
        return None
    found = json.loads(content)
    if not isinstance(found, dict):
        raise ValueError(f"got {type(found).__name__}, wanted a JSON object")
    return None if "kind" not in found and "model" in found else found
