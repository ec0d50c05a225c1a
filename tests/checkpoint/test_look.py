"""What cannot be looked at is not "not there": errors are tried again, then raised, and never taken for an answer."""

import ast
import builtins
import errno
import os
import re
import stat
import subprocess
import sys
import warnings

import pytest
import torch

from fmegatron import checkpoint
from fmegatron.checkpoint import CheckpointError, LocalReplicas, Manager
from fmegatron.checkpoint.manage.tracker import read_latest
from fmegatron.checkpoint.tools.ls import listing
from fmegatron.checkpoint.writing import plan
from fmegatron.files import disk as looks
from fmegatron.files import owners
from fmegatron.files.disk import files_below, is_there, look, names_in
from fmegatron.layout import Layout, Mesh
from tests.checkpoint.fake_world import assert_same_bits, run
from tests.checkpoint.test_manager import ONE, TWO, state
from tests.checkpoint.tokens import files_of
from tests.house import ROOT, sources, syntax

TRANSIENT = [errno.EIO, errno.ESTALE, errno.ETIMEDOUT]
UNSEEN = [*TRANSIENT, errno.EACCES, errno.EMFILE, errno.ENODEV, errno.ENXIO]


@pytest.fixture(autouse=True)
def _quick(monkeypatch):
    monkeypatch.setattr(looks, "PAUSES_S", (0.0, 0.001, 0.0))


class Trouble:
    """All that looks at files below a path fails: `times` calls (None: for ever), of `kinds` or of all kinds."""

    KINDS = ("stat", "lstat", "listdir", "scandir", "open")

    def __init__(self, patch, below, error, times=None, kinds=KINDS):
        self.below, self.error, self.left, self.seen = str(below), error, times, []
        for kind in kinds:
            patch.setattr(os, kind, self.wrap(kind, getattr(os, kind)))
        if "open" in kinds:
            patch.setattr(builtins, "open", self.wrap("open()", open))

    def wrap(self, kind, real):
        def call(path, *args, **kwargs):
            if self.hits(path, kwargs.get("dir_fd")) and self.left != 0:
                self.seen.append((kind, path))
                if self.left is not None:
                    self.left -= 1
                raise OSError(self.error, os.strerror(self.error), path)
            return real(path, *args, **kwargs)

        return call

    def hits(self, path, dir_fd):
        if isinstance(path, int):
            return False
        text = os.fspath(path)
        if dir_fd is not None:
            text = os.path.join(os.readlink(f"/proc/self/fd/{dir_fd}"), text)
        return text == self.below or text.startswith(f"{self.below}/")


@pytest.fixture
def steps(tmp_path, monkeypatch):
    """A directory with steps 1 and 2."""
    monkeypatch.setattr(plan, "MOST_SMALL", 0)  # the small leaves are packed
    with Manager(tmp_path / "run") as manager:
        for step in (1, 2):
            manager.save(step, state(step), ONE)
    return tmp_path / "run"


# ---- the one function


def test_what_counts_as_an_answer():
    def fails(error, times):
        left = [times]

        def ask():
            if left[0]:
                left[0] -= 1
                raise OSError(error, os.strerror(error), "/x")
            return "seen"

        return ask

    for error in (errno.ENOENT, errno.ENOTDIR):
        assert look(fails(error, 9), "absent") == "absent"
        with pytest.raises(OSError, match="/x"):
            look(fails(error, 9))
    for error in TRANSIENT:
        assert look(fails(error, 3), "absent") == "seen"
        with pytest.raises(OSError, match=f"{os.strerror(error)}: '/x'"):
            look(fails(error, 4), "absent")
    for error in (errno.EACCES, errno.EPERM, errno.EMFILE, errno.ELOOP, errno.ENAMETOOLONG):
        with pytest.raises(OSError, match="/x"):
            look(fails(error, 1), "absent")
    assert names_in("/no/such") == [] and not is_there("/dev/null/x") and is_there("/dev/null")
    assert list(files_below("/no/such")) == []


def test_a_walk_tells_what_it_cannot_see(tmp_path, monkeypatch):
    """`os.walk` leaves out what it cannot list: a checkpoint's directory would be made durable without it."""
    (tmp_path / "a/b").mkdir(parents=True)
    with monkeypatch.context() as patch:
        Trouble(patch, tmp_path / "a/b", errno.EACCES)
        with pytest.raises(PermissionError):
            list(files_below(str(tmp_path)))


# ---- a run that starts


