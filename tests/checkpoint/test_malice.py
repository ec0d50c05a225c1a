"""Crafted files: an error, or a correct restore, for work in proportion to their size; nothing outside is read or
written. Work is counted (calls, bytes read, memory), so that the time of day changes nothing."""

import contextlib
import json
import os
import random
import shutil
from unittest import mock

import pytest
import torch

from fmegatron import checkpoint, tree
from fmegatron.checkpoint import CheckpointError
from fmegatron.layout import Layout, Mesh
from tests.checkpoint.fake_world import assert_same_bits, save_all, small_sizes
from tests.checkpoint.nasty import mutated
from tests.checkpoint.tokens import files_of, reseal
from tests.sampling import seeds
from tests.work import Work, counted

BYTES = 200 << 20  # of memory, whatever the file


def layouts_on(mesh):
    return {
        "block": {"w": Layout((8, 6), torch.float32, mesh, ("fsdp",)), "v": Layout((8, 6), torch.float32, mesh)},
        "flat": Layout((5, 7), torch.float32, mesh, flat=("fsdp",) if mesh.size > 1 else ()),
        "step": Layout((), torch.int64, mesh),
        "flag": Layout((), torch.bool, mesh),
    }


ONE = layouts_on(Mesh(fsdp=1))


def state():
    torch.manual_seed(0)
    return tree.map(lambda x: torch.randint(1, 1000, x.shape).to(x.dtype), ONE)


@pytest.fixture(autouse=True)
def _tiny():
    with small_sizes():
        yield


@pytest.fixture
def saved(tmp_path):
    layouts = layouts_on(Mesh(fsdp=2))
    assert save_all(tmp_path / "run" / "a", state(), layouts, metadata={"lr": [1e-3, {"n": 2}]}) == [None] * 2
    (tmp_path / "canary").write_bytes(bytes(96))
    return tmp_path / "run" / "a"


def sign(path, data):
    """Put a manifest into the checkpoint there, with all that fits: its author is the attacker."""
    reseal(files_of(path), data)


@contextlib.contextmanager
def watched(inside):
    """Every file that is opened, and every directory that is listed, lies inside; nothing is written or removed."""
    real_open, real_os_open, outside = open, os.open, []

    def look(path, write):
        if isinstance(path, int):
            return
        folder, name = os.path.split(os.fspath(path))
        at = os.path.join(os.path.realpath(folder), name)  # a link at the end is not followed, see below
        if write or not (at == str(inside) or at.startswith(f"{inside}/")):
            outside.append((os.fspath(path), write))

    def open_file(path, mode="r", *args, **kwargs):
        look(path, set(mode) & set("wax+") or os.path.islink(path))
        return real_open(path, mode, *args, **kwargs)

    def os_open(path, flags, *args, dir_fd=None):
        at = path if dir_fd is None else os.path.join(os.readlink(f"/proc/self/fd/{dir_fd}"), path)
        look(at, flags & (os.O_WRONLY | os.O_RDWR | os.O_CREAT) or not flags & os.O_NOFOLLOW)
        return real_os_open(path, flags, *args, dir_fd=dir_fd)

    def refuse(*args, **kwargs):
        outside.append(args)
        raise AssertionError(f"a restore changes files: {args}")

    with contextlib.ExitStack() as stack:
        stack.enter_context(mock.patch("builtins.open", open_file))
        stack.enter_context(mock.patch("os.open", os_open))
        for name in (
            "rename",
            "replace",
            "remove",
            "unlink",
            "mkdir",
            "rmdir",
            "symlink",
            "link",
            "truncate",
            "system",
        ):
            stack.enter_context(mock.patch(f"os.{name}", refuse))
        yield
    assert not outside, outside


def restored(path, target, fill):
    """What a restore returns when fresh memory holds `fill`: a byte that it did not write shows."""
    real = torch.empty

    def empty(*args, **kwargs):
        x = real(*args, **kwargs)
        x.view(-1).view(torch.uint8).fill_(fill) if x.numel() else None
        return x

    with mock.patch("torch.empty", empty):
        return checkpoint.restore(path, target)


@pytest.mark.parametrize(
    "change, good",
    [
        (lambda boxes: None, True),
        (lambda boxes: boxes[-1].__setitem__(2, boxes[-1][2] + 1), False),
        (lambda boxes: boxes[0][3].__setitem__(0, 12), False),
    ],
    ids=["as saved", "offset", "stride"],
)
def test_a_box_may_not_reach_one_element_past_the_stored_bytes(saved, change, good):
    """Rank 0 stored 18 of 5 x 7 elements: two rows, and four of the third."""
    manifest = json.loads((files_of(saved) / "manifest.json").read_text())
    (piece, _) = manifest["leaves"]["flat"]["pieces"]
    assert [box[1:] for box in piece["boxes"]] == [[[2, 7], 0, [7, 1]], [[1, 4], 14, [7, 1]]]
    change(piece["boxes"])
    sign(saved, json.dumps(manifest).encode())
    if good:
        checkpoint.layouts(saved)
        return
    with pytest.raises(CheckpointError, match="flat: Box.* lies outside the stored bytes"):
        checkpoint.layouts(saved)


