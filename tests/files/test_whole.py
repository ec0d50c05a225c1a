"""A file is written whole or not at all: crashes, full disks, file systems that cannot sync a directory."""

import ast
import errno
import os
import subprocess
import sys

import pytest

from fmegatron.checkpoint.files.notes import Notes
from fmegatron.files import whole
from fmegatron.files.disk import content_of, listed
from fmegatron.files.whole import sync_directory, take_name, whole_file, write_whole
from fmegatron.loop import JsonLines
from tests.house import none, sources, syntax


def failing(error, *names):
    """A system call that fails with this error."""

    def call(*args, **kwargs):
        raise OSError(error, os.strerror(error), *names)

    return call


@pytest.fixture(params=[None, b"old"])
def path(request, tmp_path):
    """A name that is free, and one that a file has."""
    if request.param is not None:
        (tmp_path / "a").write_bytes(request.param)
    return tmp_path / "a"


def test_a_file_is_replaced_in_one_step(path):
    before = content_of(path)
    with whole_file(path) as file:
        file.write(b"ne")
        assert content_of(path) == before
        file.write(b"w")
    assert path.read_bytes() == b"new" and listed(path.parent) == ["a"]


def test_a_name_without_a_directory_is_where_the_process_is(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write_whole("a", b"new")
    assert listed(tmp_path) == ["a"]


def test_a_link_is_replaced_and_not_followed(tmp_path):
    (tmp_path / "other").write_bytes(b"other")
    (tmp_path / "a").symlink_to("other")
    write_whole(tmp_path / "a", b"new")
    assert not (tmp_path / "a").is_symlink() and (tmp_path / "other").read_bytes() == b"other"


def test_the_longest_name_that_a_file_may_have(tmp_path):
    write_whole(tmp_path / ("a" * 255), b"new")
    assert listed(tmp_path) == ["a" * 255]


@pytest.mark.parametrize("durable", [True, False])
def test_what_is_synced_and_in_which_order(path, monkeypatch, durable):
    seen, replace = [], os.replace
    monkeypatch.setattr(os, "fsync", lambda fd: seen.append(os.path.basename(os.readlink(f"/proc/self/fd/{fd}"))[:5]))
    monkeypatch.setattr(os, "replace", lambda a, b: (seen.append("rename"), replace(a, b)))
    write_whole(path, b"new", durable)
    assert seen == ([".new-", "rename", path.parent.name[:5]] if durable else ["rename"])


@pytest.mark.parametrize("call", ["fsync", "replace"])
@pytest.mark.parametrize("error", [errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.EACCES])
def test_a_failure_changes_nothing_and_names_the_file(path, monkeypatch, call, error):
    before = content_of(path)
    with monkeypatch.context() as patch:
        patch.setattr(os, call, failing(error))
        with pytest.raises(OSError, match=str(path)) as caught:
            write_whole(path, b"new")
    assert caught.value.errno == error and ".new-" not in str(caught.value)
    assert content_of(path) == before and listed(path.parent) == (["a"] if before else [])


def test_a_disk_that_is_full(path):
    before = content_of(path)
    script = (
        "import resource, signal, sys\n"
        "from fmegatron.files.whole import write_whole\n"
        "signal.signal(signal.SIGXFSZ, signal.SIG_IGN)\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (1000, 1000))\n"
        "try:\n    write_whole(sys.argv[1], bytes(100_000))\n"
        "except OSError as error:\n    print(error)\n"
    )
    out = subprocess.run([sys.executable, "-c", script, str(path)], capture_output=True, text=True, check=True).stdout
    assert out.strip() == f"[Errno {errno.EFBIG}] File too large: {str(path)!r}"
    assert content_of(path) == before and listed(path.parent) == (["a"] if before else [])


def test_an_error_of_the_block_is_what_it_was(path):
    before = content_of(path)
    for error in (ValueError("mine"), OSError(errno.EIO, "of another", "/other"), TimeoutError("late")):
        with pytest.raises(type(error)) as caught, whole_file(path) as file:
            file.write(b"new")
            raise error
        assert caught.value is error
        assert content_of(path) == before and listed(path.parent) == (["a"] if before else [])


@pytest.mark.parametrize("at", ["fsync", "replace"])
def test_a_process_that_dies_leaves_the_old_file_and_what_notes_remove(path, at):
    before = content_of(path)
    script = (
        "import os, sys\nfrom fmegatron.files.whole import write_whole\n"
        f"os.{at} = lambda *args: os._exit(7)\nwrite_whole(sys.argv[1], b'new')\n"
    )
    assert subprocess.run([sys.executable, "-c", script, str(path)], check=False).returncode == 7
    assert content_of(path) == before
    left = [name for name in listed(path.parent) if name != "a"]
    assert len(left) == 1 and left[0].startswith(whole.BESIDE)
    write_whole(path, b"new")
    Notes(path.parent).clean()
    assert listed(path.parent) == ["a"] and path.read_bytes() == b"new"


@pytest.mark.parametrize("error", [errno.EINVAL, errno.ENOTSUP])
def test_a_file_system_that_cannot_sync_a_directory(path, monkeypatch, error):
    real = os.fsync
    fail = failing(error)
    monkeypatch.setattr(os, "fsync", lambda fd: fail() if os.path.isdir(f"/proc/self/fd/{fd}") else real(fd))
    write_whole(path, b"new")
    sync_directory(path.parent)
    assert path.read_bytes() == b"new"


def test_a_directory_that_fails_to_be_synced_is_an_error(tmp_path, monkeypatch):
    monkeypatch.setattr(os, "fsync", failing(errno.EIO))
    with pytest.raises(OSError, match=os.strerror(errno.EIO)):
        sync_directory(tmp_path)
    with pytest.raises(OSError, match=os.strerror(errno.EINVAL)), whole_file(tmp_path / "a"):
        monkeypatch.setattr(os, "fsync", failing(errno.EINVAL))  # of a file, that is no answer


def test_a_directory_takes_a_name_and_never_that_of_a_full_one(tmp_path):
    for name in ("draft", "next", "full"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "x").write_text(name)
    take_name(tmp_path / "draft", tmp_path / "new")
    assert (tmp_path / "new/x").read_text() == "draft" and not (tmp_path / "draft").exists()
    with pytest.raises(OSError, match="full"):
        take_name(tmp_path / "next", tmp_path / "full")
    assert (tmp_path / "full/x").read_text() == "full"


def test_the_records_of_a_run_are_on_the_disk_before_they_take_the_name(tmp_path, monkeypatch):
    """Without that a power cut after a resume leaves an empty file for all that the run had recorded."""
    log = JsonLines(tmp_path / "metrics.jsonl")
    log.write(1, {"loss": 1.0})
    log.close()
    seen, fsync, replace = [], os.fsync, os.replace
    monkeypatch.setattr(os, "fsync", lambda fd: (seen.append("sync"), fsync(fd)))
    monkeypatch.setattr(os, "replace", lambda a, b: (seen.append("rename"), replace(a, b)))
    log = JsonLines(tmp_path / "metrics.jsonl", after=1)
    log.write(2, {"loss": 0.5})
    log.close()
    assert seen == ["sync", "rename", "sync"]


# Who renames besides: the commit of a checkpoint, which exchanges directories.
MAY = {
    f"fmegatron/{at}.py" for at in ("files/whole", *(f"checkpoint/files/{n}" for n in ("folder", "probe", "siblings")))
}


@pytest.mark.medium
def test_nobody_else_renames():
    def offences():
        for path in sources("fmegatron"):
            for node in ast.walk(syntax(path)):
                of = isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id
                if of in ("os", "shutil") and node.attr in ("replace", "rename", "renames", "move"):
                    if path.as_posix() not in MAY:
                        yield f"{path}:{node.lineno}: {of}.{node.attr}; use fmegatron.files.whole"

    none(offences())
