"""Folders of Hugging Face: a model from config.json, its weights onto any mesh, and back, by one table of names.

    decoder = hf.decoder("Qwen2.5-0.5B")                             # a Decoder, or an error that names the key
    params = hf.load("Qwen2.5-0.5B", decoder, layouts, rank=world.rank)
    hf.save("tuned", params, decoder, layouts, world, like="Qwen2.5-0.5B")   # transformers loads it
    hf.export("runs/a/step_00000100", "tuned", like="Qwen2.5-0.5B")  # the same of a checkpoint

A rank reads only what is in its shards. Nothing is executed, and no other package is needed.
"""

from __future__ import annotations

import difflib
import json
import math
import os
import re
import shutil
import warnings
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, BinaryIO

import torch

from fmegatron import checkpoint, tree
from fmegatron.checkpoint import CheckpointError, Foreign, Source, open_snapshot
from fmegatron.checkpoint.calls.ranks import together
from fmegatron.checkpoint.reading import mapping
from fmegatron.checkpoint.reading import view as views_of
from fmegatron.collectives import World
from fmegatron.files import disk, whole
from fmegatron.interop.safetensors_export import Exported, copy_others, export_safetensors
from fmegatron.interop.safetensors_files import FILE_BYTES, INDEX
from fmegatron.interop.safetensors_headers import Place, headers
from fmegatron.interop.safetensors_write import write_state
from fmegatron.interop.sources import source
from fmegatron.layout import Layout
from fmegatron.model import Decoder
from fmegatron.model.families import registry, token_pieces
from fmegatron.model.families.family import Family
from fmegatron.tree import structure

_Views = dict[str, views_of.View]
_HEAD = "lm_head.weight"
_COMPARED = 1 << 18  # elements of two arrays at a time
_FURTHEST = 8  # depths of multi-token prediction that a folder may have
_LONGEST, _LIKELY, _ALIKE = 300, 64, 0.75  # characters of a name, names that are compared, least ratio of a hint


# ---- names -----------------------------------------------------------------------------------------------------------
@dataclass(frozen=True)
class _FromNames(mapping.Rule):
    """A rule that errors name by the folder, since its table of names would bury them."""

    text: str

    def __repr__(self) -> str:
        return self.text


def from_names(decoder: Decoder, family: Family, folder: str | os.PathLike | None = None) -> mapping.Rule:
    """The rule of a restore from Hugging Face's names to ours; the vocabulary is padded with zeros to our size.

    folder: what is restored, for messages. A tensor that is missing or has another shape than the model's is an error.
    """
    behind = "(?:" + "|".join(str(decoder.layers + n) for n in range(_FURTHEST)) + ")"
    unused = tuple(pattern.replace("{behind}", behind) for pattern in family.unused)
    text = f"names of {family.name}" if folder is None else os.fspath(folder)
    return _FromNames(_from_names, (tuple(token_pieces.pieces(decoder, family)), unused, decoder.tied), text)


def to_names(decoder: Decoder, family: Family) -> mapping.Rule:
    """The inverse: of a restore of one of our checkpoints under Hugging Face's names."""
    return mapping.Rule(_to_names, (tuple(_written(decoder, family)), decoder.vocab_size))


def _written(decoder: Decoder, family: Family) -> list[token_pieces.Piece]:
    """`pieces`, and what is stored again under other names."""
    found = token_pieces.pieces(decoder, family)
    whole = {one.path: one for one in found}
    depths = decoder.stacks["mtp"].depths if decoder.mtp is not None else ()
    again = [(name.format(i=depth), path) for depth in depths for name, path in family.repeated.items()]
    return [*found, *(whole[path]._replace(stored=name) for name, path in again if path in whole)]


def _from_names(views: _Views, wanted: Sequence[token_pieces.Piece], unused: Sequence[str], tied: bool) -> _Views:
    out: _Views = {}
    names = {one.stored for one in wanted}
    ignored = [*unused, *([re.escape(_HEAD)] if tied else [])]
    left = {name: view for name, view in views.items() if name not in names}
    left = {name: view for name, view in left.items() if not any(re.fullmatch(p, name) for p in ignored)}
    tree_of: dict[str, dict[int | None, dict[int | None, list[views_of.View]]]] = {}
    for one in wanted:
        if tied and one.path == "embed/table" and one.stored not in views and _HEAD in views:
            one = one._replace(stored=_HEAD)  # noqa: PLW2901  one array under either name, as transformers has it
        if one.stored not in views:
            raise ValueError(
                f"got no tensor {one.stored!r}, wanted it for {one.path}{_nearest(one.stored, left)}; "
                "is config.json of this folder?"
            )
        _check_shape(one, views[one.stored].shape)
        view = views[one.stored]
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
    for path, dim in token_pieces.VOCABULARY.items():
        if path in out:
            out[path] = replace(out[path], fits=((dim, "pad"),))
    return {**out, **left}


