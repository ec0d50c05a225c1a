"""Checkpoints: any mesh to any mesh; complete or not there; every element verified. FORMAT.md describes the files."""

from fmegatron.checkpoint.background.async_save import AsyncSaver, save_async
from fmegatron.checkpoint.files.claims import claim
from fmegatron.checkpoint.files.format import CheckpointError, Leaf
from fmegatron.checkpoint.files.targets import Target
from fmegatron.checkpoint.local.replicas import LocalReplicas
from fmegatron.checkpoint.manage.first_step import start
from fmegatron.checkpoint.manage.manager import Manager
from fmegatron.checkpoint.manage.retention import Keep
from fmegatron.checkpoint.reading.descriptions import describe, layouts, metadata
from fmegatron.checkpoint.reading.explanation import explain
from fmegatron.checkpoint.reading.mapping import copy, drop, fresh, rename, take
from fmegatron.checkpoint.reading.read import restore
from fmegatron.checkpoint.reading.rules import fuse, pad, split, stack, transpose, unstack
from fmegatron.checkpoint.reading.snapshot import Snapshot, open_snapshot
from fmegatron.checkpoint.reading.source import Foreign, Grain, Source
from fmegatron.checkpoint.writing.saving import save
from fmegatron.moved import no_name as _no_name

__all__ = [
    "AsyncSaver",
    "CheckpointError",
    "Foreign",
    "Grain",
    "Keep",
    "Leaf",
    "LocalReplicas",
    "Manager",
    "Snapshot",
    "Source",
    "Target",
    "claim",
    "copy",
    "describe",
    "drop",
    "explain",
    "fresh",
    "fuse",
    "layouts",
    "metadata",
    "open_snapshot",
    "pad",
    "rename",
    "restore",
    "save",
    "save_async",
    "split",
    "stack",
    "start",
    "take",
    "transpose",
    "unstack",
]

globals()["__getattr__"] = _no_name(__name__)
