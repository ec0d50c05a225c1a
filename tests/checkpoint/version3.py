"""Checkpoints of format version 3, as the last commit that wrote them did, in version3.zip; what they hold.

Written by that commit (63598a9e^), with this file in its place: `python -m tests.checkpoint.version3`.
"""

import os
import pathlib
import shutil
import tempfile
import zipfile

import torch

from fmegatron.checkpoint import Manager
from tests.checkpoint.fake_world import save_all, small_sizes
from tests.checkpoint.version1 import MESHES, layouts_on, state

FILE = pathlib.Path(__file__).with_suffix(".zip")


def unpacked(folder):
    """The checkpoints below a folder, by name; "run" is a Manager's, with steps 1, 2 and 3 and another 3 set aside."""
    with zipfile.ZipFile(FILE) as archive:
        archive.extractall(folder)
    return {at.name: at for at in pathlib.Path(folder).iterdir()}


def of_step(step):
    """What a step of the run holds."""
    return {"b": torch.full((3,), float(step)), "params": {"w": torch.full((20, 30), float(step))}}


def write():
    """As version 1's, and a run that went back to step 2 and on to another step 3."""
    with tempfile.TemporaryDirectory() as folder:
        for name, mesh in MESHES.items():
            assert save_all(f"{folder}/{name}", state(), layouts_on(mesh), metadata={"v": 3}) == [None] * mesh.size
        with small_sizes(chunk=4096, band=1024):
            assert save_all(f"{folder}/tiny", state(), layouts_on(MESHES["four"]), metadata={"v": 3}) == [None] * 4
        for steps in ((1, 2, 3), (3,)):
            manager = Manager(f"{folder}/run", keep=9)
            if steps == (3,):
                manager.restore(2)
            for step in steps:
                manager.save(step, of_step(step))
        shutil.make_archive(os.fspath(FILE.with_suffix("")), "zip", folder)


if __name__ == "__main__":
    write()
