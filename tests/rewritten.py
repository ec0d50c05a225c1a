"""Workers of a run that begin in a new clone rewrite each a part of the test files, and read the rest of the others.

pytest rewrites the assertions of a file when it imports it, and keeps the result beside the file. Workers begin at the
same time, with the same file: without this each of them rewrites all. A file whose result is not there yet when a
worker comes to it is rewritten then, as ever.
"""

import sys
from pathlib import Path

import pytest
from _pytest.assertion import rewrite  # private: pytest has no other way to rewrite without importing


def share(config: pytest.Config, root: Path, worker: int, workers: int) -> int:
    """Rewrite one of `workers` parts of the test files below `root` that have no result; how many that were."""
    if sys.dont_write_bytecode:
        return 0
    state, made = config.stash[rewrite.assertstate_key], 0
    for path in sorted(root.rglob("test_*.py"))[worker::workers]:
        result = rewrite.get_cache_dir(path) / (path.stem + rewrite.PYC_TAIL)
        if rewrite._read_pyc(path, result) is None and rewrite.try_makedirs(result.parent):
            source, code = rewrite._rewrite_test(path, config)
            made += rewrite._write_pyc(state, code, source, result)
    return made
