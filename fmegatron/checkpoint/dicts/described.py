"""A state without layouts as what a save writes: flat tensors and layouts, the rest as metadata."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch.distributed as dist

from fmegatron import tree
from fmegatron.checkpoint.calls.ranks import Ranks
from fmegatron.checkpoint.dicts.arrays import as_tensor, layout_of
from fmegatron.checkpoint.dicts.flat import flatten
from fmegatron.checkpoint.dicts.values import CONTAINERS, VALUES, from_json, with_state
from fmegatron.checkpoint.files.format import CheckpointError


def described(
    state: Any, layouts: Any, world: Ranks | None, metadata: dict[str, Any] | None
) -> tuple[Any, Any, dict[str, Any] | None]:
    """(state, layouts, metadata) as they are; for layouts None on several ranks those that the arrays know, and on one
    those of a process that holds the full state.

    world: as the user passed it.  Raises ValueError on several ranks, naming the array whose layout is not known, and
    for what a checkpoint cannot hold.
    """
    if layouts is not None:
        return state, layouts, metadata
    size = world.size if world is not None else dist.get_world_size() if dist.is_initialized() else 1
    if size > 1 and any(tree.layout_of(leaf) is not None for leaf in tree.leaves(state)):
        return state, tree.layouts(state), metadata
    if size > 1:
        alone = "" if world is not None else ", or world=World.alone('cpu') to save what this process holds"
        raise ValueError(
            f"layouts: got None on one of {size} ranks, wanted a Layout for each tensor; pass layouts and world, place"
            f" the arrays (tree.place), or use interop.save_state_dict for DTensors and replicas{alone}"
        )
    flat = flatten(state)
    tensors = {path: as_tensor(x, path, to_read=True) for path, x in flat.arrays.items()}
    return tensors, {p: layout_of(x, p) for p, x in tensors.items()}, with_state(metadata, flat.values, flat.containers)


def stored_values(metadata: Mapping[str, Any], root: str) -> dict[str, Any]:
    """The values in a checkpoint's metadata, by path. Raises CheckpointError for what is not ours."""
    values = metadata.get(VALUES, {})
    try:
        return {name: from_json(value) for name, value in values.items()}
    except (ValueError, AttributeError, TypeError) as error:
        raise CheckpointError(f"{root}: the values of the state dict cannot be read ({error})") from None


def stored_containers(metadata: Mapping[str, Any]) -> dict[str, Any]:
    """The containers in a checkpoint's metadata, by path; none for a state that was saved with layouts."""
    found = metadata.get(CONTAINERS)
    return found if isinstance(found, dict) and isinstance(metadata.get(VALUES), dict) else {}
