"""Flags come from the Config at call time: every type, nested, with the nearest name for a wrong one."""

from dataclasses import dataclass, make_dataclass, replace
from typing import Literal

import pytest
from torch.distributed import run as torchrun

from fmegatron.layout import Mesh
from fmegatron.loop import Options
from fmegatron.loop.config import UsageError, field
from fmegatron.loop.flags import _SPELLED, parse, usage, with_flags


@dataclass(frozen=True)
class Model:
    dim: int = 64
    tied: bool = True


@dataclass(frozen=True)
class Config:
    lr: float = 1e-3  # peak learning rate
    steps: int = 100
    name: str = "run"
    compile: bool = True
    betas: tuple[float, float] = (0.9, 0.95)
    sizes: tuple[int, ...] = ()
    limit: int | None = None
    policy: Literal["mincut", "inputs"] | float = "mincut"
    mesh: Mesh = Mesh()
    model: Model = Model()

    def __post_init__(self):
        if self.steps < 1:
            raise ValueError(f"steps: got {self.steps}, wanted 1 or more")


def parsed(*flags):
    return parse(["prog", *flags], Config)


@pytest.mark.parametrize(
    "flag, changes",
    [
        ("--lr=0.5", {"lr": 0.5}),
        ("--steps=2_000", {"steps": 2000}),
        ("--name=a=b", {"name": "a=b"}),
        ("--compile=false", {"compile": False}),
        ("--nocompile", {"compile": False}),
        ("--betas=0.8,0.9", {"betas": (0.8, 0.9)}),
        ("--sizes=1,2,3", {"sizes": (1, 2, 3)}),
        ("--limit=7", {"limit": 7}),
        ("--limit=none", {"limit": None}),
        ("--policy=inputs", {"policy": "inputs"}),
        ("--policy=0.5", {"policy": 0.5}),
        ("--mesh=fsdp=2,tp=2", {"mesh": Mesh(fsdp=2, tp=2)}),
        ("--mesh=", {"mesh": Mesh()}),
        ("--model.dim=256", {"model": Model(dim=256)}),
        ("--nomodel.tied", {"model": Model(tied=False)}),
    ],
)
def test_each_type(flag, changes):
    assert parsed(flag) == replace(Config(), **changes)


def test_defaults_and_instances():
    assert parsed() == Config()
    assert parse(["prog", "--steps=3"], Config(lr=9.0)) == Config(lr=9.0, steps=3)
    assert parse(["prog", "--limit=none"], Config(limit=4)).limit is None


@pytest.mark.parametrize(
    "flag, words",
    [
        ("--stesp=3", "'stesp'. Did you mean: steps"),
        ("--config_lr=3", "'config_lr'. Did you mean: lr ?"),
        ("--steps=many", "--steps=many"),
        ("--betas=1", "got 1 values"),
        ("--policy=fast", "wanted one of mincut, inputs"),
        ("--modl.dim=3", "Did you mean: model.dim"),
        ("--dim=3", "Did you mean: model.dim ?"),
        ("--model=3", "'model': model is a group of flags. Did you mean: --model.dim=3 ?"),
        ("--model", "Did you mean: --model.dim=..., --model.tied=... ?"),
        ("--model.lr=3", "Did you mean: lr ?"),
        ("--lr=abc", "--lr=abc: got 'abc', wanted a number, such as 0.1"),
        ("--mesh=fsdp2", "wanted axes and their sizes, major first, such as fsdp=2,tp=2"),
        ("--mesh=fsdp=*,tp=2", "got 'fsdp=*,tp=2' for 1 ranks, wanted a number of ranks that 2 divides"),
        ("--mesh=fsdp=*,tp=*", "wanted one axis with a *"),
        ("--mesh=tp=2,tp=2", "got 'tp=2'"),
        ("--steps=0", "steps: got 0, wanted 1 or more"),
        ("steps=3", "wanted flags only"),
    ],
)
def test_bad_flags(flag, words):
    with pytest.raises(UsageError) as error:
        parsed(flag)
    assert words in str(error.value)


OF_A_RUN = {
    "--run.steps=0": "Options.steps: got 0",
    "--run.save.every=0": "Save.every: got 0",
    "--run.save.keep=0": "Save.keep: got 0",
    "--run.save.keep_newer_s=-1": "Save.keep_newer_s: got -1.0, wanted seconds above 0",
    "--run.save.keep_best=loss,least,2": "Save.keep_best: got",
    "--run.save.local.copies=0": "Local.copies: got 0",
    "--run.until.at_most=1": "Until: got at_most=1.0, wanted metric",
    "--run.until.hours=-1": "Until: hours: got -1.0",
    "--run.until.signals=FOO": "Until: signals: got 'FOO'",
    "--run.faults.spike.factor=0.5": "LossSpike: got factor=0.5, window=64, warmup=16",
    "--run.faults.spike.then=foo": "LossSpike: then: got 'foo'",
    "--run.faults.stuck.updates=-4": "LossStuck: got updates=-4, least=0.0001, then='raise'",
    "--run.faults.restart.most=-1": "Restart: got most=-1, meet_s=60.0",
    "--run.faults.inject=foo": "inject: got 'foo'",
    "--run.faults.patience=foo": "patience: got 'foo'",
    "--run.log.profile=foo": "profile: got 'foo'",
    "--run.log.to=foo": "Log.to: got 'foo'",
    "--run.save.in_background=maybe": "got 'maybe', wanted true or false",
    "--run.memory.limit_bytes=0": "Memory.limit_bytes: got 0.0",
    "--lr=0": "OfARun.lr: got 0.0, wanted a number above 0",
}


