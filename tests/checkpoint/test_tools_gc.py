"""`ls` tells what is in a directory; `gc` removes what killed saves left, spares live ones and the newest step."""

import io
import json
import os
import shutil
import time

import pytest
import torch

from fmegatron import checkpoint
from fmegatron.checkpoint import Manager
from fmegatron.checkpoint.__main__ import main
from fmegatron.checkpoint.files import leases
from fmegatron.checkpoint.files.notes import Notes
from fmegatron.checkpoint.tools.gc import collect
from fmegatron.checkpoint.tools.ls import listing
from fmegatron.layout import Layout, Mesh
from tests.checkpoint.tokens import files_of, plain

LAYOUTS = {"x": Layout((30, 30), torch.float32, Mesh())}


def call(*argv):
    out, err = io.StringIO(), io.StringIO()
    status = main([str(a) for a in argv], out, err)
    return status, out.getvalue(), err.getvalue()


def state(step):
    return {"x": torch.full((30, 30), float(step))}


@pytest.fixture
def run(tmp_path):
    """Steps 1 to 4."""
    for step in range(1, 5):
        Manager(tmp_path / "run").save(step, state(step), LAYOUTS, metadata={"loss": step / 10})
    return tmp_path / "run"


def step_path(run, step):
    return run / f"step_{step:08d}"


def aged(path, seconds):
    """Everything below a path looks as if it had last changed so long ago."""
    at = time.time() - seconds
    for folder, folders, files in os.walk(path, topdown=False):
        for name in folders + files:
            os.utime(os.path.join(folder, name), (at, at))
    os.utime(path, (at, at))


def leftover(run, name, seconds, complete=False):
    """A hidden directory with the content of step 1, last changed so long ago."""
    shutil.copytree(files_of(step_path(run, 1)), run / name)
    if not complete:
        os.remove(run / name / "COMPLETE")
    aged(run / name, seconds)


def steps(run):
    return [c.step for c in listing(run).checkpoints]


def test_ls(run):
    leftover(run, ".step_00000009.tmp-00aa", 10)
    os.remove(step_path(run, 2) / "COMPLETE")
    (files_of(step_path(run, 3)) / "manifest.json").write_text("{}")
    found = listing(run)
    assert [c.step for c in found.checkpoints] == [1, 2, 3, 4]
    assert [c.problem is None for c in found.checkpoints] == [True, False, False, True]
    one = found.checkpoints[0]
    files = [f for f in files_of(step_path(run, 1)).rglob("*") if f.is_file()]
    assert one.nbytes == sum(f.stat().st_size for f in files) and one.files == len(files)
    assert one.leaves == 1 and one.metadata == {"loss": 0.1} and abs(one.changed - time.time()) < 600
    assert [(x.of, x.kind) for x in found.leftovers] == [("step_00000009", "tmp")]
    status, out, err = call("ls", run)
    assert (status, err) == (1, "") and "not complete: no COMPLETE file" in out and ".step_00000009.tmp-00aa" in out
    lines = out.splitlines()
    assert len({line.index("  complete") for line in lines if "  complete" in line}) == 1  # aligned
    value = json.loads(call("ls", run, "--json")[1])
    assert [c["step"] for c in value["checkpoints"]] == [1, 2, 3, 4] and len(value["leftovers"]) == 1
    assert call("ls", step_path(run, 1))[0] == 0


def test_ls_of_other_names_and_of_nothing(tmp_path, run):
    checkpoint.save(run / "final", state(9), LAYOUTS)
    assert [c.name for c in listing(run).checkpoints][-1] == "final"
    (tmp_path / "empty").mkdir()
    assert listing(tmp_path / "empty").checkpoints == () and call("ls", tmp_path / "empty")[0] == 0
    (tmp_path / "file").write_text("x")
    for path in ("file", "nowhere", "."):
        status, out, err = call("ls", tmp_path / path)
        assert (status, out) == (2, "") and len(err.splitlines()) == 1, path


