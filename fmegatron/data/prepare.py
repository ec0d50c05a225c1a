"""prepare: texts in files -> PREFIX.bin and PREFIX.idx, in several processes; a run that was stopped goes on."""

from __future__ import annotations

import json
import math
import multiprocessing
import os
import shutil
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path
from typing import Any

import numpy as np

from fmegatron.data.fingerprint import fingerprint
from fmegatron.data.indexed import IndexedTokens, bare
from fmegatron.data.indexed_writer import IndexedWriter, link_indexed, merge_indexed, token_dtype
from fmegatron.data.open_tokenizer import keep_beside, load_tokenizer
from fmegatron.data.samples import Sample, Skipped, require_same_text, skipped_of
from fmegatron.data.stored import digest_of
from fmegatron.data.texts import Part, parts_of, texts_of
from fmegatron.data.tokenizers import ByteTokenizer
from fmegatron.files import disk, whole

_TOGETHER = 1 << 18  # characters of texts that are encoded at once
_IDS = 1 << 31


def prepare(
    inputs: Sequence[str | os.PathLike],
    prefix: str | os.PathLike,
    tokenizer: str = "byte",
    *,
    key: str = "text",
    eod: int | None = None,
    workers: int = 1,
    part_bytes: int = 64 << 20,
    split: str | None = None,
    fresh: bool = False,
    skip_bad: bool = False,
    progress: Callable[[int, int, int], None] | None = None,
) -> dict[str, Any]:
    """Tokenize the texts of files, in their order, to a corpus; returns what PREFIX.json states of it.

    The order of documents depends on inputs and arguments only, not on workers. Parts that are done stay in
    PREFIX.parts until all are; the same call goes on with those.

    Args:
        inputs: files (`texts.kind_of`).
        prefix: of the corpus.
        tokenizer: "byte", or a file or folder that `load_tokenizer` reads.
        key: field of the text.
        eod: id that is put behind each document; None: none.
        workers: processes; 1: this one.
        part_bytes: of a part, the work of a process at a time.
        split: shares such as "969,30,1": their ranges of tokens, at bounds of documents, are in PREFIX.json.
        fresh: begin anew where parts of another call are there.
        skip_bad: leave documents out that cannot be read (no UTF-8, no JSON, no text, half of a surrogate pair). How
            many, why and where is in PREFIX.json under "skipped"; all places (10,000 of a part) are in
            PREFIX.skipped.jsonl. An input of which nothing can be read is an error.
        progress: called with (parts done, parts, tokens so far).

    Some documents of each part are decoded again: where more than a tenth of their characters is not what it was, a
    RuntimeWarning counts them, and where more than half is, ValueError.
    Raises ValueError for inputs that cannot be read, with file and byte, and for parts of another call; RuntimeError
    where a worker died.
    """
    prefix, tool = bare(prefix), _tokenizer(tokenizer)
    if workers < 1 or part_bytes < 1:
        raise ValueError(f"prepare: got workers={workers}, part_bytes={part_bytes}, wanted 1 or more")
    if eod is not None and not 0 <= eod < _IDS:
        raise ValueError(f"prepare: eod: got {eod}, wanted an id of 0 to {_IDS - 1}, which int32 holds")
    shares = None if split is None else _shares(split)  # before the work of hours, not behind it
    dtype = token_dtype(max(tool.vocab_size, 0 if eod is None else eod + 1))
    parts = [part for path in inputs for part in parts_of(path, part_bytes)]
    if not parts:
        raise ValueError("prepare: got no inputs, wanted one file or more")
    files = [[os.fspath(path), *_stamp(path)] for path in inputs]
    arguments = {"inputs": files, "tokenizer": tool.describe(), "key": key, "eod": eod, "part_bytes": part_bytes}
    folder = Path(f"{prefix}.parts")
    _begin(folder, arguments, fresh)
    began, found = time.perf_counter(), {}
    there = set(disk.listed(folder) or ())  # a run that ended while it removed them has left some of their files
    for number in range(len(parts)):
        if there >= {f"{number:06d}.{kind}" for kind in ("bin", "idx", "json")}:
            stats = json.loads((folder / f"{number:06d}.json").read_bytes())
            if skip_bad or not stats.get("skipped", {}).get("documents"):  # else it is read again, and refused
                found[number] = stats
    how = (tokenizer, dtype.name, key, eod, skip_bad)
    for number, stats in _made(parts, folder, how, workers, set(found)):
        found[number] = stats
        if progress is not None:
            progress(len(found), len(parts), sum(one["tokens"] for one in found.values()))
    require_same_text(prefix, [one["sample"] for one in found.values() if "sample" in one])
    skipped = skipped_of(prefix, parts, found) if skip_bad else {}
    if not any(one["bytes"] for one in found.values()):
        shutil.rmtree(folder)
        named = ", ".join(str(path) for path in inputs)
        raise ValueError(f"prepare: {named:.200}: got no text, wanted some; look at the inputs and at key={key!r}")
    if len(parts) == 1:
        link_indexed(folder / "000000", prefix)  # the part stays until PREFIX.json is there
    else:
        merge_indexed(prefix, [folder / f"{number:06d}" for number in range(len(parts))])
    tokens = IndexedTokens(prefix)
    lengths = np.diff(tokens.document_starts())
    text = sum(one["bytes"] for one in found.values())
    facts = {
        "documents": tokens.documents,
        "tokens": len(tokens),
        "dtype": tokens.dtype.name,
        "text_bytes": text,
        "bytes_per_token": round(text / max(1, len(tokens)), 3),
        "document_tokens": {"min": int(lengths.min()) if len(lengths) else 0,
                            "mean": round(float(lengths.mean()), 1) if len(lengths) else 0.0,
                            "max": int(lengths.max(initial=0)), "empty": int((lengths == 0).sum())},
        "digest": fingerprint(tokens),
        "eod": eod,
        "tokenizer": tool.describe(),
        "tokenizer_digest": digest_of(tool.describe()),
        "split": None if shares is None else _split(tokens, shares),
        "inputs": files,
        **skipped,
    }  # fmt: skip
    keep_beside(tool, prefix)
    with whole.whole_file(f"{prefix}.json") as file:
        file.write(json.dumps(facts, indent=2).encode() + b"\n")
    shutil.rmtree(folder)
    return {**facts, "seconds": round(time.perf_counter() - began, 3)}


