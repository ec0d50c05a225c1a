"""A state that another thread writes to while it is saved: refused by name, nothing left, an older one still there."""

import itertools
import os
import subprocess
import sys
import threading
import time

import numpy as np
import pytest
import torch

from fmegatron import checkpoint
from fmegatron.checkpoint.background import async_save
from fmegatron.checkpoint.dicts import arrays
from fmegatron.checkpoint.files import other_threads
from fmegatron.checkpoint.files.format import raw
from fmegatron.checkpoint.local import saving as local_saving
from fmegatron.checkpoint.writing import draft, saving, unchanged
from fmegatron.checkpoint.writing import write as writing
from fmegatron.layout import Layout, Mesh, Split
from tests.checkpoint.fake_world import assert_same_bits, cut_tree, run
from tests.checkpoint.local.nodes import Cluster, state

KINDS = {
    "contiguous": lambda: torch.zeros(1024, 1024),
    "strided": lambda: torch.zeros(1024, 1030)[:, :1024],
    "transposed": lambda: torch.zeros(1024, 512).t(),
    "bf16": lambda: torch.zeros(2048, 1024, dtype=torch.bfloat16),
    "small": lambda: torch.zeros(7),
    "number": lambda: torch.zeros(()),
}
WRITES = {
    "add_": lambda x: x.add_(1),
    "data": lambda x: x.data.add_(1),
    "a base": lambda x: x._base.add_(1) if x._base is not None else x.add_(1),
    "one element": lambda x: x.select(0, -1).add_(1) if x.dim() else x.add_(1),
}


def around(monkeypatch, module, name, when, write):
    """Have `write` done before or behind a function of a module: what another thread may do meanwhile."""
    real = getattr(module, name)

    def work(*args, **options):
        if when == "before":
            write()
        result = real(*args, **options)
        if when == "behind":
            write()
        return result

    monkeypatch.setattr(module, name, work)


@pytest.mark.long
@pytest.mark.parametrize("write", WRITES)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("when", ["when a file is written", "when all are"])
def test_a_save_is_refused(tmp_path, monkeypatch, kind, write, when):
    x, y = KINDS[kind](), torch.zeros(3, 5)
    checkpoint.save(tmp_path / "step", {"x": x, "y": y})
    module, name = (saving, "write_part") if when == "when all are" else (writing, "_write")
    around(monkeypatch, module, name, "behind", lambda: WRITES[write](x))
    with pytest.raises(RuntimeError, match=r"x: got a leaf that changed while it was saved, wanted one that stays"):
        checkpoint.save(tmp_path / "step", {"x": x, "y": y})
    assert [f.name for f in tmp_path.iterdir() if f.name != "step"] in ([], [".notes"])
    assert_same_bits(checkpoint.restore(tmp_path / "step"), {"x": KINDS[kind]().contiguous(), "y": y})


@pytest.mark.parametrize(
    "neighbour",
    [
        pytest.param(lambda base: base[:, 1024:].add_(1), id="the rest of the tensor that it is a view of"),
        pytest.param(lambda base: base[:, :1024].add_(0), id="a write of the same values"),
    ],
)
def test_what_does_not_change_the_leaf_is_no_change(tmp_path, monkeypatch, neighbour):
    base = torch.arange(1024.0 * 1030).view(1024, 1030)
    around(monkeypatch, saving, "write_part", "behind", lambda: neighbour(base))
    checkpoint.save(tmp_path / "step", {"x": base[:, :1024]})
    assert_same_bits(checkpoint.restore(tmp_path / "step"), {"x": base[:, :1024].contiguous()})


def test_a_leaf_of_repeated_elements_is_a_part_of_its_memory(tmp_path, monkeypatch):
    """Also where it has as many elements as the memory."""
    base = torch.arange(1024.0 * 100).view(1024, 100)
    state = {"rows": base[:1].expand(1024, 100), "windows": base.view(-1)[:2000].unfold(0, 1024, 1)[:100]}
    around(monkeypatch, saving, "write_part", "behind", lambda: base[500:].add_(1))
    checkpoint.save(tmp_path / "step", state)
    assert_same_bits(
        checkpoint.restore(tmp_path / "step"),
        {k: x.clone(memory_format=torch.contiguous_format) for k, x in state.items()},
    )
    around(monkeypatch, saving, "write_part", "behind", lambda: base[0].add_(1))
    with pytest.raises(RuntimeError, match="got a leaf that changed while it was saved"):
        checkpoint.save(tmp_path / "again", state)


