"""Texts of corpora in files: JSON lines, plain, gzip or zstd; text files; Parquet; folders of `datasets`."""

from __future__ import annotations

import gzip
import itertools
import json
import os
import zlib
from collections.abc import Iterable, Iterator
from types import MappingProxyType
from typing import IO, NamedTuple

from fmegatron.files import disk

_KINDS = MappingProxyType(
    {
        ".jsonl.gz": "gzip",
        ".json.gz": "gzip",
        ".jsonl.zst": "zstd",
        ".json.zst": "zstd",
        ".jsonl": "lines",
        ".json": "lines",
        ".txt": "text",
        ".parquet": "parquet",
    }
)
_BLOCK = 1 << 20  # bytes that are read at once
_ROWS = 1000  # of a dataset
_MARK = "\ufeff"  # the byte order mark that editors of Windows put before a file; it is no text


class Part(NamedTuple):
    """A part of an input that one process reads. kind: of `kind_of`. start, stop: bytes in which its lines begin, row
    groups, or rows; what cannot be cut is (0, 1)."""

    path: str
    kind: str
    start: int
    stop: int


def kind_of(path: str | os.PathLike) -> str:
    """lines (.jsonl, .json), gzip, zstd (of JSON lines), text, parquet or dataset (a folder that `save_to_disk` wrote).

    ValueError for another name.
    """
    name = os.fspath(path)
    for suffix, kind in _KINDS.items():
        if name.endswith(suffix):
            return kind
    names = set(disk.listed(name) or ())
    if {"state.json", "dataset_info.json"} & names:
        return "dataset"
    if "dataset_dict.json" in names:
        raise ValueError(f"{name}: got a folder of several splits, wanted one of them; name {name}/train, or another")
    raise ValueError(
        f"{name}: got a file of an unknown kind, wanted .jsonl, .jsonl.gz, .jsonl.zst, .txt, .parquet, or a folder "
        "that datasets.Dataset.save_to_disk wrote; rename or convert it"
    )


def parts_of(path: str | os.PathLike, part_bytes: int) -> list[Part]:
    """The parts of an input, in order: of about so many bytes each, where its kind can be cut."""
    name, kind = os.fspath(path), kind_of(path)
    if kind == "lines":
        size = os.path.getsize(name)
        return [Part(name, kind, a, min(a + part_bytes, size)) for a in range(0, max(size, 1), part_bytes)]
    if kind == "parquet":
        return [Part(name, kind, i, i + 1) for i in range(_parquet(name).num_row_groups)]
    if kind == "dataset":
        rows = len(_dataset(name))
        return [Part(name, kind, a, min(a + 10_000, rows)) for a in range(0, rows, 10_000)]
    return [Part(name, kind, 0, 1)]


class Bad(NamedTuple):
    """A document that was left out. at: the byte of its line, or its row, or 0; why: in words."""

    path: str
    at: int
    why: str


