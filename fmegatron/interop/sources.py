"""`source(path)`: any checkpoint as what restores and tools take, by the files that it has.

    state = checkpoint.restore(interop.source("iter_0000100"), layouts, rules=[...], world=world)

One of ours stays the path that it is. A DCP or Megatron torch_dist directory, a run of Megatron (its newest step), a
folder of Hugging Face and a safetensors file become a `checkpoint.Foreign`, which is opened when it is read.
"""

from __future__ import annotations

import os
from functools import partial
from typing import TypeVar

from fmegatron.checkpoint import Foreign
from fmegatron.checkpoint.files import stores
from fmegatron.files import disk
from fmegatron.interop.dcp_directory import METADATA
from fmegatron.interop.dcp_source import RUN, open_source
from fmegatron.interop.safetensors_files import ENDING
from fmegatron.interop.safetensors_headers import INDEXES, WEIGHTS
from fmegatron.interop.safetensors_source import SafetensorsSource

T = TypeVar("T")


def source(path: T) -> T | Foreign:
    """What `checkpoint.restore`, `explain`, `describe`, `layouts`, `open_snapshot` and `checkpoint.start` take.

    path: of a directory or file; a URL, a Store and what is opened already come back as they are, and so does a path
    that is of no other system: who reads it reports what is wrong with it.

    Raises OSError for what cannot be looked at.
    """
    if not isinstance(path, str | os.PathLike) or "://" in os.fspath(path):
        return path
    root = os.path.abspath(path)
    if root.endswith(ENDING) and disk.is_file(root):
        return Foreign(root, partial(SafetensorsSource, root))
    if stores.open_store(root).is_complete():
        return path
    if disk.is_there(os.path.join(root, METADATA)) or disk.is_there(os.path.join(root, RUN)):
        return Foreign(root, partial(open_source, root))
    if any(disk.is_there(os.path.join(root, name)) for name in (*INDEXES, *WEIGHTS)):
        return Foreign(root, partial(SafetensorsSource, root))
    return path
