"""The functions behind `python -m fmegatron.checkpoint`: each returns values, for notebooks and for the commands."""

from fmegatron.checkpoint.tools.resharding import reshard
from fmegatron.checkpoint.tools.verification import verify
from fmegatron.moved import no_name as _no_name

__all__ = [
    "reshard",
    "verify",
]

globals()["__getattr__"] = _no_name(__name__)
