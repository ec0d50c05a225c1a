"""A sample of a save, read back past the page cache: what its disk has, and not what this machine remembers.

Asked of the newest step before an older one goes: it covers file system and disk, at a cost that does not grow.
"""

from __future__ import annotations

import itertools
import random
from concurrent.futures import ThreadPoolExecutor

import numpy as np

from fmegatron.checkpoint.files.format import ZARR, Array
from fmegatron.checkpoint.files.saved import Save
from fmegatron.checkpoint.reading.digests import stored_digests
from fmegatron.checkpoint.reading.fetch import ChunkFile, check_description
from fmegatron.checkpoint.reading.files import Files

SAMPLE_BANDS = 32  # of at most 1 MiB each


def read_back(save: Save, bands: int = SAMPLE_BANDS) -> None:
    """Read so many bands, spread evenly over all, and compare their digests; of their arrays the zarr.json, too.

    Raises CheckpointError naming leaf and file, SavedAgain.
    """
    arrays = [a for a in save.manifest.arrays.values() if a.digest_count]
    ends = list(itertools.accumulate(a.digest_count for a in arrays))
    draw, count = random.Random(save.manifest.digest), min(bands, ends[-1] if ends else 0)
    # One of each of `count` equal parts: other saves have others drawn.
    drawn = [draw.randrange(ends[-1] * i // count, ends[-1] * (i + 1) // count) for i in range(count)]
    wanted: dict[int, list[int]] = {}
    for number in drawn:
        at = next(i for i, end in enumerate(ends) if number < end)
        wanted.setdefault(at, []).append(number - (ends[at] - arrays[at].digest_count))
    owners = {leaf.array: leaf.path for leaf in save.manifest.leaves.values() if leaf.array}
    owners |= {piece.array: leaf.path for leaf in save.manifest.leaves.values() for piece in leaf.pieces}
    with ThreadPoolExecutor(save.storage.readers) as pool:
        for done in [pool.submit(_read, save, arrays[at], numbers, owners) for at, numbers in wanted.items()]:
            done.result()


def _read(save: Save, array: Array, numbers: list[int], owners: dict[str, str]) -> None:
    """Bands of an array, by number: chunks row-major, then bands row-major."""
    leaf = owners.get(array.name, array.name)
    save.storage.forget(f"{array.name}/{ZARR}")
    check_description(save.storage, array, leaf)
    digests, sizes = stored_digests(save, array, leaf), band_sizes(array)
    for number in numbers:
        chunk, band = divmod(number, len(sizes))
        index = tuple(map(int, np.unravel_index(chunk, array.grid))) if array.grid else ()
        offset, into = sum(sizes[:band]), np.empty(sizes[band], np.uint8)
        with Files(save.storage) as files:
            file = ChunkFile(files, array, index, digests, leaf)
            save.storage.forget(file.name)
            with file.open([(offset, offset + into.nbytes)]) as reader:
                file.band(reader, band, offset, into)


def band_sizes(array: Array) -> tuple[int, ...]:
    """Bytes of each band of a chunk. Full trailing dims: in their order they are the file from first byte to last."""
    sizes = [array.itemsize]
    for c, b in zip(array.chunk, array.band, strict=True):
        lengths = [min(b, c - at) for at in range(0, c, b)]
        sizes = [size * n for size in sizes for n in lengths]
    return tuple(sizes)
