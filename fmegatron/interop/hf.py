"""Folders of Hugging Face: a model from config.json, its weights onto any mesh, and back, by one table of names.

    decoder = hf.decoder("Qwen2.5-0.5B")                             # a Decoder, or an error that names the key
    params = hf.load("Qwen2.5-0.5B", decoder, layouts, rank=world.rank)
    hf.save("tuned", params, decoder, layouts, world, like="Qwen2.5-0.5B")   # transformers loads it
    hf.export("runs/a/step_00000100", "tuned", like="Qwen2.5-0.5B")  # the same of a checkpoint

A rank reads only what is in its shards. Nothing is executed, and no other package is needed.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import warnings
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch

from fmegatron import checkpoint, tree
from fmegatron.checkpoint import CheckpointError, Rule
from fmegatron.checkpoint.calls.arguments import ranks_of
from fmegatron.checkpoint.calls.ranks import Ranks, together
from fmegatron.checkpoint.files.commit import sync_directory
from fmegatron.checkpoint.files.look import is_there
from fmegatron.checkpoint.files.safetensors_files import FILE_BYTES, INDEX
from fmegatron.checkpoint.files.snapshot import Saved
from fmegatron.checkpoint.reading import view as views_of
from fmegatron.checkpoint.reading.mapping import Views
from fmegatron.checkpoint.reading.view import View
from fmegatron.checkpoint.tools.export import Exported, copy_others
from fmegatron.checkpoint.tools.export import export as write_export
from fmegatron.checkpoint.tools.source import open_source
from fmegatron.collectives import World
from fmegatron.interop.safetensors_headers import headers
from fmegatron.interop.safetensors_write import write_state
from fmegatron.interop.sources import source
from fmegatron.model import Array, Decoder, arrays
from fmegatron.model.families import Family, Stored, family_of
from fmegatron.tree import Tree

_FURTHEST = 8  # depths of multi-token prediction that a folder may have


# ---- names -----------------------------------------------------------------------------------------------------------
class Piece(NamedTuple):
    """One stored tensor and the region of our leaf that it is: of layer, expert and columns, None for all.

    of: the columns of the stored tensor that it is, where other pieces are beside it, None for all.
    """

    stored: str
    path: str
    layer: int | None
    expert: int | None
    columns: tuple[int, int] | None
    form: Stored
    of: tuple[int, int] | None = None


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
                    found.append(Piece(text, path, of_layer, expert, columns, stored, (0, width or array.shape[-1])))
    return _side_by_side(found)


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
        at = sum(beside[name][j] for j in range(int(k)))
        out.append(one._replace(stored=name, of=(at, at + beside[name][int(k)])))
    return out


def _experts(array: Array, stacked: bool) -> Sequence[int]:
    return range(array.shape[int(stacked)])


def from_names(decoder: Decoder, family: Family) -> Rule:
    """The rule of a restore from Hugging Face's names to ours; the vocabulary is padded with zeros."""
    behind = "(?:" + "|".join(str(decoder.layers + n) for n in range(_FURTHEST)) + ")"
    unused = tuple(pattern.replace("{behind}", behind) for pattern in family.unused)
    return Rule(_from_names, (tuple(pieces(decoder, family)), unused, decoder.tied))


def to_names(decoder: Decoder, family: Family) -> Rule:
    """The inverse: of a restore of one of our checkpoints under Hugging Face's names."""
    return Rule(_to_names, (tuple(_written(decoder, family)), decoder.vocab_size))


def _written(decoder: Decoder, family: Family) -> list[Piece]:
    """`pieces`, and what is stored again under other names."""
    found = pieces(decoder, family)
    whole = {one.path: one for one in found}
    depths = decoder.stacks["mtp"].depths if decoder.mtp is not None else ()
    again = [(name.format(i=depth), path) for depth in depths for name, path in family.repeated.items()]
    return [*found, *(whole[path]._replace(stored=name) for name, path in again if path in whole)]


