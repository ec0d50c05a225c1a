"""A program in a fork sees what the same program sees in an interpreter of its own."""

import json
import os
import signal
import subprocess
import sys

import pytest

from tests.house import ROOT

# What a program knows of itself, and how it ends.
PROGRAM = """
import atexit, json, os, sys, threading, time
import shown

class Mine:
    pass

@atexit.register
def last():
    print("exit handler", Mine.__module__, flush=True)

print(json.dumps({
    "argv": sys.argv, "main": __name__, "mine": sys.modules["__main__"].Mine is Mine, "name": shown.NAME,
    "cwd": os.getcwd(), "colour": os.environ.get("COLOUR"), "home": os.environ.get("HOME"), "tty": sys.stdout.isatty(),
    "session": os.getsid(0) == os.getpid(), "read": sys.stdin.readline(), "threads": threading.active_count(),
}))
print("to stderr", file=sys.stderr)
threading.Thread(target=lambda: (time.sleep(0.05), print("thread", Mine.__name__))).start()
sys.exit(len(sys.argv))
"""


@pytest.fixture(params=["own interpreter", "fork"])
def popen(request, python):
    return subprocess.Popen if request.param == "own interpreter" else python.popen


@pytest.mark.parametrize("kind", ["script", "-c", "-m"])
def test_what_a_program_sees(popen, kind, tmp_path):
    path = tmp_path / "program.py"
    path.write_text(PROGRAM)
    (tmp_path / "shown.py").write_text("NAME = 'a module beside the script'")
    command = {"script": [path], "-c": ["-c", PROGRAM], "-m": ["-m", "program"]}[kind]
    pipe = subprocess.PIPE
    process = popen(
        [sys.executable, *command, "one", "two"], stdin=pipe, stdout=pipe, stderr=pipe, text=True, cwd=tmp_path,
        env={"PYTHONPATH": str(ROOT), "COLOUR": "red"}, start_new_session=True,
    )  # fmt: skip
    out, err = process.communicate("a line\n", timeout=600)
    first = "-c" if kind == "-c" else str(path)
    known = {
        **{"argv": [first, "one", "two"], "main": "__main__", "mine": True, "name": "a module beside the script"},
        **{"cwd": str(tmp_path), "colour": "red", "home": None, "tty": False, "session": True, "read": "a line\n"},
    }
    lines = out.splitlines()
    assert process.returncode == 3 and err == "to stderr\n"
    assert json.loads(lines[0]) == known | {"threads": 1}
    assert lines[1:] == ["thread Mine", "exit handler __main__"]


def test_errors_signals_and_files_by_number(popen, tmp_path):
    reads, writes = os.pipe()
    code = "import os, signal, sys; os.write(int(sys.argv[1]), b'here'); signal.pause()"
    with popen([sys.executable, "-c", code, str(writes)], pass_fds=[writes], stderr=subprocess.PIPE) as process:
        assert os.read(reads, 4) == b"here" and process.poll() is None
        process.send_signal(signal.SIGINT)
        assert process.stderr.read().endswith(b"KeyboardInterrupt\n")
    assert process.returncode in (-signal.SIGINT, 1)  # 1: exit handlers of torch._dynamo may run code, as everywhere
    with popen([sys.executable, "-c", "import os; os.kill(os.getpid(), 15)"]) as process:
        pass
    assert process.returncode == -signal.SIGTERM
    with (tmp_path / "errors").open("w+") as errors:
        with popen([sys.executable, "-c", "1 / 0"], stderr=errors) as process:
            pass
        errors.seek(0)
        assert process.returncode == 1 and errors.read().endswith("ZeroDivisionError: division by zero\n")
    os.close(reads)
    os.close(writes)