@pytest.mark.parametrize(
    "make",
    [
        pytest.param(lambda: np.zeros((64, 64), order="F"), id="numpy of other strides"),
        pytest.param(lambda: np.zeros((64, 64))[::2], id="every other row of numpy"),
        pytest.param(lambda: np.zeros((64, 64)).view(), id="read-only numpy"),
        pytest.param(lambda: torch.zeros(64, 64, dtype=torch.complex64).conj(), id="conjugate"),
        pytest.param(lambda: torch.zeros(64, 64, dtype=torch.complex64).conj().imag, id="negative"),
    ],
)
def test_what_is_no_plain_tensor_is_looked_at_too(tmp_path, monkeypatch, request, make):
    """And not a copy of it that the call makes first, which may be torn."""
    x = own = make()
    if request.node.callspec.id == "read-only numpy":  # others may write all the same
        own = x.base
        x.flags.writeable = False
    around(monkeypatch, saving, "write_part", "behind", lambda: own.__setitem__((1, 1), 1.0))
    with pytest.raises(RuntimeError, match="x: got a leaf that changed while it was saved"):
        checkpoint.save(tmp_path / "step", {"x": x})
    assert not (tmp_path / "step").exists()


@pytest.mark.long
@pytest.mark.parametrize(
    "make",
    [
        pytest.param(lambda x: x[::-1, ::-1], id="negative strides"),
        pytest.param(lambda x: x.view(">i8"), id="another byte order"),
        pytest.param(lambda x: x.view([("a", "i2"), ("b", "i4"), ("c", "i2")])["b"], id="between elements"),
        pytest.param(lambda x: x.view(">c16"), id="complex"),
        pytest.param(lambda x: x.view(">c8"), id="complex of halves that swap each for itself"),
    ],
)
def test_a_copy_that_torch_needs_is_compared(tmp_path, monkeypatch, make):
    """Of what it cannot share: a write that is under way while it is made would tear it."""
    own = np.arange(64 * 64).reshape(64, 64) << 16
    x = make(own)
    checkpoint.save(tmp_path / "good", {"x": x})
    assert np.array_equal(checkpoint.restore(tmp_path / "good")["x"], x)
    around(monkeypatch, arrays, "let_others_run", "before", lambda: own.__setitem__(7, -1 << 20))
    for save in (checkpoint.save, checkpoint.save_async):
        own[:] = 0
        with pytest.raises(RuntimeError, match="x: got a leaf that changed while it was saved"):
            save(tmp_path / "step", {"x": x})
    assert not (tmp_path / "step").exists()


@pytest.mark.parametrize("by", ["torch", "numpy"])
@pytest.mark.parametrize("kind", [*KINDS, "packed", "piece"])
def test_a_swap_and_back_is_a_change(tmp_path, monkeypatch, kind, by):
    """As for an evaluation with averaged weights: what was written in between is of neither."""
    state, layouts = {"x": KINDS.get(kind, KINDS["small"])()}, None
    if kind == "packed":
        state |= {str(i): torch.zeros(3) for i in range(300)}
    if kind == "piece":
        state, layouts = {"x": torch.zeros(1 << 20)}, {"x": Layout((2, 1 << 19), torch.float32, Mesh(a=1), flat=("a",))}
    x = state["x"]
    add = x.add_ if by == "torch" else lambda n: np.add(raw(x), n, out=raw(x))
    around(monkeypatch, saving, "write_part", "before", lambda: add(1))
    around(monkeypatch, saving, "write_part", "behind", lambda: add(-1))
    with pytest.raises(RuntimeError, match="x: got a leaf that changed while it was saved"):
        checkpoint.save(tmp_path / "step", state, layouts)
    assert not (tmp_path / "step").exists()