def attack(path):
    """Use a checkpoint in every way that reads it. "error", or "restored" with the same elements twice."""
    for use in (checkpoint.metadata, checkpoint.describe, checkpoint.layouts):
        with contextlib.suppress(ValueError):
            use(path)
    outcome = "error"
    try:
        got = restored(path, ONE, 0x5A)
    except ValueError as error:  # a CheckpointError is one
        assert len(str(error)) < 5000
    else:
        assert_same_bits(restored(path, ONE, 0xA5), got)
        outcome = "restored"
    with contextlib.suppress(ValueError):
        stored = checkpoint.layouts(path)
        flat = tree.leaves(stored)
        if sum(layout.nbytes for layout in flat) < 1 << 24 and len({layout.mesh.size for layout in flat}) == 1:
            assert_same_bits(checkpoint.restore(path, stored, rank=0), checkpoint.restore(path, stored, rank=0))
    return outcome


def fuzz(path, seed, times):
    """Mutations of the manifest; the most work that one of them was, and the outcomes."""
    rng, good = random.Random(seed), json.loads((files_of(path) / "manifest.json").read_text())
    assert attack(path) == "restored"
    worst, outcomes = Work(), {"error": 0, "restored": 0}
    with watched(path):
        pass  # patches compile their own code once
    for number in range(times):
        data = mutated(rng, good)
        sign(path, data)
        try:
            with counted() as work, watched(path):
                outcomes[attack(path)] += 1
        except Exception as error:
            raise AssertionError(
                f"{type(error).__name__} at mutation {number} of seed {seed}: {data[:3000]}"
            ) from error
        worst += work
        assert work.calls < 200_000 + 50 * len(data) and work.read < (1 << 20) + 40 * len(data), (work, data[:3000])
    return worst, outcomes


def check_fuzz(path, seed, times):
    worst, outcomes = fuzz(path, seed, times)
    assert worst.memory < BYTES, worst
    assert min(outcomes.values()) > times // 100, outcomes  # some mutations are harmless: another step, metadata, ...
    assert (path.parent.parent / "canary").read_bytes() == bytes(96)


@pytest.mark.medium
@pytest.mark.parametrize("seed", seeds("mutated manifests", 1, 1))
def test_mutated_manifests(saved, seed):
    check_fuzz(saved, seed, 120)


@pytest.mark.slow
def test_10_000_mutated_manifests(saved):
    check_fuzz(saved, 1, 10_000)


@pytest.mark.parametrize("kind", ["link", "pipe", "directory", "loop", "device"])
@pytest.mark.parametrize("file", ["COMPLETE", "manifest.json", "digests.bin", "arrays/block/w/c.0.0", "packed/0/c.0"])
def test_what_is_no_file(saved, file, kind):
    """Links are not followed even to the right bytes; nobody waits for a pipe."""
    at = files_of(saved) / file
    shutil.move(at, saved.parent / "real")
    {
        "link": lambda: at.symlink_to(saved.parent / "real"),
        "pipe": lambda: os.mkfifo(at),
        "directory": at.mkdir,
        "loop": lambda: at.symlink_to(at),
        "device": lambda: at.symlink_to("/dev/zero"),
    }[kind]()
    with watched(saved), pytest.raises(CheckpointError, match=str(saved)):
        checkpoint.restore(saved, ONE)


@pytest.mark.parametrize("folder", ["arrays", "arrays/block", "arrays/block/w", "packed/0", "pieces"])
def test_linked_directories(saved, folder):
    shutil.move(files_of(saved) / folder, saved.parent / "moved")
    (files_of(saved) / folder).symlink_to(saved.parent / "moved")
    with watched(saved), pytest.raises(CheckpointError, match="outside of the checkpoint"):
        checkpoint.restore(saved, ONE)


@pytest.mark.parametrize("name", ["../canary", "/etc/passwd", "arrays/../../../canary", "arrays/./w", "a\\b", "\ud800"])
def test_names_that_lead_outside(saved, name):
    """In the place of every array's name."""
    good = (files_of(saved) / "manifest.json").read_text()
    for array in json.loads(good)["arrays"]:
        sign(saved, good.replace(json.dumps(array), json.dumps(name)).encode())
        with watched(saved), pytest.raises(CheckpointError, match="not the name of a directory inside"):
            checkpoint.restore(saved, ONE)


def test_gaps_and_overlaps(saved):
    """Pieces that count up to the right number of elements but cover some twice would leave others as they were."""
    good = json.loads((files_of(saved) / "manifest.json").read_text())
    rows = good["leaves"]["flat"]["pieces"]
    box = rows[0]["boxes"][0]
    assert box[1][1] > 1 or box[1][0] > 1
    rows[1]["boxes"] = [[[0, 0], *b[1:]] for b in rows[1]["boxes"]]
    sign(saved, json.dumps(good).encode())
    with pytest.raises(CheckpointError, match="flat: its .* boxes .* exactly once"):
        checkpoint.restore(saved, ONE)


def test_the_manager_walks_back_past_malice(saved):
    """restore_latest takes the older good step."""
    manager = checkpoint.Manager(saved.parent / "steps")
    for step in (1, 2):
        manager.save(step, state(), ONE)
    sign(saved.parent / "steps/step_00000002", b"[" * 20_000_000)
    with pytest.warns(RuntimeWarning, match="step 2"):
        step, got, _ = manager.restore_latest(ONE)
    assert step == 1
    assert_same_bits(got, state())
