"""Checkpoints: any mesh to any mesh; complete or not there; every element verified. FORMAT.md describes the files."""

from fmegatron.checkpoint import rank_state
from fmegatron.checkpoint.async_save import AsyncSaver, save_async
from fmegatron.checkpoint.describe import Description, describe, layouts, metadata
from fmegatron.checkpoint.explain import Read, explain
from fmegatron.checkpoint.format import CheckpointError
from fmegatron.checkpoint.handle import Handle
from fmegatron.checkpoint.local import LocalReplicas
from fmegatron.checkpoint.manager import Manager
from fmegatron.checkpoint.mapping import (
    Rule,
    copy,
    drop,
    fresh,
    fuse,
    pad,
    per_rank,
    rename,
    split,
    stack,
    take,
    transpose,
    unstack,
)
from fmegatron.checkpoint.read import restore
from fmegatron.checkpoint.report import Report
from fmegatron.checkpoint.retention import Keep
from fmegatron.checkpoint.saving import save
from fmegatron.checkpoint.storage import open_store
from fmegatron.checkpoint.tracker import read_latest

__all__ = [
    "AsyncSaver",
    "CheckpointError",
    "Description",
    "Handle",
    "Keep",
    "LocalReplicas",
    "Manager",
    "Read",
    "Report",
    "Rule",
    "copy",
    "describe",
    "drop",
    "explain",
    "fresh",
    "fuse",
    "layouts",
    "metadata",
    "open_store",
    "pad",
    "per_rank",
    "rank_state",
    "read_latest",
    "rename",
    "restore",
    "save",
    "save_async",
    "split",
    "stack",
    "take",
    "transpose",
    "unstack",
]