def texts_of(part: Part, key: str, bad: list[Bad] | None = None) -> Iterator[str]:
    """The texts of a part, in order; key: the field of an object or row that has it. A text file is one text.

    bad: gets the documents that cannot be read, which are left out; None: ValueError names the file and the place of
    the first. What is damaged as a file is an error in either case.
    """
    if part.kind == "text":
        with open(part.path, "rb") as file:
            data = file.read()
        try:
            yield _decoded(data, part.path, 0).removeprefix(_MARK)
        except ValueError as error:
            _leave_out(bad, Bad(part.path, 0, str(error)), error)
    elif part.kind == "lines":
        with open(part.path, "rb") as file:
            if part.start:
                file.seek(part.start - 1)
                file.readline()  # the line that began before belongs to the part before
            begin = file.tell()
            yield from _lines(_blocks(file, part.stop - begin), part.path, key, begin, bad)
    elif part.kind == "gzip":
        try:
            with gzip.open(part.path, "rb") as file:
                yield from _lines(_blocks(file), part.path, key, 0, bad)
        except (EOFError, gzip.BadGzipFile, zlib.error) as error:
            raise ValueError(f"{part.path}: got a damaged gzip file ({error}), wanted a complete one") from None
    elif part.kind == "zstd":
        yield from _lines(_zstd(part.path), part.path, key, 0, bad)
    elif part.kind == "parquet":
        file = _parquet(part.path)
        if key not in file.schema_arrow.names:
            raise _no_key(part.path, key, file.schema_arrow.names)
        try:
            row = sum(file.metadata.row_group(i).num_rows for i in range(part.start))
            for batch in file.iter_batches(row_groups=list(range(part.start, part.stop)), columns=[key]):
                where, values = f"{part.path}, row group {part.start}", batch.column(0).to_pylist()
                yield from _texts(values, part.path, row, where, key, file.schema_arrow.names, bad)
                row += len(values)
        except OSError as error:
            raise ValueError(f"{part.path}: got a damaged Parquet file ({error}), wanted a complete one") from None
    else:
        rows = _dataset(part.path)
        if key not in rows.column_names:
            raise _no_key(part.path, key, rows.column_names)
        column = rows.select_columns([key])
        for a in range(part.start, part.stop, _ROWS):
            where = f"{part.path}, rows {a} to {min(a + _ROWS, part.stop) - 1}"
            values = column[a : min(a + _ROWS, part.stop)][key]
            yield from _texts(values, part.path, a, where, key, rows.column_names, bad)


def _leave_out(bad: list[Bad] | None, one: Bad, error: ValueError) -> None:
    """Note it, or raise the error."""
    if bad is None:
        error.args = (f"{error}; or leave such documents out: --skip-bad",)
        raise error from None
    bad.append(one)


def _texts(
    values: list, path: str, first: int, where: str, key: str, names: Iterable[str], bad: list[Bad] | None
) -> Iterator[str]:
    """The texts of rows from `first` on."""
    kinds = ", ".join(sorted({type(value).__name__ for value in values} - {"str"}))
    for row, value in enumerate(values, first):
        if isinstance(value, str) and (value.isascii() or _is_unicode(value)):
            yield value
            continue
        got = "half of a surrogate pair" if isinstance(value, str) else kinds
        error = ValueError(
            f"{where}: got {got} in {key!r}, one of the fields {', '.join(names)}, wanted texts; name another field "
            "with --key, or leave out rows without a text"
        )
        _leave_out(bad, Bad(path, row, f"{type(value).__name__} in {key!r}"), error)


def _blocks(file: IO[bytes] | gzip.GzipFile, size: int | None = None) -> Iterator[bytes]:
    """Complete lines, many at a time: those that begin in the next `size` bytes; None: all."""
    while data := file.read(_BLOCK if size is None else min(_BLOCK, max(size, 0))):
        if data[-1:] != b"\n":
            data += file.readline()
        yield data
        size = None if size is None else size - len(data)


def _zstd(path: str) -> Iterator[bytes]:
    """Complete lines, many at a time, of all frames of a file."""
    try:
        import zstandard
    except ImportError:
        raise ImportError(f"{path}: zstd needs a package; pip install zstandard") from None
    unpack, left, inside = zstandard.ZstdDecompressor(max_window_size=1 << 31), b"", False
    frame = unpack.decompressobj()
    try:
        with open(path, "rb") as file:
            while data := file.read(_BLOCK):
                while data:
                    left += frame.decompress(data)
                    data, inside = frame.unused_data, not frame.eof
                    if frame.eof:
                        frame = unpack.decompressobj()
                whole = left.rfind(b"\n") + 1
                if whole:
                    yield left[:whole]
                    left = left[whole:]
    except zstandard.ZstdError as error:
        raise ValueError(f"{path}: got a damaged zstd file ({error}), wanted a complete one") from None
    if inside:
        raise ValueError(f"{path}: got a zstd file that was cut off, wanted a complete one")
    if left:
        yield left


