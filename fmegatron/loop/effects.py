"""Options that can never take effect are refused before anything is written: named, with what would take effect.

An option counts as given where it is not the default of its dataclass. What depends on the number of ranks is refused
for a new run, and warned of in one that goes on: it may go on with fewer ranks, by the same command line.
"""

import dataclasses
import math
import warnings
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path
from typing import Any

from fmegatron.files import disk
from fmegatron.layout import Layout, Mesh
from fmegatron.layout.mesh import STANDARD_AXES
from fmegatron.loop.config import UsageError
from fmegatron.loop.faults.inject import Injection
from fmegatron.loop.faults.pulse import Patience
from fmegatron.loop.options import Options
from fmegatron.loop.sources import mesh_text, text_of
from fmegatron.loop.windows import Window, windows
from fmegatron.tree import structure

# A group, its field that switches it on, the value that does not, and a value that would.
_SWITCHED = (
    ("save.local", "folder", "", "/dev/shm/me"),
    ("faults.spike", "factor", 0.0, "3"),
    ("faults.stuck", "updates", 0, "1000"),
    ("faults.restart", "most", 0, "3"),
)


def require_effects(options: Options, ranks: int, goes_on: bool, evaluates: bool, flops_known: bool) -> None:
    """UsageError for an option that can never take effect, whatever the length of the run.

    ranks: of the run. goes_on: whether the folder has what an earlier process of this run has written. evaluates:
    whether there are evaluations. flops_known: whether the FLOPs of a token are.
    """
    log, faults = options.log, options.faults
    for path, switch, off, example in _SWITCHED:
        group: Any = options
        for name in path.split("."):
            group = getattr(group, name)
        if getattr(group, switch) == off:
            for name in _given(group, {switch}):
                wanted = f"{switch} with it, without which nothing is done"
                _refuse(f"{path}.{name}", getattr(group, name), wanted, f"--run.{path}.{switch}={example}")
    if faults.on_difference != "raise" and faults.hash_every is None:
        wanted = "hash_every with it, without which no replicas are compared"
        _refuse("faults.on_difference", faults.on_difference, wanted, "--run.faults.hash_every=100")
    if ranks == 1:
        for path, group in (("log.straggler_ratio", log), ("faults.hash_every", faults)):
            name = path.rpartition(".")[2]
            if getattr(group, name) is not None and name in _given(group, ()):
                _require_ranks(path, getattr(group, name), goes_on)
    if options.until.file is not None:
        place = Path(options.until.file).absolute().parent
        if not disk.is_directory(str(place)) and Path(options.folder).absolute() not in (place, *place.parents):
            wanted = f"a file in a folder that is there, or in that of the run: {place} is none"
            _refuse("until.file", options.until.file, wanted, "make it first")
    if not evaluates and "eval_every" in _given(log, ()):
        _refuse("log.eval_every", log.eval_every, "an experiment with evaluations", "give evaluate=, or leave it out")
    if log.peak_flops is not None and not flops_known:
        wanted = "the FLOPs of a token with it, which this step's Description does not have"
        _refuse("log.peak_flops", log.peak_flops, wanted, "--run.log.flops_per_token=6e9")
    for section, needed, there in (
        ("evaluation", "evaluations", evaluates),
        ("restart", "faults.restart.most", faults.restart.most),
    ):
        if section in Patience.sections(faults.patience) and not there:
            wanted = f"no limit of {section!r}, which a run without {needed} never is in"
            _refuse("faults.patience", faults.patience, wanted, "leave that part out")
    for fault in Injection.parse(faults.inject):
        if fault.at == "evaluation" and not evaluates:
            wanted = "a fault of another place in a run without evaluations"
            _refuse("faults.inject", fault, wanted, "give evaluate=, or another at=")
        _require_rank("faults.inject", fault, fault.rank, ranks, goes_on)
    for window in windows(log.profile):
        _require_rank("log.profile", window, window.rank, ranks, goes_on)


