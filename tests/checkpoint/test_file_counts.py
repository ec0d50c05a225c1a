"""How many files a save has, counted on paper for models of 8 to 405 billion parameters, for real for a small one."""

import math
import os
import shutil
import subprocess
import sys

import pytest
import torch

from fmegatron import model, optim, step, tree
from fmegatron.checkpoint.writing.counts import counts
from fmegatron.checkpoint.writing.plan import grid_array, plan
from fmegatron.layout import DataParallel, Layout, Mesh
from tests.checkpoint.fake_world import save_all
from tests.checkpoint.test_reshard import any_bits
from tests.checkpoint.tokens import files_of
from tests.house import ROOT

SHAPES = {
    "8B": {"dim": 4096, "layers": 32, "heads": 32, "ffn_dim": 14336},
    "70B": {"dim": 8192, "layers": 80, "heads": 64, "ffn_dim": 28672},
    "405B": {"dim": 16384, "layers": 126, "heads": 128, "ffn_dim": 53248},
}
# name: (model, mesh, strategy, whether its layers are leaves of their own, most files)
CASES = {
    "8B on 8": ("8B", Mesh(fsdp=8), DataParallel.zero3(), False, 520),
    "8B on 1,024": ("8B", Mesh(fsdp=1024), DataParallel.zero3(), False, 19_000),
    "70B on 512": ("70B", Mesh(fsdp=64, tp=8), DataParallel.zero3(), False, 26_000),
    "70B on 512, layers apart": ("70B", Mesh(fsdp=64, tp=8), DataParallel.zero3(), True, 26_000),
    "405B on 16,384": ("405B", Mesh(dp=16, fsdp=128, tp=8), DataParallel.hsdp(), False, 76_000),
    "405B on 16,384, no replicas": ("405B", Mesh(fsdp=2048, tp=8), DataParallel.zero3(), False, 300_000),
}


def state_of(name, mesh, strategy, apart):
    """(paths, layouts) of the weights (float32) and two moments of Adam."""
    of = model.llama(vocab_size=128256, max_seq=8192, kv_heads=8, **SHAPES[name])
    layers = SHAPES[name]["layers"]
    layouts = tree.layouts(step.state_specs(model.specs(of, mesh, strategy=strategy), optim.adamw(1e-4), strategy))
    found = {}
    for path, x in zip(tree.paths(layouts), tree.leaves(layouts), strict=True):
        before, blocks, after = path.partition("blocks/")
        if apart and blocks and x.shape[0] == layers:
            one = Layout(x.shape[1:], x.dtype, x.mesh, x.spec[1:])
            found |= {f"{before}{blocks}{i}/{after}": one for i in range(layers)}
        else:
            found[path] = x
    return list(found), list(found.values())


@pytest.mark.parametrize("case", CASES)
def test_files_are_few(case):
    name, mesh, strategy, apart, most = CASES[case]
    paths, layouts = state_of(name, mesh, strategy, apart)
    plans = plan(paths, layouts)
    arrays = [grid_array(p) for p in plans if p.home == "grid"]
    assert max(a.chunk_nbytes * math.prod(a.shard) for a in arrays) <= 256 << 20
    found = counts(plans)
    assert found.files <= most and found.operations <= 2.2 * found.files + 3 * mesh.size, found
    assert found.operations <= 300_000 or case != "405B on 16,384", found


SAVED = """
import os, sys, torch
from fmegatron import checkpoint
from fmegatron.layout import Layout, Mesh
like = Layout((256, 512), torch.float32, Mesh())
layouts = {"layers": [like] * 5, "norm": Layout((64,), torch.float32, Mesh())}
state = {"layers": [torch.ones(256, 512) for _ in range(5)], "norm": torch.ones(64)}
checkpoint.save(sys.argv[1], state, layouts)
"""


@pytest.mark.slow
def test_a_file_is_one_create_and_one_fsync(tmp_path):
    """As the system sees it; names are synced once a directory, and nothing in the token's folder is renamed."""
    if shutil.which("strace") is None:
        pytest.skip("strace is not installed")
    names = "openat,open,creat,fsync,fdatasync,rename,renameat,renameat2,unlink,unlinkat"
    command = ["strace", "-f", "-y", "-e", f"trace={names}", "-o", tmp_path / "calls"]
    subprocess.run([*command, sys.executable, "-c", SAVED, tmp_path / "a"], cwd=ROOT, check=True, timeout=300)
    token = files_of(tmp_path / "a")
    lines = [line for line in (tmp_path / "calls").read_text().splitlines() if f"{token}/" in line]
    made = [line for line in lines if "O_CREAT" in line]
    synced = [line for line in lines if "fsync(" in line and os.path.isfile(line.partition("<")[2].partition(">")[0])]
    files = [at for at in token.rglob("*") if at.is_file()]
    assert len(made) - len(files) == sum("ENOENT" in line for line in made)  # of the first file in each directory
    assert len(synced) == len(files) and not [line for line in lines if "rename" in line or "unlink" in line], lines


def test_the_count_is_that_of_a_save(tmp_path):
    mesh = Mesh(fsdp=2, tp=2)
    layouts = {
        "layers": [Layout((256, 512), torch.float32, mesh, ("fsdp", "tp")) for _ in range(5)],
        "big": {"w": Layout((2048, 2048), torch.float32, mesh, ("fsdp", "tp"))},
        "flat": Layout((1001, 1001), torch.float32, mesh, flat=("fsdp", "tp")),
        "norm": Layout((512,), torch.float32, mesh),
    }
    state = tree.map(lambda x: any_bits(x.shape, x.dtype), layouts)
    assert save_all(tmp_path / "a", state, layouts) == [None] * 4
    files = [path for path in (tmp_path / "a").rglob("*") if path.is_file()]
    found = counts(plan(tree.paths(layouts), tree.leaves(layouts)))
    data = [
        path
        for path in files
        if path.name != "zarr.json" and path.parent not in (files_of(tmp_path / "a"), tmp_path / "a")
    ]
    assert found.data == len(data) and abs(found.files - len(files)) <= 3, (found, len(files))
