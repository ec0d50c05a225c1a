"""One rank of 16,384 plans little; small leaves are linear work; a manifest of 10^12 parameters is small."""

import math

import numpy as np
import pytest
import torch

from fmegatron import checkpoint
from fmegatron.checkpoint.files.format import Piece
from fmegatron.checkpoint.files.manifest import manifest_to_json
from fmegatron.checkpoint.files.parse import parse_manifest
from fmegatron.checkpoint.writing.part import Part, merge, one_chunk, plan_digest
from fmegatron.checkpoint.writing.plan import chunks_to_write, grid_array, plan
from fmegatron.files.strict_json import parse_json
from fmegatron.layout import Layout, Mesh, Split
from tests.checkpoint.tokens import files_of
from tests.work import counted

BF16, F32 = torch.bfloat16, torch.float32


def trillion(stacked, layers=60):
    """Layouts of a mixture of experts of 1.03e12 parameters (60 layers) on 2,048 ranks: (paths, layouts).

    stacked: layers and experts are dims of few leaves; otherwise each expert's matrices are leaves of their own.
    """
    mesh = Mesh(pp=4, dp=2, fsdp=32, tp=8)
    experts = mesh.view(pp=4, edp=8, ep=64, etp=1)
    hidden, inner, count = 7168, 2048, 384
    leaves = {
        "embed": Layout((163_840, hidden), BF16, mesh, ("tp", "fsdp")),
        "head": Layout((hidden, 163_840), BF16, mesh, ("fsdp", "tp")),
        "norm": Layout((hidden,), F32, mesh),
    }
    kinds = {
        "wq": ((hidden, 12_288), ("fsdp", "tp")),
        "wkv": ((hidden, 576), ("fsdp", None)),
        "wo": ((8192, hidden), ("tp", "fsdp")),
        "shared_up": ((hidden, 2 * inner), ("fsdp", Split("tp", 2))),
        "shared_down": ((inner, hidden), ("tp", "fsdp")),
        "router": ((hidden, count), ("fsdp", None)),
        "norm1": ((hidden,), ()),
        "norm2": ((hidden,), ()),
    }
    expert_kinds = {"gate": (hidden, inner), "up": (hidden, inner), "down": (inner, hidden)}
    if stacked:
        for name, (shape, spec) in kinds.items():
            leaves[f"blocks/{name}"] = Layout((layers, *shape), BF16, mesh, ("pp", *spec))
        for name, shape in expert_kinds.items():
            leaves[f"blocks/experts/{name}"] = Layout((layers, count, *shape), BF16, experts, ("pp", "ep"))
    else:
        for layer in range(layers):
            for name, (shape, spec) in kinds.items():
                leaves[f"blocks/{layer}/{name}"] = Layout(shape, BF16, mesh, spec)
            for expert in range(count):
                for name, shape in expert_kinds.items():
                    leaves[f"blocks/{layer}/experts/{expert}/{name}"] = Layout(shape, BF16, experts, ("edp",))
    assert 1.0 < sum(math.prod(layout.shape) for layout in leaves.values()) / (layers / 60 * 1e12) < 1.1
    return list(leaves), list(leaves.values())


def metadata_of(paths, layouts):
    """(bytes of the manifest, number of digests) of a state, as its save would merge them, with made-up digests."""
    plans = plan(paths, layouts)
    part, packed = Part(0, plan_digest(plans)), 0
    rng = np.random.default_rng(0)
    for leaf in plans:
        if leaf.home == "grid":
            array = grid_array(leaf)
            if array.name in part.chunks:
                continue  # another leaf of a stack
            part.chunks[array.name] = list(range(math.prod(array.grid)))
            shape = (math.prod(array.grid), math.prod(array.bands))
            part.digests[array.name] = rng.integers(0, 1 << 63, shape, dtype=np.uint64)
        elif leaf.home == "packed":
            boxes = leaf.layout.boxes(0)
            part.pieces[leaf.path] = Piece("packed/0", packed, boxes)
            packed += leaf.layout.nbytes + -leaf.layout.nbytes % 64
    if packed:
        array = one_chunk("packed/0", packed, "uint8")
        part.arrays[array.name], part.chunks[array.name] = array, [0]
        part.digests[array.name] = rng.integers(0, 1 << 63, (1, math.prod(array.bands)), dtype=np.uint64)
    manifest, digests = merge(plans, [part], 1, {})
    return manifest_to_json(manifest), len(digests)