def _check_shape(one: token_pieces.Piece, got: tuple[int, ...]) -> None:
    """Raises ValueError, naming the tensor, where a stored shape is not the model's."""
    if got == one.shape:
        return
    where = f"tensor {one.stored}"
    if one.path in token_pieces.VOCABULARY and len(got) == len(one.shape) and got[1:] == one.shape[1:]:
        raise ValueError(
            f"{where}: got {got[0]} rows, wanted vocab_size={one.shape[0]} of them; if the tensor is right, set "
            f"vocab_size={got[0]} in config.json (rows are padded to the model's size by themselves)"
        )
    raise ValueError(
        f"{where}: got shape {got}, wanted {one.shape} for {one.path}; correct the sizes in config.json, or store the "
        "tensor anew: the two are of different models"
    )


def _nearest(name: str, candidates: Iterable[str]) -> str:
    """' (did you mean ...?)' with stored names that nothing else is read from: of the same numbers and ending first."""

    parts = name.split(".")
    digits = [part for part in parts if part.isdigit()]

    def ending(other: str) -> tuple[bool, int]:
        theirs = other.split(".")
        most = min(len(parts), len(theirs))
        same = next((k for k in range(most) if parts[-1 - k] != theirs[-1 - k]), most)
        return digits == [part for part in theirs if part.isdigit()], same

    likely = sorted((other for other in candidates if len(other) < _LONGEST), key=ending, reverse=True)[:_LIKELY]
    ranked = [(*ending(other), difflib.SequenceMatcher(None, name, other).ratio(), other) for other in likely]
    near = [row for row in sorted(ranked, reverse=True) if row[1] > 1 or row[2] > _ALIKE]
    near = [row for row in near if row[:2] == near[0][:2]]  # of a worse kind than the best: no help
    return f" (did you mean {' or '.join(row[3] for row in near[:2])}?)" if near else ""


def _transposed(view: views_of.View) -> views_of.View:
    *first, rows, columns = range(len(view.shape))
    return views_of.transposed(view, (*first, columns, rows))


def _columns(views: list[views_of.View]) -> views_of.View:
    return views[0] if len(views) == 1 else views_of.joined(views, len(views[0].shape) - 1)


def _joined(views: list[views_of.View], alone: bool) -> views_of.View:
    """Views side by side in a new first dim, unless there is one only that has none."""
    return views[0] if alone else views_of.joined([views_of.inserted(view, 0) for view in views], 0)


