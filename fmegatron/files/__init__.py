"""What all rooms ask a file system: queries, owners of files, and atomic writes."""

from fmegatron.files.whole import whole_file

__all__ = ["whole_file"]