@pytest.mark.parametrize("kind", KINDS)
def test_bytes_that_are_others_while_they_are_written(tmp_path, monkeypatch, kind):
    """By numpy between the digest of a band and its write, and back behind it: what lies on the disk has the digest."""
    x, swaps = KINDS[kind](), []
    wanted = x.clone()

    def swap(n):
        np.add(raw(x), n, out=raw(x))
        swaps.append(n)

    around(monkeypatch, writing, "digest", "behind", lambda: swap(1))
    write_to = os.write

    def write_and_back(fd, data):
        done = write_to(fd, data)
        swap(-sum(swaps))
        return done

    with monkeypatch.context() as patch:
        patch.setattr(os, "write", write_and_back)
        around(patch, saving, "write_part", "behind", lambda: swap(-sum(swaps)))
        try:
            checkpoint.save(tmp_path / "step", {"x": x})
        except RuntimeError as error:
            assert "x: got a leaf that changed" in str(error)
    assert len(swaps) > 3
    if (tmp_path / "step").exists():
        assert_same_bits(checkpoint.restore(tmp_path / "step"), {"x": wanted.contiguous()})


@pytest.mark.parametrize("whose", [0, 1])
def test_ranks_save_one_moment(tmp_path, monkeypatch, whose):
    """One element of a large leaf, by numpy, when one rank has written and the other has not begun: the save is refused
    where that one has written the leaf, and is of the moment behind where it has not."""
    layouts = {"x": Layout((4096, 1024), torch.float32, Mesh(dp=2), ("dp",))}
    wanted = {"x": torch.randn(4096, 1024)}
    local = cut_tree(wanted, layouts)
    local = [{"x": part["x"].clone()} for part in local]
    has_written, real = threading.Event(), saving.write_part

    def in_turns(storage, plans, tensors, rank, **options):
        assert rank == 0 or has_written.wait(60)
        part = real(storage, plans, tensors, rank, **options)
        if rank == 0:
            local[whose]["x"].numpy()[7, 77] += 1
            has_written.set()
        return part

    monkeypatch.setattr(saving, "write_part", in_turns)
    found = run(2, lambda w: checkpoint.save(tmp_path / "step", local[w.rank], layouts, w))
    if whose == 0:
        assert not (tmp_path / "step").exists()
        for error in found:
            assert isinstance(error, RuntimeError) and "x: got a leaf that changed" in str(error)
    else:
        wanted["x"][2048 + 7, 77] += 1
        assert found == [None] * 2
        assert_same_bits(checkpoint.restore(tmp_path / "step"), wanted)


def test_threads_that_wait_for_a_core_get_one(monkeypatch):
    """One that is inside of a write moves on before the second look; threads that sleep are not waited for."""
    if not os.path.isdir("/proc/self/task"):  # the system does not tell what threads do
        assert other_threads._runnable() == set()
        return
    stop, data = threading.Event(), np.zeros(1 << 20, bool)

    def write():
        while not stop.is_set():
            np.logical_not(data, out=data)

    thread = threading.Thread(target=write)
    thread.start()
    try:
        begun = other_threads._ran(thread.native_id)
        other_threads.let_others_run()
        assert other_threads._ran(thread.native_id) >= begun + 1_000_000
    finally:
        stop.set()
        thread.join()
    stop.clear()
    sleeping = threading.Thread(target=stop.wait)
    sleeping.start()
    while sleeping.native_id in other_threads._runnable():  # it begins
        time.sleep(0.001)
    monkeypatch.setattr(other_threads, "_runnable", lambda real=other_threads._runnable: real() & {sleeping.native_id})
    monkeypatch.setattr(other_threads, "_RUN_NS", 10**12)  # whoever waits for that fails
    other_threads.let_others_run()
    stop.set()
    sleeping.join()


@pytest.mark.parametrize("by", ["torch", "numpy"])
def test_a_thread_that_never_stops(tmp_path, by):
    """Acknowledged is readable, and whole."""
    x, stop = torch.zeros(1 << 20), threading.Event()

    def count():
        while not stop.is_set():
            x.add_(1)
            if by == "numpy":  # and back
                np.negative(raw(x), out=raw(x))
                np.negative(raw(x), out=raw(x))

    thread = threading.Thread(target=count)
    thread.start()
    try:
        for i in range(6):
            try:
                checkpoint.save(tmp_path / str(i), {"x": x})
            except RuntimeError as error:
                assert "x: got a leaf that changed" in str(error)
    finally:
        stop.set()
        thread.join()
    for i in range(6):
        if (tmp_path / str(i)).is_dir():
            assert len(checkpoint.restore(tmp_path / str(i))["x"].unique()) <= 2


