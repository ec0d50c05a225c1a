"""Checkpoints: any mesh to any mesh; complete or not there; every element verified. FORMAT.md describes the files."""

from fmegatron.checkpoint import rank_state
from fmegatron.checkpoint.background.async_save import AsyncSaver, save_async
from fmegatron.checkpoint.background.handle import Handle
from fmegatron.checkpoint.files.claim import Claim, ClaimedError, claim
from fmegatron.checkpoint.files.format import CheckpointError, Leaf
from fmegatron.checkpoint.files.open_store import open_store
from fmegatron.checkpoint.files.targets import Target
from fmegatron.checkpoint.local import LocalReplicas
from fmegatron.checkpoint.manage.manager import Manager
from fmegatron.checkpoint.manage.report import Report
from fmegatron.checkpoint.manage.retention import Keep
from fmegatron.checkpoint.manage.start import start
from fmegatron.checkpoint.manage.tracker import read_latest
from fmegatron.checkpoint.reading.describe import Description, describe, layouts, metadata
from fmegatron.checkpoint.reading.explain import Read, explain
from fmegatron.checkpoint.reading.mapping import Rule, copy, drop, fresh, per_rank, rename, take
from fmegatron.checkpoint.reading.read import restore
from fmegatron.checkpoint.reading.rules import fuse, pad, split, stack, transpose, unstack
from fmegatron.checkpoint.reading.snapshot import Snapshot, open_snapshot
from fmegatron.checkpoint.reading.source import Foreign, Grain, Source
from fmegatron.checkpoint.writing.saving import save

__all__ = [
    "AsyncSaver",
    "CheckpointError",
    "Claim",
    "ClaimedError",
    "Description",
    "Foreign",
    "Grain",
    "Handle",
    "Keep",
    "Leaf",
    "LocalReplicas",
    "Manager",
    "Read",
    "Report",
    "Rule",
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
    "start",
    "take",
    "transpose",
    "unstack",
]
