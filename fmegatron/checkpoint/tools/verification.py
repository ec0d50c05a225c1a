"""verify: everything in a checkpoint's directory against its manifest, down to the padding that no restore reads."""

from __future__ import annotations

import bisect
import itertools
import math
import os
import threading
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass, replace
from typing import Any, NamedTuple

import numpy as np

from fmegatron.checkpoint.files.commit import pointer_to
from fmegatron.checkpoint.files.entries import UNKNOWN, Entry
from fmegatron.checkpoint.files.format import (
    DIGESTS,
    MANIFEST,
    MARKER,
    ZARR,
    Array,
    CheckpointError,
    Manifest,
    digest,
    digest_text,
    dtype_of,
    zarr_metadata,
)
from fmegatron.checkpoint.files.manifest import layout_from_json, marker_to_json, step_of_marker, to_json_text
from fmegatron.checkpoint.files.storage import Reader, Storage
from fmegatron.checkpoint.files.stores import open_store
from fmegatron.checkpoint.reading.files import read_exactly
from fmegatron.checkpoint.reading.sample import band_sizes
from fmegatron.checkpoint.reading.snapshot import Saved, Snapshot, on_snapshot
from fmegatron.checkpoint.reading.source import Foreign, Source
from fmegatron.checkpoint.tools.source import stream

_BANDS_PER_JOB = 16
_MOST_THREADS = 64
_MOST_OWNERS = 1000  # leaves that are looked at for the names in a message
_MOST_DIGEST_BYTES = 1 << 20  # that are read whatever they are the digests of


@dataclass(frozen=True)
class Damage:
    """One thing that is not as it was saved. kind: "missing", "extra", "size", "bytes", "kind" (a link where a file
    should be), "unreadable" or "metadata".  leaf: path(s) concerned, "" for none.  [start, stop): bytes of the file."""

    kind: str
    file: str
    what: str
    leaf: str = ""
    start: int = 0
    stop: int = 0

    def __str__(self) -> str:
        where = f" bytes {self.start} to {self.stop}" if self.stop else ""
        return f"{self.leaf + ': ' if self.leaf else ''}{self.file}{where}: {self.what}"


@dataclass(frozen=True)
class Report:
    """What `verify` found. files, nbytes: read and compared."""

    path: str
    step: int | None
    leaves: int
    files: int
    nbytes: int
    damages: tuple[Damage, ...]

    def to_json(self) -> dict[str, Any]:
        """All by names."""
        return asdict(self) | {"good": not self.damages}


def verify(path: Saved, jobs: int | None = None) -> Report:
    """Read all of a checkpoint and compare it with its manifest; every damage is in the report, not only the first.

    jobs: threads that read and digest. Nothing outside the directory is opened. A checkpoint that is saved again
    meanwhile is no damage: the new one is verified (RuntimeError when that goes on and on).
    """
    try:
        return on_snapshot(path, lambda source: _report(source, jobs))
    except CheckpointError as error:
        where = path.text if isinstance(path, Source | Foreign) else open_store(path).text
        file = MANIFEST if str(error).startswith(f"{where}/") and f"/{MANIFEST}: " in str(error) else MARKER
        return Report(where, None, 0, 0, 0, (Damage("metadata", file, str(error)),))


def _report_of(source: Source) -> Report:
    """As `_report`, of another system's checkpoint. Raises ValueError where its files have no checksums."""
    leaves, damages, files, nbytes = list(source.leaves.values()), [], set[str](), 0
    if not source.verifies:
        raise ValueError(
            f"{source.text}: got {source.kind}, which have no checksums, wanted files that can be verified; `show"
            " --stats` reads the elements (headers and sizes are right)"
        )
    for leaf in leaves:
        for box in source.layout_of(leaf.path).boxes(0):
            files.update(grain.file for grain in source.reads(leaf.path, box))
        try:
            nbytes += sum(x.nbytes for _, x in stream(source, [leaf]))
        except CheckpointError as error:
            damages.append(Damage("bytes", "", str(error), leaf.path))
    return Report(source.text, source.step, len(leaves), len(files), nbytes, tuple(damages))


def _report(source: Source, jobs: int | None) -> Report:
    if not isinstance(source, Snapshot):
        return _report_of(source)
    storage, manifest, found, check = source.storage, source.manifest, [], None
    try:
        check = _Check(storage, manifest, {e.name: e for e in storage.entries()})
        check.metadata()
        if storage.stated is not None:
            check.pointer(source.store.content(MARKER), str(storage.stated["root"]))
        check.arrays(jobs or max(4, os.cpu_count() or 1))
        check.extra()
        found = check.damages
    except OSError as error:
        found = [Damage("unreadable", "", f"its files cannot be read ({error})")]
    if found:
        source.check_there(CheckpointError(str(found[0])))
    damages = tuple(sorted(_joined(found), key=lambda d: (d.file, d.start)))
    files, nbytes = (check.files, check.nbytes) if check else (0, 0)
    return Report(storage.text, manifest.step, len(manifest.leaves), files, nbytes, damages)


