"""The default tests are the same every day: collected under a clock that is three days ahead, they are those of now."""

import os
import re
import sys

import pytest

from tests import sampling
from tests.house import ROOT

DAYS = 3
# A test run in a process whose clocks are ahead: what time and datetime say, before pytest or a test is imported.
PROGRAM = """
import datetime, sys, time

def ahead(clock, by):
    return lambda: clock() + by

def of_ahead(function):
    return lambda *given: function(*(given or (time.time(),)))

seconds = int(sys.argv[1]) * 86400
time.time, time.time_ns = ahead(time.time, seconds), ahead(time.time_ns, seconds * 10**9)
time.localtime, time.gmtime = of_ahead(time.localtime), of_ahead(time.gmtime)

class Later(datetime.datetime):
    @classmethod
    def now(cls, tz=None):
        return cls.fromtimestamp(time.time(), tz)

    @classmethod
    def today(cls):
        return cls.now()

class LaterDate(datetime.date):
    @classmethod
    def today(cls):
        return cls.fromtimestamp(time.time())

if seconds:
    datetime.datetime, datetime.date = Later, LaterDate

assert not {"pytest", "tests.conftest", "tests.pairs", "tests.sampling"} & set(sys.modules)
import pytest

sys.exit(pytest.main(["--collect-only", "-q", "-p", "no:cacheprovider", "-p", "no:xdist", *sys.argv[2:]]))
"""


def collected(python, days, *paths):
    """The names of the tests that a run with these arguments would run, with clocks ahead by so many days."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST")}
    command = [sys.executable, "-c", PROGRAM, str(days), *paths]
    done = python.run(command, cwd=ROOT, env={**environment, "PYTHONPATH": str(ROOT)})
    names = [line for line in done.stdout.splitlines() if "::" in line]
    assert done.returncode == 0 and names, done.stdout[-2000:] + done.stderr[-2000:]
    return names


FOLDERS = [  # the first has products, a few of many, long tests and drawn seeds
    pytest.param(("tests/interop",), id="a folder"),
    pytest.param(("tests", "fmegatron"), id="everything", marks=pytest.mark.slow),
]


@pytest.mark.slow
@pytest.mark.parametrize("paths", FOLDERS)
def test_the_clock_chooses_nothing(python, paths):
    assert collected(python, 0, *paths) == collected(python, DAYS, *paths)


def test_a_clock_that_chooses_is_seen(python, tmp_path):
    """What draws by day, as tests did until 2026-11: the comparison above tells the two days apart."""
    (tmp_path / "conftest.py").write_text("")
    days = ("time.time() // 86400", "time.localtime().tm_yday", "datetime.date.today().toordinal()")
    file, text = tmp_path / "test_by_day.py", "import datetime, time\n\nimport pytest\n"
    for i, day in enumerate(days):
        text += f"\n\n@pytest.mark.parametrize('day', [int({day})])\ndef test_day{i}(day):\n    pass\n"
    file.write_text(text)
    now, later = collected(python, 0, str(file)), collected(python, DAYS, str(file))
    assert len(now) == len(later) == len(days) and not set(now) & set(later)


def test_seeds_are_those_of_the_run(monkeypatch):
    monkeypatch.setenv(sampling.VARIABLE, "20779")
    of_flag = sampling.seeds("campaign", 2, 3)
    sampling.begin(None)
    assert sampling.seed() == 0 and sampling.seeds("campaign", 2, 3) == sampling.seeds("campaign", 2, 3)
    assert (
        of_flag[:2] == sampling.seeds("campaign", 2, 3)[:2] == [0, 1]
        and of_flag[2:] != sampling.seeds("campaign", 2, 3)[2:]
    )
    assert not set(sampling.seeds("campaign", 0, 3)) & set(sampling.seeds("another", 0, 3))
    sampling.begin("20779")
    assert sampling.seeds("campaign", 2, 3) == of_flag
    sampling.begin("fresh")  # a worker: the seed is there
    assert sampling.seed() == 20779
    sampling.begin(None)
    sampling.begin("fresh")
    assert sampling.seed() > 0


DRAWS = """
from hypothesis import given, strategies

from tests.sampling import seed, seeds


def test_drawn():
    assert seeds("here", 0, 1) == [], f"drawn {seeds('here', 0, 1)} of {seed()}"


@given(strategies.integers(0, 1 << 60))
def test_by_hypothesis(n):
    assert n < 1 << 30, f"found {n}"


@pytest.mark.long
@pytest.mark.parametrize("n", range(8))
def test_long(n):
    pass


@pytest.mark.long
def test_long_alone():
    pass


@pytest.mark.medium
def test_long_and_medium():
    pass
"""


@pytest.fixture
def draws(python, tmp_path):
    """A module of tests whose conftest is that of these tests; run(flags) -> output."""
    path = tmp_path / "test_drawing.py"
    path.write_text(f"import pytest\n{DRAWS}")
    (tmp_path / "conftest.py").write_text("from tests.conftest import *  # noqa: F403\n")
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("PYTEST", "FMEGATRON"))}
    environment["PYTHONPATH"] = str(ROOT)
    settings = ("-c", str(ROOT / "pyproject.toml"), "--rootdir", str(tmp_path), "-p", "no:cacheprovider")

    def run(*flags):
        command = [sys.executable, "-m", "pytest", "-q", *settings, *flags, path.name]
        done = python.run(command, cwd=tmp_path, env=environment)
        return done.stdout + done.stderr

    return run


def drawn(output):
    """What the tests say they drew."""
    return re.findall(r"AssertionError: (drawn .*|found .*)", output)


@pytest.mark.slow  # four runs of pytest
def test_fresh_seeds_are_drawn_by_the_flag_and_repeated_by_the_line(draws):
    first, second = draws("-n", "2"), draws("-n", "0")
    assert drawn(first) and sorted(set(drawn(first))) == sorted(set(drawn(second))) and "fresh seeds" not in first
    fresh = draws("-n", "2", "--fresh-seeds=fresh")
    assert drawn(fresh) and drawn(fresh)[0] not in drawn(first)
    again = re.findall(r"fresh seeds; repeat it with: \S+ -m pytest (-m '.*') (--fresh-seeds=\d+) '(\S+)'", fresh)
    assert [test.rpartition("::")[2] for *_, test in sorted(again)] == ["test_by_hypothesis", "test_drawn"]
    repeated = draws(again[0][1])
    assert sorted(set(drawn(repeated))) == sorted(set(drawn(fresh)))


@pytest.mark.medium  # runs of pytest
def test_what_is_marked_long_and_medium(draws):
    def names(*flags):
        return [
            line.rpartition("::")[2] for line in draws("--collect-only", *flags).splitlines() if "::test_long" in line
        ]

    assert names() == ["test_long[0]", "test_long[7]", "test_long_alone"]
    every = [*(f"test_long[{n}]" for n in range(8)), "test_long_alone", "test_long_and_medium"]
    assert names("-m", "not slow") == every
    assert set(names("test_drawing.py::test_long_and_medium")) == set(every)  # which is named beside the file
