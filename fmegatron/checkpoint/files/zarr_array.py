"""zarr3 arrays of a checkpoint, written through tensorstore: the same on every store."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import tensorstore as ts

from fmegatron.checkpoint.files.format import ZARR, Array, zarr_json, zarr_metadata
from fmegatron.checkpoint.files.keyvalue import KeyValues, done


@dataclass(frozen=True)
class ZarrArray:
    """A stored array to write: every call returns a future, whose error `done` makes an OSError."""

    array: Array
    values: KeyValues

    @cached_property
    def _store(self) -> ts.TensorStore:
        """The array, open; no file is read or written. Its shape is that of all chunks, so each is written in full:
        the last ones are padded by who writes them."""
        metadata = zarr_metadata(self.array)
        shape = [n * c for n, c in zip(self.array.grid, self.array.chunk, strict=True)]
        spec = {
            "driver": "zarr3",
            "kvstore": self.values.below(f"{self.array.name}/").spec,
            "metadata": {**metadata, "shape": shape},
            "store_data_equal_to_fill_value": True,
            "fill_missing_data_reads": False,
        }
        return done(ts.open(spec, open=True, assume_metadata=True, context=self.values.context))

    def describe(self) -> ts.Future:
        """Write the array's zarr.json."""
        return self.values.kv.write(f"{self.array.name}/{ZARR}", zarr_json(self.array))

    @property
    def by_reference(self) -> bool:
        """Whether writes need no copy of the memory they are given: in memory:// it would be what is stored."""
        return self.values.spec["driver"] != "memory"

    def write(self, file: tuple[int, ...], chunks: Sequence[tuple[tuple[int, ...], np.ndarray]]) -> list[ts.Future]:
        """Write a file of all its chunks: (index in the grid, contiguous elements as bits, in the chunk's shape).

        They stay as they are until all futures are done. One that is dropped before that takes its write with it.
        """
        found = math.prod(map(len, self.array.file_chunks(file)))
        assert len(chunks) == found, f"{self.array.file_name(file)}: {len(chunks)} of {found} chunks"
        # Without a transaction each chunk of a shard would be a file read, and written again.
        transaction = ts.Transaction() if self.array.shard else None
        store = self._store if transaction is None else self._store.with_transaction(transaction)
        futures = []
        for index, bits in chunks:
            part = self._part(store, index, bits).write(
                bits.view(store.dtype.numpy_dtype), can_reference_source_data_indefinitely=self.by_reference
            )
            futures.append(part)
        if transaction is not None:
            for part in futures:
                done(part.copy)  # now it is in the transaction
            futures.append(transaction.commit_async())
        return futures

    def _part(self, store: ts.TensorStore, index: tuple[int, ...], bits: np.ndarray) -> ts.TensorStore:
        if not bits.size or all(n == 1 for n in self.array.grid):
            return store
        return store[tuple(slice(i * c, (i + 1) * c) for i, c in zip(index, self.array.chunk, strict=True))]
