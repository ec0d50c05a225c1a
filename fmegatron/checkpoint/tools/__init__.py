"""The functions behind `python -m fmegatron.checkpoint`: each returns values, for notebooks and for the commands."""

from fmegatron.checkpoint.tools.differences import diff
from fmegatron.checkpoint.tools.resharding import reshard
from fmegatron.checkpoint.tools.verification import verify

__all__ = [
    "diff",
    "reshard",
    "verify",
]