def require_in_length(options: Options, steps: int) -> None:
    """UsageError for an option that can never take effect in a run of so many updates."""
    log, save, faults = options.log, options.save, options.faults
    length = f"of {steps} updates in all"
    for window in windows(log.profile):
        if window.first > steps:
            _refuse("log.profile", window, f"steps of a run {length}", f"give steps=1-{steps} or a part of it")
    for fault in Injection.parse(faults.inject):
        if fault.at != "setup" and fault.step > steps:
            _refuse("faults.inject", fault, f"a step of a run {length}", f"give step=1 to {steps}")
    if save.keep_every is not None and steps % save.keep_every and math.lcm(save.keep_every, save.every) > steps:
        wanted = f"one that divides a step of a run {length} that is saved, every {save.every} and at the end"
        _refuse("save.keep_every", save.keep_every, wanted, f"--run.save.keep_every={save.every}")
    if save.local.folder and save.local.every > steps:
        _refuse("save.local.every", save.local.every, f"fewer steps in a run {length}", f"give 1 to {steps}")
    if faults.spike.factor and faults.spike.warmup >= steps:
        wanted = f"fewer losses that are never spikes, in a run {length}"
        _refuse("faults.spike.warmup", faults.spike.warmup, wanted, f"give 1 to {steps - 1}, or more --run.steps")
    if faults.stuck.updates > steps:
        wanted = f"fewer in a run {length}"
        _refuse("faults.stuck.updates", faults.stuck.updates, wanted, f"give 2 to {steps}, or more --run.steps")


def named_metrics(options: Options) -> Iterator[tuple[str, str]]:
    """(the option, the metric that it names)."""
    if options.until.metric is not None:
        yield "until.metric", options.until.metric
    if options.save.keep_best is not None:
        yield "save.keep_best", options.save.keep_best[0]


def require_metrics(options: Options, names: Collection[str]) -> None:
    """UsageError for an option that names a metric which is none of the step's and of the evaluations'."""
    for option, metric in named_metrics(options):
        if metric not in names:
            near = structure.did_you_mean(metric, sorted(names))
            wanted = f"a metric of the step or an evaluation: {', '.join(names) or '(there are none)'}{near}"
            _refuse(option, metric, wanted, "give one of them, or leave it out")


def require_axes(mesh: Mesh, layouts: Sequence[Layout]) -> None:
    """UsageError for an axis of a name of one's own over which no array of the state or the batch is cut."""
    used = {axis for layout in layouts for axis in layout.sharded}
    for axis in mesh.names:
        if mesh[axis] > 1 and axis not in used and axis not in STANDARD_AXES:
            near = structure.did_you_mean(axis, [*STANDARD_AXES])
            raise UsageError(
                f"--mesh={mesh_text(mesh)}: got the axis {axis!r}{near}, over which no array of the state or the batch "
                f"is cut, wanted one of {', '.join(STANDARD_AXES)}, or one that a layout names: its ranks would all do "
                "the same; leave it out, or cut an array over it"
            )


def _given(group: Any, but: Collection[str]) -> list[str]:
    """The fields of a group that have another value than by default."""
    return [x.name for x in dataclasses.fields(group) if x.name not in but and getattr(group, x.name) != x.default]


def _require_ranks(path: str, value: Any, goes_on: bool) -> None:
    """Of an option that compares ranks, where there is one: a run that goes on may have been one of several."""
    wanted, fix = "several ranks, of which it compares one with another", "leave it out"
    _refuse_or_say(path, value, wanted, fix, goes_on, "one rank", "nothing is compared")


def _require_rank(path: str, value: Injection | Window, rank: int | None, ranks: int, goes_on: bool) -> None:
    if rank is None or rank < ranks:
        return
    wanted, fix = f"a rank below {ranks}", f"give rank=0 to {ranks - 1}" if ranks > 1 else "give rank=0"
    _refuse_or_say(path, value, wanted, fix, goes_on, f"rank {rank}", "it will not happen")


def _refuse_or_say(path: str, value: Any, wanted: str, fix: str, goes_on: bool, got: str, so: str) -> None:
    """Of an option for other ranks than there are: a run that goes on may have had them, and is warned."""
    if not goes_on:
        _refuse(path, value, wanted, fix)
    text = f"--run.{path}={_shown(value)}: got {got}, wanted {wanted}: {so}; {fix}"
    warnings.warn(text, RuntimeWarning, stacklevel=5)


def _refuse(path: str, value: Any, wanted: str, fix: str) -> None:
    raise UsageError(f"--run.{path}={_shown(value)}: got what can never take effect, wanted {wanted}; {fix}")


def _shown(value: Any) -> str:
    return str(value) if isinstance(value, Injection | Window) else text_of(value)
