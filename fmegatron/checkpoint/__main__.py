"""`python -m fmegatron.checkpoint ls|show|verify|diff|reshard|export|gc PATH ...`: checkpoints from the command line.

Exit status: 0 all is well; 1 a difference or damage was found; 2 wrong use, or it could not be done.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Sequence
from typing import TextIO

from fmegatron.checkpoint.tools import commands


def main(argv: Sequence[str] | None = None, out: TextIO | None = None, err: TextIO | None = None) -> int:
    """Run one command; returns the exit status. argv: without the program's name; out, err: the standard ones."""
    try:
        options = parser().parse_args(argv)
    except SystemExit as stop:  # --help, or wrong use, which argparse has reported
        return int(stop.code or 0)
    return commands.run(options.command, options, out or sys.stdout, err or sys.stderr)


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

    p = add("export", help="write the leaves as files of weights for other programs")
    p.add_argument("src", help="a checkpoint")
    p.add_argument("dst", help="a file (.safetensors, .npz, .pt), or a directory of shards with an index")
    p.add_argument("pattern", nargs="?", help="only leaves whose path has a match of this regular expression")
    p.add_argument(
        "--format", choices=["safetensors", "npz", "torch"], help="default: by the name of DST, else safetensors"
    )
    p.add_argument("--rename", action="append", default=[], metavar="REGEX=REPLACEMENT", help="may be given again")
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


if __name__ == "__main__":
    sys.exit(main())
