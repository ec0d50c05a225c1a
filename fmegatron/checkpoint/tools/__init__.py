"""The functions behind `python -m fmegatron.checkpoint`: each returns values, for notebooks and for the commands."""

from fmegatron.checkpoint.tools.diff import diff
from fmegatron.checkpoint.tools.gc import collect
from fmegatron.checkpoint.tools.ls import listing
from fmegatron.checkpoint.tools.reshard import plan_of, reshard, target_layouts
from fmegatron.checkpoint.tools.show import show
from fmegatron.checkpoint.tools.source import open_source, stream
from fmegatron.checkpoint.tools.verify import verify

__all__ = [
    "collect",
    "diff",
    "listing",
    "open_source",
    "plan_of",
    "reshard",
    "show",
    "stream",
    "target_layouts",
    "verify",
]
