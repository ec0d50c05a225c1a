"""Options of a run: each is a flag, what is printed reads back, and where arguments and fields were before is known."""

import dataclasses
import inspect
import json
import random

import pytest
import torch

from fmegatron import checkpoint, data, loop, tree
from fmegatron.layout import Layout, Mesh
from fmegatron.loop import Options, Settings, field
from fmegatron.loop.config import UsageError
from fmegatron.loop.flags import parse, usage
from fmegatron.loop.options import MOVED, Local, of_before
from fmegatron.loop.plain import plain
from fmegatron.loop.sources import fields_of, text_of, walk

SPECS = {"w": tree.ArraySpec(Layout((4,), torch.float64, Mesh()), 1.0)}


@dataclasses.dataclass(frozen=True)
class Config:
    mesh: Mesh = field(Mesh(), resume="named")
    run: Options = Options("runs/a", 12)
    heads: int = 2


def halve(state, batch):
    return {"w": (state["w"] + batch) / 2}, {"loss": state["w"].sum()}


@data.source
def batch_at(position):
    return torch.full((4,), float(position), dtype=torch.float64)


# Another value of every field.
OTHERS = {
    "run.folder": "runs/b c",
    "run.steps": 7,
    "run.seed": 3,
    "run.allow": ("heads", "data"),
    "run.backend": "eager",
    "run.overlap": False,
    "run.cuda_graph": True,
    "run.deterministic": True,
    "run.log.every": 3,
    "run.log.eval_every": 4,
    "run.log.profile": "trace:steps=1-2; memory:steps=3",
    "run.log.straggler_ratio": None,
    "run.log.peak_flops": 989e12,
    "run.log.flops_per_token": 6e9,
    "run.log.to": ("tensorboard=/tmp/a", "wandb"),
    "run.memory.plan": "off",
    "run.memory.limit_bytes": 80e9,
    "run.memory.planned_bytes": 70e9,
    "run.save.every": 5,
    "run.save.keep": None,
    "run.save.keep_every": 1000,
    "run.save.keep_best": ("heldout_loss", "min", 3),
    "run.save.keep_newer_s": 3600.0,
    "run.save.in_background": True,
    "run.save.on_failure": "warn",
    "run.save.local.folder": "/dev/shm/a",
    "run.save.local.run": "mine",
    "run.save.local.every": 2,
    "run.save.local.copies": 1,
    "run.save.local.keep": 3,
    "run.save.local.durable": False,
    "run.faults.nonfinite": "roll back",
    "run.faults.on_difference": "rerun",
    "run.faults.hash_every": 50,
    "run.faults.inject": "kill:rank=1,step=17+nan:step=20",
    "run.faults.patience": "step=3,save=9",
    "run.faults.spike.factor": 4.0,
    "run.faults.spike.window": 32,
    "run.faults.spike.warmup": 8,
    "run.faults.spike.then": "skip",
    "run.faults.stuck.updates": 500,
    "run.faults.stuck.least": 1e-3,
    "run.faults.stuck.then": "warn",
    "run.faults.restart.most": 2,
    "run.faults.restart.meet_s": 5.0,
    "run.until.hours": 11.5,
    "run.until.file": "STOP",
    "run.until.metric": "heldout_loss",
    "run.until.at_most": 1.5,
    "run.until.at_least": 0.5,
    "run.until.signals": ("SIGUSR1=stop",),
}


def flags_of(names):
    hints = {one.name: one.hint for one in fields_of(Config())}
    return [f"--{name}={text_of(OTHERS[name], hints[name])}" for name in names]


def values(config):
    return {one.name: one.value for one in fields_of(config)}


def test_every_option_is_a_flag_with_its_meaning():
    names = {one.name for one in fields_of(Config()) if one.name.startswith("run.")}
    assert names == OTHERS.keys()
    made = values(parse(["prog", *flags_of(sorted(names - {"run.save.keep_newer_s"}))], Config))
    assert {name: made[name] for name in names - {"run.save.keep_newer_s"}} == {
        name: OTHERS[name] for name in names - {"run.save.keep_newer_s"}
    }
    silent = [line for line in usage(Config).splitlines() if "--run." in line and "   # " not in line]
    assert silent == []
    groups = [one.value for one in walk(Config()) if one.nested and not isinstance(one.value, Options)]
    assert all(len(dataclasses.fields(group)) <= 8 for group in groups) and len(groups) == 9
    assert len(inspect.signature(loop.Run).parameters) <= 10


@pytest.mark.parametrize("part", range(6))
def test_what_is_printed_reads_back(tmp_path, capsys, part):
    """A sixth of all options has another value; the file that --print_config prints gives the same Config."""
    names = random.Random(0).sample(sorted(OTHERS), len(OTHERS))[part::6]
    flags = [*flags_of(names), "--run.until.metric=loss", "--run.until.at_most=3"]
    with pytest.raises(SystemExit):
        parse(["prog", *flags, "--print_config"], Config)
    path = tmp_path / "printed.toml"
    path.write_text(capsys.readouterr().out)
    assert parse(["prog", f"--config={path}"], Config) == parse(["prog", *flags], Config)


