"""What all rooms ask a file system: queries, owners of files, and atomic writes."""

from fmegatron.moved import no_name as _no_name

__all__: list[str] = []

globals()["__getattr__"] = _no_name(__name__)
