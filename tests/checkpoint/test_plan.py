"""Plans: one writer for every chunk, shared evenly, cheap for any number of ranks; chunks of sensible shapes."""

import math
import random

import numpy as np
import pytest
import torch

from fmegatron.checkpoint.files.format import CHUNK_BYTES, MOST_CHUNK_BYTES, MOST_SMALL, array_name, band_shape
from fmegatron.checkpoint.writing.part import Part, grid_array, merge, plan_digest
from fmegatron.checkpoint.writing.plan import chunk_shape, chunks_to_write, cut_unit, plan
from fmegatron.layout import Layout, Mesh, Split
from tests.sampling import seeds
from tests.work import counted

BF16 = torch.bfloat16


def one(layout):
    (leaf,) = plan(["w"], [layout])
    return leaf


@pytest.mark.parametrize(
    "layout, chunk",
    [
        (Layout((8192, 8192), BF16, Mesh(), ()), (1024, 8192)),  # one rank: rows
        (Layout((8192, 8192), BF16, Mesh(fsdp=4), ("fsdp",)), (1024, 2048)),  # a quarter of the columns, 4 MiB
        (Layout((8192, 8192), BF16, Mesh(tp=4), (None, "tp")), (2048, 1024)),  # half of the writer's columns
        (Layout((8192, 8192), BF16, Mesh(tp=4, fsdp=2), ("fsdp", "tp")), (2048, 1024)),
        (Layout((24, 4096, 4096), BF16, Mesh(fsdp=2), (None, "fsdp")), (1, 2048, 1024)),  # a quarter of the columns
        (Layout((24, 512, 512), BF16, Mesh(fsdp=2), (None, "fsdp")), (24, 256, 256)),  # no rows of less than 512 bytes
        (Layout((24, 4096, 6144), BF16, Mesh(fsdp=2, tp=2), (None, "fsdp", Split("tp", (4096, 1024, 1024)))),
         (4, 2048, 256)),
        (Layout((50257, 1024), BF16, Mesh(fsdp=1), ("fsdp",)), (7180, 1024)),  # 7 chunks, the last one padded by 3 rows
        (Layout((50261, 1024), BF16, Mesh(fsdp=1), ("fsdp",)), (7181, 1024)),  # a prime
        (Layout((2 * 50261, 1024), BF16, Mesh(fsdp=2), ("fsdp",)), (50261, 256)),  # a cut prime: columns instead
        (Layout((1000, 4096), torch.float32, Mesh(fsdp=3), ("fsdp",)), (334, 1024)),  # uneven: the last is padded
        (Layout((64, 4096, 4096), BF16, Mesh(dp=8), flat=("dp",)), (1, 2048, 1024)),  # flat, along whole rows
    ],
    ids=str,
)  # fmt: skip
def test_chunk_shapes(layout, chunk):
    leaf = one(layout)
    assert leaf.home == "grid" and leaf.chunk == chunk
    assert math.prod(chunk) * layout.dtype.itemsize <= (MOST_CHUNK_BYTES if chunk[0] == 50261 else 1.5 * CHUNK_BYTES)


def test_homes():
    mesh = Mesh(dp=4)
    small = {
        "matrix": Layout((128, 128), BF16, mesh, ("dp",)),
        "empty": Layout((0, 128), BF16, mesh),
        "0-d": Layout((), BF16, mesh),
    }
    assert {name: (leaf.home, leaf.chunk) for name, leaf in zip(small, plan(small, small.values()), strict=True)} == {
        "matrix": ("grid", (32, 128)), "empty": ("grid", (1, 1)), "0-d": ("grid", ()),
    }  # fmt: skip
    many = [*small.values(), *[Layout((3,), BF16, mesh)] * MOST_SMALL]
    homes = [leaf.home for leaf in plan(map(str, range(len(many))), many)]
    assert homes == ["packed", "grid", "packed", *["packed"] * MOST_SMALL]
    assert one(Layout((5, 7), BF16, mesh, flat=("dp",))).home == "packed"  # ranges end inside rows
    assert one(Layout((1024,), BF16, Mesh(fsdp=512), ("fsdp",))).home == "packed"  # 4 bytes for each rank
    assert one(Layout((1001, 1001), BF16, mesh, flat=("dp",))).home == "piece"  # ranges end inside rows
    assert one(Layout((8192, 8192), BF16, Mesh(fsdp=4096), ("fsdp",))).chunk == (2, 8192)
    assert one(Layout((8192, 128), BF16, Mesh(fsdp=4096), ("fsdp",))).home == "packed"  # 512 bytes for each rank


