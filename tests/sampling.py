"""Seeds of campaigns that try a sample of a space too large for every run: the same in every run, or fresh by a flag.

By default the seed of a run is 0, so two runs of the same tests draw the same cases, whatever the day. With
`pytest --fresh-seeds=fresh` (`make test-all SEEDS=fresh`) a run draws other ones, and each failed test prints the line
that repeats it: `--fresh-seeds=N` with the N of that run. Which cases run by default never depends on the seed.
"""

import os
import secrets

from fmegatron.tree import fold_in

__all__ = ["FLAG", "VARIABLE", "begin", "seed", "seeds"]

FLAG = "--fresh-seeds"
VARIABLE = "FMEGATRON_TEST_SEED"  # the seed of this run, from the process that pytest began in to its workers


def begin(asked: str | None) -> None:
    """Set the seed of the run, once, before worker processes start.

    asked: the value of the flag: None without it, "fresh" for a seed that is drawn now, else the seed as text.
    """
    if asked is None:
        os.environ.pop(VARIABLE, None)
    elif asked != "fresh":
        os.environ[VARIABLE] = str(int(asked))
    else:
        os.environ.setdefault(VARIABLE, str(1 + secrets.randbelow(2**31 - 1)))  # workers are given the flag too


def seed() -> int:
    """The seed of this run: 0, or that of the flag."""
    return int(os.environ.get(VARIABLE, "0"))


def seeds(campaign: str, fixed: int, drawn: int) -> list[int]:
    """The seeds of a campaign: 0 .. fixed - 1, always, and `drawn` others of 32 bits that the run's seed determines."""
    return [*range(fixed), *(fold_in(seed(), campaign, i) >> 31 for i in range(drawn))]
