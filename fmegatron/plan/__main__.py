"""`python -m fmegatron.plan EXPERIMENT --mesh dp=2,fsdp=2`: memory, traffic, work and time of a step before launch.

The experiment is a file as `python -m fmegatron.check` takes it. No process group, no device, no memory is used; with
--device h100 the plan is of the code that Inductor writes for that GPU, in a process of its own (`plan.cuda`).
Exit status: 0 planned, and it fits where --memory says into what; 1 it does not fit; 2 wrong use, or it could not be
done; 3 whether it fits is not known, since not all of the memory was counted.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import functools
import sys
from collections.abc import Callable, Sequence
from typing import Any, TextIO

from fmegatron import tree
from fmegatron.layout import Mesh
from fmegatron.loop.experiment import load_experiment
from fmegatron.loop.flags import parse
from fmegatron.loop.options import options_of
from fmegatron.plan import deep, exact, meshes_of, quick, search
from fmegatron.plan.cuda import apart, guard, sheet
from fmegatron.plan.cuda.devices import DEVICES, Device
from fmegatron.plan.from_formulas import Quick
from fmegatron.plan.from_trace import Exact, UnevenError, in_mib
from fmegatron.plan.rates import measured_rates, measured_write
from fmegatron.step import Description, State, description
from fmegatron.step.timelines import planned
from fmegatron.tree import ArraySpec

Loaded = tuple[type, Callable[[Any], Description]]  # (Config, describe) of the experiment

_WRITES = 1e9  # bytes/s of a rank that saves, where nothing is measured
_DEEP = 16  # layers from which on a plan is continued from shallower models
_FEW = (8, 4, 10, 14)  # layers of these, of which one has to be possible


def main(
    argv: Sequence[str] | None = None, out: TextIO | None = None, err: TextIO | None = None, *, there: bool = False
) -> int:
    """Plan one experiment; returns the exit status. argv: without the program's name; out, err: the standard ones.
    there: whether this process can plan for --device (`plan.cuda.__main__`); else it starts one that can."""
    output, errors = out or sys.stdout, err or sys.stderr
    argv = sys.argv[1:] if argv is None else argv
    try:
        options, flags = parser().parse_known_args(argv)
    except SystemExit as stop:  # --help, or wrong use, of which argparse has told
        return int(stop.code or 0)
    try:
        if (options.mesh is None) == (options.search is None):
            raise ValueError("got neither --mesh nor --search, or both, wanted one; give --mesh dp=2, or --search 8")
        if options.passes and options.device is None:
            raise ValueError("--passes: got no --device, wanted the GPU whose kernels are listed; give --device h100")
        device = None if options.device is None else _device(options)
        if device is not None and not there:
            return apart.run(["-m", "fmegatron.plan.cuda", *argv], device, output, errors)
        experiment = load_experiment(options.experiment)
        rates = measured_rates() if options.measure else planned.Rates()
        if device is not None:
            rates = dataclasses.replace(rates, flops=device.flops, memory=device.bandwidth, network=device.links)
        if options.search is not None:
            return _searched(experiment, options, flags, rates, output)
        return _planned(experiment, options, flags, rates, output)
    except (ValueError, OSError, SyntaxError, ImportError, guard.GuardError) as error:
        print(f"plan: {options.experiment}: {error}", file=errors)
        return 2


def _device(options: argparse.Namespace) -> Device:
    """The device that is planned for."""
    if options.device not in DEVICES:
        raise ValueError(f"--device: got {options.device!r}, wanted one of {', '.join(DEVICES)}")
    if options.quick or options.search is not None or options.measure:
        raise ValueError(
            f"--device {options.device}: got --quick, --search or --measure beside it, wanted none of them; formulas "
            "know no device: give --memory 80, or leave them out"
        )
    return DEVICES[options.device]


def _config(experiment: Loaded, options: argparse.Namespace, flags: list[str], mesh: str) -> Any:
    return parse([options.experiment, f"--mesh={mesh}", *flags], experiment[0])


def _planned(
    experiment: Loaded, options: argparse.Namespace, flags: list[str], rates: planned.Rates, out: TextIO
) -> int:
    config = _config(experiment, options, flags, options.mesh)
    described = description.require_description(experiment[1](config), options.experiment)
    overlap = _overlap(config)
    try:
        by_formula = quick(described, overlap=overlap)
    except ValueError as error:
        by_formula = None
        print(f"quick: {error}", file=out)
    if by_formula is not None:
        print(by_formula, file=out)
        _print_seconds(by_formula, rates, options, out)
    peak = None if by_formula is None else by_formula.peak
    unknown = ("all of it, for the reason above",) if by_formula is None else by_formula.unknown_memory
    on_host = 0 if by_formula is None else by_formula.host
    if not options.quick:
        counted = _counted(experiment, config, described, overlap, options, out)
        print(counted, file=out)
        if options.timeline:
            print(counted.timeline(rates), file=out)
        peak, unknown, on_host = counted.peak, (), counted.host
        if counted.device is not None:
            print(sheet.summary(counted, 0.0 if by_formula is None else by_formula.model_flops), file=out)
            if options.passes:
                print(sheet.passes(counted, _gradients(described, counted.rank)), file=out)
            peak += sheet.outside(counted).total
            if options.memory is None:
                options.memory = counted.device.memory / 2**30
    found = [0]
    if options.host_memory is not None:
        found.append(_verdict(on_host, (), round(options.host_memory * 2**30), out, "host memory: "))
    if options.memory is not None:
        found.append(_verdict(peak or 0, unknown, round(options.memory * 2**30), out))
    return 1 if 1 in found else max(found)


def _gradients(described: Description, rank: int) -> int:
    """Bytes of a rank's gradients, in the dtypes of the parameters; 0: not known."""
    if not isinstance(described.state, State):
        return 0
    return sum(x.local_nbytes(rank) for x in tree.leaves(tree.layouts(described.state.params)))


