"""Changes of a file system as a process makes them, one by one (changes.c, preloaded): counted, written down."""

import ctypes
import functools
import os
import subprocess
import sys
import tempfile
from pathlib import Path

NOTHING, KILL, KILL_GROUP, STOP, KILL_BEHIND_PUBLISH = range(5)  # what comes before a change (the last: behind a move)
COPIES, NO_DIRECTORY_SYNC, NO_LINKS = 1, 2, 4  # what a file system does in place of a rename; what it refuses
POSIX = 0


def preload() -> None:
    """Go on with this program from its start in a process that has changes.c, if this one has not.

    Processes that it starts have it, too. Where there is no C compiler the command says so and ends.
    """
    if hasattr(ctypes.CDLL(None), "changes_arm"):
        return
    library = Path(tempfile.mkdtemp(prefix="fmegatron-changes-")) / "changes.so"
    source = Path(__file__).with_name("changes.c")
    command = [
        os.environ.get("CC", "cc"),
        "-O1",
        "-w",
        "-shared",
        "-fPIC",
        str(source),
        "-o",
        str(library),
        "-ldl",
        "-lpthread",
    ]
    subprocess.run(command, check=True)
    environment = {**os.environ, "LD_PRELOAD": str(library), "OMP_NUM_THREADS": "1"}
    os.execve(sys.executable, [sys.executable, "-m", *_program()], environment)


def _program():
    spec = sys.modules["__main__"].__spec__
    return [spec.name, *sys.argv[1:]]


@functools.cache
def _library():
    library = ctypes.CDLL(None)
    library.changes_arm.argtypes = [ctypes.c_char_p, ctypes.c_long, ctypes.c_int, ctypes.c_int, ctypes.c_char_p]
    library.changes_count.restype = ctypes.c_long
    return library


def arm(folder, before=0, action=NOTHING, worse=POSIX, record=None) -> None:
    """From now on changes below a folder are counted; `action` comes before that number (0: never), but
    KILL_BEHIND_PUBLISH behind that move of a file to COMPLETE.

    worse: what its file system is from now on.  record: a file outside of the folder that gets all changes.
    """
    record = None if record is None else os.fsencode(record)
    _library().changes_arm(os.fsencode(folder), before, action, worse, record)


def count() -> int:
    """Changes since `arm`."""
    return _library().changes_count()


def recorded(path):
    """(number, operation, path, other path or target, offset, data) of each change in a record: what failed has a
    number, too, and is not there."""
    with open(path, "rb") as file:
        while head := file.readline():
            number, op, a, b, offset, size = head.decode().rstrip("\n").split("\t")
            yield int(number), op, a, b, int(offset), file.read(int(size))