def _to_names(views: _Views, wanted: Sequence[token_pieces.Piece], vocab_size: int) -> _Views:
    found: dict[str, dict[int, views_of.View]] = {}
    forms = {one.stored: one.form for one in wanted}
    for one in wanted:
        view = views[one.path]
        for index in (one.layer, one.expert):
            if index is not None:
                view = views_of.removed(views_of.cut(view, 0, index, index + 1), 0)
        if one.columns is not None:
            view = views_of.cut(view, len(view.shape) - 1, *one.columns)
        if one.path in token_pieces.VOCABULARY:
            view = views_of.cut(view, token_pieces.VOCABULARY[one.path], 0, vocab_size)
        found.setdefault(one.stored, {})[0 if one.of is None else one.of[0]] = view
    out: _Views = {}
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
    then the model has none either; and where it ties the head to the embedding, and another head is stored: then the
    model has that one, as transformers'.
    """
    config = config_of(folder)
    family = family or registry.family_of(config)
    found = family.decoder(config, **changes)
    if found.tied and "tied" not in changes and _has_other_head(folder, found, family):
        text = f"{os.fspath(folder)}: got tie_word_embeddings, and another {_HEAD} than the embedding"
        warnings.warn(f"{text}: the stored one is the head, as transformers has it (tied=True ties it)", stacklevel=2)
        found = replace(found, tied=False)
    if found.mtp is None:
        return found
    stored = {one.stored for one in token_pieces.pieces(found, family) if one.path.startswith("mtp/")}
    if disk.is_there(os.path.join(folder, "model.safetensors")) or disk.is_there(os.path.join(folder, INDEX)):
        if not stored & set(headers(folder).places):
            warnings.warn(
                f"{os.fspath(folder)}: got no weights of multi-token prediction, wanted those of "
                f"{found.mtp.depths} depths, as config.json says; the model goes on without it (mtp=None says so)",
                stacklevel=2,
            )
            return replace(found, mtp=None)
    return found


def _has_other_head(
    folder: str | os.PathLike, decoder: Decoder, family: Family, share: tuple[int, int] = (0, 1)
) -> bool:
    """Whether a folder stores a head with other numbers than its embedding, whatever the dtypes of the two.

    share: (rank, ranks) that compare a part each.
    """
    if not any(disk.is_there(os.path.join(folder, name)) for name in ("model.safetensors", INDEX)):
        return False
    places = headers(folder).places
    name = next(one.stored for one in token_pieces.pieces(decoder, family) if one.path == "embed/table")
    head, table = places.get(_HEAD), places.get(name)
    if head is None or table is None:
        return False
    if head.shape != table.shape or not (head.dtype == table.dtype or _is_wide(head.dtype) and _is_wide(table.dtype)):
        return True
    size, (rank, ranks) = math.prod(head.shape), share
    with open(head.file, "rb") as one, open(table.file, "rb") as other:
        for start in range(rank * _COMPARED, size, ranks * _COMPARED):
            count = min(_COMPARED, size - start)
            a, b = (_elements(file, of, start, count) for file, of in ((one, head), (other, table)))
            if a != b if head.dtype == table.dtype else not _equal(a, b, head.dtype, table.dtype):
                return True
    return False


def _is_wide(dtype: torch.dtype) -> bool:
    """Whether elements are numbers by themselves, without a scale."""
    return dtype.is_floating_point and dtype.itemsize > 1


def _elements(file: BinaryIO, of: Place, start: int, count: int) -> bytes:
    file.seek(of.start + start * of.dtype.itemsize)
    return file.read(count * of.dtype.itemsize)


def _equal(a: bytes, b: bytes, one: torch.dtype, other: torch.dtype) -> bool:
    """Whether two rows of elements are the same numbers."""
    x, y = (torch.frombuffer(bytearray(data), dtype=dtype).double() for data, dtype in ((a, one), (b, other)))
    return torch.equal(x, y)


def load(
    folder: str | os.PathLike,
    decoder: Decoder,
    layouts: structure.Tree,
    *,
    world: World | None = None,
    rank: int | None = None,
    read: str = "own",
    device: str | torch.device | None = None,
    family: Family | None = None,
) -> structure.Tree:
    """This rank's shards of a folder's weights, in the dtypes of the layouts; it reads only what is in them.

    Args:
        folder: with config.json and safetensors files.
        decoder: the model (`decoder`).
        layouts: of its parameters on any mesh.
        world: the ranks that load together, as `checkpoint.restore`; or
        rank: whose shards.
        read: "own", or "once": replicas read a part each, and exchange the parts.
        device: where they go.
        family: one of your own; None: that of `model_type`.

    Raises:
        CheckpointError: files that are missing or not complete.
        ValueError: names, shapes or dtypes that do not fit, and quantized weights, each named.
    """
    family = family or registry.family_of(config_of(folder))
    rule, found = from_names(decoder, family, folder), source(folder)
    options = {"world": world, "rank": rank, "read": read, "device": device}
    if isinstance(found, Foreign):  # looked at when it is opened, which is an error of all ranks
        pairs = zip(tree.paths(layouts), tree.leaves(layouts), strict=True)
        dtypes = {path: layout.dtype for path, layout in pairs if isinstance(layout, Layout)}
        wanted = {one.stored: dtypes[one.path] for one in rule.arguments[0] if one.path in dtypes}
        if decoder.tied and "embed/table" in dtypes:  # where it is stored under the head's name
            wanted[_HEAD] = dtypes["embed/table"]
        share = (0, 1) if world is None else (world.rank, world.size)

        def look() -> Source:
            if decoder.tied and _has_other_head(folder, decoder, family, share):
                raise ValueError(
                    f"{os.fspath(folder)}: got a tied decoder, and a stored {_HEAD} that is not the embedding, wanted "
                    "that head or none: it would be left out; open the decoder with hf.decoder(folder), or take the "
                    "tensor out"
                )
            return _not_quantized(source_of, wanted)

        source_of, found = found, Foreign(found.text, look)
    return checkpoint.restore(found, layouts, rules=[rule], cast=True, **options)


def _not_quantized(found: Foreign, wanted: Mapping[str, torch.dtype]) -> Source:
    """The folder, opened. Raises ValueError, naming the tensor, where numbers without their scales would be cast.

    wanted: the dtype of each stored tensor that is read.
    """
    opened = found.look()
    for name, dtype in wanted.items():
        leaf = opened.leaves.get(name)
        if leaf is None or not dtype.is_floating_point or (got := leaf.torch_dtype) == dtype:
            continue
        if got.itemsize == 1 or not got.is_floating_point:
            raise ValueError(
                f"{found.text}: tensor {name}: got dtype {leaf.dtype}, wanted float32, bfloat16 or float16: it is "
                "quantized, and a cast would leave its scales out; dequantize the folder, or give one that is not "
                "quantized"
            )
    return opened


def save(
    folder: str | os.PathLike,
    params: structure.Tree,
    decoder: Decoder,
    layouts: structure.Tree,
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
        like: the folder that the model came from; of its files are copied those that describe the model, its tokenizer
            and its licence (`safetensors_export.copy_others`). config.json then has whether the head is tied.
        family: one of your own; None: that of `model_type`.
        shard: most bytes of elements in a file, unless it is one tensor.

    Raises ValueError where the folder exists, the model has arrays that the family has no name for, or `like` is of
    another model; OSError.
    """
    path, ranks = os.path.abspath(folder), world or World.alone("cpu")
    family = family or registry.family_of(config_of(like))
    draft, rule = path + ".draft", to_names(decoder, family)
    tensors, wanted = (dict(zip(tree.paths(t), tree.leaves(t), strict=True)) for t in (params, layouts))
    order = list(dict.fromkeys(one.stored for one in _written(decoder, family)))

    def begin() -> None:
        if disk.is_there(path):
            raise ValueError(f"{path}: got a path that exists already, wanted a new one; choose another, or remove it")
        _require_model(like, decoder, family)
        tree.check(params, layouts, ranks.rank)
        if ranks.rank == 0:
            shutil.rmtree(draft, ignore_errors=True)
            os.makedirs(draft)

    def finish() -> None:
        if ranks.rank == 0:
            copy_others(like, draft, {layout.dtype for layout in wanted.values()})
            _state_tied(draft, decoder, family)
            whole.sync_directory(draft)
            whole.take_name(draft, path)

    try:
        together(ranks, f"writing {path}", begin)
        write_state(draft, tensors, wanted, ranks, rule=rule, order=order, shard=shard)
        together(ranks, f"writing {path}", finish)
    finally:
        if ranks.rank == 0:
            shutil.rmtree(draft, ignore_errors=True)


