"""Checkpoints of these tests lie in memory where there is such a file system: fsync to a disk is not what they test."""

import os
import pathlib
import tempfile

import pytest


@pytest.fixture
def tmp_path():
    with tempfile.TemporaryDirectory(dir="/dev/shm" if os.path.isdir("/dev/shm") else None) as folder:
        yield pathlib.Path(folder)