@pytest.mark.parametrize("error", UNSEEN, ids=errno.errorcode.get)
@pytest.mark.parametrize("where", ["run", "run/step_00000002", "run/step_00000002/COMPLETE"])
def test_a_run_does_not_go_back_or_start_anew(steps, monkeypatch, error, where):
    """The newest step, its marker, or the directory above cannot be seen: an error that names it, and no older step."""
    with monkeypatch.context() as patch:
        Trouble(patch, steps.parent / where, error)
        for call in (
            lambda: Manager(steps).restore_latest(ONE),
            lambda: Manager(steps).latest(),
            lambda: Manager(steps).steps(),
        ):
            with pytest.raises((RuntimeError, OSError), match=f"{os.strerror(error)}.*{steps}") as got:
                call()
            assert not isinstance(got.value, CheckpointError)
        if where.endswith("COMPLETE"):  # `ls` shows what it can
            assert [c.problem is None for c in listing(steps).checkpoints] == [True, False]
            assert os.strerror(error) in listing(steps).checkpoints[1].problem
    assert_same_bits(Manager(steps).restore_latest(ONE)[1], state(2))


@pytest.mark.parametrize("error", TRANSIENT, ids=errno.errorcode.get)
@pytest.mark.parametrize("kind", Trouble.KINDS)
def test_a_hiccup_is_tried_again(steps, monkeypatch, error, kind):
    trouble = Trouble(monkeypatch, steps, error, 3, (kind,))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        step, got, _ = Manager(steps).restore_latest(ONE)
    assert step == 2 and (len(trouble.seen) == 3 or kind == "scandir")
    assert_same_bits(got, state(2))


@pytest.mark.long
@pytest.mark.parametrize("error", UNSEEN, ids=errno.errorcode.get)
@pytest.mark.parametrize("file", ["COMPLETE", "manifest.json", "digests.bin", "arrays/w/c.0.0", "packed/0/c.0"])
def test_files_that_cannot_be_read_are_no_damage(steps, monkeypatch, error, file):
    """Only what a file holds, or that it is gone, makes a step damaged; else an older one would be trained on."""
    Trouble(monkeypatch, files_of(steps / "step_00000002") / file, error, kinds=("open",))
    with pytest.raises(RuntimeError, match=f"{os.strerror(error)}; whether it is good cannot be told.*{file}"):
        Manager(steps).restore_latest(ONE)
    assert_same_bits(Manager(steps).restore(1, ONE)[0], state(1))


@pytest.mark.parametrize("error", [errno.ENOENT, errno.ELOOP], ids=errno.errorcode.get)
def test_what_is_gone_is_gone(steps, monkeypatch, error):
    """The other side: these say something about the step, and an older one is restored, with a warning."""
    Trouble(monkeypatch, files_of(steps / "step_00000002") / "arrays/w/c.0.0", error, kinds=("open",))
    with pytest.warns(RuntimeWarning, match="skipped the checkpoint of step 2: w: its chunk file"):
        assert Manager(steps).restore_latest(ONE)[0] == 1


@pytest.mark.parametrize("file", ["manifest.json", "digests.bin", "arrays/w/c.0.0"])
def test_a_socket_in_the_place_of_a_file_is_damage(steps, file):
    """It cannot be opened for the same errno as a disk that is away; what it is tells the two."""
    os.remove(files_of(steps / "step_00000002") / file)
    os.mknod(files_of(steps / "step_00000002") / file, stat.S_IFSOCK | 0o600)
    with pytest.warns(RuntimeWarning, match=f"skipped the checkpoint of step 2: .*{file}.*is no regular file"):
        assert Manager(steps).restore_latest(ONE)[0] == 1


def test_all_ranks_hear_of_it(steps, monkeypatch):
    """Also of what only rank 0 looks at: none waits for it for ever."""
    with monkeypatch.context() as patch:
        Trouble(patch, steps / "step_00000002", errno.EACCES)
        for call in (lambda m: m.latest(), lambda m: m.restore_latest(TWO)):
            got = run(2, lambda world: call(Manager(steps, world=world)))  # noqa: B023
            assert all(isinstance(e, RuntimeError) and "Permission denied" in str(e) for e in got), got


def test_a_real_directory_of_somebody_else(steps, python):
    """No pretence: another user, who may not look into the newest step, and then may."""
    code = (
        "import os, sys\n"
        "from fmegatron.checkpoint import Manager\n"
        "from tests.checkpoint.test_manager import ONE\n"
        "if os.getuid() == 0:\n"
        "    os.setgid(65534)\n"
        "    os.setuid(65534)\n"
        "for line in sys.stdin:\n"
        "    try:\n"
        "        print(Manager(sys.argv[1]).restore_latest(ONE)[0], flush=True)\n"
        "    except RuntimeError as error:\n"
        "        print(error, flush=True)\n"
    )
    for path in (steps, steps.parent):
        path.chmod(0o755)
    environment, pipe = {**os.environ, "PYTHONPATH": str(ROOT), "PYTHONWARNINGS": "ignore"}, subprocess.PIPE
    command = [sys.executable, "-c", code, str(steps)]
    other = python.popen(command, env=environment, cwd=ROOT, stdin=pipe, stdout=pipe, text=True)
    try:
        for mode, words in ((0o000, f"Permission denied: '{steps}/step_00000002"), (0o755, "2\n")):
            (steps / "step_00000002").chmod(mode)
            other.stdin.write("\n")
            other.stdin.flush()
            assert words in other.stdout.readline()
    finally:
        (steps / "step_00000002").chmod(0o755)
        other.kill()
        other.communicate()