def _require_model(like: str | os.PathLike, decoder: Decoder, family: Family) -> None:
    """Raises ValueError, naming the tensor, where the configuration that is copied is of another model than what is
    written. Whether the head is tied is set there (`_state_tied`); multi-token prediction may be left out."""
    stated = replace(family.decoder(config_of(like)), tied=decoder.tied)
    ours, theirs = ({one.stored: one.shape for one in _written(of, family)} for of in (decoder, stated))
    own = {one.stored for one in _written(replace(stated, mtp=None), family)}
    for name in [*ours, *(name for name in own if name not in ours)]:
        if (got := ours.get(name)) != (wanted := theirs.get(name)):
            raise ValueError(
                f"{os.fspath(like)}: tensor {name}: got {_or_none(got)} of the model that is written, wanted "
                f"{_or_none(wanted)}, as config.json there states, which is copied; give like= a folder of this model"
            )


def _or_none(shape: tuple[int, ...] | None) -> str:
    return "none" if shape is None else f"shape {shape}"


def _state_tied(folder: str, decoder: Decoder, family: Family) -> None:
    """Let the configuration of a folder that is written state whether its head is tied: where it does not, transformers
    draws a head that is not stored, and before 5.0 dropped one that is."""
    if family.decoder(config_of(folder)).tied != decoder.tied:
        path = os.path.join(folder, "config.json")
        found = json.loads(disk.text_of(path)) | {"tie_word_embeddings": decoder.tied}
        whole.write_whole(path, f"{json.dumps(found, indent=2)}\n".encode())


def export(
    checkpoint: str | os.PathLike | Source | Foreign,
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
        like: the folder that the model came from; its configuration states the model, and it is copied with the
            tokenizer and the licence.
        prefix: where the parameters are in it; None: at "params" where there is such a subtree, else at the top.
        cast: floating tensors to this dtype.
        family: one of your own; None: that of `model_type`.
        shard: most bytes of elements in a file, unless it is one tensor.

    Raises as `checkpoint export`; ValueError for a checkpoint of another model.
    """
    family, of = family or registry.family_of(config_of(like)), decoder(like, family)
    with open_snapshot(checkpoint) as opened:
        if prefix is None:
            prefix = "params" if any(path.startswith("params/") for path in opened.leaves) else ""
        top = f"{prefix}/" if prefix else ""
        of = replace(of, tied=f"{top}head/w" not in opened.leaves)  # of the checkpoint, whatever the folder has
        options = {"prefix": prefix, "cast": cast, "like": like, "shard": shard}
        options["finish"] = partial(_state_tied, decoder=of, family=family)
        return export_safetensors(opened, os.fspath(folder), rules=[to_names(of, family)], **options)
