"""export: the elements of a checkpoint as safetensors files, in bounded memory."""

from __future__ import annotations

import fnmatch
import json
import os
import re
import secrets
import shutil
import warnings
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from functools import lru_cache

import torch

from fmegatron.checkpoint import Source
from fmegatron.checkpoint.files import stores
from fmegatron.checkpoint.reading import mapping
from fmegatron.checkpoint.tools import streamed
from fmegatron.files import disk, whole
from fmegatron.interop.safetensors_files import DTYPES, ENDING, FILE_BYTES, Entry, grouped, write

_PORTION_BYTES = 64 << 20
# Files of Hugging Face that stay true with other weights: the model, its tokenizer, its licence, code of its own.
_COPIED = frozenset(
    """config.json generation_config.json tokenizer.json tokenizer_config.json special_tokens_map.json added_tokens.json
    vocab.json vocab.txt merges.txt tokenizer.model spiece.model sentencepiece.bpe.model tekken.json chat_template.jinja
    chat_template.json preprocessor_config.json processor_config.json
    video_preprocessor_config.json README.md""".split()
)
_COPIED_PATTERNS = ("LICENSE*", "LICENCE*", "NOTICE*", "USE_POLICY*", "*.py", "*.tiktoken", "*.pattern", "*.jinja")
# Endings of weights, whatever writes them: not copied, and not worth a word.
_WEIGHTS = (
    ".safetensors", ".safetensors.index.json", ".bin", ".bin.index.json", ".pth", ".pt", ".ckpt", ".h5", ".msgpack",
    ".msgpack.index.json", ".h5.index.json", ".gguf", ".ggml", ".onnx", ".onnx_data", ".ot", ".npz", ".npy", ".tflite",
    ".mlmodel", ".engine", ".nemo", ".pkl",
)  # fmt: skip
_OTHERS = (".npz", ".pt", ".pth", ".bin")  # names of files that are no safetensors


@dataclass(frozen=True)
class Exported:
    """The files that were written, their tensors, and the bytes of elements."""

    files: tuple[str, ...]
    tensors: int
    nbytes: int


def export_safetensors(
    source: Source,
    path: str,
    pattern: str | None = None,
    *,
    renames: Sequence[tuple[re.Pattern, str]] = (),
    cast: torch.dtype | None = None,
    shard: int = FILE_BYTES,
    most: int = _PORTION_BYTES,
    rules: Sequence[mapping.Rule] = (),
    prefix: str = "",
    like: str | os.PathLike | None = None,
    finish: Callable[[str], None] | None = None,
) -> Exported:
    """Write the leaves of a checkpoint as safetensors, with its step and metadata; verified while they are read.

    Memory is bounded, whatever the rules do: each tensor is written in blocks of rows, for which what they are made
    of is read.

    Args:
        source: the checkpoint.
        path: a file (its name ends in .safetensors); or a directory of files of at most `shard` bytes (or one tensor),
            with `model.safetensors.index.json`, which maps each tensor to its file.
        pattern: regular expression; only leaves whose path has a match. None: all.
        renames: regular expressions on the paths, applied one after another.
        cast: floating leaves to this dtype; all others keep their bits.
        shard: bytes.
        most: bytes that are held in memory at a time.
        rules: what becomes of names and shapes before that, as in a restore: `unstack`, `split`, `transpose`,
            `take(..., range(n))` for the rows without padding.
        prefix: the stored subtree that is meant.
        like: a folder whose files besides weights (config.json, tokenizers) are copied; for a directory.
        finish: is given the directory before it has its name, with all files in it.

    Raises ValueError when `path` exists, is inside a checkpoint or names another format, two leaves get one name,
    safetensors has no such dtype, or `cast` is none that floating leaves can have; CheckpointError for damage; OSError.
    Then nothing is left.
    """
    path = os.path.abspath(path)
    if disk.is_there(path):
        raise ValueError(f"{path}: got a path that exists already, wanted a new one; choose another name, or remove it")
    if path.endswith(_OTHERS):
        raise ValueError(f"{path}: got another format by its name, wanted a name with {ENDING}, or of a directory")
    if (around := stores.open_store(path).around()) is not None:
        raise ValueError(
            f"{path}: got a path inside the checkpoint {around.text}, wanted one outside; choose one beside it"
        )
    single = path.endswith(ENDING)
    if single and like is not None:
        raise ValueError(f"{path}: got a file and like=, wanted a directory for the files beside it; give one")
    tensors = streamed.tensors(source, rules, prefix, pattern)
    entries = _entries(tensors, renames, cast)
    shards = [tensors] if single else grouped(tensors, lambda one: entries[one.path].nbytes, shard)
    metadata = {
        "format": "pt",
        "fmegatron.step": json.dumps(source.step),
        "fmegatron.metadata": json.dumps(dict(source.metadata)),
    }
    parent = os.path.dirname(path)
    os.makedirs(parent, exist_ok=True)
    draft = os.path.join(parent, f".{os.path.basename(path)}.tmp-{secrets.token_hex(6)}")  # as of a save: `gc` knows it
    os.mkdir(draft)
    try:
        groups = [[entries[one.path] for one in part] for part in shards]
        dtypes = {path: entry.dtype for path, entry in entries.items()}
        contents = (streamed.elements(part, dtypes, most) for part in shards)
        names = write(draft, groups, contents, metadata, index=not single)
        if like is not None:
            copy_others(like, draft, {entry.dtype for entry in entries.values()})
        if finish is not None:
            finish(draft)
        whole.sync_directory(draft)
        whole.take_name(os.path.join(draft, names[0]) if single else draft, path)
    finally:
        shutil.rmtree(draft, ignore_errors=True)
    files = (path,) if single else tuple(os.path.join(path, file) for file in names)
    return Exported(files, len(tensors), sum(entry.nbytes for entry in entries.values()))