def _from_names(views: Views, wanted: Sequence[Piece], unused: Sequence[str], tied: bool) -> Views:
    out: Views = {}
    left = dict(views)
    tree_of: dict[str, dict[int | None, dict[int | None, list[View]]]] = {}
    for one in wanted:
        if one.stored not in views:
            near = tree.did_you_mean(one.stored, sorted(left))
            raise ValueError(
                f"{one.path}: got no tensor {one.stored!r}, wanted it{near}; is config.json of this folder?"
            )
        view = views[one.stored]
        left.pop(one.stored, None)
        if one.form.depthwise:
            view = views_of.removed(view, 1)
        if one.form.transposed:
            view = _transposed(view)
        if one.of is not None:
            view = views_of.cut(view, len(view.shape) - 1, *one.of)
        tree_of.setdefault(one.path, {}).setdefault(one.layer, {}).setdefault(one.expert, []).append(view)
    for path, layers in tree_of.items():
        out[path] = _joined([_joined([_columns(cols) for cols in e.values()], None in e) for e in layers.values()],
                            None in layers)  # fmt: skip
    for path in ("embed/table", "head/w"):
        if path in out:
            dim = 0 if path == "embed/table" else 1
            out[path] = replace(out[path], fits=((dim, "pad"),))
    ignored = [*unused, *([r"lm_head\.weight"] if tied else [])]
    return {**out, **{name: v for name, v in left.items() if not any(re.fullmatch(p, name) for p in ignored)}}


def _transposed(view: View) -> View:
    *first, rows, columns = range(len(view.shape))
    return views_of.transposed(view, (*first, columns, rows))


def _columns(views: list[View]) -> View:
    return views[0] if len(views) == 1 else views_of.joined(views, len(views[0].shape) - 1)


def _joined(views: list[View], alone: bool) -> View:
    """Views side by side in a new first dim, unless there is one only that has none."""
    return views[0] if alone else views_of.joined([views_of.inserted(view, 0) for view in views], 0)


def _to_names(views: Views, wanted: Sequence[Piece], vocab_size: int) -> Views:
    found: dict[str, dict[int, View]] = {}
    forms = {one.stored: one.form for one in wanted}
    for one in wanted:
        view = views[one.path]
        for index in (one.layer, one.expert):
            if index is not None:
                view = views_of.removed(views_of.cut(view, 0, index, index + 1), 0)
        if one.columns is not None:
            view = views_of.cut(view, len(view.shape) - 1, *one.columns)
        if one.path in ("embed/table", "head/w"):
            view = views_of.cut(view, 0 if one.path == "embed/table" else 1, 0, vocab_size)
        found.setdefault(one.stored, {})[0 if one.of is None else one.of[0]] = view
    out: Views = {}
    for name, beside in found.items():
        view = _columns([beside[at] for at in sorted(beside)])
        if forms[name].transposed:
            view = _transposed(view)
        out[name] = views_of.inserted(view, 1) if forms[name].depthwise else view
    return out


# ---- folders ---------------------------------------------------------------------------------------------------------
def config_of(folder: str | os.PathLike) -> dict[str, Any]:
    """The configuration of a folder. Raises CheckpointError where there is none."""
    path = os.path.join(folder, "config.json")
    try:
        with open(path, encoding="utf-8") as text:
            return json.load(text, object_hook=_float_of)
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path}: cannot be read: {error}; give a folder of Hugging Face") from None


def _float_of(value: dict) -> Any:
    """How transformers stores floats that JSON lacks: {"__float__": "Infinity"}."""
    return float(value["__float__"]) if set(value) == {"__float__"} else value


def decoder(folder: str | os.PathLike, family: Family | None = None, **changes: Any) -> Decoder:
    """The model of a folder; changes: fields of `Decoder`, such as compute_dtype, max_seq or sequence_parallel.

    family: one of your own; None: that of `model_type`.

    Raises ValueError, naming the key, for a configuration that is not understood; CheckpointError where there is none.
    Warns where the configuration has multi-token prediction whose weights the folder lacks (transformers writes none):
    then the model has none either.
    """
    config = config_of(folder)
    family = family or family_of(config)
    found = family.decoder(config, **changes)
    if found.mtp is None:
        return found
    stored = {one.stored for one in pieces(found, family) if one.path.startswith("mtp/")}
    if is_there(os.path.join(folder, "model.safetensors")) or is_there(os.path.join(folder, INDEX)):
        if not stored & set(headers(folder).places):
            warnings.warn(
                f"{os.fspath(folder)}: got no weights of multi-token prediction, wanted those of "
                f"{found.mtp.depths} depths, as config.json says; the model goes on without it (mtp=None says so)",
                stacklevel=2,
            )
            return replace(found, mtp=None)
    return found


