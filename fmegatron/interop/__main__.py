"""python -m fmegatron.interop dcp-to-fmegatron SRC DST | fmegatron-to-dcp SRC DST"""

from __future__ import annotations

import argparse
import sys

from fmegatron.interop.convert import dcp_to_fmegatron, fmegatron_to_dcp


def main(arguments: list[str] | None = None) -> int:
    """Run a command; the exit status is 0 when all went well, 1 when it did not."""
    parser = argparse.ArgumentParser(prog="python -m fmegatron.interop", description="Checkpoints of other systems")
    commands = parser.add_subparsers(dest="command", required=True)
    there = commands.add_parser("dcp-to-fmegatron", help="write such a directory as a checkpoint of fmegatron")
    there.add_argument("source")
    there.add_argument("target")
    there.add_argument("--skip-objects", action="store_true", help="leave out objects that are not plain data")
    there.add_argument("--step", type=int, help="training step to record")
    back = commands.add_parser("fmegatron-to-dcp", help="write a checkpoint of fmegatron as a DCP directory")
    back.add_argument("source")
    back.add_argument("target")
    given = parser.parse_args(arguments)
    try:
        if given.command == "dcp-to-fmegatron":
            for name in dcp_to_fmegatron(given.source, given.target, skip_objects=given.skip_objects, step=given.step):
                print(f"left out: {name}")
        else:
            fmegatron_to_dcp(given.source, given.target)
    except (ValueError, OSError, RuntimeError) as error:
        print(f"{given.command}: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
