"""Inductor's cache: a compiler that is killed leaves nothing under its name, and what is broken is made again."""

import os
import re
import signal
import subprocess
import sys
import time

import pytest

from fmegatron.step import compile_cache, torch_private

STEP = """
import torch
from fmegatron import step
f = lambda s: {k: (v @ v + i).tanh().cumsum(0) for i, (k, v) in enumerate(s.items())}
print(float(step.jit(f, donate=0)({"a": torch.ones(4, 4)})["a"].sum()))
"""


def start(cache):
    """A new process that compiles a step with this cache."""
    env = {**os.environ, "TORCHINDUCTOR_CACHE_DIR": str(cache)}
    return subprocess.run([sys.executable, "-c", STEP], env=env, capture_output=True, text=True, timeout=600)


@pytest.mark.slow
@pytest.mark.parametrize("ends", [".main.so", pytest.param(".py", marks=pytest.mark.slow)])
def test_an_empty_file_is_made_again(tmp_path, ends):
    first = start(tmp_path)
    assert first.returncode == 0, first.stderr
    files = [path for path in tmp_path.rglob(f"*{ends}") if path.stat().st_size]
    assert files
    for path in files:
        os.truncate(path, 0)
    again = start(tmp_path)
    assert again.returncode == 0, again.stderr
    assert again.stdout == first.stdout and re.search("compile cache .* made again", again.stderr)


def compiler(tmp_path, monkeypatch, what):
    """A compiler that does `what`, as Inductor is given it."""
    real = tmp_path / "odd g++"
    real.write_text(f"#!/bin/sh\n{what}\n")
    real.chmod(0o755)
    monkeypatch.setattr(torch_private, "cpp_compiler", lambda: str(real))
    monkeypatch.setattr(torch_private, "inductor_default_folder", lambda: str(tmp_path / "cache of root"))
    (_, path) = compile_cache.compiler_settings()["cpp.cxx"]
    assert path.startswith(str(tmp_path / "cache of root")) and os.path.basename(path).endswith("g++")
    return path


def test_a_compiler_that_is_killed_leaves_no_library(tmp_path, monkeypatch):
    path = compiler(tmp_path, monkeypatch, 'printf half > "$3"; sleep 60')
    run = subprocess.Popen([path, "x.cpp", "-o", str(tmp_path / "x.so")], start_new_session=True)
    while not list(tmp_path.glob("x.so*")):
        time.sleep(0.02)
    os.killpg(run.pid, signal.SIGKILL)
    run.wait()
    assert not (tmp_path / "x.so").exists()


def test_a_compiler_is_called_as_it_was(tmp_path, monkeypatch):
    path = compiler(
        tmp_path, monkeypatch, 'printf "%s|" "$@"; [ "$1" = bad ] && exit 3; [ "$2" = -o ] && echo > "$3"; :'
    )

    def run(*given):
        return subprocess.run([path, *given], capture_output=True, text=True)

    out = str(tmp_path / "x y.so")
    assert run("--version").stdout == "--version|"
    made = run("a b.cpp", "-o", out, "-DX='1 2'", "$HOME")
    assert re.fullmatch(rf"a b.cpp\|-o\|{re.escape(out)}\.\d+\.new\|-DX='1 2'\|\$HOME\|", made.stdout)
    assert made.returncode == 0 and os.path.exists(out)
    os.unlink(out)
    assert run("bad", "-o", out).returncode == 3 and not list(tmp_path.glob("x y*"))


def test_an_error_of_another_kind_is_raised_as_it_is(tmp_path, monkeypatch):
    monkeypatch.setattr(torch_private, "inductor_folder", lambda: str(tmp_path))
    calls = []

    def make():
        calls.append(1)
        raise ValueError(f"no such thing: {tmp_path}/gone.so")

    with pytest.raises(ValueError, match="no such thing"):
        compile_cache.with_mended_cache(make)
    assert len(calls) == 1


def test_a_file_that_stays_broken_is_made_again_once(tmp_path, monkeypatch):
    monkeypatch.setattr(torch_private, "inductor_folder", lambda: str(tmp_path))
    monkeypatch.setattr(torch_private, "forget_compiled", lambda: None)
    broken = tmp_path / "a" / "b.main.so"
    broken.parent.mkdir()

    def make():
        broken.write_bytes(b"half")
        raise ImportError(f"{broken}: invalid ELF header")

    with pytest.warns(UserWarning, match=r"b\.main\.so .* made again"), pytest.raises(ImportError, match="invalid ELF"):
        compile_cache.with_mended_cache(make)
