"""Checkpoints of format version 1, as the last commit that wrote them did, in version1.zip; what they hold.

Written by that commit (72aa944), with this file in its place: `python -m tests.checkpoint.version1`.
"""

import os
import pathlib
import shutil
import tempfile
import zipfile

import torch

from fmegatron.layout import Layout, Mesh, Split
from fmegatron.tree.structure import map_with_path
from tests.checkpoint.fake_world import save_all, small_sizes

FILE = pathlib.Path(__file__).with_suffix(".zip")
MESHES = {"one": Mesh(fsdp=1, tp=1), "four": Mesh(fsdp=2, tp=2), "uneven": Mesh(fsdp=3, tp=1)}


def layouts_on(mesh):
    """Leaves of all homes: in chunks (fp8 under its own name), packed, flat pieces, empty."""
    f32, many = torch.float32, mesh.size > 1
    return {
        "w": Layout((160, 256), torch.bfloat16, mesh, ("fsdp", Split("tp", 2))),
        "fp8": Layout((256, 260), torch.float8_e4m3fn, mesh, ("fsdp",)),
        "scale": Layout((7,), torch.float8_e5m2, mesh, ("fsdp",)),
        "flat": Layout((131, 127), f32, mesh, flat=("fsdp", "tp") if many else ()),
        "norms": [Layout((16,), f32, mesh), Layout((5, 3), torch.bfloat16, mesh, ("fsdp",))],
        "mask": Layout((9,), torch.bool, mesh),
        "empty": Layout((0, 4), f32, mesh),
        "step": Layout((), torch.int64, mesh),
    }


def state():
    """Bytes that count up, so that nothing depends on a generator of numbers."""

    def values(path, layout):
        n = 1 if layout.shape == () else torch.Size(layout.shape).numel()
        if layout.dtype is torch.bool:
            return (torch.arange(n) % 3 == 0).view(layout.shape)
        found = (torch.arange(n * layout.dtype.itemsize) * 7 + len(path)) % 113  # no NaN of any type
        return found.to(torch.uint8).view(layout.dtype).view(layout.shape)

    return map_with_path(values, layouts_on(MESHES["one"]))


def unpacked(folder):
    """The checkpoints below a folder, by name."""
    with zipfile.ZipFile(FILE) as archive:
        archive.extractall(folder)
    return {at.name: at for at in pathlib.Path(folder).iterdir()}


def write():
    """Save on each mesh, with chunks of real and of tiny sizes, and pack it all."""
    with tempfile.TemporaryDirectory() as folder:
        for name, mesh in MESHES.items():
            assert save_all(f"{folder}/{name}", state(), layouts_on(mesh), metadata={"v": 1}) == [None] * mesh.size
        with small_sizes(chunk=4096, band=1024):
            assert save_all(f"{folder}/tiny", state(), layouts_on(MESHES["four"]), metadata={"v": 1}) == [None] * 4
        shutil.make_archive(os.fspath(FILE.with_suffix("")), "zip", folder)


if __name__ == "__main__":
    write()
