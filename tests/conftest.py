"""What every test may count on: deterministic torch, one thread, and default dtypes as they were."""

import gc
import importlib
import os
import shutil
import signal
import subprocess
import tempfile
import threading
from pathlib import Path

import hypothesis
import pytest
import torch
from _pytest.doctest import DoctestModule
from torch._inductor import config as inductor

from fmegatron.testing.forkserver import Forkserver
from fmegatron.testing.ranks import RankPool
from tests import garbage, rewritten, sampling, writers
from tests.fresh import Python

# What processes of the tests need: the package, and what torch imports late, when it first traces or compiles.
MODULES = (
    garbage.__name__,
    "tests.fresh",
    "fmegatron.testing.ranks",
    "fmegatron.loop",
    "functorch.compile",
    "torch._dynamo.testing",
    "torch._inductor.compile_fx",
    "torch._inductor.scheduler",
    "torch.export._trace",
    "torch.utils.cpp_extension",
)
SCALAR = "tests.scalar"  # by its name: it takes effect when it is imported
FOLDER = pytest.StashKey[str]()
LONG_PART = 7  # of the cases of a test that is marked long, one of so many runs by default
DEFAULT = "not slow and not medium"  # of pyproject.toml
MORE = "not slow"  # of `make test-more`
WORKERS = 8  # each may start a pool of 4 ranks


@pytest.hookimpl(optionalhook=True)  # -p no:xdist
def pytest_xdist_auto_num_workers():
    """One worker more than this process has cores: a seventh of the time of a worker its tests wait for processes."""
    return min(len(os.sched_getaffinity(0)) + 1, WORKERS)


def pytest_addoption(parser):
    """The flag of fresh seeds (tests/sampling.py)."""
    parser.addoption(
        sampling.FLAG, metavar="fresh|N",
        help="sampled campaigns draw other cases: those of a new seed, which a failed test prints, or those of seed N",
    )  # fmt: skip


@pytest.hookimpl(tryfirst=True)  # before Hypothesis reads its seed
def pytest_configure(config):
    """Before worker processes and tests start: the seed of the sampled campaigns, so that all draw the same cases.

    A run over workers compiles into a folder of its own, which they share: a graph is compiled once, and nothing that
    an earlier run left has a part in it. In a new folder Inductor tries, by compilations of 4 s, whether the compiler
    can build for this processor; here it takes that as given, and if it is not, each compiled test fails. Kernels of
    the default tests have no vector instructions (tests/scalar.py). Ctrl-C works, also in a run that a shell started
    in the background.
    """
    if config.option.markexpr == DEFAULT and _named(config):
        config.option.markexpr = MORE
    sampling.begin(config.getoption(sampling.FLAG))
    if config.getoption(sampling.FLAG) is None:
        hypothesis.settings.register_profile("same", derandomize=True)
        hypothesis.settings.load_profile("same")
    else:
        config.option.hypothesis_seed = str(sampling.seed())
    os.environ.setdefault("TORCHINDUCTOR_VEC_ISA_OK", "1")  # for processes that the tests start
    inductor.cpp.vec_isa_ok = os.environ["TORCHINDUCTOR_VEC_ISA_OK"] == "1"
    if _daily(config):
        importlib.import_module(SCALAR)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    if config.getoption("numprocesses", None) and not hasattr(config, "workerinput"):
        config.stash[FOLDER] = os.environ["TORCHINDUCTOR_CACHE_DIR"] = tempfile.mkdtemp(prefix="fmegatron-tests-")


def _daily(config):
    """Whether slow tests are left out."""
    return config.option.markexpr in (DEFAULT, MORE)


def _named(config):
    """Whether tests are asked for by their names."""
    return any("::" in argument for argument in config.args)


def pytest_unconfigure(config):
    """Remove the folder of the run."""
    if FOLDER in config.stash:
        shutil.rmtree(config.stash[FOLDER], ignore_errors=True)


