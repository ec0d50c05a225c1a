"""Seeds for campaigns that try a sample of a space too large for every run: some fixed, the others new every day.

A campaign that always draws the same cases proves them and nothing else; one that draws new ones at every run cannot be
repeated. These change with the date (UTC), are the same in every process of a run, and a failing test names its seed.
"""

import os
import time
import zlib

from fmegatron.tree import fold_in

__all__ = ["VARIABLE", "of_today", "seeds", "today"]

VARIABLE = "FMEGATRON_TEST_DAY"  # a day number; set it to run the cases of another day again


def today() -> int:
    """The day whose cases are drawn: the one that FMEGATRON_TEST_DAY names, else today's number since 1970.

    The number is kept in the environment, so that worker processes and a run over midnight agree on it.
    """
    return int(os.environ.setdefault(VARIABLE, str(int(time.time() // 86400))))


def of_today(name: str, days: int) -> bool:
    """Whether today is the day of a name: one of `days` in a row, spread evenly over names."""
    return (zlib.crc32(name.encode()) + today()) % days == 0


def seeds(campaign: str, fixed: int, rotating: int) -> list[int]:
    """The seeds of a campaign: 0 .. fixed - 1, always, and `rotating` others of 32 bits that change with the day."""
    return [*range(fixed), *(fold_in(today(), campaign, i) >> 31 for i in range(rotating))]