class _Job(NamedTuple):
    """Consecutive bands of a file from byte `at` on, of these sizes; digests None: its index. leaf: whose, if known."""

    array: Array
    file: tuple[int, ...]
    leaf: str | None
    at: int
    digests: np.ndarray | None
    sizes: tuple[int, ...]


class _Check:
    """The state of one verification: what is there, what was expected so far, what is wrong."""

    def __init__(self, storage: Storage, manifest: Manifest, entries: dict[str, Entry]):
        self.storage, self.manifest, self.entries = storage, manifest, entries
        self.expected: set[str] = set()
        self.damages: list[Damage] = []
        self.files = self.nbytes = 0
        self._lock = threading.Lock()
        self._stacks = {(x.array, *x.at): x.path for x in manifest.leaves.values() if x.at}
        self._owners, self._shared = _owners(manifest), _shared_digests(manifest)

    def metadata(self) -> None:
        """The small files, whose content the manifest implies; and what the manifest itself does not guarantee."""
        text = self.storage.read(MANIFEST)
        named = step_of_marker(self.storage.read(MARKER, 0, 4096))  # markers have it since 2026-11-27
        step = None if named is None else self.manifest.step
        self._same(MARKER, marker_to_json(text, self.manifest.version, step), "")
        self._same(MANIFEST, text, "")
        group = to_json_text({"zarr_format": 3, "node_type": "group", "attributes": {}}).encode()
        for name in _above(self.manifest.arrays):
            self._same(f"{name}/{ZARR}", group, "")
        for array in self.manifest.arrays.values():
            self._same(f"{array.name}/{ZARR}", to_json_text(zarr_metadata(array)).encode(), self._leaf(array, 0, 0))
        for leaf in self.manifest.leaves.values():
            try:
                layout_from_json(leaf, self.manifest.meshes)
            except ValueError as error:
                self.damages.append(Damage("metadata", MANIFEST, str(error), leaf.path))
        for name in sorted(self._shared):
            self.damages.append(Damage("metadata", MANIFEST, f"{name} shares digests with another array"))

    def pointer(self, found: bytes | None, root: str) -> None:
        """What led to the save with this token; None: a draft did."""
        if found not in (None, pointer_to(root, self.storage.read(MARKER, 0, 4096))):
            what = f"differs from what {self.storage.at(MARKER)} implies"
            self.damages.append(Damage("bytes", f"../{MARKER}", what, "", 0, len(found or b"")))

    def arrays(self, jobs: int) -> None:
        """Every band of every chunk."""
        digests = self._digests()
        errors: list[BaseException] = []
        work = (
            job
            for array in self.manifest.arrays.values()
            if (table := self._table(array, digests)) is not None
            for job in self._jobs(array, table)
        )

        def run() -> None:
            try:
                read()
            except BaseException as error:
                errors.append(error)

        def read() -> None:
            buffer = np.empty(0, np.uint8)
            while not errors:
                with self._lock:
                    job = next(work, None)
                if job is None:
                    return
                largest = math.prod(job.array.band) * job.array.itemsize
                if buffer.nbytes < largest:
                    buffer = np.empty(largest, np.uint8)
                self._bands(job, buffer)

        threads = [threading.Thread(target=run, daemon=True) for _ in range(min(jobs, _MOST_THREADS))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if errors:
            raise errors[0]

    def extra(self) -> None:
        """Whatever else is in the directory."""
        folders = {name.rpartition("/")[0] for name in self.expected}
        folders |= _above(folders)
        for name, entry in self.entries.items():
            if entry.kind == "directory" and name not in folders:
                self.damages.append(Damage("extra", name, "a directory that the save did not make"))
            elif entry.kind != "directory" and name not in self.expected:
                self.damages.append(Damage("extra", name, f"a {entry.kind} that the save did not write"))

    def _there(self, name: str, size: int, leaf: str) -> bool:
        """Whether a file is there, a file, and of this size; a damage otherwise."""
        self.expected.add(name)
        entry = self.entries.get(name)
        if entry is None:
            self.damages.append(Damage("missing", name, "is missing", leaf))
        elif entry.kind != "file":
            self.damages.append(Damage("kind", name, f"is a {entry.kind}, wanted a file", leaf))
        elif entry.size not in (size, UNKNOWN):
            self.damages.append(Damage("size", name, f"has {entry.size} bytes, wanted {size}", leaf))
        else:
            self.files += 1
            return True
        return False

    def _same(self, name: str, wanted: bytes, leaf: str) -> None:
        """A small file must hold exactly these bytes."""
        if not self._there(name, len(wanted), leaf):
            return
        got = self._read(name, leaf, len(wanted) + 1)
        if got is not None and got != wanted:
            self.nbytes += len(got)
            at = [i for i, (a, b) in enumerate(zip(got, wanted, strict=False)) if a != b]
            start, stop = (at[0], at[-1] + 1) if at else (0, len(got))
            self.damages.append(Damage("bytes", name, "differs from what the manifest implies", leaf, start, stop))

    def _read(self, name: str, leaf: str, size: int) -> bytes | None:
        try:
            return self.storage.read(name, 0, size)
        except OSError as error:
            self.damages.append(Damage("unreadable", name, f"cannot be read ({error.strerror})", leaf))
            return None

    def _digests(self) -> np.ndarray:
        """digests.bin as far as it is there, uint64; of a file that is too long, what the manifest knows of."""
        size, entry = 8 * self.manifest.digest_count, self.entries.get(DIGESTS)
        self._there(DIGESTS, size, "")
        size = min(size, entry.size if entry and entry.size != UNKNOWN else size)
        others = sum(max(0, e.size) for e in self.entries.values() if e.name != DIGESTS)
        if size > max(_MOST_DIGEST_BYTES, others) and all(e.size != UNKNOWN for e in self.entries.values()):
            text = f"has {size} bytes of digests for {others} bytes of other files"
            self.damages.append(Damage("size", DIGESTS, text))
            return np.empty(0, "<u8")
        data = (self._read(DIGESTS, "", size) if entry is not None and entry.kind == "file" else None) or b""
        self.nbytes += len(data)
        return np.frombuffer(data[: len(data) // 8 * 8], "<u8")

    def _table(self, array: Array, digests: np.ndarray) -> np.ndarray | None:
        """The digests of an array, uint64 [chunks, bands], or None (and damages) where they are not to be trusted."""
        lo, hi = array.first_digest, array.first_digest + array.digest_count
        part = digests[lo:hi]
        if array.name not in self._shared and len(part) == hi - lo and digest_text(part.tobytes()) == array.digest:
            return part.reshape(math.prod(array.grid), math.prod(array.bands))
        leaf = self._leaf(array, 0, 0)
        self.damages.append(Damage("bytes", DIGESTS, f"the digests of {array.name} were altered", leaf, 8 * lo, 8 * hi))
        # What a missing table would have stated is unknown, but not which files there should be.
        for file in itertools.islice(_indices(array.file_grid), len(self.entries) + 1000):
            self._there(array.file_name(file), array.index_span(file)[1], leaf)
        return None

    def _jobs(self, array: Array, table: np.ndarray) -> Iterator[_Job]:
        """Consecutive bands of a file, or its index."""
        sizes, leaf = band_sizes(array), self._leaf(array, 0, 0)
        steps = [math.prod(array.grid[d + 1 :]) for d in range(len(array.grid))]
        for file in _indices(array.file_grid):
            start, stop = array.index_span(file)
            if not self._there(array.file_name(file), stop, leaf):
                continue
            at = 0
            for index in itertools.product(*array.file_chunks(file)):
                row = table[sum(i * step for i, step in zip(index, steps, strict=True))]
                owner = self._stacks.get((array.name, index[0])) if index else None
                for i in range(0, len(sizes), _BANDS_PER_JOB):
                    part = sizes[i : i + _BANDS_PER_JOB]
                    yield _Job(array, file, owner, at, row[i : i + _BANDS_PER_JOB], part)
                    at += sum(part)
            if start < stop:
                yield _Job(array, file, None, start, None, (stop - start,))

    def _bands(self, job: _Job, buffer: np.ndarray) -> None:
        name, at, sizes = job.array.file_name(job.file), job.at, job.sizes
        try:
            with self.storage.open(name, job.array.index_span(job.file)[1], [(at, at + sum(sizes))]) as reader:
                if job.digests is None:
                    self._index(job, name, reader)
                    return
                for wanted, size in zip(job.digests, sizes, strict=True):
                    self._band(job, name, reader, at, buffer[:size], wanted)
                    at += size
        except OSError as error:
            kind = "missing" if isinstance(error, FileNotFoundError) else "unreadable"
            self._damaged(job, kind, name, f"cannot be opened ({error.strerror})", at, at + sum(sizes))

    def _index(self, job: _Job, name: str, reader: Reader) -> None:
        """The index at the end of a file must be that of its chunks: other readers find them by it."""
        start, (size,) = job.at, job.sizes
        try:
            found = read_exactly(reader, start, start + size)
        except OSError as error:
            self._damaged(job, "unreadable", name, f"cannot be read ({error.strerror})", start, start + size)
            return
        if not np.array_equal(found.view("<u8"), job.array.file_index(job.file)):
            self._damaged(job, "bytes", name, "its index was altered after the save", start, start + size)
        with self._lock:
            self.nbytes += size

    def _band(self, job: _Job, name: str, reader: Reader, at: int, into: np.ndarray, wanted: int) -> None:
        done = 0
        try:
            while done < into.nbytes and (got := reader.read_into(into[done:], at + done)):
                done += got
        except OSError as error:
            self._damaged(job, "unreadable", name, f"cannot be read ({error.strerror})", at, at + into.nbytes)
        else:
            if done < into.nbytes or digest(into) != wanted:
                self._damaged(job, "bytes", name, "altered after the save", at, at + into.nbytes)
        with self._lock:
            self.nbytes += done

    def _damaged(self, job: _Job, kind: str, name: str, what: str, start: int, stop: int) -> None:
        damage = Damage(kind, name, what, job.leaf or self._leaf(job.array, start, stop), start, stop)
        with self._lock:
            self.damages.append(damage)

    def _leaf(self, array: Array, start: int, stop: int) -> str:
        """The leaves that have something in bytes [start, stop) of an array ([0, 0): anywhere), a few of them."""
        spans = self._owners.get(array.name, [])
        end = bisect.bisect_left(spans, (stop,)) if stop else len(spans)
        looked, found = spans[max(0, end - _MOST_OWNERS) : end], set()
        for _, until, hi, path in reversed(looked):
            if until <= start and stop:
                break  # no span before this one reaches so far
            if start < hi or not stop:
                found.add(path)
        found = sorted(found)
        return ", ".join(found[:3]) + (f" and {len(found) - 3} more" if len(found) > 3 else "")


def _indices(grid: tuple[int, ...]) -> Iterator[tuple[int, ...]]:
    """All indices of a grid, row-major, one by one: numpy and itertools would hold every number of each dim."""
    index, left = [0] * len(grid), math.prod(grid)
    while left:
        yield tuple(index)
        left -= 1
        for d in reversed(range(len(grid))):
            index[d] += 1
            if index[d] < grid[d]:
                break
            index[d] = 0


def _above(names: Iterable[str]) -> set[str]:
    """The directories above these relative paths."""
    found = set()
    for name in names:
        while (name := name.rpartition("/")[0]) and name not in found:
            found.add(name)
    return found


def _owners(manifest: Manifest) -> dict[str, list[tuple[int, int, int, str]]]:
    """By array, in rising order, what leaves have there: (first byte, largest end so far, end, path)."""
    owners: dict[str, list[tuple[int, int, str]]] = {}
    for leaf in manifest.leaves.values():
        if leaf.array is not None:
            owners.setdefault(leaf.array, []).append((0, 1 << 62, leaf.path))
        width = dtype_of(leaf.dtype).itemsize
        for piece in leaf.pieces:
            for box in piece.boxes:
                end = box.offset + sum((n - 1) * s for n, s in zip(box.shape, box.strides, strict=True)) + 1
                span = piece.offset + box.offset * width, piece.offset + end * width, leaf.path
                owners.setdefault(piece.array, []).append(span)
    return {name: _with_ends(sorted(spans)) for name, spans in owners.items()}


def _with_ends(spans: list[tuple[int, int, str]]) -> list[tuple[int, int, int, str]]:
    ends = itertools.accumulate((hi for _, hi, _ in spans), max)
    return [(lo, end, hi, path) for (lo, hi, path), end in zip(spans, ends, strict=True)]


def _shared_digests(manifest: Manifest) -> set[str]:
    """Arrays whose digests are inside those of another array."""
    shared, end = set(), 0
    for array in sorted(manifest.arrays.values(), key=lambda a: a.first_digest):
        if array.digest_count and array.first_digest < end:
            shared.add(array.name)
        end = max(end, array.first_digest + array.digest_count)
    return shared


def _joined(damages: list[Damage]) -> list[Damage]:
    """Neighbouring ranges of a file as one."""
    joined: list[Damage] = []
    for d in sorted(damages, key=lambda d: (d.file, d.leaf, d.start)):
        last = joined[-1] if joined else None
        same = last is not None and (last.kind, last.file, last.leaf, last.what) == (d.kind, d.file, d.leaf, d.what)
        if last is not None and same and last.stop == d.start and d.stop:
            joined[-1] = replace(last, stop=d.stop)
        else:
            joined.append(d)
    return joined
