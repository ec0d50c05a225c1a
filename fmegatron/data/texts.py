"""Texts of corpora in files: JSON lines, plain, gzip or zstd; text files; Parquet; folders of `datasets`."""

from __future__ import annotations

import gzip
import io
import json
import os
from collections.abc import Iterator
from types import MappingProxyType
from typing import NamedTuple

from fmegatron.data.whole_files import names_in

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
    if {"state.json", "dataset_info.json"} & set(names_in(name) or ()):
        return "dataset"
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


def texts_of(part: Part, key: str) -> Iterator[str]:
    """The texts of a part, in order; key: the field of an object or row that has it. A text file is one text.

    ValueError names the file and the place of what cannot be read.
    """
    if part.kind == "text":
        with open(part.path, "rb") as file:
            yield _decoded(file.read(), part.path, 0)
    elif part.kind == "lines":
        with open(part.path, "rb") as file:
            if part.start:
                file.seek(part.start - 1)
                file.readline()  # the line that began before belongs to the part before
            yield from _lines(file, part.path, key, part.stop)
    elif part.kind == "gzip":
        try:
            with gzip.open(part.path, "rb") as file:
                yield from _lines(file, part.path, key)
        except (EOFError, gzip.BadGzipFile) as error:
            raise ValueError(f"{part.path}: got a damaged gzip file ({error}), wanted a complete one") from None
    elif part.kind == "zstd":
        try:
            import zstandard
        except ImportError:
            raise ImportError(f"{part.path}: zstd needs a package; pip install zstandard") from None
        with open(part.path, "rb") as raw, zstandard.ZstdDecompressor().stream_reader(raw) as stream:
            yield from _lines(io.BufferedReader(stream), part.path, key)
    elif part.kind == "parquet":
        file = _parquet(part.path)
        if key not in file.schema_arrow.names:
            raise _no_key(part.path, key, file.schema_arrow.names)
        for batch in file.iter_batches(row_groups=list(range(part.start, part.stop)), columns=[key]):
            yield from batch.column(0).to_pylist()
    else:
        rows = _dataset(part.path)
        if key not in rows.column_names:
            raise _no_key(part.path, key, rows.column_names)
        yield from (rows[i][key] for i in range(part.start, part.stop))


def _lines(file: io.BufferedIOBase, path: str, key: str, stop: int | None = None) -> Iterator[str]:
    at = file.tell()
    while stop is None or at < stop:
        line = file.readline()
        if not line:
            return
        if line.strip():
            try:
                found = json.loads(_decoded(line, path, at))
            except json.JSONDecodeError as error:
                raise ValueError(
                    f"{path}: got a line at byte {at} that is no JSON ({error}), wanted one object a line"
                ) from None
            if not isinstance(found, dict) or not isinstance(found.get(key), str):
                raise _no_key(f"{path}, byte {at}", key, found if isinstance(found, dict) else [])
            yield found[key]
        at += len(line)


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
    return pyarrow.parquet.ParquetFile(path)


def _dataset(path: str):
    try:
        import datasets
    except ImportError:
        raise ImportError(f"{path}: a folder of datasets needs the package; pip install datasets") from None
    return datasets.load_from_disk(path)
