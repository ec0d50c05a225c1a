"""Start an experiment: the same file as a script, under torchrun and in a notebook, by one line at its end."""

import builtins
import contextlib
import functools
import os
import sys
import types
import typing
from collections.abc import Callable, Sequence
from typing import Any

import torch
from absl import logging

from fmegatron.checkpoint.files import claims
from fmegatron.collectives import slurm
from fmegatron.loop.config import Config, T, UsageError
from fmegatron.loop.experiment import Experiment
from fmegatron.loop.faults.notice import Place, fail, watch
from fmegatron.loop.flags import parse, with_flags
from fmegatron.loop.reading import READS


@typing.overload
def launch(main: Experiment, config: Config = None, argv: Sequence[str] | None = None) -> dict[str, float]: ...
@typing.overload
def launch(main: Callable[[Config], T], config: Config = None, argv: Sequence[str] | None = None) -> T: ...
def launch(
    main: Experiment | Callable[[Config], T], config: Config = None, argv: Sequence[str] | None = None
) -> T | dict[str, float]:
    """Run an experiment with the flags of the command line, on this process as one rank, and return its last metrics.

    main: the `Experiment`, or a function of a config, whose result is returned: for programs that are not one run.
        `experiments/moe.py` trains two and compares them, `demo.py` starts torchrun, `by_hand.py` writes the loop out;
        they have flags, ranks and failures as an experiment has them, and no step, data or run for one to describe.
        `launch(experiment)` is this form: `launch(lambda config: experiment(config).metrics, experiment.Config)`.
    config: of a function: a frozen dataclass whose fields all have defaults (or an instance of one); see `flags.parse`.
    argv: program name and flags; None reads `sys.argv`, or in a notebook takes the defaults.

    Under torchrun or srun each rank gets cores // ranks threads, only rank 0 writes on stdout, and an exception on one
    rank ends all of them: its traceback and rank are printed, and the exit status is 1 (130 for Ctrl-C, its own for a
    SystemExit that is not 0, and for an error that has an `exit_status`, such as `RerunError`).
    A bad command line, also where only the experiment's set-up sees that (`set_up`), is one line on stderr and exit
    status 2; a run in a folder that another run has, with status 1.

    >>> from dataclasses import dataclass
    >>> @dataclass(frozen=True)
    ... class Config:
    ...     lr: float = 0.5
    >>> launch(lambda config: config.lr * 2, Config, ["prog", "--lr=4"])
    8.0
    """
    if isinstance(main, Experiment):
        return launch(functools.partial(_trained, main), main.Config if config is None else config, argv)
    slurm.adopt_slurm(os.environ)
    place = Place.of_environment()
    if argv is None:
        argv = [sys.argv[0]] if _in_notebook() else sys.argv
    parsed: Any = None
    with watch(place) as faults, _only_first_rank_prints(place):
        try:
            use_threads(place)
            parsed = parse(argv, config)
            result = main(parsed)
            if faults:
                faults.leave("returned from main")
            return result
        except (Exception, KeyboardInterrupt, SystemExit) as error:
            if any(note.startswith(READS) for note in getattr(error, "__notes__", ())):
                error = _without_own_frames(error)
            usage, interrupt = isinstance(error, UsageError), isinstance(error, KeyboardInterrupt)
            if usage and parsed is not None:
                error.args = (with_flags(str(error), argv),)
            leaves, claimed = isinstance(error, SystemExit), isinstance(error, claims.ClaimedError)
            own = _status(error) if isinstance(error, SystemExit) else getattr(error, "exit_status", 1)
            status = 2 if usage else 130 if interrupt else own
            if place.size > 1 and status:
                brief = usage or interrupt or claimed or isinstance(error, SystemExit) and isinstance(error.code, str)
                fail(error, place, faults, status, brief)
            if faults and leaves:
                faults.leave("left by SystemExit(0)")
            if place.size == 1 and status not in (0, 1, 2, 130) and not leaves and not _in_notebook():
                fail(error, place, faults, status)
            if usage or ((interrupt or claimed) and not _in_notebook()):
                hint = "\nTry --help." if usage else ""
                print(f"{os.path.basename(argv[0])}: {str(error) or 'interrupted'}{hint}", file=sys.stderr)
                raise SystemExit(status) from None
            raise error


def _trained(experiment: Experiment, config: Config) -> dict[str, float]:
    return experiment(config).metrics


def _without_own_frames(error: BaseException) -> BaseException:
    """The error, whose traceback has the frames of others alone: what led to a line of the user's own, and it."""
    own, trace, found = os.path.dirname(os.path.dirname(os.path.abspath(__file__))) + os.sep, error.__traceback__, None
    kept = []
    while trace is not None:
        kept += [] if trace.tb_frame.f_code.co_filename.startswith(own) else [trace]
        trace = trace.tb_next
    for one in reversed(kept):
        found = types.TracebackType(found, one.tb_frame, one.tb_lasti, one.tb_lineno)
    return error.with_traceback(found)


def _status(error: SystemExit) -> int:
    """The exit status that Python gives a SystemExit; with a text as its code it is 1."""
    if error.code is None or error.code == 0:
        return 0
    return error.code & 0xFF or 1 if isinstance(error.code, int) else 1


def use_threads(place: Place) -> int:
    """Give this rank its share of the node's cores (torchrun would give it one thread), and return that number.

    In a process of its own, torch's default (or OMP_NUM_THREADS) stays.
    """
    if place.local_size > 1:
        cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
        torch.set_num_threads(max(1, cores // place.local_size))
    return torch.get_num_threads()


@contextlib.contextmanager
def _only_first_rank_prints(place: Place):
    """stdout and informative log lines come from rank 0 only; stderr and errors come from all."""
    before = logging.get_verbosity()
    logging.set_verbosity(logging.INFO if place.rank == 0 else logging.ERROR)
    try:
        if place.rank == 0:
            yield
        else:
            with open(os.devnull, "w") as nowhere, contextlib.redirect_stdout(nowhere):
                yield
    finally:
        logging.set_verbosity(before)


def _in_notebook() -> bool:
    return hasattr(builtins, "__IPYTHON__")
