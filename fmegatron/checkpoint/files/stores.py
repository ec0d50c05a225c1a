"""`open_store`: the `Store` of a path, a URL or a description in JSON; a value.

store = open_store(path_or_url)     # a directory, or s3://bucket/prefix, gs://..., memory://..., file:///...
storage = store.locate()            # the files of the complete checkpoint that is there: read_manifest, Fetch
storage = store.begin()             # a save in progress; other ranks: store.draft(storage.root); write_part
store.publish(storage, marker)      # now it is the checkpoint, in one step; then always store.end(storage)
store_from_json(store.to_json())    # the same in another process
"""

from __future__ import annotations

import os
from contextlib import AbstractContextManager, nullcontext
from typing import Any
from urllib.parse import unquote

from fmegatron.checkpoint.calls.arguments import check_path
from fmegatron.checkpoint.files.commit import Store
from fmegatron.checkpoint.files.folder import FolderStore
from fmegatron.checkpoint.files.leases import STEP, reading
from fmegatron.checkpoint.files.objects import ObjectStore
from fmegatron.checkpoint.files.storage import Storage


def open_store(path: str | os.PathLike | Store, options: dict[str, Any] | None = None) -> Store:
    """The Store of a path or URL; a Store is returned as it is. Wherever the room takes a path, it takes a Store.

    path: a directory (also file:///...), s3://bucket/prefix/name, gs://... or memory://... (as a Store only: each has
    a memory of its own).  options: more members of the tensorstore kvstore spec of a URL, e.g. {"endpoint":
    "http://127.0.0.1:9000", "aws_region": "us-east-1", "aws_credentials": {"type": "environment"}}.

    >>> open_store("/tmp/run/../run/last").text, open_store("s3://bucket/run").child("step_00000001").text
    ('/tmp/run/last', 's3://bucket/run/step_00000001')
    """
    check_path(path)
    if not isinstance(path, str | os.PathLike):
        return path
    store = _store_at(os.fspath(path), options)
    if options is None and store.text.startswith("memory://"):
        raise ValueError(f"{path}: got a URL, wanted a Store, as each memory:// is its own: open_store(path, {{}})")
    return store


def _store_at(path: str, options: dict[str, Any] | None) -> Store:
    scheme, colon, rest = path.partition("://")
    if colon and scheme != "file" and scheme.isalnum():
        return ObjectStore(path, dict(options or {}))
    if options:
        raise ValueError(f"{path}: got options {sorted(options)}, wanted none for a directory; leave them out")
    return FolderStore(os.path.realpath(url_path(rest) if colon and scheme == "file" else path))


def url_path(rest: str) -> str:
    """The path in a file URL, after "file://"."""
    if not rest.startswith("/"):
        raise ValueError(f"file://{rest}: got a relative path, wanted file:/// and an absolute one")
    return unquote(rest)


def store_from_json(value: dict[str, Any]) -> Store:
    """The Store that `to_json` described."""
    return open_store(value.get("path") or value["url"], value.get("options"))


def holding(store: Store) -> AbstractContextManager[None]:
    """`reading` of the checkpoint at `store`, if it has the name of a Manager's step; others are not deleted."""
    name = store.text.rpartition("/")[2]
    return reading(store.above().notes(), name) if STEP.fullmatch(name) else nullcontext()


def locate(path: str | os.PathLike | Store) -> Storage:
    """The files of the complete checkpoint at a path, URL or Store."""
    return open_store(path).locate()
