"""Writing PREFIX.bin and PREFIX.idx: documents as they come, files of other runs one after the other."""

from __future__ import annotations

import json
import os
import shutil
from array import array
from collections.abc import Iterable, Sequence
from contextlib import suppress
from pathlib import Path
from types import MappingProxyType
from typing import Any, BinaryIO, Self

import numpy as np

from fmegatron.data.fingerprint import fingerprint
from fmegatron.data.indexed import CODES, MAGIC, IndexedTokens, bare
from fmegatron.data.open_tokenizer import beside
from fmegatron.data.stored import digest_of
from fmegatron.files import whole

_CODE = MappingProxyType({np.dtype(name): code for code, name in CODES.items()})
_SLICE = 1 << 20  # entries or bytes that are in memory at once
_FACTS = b'{\n  "documents":'  # with which each PREFIX.json of `prepare` and `merge_indexed` begins


class IndexedWriter:
    """Writes one corpus: `add` sequences, `end_document` behind the last one of each document.

        with IndexedWriter("corpus/text", "uint16") as writer:
            for ids in documents:
                writer.add(ids)
                writer.end_document()

    Both files appear when the block ends without an exception, complete and durable; a pair of this name is replaced
    then, and what `prepare` stated of it in PREFIX.json is removed. dtype: uint8, int8, int16, int32, int64, uint16,
    float32 or float64. ValueError for ids that do not fit.
    """

    def __init__(self, prefix: str | os.PathLike, dtype: str | np.dtype | type) -> None:
        self.prefix, self.dtype = bare(prefix), np.dtype(dtype)
        if self.dtype not in _CODE:
            wanted = ", ".join(found.name for found in _CODE)
            raise ValueError(f"{self.prefix}: got dtype {self.dtype.name}, wanted one of {wanted}")
        self._lengths, self._documents, self._modes = array("i"), array("q", [0]), bytearray()
        self._temporary = {kind: f"{self.prefix}.{kind}.{os.getpid()}.partial" for kind in ("bin", "idx")}
        self._file: BinaryIO  # from __enter__ on
        self._open = 0  # sequences of the document that has not ended

    def __enter__(self) -> Self:
        Path(self.prefix).parent.mkdir(parents=True, exist_ok=True)
        self._file = open(self._temporary["bin"], "wb")
        return self

    def __exit__(self, kind: type | None, *_) -> None:
        try:
            if kind is None:
                self._finish()
        finally:
            self._file.close()
            for path in self._temporary.values():
                with suppress(FileNotFoundError):
                    os.unlink(path)

    @property
    def tokens(self) -> int:
        """Number of tokens so far."""
        return self._file.tell() // self.dtype.itemsize

    @property
    def documents(self) -> int:
        """Number of documents that have ended."""
        return len(self._documents) - 1

    def add(self, ids: np.ndarray | Sequence[int], mode: int = 0) -> None:
        """One sequence of a document; mode: a number that some multimodal data have."""
        part = np.asarray(ids) if len(ids) else np.zeros(0, dtype=self.dtype)
        fits = part.dtype.kind in ("iuf" if self.dtype.kind == "f" else "iu")
        if part.ndim != 1 or not fits:
            raise ValueError(f"{self.prefix}: got ids {part.dtype}{list(part.shape)}, wanted {self.dtype.name} [count]")
        if part.size and self.dtype.kind != "f":
            low, high, limits = part.min(), part.max(), np.iinfo(self.dtype.name)
            if low < limits.min or high > limits.max:
                raise ValueError(
                    f"{self.prefix}: got ids from {low} to {high}, wanted {limits.min} to {limits.max}; use a wider "
                    "dtype"
                )
        self._file.write(np.ascontiguousarray(part, dtype=self.dtype.newbyteorder("<")).data.cast("B"))
        self._lengths.append(len(part))
        self._open += 1
        if mode and not self._modes:
            self._modes = bytearray(len(self._lengths) - 1)
        if self._modes or mode:
            self._modes.append(mode % 256)

    def add_documents(self, ids: np.ndarray, lengths: Sequence[int] | np.ndarray) -> None:
        """Documents of one sequence each, whose ids follow one another; quicker than one by one."""
        if sum(lengths) != len(ids):
            raise ValueError(f"{self.prefix}: got {len(ids)} ids and documents of {sum(lengths)}, wanted as many")
        if len(lengths):
            before = self._open
            self.add(ids)
            self._lengths.pop()
            self._open = before
            first = len(self._lengths)
            self._lengths.extend([int(length) for length in lengths])
            self._documents.extend(range(first + 1, first + 1 + len(lengths)))
            if self._modes:
                self._modes += bytes(len(lengths) - 1)

    def end_document(self) -> None:
        """What was added since the last call is a document, also if that is nothing."""
        self._documents.append(len(self._lengths))
        self._open = 0

    def extend(self, other: IndexedTokens) -> None:
        """All documents of another corpus of this dtype, behind those that are there."""
        if other.dtype != self.dtype:
            raise ValueError(
                f"{self.prefix}: got {other.prefix} of {other.dtype.name}, wanted {self.dtype.name}; make them alike "
                "when they are written"
            )
        before = len(self._lengths)
        if other.modes is not None and not self._modes:
            self._modes = bytearray(before)
        for a in range(0, other.sequences, _SLICE):
            part = other.lengths[a : a + _SLICE]
            self._lengths.frombytes(np.ascontiguousarray(part, dtype=np.intc).tobytes())
            if other.modes is not None:
                self._modes += other.modes[a : a + _SLICE].tobytes()
        if self._modes:
            self._modes += bytes(len(self._lengths) - len(self._modes))
        for a in range(1, other.documents + 1, _SLICE):
            part = np.asarray(other._documents[a : min(a + _SLICE, other.documents + 1)], dtype=np.int64)
            self._documents.frombytes((part + before).tobytes())
        for a in range(0, len(other), _SLICE):
            self._file.write(np.ascontiguousarray(other[a : a + _SLICE]).data.cast("B"))

    def _finish(self) -> None:
        if self._open:
            raise ValueError(f"{self.prefix}: got {self._open} sequences behind the last document, wanted none; "
                             "call end_document() behind each document")  # fmt: skip
        with open(self._temporary["idx"], "wb") as file:
            sizes = (len(self._lengths), len(self._documents))
            file.write(MAGIC + (1).to_bytes(8, "little") + bytes([_CODE[self.dtype]]))
            file.write(b"".join(size.to_bytes(8, "little") for size in sizes))
            lengths = np.frombuffer(self._lengths, dtype=np.intc)
            for a in range(0, len(lengths), _SLICE):
                file.write(lengths[a : a + _SLICE].astype("<i4").data)
            offset = 0
            for a in range(0, len(lengths), _SLICE):
                sizes = lengths[a : a + _SLICE].astype(np.int64) * self.dtype.itemsize
                file.write((offset + np.cumsum(sizes) - sizes).astype("<i8").data)
                offset += int(sizes.sum())
            file.write(np.frombuffer(self._documents, dtype=np.int64).astype("<i8").data)
            file.write(self._modes)
            whole.sync_file(file)
        whole.sync_file(self._file)
        _published(self._temporary, self.prefix)


