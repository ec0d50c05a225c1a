"""A model and its tokenizer from a checkpoint alone: what a run writes beside its weights, and how it is read.

loop.Settings(config, kept=model.kept(decoder, tokenizer), ...)   # what saves put into a checkpoint's metadata
decoder, params, tokenizer = model.opened("runs/shakespeare")
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple, cast

import torch

from fmegatron import checkpoint, tree
from fmegatron.checkpoint.manage import tracker
from fmegatron.collectives import World
from fmegatron.data import open_tokenizer
from fmegatron.files import disk
from fmegatron.layout import Mesh
from fmegatron.model.array_specs import layouts as layouts_of
from fmegatron.model.decoder import Decoder
from fmegatron.model.json_form import described, description
from fmegatron.model.text import Tokenizer
from fmegatron.tree import structure

_TOKENIZER = "tokenizer.json"


class Opened(NamedTuple):
    """A model as a checkpoint has it: the decoder, this rank's parameters, their layouts, the tokenizer or None."""

    decoder: Decoder
    params: dict
    layouts: dict
    tokenizer: Tokenizer | None


def kept(decoder: Decoder, tokenizer: Tokenizer | None = None) -> dict[str, Any]:
    """What `opened` needs of a checkpoint's metadata: {"model", "tokenizer"}, JSON values.

    tokenizer: one of `fmegatron.data`, with `describe()`. The file of one that has a file is not in it: save it beside
    the checkpoints, tokenizer.save("runs/mine/tokenizer.json").
    """
    return {"model": description(decoder)} | ({} if tokenizer is None else {"tokenizer": tokenizer.describe()})


def newest(path: str | os.PathLike) -> str:
    """The checkpoint that a path means: itself, or the newest of a run's folder or its "checkpoints".

    Raises ValueError for a folder that has none.
    """
    for folder in (os.fspath(path), os.path.join(path, "checkpoints")):
        if not disk.is_directory(folder):
            continue
        if (latest := tracker.read_latest(folder)) is not None:
            return os.path.join(folder, latest.path)
        if any(name.startswith("step_") for name in disk.names_in(folder)) and (
            steps := checkpoint.Manager(folder).steps()
        ):
            return checkpoint.Manager(folder).path(steps[-1])
    if disk.is_there(os.path.join(path, "config.json")):
        raise ValueError(
            f"{path}: got a folder of Hugging Face, wanted a checkpoint of fmegatron; open it with interop.hf.decoder "
            "and interop.hf.load, and give what they return to model.inference"
        )
    return os.fspath(path)


def opened(
    path: str | os.PathLike,
    mesh: Mesh | None = None,
    *,
    world: World | None = None,
    layouts: structure.Tree = None,
    tokenizer: str | os.PathLike | None = None,
    known: Sequence[type] = (),
    device: str | torch.device | None = None,
    **changes: object,
) -> Opened:
    """The model of a checkpoint whose metadata has `kept`: parameters only, at "params" of a state or at its top.

    Args:
        path: of a checkpoint, of a run's folder, or of the folder of its checkpoints (the newest is taken).
        mesh: that of the ranks; None: one rank.
        world: the ranks, for a mesh of several.
        layouts: of the parameters, those of a state that begins with them; None: of `model.layouts` on the mesh.
        tokenizer: of a file that `tokenizer.save` wrote; None: as the metadata has it, or tokenizer.json in the
            checkpoint's folder or one of the three above it.
        known: dataclasses of your own that the model has (`described`).
        device: where the parameters go.
        changes: of fields of the decoder, such as max_seq.

    Raises ValueError for a checkpoint that does not have its model, and what `checkpoint.restore` raises.
    """
    mesh, where = mesh or Mesh(), newest(path)
    metadata = checkpoint.metadata(where)
    if "model" not in metadata:
        raise ValueError(
            f"{where}: got a checkpoint without the description of its model, wanted metadata['model']; save it with "
            "loop.Settings(config, kept=model.kept(decoder, tokenizer)), or metadata=model.kept(decoder, tokenizer)"
        )
    decoder = described(metadata["model"], known)
    decoder = dataclasses.replace(decoder, **cast("Any", changes)) if changes else decoder
    of = layouts_of(decoder, mesh) if layouts is None else tree.layouts(layouts)
    prefix = "params" if "params" in checkpoint.layouts(where) else ""
    params = checkpoint.restore(where, of, world=world, prefix=prefix, strict="subset", cast=True, device=device)
    return Opened(decoder, params, of, _tokenizer(where, metadata, tokenizer))


def _tokenizer(where: str, metadata: dict[str, Any], path: str | os.PathLike | None) -> Tokenizer | None:
    wanted = metadata.get("tokenizer")
    if path is None and isinstance(wanted, dict) and "digest" not in wanted:
        return open_tokenizer.tokenizer_from(wanted)
    if path is None:
        folders = [Path(where), *Path(where).absolute().parents[:3]]
        path = next((folder / _TOKENIZER for folder in folders if disk.is_there(str(folder / _TOKENIZER))), None)
    if path is None:
        return None
    found = open_tokenizer.load_tokenizer(path)
    if isinstance(wanted, dict) and found.describe() != wanted:
        raise ValueError(
            f"{os.fspath(path)}: got the tokenizer {_short(found.describe())}, wanted that of the checkpoint "
            f"{where}, {_short(wanted)}; pass the file that was saved with the run"
        )
    return found


def _short(description: dict[str, Any]) -> str:
    return f"{description.get('kind')} {str(description.get('digest', ''))[:12]}".strip()
