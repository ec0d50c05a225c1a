"""State dicts of torch modules and optimizers (DTensors, tensors, values) saved and loaded by fmegatron.checkpoint.

    save_state_dict(path, {"model": model.state_dict(), "optimizer": optimizer.state_dict()}, world=world)
    load_state_dict(path, {"model": model.state_dict(), "optimizer": optimizer.state_dict()}, world=world)   # in place

Every tensor becomes a leaf at the path of its keys; DTensors keep how they lie (dtensor.py), other tensors count as
held alike by all ranks. Everything else goes to the checkpoint's metadata as JSON (values.py) and must be the same on
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
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from fmegatron import checkpoint
from fmegatron.checkpoint import CheckpointError
from fmegatron.checkpoint.calls.ranks import Alone, Ranks, together
from fmegatron.checkpoint.files.format import Leaf, digest_text
from fmegatron.checkpoint.files.manifest import read_manifest, to_json_text
from fmegatron.checkpoint.files.storage import Store, locate, open_store
from fmegatron.checkpoint.reading.fetch import Fetch, Target
from fmegatron.checkpoint.reading.mapping import Rule
from fmegatron.checkpoint.reading.read import destinations
from fmegatron.checkpoint.reading.request import match
from fmegatron.checkpoint.reading.strict import Difference, complaints, strictness, warn
from fmegatron.collectives import World, connect
from fmegatron.interop.dtensor import layout_of, mesh_of, to_dtensor
from fmegatron.interop.flat import flat_items, nested, put
from fmegatron.interop.values import from_json, to_json
from fmegatron.layout import Layout, Mesh

VALUES = "state_dict"  # key of the values in the checkpoint's metadata


def from_state_dict(
    state_dict: dict[str, Any], mesh: DeviceMesh | World | Mesh | None = None
) -> tuple[dict[str, torch.Tensor], dict[str, Layout], dict[str, Any]]:
    """(tree, layouts, values) of a state dict: flat dicts by path. The tensors are the state dict's own memory.

    mesh: where tensors that are no DTensors are replicas (default: all ranks).  values: everything that is no tensor,
    as it stands there. Raises ValueError, naming the path, for what cannot be laid out.
    """
    tree, layouts, values = {}, {}, {}
    replicated = mesh_of(mesh)
    for path, (_, value) in flat_items(state_dict).items():
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

    world: of the ranks that save; default: all ranks of the default process group (made anew at every call).
    Raises as `checkpoint.save`; ValueError also for values that are not plain data or that differ between ranks, and
    for tensors that only some ranks have (pipeline stages: use `FmegatronWriter`, which torch plans for).
    """
    with _world(state_dict, world) as ranks:

        def prepare():
            tree, layouts, values = from_state_dict(state_dict, _device_mesh(state_dict) or world)
            if VALUES in (metadata or {}):
                raise ValueError(f"metadata: the key {VALUES!r} is taken by the state dict's values; rename it")
            return tree, layouts, {path: to_json(value, path) for path, value in values.items()}

        tree, layouts, values = together(ranks, f"saving the state dict to {open_store(path).text}", prepare)
        _check_same(ranks, values)
        checkpoint.save(path, tree, layouts, ranks, {**(metadata or {}), VALUES: values}, step=step)