def test_old_leftovers_go_and_live_saves_stay(run):
    leftover(run, ".step_00000003.tmp-0a", 7200)
    leftover(run, ".step_00000003.gone-0b", 7200, complete=True)
    leftover(run, ".step_00000004.old-0c", 7200, complete=True)  # step 4 has its name: nobody needs this
    leftover(run, ".step_00000005.tmp-0d", 7200)
    os.utime(run / ".step_00000005.tmp-0d/arrays", None)  # one thing in it is new: a save writes there
    leftover(run, ".step_00000006.tmp-0e", 60)
    (run / "notes.txt").write_text("mine")
    (run / ".hidden").mkdir()
    before = sorted(os.listdir(run))
    dry = collect(run, dry_run=True)
    assert sorted(os.listdir(run)) == before and dry.removed > 3000
    done = collect(run)
    assert [a.path for a in done.actions] == [a.path for a in dry.actions] and done.removed == dry.removed
    assert set(before) - set(os.listdir(run)) == {
        ".step_00000003.tmp-0a",
        ".step_00000003.gone-0b",
        ".step_00000004.old-0c",
    }
    assert steps(run) == [1, 2, 3, 4]
    status, out, _ = call("gc", run, "--age", "30s")
    assert status == 0 and "removed" in out and ".step_00000006.tmp-0e" not in os.listdir(run)
    assert ".step_00000005.tmp-0d" in os.listdir(run)


@pytest.mark.parametrize("new", [False, True])
def test_a_resave_killed_between_its_renames(run, new):
    """The only copy of a step lies under a hidden name: it is never removed, and gets its name back when all is old."""
    os.rename(plain(step_path(run, 4)), run / ".step_00000004.old-0f")
    if new:  # the new one is complete, too: it was decided upon
        leftover(run, ".step_00000004.tmp-0f", 0, complete=True)
    holder = f".step_00000004.{'tmp' if new else 'old'}-0f"
    found = listing(run)
    assert [x.name for x in found.leftovers if x.holds] == [holder] and len(found.checkpoints) == 4
    assert call("ls", run)[1].count(f"is in {holder}") == (0 if new else 1)
    collect(run)
    assert holder in os.listdir(run) and not step_path(run, 4).exists()
    for name in os.listdir(run):
        if name.startswith("."):
            aged(run / name, 7200)
    done = collect(run)
    assert {a.kind for a in done.actions} == ({"finish", "remove"} if new else {"finish"})
    assert sorted(os.listdir(run)) == ["latest", *(f"step_{n:08d}" for n in range(1, 5))]
    want = 1.0 if new else 4.0
    assert checkpoint.restore(step_path(run, 4), LAYOUTS)["x"][0, 0] == want


def test_keep_last(run):
    """Only complete steps count, and only steps of a Manager go."""
    checkpoint.save(run / "final", state(9), LAYOUTS, step=0)
    os.remove(step_path(run, 4) / "COMPLETE")
    status, out, _ = call("gc", run, "--keep-last", 1, "--dry-run")
    assert status == 0 and "would remove" in out and len(steps(run)) == 5
    assert call("gc", run, "--keep-last", 1)[0] == 0
    assert sorted(os.listdir(run)) == ["final", "latest", "step_00000003", "step_00000004"]
    assert call("gc", run, "--keep-last", 5)[0] == 0 and len(os.listdir(run)) == 4
    value = json.loads(call("gc", run, "--keep-last", 1, "--json")[1])
    assert value["actions"] == [] and value["removed"] == 0


def test_steps_that_are_pinned_or_read_stay(run):
    Manager(run).pin(1)
    with leases.reading(Notes(run), "step_00000002"):
        status, out, _ = call("gc", run, "--keep-last", 1)
        assert status == 0 and out.count("kept") == 2 and steps(run) == [1, 2, 4]
    collect(run, keep_last=1)
    assert steps(run) == [1, 4]


def test_wrong_requests(run):
    for argv, text in (
        (["--keep-last", "0"], "at least 1"),
        (["--age", "soon"], "wanted a time"),
        (["--nonsense"], "unrecognized"),
    ):
        assert call("gc", run, *argv)[0] == 2, text
    status, _, err = call("gc", step_path(run, 1))
    assert status == 2 and "wanted the directory" in err
    with pytest.raises(ValueError, match="always stays"):
        collect(run, keep_last=0)
    with pytest.raises(ValueError, match="0 or more"):
        collect(run, age=float("nan"))


def test_a_directory_in_which_the_first_save_was_killed(tmp_path):
    """All that there is may be the note of that save: it goes, and the directory is an empty one, not a foreign one."""
    note = tmp_path / leases.saving_note("a", "0" * 12)
    note.write_bytes(leases.NOBODYS)
    assert call("ls", tmp_path)[0] == 0
    status, out, err = call("gc", tmp_path)
    assert (status, err) == (0, "") and str(note) in out and os.listdir(tmp_path) == []
    (tmp_path / "other").write_text("")
    assert "directory without checkpoints" in call("gc", tmp_path)[2]