def _lines(blocks: Iterator[bytes], path: str, key: str, at: int, bad: list[Bad] | None) -> Iterator[str]:
    """The texts of JSON lines, in order; at: the byte with which the first block begins."""
    for data in blocks:
        try:
            lines = _decoded(data, path, at).split("\n")
        except ValueError as error:
            if bad is None:
                _leave_out(bad, Bad(path, at, ""), error)
            lines = data.split(b"\n")
        place = _Places(data, at)
        for number, line in enumerate(lines):
            try:
                text = _text(line, path, place, number, key)
            except ValueError as error:
                _leave_out(bad, Bad(path, place(number), str(error).removeprefix(f"{path}: ")[:300]), error)
                continue
            if text is not None:
                yield text
        at += len(data)


class _Places:
    """The bytes with which the lines of `data` begin, counted when they are asked for. at: with which it begins."""

    def __init__(self, data: bytes, at: int):
        self._data, self.at, self._starts = data, at, None

    def __call__(self, number: int) -> int:
        if self._starts is None:
            lengths = [len(line) + 1 for line in self._data.split(b"\n")]
            self._starts = list(itertools.accumulate(lengths, initial=self.at))
        return self._starts[number]


def _text(line: str | bytes, path: str, place: _Places, number: int, key: str) -> str | None:
    """The text of a line; None of an empty one."""
    if isinstance(line, bytes):
        line = _decoded(line, path, place(number))
    if not line or line.isspace():
        return None
    try:
        twice = _each_once if line.count(f'"{key}"') > 1 else None  # which one is meant would be a guess
        found = json.loads(line if place.at or number else line.removeprefix(_MARK), object_pairs_hook=twice)
    except (ValueError, RecursionError) as error:  # also of numbers that are too long, and of too deep arrays
        raise ValueError(
            f"{path}: got a line at byte {place(number)} that is no JSON ({error}), wanted one object a line"
        ) from None
    text = found.get(key) if isinstance(found, dict) else None
    if not isinstance(text, str):
        where = f"{path}, byte {place(number)}"
        if not isinstance(found, dict):
            raise ValueError(
                f"{where}: got a line that is a {type(found).__name__}, wanted one object a line; write each "
                "of its objects in a line of its own"
            )
        if key in found:
            raise ValueError(f"{where}: got {type(found[key]).__name__} in {key!r}, wanted a text")
        raise _no_key(where, key, found)
    if "\\u" in line and not _is_unicode(text):
        raise ValueError(
            f"{path}, byte {place(number)}: got half of a surrogate pair in {key!r}, such as "
            "\\ud83d alone, wanted Unicode; replace it in the text, by text.encode('utf-16', "
            "'surrogatepass').decode('utf-16', 'replace')"
        )
    return text


def _each_once(pairs: list[tuple[str, object]]) -> dict[str, object]:
    found = dict(pairs)
    if len(found) < len(pairs):
        raise ValueError("got a key twice in an object, wanted each once")
    return found


def _is_unicode(text: str) -> bool:
    """Whether a text can be written as UTF-8: half of a surrogate pair, which JSON can escape, cannot."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        return False
    return True


def _no_key(where: str, key: str, names) -> ValueError:
    return ValueError(f"{where}: got the fields {', '.join(map(str, names)) or '(none)'}, wanted a text in {key!r}; "
                      "name the field with --key")  # fmt: skip


def _decoded(data: bytes, path: str, at: int) -> str:
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"{path}: got bytes that are no UTF-8 at byte {at + error.start}, wanted UTF-8") from None


def _parquet(path: str):
    try:
        import pyarrow.parquet
    except ImportError:
        raise ImportError(f"{path}: Parquet needs a package; pip install pyarrow") from None
    try:
        return pyarrow.parquet.ParquetFile(path)
    except pyarrow.ArrowInvalid as error:
        raise ValueError(f"{path}: got a damaged Parquet file ({error}), wanted a complete one") from None


def _dataset(path: str):
    try:
        import datasets
    except ImportError:
        raise ImportError(f"{path}: a folder of datasets needs the package; pip install datasets") from None
    return datasets.load_from_disk(path)
