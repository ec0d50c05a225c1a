"""Flags of benchmarks that let forms of a step race on gloo ranks."""

import argparse
from collections.abc import Sequence


def flags_of(
    about: str | None, names: Sequence[str], arguments: list[str] | None, ranks: int | None = None
) -> argparse.Namespace:
    """rounds, only (of `names`), quick (one round), backend; and ranks, where a default number is given."""
    parser = argparse.ArgumentParser(description=about, formatter_class=argparse.RawDescriptionHelpFormatter)
    if ranks is not None:
        parser.add_argument("--ranks", type=int, default=ranks)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--only", default=",".join(names), help=f"some of {', '.join(names)}")
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--backend", default="inductor", help="of all forms; aot_eager starts in seconds, for tests")
    flags = parser.parse_args(arguments)
    flags.only = flags.only.split(",")
    if unknown := sorted(set(flags.only) - set(names)):
        parser.error(f"--only: unknown {', '.join(unknown)}; choose of {', '.join(names)}")
    flags.rounds = 1 if flags.quick else flags.rounds
    return flags
