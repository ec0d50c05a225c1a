"""Fill: a restore into memory that is there, for callers whose target depends on what is stored (state dicts)."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import torch

from fmegatron.checkpoint.calls.ranks import Ranks
from fmegatron.checkpoint.files.stores import open_store
from fmegatron.checkpoint.files.targets import Target
from fmegatron.checkpoint.reading.agreed import on_one_save
from fmegatron.checkpoint.reading.mapping import Rule, apply_rules
from fmegatron.checkpoint.reading.read import destinations
from fmegatron.checkpoint.reading.request import Request, match
from fmegatron.checkpoint.reading.snapshot import Saved
from fmegatron.checkpoint.reading.source import Foreign, Source
from fmegatron.checkpoint.reading.strict import Difference, complaints, strictness, warn, warn_unread
from fmegatron.checkpoint.reading.target import is_direct
from fmegatron.layout import Layout


@dataclass(frozen=True)
class Offer:
    """What a source holds, under the names that rules give it."""

    source: Source
    rules: Sequence[Rule]

    @cached_property
    def values(self) -> dict[str, Any]:
        """Plain values by path."""
        return self.source.values

    @cached_property
    def _origins(self) -> dict[str, tuple[tuple[int, ...], str]]:
        """(shape, a stored leaf that it is made of) by path."""
        leaves = self.source.leaves
        if not self.rules:
            return {path: (leaf.shape, path) for path, leaf in leaves.items()}
        views = apply_rules(self.rules, {path: leaf.shape for path, leaf in leaves.items()})
        return {path: (view.shape, min(view.sources)) for path, view in views.items() if view.sources}

    @cached_property
    def arrays(self) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
        """(global shape, dtype) by path."""
        return {path: (shape, self.source.leaves[of].torch_dtype) for path, (shape, of) in self._origins.items()}

    def is_sharded(self, path: str) -> bool:
        """Whether the ranks that wrote it held parts of it."""
        return bool(self.source.layout_of(self._origins[path][1]).sharded)


class Asked(NamedTuple):
    """What is to be filled: by path the tensors of a rank, of any device, their layouts, and the plain values."""

    rank: int
    tensors: Mapping[str, torch.Tensor]
    layouts: Mapping[str, Layout]
    values: Mapping[str, Any]


class Filled(NamedTuple):
    """What a fill has found: the paths that only one side has, the stored plain values that were asked for, and what
    is stored that is neither."""

    difference: Difference
    values: dict[str, Any]
    unread: Sequence[str]


def fill(
    path: Saved,
    ask: Callable[[Offer], Asked],
    ranks: Ranks,
    *,
    strict: str = "error",
    rules: Sequence[Rule] = (),
    cast: bool = False,
    verify: bool = True,
) -> Filled:
    """Fill the tensors that `ask` names when it has seen what is stored. All ranks call it; all read one save.

    Args:
        path: of the checkpoint.
        ask: called again when the checkpoint is saved again meanwhile; raises for what it cannot take.
        ranks: that fill together.
        strict: as `restore`; what is not stored, and a mode lets pass, stays as it is.
        rules: as `restore`.
        cast: as `restore`.
        verify: as `restore`.

    Raises ValueError before anything is changed when the request does not fit; CheckpointError for damage, when some
    tensors may have been filled; RuntimeError as `restore`, and where a new save lacks what has been filled.
    """
    mode, filled = strictness(strict), set[str]()
    where = path.text if isinstance(path, Source | Foreign) else open_store(path).text

    def work(source: Source) -> Filled:
        offer = Offer(source, rules)
        known = offer.values
        asked = ask(offer)
        request = match(source, dict(asked.layouts), mode, rules=rules, cast=cast, has_initial=True)
        missing = tuple(p for p in known if p not in asked.values)
        unexpected = tuple(p for p in asked.values if p not in known)
        if problems := complaints(Difference(missing, unexpected), mode):
            raise ValueError(
                f"{where}: got other values than the state dict, wanted the same:\n" + "\n".join(problems[:10])
            )
        fills = set(request.paths) - set(request.difference.unexpected)
        if lost := filled - fills:
            raise RuntimeError(f"{where}: was saved again, without {min(lost)}, which has been filled; load all anew")
        filled.update(fills)
        _fill([asked.tensors[p] for p in request.paths], request, source, asked.rank, verify)
        found = request.difference
        difference = Difference(found.missing + missing, found.unexpected + unexpected)
        return Filled(difference, {p: known[p] for p in asked.values if p in known}, source.unread)

    _, done = on_one_save(ranks, f"loading the state dict from {where}", path, work)
    if ranks.rank == 0:
        warn(done.difference, mode, where, from_initial=True, stacklevel=3)  # of who calls the caller
        warn_unread(done.unread, where, stacklevel=3)
    return done


def _fill(tensors: list[torch.Tensor], request: Request, source: Source, rank: int, verify: bool) -> None:
    """Read what is asked for into these tensors, in the order of the request."""
    plain = [is_direct(x) for x in tensors]
    # What a rule leaves as it is must be in the staged copy, too.
    into = [x if direct else x.cpu().contiguous() for x, direct in zip(tensors, plain, strict=True)]
    by_leaf: dict[str, list[Target]] = {}
    for want in destinations(request, rank, into, into=into)[1]:
        by_leaf.setdefault(want.leaf.path, []).append(want.target)
    source.fill(by_leaf, verify)
    for x, host, direct in zip(tensors, into, plain, strict=True):
        if not direct:
            x.copy_(host)
