"""Where the files of a save lie: below its token, a checkpoint by itself."""

import os
import shutil
from pathlib import Path

from fmegatron.checkpoint.files.commit import TOKEN, pointer_to
from fmegatron.checkpoint.files.format import VERSION
from fmegatron.checkpoint.files.manifest import marker_to_json
from fmegatron.checkpoint.files.stores import open_store


def files_of(path):
    """The directory of the files of the complete save at a path."""
    return Path(open_store(os.fspath(path)).locate().root)


def plain(path):
    """Make a save what one of version 3 was, in place: its files lie in the directory itself. Returns the path."""
    files = files_of(path)
    os.rename(files, beside := Path(f"{path}.plain"))
    shutil.rmtree(path)
    os.rename(beside, path)
    return path


def reseal(files, data, version=VERSION):
    """Put a manifest into the directory of a save, and marker and pointer that fit: its author is the attacker."""
    (files / "manifest.json").write_bytes(data)
    (files / "COMPLETE").write_bytes(marker := marker_to_json(data, version))
    if TOKEN.fullmatch(files.name):
        (files.parent / "COMPLETE").write_bytes(pointer_to(files.name, marker))
