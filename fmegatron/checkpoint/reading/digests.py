"""The digests of an array's bands, out of digests.bin, which is not believed: its size first, then its own digest."""

from __future__ import annotations

import math

import numpy as np

from fmegatron.checkpoint.files.format import DIGESTS, Array, CheckpointError, digest_text
from fmegatron.checkpoint.files.manifest import RESTORE_ANOTHER
from fmegatron.checkpoint.files.snapshot import Snapshot


def stored_digests(snapshot: Snapshot, array: Array, leaf: str) -> np.ndarray:
    """The digests of an array, uint64 [chunks, bands]. leaf: whose elements they are of, for messages.

    The file must have the size that all arrays need, so no number in the manifest takes more memory than there is file.
    Raises CheckpointError.
    """
    storage, at = snapshot.storage, snapshot.storage.at(DIGESTS)
    start, stop, done = 8 * array.first_digest, 8 * (array.first_digest + array.digest_count), 0
    try:
        with storage.open(DIGESTS, 8 * snapshot.manifest.digest_count, [(start, stop)]) as reader:
            data = np.empty(stop - start, np.uint8)
            while done < data.nbytes and (got := reader.read_into(data[done:], start + done)):
                done += got
    except OSError as error:
        raise CheckpointError(f"{leaf}: {at} cannot be read ({error.strerror}); {RESTORE_ANOTHER}") from None
    if done < data.nbytes or digest_text(data) != array.digest:
        text = f"{leaf}: the digests of {array.name} in {at} were altered after the save"
        raise CheckpointError(f"{text}; {RESTORE_ANOTHER}")
    return data.view("<u8").reshape(math.prod(array.grid), -1)
