"""The digests of an array's bands from digests.bin, verified by size and by a digest of its own."""

from __future__ import annotations

import math

import numpy as np

from fmegatron.checkpoint.files.format import DIGESTS, Array, CheckpointError, digest_text
from fmegatron.checkpoint.files.manifest import RESTORE_ANOTHER
from fmegatron.checkpoint.files.saved import Save
from fmegatron.files import disk

_MOST_BYTES = 1 << 20  # of digests that are read whatever they are the digests of


def stored_digests(save: Save, array: Array, leaf: str) -> np.ndarray:
    """The digests of an array, uint64 [chunks, bands]. leaf: whose elements they are of, for messages.

    The file must have the size that all arrays need, and many digests must have chunk files, so no number in the
    manifest takes more memory than there are files. Raises CheckpointError.
    """
    storage, at = save.storage, save.storage.at(DIGESTS)
    start, stop, done = 8 * array.first_digest, 8 * (array.first_digest + array.digest_count), 0
    for index in ((0,) * len(array.grid), tuple(n - 1 for n in array.grid)) if stop - start > _MOST_BYTES else ():
        file = array.chunk_file(index)
        try:
            with storage.open(file, array.index_span(array.file_of(index))[1], ()):
                pass
        except OSError as error:
            raise CheckpointError(
                f"{leaf}: {storage.at(file)} cannot be read ({error.strerror}); {RESTORE_ANOTHER}"
            ) from None
    try:
        with storage.open(DIGESTS, 8 * save.manifest.digest_count, [(start, stop)]) as reader:
            data = np.empty(stop - start, np.uint8)
            while done < data.nbytes and (got := reader.read_into(data[done:], start + done)):
                done += got
    except OSError as error:
        disk.check_damage(error, at)
        raise CheckpointError(f"{leaf}: {at} cannot be read ({error.strerror}); {RESTORE_ANOTHER}") from None
    if done < data.nbytes or digest_text(data) != array.digest:
        text = f"{leaf}: the digests of {array.name} in {at} were altered after the save"
        raise CheckpointError(f"{text}; {RESTORE_ANOTHER}")
    return data.view("<u8").reshape(math.prod(array.grid), -1)