def _verdict(peak: int, unknown: Sequence[str], limit: int, out: TextIO, of: str = "") -> int:
    """Print whether a step fits -> the exit status. unknown: what takes memory beside the peak, not counted. of: which
    memory, where it is not that of the device."""
    if peak <= limit and unknown:
        print(
            f"not known whether it fits: {in_mib(peak)} of {in_mib(limit)} are counted, without {'; '.join(unknown)}; "
            "the exact plan (without --quick) counts any step",
            file=out,
        )
        return 3
    if peak <= limit:
        print(f"{of}fits: {in_mib(peak)} of {in_mib(limit)}", file=out)
        return 0
    print(f"{of}does not fit: {in_mib(peak)}, {in_mib(peak - limit)} more than {in_mib(limit)}", file=out)
    return 1


def _counted(
    experiment: Loaded,
    config: Any,
    described: Description,
    overlap: bool,
    options: argparse.Namespace,
    out: TextIO,
) -> Exact:
    depths = set() if options.all_layers else {n for n in _depths(described) if n >= _DEEP}
    if depths:
        field = _field_of_depth(experiment[1], config, depths)
        try:
            if field is None:
                raise UnevenError(
                    f"describe(config): got {' or '.join(map(str, sorted(depths)))} layers, and no field of "
                    f"{type(config).__name__} that changes their number, wanted one, so that few layers can be counted"
                )
            build = functools.partial(_with_depth, experiment[1], config, field)
            how = {"rank": options.rank, "overlap": overlap, "device": DEVICES.get(options.device)}
            return deep(build, _fields(config)[field], config.mesh, **how)
        except UnevenError as error:
            print(f"exact: all layers are counted, one by one: {error}", file=out)
    device = DEVICES.get(options.device)
    return exact(described, mesh=config.mesh, rank=options.rank, overlap=overlap, device=device)


def _depths(described: Description) -> set[int]:
    """The number of layers that a description tells: of its decoder, else of each of its stacks (`ArraySpec`)."""
    if described.decoder is not None:
        return {len(described.decoder.blocks)}
    return {x.shape[0] for x in tree.leaves(described.state) if isinstance(x, ArraySpec) and x.stacked}


def _with_depth(describe: Callable[[Any], Description], config: Any, field: str, depth: int) -> Description:
    return describe(dataclasses.replace(config, **{field: depth}))


def _fields(config: Any) -> dict[str, Any]:
    return {item.name: getattr(config, item.name) for item in dataclasses.fields(config)}