def load(
    folder: str | os.PathLike,
    decoder: Decoder,
    layouts: Tree,
    *,
    world: Ranks | None = None,
    rank: int | None = None,
    read: str = "own",
    cast: bool = True,
    device: str | torch.device | None = None,
    family: Family | None = None,
) -> Tree:
    """This rank's shards of a folder's weights; it reads only what is in them.

    Args:
        folder: with config.json and safetensors files.
        decoder: the model (`decoder`).
        layouts: of its parameters on any mesh.
        world: the ranks that load together, as `checkpoint.restore`; or
        rank: whose shards.
        read: "own", or "once": replicas read a part each, and exchange the parts.
        cast: convert to the dtype of the layouts where another is stored.
        device: where they go.
        family: one of your own; None: that of `model_type`.

    Raises:
        CheckpointError: files that are missing or not complete.
        ValueError: names, shapes or dtypes that do not fit, each named.
    """
    family = family or family_of(config_of(folder))
    rules = [from_names(decoder, family)]
    options = {"world": world, "rank": rank, "read": read, "cast": cast, "device": device}
    return checkpoint.restore(source(folder), layouts, rules=rules, **options)


def save(
    folder: str | os.PathLike,
    params: Tree,
    decoder: Decoder,
    layouts: Tree,
    world: World | None = None,
    *,
    like: str | os.PathLike,
    family: Family | None = None,
    shard: int = FILE_BYTES,
) -> None:
    """Write the parameters as a folder that transformers loads; all ranks call it, and return when it is there.

    Every rank writes what it holds into files of at most `shard` bytes, through a few MiB; nothing is gathered. Tied
    heads are not stored twice.

    Args:
        folder: new.
        params: this rank's shards.
        decoder: the model.
        layouts: of its parameters.
        world: the ranks that hold them; None: one process.
        like: the folder that the model came from; its files besides the weights are copied.
        family: one of your own; None: that of `model_type`.
        shard: most bytes of elements in a file, unless it is one tensor.

    Raises ValueError where the folder exists, or the model has arrays that the family has no name for; OSError.
    """
    path, family, ranks = os.path.abspath(folder), family or family_of(config_of(like)), ranks_of(world)
    draft, rules = path + ".draft", [to_names(decoder, family)]
    tensors, wanted = (dict(zip(tree.paths(t), tree.leaves(t), strict=True)) for t in (params, layouts))
    order = list(dict.fromkeys(one.stored for one in _written(decoder, family)))

    def begin() -> None:
        if is_there(path):
            raise ValueError(f"{path}: got a path that exists already, wanted a new one; choose another, or remove it")
        tree.check(params, layouts, ranks.rank)
        if ranks.rank == 0:
            shutil.rmtree(draft, ignore_errors=True)
            os.makedirs(draft)

    def finish() -> None:
        if ranks.rank == 0:
            copy_others(like, draft, {layout.dtype for layout in wanted.values()})
            sync_directory(draft)
            os.rename(draft, path)
            sync_directory(os.path.dirname(path))

    try:
        together(ranks, f"writing {path}", begin)
        write_state(draft, tensors, wanted, ranks, rules=rules, order=order, shard=shard)
        together(ranks, f"writing {path}", finish)
    finally:
        if ranks.rank == 0:
            shutil.rmtree(draft, ignore_errors=True)


def export(
    checkpoint: Saved,
    folder: str | os.PathLike,
    *,
    like: str | os.PathLike,
    prefix: str | None = None,
    cast: torch.dtype | None = None,
    family: Family | None = None,
    shard: int = FILE_BYTES,
) -> Exported:
    """Write the parameters of a checkpoint as a folder that transformers loads, in bounded memory.

    Args:
        checkpoint: any that a restore takes.
        folder: new.
        like: the folder that the model came from; its configuration states the model, its other files are copied.
        prefix: where the parameters are in it; None: at "params" where there is such a subtree, else at the top.
        cast: floating tensors to this dtype.
        family: one of your own; None: that of `model_type`.
        shard: most bytes of elements in a file, unless it is one tensor.

    Raises as `checkpoint export`; ValueError for a checkpoint of another model.
    """
    family, of, opened = family or family_of(config_of(like)), decoder(like, family), open_source(checkpoint)
    if prefix is None:
        prefix = "params" if any(path.startswith("params/") for path in opened.manifest.leaves) else ""
    options = {"prefix": prefix, "cast": cast, "like": like, "shard": shard}
    return write_export(opened, os.fspath(folder), rules=[to_names(of, family)], **options)
