"""`python -m fmegatron.data prepare|merge|inspect ...`: corpora from the command line.

Exit status: 0 all is well; 2 wrong use, or it could not be done.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence

from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from fmegatron.data.indexed import IndexedTokens
from fmegatron.data.indexed_writer import merge_indexed
from fmegatron.data.packing import pack
from fmegatron.data.prepare import facts_of, prepare


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit status. argv: without the program's name."""
    try:
        options = parser().parse_args(argv)
    except SystemExit as stop:  # --help, or wrong use, which argparse has reported
        return int(stop.code or 0)
    try:
        {"prepare": _prepare, "merge": _merge, "inspect": _inspect}[options.command](options)
    except (ValueError, OSError, ImportError, RuntimeError) as error:
        print(error, file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("stopped; the same command goes on with what is done", file=sys.stderr)
        return 2
    return 0


def parser() -> argparse.ArgumentParser:
    """The parser of all commands."""
    top = argparse.ArgumentParser(prog="python -m fmegatron.data", description="Make corpora, join and look at them.")
    below = top.add_subparsers(dest="command", required=True, metavar="COMMAND")

    p = below.add_parser("prepare", help="tokenize texts to PREFIX.bin and PREFIX.idx")
    p.add_argument("inputs", nargs="+", help=".jsonl (.gz, .zst), .txt, .parquet, or a folder of datasets")
    p.add_argument("--output", required=True, metavar="PREFIX", help="of the corpus")
    p.add_argument("--tokenizer", default="byte", help="byte (default), or a file of a tokenizer")
    p.add_argument("--key", default="text", help="field of the text (default: text)")
    p.add_argument("--eod", type=int, help="id that is put behind each document")
    p.add_argument("--workers", type=int, default=1, help="processes (default: 1)")
    p.add_argument("--part-bytes", type=int, default=64 << 20, help="of the work of a process at a time (64 MiB)")
    p.add_argument("--split", help="shares of training, validation and test, e.g. 969,30,1")
    p.add_argument("--pack", type=int, metavar="S", help="store a plan of rows of S tokens as well: PREFIX.pack-S")
    p.add_argument("--fresh", action="store_true", help="begin anew where parts of another call are there")
    p.add_argument("--skip-bad", action="store_true", help="leave out documents that cannot be read, and list them")

    p = below.add_parser("merge", help="join corpora of one dtype, in order")
    p.add_argument("output", metavar="PREFIX")
    p.add_argument("inputs", nargs="+", metavar="PREFIX")

    p = below.add_parser("inspect", help="sizes, statistics and the first documents of a corpus, all of it checked")
    p.add_argument("prefix")
    p.add_argument("--documents", type=int, default=2, help="how many to show (default: 2)")
    return top


def _prepare(options: argparse.Namespace) -> None:
    columns = TextColumn("parts"), BarColumn(), MofNCompleteColumn(), TextColumn("{task.fields[tokens]}")
    with Progress(*columns, TimeRemainingColumn(), transient=True, disable=not sys.stderr.isatty()) as bar:
        task = bar.add_task("", total=None, tokens="")

        def progress(done: int, parts: int, tokens: int) -> None:
            bar.update(task, completed=done, total=parts, tokens=f"{tokens:,} tokens")

        facts = prepare(
            options.inputs,
            options.output,
            options.tokenizer,
            key=options.key,
            eod=options.eod,
            workers=options.workers,
            part_bytes=options.part_bytes,
            split=options.split,
            fresh=options.fresh,
            skip_bad=options.skip_bad,
            progress=progress,
        )
    if options.pack is not None:
        plan = pack(IndexedTokens(options.output).document_starts(), options.pack)
        plan.save(f"{options.output}.pack-{options.pack}")
        facts["pack"] = {"rows": len(plan), "padding": round(plan.padding, 5)}
    print(json.dumps({name: value for name, value in facts.items() if name not in ("inputs", "tokenizer")}, indent=2))


def _merge(options: argparse.Namespace) -> None:
    print(merge_indexed(options.output, options.inputs))


def _inspect(options: argparse.Namespace) -> None:
    tokens, facts = IndexedTokens(options.prefix, verify=True), facts_of(options.prefix)
    print(tokens)
    for number in range(min(options.documents, tokens.documents)):
        start, stop = tokens.document(number)
        shown = ", ".join(map(str, tokens[start : min(stop, start + 12)].tolist()))
        print(f"document {number}: {stop - start:,} tokens: {shown}{', …' if stop - start > 12 else ''}")
    if facts is not None:
        print(json.dumps({name: value for name, value in facts.items() if name not in ("tokenizer",)}, indent=2))


if __name__ == "__main__":
    sys.exit(main())