def _field_of_depth(describe: Callable[[Any], Description], config: Any, depths: set[int]) -> str | None:
    """The field of a Config that decides how many layers there are: with another number in it `describe` tells that
    one. None: there is none."""
    for name, value in _fields(config).items():
        if type(value) is not int or value not in depths:
            continue
        for few in _FEW:
            with contextlib.suppress(ValueError):  # a number that the model cannot have
                told = _depths(_with_depth(describe, config, name, few))
                if few in told and value not in told:
                    return name
    return None


def _print_seconds(plan: Quick, rates: planned.Rates, options: argparse.Namespace, out: TextIO) -> None:
    measured = options.measure
    of = "measured here (of the network: assumed)" if measured else "assumed (an H100; --measure measures this machine)"
    if options.device is not None:
        of = f"of the data sheet of {DEVICES[options.device].name}"
    seconds = plan.step_seconds(rates)
    print(
        f"  step       {seconds['total']:.4g} s at rates {of}: {rates.flops:.3g} FLOP/s, {rates.memory:.3g} B/s of "
        f"memory, {rates.network:.3g} B/s sent by a rank, {rates.latency:.2g} s a call; nothing is hidden",
        file=out,
    )
    for name, value in seconds.items():
        if name != "total" and value:
            print(f"    {value:10.4g} s  {name}", file=out)
    writing, place = (measured_write("."), "measured in this folder") if measured else (_WRITES, "assumed")
    print(f"  a save     {plan.written / writing:.4g} s at {writing:.3g} B/s for each rank ({place})", file=out)


def _searched(
    experiment: Loaded, options: argparse.Namespace, flags: list[str], rates: planned.Rates, out: TextIO
) -> int:
    if options.memory is None:
        raise ValueError("--search: got no --memory, wanted the GiB of a device, such as --memory 80")
    base = _config(experiment, options, flags, "dp=1")

    def describe(mesh: Mesh) -> Description:
        return description.require_description(experiment[1](dataclasses.replace(base, mesh=mesh)), options.experiment)

    meshes = meshes_of(options.search, options.axes.split(","))
    found = search(describe, meshes, round(options.memory * 2**30), rates=rates, overlap=_overlap(base))
    print(found, file=out)
    return 0 if found.found else 3 if found.undecided else 1


def _overlap(config: Any) -> bool:
    """Whether the experiment's step overlaps: as its `run.overlap` says, else as by default."""
    options = options_of(config)
    return options is None or options.overlap


def parser() -> argparse.ArgumentParser:
    """The parser of the command line."""
    p = argparse.ArgumentParser(
        allow_abbrev=False,  # a beginning of a name of ours may be a flag of the experiment
        prog="python -m fmegatron.plan",
        description="Plan an experiment's training step: memory, its lines to blame, traffic, work, time, checkpoint.",
        epilog="Further flags (--NAME=VALUE) are the experiment's own. "
        "Exit status: 0 planned, and it fits into --memory and --host-memory; 1 it does not fit; 2 wrong use, or it "
        "could not be done; 3 whether it fits is not known, since not all of the memory was counted.",
    )
    p.add_argument("experiment", help="a file that defines experiment (see fmegatron/check.py)")
    p.add_argument("--mesh", help="axes and sizes, such as dp=2,fsdp=2,tp=2")
    p.add_argument("--rank", type=int, default=0, help="of which the exact plan is")
    p.add_argument("--quick", action="store_true", help="formulas alone, in milliseconds")
    p.add_argument("--memory", type=float, metavar="GIB", help="of a device: does it fit?")
    p.add_argument("--host-memory", type=float, metavar="GIB", help="of the host, for each rank: does it fit?")
    p.add_argument("--all-layers", action="store_true", help=f"count every layer of models of {_DEEP} or more, too")
    p.add_argument("--timeline", action="store_true", help="print what is computed and sent when, as planned")
    p.add_argument("--device", metavar="NAME", help=f"plan the code of a GPU that is not here: {', '.join(DEVICES)}")
    p.add_argument("--passes", action="store_true", help="with --device: every kernel and product, and its time")
    p.add_argument("--measure", action="store_true", help="measure this machine's rates instead of assuming an H100's")
    p.add_argument("--search", type=int, metavar="DEVICES", help="rank all meshes of so many devices")
    p.add_argument(
        "--axes", default="dp,fsdp,tp", help="of the meshes of --search; pp for pipelines, as --pipeline.* has them"
    )
    return p


if __name__ == "__main__":
    sys.exit(main())
