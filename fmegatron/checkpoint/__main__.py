"""`python -m fmegatron.checkpoint ls|show|verify|diff|reshard|export|gc PATH ...`: checkpoints from the command line.

What is read may be of another system: whatever `fmegatron.interop.source` recognises.

Exit status: 0 all is well; 1 a difference or damage was found; 2 wrong use, or it could not be done.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from types import MappingProxyType
from typing import Any, TextIO

import torch

from fmegatron.checkpoint.files.commit import Store
from fmegatron.checkpoint.files.format import CheckpointError
from fmegatron.checkpoint.files.saved import again
from fmegatron.checkpoint.files.stores import holding, open_store
from fmegatron.checkpoint.reading.mapping import Rule, copy, drop, rename, take
from fmegatron.checkpoint.reading.rules import fuse, split, stack, transpose, unstack
from fmegatron.checkpoint.reading.source import Foreign, Source
from fmegatron.checkpoint.tools import printed
from fmegatron.checkpoint.tools.differences import diff
from fmegatron.checkpoint.tools.gc import LIVE_SECONDS, collect
from fmegatron.checkpoint.tools.ls import listing, listing_of
from fmegatron.checkpoint.tools.printed import one_line, plain
from fmegatron.checkpoint.tools.resharding import (
    BOUND_BYTES,
    parse_chunks,
    parse_mesh,
    parse_rules,
    plan_of,
    reshard,
    target_layouts,
)
from fmegatron.checkpoint.tools.show import show
from fmegatron.checkpoint.tools.source import open_source
from fmegatron.checkpoint.tools.verification import Report, verify
from fmegatron.interop import export_safetensors, hf, source
from fmegatron.layout import dtypes

GOOD, FOUND, FAILED = 0, 1, 2


def main(argv: Sequence[str] | None = None, out: TextIO | None = None, err: TextIO | None = None) -> int:
    """Run one command; returns the exit status. argv: without the program's name; out, err: the standard ones."""
    try:
        options = parser().parse_args(argv)
    except SystemExit as stop:  # --help, or wrong use, which argparse has reported
        return int(stop.code or 0)
    return run(options.command, options, out or sys.stdout, err or sys.stderr)


