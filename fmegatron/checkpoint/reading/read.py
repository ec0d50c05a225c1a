"""Restore: given target layouts, returns this rank's tensors; reads and verifies only the bands that they need.

    manifest -> views of stored leaves by the rules -> strictness, shapes, dtypes -> boxes of this rank -> bands

Each band (at most 1 MiB) is read into a buffer that stays in the cache, digested there, and copied from there to where
it belongs: one pass over memory for reading, verifying and resharding together. Two or four threads share the chunks.
Plain positioned reads beat tensorstore's mapped ones here (warm page cache, 2 cores, digests on: 1.15 of plain readinto
against 0.65), and a file that gets shorter while it is read is an error instead of a SIGBUS.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, nullcontext, suppress
from dataclasses import dataclass, fields, replace
from types import MappingProxyType
from typing import Any, NamedTuple, TypedDict

import torch

from fmegatron import tree
from fmegatron.checkpoint.calls.arguments import check_device, flat_layouts, ranks_of
from fmegatron.checkpoint.calls.ranks import Ranks, together
from fmegatron.checkpoint.dicts.arrays import as_tensor
from fmegatron.checkpoint.dicts.flat import Array, flatten
from fmegatron.checkpoint.files.format import bits, digest
from fmegatron.checkpoint.files.stores import holding, open_store
from fmegatron.checkpoint.files.targets import Target
from fmegatron.checkpoint.reading.agreed import on_one_save
from fmegatron.checkpoint.reading.mapping import Rule
from fmegatron.checkpoint.reading.once import Exchange, Want, deal, exchange_all
from fmegatron.checkpoint.reading.pages import fresh
from fmegatron.checkpoint.reading.request import Request, match, subtree
from fmegatron.checkpoint.reading.snapshot import Saved
from fmegatron.checkpoint.reading.source import Foreign, Source
from fmegatron.checkpoint.reading.strict import (
    Difference,
    Strictness,
    strictness,
    unflatten_some,
    warn,
    warn_unread,
)
from fmegatron.checkpoint.reading.target import Wanted, target_of, values_of
from fmegatron.checkpoint.reading.view import Fill, regions
from fmegatron.layout import Box, Layout
from fmegatron.tree import labels, structure


def restore(
    path: Saved,
    target: structure.Tree = None,
    *,
    into: structure.Tree = None,
    world: Ranks | None = None,
    rank: int | None = None,
    strict: str = "error",
    rules: Sequence[Rule] = (),
    prefix: str = "",
    initial: structure.Tree = None,
    read: str = "own",
    cast: bool = False,
    device: str | torch.device | None = None,
    verify: bool = True,
) -> structure.Tree:
    """The state at `path` as local tensors of a rank under target layouts: a tree of the structure of `target`.

    On one process the target may be a state instead, or be left out; then it is all global arrays and plain values that
    are stored, in dicts, lists and tuples as they were saved (a NamedTuple as a dict of its fields).

    All ranks return what one save holds. When the checkpoint is saved again meanwhile, or ranks see different saves,
    they read again; if that does not help they raise RuntimeError, which names the path and what differs.

    Args:
        path: of a directory, a URL, a Store, or a Source (`open_snapshot`); of a checkpoint of another system what
            `fmegatron.interop.source` makes of its path.
        target: tree of Layouts (or ArraySpecs: what is not `saved` is made anew), on any mesh; or, on one process, a
            state: tensors (meta tensors, too) and numpy arrays give shapes, dtypes and devices, plain values are
            replaced by those stored.
        into: a state, in the place of a target, whose tensors and writable arrays are overwritten; its dicts and lists
            get the plain values. It is what is returned. Its memory may be partly overwritten when damage is found.
        world: the ranks that restore together (an error on one is raised on all); or
        rank: whose tensors to return (needed when the mesh has several ranks and there is no world).
        strict: about leaves that are asked for and not stored ("unexpected") or stored and not asked for ("missing").
            "error" (or "raise_all"): the target names exactly the stored leaves.  "subset" ("raise_unexpected",
            "assume_ok_unexpected"): what the target does not name is left out.  "log_unexpected", "log_all": warn with
            every path; "return_unexpected", "return_all": return (state, missing, unexpected), tuples of paths;
            "ignore_all". In these modes an unexpected leaf comes from `initial`, or without `initial` is left out of
            its dict (`into`: stays as it is). Plain values count where the target is a state.
        rules: how stored names and shapes of arrays become wanted ones (mapping.py).
        prefix: restore the stored subtree below this path.
        initial: tree of this rank's current tensors, as `target` has them, for leaves that are not stored and for what
            rules take from it; full leaves are returned as they are, without a copy.
        read: "own": every rank reads all that it needs.  "once": ranks that hold the same shard read a part of it each
            and exchange the parts through `world`; with one replica nothing is exchanged.
        cast: convert to the target's dtype where it differs.
        device: where the tensors go (default: those of the target's tensors, else of the world, else the CPU).
        verify: check the digests.

    Raises:
        CheckpointError: the checkpoint is missing, incomplete or damaged (naming leaf and file).
        ValueError: the target does not fit it. Nothing in the files is executed.
    """
    view = Asked(strict, rules, prefix, initial, cast, verify)
    found = restore_save(path, target, view, into=into, world=world, rank=rank, read=read, device=device)
    found.warn(stacklevel=3)
    return found.state


class RestoreOptions(TypedDict, total=False):
    """Arguments of `restore` that others take by name and pass on as they are."""

    into: structure.Tree
    strict: str
    rules: Sequence[Rule]
    prefix: str
    initial: structure.Tree
    read: str
    cast: bool
    device: str | torch.device | None
    verify: bool


@dataclass(frozen=True)
class Asked:
    """What of the stored leaves is asked for, and how they become those of the target: as of `restore`."""

    strict: str = "error"
    rules: Sequence[Rule] = ()
    prefix: str = ""
    initial: Any = None
    cast: bool = False
    verify: bool = True

    @staticmethod
    def split(options: Mapping[str, Any]) -> tuple[Asked, dict[str, Any]]:
        """Arguments of `restore` by name: those that are fields here, and the others."""
        own = {field.name for field in fields(Asked)} & set(options)
        others = {name: value for name, value in options.items() if name not in own}
        return Asked(**{name: options[name] for name in own}), others


class Restored(NamedTuple):
    """What `restore` returns, the one save that it read on all ranks, and what this rank is to warn of."""

    state: Any
    source: Source
    told: tuple | None
    unread: Sequence[str] = ()

    def warn(self, stacklevel: int) -> None:
        """Of leaves that are not stored, or not asked for, in a mode of `strict` that warns of them: on rank 0; and of
        objects that no state has."""
        if self.told is not None:
            warn(*self.told, stacklevel=stacklevel)
        warn_unread(self.unread, self.source.text, stacklevel=stacklevel)


def restore_save(
    path: Saved,
    target: Any,
    asked: Asked,
    *,
    into: Any = None,
    world: Ranks | None = None,
    rank: int | None = None,
    read: str = "own",
    device: str | torch.device | None = None,
) -> Restored:
    """`restore`, with the save that it read, before it warns."""
    ranks, what = ranks_of(world), f"restoring the checkpoint {getattr(path, 'text', path)}"
    once, wanted, me = read == "once" and ranks.size > 1, None, 0

    def check() -> None:
        nonlocal wanted, me
        if read not in ("own", "once"):
            raise ValueError(f"read: got {read!r}, wanted 'own' or 'once'")
        check_device(device)
        wanted = target_of(target, into, ranks, rank)
        if wanted is not None:
            return
        me = rank_of(target, ranks, rank)
        if read == "once" and ranks.size == 1 and any(layout.mesh.size > 1 for layout in flat_layouts(target)[1]):
            raise ValueError("read='once': got no world, wanted the ranks that read together; pass world=")

    def work(source: Source) -> tuple[Started, Any]:
        if wanted is not None:
            return read_wanted(source, wanted, ranks, device, asked)
        started = start_reading(source, target, me, asked, once=once)
        return started, None if once else finish_reading(started, ranks, device)

    # Rank 0 keeps retention away from the files until all ranks have read.
    with _protected(path) if ranks.rank == 0 else nullcontext():
        source, (started, state) = on_one_save(ranks, what, path, work, lambda found: found[0].key, check)
        if once:  # all has been agreed upon before ranks wait for bytes of each other
            state = together(ranks, what, lambda: finish_reading(started, ranks, device))
    told = (started.request.difference, started.mode, started.where, asked.initial is not None)
    return Restored(state, source, told if ranks.rank == 0 else None, () if wanted is None else source.unread)


def _protected(path: Saved) -> ExitStack:
    """The checkpoint pinned; nothing where that fails: what is wrong is reported by all ranks together, later."""
    stack = ExitStack()
    if not isinstance(path, Source | Foreign):  # whoever has opened it holds it
        with suppress(Exception):
            stack.enter_context(holding(open_store(path)))
    return stack


@dataclass(frozen=True)
class Started:
    """A restore whose files are read: what is left is to exchange (read="once") and to build the tree.

    key: with exchanges, the same on ranks that have asked for the same.
    """

    where: str
    mode: Strictness
    request: Request
    tensors: list[torch.Tensor | None]
    exchanges: list[Exchange]
    key: int = 0


def start_reading(
    source: Source,
    target_layouts: Any,
    rank: int,
    asked: Asked,
    *,
    once: bool = False,
    into: Mapping[str, torch.Tensor] = MappingProxyType({}),
) -> Started:
    """All of a restore up to the exchange, for one rank and without a word to the others (see `restore`).

    into: by path, memory of leaves in the place of new memory, contiguous on the CPU.
    """
    mode, initial = strictness(asked.strict), asked.initial
    how = {"rules": asked.rules, "prefix": asked.prefix, "cast": asked.cast, "has_initial": initial is not None}
    request = match(source, target_layouts, mode, **how)
    current = _current(initial, target_layouts, rank)
    memory = [into.get(path) for path in request.paths]
    # Before anything is allocated for elements that may not be there; a source that does not ask makes no work.
    source.require((want.leaf.path, want.target.box) for want in _wants(request, rank))
    tensors, wants = destinations(request, rank, current, into=memory)
    for i, spec in request.anew.items():
        tensors[i] = tree.init(spec, 0, rank)
    mine, exchanges = deal(source, wants, rank) if once else ([(want.leaf, want.target) for want in wants], [])
    by_leaf: dict[str, list[Target]] = {}
    for leaf, target in mine:
        by_leaf.setdefault(leaf.path, []).append(target)
    # Leaves with files of their own first: they are read while this thread goes through the many small ones.
    first = sorted(by_leaf, key=lambda path: not source.grid(path))
    source.fill({path: by_leaf[path] for path in first}, asked.verify)
    return Started(source.text, mode, request, tensors, exchanges, _key(request) if once else 0)


def finish_reading(started: Started, world: Ranks, device: str | torch.device | None) -> Any:
    """The restored tree; with exchanges, all ranks of the world call this, by `together`."""
    if started.exchanges and not exchange_all(started.exchanges, world):
        return None  # the rank that failed reports why, where the ranks agree
    request, tensors = started.request, finish_tensors(started, device or world.device)
    for i, (x, layout) in enumerate(zip(tensors, request.layouts, strict=True)):
        tensors[i] = x if x is None else labels.labelled(x, layout)
    return returned(started, unflatten_some(request.spec, tensors, request.left_out))


def finish_tensors(started: Started, device: str | torch.device) -> list[torch.Tensor | None]:
    """The tensors on the device that is asked for, or beside it where their layouts name host memory.

    One by one, so that memory is given back on the way.
    """
    tensors = started.tensors
    for i, x in enumerate(tensors):
        if x is not None:
            tensors[i] = labels.in_memory(x, started.request.layouts[i], device)
    return tensors


def returned(started: Started, state: Any) -> Any:
    """What `restore` returns in this mode of strictness."""
    difference = started.request.difference
    return (state, difference.missing, difference.unexpected) if started.mode.returns else state


def read_wanted(
    source: Source,
    wanted: Wanted,
    world: Ranks,
    device: str | torch.device | None,
    asked: Asked,
) -> tuple[Started, Any]:
    """A restore for a target that is no tree of layouts, on one process."""
    mode, where = strictness(asked.strict), source.text
    rules, prefix, initial = asked.rules, asked.prefix, asked.initial
    rules = (rules,) if isinstance(rules, Rule) else rules
    layouts = wanted.asked(source, rules, prefix)
    values, containers = values_of(source, prefix)
    stored = subtree(source.leaves, prefix)
    difference = wanted.compare(values, stored, mode, where)
    first = flatten(initial).leaves if initial is not None else {}
    given = {p: as_tensor(first[p], p) for p in layouts if isinstance(first.get(p), Array)}
    current = {p: x.resolve_conj().resolve_neg() for p, x in given.items()}
    asked = replace(asked, rules=rules, initial=None if initial is None else current)
    started = start_reading(source, layouts, 0, asked, into=wanted.memory())
    request, host = started.request, "cpu" if wanted.like is not None else world.device
    difference = Difference(
        request.difference.missing + difference.missing, request.difference.unexpected + difference.unexpected
    )
    started = replace(started, request=replace(request, difference=difference))
    tensors = finish_tensors(started, device or host)
    found = {path: x for path, x in zip(request.paths, tensors, strict=True) if x is not None}
    return started, returned(started, wanted.build(found, values, containers, first, device, where))


def rank_of(target_layouts: Any, ranks: Ranks, rank: int | None) -> int:
    """The rank whose tensors are asked for. Raises ValueError when world, rank and meshes do not go together."""
    if rank is not None and (isinstance(rank, bool) or not isinstance(rank, int)):
        raise ValueError(f"rank: got {rank!r:.60} ({type(rank).__name__}), wanted the number of a rank, e.g. 0")
    for mesh in {layout.mesh for layout in flat_layouts(target_layouts)[1]}:
        if ranks.size > 1 and mesh.size != ranks.size:
            raise ValueError(
                f"restore: got target layouts on {mesh} ({mesh.size} ranks), wanted {ranks.size}, which"
                f" restore together; make the layouts with a mesh of {ranks.size}"
            )
        if ranks.size == 1 and rank is None and mesh.size > 1:
            raise ValueError(f"restore: got no rank, wanted one of the {mesh.size} of {mesh}; pass world= or rank=")
    if ranks.size > 1 and rank not in (None, ranks.rank):
        raise ValueError(f"restore: got rank={rank}, wanted {ranks.rank}, as in the world; pass one of them")
    return ranks.rank if rank is None else rank


def _current(initial: Any, target_layouts: Any, rank: int) -> list[torch.Tensor] | None:
    if initial is None:
        return None
    tree.check(initial, target_layouts, rank, "initial", "the target layouts")
    return tree.leaves(initial)


def destinations(
    request: Request,
    rank: int,
    current: Sequence[torch.Tensor] | None = None,
    device: str = "cpu",
    into: Sequence[torch.Tensor | None] | None = None,
) -> tuple[list[torch.Tensor | None], list[Want]]:
    """The tensors of a rank's result, with zeros and current values in place, and what is to be read into them.

    into: the tensors themselves, contiguous on the CPU, instead of new ones; None for a new one.
    """
    tensors: list[torch.Tensor | None] = [None] * len(request.paths)
    wants: list[Want] = []
    held: dict[Layout, tuple[tuple[int, ...], tuple[Box, ...]]] = {}  # thousands of leaves share a few
    for i, (path, layout, view) in enumerate(zip(request.paths, request.layouts, request.views, strict=True)):
        if view is None:
            continue
        if current is not None and all(part.source is Fill.FRESH for part in view.parts):
            tensors[i] = current[i].detach()
            continue
        if (shape_and_boxes := held.get(layout)) is None:
            shape_and_boxes = held[layout] = layout.local_shape(rank), layout.boxes(rank)
        (shape, boxes), given = shape_and_boxes, None if into is None else into[i]
        x = fresh(shape, layout.dtype, device) if given is None else given
        tensors[i] = x
        if layout.padded:  # which no file has
            bits(x).zero_()
        for box in boxes:
            for part, piece in regions(view, box):
                place = piece.view(x)
                if part.source is Fill.ZEROS:
                    bits(place).zero_()
                elif part.source is Fill.FRESH:
                    if current is not None:
                        place.copy_(piece.view(current[i].contiguous()))
                else:
                    leaf = request.leaves[part.source]
                    box = part.source_box(piece.start, piece.shape)
                    target = Target(path, box, part.as_source(place), leaf.torch_dtype)
                    wants.append(Want(layout, leaf, target))
    return tensors, wants


def _wants(request: Request, rank: int) -> Iterator[Want]:
    """What is to be read; nothing is allocated."""
    yield from destinations(request, rank, device="meta")[1]


def _key(request: Request) -> int:
    """63 bits that differ between requests for different shards."""
    kinds = {layout: i for i, layout in enumerate(dict.fromkeys(request.layouts))}
    asked = [
        f"{path} {kinds[layout]} {view and view.parts}"
        for path, layout, view in zip(request.paths, request.layouts, request.views, strict=True)
    ]
    return digest("\n".join([*map(repr, kinds), *asked]).encode()) >> 1