def test_units():
    assert cut_unit(Layout((12, 12), BF16, Mesh(a=2, b=3), (("a", "b"), None))) == (2, 12)
    assert cut_unit(Layout((12,), BF16, Mesh(a=2), (Split("a", (4, 8)),))) == (2,)
    assert cut_unit(Layout((10,), BF16, Mesh(a=4), ("a",))) == (3,)
    assert cut_unit(Layout((6, 4, 5), BF16, Mesh(a=3), flat=("a",))) == (2, 4, 5)
    assert cut_unit(Layout((2, 6, 5), BF16, Mesh(a=4), flat=("a",))) == (1, 3, 5)
    assert cut_unit(Layout((3, 5), BF16, Mesh(a=4), flat=("a",))) == (1, 1)


def test_replicas_share_the_bytes():
    """8 replicas of 13 leaves of different sizes: no replica writes more than one chunk above another."""
    mesh = Mesh(dp=8, tp=2)
    shapes = [(2048 * n, 4096) for n in (1, 3, 2, 7, 1, 5, 2, 2, 9, 1, 1, 4, 6)]
    layouts = [Layout(shape, BF16, mesh, (None, "tp")) for shape in shapes]
    leaves = plan([str(i) for i in range(len(shapes))], layouts)
    written = [
        sum(box.size * 2 for leaf in leaves for _, box in chunks_to_write(leaf, rank)) for rank in range(mesh.size)
    ]
    assert sum(written) == sum(layout.nbytes for layout in layouts)
    assert max(written) - min(written) <= 1.5 * CHUNK_BYTES


def test_bands_are_contiguous_and_small():
    assert band_shape((1024, 8192), 2) == (64, 8192)
    assert band_shape((4096, 2048), 2) == (256, 2048)
    assert band_shape((1, 2048, 4096), 2) == (1, 128, 4096)
    assert band_shape((1000, 4096), 4) == (50, 4096)  # a divisor of 1000, not 64
    assert band_shape((1 << 24,), 4) == (1 << 18,)
    assert band_shape((3, 1 << 24), 4) == (1, 1 << 18)
    assert band_shape((), 4) == ()


def test_the_divisor_search_is_bounded():
    with counted() as work:
        rows = 10_000_019  # a prime; 610 GiB
        assert chunk_shape((rows, 1 << 14), (rows, 1 << 14), 4) == (256, 1 << 14)
        assert chunk_shape((2 * rows, 1 << 14), (rows, 1 << 14), 4) == (rows, 1)
        assert chunk_shape((2 * 16777259,), (16777259,), 4) is None
    assert work.calls < 50_000


def test_names_are_different_and_inside():
    names = [array_name(p) for p in ("a/b", "a%2Fb", "../b", "%2E./b", "", "%", "a//b", "A", "a", ".", "zarr.json")]
    assert len(set(names)) == len(names)
    assert not any(part in ("", ".", "..", "zarr.json") for name in names for part in name.split("/"))