def parser() -> argparse.ArgumentParser:
    """The parser of all commands."""
    top = argparse.ArgumentParser(
        prog="python -m fmegatron.checkpoint",
        description="Look at checkpoints, check, compare, rewrite, export and clean them up.",
        epilog="Exit status: 0 all is well; 1 a difference or damage was found; 2 wrong use, or it could not be done.",
    )
    below = top.add_subparsers(dest="command", required=True, metavar="COMMAND")
    add = below.add_parser

    p = add("ls", help="list the checkpoints of a directory, and what killed saves left")
    p.add_argument("path", help="a directory of checkpoints, or a checkpoint")

    p = add("show", help="the tree of leaves with sizes, layouts, statistics")
    p.add_argument("path", help="a checkpoint")
    p.add_argument("pattern", nargs="?", help="only leaves whose path has a match of this regular expression")
    p.add_argument("--stats", action="store_true", help="read the elements: min, max, mean, std, nonfinite, zeros")
    p.add_argument("--layouts", action="store_true", help="the layouts under which the leaves were written")

    p = add("verify", help="read every byte and compare it with its digest; lists every damage")
    p.add_argument("path", help="a checkpoint, or a directory of them")
    p.add_argument("--jobs", type=_positive, help="threads that read (default: the cores, at least 4)")

    p = add("diff", help="compare two checkpoints leaf by leaf")
    p.add_argument("a", help="a checkpoint")
    p.add_argument("b", help="another one")
    p.add_argument("pattern", nargs="?", help="only leaves whose path has a match of this regular expression")
    p.add_argument("--atol", type=_tolerance, default=0.0, help="equal within |a - b| <= atol + rtol * |b|")
    p.add_argument("--rtol", type=_tolerance, default=0.0, help="see --atol; without both, bits must be equal")
    p.add_argument("--ignore", action="append", default=[], choices=["layouts", "metadata", "values"])
    p.add_argument("--read-all", action="store_true", help="read values even where stored digests say they are equal")

    p = add("reshard", help="rewrite a checkpoint's chunks for another layout")
    p.add_argument("src", help="a checkpoint")
    p.add_argument("dst", help="where to write the new one")
    p.add_argument("--mesh", action="append", default=[], help="axes and sizes, e.g. fsdp=4,tp=2; again for a view")
    p.add_argument("--rules", metavar="FILE.json", help="JSON list of [path pattern, spec] rows; the first match wins")
    p.add_argument("--like", metavar="PATH", help="take the layouts of another checkpoint of the same leaves")
    p.add_argument("--chunks", action="append", default=[], metavar="PATTERN=SHAPE", help="e.g. blocks/.*=1x256x1024")
    p.add_argument("--memory", type=_bytes, help="elements held at a time (default 256MiB)")
    p.add_argument("--overwrite", action="store_true", help="replace the checkpoint at DST")

    p = add("export", help="write the leaves as safetensors files, for other programs")
    p.add_argument("src", help="a checkpoint")
    p.add_argument("dst", help="a file (.safetensors), or a directory of shards with an index")
    p.add_argument("pattern", nargs="?", help="only leaves whose path has a match of this regular expression")
    p.add_argument("--rename", action="append", default=[], metavar="REGEX=REPLACEMENT", help="may be given again")
    p.add_argument("--rules", metavar="FILE.json", help='JSON rows [rule, arguments], e.g. ["transpose", ".*", [1, 0]]')
    p.add_argument("--like", metavar="FOLDER", help="as the Hugging Face folder: its names, its other files beside")
    p.add_argument("--prefix", help="the stored subtree that is meant, e.g. params")
    p.add_argument("--cast", metavar="DTYPE", help="floating leaves to this dtype, e.g. bfloat16")
    p.add_argument("--shard", type=_bytes, help="most bytes of a shard (default 5GiB)")

    p = add("gc", help="remove what killed saves left, and old steps if asked")
    p.add_argument("path", help="a directory of checkpoints")
    p.add_argument("--keep-last", type=_positive, metavar="N", help="remove all but the newest N complete steps, too")
    p.add_argument("--age", type=_seconds, help="leftovers unchanged for so long are garbage, e.g. 90s, 30m, 2h (1h)")
    p.add_argument("--watch", type=_seconds, help="look for so long whether owners on other machines live, e.g. 5m (0)")
    p.add_argument("--dry-run", action="store_true", help="say what would be done, and do nothing")

    for p in below.choices.values():
        p.add_argument("--storage", metavar="JSON", help='of URLs, e.g. {"endpoint": ..., "aws_region": ...}')
        p.add_argument("--json", action="store_true", help="one JSON object for machines")
    return top


def _positive(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"got {text!r}, wanted a whole number of at least 1")
    return int(text)