@dataclass(frozen=True)
class OfARun:
    lr: float = field(0.1, above=0)
    run: Options = Options()


@pytest.mark.parametrize("flag", OF_A_RUN)
def test_an_error_of_an_option_begins_with_its_flag(flag, tmp_path):
    """By one rule, whatever the group says: its flags that the error names, or all that it was given."""
    with pytest.raises(UsageError) as error:
        parse(["prog", "--run.folder=runs/a", "--run.log.every=3", flag], OfARun)
    name, text = flag.partition("=")[0], str(error.value)
    assert text.removeprefix("flag ").startswith(f"{name}=") and OF_A_RUN[flag] in text
    assert text.count("--run.") <= 1 and "(of" not in text and "Until(" not in text


def test_an_error_of_several_options_names_them_and_the_file(tmp_path):
    (tmp_path / "a.toml").write_text("[run.faults.spike]\nwindow = 4\n")
    flags = [f"--config={tmp_path / 'a.toml'}", "--run.faults.spike.factor=3", "--run.faults.spike.warmup=9"]
    with pytest.raises(UsageError, match=r"^--run.faults.spike.factor=3.0 --run.faults.spike.warmup=9: LossSpike: got "
                       r"factor=3.0, window=4, warmup=9, .* \(values of .*a.toml\)$"):  # fmt: skip
        parse(["prog", *flags], OfARun)
    with pytest.raises(UsageError, match=r"^Save.every: got 0, wanted at least 1 \(values of .*b.toml\)$"):
        (tmp_path / "b.toml").write_text("[run.save]\nevery = 0\n")
        parse(["prog", f"--config={tmp_path / 'b.toml'}"], OfARun)


def test_an_error_of_the_experiment_names_the_flags_that_were_given():
    """Of what only its own code can say, such as a warmup that is longer than the run."""
    argv = ["prog", "--run.steps=4", "--lr=0.1"]
    assert with_flags("schedule: got warmup=50", argv) == "schedule: got warmup=50 (given: --run.steps=4 --lr=0.1)"
    assert with_flags("--lr=0.1: got it", argv) == "--lr=0.1: got it" and with_flags("no", ["prog"]) == "no"


def test_two_experiments_do_not_meet():
    """Both have a flag lr; neither knows of the other's values."""

    @dataclass(frozen=True)
    class Other:
        lr: float = 3.0

    assert parsed("--lr=1").lr == 1.0
    assert parse(["prog"], Other).lr == 3.0


def test_help(capsys):
    with pytest.raises(SystemExit) as stopped:
        parsed("--help")
    assert stopped.value.code == 0
    text = capsys.readouterr().out
    assert "--policy=mincut   # (mincut, inputs)" in text
    assert "--lr=0.001   # peak learning rate" in text and "--model.dim=64" in text
    assert text.strip() == usage(Config)


def test_a_field_without_default_is_named():
    @dataclass(frozen=True)
    class Bare:
        lr: float

    with pytest.raises(ValueError, match="Bare.lr: got no default"):
        parse(["prog"], Bare)


@pytest.mark.parametrize(
    "name, whose", [("v", "absl"), ("flagfile", "absl"), ("config", "every experiment"), ("help", "every experiment")]
)
def test_a_field_with_the_name_of_another_flag_is_refused(name, whose):
    clashing = make_dataclass("Clashing", [(name, int, 3)], frozen=True)
    with pytest.raises(
        ValueError, match=f"Clashing.{name}: got the name of a flag of {whose}, wanted another.* {name}_"
    ):
        parse(["prog"], clashing)
    assert parse(["prog", f"--part.{name}=4"], make_dataclass("Group", [("part", clashing, clashing())], frozen=True))


def test_a_field_that_is_the_no_of_another_is_refused():
    both = make_dataclass("Both", [("bias", bool, True), ("nobias", int, 3)], frozen=True)
    with pytest.raises(ValueError, match=r"Both.nobias: got the name of --bias=false, wanted another name"):
        parse(["prog"], both)


@pytest.mark.parametrize("name", ["run", "log", "n"])
def test_a_field_that_torchrun_would_not_let_through_is_refused(name):
    """It takes what several of its flags begin with for one of them, behind the script too."""
    words = f"{name}: got a beginning of torchrun's --[a-z-]+, which it refuses, wanted another name"
    with pytest.raises(ValueError, match=words):
        parse(["prog"], make_dataclass("Config", [(name, str, "runs/a")], frozen=True))
    options = torchrun.get_args_parser()
    with pytest.raises(SystemExit):
        options.parse_args(["script.py", f"--{name}=x"])
    assert options.parse_args(["script.py", "--run.folder=x", "--mesh=dp=2", "--role=a"]).training_script_args


def test_the_flags_of_torchrun_are_those():
    actions = torchrun.get_args_parser()._actions
    names = {name.removeprefix("--") for action in actions for name in action.option_strings if name.startswith("--")}
    assert names - {"help"} <= set(_SPELLED)