def test_one_rank_of_16384_plans():
    """2,000 leaves over ep, pp, fsdp and tp: the plan and the chunks of one rank."""
    mesh = Mesh(pp=8, dp=16, fsdp=16, tp=8)
    experts = mesh.view(pp=8, edp=4, ep=64, etp=8)
    kinds = [
        Layout((96, 8192, 10240), BF16, mesh, ("pp", "fsdp", Split("tp", (8192, 1024, 1024)))),
        Layout((96, 8192, 57344), BF16, mesh, ("pp", "fsdp", Split("tp", 2))),
        Layout((96, 28672, 8192), F32, mesh, ("pp", "tp", "fsdp"), flat=("dp",)),
        Layout((96, 64, 8192, 4096), BF16, experts, ("pp", "ep", None, "etp")),
        Layout((96, 8192), F32, mesh, ("pp",)),
    ]
    layouts = [kinds[i % 5].replace() for i in range(2000)]
    assert mesh.size == 16_384
    with counted() as work:
        leaves = plan([f"leaf/{i}" for i in range(2000)], layouts)
        chunks = [chunks_to_write(leaf, 12_345) for leaf in leaves if leaf.home == "grid"]
    assert work.calls < 1_000 * len(layouts)
    assert work.memory < 200 << 20
    assert sum(map(len, chunks)) > 500


def check_metadata(stacked, layers=60):
    """50 MB for 60 layers, calls in proportion to leaves. Digests: less than 1/10,000 of the data."""
    paths, layouts = trillion(stacked, layers)
    assert len(paths) == (14 if stacked else 3 + layers * 1160)
    data, digests = metadata_of(paths, layouts)
    assert len(data) < 50e6 * layers / 60, len(data)
    assert 8 * digests < 1e-4 * sum(layout.nbytes for layout in layouts), digests
    with counted() as work:
        manifest = parse_manifest(parse_json(data))
    assert work.calls < 500 * len(paths)
    assert list(manifest.leaves) == paths and manifest.digest_count == digests
    return len(data)


@pytest.mark.medium
def test_metadata_of_a_trillion_parameters():
    """Layers and experts as dims: 14 leaves. One by one, a tenth of the layers and of the bounds."""
    assert check_metadata(stacked=True) < 10_000
    check_metadata(stacked=False, layers=6)


@pytest.mark.slow
def test_metadata_of_a_trillion_parameters_leaf_by_leaf():
    """69,603 leaves."""
    check_metadata(stacked=False)


def save_and_restore(folder, count):
    """Calls of saving and restoring so many small leaves; and (files, bytes of metadata) of it."""
    layout = Layout((16,), F32, Mesh())
    names = [(f"layer{i // 100}", f"p{i % 100}") for i in range(count)]
    layouts, state = ({layer: {} for layer, _ in names} for _ in range(2))
    for i, (layer, name) in enumerate(names):
        layouts[layer][name], state[layer][name] = layout, torch.full((16,), float(i))
    with counted() as work:
        checkpoint.save(folder / f"{count}", state, layouts)
        got = checkpoint.restore(folder / f"{count}", layouts)
    assert all(int(got[layer][name][3]) == i for i, (layer, name) in enumerate(names))
    files = [path for path in files_of(folder / f"{count}").rglob("*") if path.is_file()]
    return work.calls, len(files), (files_of(folder / f"{count}") / "manifest.json").stat().st_size


def check_linear(folder, small, large):
    a, b = save_and_restore(folder, small), save_and_restore(folder, large)
    assert a[1] == b[1] <= 6, "small leaves have files of their own"
    assert b[2] / large < 1.1 * a[2] / small
    assert b[0] / large <= 1.1 * a[0] / small, f"{a[0]} calls for {small} leaves, {b[0]} for {large}"


@pytest.mark.medium
def test_small_leaves_are_linear_work(tmp_path):
    check_linear(tmp_path, 1_000, 4_000)


@pytest.mark.slow
def test_100_000_small_leaves(tmp_path):
    check_linear(tmp_path, 25_000, 100_000)
