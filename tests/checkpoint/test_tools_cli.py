"""The command line as a whole: every command, its JSON, its exit status; one line for an error, never a traceback."""

import io
import json
import os
import random
import sys

import pytest
import torch

from fmegatron import checkpoint
from fmegatron.checkpoint.__main__ import main, parser
from fmegatron.layout import Layout, Mesh
from tests.checkpoint.tokens import files_of, reseal

COMMANDS = ("ls", "show", "verify", "diff", "reshard", "export", "gc")


def call(*argv):
    out, err = io.StringIO(), io.StringIO()
    status = main([str(a) for a in argv], out, err)
    return status, out.getvalue(), err.getvalue()


def arguments(command, path, tmp_path):
    """A full use of a command."""
    extra = {
        "ls": [],
        "show": ["--stats", "--layouts"],
        "verify": [],
        "diff": [path],
        "reshard": [tmp_path / f"r{random.random()}", "--mesh", "tp=2"],
        "export": [tmp_path / f"x{random.random()}"],
        "gc": [],
    }[command]
    return [command, os.path.dirname(path) if command == "gc" else path, *extra]


@pytest.fixture
def saved(tmp_path):
    layouts = {"w": Layout((200, 300), torch.float32, Mesh(tp=1), ("tp",)), "n": Layout((3,), torch.bfloat16, Mesh())}
    state = {"w": torch.randn(200, 300), "n": torch.ones(3).bfloat16()}
    checkpoint.save(tmp_path / "run/step_00000001", state, layouts, step=1, metadata={"deep": {"x": [1.5, None]}})
    return str(tmp_path / "run/step_00000001")


@pytest.mark.parametrize("command", COMMANDS)
def test_text_and_json(saved, tmp_path, command):
    status, out, err = call(*arguments(command, saved, tmp_path))
    assert (status, err) == (0, "") and out and "\x1b" not in out
    status, out, err = call(*arguments(command, saved, tmp_path), "--json")
    assert (status, err) == (0, "") and len(out.splitlines()) == 1 and isinstance(json.loads(out), dict)


@pytest.mark.parametrize("command", COMMANDS)
def test_nothing_there(saved, tmp_path, command):
    status, out, err = call(*arguments(command, str(tmp_path / "run/none/none"), tmp_path))
    assert (status, out) == (2, "") and len(err.splitlines()) == 1 and err.startswith(f"{command}: ")
    status, out, err = call(*arguments(command, str(tmp_path / "run/none/none"), tmp_path), "--json")
    assert status == 2 and set(json.loads(out)) == {"error", "damaged"}


@pytest.mark.parametrize("command", COMMANDS)
def test_wrong_use_and_help(command, capsys):
    assert main([command]) == 2 and main([command, "--no-such"]) == 2
    assert "usage: python -m fmegatron.checkpoint" in capsys.readouterr().err
    assert main([command, "--help"]) == 0 and command in capsys.readouterr().out
    assert main([]) == 2 and main(["frobnicate"]) == 2
    assert "frobnicate" in capsys.readouterr().err and parser().prog.startswith("python -m")


HOSTILE = (
    lambda m: "not json",
    lambda m: json.dumps({**m, "step": "x" * 10_000}),
    lambda m: json.dumps({**m, "leaves": []}),
    lambda m: json.dumps({**m, "meshes": [{"names": ["tp"], "sizes": [1 << 61], "digits": [[1 << 61, 1]]}]}),
    lambda m: json.dumps({**m, "meshes": ["\x1b[31m"]}),
    lambda m: json.dumps({**m, "meshes": [{"names": ["\x1b[31m"], "sizes": [1], "digits": [[1, 1]]}] * 2}),
    lambda m: json.dumps({**m, "arrays": {"../../etc": next(iter(m["arrays"].values()))}}),
    lambda m: json.dumps({**m, "metadata": {"a\nb\x1b[2J": "\x00\x1b]0;evil\x07" * 50}}),
)


@pytest.mark.parametrize("make", range(len(HOSTILE)))
def test_a_hostile_manifest(saved, tmp_path, make):
    """Sealed with a right marker: an error of one line or a good answer, nothing that a terminal would obey."""
    with open(files_of(saved) / "manifest.json") as f:
        text = HOSTILE[make](json.load(f)).encode()
    reseal(files_of(saved), text)
    for command in COMMANDS:
        status, out, err = call(*arguments(command, saved, tmp_path))
        assert status in (0, 1, 2) and "Traceback" not in err and len(err.splitlines()) <= 1, (command, err)
        assert all(c.isprintable() or c == "\n" for c in out + err), (command, out, err)
        assert "evil" not in out or "\\x07" in out or "..." in out


@pytest.mark.medium
def test_random_directories(tmp_path):
    """Files of noise under the right names never lead to a traceback."""
    generator = random.Random(1)
    for trial in range(30):
        root = tmp_path / f"run{trial}" / "step_00000001"
        root.mkdir(parents=True)
        for name in ("COMPLETE", "manifest.json", "digests.bin", "arrays"):
            kind = generator.randrange(4)
            if kind == 0:
                (root / name).write_bytes(generator.randbytes(generator.randrange(300)))
            elif kind == 1:
                (root / name).mkdir()
            elif kind == 2:
                (root / name).symlink_to("/etc/passwd")
        for command in COMMANDS:
            status, out, err = call(*arguments(command, str(root), tmp_path))
            assert status in (0, 1, 2) and len(err.splitlines()) <= 1 and "root:" not in out + err, (command, err)
            assert status != 0 or command == "gc"


def change_first_byte(file):
    """Whatever it was, it is another one now."""
    with open(file, "r+b") as f:
        byte = f.read(1)[0]
        f.seek(0)
        f.write(bytes([byte ^ 0xFF]))


def test_a_process(saved, python):
    """As a user runs it: the status is the exit status."""
    change_first_byte(files_of(saved) / "digests.bin")
    command = [sys.executable, "-m", "fmegatron.checkpoint", "verify", saved]
    done = python.run(command, timeout=600)
    assert done.returncode == 1 and "digests.bin" in done.stdout and done.stderr == ""


@pytest.mark.parametrize("damaged", [False, True])
def test_a_reader_that_goes_away(saved, damaged):
    """`verify ... | head`: no traceback, and the status is still that of what was found."""
    if damaged:
        change_first_byte(files_of(saved) / "digests.bin")
    reader, writer = os.pipe()
    os.close(reader)
    err = io.StringIO()
    with open(writer, "w") as out:
        assert main(["verify", saved], out, err) == damaged and err.getvalue() == ""