def load_state_dict(
    path: str | os.PathLike | Store,
    state_dict: dict[str, Any],
    world: World | None = None,
    *,
    strict: str = "error",
    rules: Sequence[Rule] = (),
    cast: bool = False,
    verify: bool = True,
) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Fill a state dict from a checkpoint, in place: tensors keep their memory, values are replaced.

    The state dict says what is wanted, and how it lies: any mesh, any parallelism; only what this rank needs is read.
    strict, rules, cast, verify: as `checkpoint.restore`; what is not stored, and a mode lets pass, stays as it is. For
    an optimizer, `optimizer.load_state_dict(state_dict["optimizer"])` follows.

    Returns the paths of what is stored and was not asked for, and of what was asked for and is not stored. Raises
    ValueError, before anything is changed, when the request does not fit; CheckpointError for damage: then some tensors
    may have been filled already.
    """
    mode, name = strictness(strict), open_store(path).text

    def work() -> Difference:
        items = flat_items(state_dict)
        tree, layouts, values = from_state_dict(state_dict, _device_mesh(state_dict) or world)
        storage = locate(path)
        manifest = read_manifest(storage)
        known = stored_values(manifest.metadata, name)
        request = match(name, manifest, layouts, mode, rules=rules, cast=cast, has_initial=True)
        missing = tuple(p for p in known if p not in values)
        unexpected = tuple(p for p in values if p not in known)
        if problems := complaints(Difference(missing, unexpected), mode):
            raise ValueError(f"{name} does not fit the values of the state dict:\n" + "\n".join(problems[:10]))
        tensors = [tree[p] for p in request.paths]
        plain = [_is_direct(x) for x in tensors]
        # What a rule leaves as it is must be in the staged copy, too.
        into = [x if direct else x.cpu().contiguous() for x, direct in zip(tensors, plain, strict=True)]
        _, wants = destinations(request, dist.get_rank() if dist.is_initialized() else 0, into, into=into)
        by_leaf: dict[str, tuple[Leaf, list[Target]]] = {}
        for want in wants:
            by_leaf.setdefault(want.leaf.path, (want.leaf, []))[1].append(want.target)
        with Fetch(storage, manifest, verify) as fetch:
            for leaf, targets in by_leaf.values():
                fetch.add(leaf, targets)
        for x, host, direct in zip(tensors, into, plain, strict=True):
            if not direct:
                x.copy_(host)
        for p in values:
            if p in known:
                put(state_dict, items[p][0], known[p])
        found = request.difference
        return Difference(found.missing + missing, found.unexpected + unexpected)

    with _world(state_dict, world) as ranks:
        difference = together(ranks, f"loading the state dict from {name}", work)
        if ranks.rank == 0:
            warn(difference, mode, name, from_initial=True)
    return difference.missing, difference.unexpected


def _is_direct(x: torch.Tensor) -> bool:
    """Whether bytes can be read straight into its memory."""
    return x.device.type == "cpu" and x.is_contiguous() and not x.is_conj() and not x.is_neg()


def stored_values(metadata: dict[str, Any], root: str) -> dict[str, Any]:
    """The values in a checkpoint's metadata, by path. Raises CheckpointError for what is not ours."""
    values = metadata.get(VALUES, {})
    try:
        return {name: from_json(value) for name, value in values.items()}
    except (ValueError, AttributeError, TypeError) as error:
        raise CheckpointError(f"{root}: the values of the state dict cannot be read ({error})") from None


def _check_same(ranks: Ranks, values: dict[str, Any]) -> None:
    """Raise ValueError, on all ranks, when their values differ; one number per rank is exchanged."""
    text = to_json_text(values)
    row = torch.tensor([int(digest_text(text.encode()), 16) - (1 << 63)])
    digests = ranks.gather_rows(row)[:, 0].tolist()
    if other := next((r for r, d in enumerate(digests) if d != digests[0]), None):
        here, there = (json.loads(ranks.broadcast_text(text, source)) for source in (0, other))
        names = [k for k in {**here, **there} if here.get(k, ...) != there.get(k, ...)]
        raise ValueError(
            f"the state dict's values (what is no tensor) differ between ranks 0 and {other}:"
            f" {', '.join(names[:3])}; make them the same, or tensors with a layout"
        )


def _device_mesh(state_dict: dict[str, Any]) -> DeviceMesh | None:
    """The device mesh of the first DTensor: plain tensors are named replicas on it."""
    values = (value for _, value in flat_items(state_dict).values())
    return next((value.device_mesh for value in values if isinstance(value, DTensor)), None)


@contextlib.contextmanager
def _world(state_dict: dict[str, Any], world: World | None) -> Iterator[Ranks]:
    if world is not None:
        yield world
    elif not dist.is_initialized() or dist.get_world_size() == 1:
        yield Alone()
    else:
        with connect(Mesh(world=dist.get_world_size())) as made:
            yield made
