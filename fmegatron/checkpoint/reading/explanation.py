"""Which rank reads what: the bytes of a restore before any of them is read."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from fmegatron.checkpoint.reading.mapping import Rule
from fmegatron.checkpoint.reading.once import deal
from fmegatron.checkpoint.reading.read import destinations
from fmegatron.checkpoint.reading.request import match
from fmegatron.checkpoint.reading.snapshot import Saved, snapshot_of
from fmegatron.checkpoint.reading.strict import strictness
from fmegatron.tree import structure


class Read(NamedTuple):
    """What a restore reads of one chunk file for one leaf of the result.

    leaf: path in the result; bands that several leaves share count for the first.  array: stored array (of a foreign
    source: stored path).  file: path inside the checkpoint.  nbytes: full bands, as they are read and verified.
    """

    leaf: str
    array: str
    file: str
    nbytes: int


def explain(
    path: Saved,
    target_layouts: structure.Tree,
    rank: int = 0,
    *,
    rules: Sequence[Rule] = (),
    prefix: str = "",
    read: str = "own",
    strict: str = "subset",
    cast: bool = True,
) -> list[Read]:
    """What `restore` with these arguments would read on a rank, file by file; only the manifest is looked at.

    Raises what `restore` raises when the target does not fit.
    """
    source, has = snapshot_of(path), {"cast": cast, "has_initial": True}
    request = match(source, target_layouts, strictness(strict), rules=rules, prefix=prefix, **has)
    _, wants = destinations(request, rank, device="meta")
    mine = [(want.leaf, want.target) for want in wants] if read == "own" else deal(source, wants, rank)[0]
    seen: set[tuple] = set()
    reads: dict[tuple[str, str, str], int] = {}
    for leaf, target in mine:
        for grain in source.reads(leaf.path, target.box):
            if grain.key not in seen:
                seen.add(grain.key)
                key = (target.path, grain.array, grain.file)
                reads[key] = reads.get(key, 0) + grain.nbytes
    return [Read(*key, nbytes) for key, nbytes in reads.items()]
