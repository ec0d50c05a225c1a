"""A save that another library plans: any boxes of any leaves on any ranks, written as one checkpoint of ours.

draft = Draft.begin(path, leaves, ranks)   # one rank knows who has which boxes
orders = draft.orders[rank]                # to each rank, by whatever way
orders.write(path, tensors)                # each rank; draft=draft on the first
draft.finish(step, metadata)               # the first, when all have written; then draft.end()
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from fmegatron.checkpoint.files.commit import Store
from fmegatron.checkpoint.files.format import MOST_SMALL
from fmegatron.checkpoint.files.storage import Storage
from fmegatron.checkpoint.files.stores import open_store
from fmegatron.checkpoint.writing.part import Part, complete, merge, plan_digest
from fmegatron.checkpoint.writing.plan import LeafPlan, in_files, is_small
from fmegatron.checkpoint.writing.scattered import Scattered
from fmegatron.checkpoint.writing.unchanged import Live, require_unchanged
from fmegatron.checkpoint.writing.write import files_to_write, write_part
from fmegatron.layout import Box, boxes, check_cover

Held = Sequence[tuple[int, tuple[int, ...], tuple[int, ...]]]


@dataclass(frozen=True)
class Orders:
    """What a rank is to write: its number, where, the plans of the leaves that it has boxes of. It can be pickled."""

    rank: int
    root: str
    digest: str
    plans: dict[str, LeafPlan]

    def write(
        self, path: str | os.PathLike | Store, tensors: Mapping[str, Sequence[torch.Tensor]], draft: Draft | None = None
    ) -> None:
        """Write this rank's boxes, by path of the leaf, each in the order in which they were planned.

        draft: on the rank that has begun it.
        """
        storage = open_store(path).draft(self.root) if draft is None else draft.storage
        given = [tensors[name] for name in self.plans]
        flat = [_joined(x) for x in given]
        plans = tuple(self.plans.values())
        live = Live.of(files_to_write(plans, flat, self.rank), list(self.plans), flat)
        part = write_part(storage, plans, flat, self.rank, live=live)
        for x, parts in zip(flat, given, strict=True):
            if len(parts) > 1:  # written was a copy, which may be torn; another one has to be the same
                x.data.copy_(_joined(parts))
        require_unchanged(live)
        part.plan = self.digest  # of all ranks' leaves together
        part.store(storage)


def _joined(parts: Sequence[torch.Tensor]) -> torch.Tensor:
    """One as it is, or a copy of several, one after another."""
    return parts[0] if len(parts) == 1 else torch.cat([one.detach().reshape(-1) for one in parts])


@dataclass(frozen=True)
class Draft:
    """A save in progress, on the rank that has begun it. orders: what each rank is to write."""

    store: Store
    storage: Storage
    plans: tuple[LeafPlan, ...]
    orders: tuple[Orders, ...]

    @staticmethod
    def begin(
        path: str | os.PathLike | Store,
        leaves: Mapping[str, tuple[tuple[int, ...], torch.dtype, Held]],
        ranks: int,
    ) -> Draft:
        """Begin a save of these leaves: (global shape, dtype, (rank, start, shape) of every box), by path.

        Raises ValueError, naming the leaf, for boxes that overlap or leave gaps; OSError.
        """
        found = {}
        for name, (shape, dtype, held) in leaves.items():
            try:
                check_cover([Box(start, size, 0, boxes.row_major_strides(size)) for _, start, size in held], shape)
            except ValueError as error:
                raise ValueError(f"{name}: {error}") from None
            found[name] = Scattered(shape, dtype, tuple(held))
        pack = sum(is_small(leaf.shape, leaf.nbytes) for leaf in found.values()) > MOST_SMALL
        homes = [leaf.plan(name, pack) for name, leaf in found.items()]
        plans = dict(zip(found, in_files(homes, lambda p: found[p.path].unit()), strict=True))
        store, digest = open_store(path), plan_digest(tuple(plans.values()))
        storage = store.begin()
        mine: list[dict[str, LeafPlan]] = [{} for _ in range(ranks)]
        for name, (_, _, held) in leaves.items():
            for rank in dict.fromkeys(rank for rank, _, _ in held):
                mine[rank][name] = plans[name]
        orders = tuple(Orders(rank, storage.root, digest, some) for rank, some in enumerate(mine))
        return Draft(store, storage, tuple(plans.values()), orders)

    def finish(self, step: int | None, metadata: dict[str, Any]) -> None:
        """Merge what all ranks have written, make it durable and give it the name; `end` follows in any case."""
        parts = [Part.load(self.storage, order.rank) for order in self.orders]
        manifest, digests = merge(self.plans, parts, step, metadata)
        self.store.publish(self.storage, complete(self.storage, manifest, digests))

    def end(self) -> None:
        """The save is over; what has not been published is removed."""
        self.store.end(self.storage)