@pytest.mark.slow
def test_foreign_writers_on_a_busy_machine(tmp_path):
    """Each of them leaves equal elements; the scheduler keeps it from a core in the middle of a write for as long as a
    small save takes. (Two looks that did not wait for it acknowledged 28 torn leaves in 2,400 saves.) One core is busy,
    on which all of it runs: with all of them it took minutes, and so did all else on the machine."""
    leaves = {
        "bool": lambda: torch.zeros(1 << 20, dtype=torch.bool),
        "uint8": lambda: torch.zeros(1 << 20, dtype=torch.uint8),
        "permuted": lambda: torch.zeros(64, 512, 8).permute(2, 0, 1),
        "f32": lambda: torch.zeros(1 << 18),
    }
    by = {
        "numpy": lambda x: np.invert(raw(x).T, out=raw(x).T),
        "reversed": lambda x: np.invert(raw(x)[::-1], out=raw(x)[::-1]),
        "torch": lambda x: unchanged.bits(x).bitwise_not_(),
        "data": lambda x: unchanged.bits(x).data.bitwise_not_(),
    }
    busy = [sys.executable, "-c", f"import os\nwhile os.getppid() == {os.getpid()}: pass"]
    cores, hogs, saved = os.sched_getaffinity(0), [], 0
    try:
        os.sched_setaffinity(0, {max(cores)})
        hogs += [subprocess.Popen(busy) for _ in range(4)]
        for i, (leaf, how) in enumerate(itertools.product(leaves, by)):
            x, stop = leaves[leaf](), threading.Event()

            def work(write=by[how], x=x, stop=stop):
                while not stop.is_set():
                    write(x)

            for j in range(10):
                stop.clear()
                thread = threading.Thread(target=work)
                thread.start()
                try:
                    checkpoint.save(tmp_path / f"{i}.{j}", {"x": x})
                    saved += 1
                except RuntimeError as error:
                    assert "x: got a leaf that changed" in str(error)
                finally:
                    stop.set()
                    thread.join()
                if (tmp_path / f"{i}.{j}").exists():
                    found = raw(checkpoint.restore(tmp_path / f"{i}.{j}")["x"])
                    assert len(np.unique(found)) == 1, (leaf, how)
    finally:
        os.sched_setaffinity(0, cores)
        for hog in hogs:
            hog.kill()
            hog.wait()
    print(f"{saved} of 160 acknowledged")


@pytest.mark.parametrize("replicated", [False, True])
def test_one_rank_of_several(tmp_path, monkeypatch, replicated):
    """All ranks hear of it. Of a replica each rank looks at what it writes: the others have their own."""
    mesh = Mesh(dp=2)
    layouts = {"x": Layout((4096, 1024), torch.float32, mesh, () if replicated else (Split("dp"),))}
    local = cut_tree({"x": torch.randn(4096, 1024)}, layouts)
    around(monkeypatch, saving, "require_unchanged", "before", lambda: local[1]["x"].add_(1))
    for error in run(2, lambda world: checkpoint.save(tmp_path / "step", local[world.rank], layouts, world)):
        assert isinstance(error, RuntimeError)
        assert "failed on rank 1 of 2: " in str(error) and "x: got a leaf" in str(error)
    assert not (tmp_path / "step").exists()


def test_a_save_that_another_library_plans(tmp_path, monkeypatch):
    x = torch.zeros(64, 64)
    begun = draft.Draft.begin(tmp_path / "step", {"x": ((64, 64), torch.float32, [(0, (0, 0), (64, 64))])}, 1)
    around(monkeypatch, draft, "write_part", "behind", lambda: x.add_(1))
    with pytest.raises(RuntimeError, match="x: got a leaf that changed"):
        begun.orders[0].write(tmp_path / "step", {"x": [x]}, begun)
    begun.end()


def test_several_boxes_of_a_leaf_that_another_library_plans(tmp_path, monkeypatch):
    """They are joined in a copy, which a write between two of them would tear, and which itself nobody writes to."""
    parts = [torch.zeros(8, 64), torch.zeros(64, 8).t()]
    held = [(0, (8 * i, 0), (8, 64)) for i in range(2)]
    for name in ("good", "torn"):
        begun = draft.Draft.begin(tmp_path / name, {"x": ((16, 64), torch.float32, held)}, 1)
        if name == "good":
            begun.orders[0].write(tmp_path / name, {"x": parts}, begun)
            begun.finish(None, {})
        else:
            around(monkeypatch, draft, "write_part", "before", lambda: raw(parts[1]).T.fill(1))
            with pytest.raises(RuntimeError, match="x: got a leaf that changed"):
                begun.orders[0].write(tmp_path / name, {"x": parts}, begun)
        begun.end()
    assert_same_bits(checkpoint.restore(tmp_path / "good"), {"x": torch.zeros(16, 64)})


