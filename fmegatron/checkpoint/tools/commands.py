"""The command line of the tools: parses options, prints text or JSON, returns the exit status."""

from __future__ import annotations

import argparse
import json
import os
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from types import MappingProxyType
from typing import Any, TextIO

from fmegatron.checkpoint.files.format import CheckpointError
from fmegatron.checkpoint.files.snapshot import again
from fmegatron.checkpoint.files.storage import Store, holding, open_store
from fmegatron.checkpoint.tools import printed
from fmegatron.checkpoint.tools.collect import LIVE_SECONDS, collect
from fmegatron.checkpoint.tools.diff import diff
from fmegatron.checkpoint.tools.export import SHARD_BYTES, export, parse_dtype, parse_renames
from fmegatron.checkpoint.tools.listing import listing
from fmegatron.checkpoint.tools.reshard import BOUND_BYTES, reshard
from fmegatron.checkpoint.tools.show import show
from fmegatron.checkpoint.tools.source import Source, open_source
from fmegatron.checkpoint.tools.targets import parse_chunks, parse_mesh, parse_rules, plan_of, target_layouts
from fmegatron.checkpoint.tools.text import one_line, plain
from fmegatron.checkpoint.tools.verify import Report, verify

GOOD, FOUND, FAILED = 0, 1, 2


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
    """Run a command; while it reads steps of a Manager, nobody deletes them."""
    with ExitStack() as options.held:
        return COMMANDS[name](options)


Result = tuple[int, Any, Callable[[TextIO], None]]  # exit status, value for JSON, printer of text


def _ls(options: argparse.Namespace) -> Result:
    found = listing(_place(options, options.path))
    bad = any(c.problem for c in found.checkpoints)
    return (FOUND if bad else GOOD), found.to_json(), lambda out: printed.listing(out, found, time.time())


def _show(options: argparse.Namespace) -> Result:
    found = show(_source(options, options.path), options.pattern, options.stats)
    return GOOD, found.to_json(), lambda out: printed.shown(out, found, options.layouts)


def _verify(options: argparse.Namespace) -> Result:
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
    plans = plan_of(layouts, parse_chunks(options.chunks))
    to, bound = _place(options, options.dst), options.memory or BOUND_BYTES
    done = reshard(source, to, plans, bound=bound, overwrite=options.overwrite)
    value = {**vars(done), "layouts": {path: str(layout) for path, layout in layouts.items()}}
    return GOOD, value, lambda out: printed.resharded(out, done, layouts)


def _export(options: argparse.Namespace) -> Result:
    endings = {".npz": "npz", ".pt": "torch", ".safetensors": "safetensors"}
    kind = options.format or endings.get(os.path.splitext(options.dst)[1], "safetensors")
    done = export(
        _source(options, options.src),
        options.dst,
        kind,
        options.pattern,
        renames=parse_renames(options.rename),
        cast=parse_dtype(options.cast) if options.cast else None,
        shard=options.shard or SHARD_BYTES,
    )
    return GOOD, vars(done), lambda out: printed.exported(out, done)


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
    """The checkpoint at a path. ValueError when the path is none: nothing there, or a directory of checkpoints."""
    store = _place(options, path)
    found = listing(store)
    if found.is_directory:
        names = ", ".join(c.name for c in found.checkpoints[-3:])
        raise ValueError(f"{path}: got a directory of checkpoints, wanted one of them, e.g. {names or '(it is empty)'}")
    options.held.enter_context(holding(store))
    return open_source(store)


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
