"""Every stored tensor of a model by a family's table of names: the region of our array that it is, and its shape."""

from __future__ import annotations

from collections.abc import Sequence
from types import MappingProxyType
from typing import NamedTuple

from fmegatron import tree
from fmegatron.model.array_specs import arrays
from fmegatron.model.arrays import Array
from fmegatron.model.decoder import Decoder
from fmegatron.model.families.family import Family, Stored

VOCABULARY = MappingProxyType({"embed/table": 0, "head/w": 1})  # arrays that are padded with zeros, along which dim


class Piece(NamedTuple):
    """One stored tensor and the region of our leaf that it is: of layer, expert and columns, None for all.

    of: the columns of the stored tensor that it is, where other pieces are beside it, None for all. shape: what the
    stored tensor must have.
    """

    stored: str
    path: str
    layer: int | None
    expert: int | None
    columns: tuple[int, int] | None
    form: Stored
    of: tuple[int, int] | None = None
    shape: tuple[int, ...] = ()


def pieces(decoder: Decoder, family: Family) -> list[Piece]:
    """Every stored tensor of a model. Raises ValueError for an array of ours that the family has no name for."""
    whole, found = arrays(decoder), []
    for path, array in zip(tree.paths(whole), tree.leaves(whole), strict=True):
        first, _, rest = path.partition("/")
        stack = decoder.stacks.get(first)
        stored = family.names.get(path if stack is None else rest)
        if stored is None:
            raise ValueError(
                f"{path}: got no name of {family.name} for it, wanted one; the model has an array that these folders "
                "do not: add it to the family's names, or save it as a checkpoint"
            )
        for layer, depth in enumerate([None] if stack is None else stack.depths):
            of_layer = None if stack is None else layer
            experts = _experts(array, stack is not None) if "{e}" in "".join(stored.names) else [None]
            for expert in experts:
                at = 0
                for j, name in enumerate(stored.names):
                    width = array.parts[-len(stored.names) :][j] if len(stored.names) > 1 else 0
                    columns = (at, at + width) if len(stored.names) > 1 else None
                    at += width
                    text = name.format(i=depth, e=expert)
                    shape = list(array.shape[(stack is not None) + (expert is not None) :])
                    shape[-1] = width or shape[-1]
                    if path in VOCABULARY:  # ours is padded
                        shape[VOCABULARY[path]] = decoder.vocab_size
                    of = (0, shape[-1])
                    found.append(Piece(text, path, of_layer, expert, columns, stored, of, tuple(shape)))
    return [one._replace(shape=_as_stored(one.shape, one.form)) for one in _side_by_side(found)]


def _as_stored(shape: Sequence[int], form: Stored) -> tuple[int, ...]:
    """The shape of a stored tensor whose dims are in our order."""
    if form.transposed:
        shape = (*shape[:-2], shape[-1], shape[-2])
    return (shape[0], 1, *shape[1:]) if form.depthwise else tuple(shape)


def _side_by_side(found: list[Piece]) -> list[Piece]:
    """The same, with `name#k` resolved: where each piece of a stored tensor is in it; the order of the pieces."""
    beside: dict[str, dict[int, int]] = {}
    for one in found:
        name, _, k = one.stored.partition("#")
        if k and one.of is not None:
            beside.setdefault(name, {})[int(k)] = one.of[1]
    out = []
    for one in found:
        name, _, k = one.stored.partition("#")
        if not k:
            out.append(one._replace(of=None))
            continue
        at, shape = sum(beside[name][j] for j in range(int(k))), (*one.shape[:-1], sum(beside[name].values()))
        out.append(one._replace(stored=name, of=(at, at + beside[name][int(k)]), shape=shape))
    return out


def _experts(array: Array, stacked: bool) -> Sequence[int]:
    return range(array.shape[int(stacked)])