def write_indexed(
    prefix: str | os.PathLike,
    documents: Iterable[np.ndarray | Sequence[np.ndarray | Sequence[int]]],
    dtype: str | np.dtype | type,
    append: bool = False,
) -> IndexedTokens:
    """Write documents as PREFIX.bin and PREFIX.idx, which Megatron reads, and open them.

    documents: each one an array of ids, or a list of several, its sequences ([]: none). dtype: of the tokens
    (`token_dtype(vocab_size)` is Megatron's choice). append: behind the documents that are there; the files are written
    anew, as both must fit.
    """
    with IndexedWriter(prefix, dtype) as writer:
        if append:
            writer.extend(IndexedTokens(prefix))
        for document in documents:
            single = hasattr(document, "__array__") or len(document) > 0 and np.ndim(document[0]) == 0
            sequences: Any = [document] if single else document
            for sequence in sequences:
                writer.add(sequence)
            writer.end_document()
    return IndexedTokens(prefix)


def merge_indexed(prefix: str | os.PathLike, prefixes: Iterable[str | os.PathLike]) -> IndexedTokens:
    """Write the documents of several corpora of one dtype, in order, as one, and open it.

    Where all of them state the same tokenizer, in the PREFIX.json that `prepare` writes, the new one states it as well.
    ValueError where two state different ones.
    """
    parts = [IndexedTokens(part) for part in prefixes]
    if not parts:
        raise ValueError(f"{bare(prefix)}: got no corpus to merge, wanted one or more")
    stated = [_stated(part) for part in parts]
    known = [(part, facts) for part, facts in zip(parts, stated, strict=True) if facts]
    for part, facts in known[1:]:
        if facts["tokenizer"] != known[0][1]["tokenizer"]:
            raise ValueError(
                f"{bare(prefix)}: got {known[0][0].prefix} of the tokenizer {_short(known[0][1])} and {part.prefix} of "
                f"{_short(facts)}, wanted corpora of one tokenizer; prepare one of them again"
            )
    saved = parts[0]._beside(".tokenizer.json")  # before PREFIX, which may be one of them, is replaced
    with IndexedWriter(prefix, parts[0].dtype) as writer:
        for part in parts:
            writer.extend(part)
    merged = IndexedTokens(prefix)
    if len(known) == len(parts):
        facts, eods = known[0][1], {one.get("eod") for one in stated}
        if saved is not None and "digest" in facts["tokenizer"]:
            with whole.whole_file(beside(merged.prefix)) as file:
                file.write(saved)
        found = {
            "documents": merged.documents, "tokens": len(merged), "dtype": merged.dtype.name,
            "digest": fingerprint(merged), "eod": eods.pop() if len(eods) == 1 else None,
            "tokenizer": facts["tokenizer"], "tokenizer_digest": digest_of(facts["tokenizer"]),
            "merged": [part.prefix for part in parts],
        }  # fmt: skip
        with whole.whole_file(f"{merged.prefix}.json") as file:
            file.write(json.dumps(found, indent=2).encode() + b"\n")
    return merged


