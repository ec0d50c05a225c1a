"""Checkpoints: any mesh to any mesh; complete or not there; every element verified. FORMAT.md describes the files."""

from fmegatron.checkpoint.format import CheckpointError
from fmegatron.checkpoint.local import LocalReplicas
from fmegatron.checkpoint.manager import Manager
from fmegatron.checkpoint.read import layouts, metadata, restore
from fmegatron.checkpoint.saving import save

__all__ = ["CheckpointError", "LocalReplicas", "Manager", "layouts", "metadata", "restore", "save"]