def facts_of(prefix: str | os.PathLike) -> dict[str, Any] | None:
    """What PREFIX.json states of a corpus; None where there is no such file."""
    try:
        return json.loads(Path(f"{bare(prefix)}.json").read_text())
    except FileNotFoundError:
        return None


def _begin(folder: Path, arguments: dict[str, Any], fresh: bool) -> None:
    """The folder of parts, new or of the same call; ValueError for one of another."""
    if fresh:
        shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True, exist_ok=True)
    if (stored := disk.content_of(folder / "plan.json")) is not None:
        before = json.loads(stored)
        arguments = json.loads(json.dumps(arguments))
        differ = [name for name in arguments if arguments[name] != before.get(name)]
        if differ:
            raise ValueError(
                f"{folder}: got parts of another call ({', '.join(differ)} differ), wanted those of this one; give the "
                "old arguments, or --fresh"
            )
    else:
        for name in disk.listed(folder) or ():  # of a call that ended while it removed them, perhaps another
            if name.endswith(".json") and name[0].isdigit():
                (folder / name).unlink()
        with whole.whole_file(folder / "plan.json") as file:
            file.write(json.dumps(arguments).encode())


def _made(parts: list[Part], folder: Path, how: tuple, workers: int, done: set[int]):
    """(number, statistics) of each part that was not done, as they are finished. how: of `tokenize_part`."""
    todo = [(n, part, str(folder / f"{n:06d}"), *how) for n, part in enumerate(parts) if n not in done]
    if workers == 1 or len(todo) < 2:
        yield from (tokenize_part(*one) for one in todo)
        return
    # No fork: the threads of numpy and tensorstore would not be in the child, and their locks would.
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(min(workers, len(todo)), mp_context=context, initializer=_end_with_parent) as pool:
        running: set[Future] = set()
        try:
            while todo or running:
                while todo and len(running) < 2 * workers:
                    running.add(pool.submit(tokenize_part, *todo.pop(0)))
                finished, running = wait(running, return_when=FIRST_COMPLETED)
                for future in finished:
                    yield future.result()
        except BrokenProcessPool:
            raise RuntimeError(
                f"{folder}: a worker has died (out of memory?); the same command goes on with what is done, with fewer "
                "--workers if memory was short"
            ) from None
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            raise


