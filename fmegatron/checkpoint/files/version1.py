"""Version 1 of the format (up to commit 72aa944), which is read for ever, as FORMAT.md has it: all that differs of it.

Its manifests and markers are those of today with another number: which leaves are packed, and that empty ones have no
array, is in them. Only the zarr.json of its arrays is another. Nothing writes it.
"""

from __future__ import annotations

VERSION = 1
# float8 types that tensorstore knows were named as such in zarr.json; others were unsigned integers without a word.
_NAMED = frozenset("float8_e4m3fn float8_e5m2 float8_e4m3fnuz float8_e5m2fnuz float8_e8m0fnu".split())


def zarr_type(dtype: str, name: str) -> tuple[str, dict[str, str]]:
    """(data_type, attributes) of an array of version 1. name: the data_type that it has today."""
    return (dtype if dtype in _NAMED else name), {}
