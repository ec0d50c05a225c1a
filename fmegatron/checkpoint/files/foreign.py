"""Recognition of checkpoints of other systems by their file names, and which function reads each."""

from __future__ import annotations

import re

from fmegatron.checkpoint.files.storage import Storage
from fmegatron.files import disk

_SOURCE = "checkpoint.restore(interop.source(path), layouts, rules=...) restores it"
_DCP = f"{_SOURCE}, and `python -m fmegatron.interop dcp-to-fmegatron SRC DST` writes it as a checkpoint of fmegatron"
_HUGGING_FACE = f"{_SOURCE}, interop.hf.load(path, decoder, layouts) with the names of a family"
_NONE = "it has none of the files that interop.source opens; download them"
_TORCH_FILES = (
    "nothing in fmegatron reads files of torch.save, which are programs; load them with torch.load(weights_only=True),"
    " and save the tensors with interop.save_state_dict(path, {'model': tensors})"
)
_ORBAX = "nothing in fmegatron reads it; load it with what wrote it, and save with fmegatron.checkpoint.save"
_MEGATRON = "nothing in fmegatron reads it; Megatron's own --ckpt-convert-format torch_dist makes of it what we read"
_MP_RANK = ("mp_rank_00", "mp_rank_00_000", "mp_rank_00_000_000")
_SAFETENSORS = ("model.safetensors.index.json", "model.safetensors", "adapter_model.safetensors")
_BINARIES = ("pytorch_model.bin.index.json", "pytorch_model.bin")
_LOOK_BYTES = 1 << 16

_RUN = "the folder of a run of Megatron"
_NO_WEIGHTS = "a folder of Hugging Face without weights"
# (files that are there, with a word that the first bytes of each hold; what the folder is; what reads it). The first
# kind that fits counts.
_KINDS = (
    ((("COMPLETE", "fmegatron.checkpoint"),), "a checkpoint of fmegatron", "fmegatron.checkpoint.restore reads it"),
    (((".metadata", ""), ("metadata.json", "torch_dist")), "a torch_dist checkpoint of Megatron", _DCP),
    (((".metadata", ""),), "a directory of torch.distributed.checkpoint", _DCP),
    ((("metadata.json", "sharded_backend"),), "a checkpoint of Megatron in a format of its own", _MEGATRON),
    *(
        (((f"{n}/model_optim_rng.pt", ""),), "a checkpoint of Megatron in its format `torch`", _MEGATRON)
        for n in _MP_RANK
    ),
    ((("latest_checkpointed_iteration.txt", ""),), _RUN, f"{_SOURCE} at its newest step"),
    *((((name, ""),), "a folder of Hugging Face", _HUGGING_FACE) for name in _SAFETENSORS),
    *((((name, ""),), "a folder of Hugging Face with weights of torch.save", _TORCH_FILES) for name in _BINARIES),
    *((((name, ""),), "a checkpoint of Orbax", _ORBAX) for name in ("_CHECKPOINT_METADATA", "_METADATA")),
    ((("manifest.ocdbt", ""),), "an OCDBT database of tensorstore", _ORBAX),
    ((("config.json", "model_type"),), _NO_WEIGHTS, _NONE),
)
_STEP = re.compile(r"step_[0-9]{8,18}|iter_[0-9]{7,18}|release")


def recognized(storage: Storage, run: bool = False) -> str | None:
    """What these files are, and the call that reads them, as text for an error; None for what is not known here.

    A few names are looked for, and in small files of JSON for a word; nothing else is read.
    run: only what a run may have been saved as: no folder without weights, and no single file.
    """
    for files, what, how in _KINDS:
        if not (run and what == _NO_WEIGHTS) and all(_holds(storage, name, word) for name, word in files):
            steps = _steps(storage.text) if what == _RUN else []
            return f"this is {what}: {how}{f', e.g. {steps[-1]}' if steps else ''}"
    if steps := [name for name in _steps(storage.text) if name.startswith("step_")]:
        return (
            f"this is a directory of checkpoints: name one of them, e.g. {steps[-1]}, or use"
            " checkpoint.Manager(path).restore_latest"
        )
    if not run and disk.is_file(storage.text):
        return f"this is a file: {_HUGGING_FACE if storage.text.endswith('.safetensors') else 'wanted a directory'}"
    return None


def _holds(storage: Storage, name: str, word: str) -> bool:
    """Whether a file is there whose first bytes hold a word."""
    try:
        return word.encode() in storage.read(name, 0, _LOOK_BYTES if word else 1)
    except OSError:  # nothing depends on it but the hint in an error
        return False


def _steps(folder: str) -> list[str]:
    try:
        return [name for name in disk.names_in(folder) if _STEP.fullmatch(name)]
    except OSError:
        return []
