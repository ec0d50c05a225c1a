"""How many files a save has, counted on paper for models of 8 to 405 billion parameters, for real for a small one."""

import pytest
import torch

from fmegatron import model, optim, step, tree
from fmegatron.checkpoint.writing.counts import counts
from fmegatron.checkpoint.writing.plan import plan
from fmegatron.layout import DataParallel, Layout, Mesh
from tests.checkpoint.fake_world import save_all
from tests.checkpoint.test_reshard import any_bits
from tests.checkpoint.tokens import files_of

SHAPES = {
    "8B": {"dim": 4096, "layers": 32, "heads": 32, "ffn_dim": 14336},
    "70B": {"dim": 8192, "layers": 80, "heads": 64, "ffn_dim": 28672},
    "405B": {"dim": 16384, "layers": 126, "heads": 128, "ffn_dim": 53248},
}
# Above the bars with what each rank keeps for itself, in packed/ and pieces/ (two files each): to be mended.
WITH_PACKED = {"8B on 1,024": 20_600, "405B on 16,384, no replicas": 398_000}
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
    found = counts(plan(paths, layouts))
    assert found.shards <= most and found.files <= WITH_PACKED.get(case, most), found
    assert found.operations <= 2.2 * found.files + 6 * mesh.size, found


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
