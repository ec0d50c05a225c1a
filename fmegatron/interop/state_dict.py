"""State dicts of torch modules and optimizers (DTensors, tensors, values) saved and loaded by fmegatron.checkpoint.

    save_state_dict(path, {"model": model, "optimizer": optimizer}, world=world)     # or their state_dict()s
    load_state_dict(path, {"model": model, "optimizer": optimizer}, world=world)     # in place; either may be fresh

Every tensor becomes a leaf at the path of its keys; DTensors keep their layout (dtensor.py), other tensors count as
identical on all ranks. Everything else goes to the checkpoint's metadata as JSON (values.py) and must be the same on
all ranks. The state dict of another mesh, of another parallelism, is loaded as its own target asks.
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
import xxhash
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from fmegatron import checkpoint
from fmegatron.checkpoint import Foreign, Source
from fmegatron.checkpoint.calls.ranks import together
from fmegatron.checkpoint.dicts import flat
from fmegatron.checkpoint.dicts import values as values_of
from fmegatron.checkpoint.files import stores
from fmegatron.checkpoint.reading import filling, mapping
from fmegatron.collectives import World, connect
from fmegatron.interop.dtensor import layout_of, mesh_of, to_dtensor
from fmegatron.interop.flat import flat_items, nested, put
from fmegatron.interop.stateful import Renumbered, Unmade, give_back, opened, with_names
from fmegatron.layout import Layout, Mesh
from fmegatron.tree import layouts as layouts_of


def from_state_dict(
    state_dict: dict[str, Any], mesh: DeviceMesh | World | Mesh | None = None
) -> tuple[dict[str, torch.Tensor], dict[str, Layout], dict[str, Any]]:
    """(tree, layouts, values) of a state dict: flat dicts by path. The tensors are the state dict's own memory.

    Modules and optimizers count as their state dicts.  mesh: where tensors that are no DTensors are replicas (default:
    all ranks).  values: everything that is no tensor,
    as it stands there. Raises ValueError, naming the path, for what cannot be laid out.
    """
    tree, layouts, values = {}, {}, {}
    replicated = mesh_of(mesh)
    for path, (_, value) in flat_items(opened(state_dict)[0]).items():
        try:
            if isinstance(value, DTensor):
                layouts[path], tree[path] = layout_of(value)
                _check_plain(tree[path])
            elif isinstance(value, torch.Tensor):
                _check_plain(value)
                layouts[path] = Layout(tuple(value.shape), value.dtype, replicated)
                tree[path] = value.detach()
            else:
                values[path] = value
        except ValueError as error:
            raise ValueError(f"{path}: {error}") from None
    return tree, layouts, values


def _check_plain(x: torch.Tensor) -> None:
    """Raise ValueError for what has no plain elements of its own: subclasses, sparse, quantized and meta tensors."""
    if (
        type(x) not in (torch.Tensor, torch.nn.Parameter)
        or x.layout is not torch.strided
        or x.is_quantized
        or x.is_meta
    ):
        kind = "meta" if x.is_meta else x.layout
        raise ValueError(
            f"got a {type(x).__module__}.{type(x).__qualname__} ({kind}, {x.dtype}), wanted a DTensor or a plain tensor"
            " with memory; save what it is made of"
        )


def to_state_dict(
    arrays: dict[str, torch.Tensor],
    mesh: DeviceMesh | World,
    values: dict[str, Any] | None = None,
) -> dict[str, Any]:
    """A nested state dict by path: DTensors where a layout splits, plain tensors where all ranks hold all.

    The tensors know their layouts (`tree.place`; else ValueError, naming the path), and are shared, not copied. All
    levels are dicts with text keys ("0" for a list's first).
    """
    known = layouts_of(arrays)
    sharded = {path: to_dtensor(x, known[path], mesh) if known[path].sharded else x for path, x in arrays.items()}
    return nested({**sharded, **(values or {})})


def save_state_dict(
    path: str | os.PathLike,
    state_dict: dict[str, Any],
    world: World | None = None,
    metadata: dict[str, Any] | None = None,
    *,
    step: int | None = None,
) -> None:
    """Save a state dict as a checkpoint of fmegatron: `checkpoint.save` of what `from_state_dict` finds.

    Modules, optimizers and others that have a state dict may stand in it themselves; of an optimizer beside its module
    the names of the parameters are saved, by which its state is loaded.

    Args:
        path: where to save.
        state_dict: nested dicts and lists of tensors and plain values.
        world: of the ranks that save; None: all ranks of the default process group (made anew at every call).
        metadata: plain data that is stored with it.
        step: as `checkpoint.save`.

    Raises:
        ValueError: as `checkpoint.save`; values that are not plain data or that differ between ranks; tensors that only
            some ranks have (pipeline stages: use `FmegatronWriter`, which torch plans for).
    """
    with _world(world) as ranks:

        def prepare():
            state, pairs = opened(state_dict)
            tree, layouts, values = from_state_dict(state, _device_mesh(state) or world)
            containers = with_names(state, pairs, flat.flatten(state).containers)
            return tree, layouts, values_of.with_state(metadata, values, containers)

        tree, layouts, words = together(ranks, f"saving the state dict to {stores.open_store(path).text}", prepare)
        _check_same(ranks, words[values_of.VALUES])
        checkpoint.save(path, tree, layouts, ranks, words, step=step)


def load_state_dict(
    path: str | os.PathLike | Source | Foreign,
    state_dict: dict[str, Any],
    world: World | None = None,
    *,
    strict: str = "error",
    rules: Sequence[mapping.Rule] = (),
    cast: bool = False,
    verify: bool = True,
) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Fill a state dict from a checkpoint, in place: tensors keep their memory, values are replaced.

    The state dict states what is wanted, and its layout: any mesh, any parallelism; only what this rank needs is read.
    Modules and optimizers may stand in it, and load their state dicts when these are filled; of an optimizer's state
    dict, `optimizer.load_state_dict(state_dict["optimizer"])` must follow. An optimizer need not have made a step: its
    state gets the entries that are stored (stateful.py; on several ranks give the optimizer, not its state dict).

    Args:
        path: of the checkpoint, an open snapshot of it, or a foreign source (`interop.source`).
        state_dict: the tensors and values to be replaced.
        world: of the ranks that load; None: all ranks of the default process group.
        strict: as `checkpoint.restore`; what is not stored, and a mode lets pass, stays as it is.
        rules: as `checkpoint.restore`: names and shapes of what is stored under other ones.
        cast: convert dtypes, instead of an error.
        verify: compare what is read with its digests.

    Returns:
        The paths of what is stored and was not asked for, and of what was asked for and is not stored.

    Raises:
        ValueError: before anything is changed, when the request does not fit.
        CheckpointError: damage; some tensors may have been filled already.
        RuntimeError: the ranks go on seeing different saves; the same holds.
    """
    state, pairs = opened(state_dict)
    flat_items(state)  # what contains itself is an error
    unmade, numbers = Unmade(state, pairs), Renumbered(state, pairs, {}, {})

    def ask(offer: filling.Offer) -> filling.Asked:
        nonlocal unmade, numbers
        unmade.undo()
        numbers.undo()
        stored = offer.source.metadata.get(values_of.CONTAINERS)
        numbers = Renumbered(state, pairs, stored if isinstance(stored, dict) else {}, offer.values)
        unmade = Unmade(state, pairs)
        # The state of optimizers that have not made it themselves, as what is stored has it.
        unmade.make(offer.arrays | dict.fromkeys(offer.values), offer.is_sharded, ranks.size)
        rank = dist.get_rank() if dist.is_initialized() else 0
        return filling.Asked(rank, *from_state_dict(state, _device_mesh(state) or world))

    with _world(world) as ranks:
        try:
            done = filling.fill(path, ask, ranks, strict=strict, rules=rules, cast=cast, verify=verify)
        except BaseException:
            unmade.undo()
            numbers.undo()
            raise
        keys = {p: keys for p, (keys, _) in flat_items(state).items()}
        for p, value in done.values.items():
            put(state, keys[p], value)
        numbers.finish()
        give_back(state, state_dict)
        for value, inner in pairs:
            value.load_state_dict(inner)
    return done.difference.missing, done.difference.unexpected


def _check_same(ranks: World, values: dict[str, Any]) -> None:
    """Raise ValueError, on all ranks, when their values differ; one number per rank is exchanged."""
    text = json.dumps(values, separators=(",", ":"), allow_nan=False)
    row = torch.tensor([xxhash.xxh3_64_intdigest(text.encode()) - (1 << 63)])
    digests = ranks.gather_rows(row)[:, 0].tolist()
    if other := next((r for r, d in enumerate(digests) if d != digests[0]), None):
        here, there = (json.loads(ranks.broadcast_text(text, source)) for source in (0, other))
        names = [k for k in {**here, **there} if here.get(k, ...) != there.get(k, ...)]
        raise ValueError(
            f"state dict: got values (what is no tensor) that differ between ranks 0 and {other}:"
            f" {', '.join(names[:3])}, wanted the same; make them the same, or tensors with a layout"
        )


def _device_mesh(state_dict: dict[str, Any]) -> DeviceMesh | None:
    """The device mesh of the first DTensor: plain tensors are named replicas on it."""
    values = (value for _, value in flat_items(state_dict).values())
    return next((value.device_mesh for value in values if isinstance(value, DTensor)), None)


@contextlib.contextmanager
def _world(world: World | None) -> Iterator[World]:
    if world is not None:
        yield world
    elif not dist.is_initialized() or dist.get_world_size() == 1:
        yield World.alone("cpu")
    else:
        with connect(Mesh(world=dist.get_world_size())) as made:
            yield made
