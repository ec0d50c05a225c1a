"""Test files are rewritten once for all workers, and are what pytest itself makes of them (tests/rewritten.py)."""

import subprocess
import sys

from tests import rewritten

FILES = {f"test_{name}.py": f"def test_one():\n    assert '{name}' == 'other'\n" for name in "abc"}


def test_pytest_takes_what_was_shared(tmp_path, pytestconfig, monkeypatch):
    """Two parts are all files, a second time there is nothing to do, and a changed file is made again."""
    monkeypatch.setattr(sys, "dont_write_bytecode", False)
    for name, text in FILES.items():
        (tmp_path / name).write_text(text)
    counts = [rewritten.share(pytestconfig, tmp_path, worker, 2) for worker in (0, 1, 0, 1)]
    assert counts == [2, 1, 0, 0]
    (tmp_path / "test_b.py").write_text("def test_two():\n    assert 1 + 1 == 3\n")
    made = {path.name[:6]: path.stat().st_mtime_ns for path in (tmp_path / "__pycache__").iterdir()}
    command = [sys.executable, "-m", "pytest", "-q", "--noconftest", "-p", "no:cacheprovider"]
    environment = {"PATH": "", "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    found = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=300)
    assert "AssertionError: assert 'a' == 'other'" in found.stdout and "assert (1 + 1) == 3" in found.stdout
    now = {path.name[:6]: path.stat().st_mtime_ns for path in (tmp_path / "__pycache__").iterdir()}
    assert {name for name in now if now[name] != made[name]} == {"test_b"}


def test_nothing_is_written_where_python_writes_no_bytecode(tmp_path, pytestconfig, monkeypatch):
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    (tmp_path / "test_a.py").write_text(FILES["test_a.py"])
    assert rewritten.share(pytestconfig, tmp_path, 0, 1) == 0
    assert [path.name for path in tmp_path.iterdir()] == ["test_a.py"]
