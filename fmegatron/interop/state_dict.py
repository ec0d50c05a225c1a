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
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from fmegatron import checkpoint
from fmegatron.checkpoint.calls.ranks import Ranks, together
from fmegatron.checkpoint.dicts.described import stored_values
from fmegatron.checkpoint.dicts.flat import flatten
from fmegatron.checkpoint.dicts.values import VALUES, with_state
from fmegatron.checkpoint.files.format import Leaf, digest_text, dtype_of
from fmegatron.checkpoint.files.manifest import layout_from_json, to_json_text
from fmegatron.checkpoint.files.open_store import open_store
from fmegatron.checkpoint.files.snapshot import Foreign, Saved, Snapshot
from fmegatron.checkpoint.files.storage import Store
from fmegatron.checkpoint.files.targets import Target
from fmegatron.checkpoint.reading.agreed import on_one_save
from fmegatron.checkpoint.reading.fetch import read_all
from fmegatron.checkpoint.reading.mapping import Rule, apply_rules
from fmegatron.checkpoint.reading.read import destinations
from fmegatron.checkpoint.reading.request import Request, match
from fmegatron.checkpoint.reading.strict import Difference, complaints, strictness, warn
from fmegatron.collectives import World, connect
from fmegatron.interop.dtensor import layout_of, mesh_of, to_dtensor
from fmegatron.interop.flat import flat_items, nested, put
from fmegatron.interop.stateful import Unmade, give_back, opened
from fmegatron.layout import Layout, Mesh


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
    tree: dict[str, torch.Tensor],
    layouts: dict[str, Layout],
    mesh: DeviceMesh | World,
    values: dict[str, Any] | None = None,
) -> dict[str, Any]:
    """A nested state dict by path: DTensors where a layout splits, plain tensors where all ranks hold all.

    The tensors are shared, not copied. All levels are dicts with text keys ("0" for a list's first).
    """
    sharded = {path: to_dtensor(x, layouts[path], mesh) if layouts[path].sharded else x for path, x in tree.items()}
    return nested({**sharded, **(values or {})})