def copy_others(like: str | os.PathLike, folder: str, dtypes: Collection[torch.dtype] = ()) -> None:
    """Copy the files of a folder of Hugging Face that stay true with other weights. Raises OSError.

    Weights of every format stay where they are, and so does what is not known here, with a warning that names it.
    dtypes: of the weights that are written: where the floating ones are one, config.json states it, as transformers
    loads weights in the dtype that it finds there.
    """
    left = []
    for name in disk.names_in(os.fspath(like)):
        at, is_weights = os.path.join(like, name), name.lower().endswith(_WEIGHTS)
        if not disk.is_file(at):
            left += [f"{name}/"] * (disk.is_directory(at) and not name.startswith("."))
        elif not is_weights and (name in _COPIED or any(fnmatch.fnmatchcase(name, one) for one in _COPIED_PATTERNS)):
            shutil.copy(at, os.path.join(folder, name))
        elif not is_weights and not name.startswith("."):
            left.append(name)
    if left:
        text = f"{os.fspath(like)}: not copied, as it may be of the old weights: {', '.join(left[:20])}"
        warnings.warn(f"{text}{' and more' * (len(left) > 20)}; copy by hand what is not", stacklevel=3)
    floating = {_text(dtype) for dtype in dtypes if dtype.is_floating_point}
    if len(floating) == 1 and disk.is_file(path := os.path.join(folder, "config.json")):
        _state_dtype(path, floating.pop())


def _state_dtype(path: str, dtype: str) -> None:
    """Let a configuration that states a dtype state this one."""
    with open(path, encoding="utf-8") as text:
        try:
            found = json.load(text)
        except ValueError:  # reported by who opens it
            return
    stated = [key for key in ("dtype", "torch_dtype") if isinstance(found, dict) and key in found]
    if any(found[key] != dtype for key in stated):
        with open(path, "w", encoding="utf-8") as text:
            json.dump(found | dict.fromkeys(stated, dtype), text, indent=2)
            text.write("\n")


def _entries(
    tensors: Sequence[streamed.Streamed], renames: Sequence[tuple[re.Pattern, str]], cast: torch.dtype | None
) -> dict[str, Entry]:
    """By path what a leaf becomes. Raises ValueError when two get one name."""
    if cast is not None and not cast.is_floating_point:
        raise ValueError(f"cast: got {_text(cast)}, wanted a floating dtype, e.g. bfloat16; other leaves stay")
    entries, taken = {}, {"__metadata__": "the metadata"}
    for leaf in tensors:
        name, dtype = leaf.path, leaf.dtype
        becomes = cast if cast is not None and dtype.is_floating_point else dtype
        if not _can_become(dtype, becomes):
            raise ValueError(
                f"{leaf.path}: got cast={_text(becomes)}, wanted a dtype that torch casts {_text(dtype)} to;"
                " choose other leaves by a pattern, or another dtype"
            )
        if becomes not in DTYPES.values():
            raise ValueError(
                f"{leaf.path}: got {_text(becomes)}, wanted a dtype that safetensors has; cast floating leaves"
                " (--cast), or choose other leaves by a pattern"
            )
        for regex, replacement in renames:
            name = regex.sub(replacement, name)
        if name in taken or not name:
            of = taken.get(name, "nothing")
            raise ValueError(
                f"{leaf.path}: got the new name {name!r}, the name of {of}, wanted another; change --rename"
            )
        taken[name] = leaf.path
        entries[leaf.path] = Entry(name, becomes, leaf.shape)
    return entries


def _text(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


@lru_cache(maxsize=64)
def _can_become(dtype: torch.dtype, other: torch.dtype) -> bool:
    """Whether torch casts one dtype to the other."""
    try:
        return torch.zeros(dtype.itemsize, dtype=torch.uint8).view(dtype).to(other).dtype is other
    except RuntimeError:
        return False