def _tolerance(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 <= value < float("inf"):
        raise argparse.ArgumentTypeError(f"got {text!r}, wanted a number of 0 or more")
    return value


def _bytes(text: str) -> int:
    m = re.fullmatch(r"(\d{1,15})\s*([KMGT]i?B|B?)", text)
    if m is None or int(m[1]) < 1:
        raise argparse.ArgumentTypeError(f"got {text!r}, wanted a size such as 64MiB or 5GiB")
    base = 1024 if "i" in m[2] else 1000
    return int(m[1]) * base ** (" KMGT".index(m[2][0]) if m[2] and m[2] != "B" else 0)


def _seconds(text: str) -> float:
    m = re.fullmatch(r"(\d{1,12})([smhd]?)", text)
    if m is None:
        raise argparse.ArgumentTypeError(f"got {text!r}, wanted a time such as 90s, 30m, 2h or 1d")
    return float(m[1]) * {"": 1, "s": 1, "m": 60, "h": 3600, "d": 86400}[m[2]]


# ---- the commands


def run(name: str, options: argparse.Namespace, out: TextIO, err: TextIO) -> int:
    """Run a command and print its result; returns the exit status. No error leaves this function."""
    status = GOOD
    try:
        status, value, text = again(lambda: _held(name, options))  # with the next save, if it is saved again meanwhile
        if options.json:
            print(json.dumps(plain(value), allow_nan=False), file=out)
        else:
            text(out)
        out.flush()
        return status
    except BrokenPipeError:  # the reader (head, say) has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), out.fileno())
        return status
    except KeyboardInterrupt:
        print("interrupted", file=err)
        return 130
    except (ValueError, OSError, RuntimeError, MemoryError) as error:
        damaged = isinstance(error, CheckpointError)
        if options.json:
            print(json.dumps({"error": one_line(error), "damaged": damaged}), file=out)
        print(f"{name}: {one_line(error)}", file=err)
        return FOUND if damaged else FAILED


def _held(name: str, options: argparse.Namespace) -> Result:
    """Run a command; the steps of a Manager that it reads are not deleted meanwhile."""
    with ExitStack() as options.held:
        return COMMANDS[name](options)


Result = tuple[int, Any, Callable[[TextIO], None]]  # exit status, value for JSON, printer of text


def _ls(options: argparse.Namespace) -> Result:
    foreign = source(options.path)
    found = listing_of(open_source(foreign)) if isinstance(foreign, Foreign) else listing(_place(options, options.path))
    bad = any(c.problem for c in found.checkpoints)
    return (FOUND if bad else GOOD), found.to_json(), lambda out: printed.listing(out, found, time.time())


def _show(options: argparse.Namespace) -> Result:
    found = show(_source(options, options.path), options.pattern, options.stats)
    return GOOD, found.to_json(), lambda out: printed.shown(out, found, options.layouts)


def _verify(options: argparse.Namespace) -> Result:
    if isinstance(foreign := source(options.path), Foreign):
        start = time.perf_counter()
        report = verify(foreign)
        seconds = time.perf_counter() - start
        value = {"good": not report.damages, "seconds": seconds, "checkpoints": [report.to_json()]}
        return (FOUND if report.damages else GOOD), value, lambda out: printed.reports(out, [report], (), seconds)
    store = _place(options, options.path)
    found = listing(store)
    if not found.checkpoints:
        raise ValueError(f"{options.path}: got a directory without checkpoints, wanted some to verify")
    reports: list[Report] = []
    start = time.perf_counter()
    for place in [store.child(c.name) for c in found.checkpoints] if found.is_directory else [store]:
        with holding(place):
            reports.append(verify(place, options.jobs))
    seconds = time.perf_counter() - start
    damaged = any(report.damages for report in reports)
    value = {"good": not damaged, "seconds": seconds, "checkpoints": [report.to_json() for report in reports]}
    return (FOUND if damaged else GOOD), value, lambda out: printed.reports(out, reports, found.leftovers, seconds)


def _diff(options: argparse.Namespace) -> Result:
    found = diff(
        _source(options, options.a),
        _source(options, options.b),
        options.pattern,
        atol=options.atol,
        rtol=options.rtol,
        ignore=frozenset(options.ignore),
        read_all=options.read_all,
    )
    return (GOOD if found.equal else FOUND), found.to_json(), lambda out: printed.difference(out, found)


def _reshard(options: argparse.Namespace) -> Result:
    if not (options.mesh or options.rules or options.like or options.chunks):
        raise ValueError("got no target, wanted --mesh, --rules, --like or --chunks")
    source = _source(options, options.src)
    rules = parse_rules(Path(options.rules).read_text(), options.rules) if options.rules else ()
    like = _source(options, options.like) if options.like else None
    layouts = target_layouts(source, tuple(map(parse_mesh, options.mesh)), rules, like)
    to, bound = _place(options, options.dst), options.memory or BOUND_BYTES
    plans = plan_of(layouts, parse_chunks(options.chunks), bound)
    done = reshard(source, to, plans, bound=bound, overwrite=options.overwrite)
    value = {**vars(done), "layouts": {path: str(layout) for path, layout in layouts.items()}}
    return GOOD, value, lambda out: printed.resharded(out, done, layouts)


def _export(options: argparse.Namespace) -> Result:
    how: dict[str, Any] = {"shard": options.shard} if options.shard else {}
    how["cast"] = parse_dtype(options.cast) if options.cast else None
    opened, renames = _source(options, options.src), parse_renames(options.rename)
    if options.like:
        if options.rules or options.rename or options.pattern:
            raise ValueError("got --like and --rules, --rename or a pattern, wanted --like alone: it has the names")
        done = hf.export(opened, options.dst, like=options.like, prefix=options.prefix, **how)
    else:
        how |= {"rules": _rules(options.rules), "prefix": options.prefix or "", "renames": renames}
        done = export_safetensors(opened, options.dst, options.pattern, **how)
    return GOOD, vars(done), lambda out: _exported(out, done.files, done.tensors, done.nbytes)


def parse_renames(texts: Sequence[str]) -> tuple[tuple[re.Pattern, str], ...]:
    """`REGEX=REPLACEMENT` texts. Raises ValueError.

    >>> [(p.pattern, r) for p, r in parse_renames(["^blocks/=layers."])]
    [('^blocks/', 'layers.')]
    """
    rules = []
    for text in texts:
        pattern, found, replacement = text.partition("=")
        if not found or not pattern:
            raise ValueError(f"got the rename {text!r}, wanted REGEX=REPLACEMENT, e.g. ^params/=")
        try:
            rules.append((re.compile(pattern), replacement))
            rules[-1][0].sub(replacement, "")
        except re.error as error:
            raise ValueError(f"got the rename {text!r}, wanted a regular expression: {error}") from None
    return tuple(rules)


def parse_dtype(text: str) -> torch.dtype:
    """A dtype by torch's name or ours: `bfloat16` or `bf16`. Raises ValueError."""
    found = getattr(torch, text, None)
    return found if isinstance(found, torch.dtype) else dtypes.dtype_from_name(text)


def _exported(out: TextIO, files: Sequence[str], tensors: int, nbytes: int) -> None:
    for file in files:
        print(printed.short(file, 200), file=out)
    print(f"{tensors} tensors, {printed.size(nbytes)}, in {len(files)} files", file=out)


def _rules(path: str | None) -> list[Rule]:
    """The rules of a JSON file: a list of rows, each the name of a rule and its arguments."""
    rows = json.loads(Path(path).read_text(encoding="utf-8")) if path else []
    rules = []
    for row in rows if isinstance(rows, list) else [rows]:
        if not isinstance(row, list) or not row or row[0] not in RULES:
            raise ValueError(
                f"{path}: got {row!r:.80}, wanted rows of a rule's name ({', '.join(RULES)}) and arguments"
            )
        try:
            rules.append(RULES[row[0]](*row[1:]))
        except TypeError as error:
            raise ValueError(f"{path}: {row!r:.80}: got {error}, wanted the arguments of {row[0]}") from None
    return rules


def _gc(options: argparse.Namespace) -> Result:
    age = LIVE_SECONDS if options.age is None else options.age
    how = {"keep_last": options.keep_last, "age": age, "watch": options.watch or 0.0, "dry_run": options.dry_run}
    done = collect(_place(options, options.path), **how)
    return GOOD, done.to_json(), lambda out: printed.collected(out, done)


def _place(options: argparse.Namespace, path: str) -> Store:
    """The Store of a path or URL."""
    given = None
    if options.storage and "://" in path and not path.startswith("file://"):
        given = json.loads(options.storage)
        if type(given) is not dict:
            raise ValueError(f"got --storage {options.storage!r:.60}, wanted a JSON object")
    return open_store(path, given)


def _source(options: argparse.Namespace, path: str) -> Source:
    """The checkpoint at a path, of another system too. ValueError when the path is none: nothing there, or a directory
    of checkpoints.
    """
    if isinstance(foreign := source(path), Foreign):
        options.held.enter_context((found := open_source(foreign)).pinned())
        return found
    store = _place(options, path)
    found = listing(store)
    if found.is_directory:
        names = ", ".join(c.name for c in found.checkpoints[-3:])
        raise ValueError(f"{path}: got a directory of checkpoints, wanted one of them, e.g. {names or '(it is empty)'}")
    options.held.enter_context(holding(store))
    return open_source(store)


RULES = MappingProxyType(
    {rule.__name__: rule for rule in (rename, copy, drop, take, transpose, split, fuse, stack, unstack)}
)
COMMANDS = MappingProxyType(
    {
        "ls": _ls,
        "show": _show,
        "verify": _verify,
        "diff": _diff,
        "reshard": _reshard,
        "export": _export,
        "gc": _gc,
    }
)


if __name__ == "__main__":
    sys.exit(main())
