"""Bytes read / bytes needed when a leaf of a few MiB is cut in another way than it was: counted, and as told before."""

from unittest import mock

import pytest
import torch

from fmegatron.checkpoint import explain, restore, unstack
from fmegatron.checkpoint.reading import fetch
from fmegatron.layout import Layout, Mesh
from tests.checkpoint.counting import counting
from tests.checkpoint.fake_world import assert_same_bits, cut_tree, run, save_all, small_sizes
from tests.checkpoint.test_reshard import any_bits

UNSTACK = unstack("w", "layers/{i}")
ROWS, COLUMNS = 0, 1
# (ranks and dim of the writers, ranks and dim of the readers, most bytes read / bytes needed)
CASES = {
    "tp2 to tp4, rows": ((2, ROWS), (4, ROWS), 1.05),
    "tp2 to tp4, columns": ((2, COLUMNS), (4, COLUMNS), 1.05),
    "tp2 rows to tp4 columns": ((2, ROWS), (4, COLUMNS), 1.05),
    "tp2 columns to tp4 rows": ((2, COLUMNS), (4, ROWS), 1.05),
    "fsdp4 to tp2, rows": ((4, ROWS), (2, ROWS), 1.05),
    "fsdp4 to tp2, columns": ((4, ROWS), (2, COLUMNS), 1.05),
    "uneven: 2 to 3, rows": ((2, ROWS), (3, ROWS), 1.30),
    "uneven: 2 to 3, columns": ((2, COLUMNS), (3, COLUMNS), 1.30),
    "uneven: 4 to 3, rows": ((4, ROWS), (3, ROWS), 1.30),
    "uneven: 4 to 3, columns": ((4, COLUMNS), (3, COLUMNS), 1.30),
    "rows to three columns": ((4, ROWS), (3, COLUMNS), 1.51),
    "uneven: 3 to 2, rows": ((3, ROWS), (2, ROWS), 1.30),
    "uneven: 3 to 4, rows": ((3, ROWS), (4, ROWS), 1.30),
    "the same": ((4, ROWS), (4, ROWS), 1.0),
}


def on(shape, ranks, dim):
    spec = [None] * (len(shape) - 2) + (["tp", None] if dim == ROWS else [None, "tp"])
    return {"w": Layout(shape, torch.bfloat16, Mesh(tp=ranks), tuple(spec))}


@pytest.mark.long
@pytest.mark.parametrize("shape", [(2048, 2048), (1024, 4096), (2, 1024, 2048)], ids=str)
@pytest.mark.parametrize("case", CASES)
def test_reshard(tmp_path, shape, case):
    source, target, most = CASES[case]
    layouts, wanted = on(shape, *source), on(shape, *target)
    state = {"w": any_bits(shape, torch.bfloat16)}
    save_all(tmp_path / "a", state, layouts)
    store, count = counting(tmp_path / "a")
    got = run(target[0], lambda world: restore(store, wanted, world=world))
    for rank, local in enumerate(cut_tree(state, wanted)):
        assert_same_bits(got[rank], local)
    needed = sum(wanted["w"].local_nbytes(rank) for rank in range(target[0]))
    assert needed == wanted["w"].nbytes and needed <= count.nbytes <= most * needed
    reads = [read for rank in range(target[0]) for read in explain(tmp_path / "a", wanted, rank)]
    assert sum(read.nbytes for read in reads) == count.nbytes
    assert {read.file for read in reads} == {name for name in count.files if name != "digests.bin"}
    assert {(read.leaf, read.array) for read in reads} == {("w", "arrays/w")}


def test_part_of_a_stack_of_layers(tmp_path):
    """By a rule, one layer of many: only its bytes are read."""
    layouts = {"w": Layout((8, 512, 1024), torch.bfloat16, Mesh(pp=2), ("pp",))}
    state = {"w": any_bits((8, 512, 1024), torch.bfloat16)}
    save_all(tmp_path / "a", state, layouts)
    store, count = counting(tmp_path / "a")
    wanted = {"layers": {"5": Layout((512, 1024), torch.bfloat16, Mesh())}}
    got = restore(store, wanted, rules=[UNSTACK], strict="subset")
    assert_same_bits(got["layers"]["5"], state["w"][5])
    assert count.nbytes == wanted["layers"]["5"].nbytes
    (read, *more) = explain(tmp_path / "a", wanted, rules=[UNSTACK])
    assert read.leaf == "layers/5" and sum(r.nbytes for r in (read, *more)) == count.nbytes


@pytest.mark.parametrize("verify", [True, False])
@pytest.mark.parametrize("ranks", [1, 3])
def test_a_band_of_stored_ranges_is_read_once(tmp_path, ranks, verify):
    """Rows of 28 bytes, bands of 32, ranges of 64: neighbours share bands, and a job that has both reads them once."""
    layouts = {"flat": Layout((15, 7), torch.float32, Mesh(fsdp=2), flat=("fsdp",))}
    wanted = {"flat": Layout((15, 7), torch.float32, Mesh(tp=ranks), ("tp",))}
    state = {"flat": any_bits((15, 7), torch.float32)}
    with small_sizes(), mock.patch.object(fetch, "_JOB_BYTES", 1 << 20):  # put back before small_sizes is
        save_all(tmp_path / "a", state, layouts)
        for rank, local in enumerate(cut_tree(state, wanted)):
            store, count = counting(tmp_path / "a")
            assert_same_bits(restore(store, wanted, rank=rank, verify=verify), local)
            assert count.offsets and len(count.offsets) == len(set(count.offsets)), count.offsets