def _stated(of: IndexedTokens) -> dict[str, Any]:
    """What PREFIX.json states; {} where there is none, or it names no tokenizer."""
    with suppress(ValueError):
        found = json.loads(of._beside(".json") or b"{}")
        if isinstance(found, dict) and isinstance(found.get("tokenizer"), dict):
            return found
    return {}


def _short(facts: dict[str, Any]) -> str:
    """A tokenizer in words."""
    found = facts["tokenizer"]
    return f"{found.get('kind')!r} ({found.get('digest') or digest_of(found):.12})"


def link_indexed(source: str | os.PathLike, prefix: str | os.PathLike) -> None:
    """Give a corpus another name as well, in the place of one that has it; a copy where there are no hard links."""
    source, prefix = bare(source), bare(prefix)
    temporary = {kind: f"{prefix}.{kind}.{os.getpid()}.partial" for kind in ("bin", "idx")}
    try:
        for kind, path in temporary.items():
            with suppress(FileNotFoundError):
                os.unlink(path)
            try:
                os.link(f"{source}.{kind}", path)
            except OSError:
                with open(f"{source}.{kind}", "rb") as old, open(path, "wb") as new:
                    shutil.copyfileobj(old, new, _SLICE)
                    whole.sync_file(new)
        _published(temporary, prefix)
    finally:
        for path in temporary.values():  # a file that has both names keeps them when it is renamed
            with suppress(FileNotFoundError):
                os.unlink(path)


def _published(files: dict[str, str], prefix: str) -> None:
    # Without its index a corpus is not there. So no reader sees an index beside the data of another.
    with suppress(FileNotFoundError):
        os.unlink(f"{prefix}.idx")
    for kind in ("bin", "idx"):
        whole.take_name(files[kind], f"{prefix}.{kind}")
    with suppress(FileNotFoundError):  # what was stated of the pair before; a file of something else stays
        with open(f"{prefix}.json", "rb") as file:
            stale = file.read(len(_FACTS)) == _FACTS
        if stale:
            os.unlink(f"{prefix}.json")
    whole.sync_directory(Path(prefix).parent)


def token_dtype(vocab_size: int) -> np.dtype:
    """The dtype of tokens in .bin files: uint16 below 65,500 ids, else int32 (Megatron's rule).

    >>> token_dtype(50257), token_dtype(128256)
    (dtype('uint16'), dtype('int32'))
    """
    return np.dtype(np.uint16 if vocab_size < 65500 else np.int32)
