"""Inductor's cache on disk: what is written to it is complete or not there, and a broken entry is made again.

Inductor takes a library for done that is there, and a compiler writes it where it belongs, byte by byte: a process that
is killed meanwhile leaves one that no later start can load.
"""

from __future__ import annotations

import hashlib
import os
import re
import shlex
import warnings
from collections.abc import Callable, Iterator
from typing import Any

from fmegatron.files import whole
from fmegatron.step import torch_private

__all__ = ["compiler_settings", "with_mended_cache"]

_ENDS = ("so", "o", "gch", "py", "cpp", "h")
# sh, because a Python that starts takes as long as a compiler that has little to do.
_COMPILER = """#!/bin/sh
# {compiler}, but what it makes (-o) is written beside its place and then takes its name.
left=$#
while [ $left -gt 0 ]; do
  given=$1
  shift
  left=$((left - 1))
  if [ "$before" = -o ]; then
    place=$given
    given=$place.$$.new
  fi
  before=$given
  set -- "$@" "$given"
done
[ -n "$place" ] || exec {compiler} "$@"
{compiler} "$@" && exec mv -f "$place.$$.new" "$place"
status=$?
rm -f "$place.$$.new"
exit $status
"""


def compiler_settings() -> dict[str, Any]:
    """Settings of Inductor under which the C++ compiler writes files that are whole or not there; none on Windows.

    The compiler is a script in the temporary folder of the user's caches, so that all checkouts share what it made.
    """
    compiler = torch_private.cpp_compiler()
    if compiler is None or os.name != "posix":
        return {}
    text = _COMPILER.format(compiler=shlex.quote(compiler)).encode()
    folder = torch_private.inductor_default_folder()
    # Inductor tells compilers apart by their names.
    path = os.path.join(folder, f"whole-{hashlib.sha256(text).hexdigest()[:12]}-{os.path.basename(compiler)}")
    if not os.access(path, os.X_OK):
        os.makedirs(folder, exist_ok=True)
        with whole.whole_file(path, durable=False) as file:
            file.write(text)
            os.fchmod(file.fileno(), 0o755)
    return {"cpp.cxx": (None, path)}


def with_mended_cache(make: Callable[[], Any]) -> Any:
    """`make()`, which compiles; again without the files of the cache that its error names, and without empty ones, as
    long as there are new ones. A warning says which they were."""
    removed: set[str] = set()
    while True:
        try:
            return make()
        except Exception as error:
            named = {*_files_named(error), *_empty_files()} - removed
            if not named:
                raise
            warnings.warn(
                f"the compile cache {torch_private.inductor_folder()}: got an error with {', '.join(sorted(named))} "
                f"({_first_line(error)}), wanted files that are whole; they are removed and made again",
                stacklevel=2,
            )
            for path in named:
                if os.path.exists(path):  # another rank may have removed it
                    os.unlink(path)
            removed |= named
            torch_private.forget_compiled()


def _files_named(error: BaseException) -> Iterator[str]:
    """The files of the cache that an error or one that led to it names. Sources too: they are made again."""
    folders = {torch_private.inductor_folder(), torch_private.inductor_default_folder()}
    files = re.compile(rf"(?:{'|'.join(map(re.escape, folders))})[^\s:;,'\"()]+\.(?:{'|'.join(_ENDS)})\b")
    seen: set[int] = set()
    one: BaseException | None = error
    while one is not None and id(one) not in seen:
        seen.add(id(one))
        yield from (path for path in files.findall(str(one)) if os.path.isfile(path))
        one = one.__cause__ or one.__context__


def _empty_files() -> Iterator[str]:
    """What a crash of the machine left of files, which not every error names."""
    for folder, _, names in os.walk(torch_private.inductor_folder()):
        paths = (os.path.join(folder, name) for name in names if name.rpartition(".")[2] in _ENDS)
        yield from (path for path in paths if os.path.exists(path) and not os.path.getsize(path))


def _first_line(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}".partition("\n")[0][:200]