def save_state_dict(
    path: str | os.PathLike | Store,
    state_dict: dict[str, Any],
    world: World | None = None,
    metadata: dict[str, Any] | None = None,
    *,
    step: int | None = None,
) -> None:
    """Save a state dict as a checkpoint of fmegatron: `checkpoint.save` of what `from_state_dict` finds.

    Modules, optimizers and others that have a state dict may stand in it themselves.

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
            state, _ = opened(state_dict)
            tree, layouts, values = from_state_dict(state, _device_mesh(state) or world)
            return tree, layouts, with_state(metadata, values, flatten(state).containers)

        tree, layouts, words = together(ranks, f"saving the state dict to {open_store(path).text}", prepare)
        _check_same(ranks, words[VALUES])
        checkpoint.save(path, tree, layouts, ranks, words, step=step)


def load_state_dict(
    path: Saved,
    state_dict: dict[str, Any],
    world: World | None = None,
    *,
    strict: str = "error",
    rules: Sequence[Rule] = (),
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
    mode, name = strictness(strict), path.text if isinstance(path, Snapshot | Foreign) else open_store(path).text
    state, pairs = opened(state_dict)
    flat_items(state)  # what contains itself is an error
    unmade, filled = Unmade(state, pairs), set()

    def work(snapshot: Snapshot) -> Filled:
        known = stored_values(snapshot.manifest.metadata, name)
        unmade.undo()
        _make(unmade, snapshot, known, rules, ranks)
        items = flat_items(state)
        tree, layouts, values = from_state_dict(state, _device_mesh(state) or world)
        request = match(name, snapshot.manifest, layouts, mode, rules=rules, cast=cast, has_initial=True)
        missing = tuple(p for p in known if p not in values)
        unexpected = tuple(p for p in values if p not in known)
        if problems := complaints(Difference(missing, unexpected), mode):
            raise ValueError(
                f"{name}: got other values than the state dict, wanted the same:\n" + "\n".join(problems[:10])
            )
        fills = set(request.paths) - set(request.difference.unexpected)
        if lost := filled - fills:
            raise RuntimeError(f"{name}: was saved again, without {min(lost)}, which has been filled; load all anew")
        filled.update(fills)
        _fill([tree[p] for p in request.paths], request, snapshot, verify)
        found = request.difference
        difference = Difference(found.missing + missing, found.unexpected + unexpected)
        return Filled(difference, {items[p][0]: known[p] for p in values if p in known})

    with _world(world) as ranks:
        try:
            _, done = on_one_save(ranks, f"loading the state dict from {name}", path, work)
        except BaseException:
            unmade.undo()
            raise
        for keys, value in done.values.items():
            put(state, keys, value)
        give_back(state, state_dict)
        for value, inner in pairs:
            value.load_state_dict(inner)
        if ranks.rank == 0:
            warn(done.difference, mode, name, from_initial=True)
    return done.difference.missing, done.difference.unexpected


class Filled(NamedTuple):
    """What a load has found: which paths only one side has, and the values, by their keys, that are to be put."""

    difference: Difference
    values: dict[tuple, Any]


def _make(unmade: Unmade, snapshot: Snapshot, known: dict[str, Any], rules: Sequence[Rule], ranks: Ranks) -> None:
    """The state of optimizers that have not made it themselves, as what is stored has it, by the names that it gets."""
    leaves = snapshot.manifest.leaves
    views = apply_rules(rules, {path: leaf.shape for path, leaf in leaves.items()}) if rules else None
    sources = {path: path for path in leaves} if views is None else {
        path: min(view.sources) for path, view in views.items() if view.sources
    }  # fmt: skip
    shapes = {path: leaves[path].shape if views is None else views[path].shape for path in sources}
    stored = {path: (shapes[path], dtype_of(leaves[source].dtype)) for path, source in sources.items()}

    def are_sharded(path: str) -> bool:
        return bool(layout_from_json(leaves[sources[path]], snapshot.manifest.meshes).sharded)

    unmade.make(stored | dict.fromkeys(known), are_sharded, ranks.size)


def _fill(tensors: list[torch.Tensor], request: Request, snapshot: Snapshot, verify: bool) -> None:
    """Read what is asked for into these tensors, in the order of the request."""
    plain = [_is_direct(x) for x in tensors]
    # What a rule leaves as it is must be in the staged copy, too.
    into = [x if direct else x.cpu().contiguous() for x, direct in zip(tensors, plain, strict=True)]
    _, wants = destinations(request, dist.get_rank() if dist.is_initialized() else 0, into, into=into)
    by_leaf: dict[str, tuple[Leaf, list[Target]]] = {}
    for want in wants:
        by_leaf.setdefault(want.leaf.path, (want.leaf, []))[1].append(want.target)
    read_all(snapshot, by_leaf.values(), verify)
    for x, host, direct in zip(tensors, into, plain, strict=True):
        if not direct:
            x.copy_(host)


def _is_direct(x: torch.Tensor) -> bool:
    """Whether bytes can be read straight into its memory."""
    return x.device.type == "cpu" and x.is_contiguous() and not x.is_conj() and not x.is_neg()


def _check_same(ranks: Ranks, values: dict[str, Any]) -> None:
    """Raise ValueError, on all ranks, when their values differ; one number per rank is exchanged."""
    text = to_json_text(values)
    row = torch.tensor([int(digest_text(text.encode()), 16) - (1 << 63)])
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
def _world(world: World | None) -> Iterator[Ranks]:
    if world is not None:
        yield world
    elif not dist.is_initialized() or dist.get_world_size() == 1:
        yield World.alone("cpu")
    else:
        with connect(Mesh(world=dist.get_world_size())) as made:
            yield made
