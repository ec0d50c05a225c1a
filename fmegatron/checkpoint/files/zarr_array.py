"""zarr3 arrays of a checkpoint, written through tensorstore: the same on every store."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

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

    def places(
        self, file: tuple[int, ...], indices: Sequence[tuple[int, ...]]
    ) -> tuple[list[ts.TensorStore], ts.Transaction | None]:
        """(where the chunks of a file are written, by their indices in the grid, the transaction that writes the file).

        All chunks of the file. The transaction is committed when they are in it; without one, each would be a file
        read, and written again. None: a chunk is a file.
        """
        found = math.prod(map(len, self.array.file_chunks(file)))
        assert len(indices) == found, f"{self.array.file_name(file)}: {len(indices)} of {found} chunks"
        transaction = ts.Transaction() if self.array.shard else None
        store = self._store if transaction is None else self._store.with_transaction(transaction)
        return [self._part(store, index) for index in indices], transaction

    def _part(self, store: ts.TensorStore, index: tuple[int, ...]) -> ts.TensorStore:
        if math.prod(self.array.grid) <= 1:
            return store
        return store[tuple(slice(i * c, (i + 1) * c) for i, c in zip(index, self.array.chunk, strict=True))]
