"""How many files a save has, counted on paper for models of 8 to 405 billion parameters, for real for a small one."""

import math
import os

import pytest
import torch

from fmegatron import checkpoint, model, optim, step, tree
from fmegatron.checkpoint.writing.counts import counts
from fmegatron.checkpoint.writing.plan import grid_array, plan
from fmegatron.layout import DataParallel, Layout, Mesh
from tests.checkpoint.fake_world import save_all
from tests.checkpoint.test_reshard import any_bits
from tests.checkpoint.tokens import files_of

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


def test_a_file_is_one_create_and_one_fsync(tmp_path, monkeypatch):
    """Names are synced once a directory, and nothing in the token's folder is renamed."""
    calls, opened = [], {}
    noted = {"fsync": lambda fd: os.readlink(f"/proc/self/fd/{fd}"), "remove": str, "unlink": str}
    for name, about in {**noted, "rename": lambda *two: " ".join(map(str, two)), "replace": str}.items():
        real = getattr(os, name)

        def call(*args, name=name, real=real, about=about, **how):
            calls.append((name, about(*args[:2] if name == "rename" else args[:1])))
            return real(*args, **how)

        monkeypatch.setattr(os, name, call)
    real_open = os.open

    def open_(path, flags, *mode, **how):
        fd = real_open(path, flags, *mode, **how)
        if flags & os.O_CREAT:
            opened[str(path)] = opened.get(str(path), 0) + 1
        return fd

    monkeypatch.setattr(os, "open", open_)
    like = Layout((256, 512), torch.float32, Mesh())
    layouts = {"layers": [like] * 5, "norm": Layout((64,), torch.float32, Mesh())}
    checkpoint.save(tmp_path / "a", tree.map(lambda x: torch.ones(x.shape), layouts), layouts)
    token = files_of(tmp_path / "a")
    files = {str(at) for at in token.rglob("*") if at.is_file()}
    inside = [(name, about) for name, about in calls if f"{token}/" in about and about not in map(str, token.parents)]
    assert {at: count for at, count in opened.items() if f"{token}/" in at} == dict.fromkeys(files, 1)
    assert sorted(about for name, about in inside if name == "fsync" and os.path.isfile(about)) == sorted(files)
    assert {name for name, _ in inside} <= {"fsync"}, inside


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