@pytest.hookimpl(tryfirst=True)
def pytest_collection(session):
    """A worker rewrites its part of the test files, in a new clone, before it imports them (tests/rewritten.py)."""
    of = getattr(session.config, "workerinput", None)
    if of is not None:
        rewritten.share(
            session.config, Path(__file__).parent, int(of["workerid"].removeprefix("gw")), of["workercount"]
        )


@pytest.hookimpl(wrapper=True)
def pytest_collect_file(file_path):
    """Docstrings of the package are examples that run; tests have none (tests/test_files.py), and are not searched."""
    del file_path
    found = yield
    return [one for one in found if not isinstance(one, DoctestModule)]


def pytest_collection_finish():
    """Modules and test items stay to the end; the collector of garbage need not walk them again and again."""
    gc.collect()
    gc.freeze()


@pytest.hookimpl(trylast=True)  # when the fixtures of the module are gone
def pytest_runtest_teardown(item, nextitem):
    """Of what a module leaves, the rest once its garbage is collected stays to the end, too: tests that trace import
    half of torch, which each collection of a later test would walk."""
    if nextitem is not None and nextitem.path != item.path:
        gc.collect()
        gc.freeze()


@pytest.hookimpl(tryfirst=True)  # before pytest leaves out what is slow
def pytest_collection_modifyitems(config, items):
    """Of each test that is marked long a seventh of its cases, at least one; the rest is medium, but what is named."""
    if _named(config):
        return
    cases = {}
    for item in items:
        if item.get_closest_marker("long") and not any(map(item.get_closest_marker, ("slow", "medium"))):
            cases.setdefault(item.nodeid.partition("[")[0], []).append(item)
    for of_one_test in cases.values():
        for item in set(of_one_test) - set(of_one_test[::LONG_PART]):
            item.add_marker(pytest.mark.medium)


def pytest_terminal_summary(terminalreporter, config):
    """How to repeat the failed tests of a run with fresh seeds."""
    if config.getoption(sampling.FLAG) is None:
        return
    failed = [*terminalreporter.getreports("failed"), *terminalreporter.getreports("error")]
    again = f".venv/bin/python -m pytest -m 'slow or not slow' {sampling.FLAG}={sampling.seed()}"
    for test in dict.fromkeys(report.nodeid for report in failed):
        terminalreporter.line(f"fresh seeds; repeat it with: {again} '{test}'")


@pytest.fixture(autouse=True)
def _same_torch_for_every_test():
    """Small tensors run fastest on one thread, and a test that changes torch's defaults must not change the next."""
    torch.set_num_threads(1)
    dtype = torch.get_default_dtype()
    yield
    torch.set_default_dtype(dtype)


@pytest.fixture(scope="session")
def forkserver(pytestconfig):
    """What has imported torch once for all processes that the tests start."""
    modules = (*MODULES, SCALAR) if _daily(pytestconfig) else MODULES
    with Forkserver(*modules, environment={**os.environ, "OMP_NUM_THREADS": "1"}) as server:
        yield server


@pytest.fixture(scope="session")
def python(forkserver):
    """Programs as processes of their own, started in milliseconds: `python.run` and `python.popen` (tests/fresh.py)."""
    return Python(forkserver)


@pytest.fixture(scope="session")
def ranks(forkserver):
    """A pool of 4 gloo ranks, started once: `ranks.run(function, *args, ranks=2)` (see fmegatron.testing.RankPool)."""
    with RankPool(4, timeout_s=600, server=forkserver) as pool:  # for ranks that hang; a busy machine is none
        yield pool


@pytest.fixture(scope="session", autouse=True)
def _forked_writers(request):
    """Asynchronous savers of the tests' own process get their writers from the fork server, which has torch."""
    lock = threading.Lock()  # ranks that are threads come at once

    def start(*args, **settings):
        with lock:
            python = request.getfixturevalue("python")
        return python.popen(*args, **settings)

    with writers.started_by(start):
        yield


@pytest.fixture
def fresh_writers():
    """Writers are interpreters of their own, as they are for users."""
    with writers.started_by(subprocess.Popen):
        yield