# ---- a run that saves


@pytest.mark.parametrize("error", [errno.EACCES, errno.EIO], ids=errno.errorcode.get)
def test_a_save_that_cannot_see_newer_steps_is_no_save(steps, monkeypatch, error):
    """It might be below the newest; but what is older than the step that is saved does not matter."""
    with monkeypatch.context() as patch:
        Trouble(patch, steps / "step_00000002", error, kinds=("open",))
        with pytest.raises(RuntimeError, match=os.strerror(error)):
            Manager(steps).save(1, state(1), ONE)
        with warnings.catch_warnings(record=True) as caught, Manager(steps, keep=1) as manager:
            warnings.simplefilter("always")
            manager.save(3, state(3), ONE)
        said = f"(?s)(what killed saves left|old checkpoints) could not be .*{os.strerror(error)}|tracker"
        assert any("old checkpoints could not be deleted" in str(w.message) for w in caught)
        assert all(re.search(said, str(w.message)) for w in caught)
    assert Manager(steps).steps() == [1, 2, 3]


def test_metrics_that_cannot_be_read_do_not_make_a_step_worse(steps, monkeypatch):
    """Retention by a metric: it is put off, and the best one is not deleted because its manifest could not be read."""
    keep = checkpoint.Keep(last=1, best=("loss", "min", 1))
    with Manager(steps, keep=None) as manager:
        manager.save(3, state(3), ONE, metrics={"loss": 0.5})
        manager.save(4, state(4), ONE, metrics={"loss": 0.9})
    with monkeypatch.context() as patch:
        Trouble(patch, files_of(steps / "step_00000003") / "manifest.json", errno.EIO, kinds=("open",))
        with pytest.warns(RuntimeWarning, match="old checkpoints could not be deleted"):
            with Manager(steps, keep=keep) as manager:
                manager.save(5, state(5), ONE, metrics={"loss": 0.8})
    assert 3 in Manager(steps).steps()
    with Manager(steps, keep=keep) as manager:
        manager.save(6, state(6), ONE, metrics={"loss": 0.8})
    assert manager.steps() == [3, 6]


def test_the_tracker(steps, monkeypatch):
    Trouble(monkeypatch, steps / "latest", errno.EACCES)
    with pytest.raises(PermissionError, match="latest"):
        read_latest(steps)


# ---- stale handles of a network file system


class Stale:
    """Every open relative to the directory fails as if its handle had gone stale, until it is opened anew."""

    def __init__(self, patch, path):
        self.path, self.real, self.real_dup2, self.good, self.count = str(path), os.open, os.dup2, set(), 0
        patch.setattr(os, "open", self.open)
        patch.setattr(os, "dup2", self.dup2)

    def open(self, path, *args, dir_fd=None, **kwargs):
        if dir_fd is not None and dir_fd not in self.good and os.readlink(f"/proc/self/fd/{dir_fd}") == self.path:
            self.count += 1
            raise OSError(errno.ESTALE, os.strerror(errno.ESTALE), path)
        return self.real(path, *args, dir_fd=dir_fd, **kwargs)

    def dup2(self, fd, fd2, **kwargs):
        self.good.add(fd2)
        return self.real_dup2(fd, fd2, **kwargs)


def test_a_server_that_has_restarted(steps, monkeypatch):
    with warnings.catch_warnings(), monkeypatch.context() as patch:
        warnings.simplefilter("error")
        stale = Stale(patch, files_of(steps / "step_00000002"))
        assert Manager(steps).restore_latest(ONE)[0] == 2
    assert stale.count


def test_a_stale_handle_of_a_directory_that_was_replaced(steps, monkeypatch):
    """Saved again by another node: its handle is stale for good. No damage; the save that is there now is read."""
    real, once = os.open, []

    def open_(path, *args, dir_fd=None, **kwargs):
        if dir_fd is not None and str(path).startswith("arrays/w/c") and not once:
            once.append(path)
            checkpoint.save(steps / "step_00000002", state(7), ONE)
            raise OSError(errno.ESTALE, os.strerror(errno.ESTALE), path)
        return real(path, *args, dir_fd=dir_fd, **kwargs)

    monkeypatch.setattr(os, "open", open_)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        step, got, _ = Manager(steps).restore_latest(ONE)
    assert once and step == 2
    assert_same_bits(got, state(7))