def test_one_rank_of_many_plans_little():
    """2,000 leaves on 16,384 ranks: the plan and the chunks of one rank."""
    mesh = Mesh(pp=8, dp=16, fsdp=16, tp=8)
    experts = mesh.view(pp=8, edp=4, ep=64, etp=8)
    kinds = [
        Layout((96, 8192, 10240), BF16, mesh, ("pp", "fsdp", Split("tp", (8192, 1024, 1024)))),
        Layout((96, 8192, 57344), BF16, mesh, ("pp", "fsdp", Split("tp", 2))),
        Layout((96, 28672, 8192), torch.float32, mesh, ("pp", "tp", "fsdp"), flat=("dp",)),
        Layout((96, 64, 8192, 4096), BF16, experts, ("pp", "ep", None, "etp")),
        Layout((96, 8192), torch.float32, mesh, ("pp",)),
    ]
    layouts = [kinds[i % 5].replace(shape=(96, *kinds[i % 5].shape[1:])) for i in range(2000)]
    with counted() as work:
        leaves = plan([f"leaf/{i}" for i in range(2000)], layouts)
        chunks = [chunks_to_write(leaf, 12_345) for leaf in leaves if leaf.home == "grid"]
    assert work.calls < 1_000 * len(layouts)
    assert sum(map(len, chunks)) > 800


def test_a_chunk_that_nobody_wrote_is_noticed():
    layout = Layout((4096, 4096), torch.float32, Mesh(fsdp=2), ("fsdp",))
    plans = plan(["w"], [layout])
    array = grid_array(plans[0])
    part = Part(0, plan_digest(plans))
    mine = [int(np.ravel_multi_index(index, array.grid)) for index, _ in chunks_to_write(plans[0], 0)]
    part.chunks[array.name] = mine
    part.digests[array.name] = np.zeros((len(mine), math.prod(array.bands)), "<u8")
    with pytest.raises(RuntimeError, match="arrays/w: chunk number .* has 0 writers, wanted one"):
        merge(plans, [part], None, {})


def random_layout(draw):
    """A leaf of up to some GiB on up to 64 ranks: primes, uneven cuts, flat ranges, interleaved parts."""
    sizes = [draw.choice([1, 1, 2, 3, 4, 7, 8, 16]) for _ in range(draw.choice([1, 2, 2, 3]))]
    names = [f"a{i}" for i in range(len(sizes))]
    mesh, dims, spec = Mesh(**dict(zip(names, sizes, strict=True))), draw.choice([1, 2, 2, 3]), []
    shape = [draw.choice([draw.randrange(1, 40), 1 << draw.randrange(4, 16), draw.randrange(1000, 200_000)])
             for _ in range(dims)]  # fmt: skip
    free = names[:]
    for _ in shape:
        spec.append(tuple(free.pop() for _ in range(min(len(free), draw.choice([0, 0, 1, 1, 2])))))
    while math.prod(shape) > 1 << 33:
        shape[draw.randrange(dims)] = 3
    flat = tuple(free[:1]) if draw.random() < 0.3 else ()
    return Layout(tuple(shape), draw.choice([torch.float32, BF16]), mesh, tuple(spec), flat=flat)


@pytest.mark.parametrize("seed", seeds("chunks", 8, 4))
def test_no_chunk_is_above_64_mib(seed):
    """For any shape and mesh; every element is in the chunk of one writer. Pieces are cut when they are written."""
    draw = random.Random(seed)
    for _ in range(30):
        layout = random_layout(draw)
        leaf = one(layout)
        if leaf.home != "grid" or not layout.nbytes:
            continue
        nbytes = math.prod(leaf.chunk) * layout.dtype.itemsize
        assert nbytes <= MOST_CHUNK_BYTES, (layout, leaf.chunk)
        grid = [-(-n // c) for n, c in zip(layout.shape, leaf.chunk, strict=True)]
        assert math.prod(grid) * nbytes <= 1.3 * layout.nbytes + (1 << 20), (layout, leaf.chunk)  # padding
        if layout.mesh.size * math.prod(grid) < 5000:
            written = [i for rank in range(layout.mesh.size) for i, _ in chunks_to_write(leaf, rank)]
            assert len(written) == len(set(written)) == math.prod(grid), (layout, leaf.chunk)