@pytest.mark.parametrize("kind", ["contiguous", "strided", "transposed", "bf16"])
def test_signs_of_a_write_that_is_under_way(kind):
    """torch counts it when it ends; until then it is where it was not before: 64 KiB further on, or at the end."""
    x = KINDS[kind]()
    memory = raw(x) if x.stride(0) > x.stride(1) else raw(x).T
    before, rows = unchanged.signs([x]), -(-(64 << 10) // memory[0].nbytes)
    assert unchanged.compared(before, unchanged.signs([x])) == (set(), set())
    for some in (slice(100, 100 + rows), slice(-1, None), slice(0, rows)):
        memory[some] += 1
        assert unchanged.compared(before, unchanged.signs([x])) == ({0}, set())
        memory[some] -= 1


def test_a_write_that_is_under_way_before_and_behind_an_asynchronous_save(tmp_path, monkeypatch):
    x = KINDS["contiguous"]()
    half = raw(x)[512:]
    around(monkeypatch, async_save, "begin_staging", "behind", lambda: np.add(half, 1, out=half))
    handle = checkpoint.save_async(tmp_path / "step", {"x": x})
    with pytest.raises(RuntimeError, match="x: got a leaf that changed while it was saved"):
        handle.result()
    assert not (tmp_path / "step").exists()


@pytest.mark.medium
@pytest.mark.parametrize("arena_bytes", [None, 3 << 20], ids=["all at once", "in portions"])
@pytest.mark.parametrize("kind", ["contiguous", "strided", "bf16", "number"])
def test_an_asynchronous_save_is_refused(tmp_path, monkeypatch, kind, arena_bytes):
    x = KINDS[kind]()
    with checkpoint.AsyncSaver(arena_bytes) as saver:
        checkpoint.save_async(tmp_path / "first", {"a": torch.zeros(9), "x": x}, saver=saver).result()
        with monkeypatch.context() as patch:
            around(patch, async_save, "begin_staging", "behind", lambda: x.add_(1))
            handle = checkpoint.save_async(tmp_path / "second", {"a": torch.zeros(9), "x": x}, saver=saver)
        with pytest.raises(RuntimeError, match="x: got a leaf that changed while it was saved"):
            handle.result()
        # The saver goes on, and what comes behind the call is as free as ever.
        handle = checkpoint.save_async(tmp_path / "third", {"x": x}, saver=saver)
        wanted = x.clone()
        x.add_(1)
        handle.result()
    assert not (tmp_path / "second").exists()
    assert_same_bits(checkpoint.restore(tmp_path / "third"), {"x": wanted.contiguous()})


@pytest.mark.medium
def test_an_asynchronous_save_of_a_part_beside_which_somebody_writes(tmp_path, monkeypatch):
    base = torch.arange(1024.0 * 1030).view(1024, 1030)
    around(monkeypatch, async_save, "begin_staging", "behind", lambda: base[:, 1024:].add_(1))
    checkpoint.save_async(tmp_path / "step", {"x": base[:, :1024]}).result()
    assert_same_bits(checkpoint.restore(tmp_path / "step"), {"x": base[:, :1024].contiguous()})


def test_tensors_of_inference_mode_are_saved(tmp_path):
    with torch.inference_mode():
        state = {"x": torch.randn(64, 64)}
    checkpoint.save(tmp_path / "step", state)
    checkpoint.save_async(tmp_path / "other", state).result()
    for name in ("step", "other"):
        assert_same_bits(checkpoint.restore(tmp_path / name), {"x": state["x"].clone()})


def test_local_copies_are_refused(tmp_path, monkeypatch):
    cluster = Cluster(tmp_path, 2)
    cluster.save(1)
    local = cut_tree(state(cluster.layouts, 2), cluster.layouts)
    name, first = next((k, x) for k, x in local[0].items() if x.is_floating_point() and x.numel())
    around(monkeypatch, local_saving, "stage", "behind", lambda: first.add_(1))
    found = run(2, lambda world: cluster.replicas(world.rank, world).save(2, local[world.rank], cluster.layouts))
    for error in found:
        assert isinstance(error, RuntimeError) and f"{name}: got a leaf that changed while it was saved" in str(error)