def _end_with_parent() -> None:
    """In a worker: it would wait for work for ever where its parent was killed."""
    parent = multiprocessing.parent_process()
    if parent is not None:
        threading.Thread(target=lambda: (parent.join(), os._exit(1)), daemon=True).start()


def tokenize_part(
    number: int,
    part: Part,
    prefix: str,
    tokenizer: str,
    dtype: str,
    key: str,
    eod: int | None,
    skip_bad: bool,
) -> tuple[int, dict[str, Any]]:
    """Write one part as a corpus, and its statistics beside it when it is complete."""
    tool = _tokenizer(tokenizer)
    bytes_, bad, sample = 0, Skipped() if skip_bad else None, Sample()
    with IndexedWriter(prefix, dtype) as writer:
        for texts in _together(texts_of(part, key, bad)):
            ids, lengths = tool.encode_many(texts)
            sample.take(tool, texts, ids, lengths)
            if eod is not None:
                ids, lengths = np.insert(ids.astype(dtype), np.cumsum(lengths), eod), lengths + 1
            writer.add_documents(ids, lengths)
            bytes_ += sum(len(text) if text.isascii() else len(text.encode("utf-8")) for text in texts)
        stats = {"tokens": writer.tokens, "documents": writer.documents, "bytes": bytes_, "sample": sample.counts}
        stats |= {} if bad is None else {"skipped": bad.stats()}
    with whole.whole_file(f"{prefix}.json") as file:
        file.write(json.dumps(stats).encode())
    return number, stats


def _together(texts: Iterator[str]) -> Iterator[list[str]]:
    """Lists of texts, of `_TOGETHER` characters or a text more."""
    found, characters = [], 0
    for text in texts:
        found.append(text)
        characters += len(text)
        if characters >= _TOGETHER:
            yield found
            found, characters = [], 0
    if found:
        yield found


def _shares(split: str) -> list[float]:
    """The numbers of "969,30,1". ValueError for what is not one to three of 0 or more, one of them above it."""
    try:
        shares = [float(x) for x in split.split(",")]
    except ValueError:
        shares = []
    if not 1 <= len(shares) <= 3 or not all(0 <= x < math.inf for x in shares) or not sum(shares):
        raise ValueError(f"split: got {split!r}, wanted two or three shares, such as 969,30,1")
    return shares


def _split(tokens: IndexedTokens, shares: list[float]) -> dict[str, list[int]]:
    """Ranges of tokens for training, validation and test that begin with a document, nearest to the shares."""
    ends = np.cumsum(shares) / sum(shares) * tokens.documents
    starts = tokens.document_starts()
    cuts = [0, *(int(starts[round(end)]) for end in ends)]
    return {name: [a, b] for name, a, b in zip(("train", "valid", "test"), cuts, cuts[1:], strict=False)}


def _tokenizer(name: str) -> Any:
    return ByteTokenizer() if name == "byte" else load_tokenizer(name)


def _stamp(path: str | os.PathLike) -> tuple[int, int]:
    found = os.stat(path)
    return found.st_size, found.st_mtime_ns