# ---- local replicas


def test_local_replicas_and_what_cannot_be_seen(tmp_path, monkeypatch):
    """Nothing on the own disk and no way to see the global checkpoints: not the error after which a run starts anew."""
    layouts = {"w": Layout((4,), torch.float32, Mesh())}
    local, manager = LocalReplicas(tmp_path / "ram", "run", copies=1), Manager(tmp_path / "global")
    manager.save(1, {"w": torch.ones(4)}, layouts)
    with monkeypatch.context() as patch:
        Trouble(patch, tmp_path / "global/step_00000001", errno.EACCES)
        with pytest.warns(RuntimeWarning, match="cannot be looked at, and may be newer"):
            with pytest.raises(RuntimeError, match="do not start anew") as got:
                local.restore_latest(layouts, fallback=manager)
        assert not isinstance(got.value, CheckpointError)
    local.save(2, {"w": torch.full((4,), 2.0)}, layouts)
    with monkeypatch.context() as patch:
        Trouble(patch, tmp_path / "ram", errno.EACCES)
        with pytest.warns(RuntimeWarning) as caught:
            assert local.restore_latest(layouts, fallback=manager)[0] == 1
        assert any("ram/run: cannot be read" in str(w.message) for w in caught)
        with pytest.warns(RuntimeWarning), pytest.raises(RuntimeError, match="do not start anew"):
            local.restore_latest(layouts)
    with monkeypatch.context() as patch:
        Trouble(patch, tmp_path / "global/step_00000001", errno.EACCES)
        with pytest.warns(RuntimeWarning, match="cannot be looked at, and may be newer"):
            assert local.restore_latest(layouts, fallback=manager)[0] == 2
    assert local.restore_latest(layouts, fallback=manager)[0] == 2


def test_a_replica_in_use_that_cannot_be_looked_at_is_not_removed(tmp_path, monkeypatch):
    layouts = {"w": Layout((4,), torch.float32, Mesh())}
    local = LocalReplicas(tmp_path, "run", copies=1)
    local.save(1, {"w": torch.ones(4)}, layouts)
    hidden = tmp_path / "run/.step_00000002.rank_00000.saving-0123456789ab"
    hidden.write_text("of another process")
    Trouble(monkeypatch, hidden, errno.EACCES)
    with pytest.raises(RuntimeError, match="Permission denied"):
        local.save(2, {"w": torch.ones(4)}, layouts)
    assert hidden in tmp_path.joinpath("run").iterdir()


# ---- everywhere


BLIND = {
    "exists",
    "lexists",
    "isdir",
    "isfile",
    "islink",
    "is_dir",
    "is_file",
    "is_symlink",
    "getmtime",
    "glob",
    "rglob",
}
MAY = {
    ("fmegatron/checkpoint/files/folder.py", "is_symlink"): "of a name that was listed: the listing tells",
    ("fmegatron/checkpoint/files/trees.py", "islink"): "what is removed is removed one way or the other, or an error",
}


@pytest.mark.parametrize("room", ["files", "checkpoint", "interop", "data", "loop", "model"])
def test_nobody_asks_a_question_that_swallows_errors(room):
    """`os.path.exists` and its kin say no when they cannot look."""
    found = []
    for path in sources(f"fmegatron/{room}"):
        for node in ast.walk(syntax(path)):
            ours = isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "disk"
            if (
                isinstance(node, ast.Attribute)
                and node.attr in BLIND
                and not ours
                and (path.as_posix(), node.attr) not in MAY
            ):
                found.append(f"{path}:{node.lineno}: {node.attr}; use fmegatron/files/disk.py")
            if isinstance(node, ast.Call) and getattr(node.func, "attr", "") in ("walk", "fwalk"):
                module = getattr(getattr(node.func, "value", None), "id", "")
                if (
                    module == "os"
                    and not any(k.arg == "onerror" for k in node.keywords)
                    and "progress" not in path.name
                ):
                    found.append(f"{path}:{node.lineno}: os.{node.func.attr} without onerror; use files_below")
    assert found == []


def test_a_process_that_may_not_be_asked_after_lives(monkeypatch):
    """Another user's: the signal is refused, which says that there is somebody."""

    def refused(pid, signal):
        raise PermissionError(errno.EPERM, "Operation not permitted")

    whose = owners.owner()
    monkeypatch.setattr(os, "kill", refused)
    monkeypatch.setattr(owners, "_start", lambda pid: None)  # nor is /proc to be read
    assert owners.fate(whose) == "lives"