def test_a_run_writes_what_gives_its_config_again(tmp_path):
    config = parse(["prog", *flags_of(OTHERS)], Config)
    Settings(config, allow=()).write(tmp_path / "config.json")
    assert parse(["prog", f"--config={tmp_path / 'config.json'}"], Config) == config


def test_a_run_takes_the_options_of_its_config(tmp_path):
    config = parse(["prog", "--run.save.every=1", "--run.save.keep=none", "--run.seed=3"], Config)
    run = loop.Run(tmp_path, halve, SPECS, settings=config)
    list(run(batch_at, 3))
    assert run.manager.steps() == [1, 2, 3] and run.options == config.run
    assert loop.Run(tmp_path, halve, SPECS, settings=config, options=Options(seed=9)).options.seed == 9


BEFORE = {
    **{"mesh": "", "run": "runs/a", "allow": [], "heads": 2, "steps": 3, "seed": 0, "log_every": 1, "save_every": 3},
    **{"async_save": False, "backend": "eager", "deterministic": False, "profile": "", "inject": ""},
}  # a config of e37e37b


def test_a_run_of_before_goes_on(tmp_path, capsys):
    """Its folder, length, saves and faults were fields beside each other: they are compared, and read, as options."""
    run = loop.Run(tmp_path, halve, SPECS, options=Options(save=loop.Save(every=3)))
    run.settings.config = BEFORE
    list(run(batch_at, 3))
    assert checkpoint.metadata(run.manager.path(3))["config"] == BEFORE
    now = dataclasses.replace(Config(), run=Options("runs/a", 5, backend="eager", log=loop.Log(1), save=loop.Save(2)))
    other = dataclasses.replace(now, heads=4, run=dataclasses.replace(now.run, seed=1))
    with pytest.raises(UsageError, match=r"settings: run.seed 0 -> 1, heads 2 -> 4.*--run.allow=run.seed,heads"):
        next(loop.Run(tmp_path, halve, SPECS, settings=other)(batch_at, 6))
    again = loop.Run(tmp_path, halve, SPECS, settings=now)
    assert [info.step for info in again(batch_at, 5)] == [4, 5]
    said = capsys.readouterr().out.partition("settings:\n")[2].splitlines()[:2]
    assert [" ".join(line.split()) for line in said] == ["named run.steps 3 -> 5", "free run.save.every 3 -> 2"]
    path = tmp_path / "old" / "config.json"
    path.parent.mkdir()
    path.write_text(json.dumps({"config": BEFORE, "facts": {}}))
    got = parse(["prog", f"--config={path}", "--run.steps=9"], Config)
    assert got.run == Options("runs/a", 9, backend="eager", log=loop.Log(1), save=loop.Save(3)) and got.heads == 2


def test_values_of_before_name_fields_that_there_are():
    for name, place in MOVED.items():
        if not place.startswith("policies") and name not in ("local", "patience"):
            config = of_before({"run": "runs/x", name: "value"}, Config())
            assert "value" in json.dumps(config) and config["run"].keys() == plain(Options()).keys()


@pytest.mark.parametrize(
    "name, place",
    [
        ("save_every", r"options=loop.Options\(save=loop.Save\(every=...\)\), or the flag --run.save.every$"),
        ("key", r"options=loop.Options\(seed=...\), or the flag --run.seed$"),
        ("spike", r"options=loop.Options\(faults=loop.Faults\(spike=...\)\)$"),
        ("local_every", r"loop.Save\(local=loop.Local\(every=...\)\)\), or the flag --run.save.local.every$"),
        ("until", r"options=loop.Options\(until=...\)$"),
        ("loggers", r"policies=loop.Policies\(loggers=...\)$"),
        ("directory", r"folder, the first argument$"),
    ],
)
def test_an_argument_of_before_is_refused_with_its_place(tmp_path, name, place):
    with pytest.raises(TypeError, match=rf"Run: got {name}=, wanted it in another place: .*{place}"):
        loop.Run(tmp_path, halve, SPECS, **{name: 3})


def test_replicas_of_two_runs_of_one_name_do_not_meet(tmp_path):
    local = Local(str(tmp_path / "ram"), copies=1)
    runs = [loop.Run(tmp_path / of / "run", halve, SPECS, options=Options(save=loop.Save(local=local))) for of in "ab"]
    again = loop.Run(tmp_path / "a" / "run", halve, SPECS, options=Options(save=loop.Save(local=local)))
    names = [run.local.run for run in (*runs, again)]
    assert names[0] != names[1] and names[0] == names[2] and names[0].startswith("run-")
