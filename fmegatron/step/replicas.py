"""Hashes of a state, bit by bit on its device: what replicas on other ranks hold, and what a second run arrives at."""

import math
from types import MappingProxyType

import torch

from fmegatron import tree
from fmegatron.layout import Layout
from fmegatron.tree import structure

_CHUNK = 1 << 22  # elements that are hashed at a time
_INTEGERS = MappingProxyType({1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64})


class ReplicasDifferError(RuntimeError):
    """Ranks that hold the same part of an array hold other bits. path: of the first such leaf; ranks: that differ."""

    def __init__(self, message: str, path: str, ranks: tuple[int, int], step: int):
        super().__init__(message)
        self.path, self.ranks, self.step = path, ranks, step


def hashes(state: structure.Tree) -> torch.Tensor:
    """int64 [leaves], in host memory: a hash of the bits of each leaf, in one transfer per device.

    A sum of words times odd numbers of their positions, modulo 2^64: one flipped bit always changes it.
    """
    leaves = [x for x in tree.leaves(state) if isinstance(x, torch.Tensor)]
    found = [_hash(x.detach()) for x in leaves]
    if len({x.device for x in found}) > 1:
        found = [x.cpu() for x in found]
    return torch.stack(found).cpu() if found else torch.zeros(0, dtype=torch.int64)


def _hash(x: torch.Tensor) -> torch.Tensor:
    total = torch.zeros((), dtype=torch.int64, device=x.device)
    x = torch.view_as_real(x.resolve_conj()) if x.is_complex() else x
    x = x.view(torch.uint8) if x.dtype == torch.bool else x
    words = x.reshape(-1).view(_INTEGERS[x.element_size()])
    for start in range(0, words.numel(), _CHUNK):
        part = words[start : start + _CHUNK].to(torch.int64)
        weights = torch.arange(start, start + part.numel(), device=x.device) * -7046029254386353131  # odd: it spreads
        total += (part * (weights * 2 + 1)).sum() + part.sum() * 4
    return total


def compare(state: structure.Tree, specs: structure.Tree, world, step: int) -> None:
    """Raise ReplicasDifferError, on all ranks, when ranks hold other bits of what should be equal. All ranks call it.

    Waits for the device and for all ranks. Costs a pass over the leaves that have replicas, and one number for each
    kind of replication from each rank; the hashes of leaves are exchanged only when there is a difference.
    """
    layouts: list[Layout] = tree.leaves(tree.layouts(specs))
    found = compare_leaves(list(zip(tree.paths(state), tree.leaves(state), layouts, strict=True)), world)
    if found is None:
        return
    path, layout, first, rank = found
    raise ReplicasDifferError(
        f"{path}: after step {step} ranks {first} and {rank} hold different bits of the same elements ({layout}): one "
        "of the two has miscomputed, or its memory has changed; go back to a checkpoint, and look at both machines",
        path,
        (first, rank),
        step,
    )


def compare_leaves(leaves: list[tuple[str, torch.Tensor, Layout]], world) -> tuple[str, Layout, int, int] | None:
    """(path, layout, rank, other rank) of the first of these leaves (path, local tensor, layout) whose replicas differ,
    the same on all ranks, which all call it; None: none."""
    chosen = [one for one in leaves if one[2].replicas > 1]
    if world is None or world.size == 1 or not chosen:
        return None
    layouts = [layout for _, _, layout in chosen]
    own = hashes([x for _, x, _ in chosen])
    kinds = list(dict.fromkeys(layout.replicated for layout in layouts))
    sums = torch.zeros(len(kinds), dtype=torch.int64)
    for place, layout in enumerate(layouts):
        sums[kinds.index(layout.replicated)] += own[place] * (2 * place + 1)
    firsts = {}  # kind -> the rank that holds the first replica of what this rank holds
    for layout in layouts:
        firsts.setdefault(layout.replicated, layout.rank_of(layout.shard(world.rank)))
    rows = world.gather_rows(sums)
    differs = any(rows[firsts[kind], k] != sums[k] for k, kind in enumerate(kinds))
    if int(world.minimum(torch.tensor([0 if differs else 1]))):
        return None
    rows, bad = world.gather_rows(own), math.inf
    for place, layout in enumerate(layouts):
        if rows[firsts[layout.replicated], place] != own[place]:
            bad = place * world.size + world.rank
            break
    bad = int(world.minimum(torch.tensor([len(chosen) * world.size if bad == math.inf else int(bad)])))
    place, rank = divmod(bad, world.size)
    path, _, layout = chosen[place]
    return path, layout, layout.rank_of(layout.shard(rank)), rank
