"""Flags come from the Config at call time: every type, nested, with the nearest name for a wrong one."""

from dataclasses import dataclass, replace
from typing import Literal

import pytest

from fmegatron.layout import Mesh
from fmegatron.loop import UsageError, parse
from fmegatron.loop.flags import usage


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
        ("--config_lr=0.5", {"lr": 0.5}),
        ("--config_steps=2_000", {"steps": 2000}),
        ("--config_name=a=b", {"name": "a=b"}),
        ("--config_compile=false", {"compile": False}),
        ("--noconfig_compile", {"compile": False}),
        ("--config_betas=0.8,0.9", {"betas": (0.8, 0.9)}),
        ("--config_sizes=1,2,3", {"sizes": (1, 2, 3)}),
        ("--config_limit=7", {"limit": 7}),
        ("--config_limit=none", {"limit": None}),
        ("--config_policy=inputs", {"policy": "inputs"}),
        ("--config_policy=0.5", {"policy": 0.5}),
        ("--config_mesh=fsdp=2,tp=2", {"mesh": Mesh(fsdp=2, tp=2)}),
        ("--config_mesh=", {"mesh": Mesh()}),
        ("--config_model.dim=256", {"model": Model(dim=256)}),
        ("--noconfig_model.tied", {"model": Model(tied=False)}),
    ],
)
def test_each_type(flag, changes):
    assert parsed(flag) == replace(Config(), **changes)


def test_defaults_and_instances():
    assert parsed() == Config()
    assert parse(["prog", "--config_steps=3"], Config(lr=9.0)) == Config(lr=9.0, steps=3)
    assert parse(["prog", "--config_limit=none"], Config(limit=4)).limit is None


@pytest.mark.parametrize(
    "flag, words",
    [
        ("--config_stesp=3", "'config_stesp'. Did you mean: config_steps"),
        ("--confg_lr=3", "Did you mean: config_limit, config_lr"),
        ("--config_steps=many", "--config_steps=many"),
        ("--config_betas=1", "got 1 values"),
        ("--config_policy=fast", "wanted one of mincut, inputs"),
        ("--config_mesh=fsdp2", "wanted axes and their sizes, major first, such as fsdp=2,tp=2"),
        ("--config_mesh=fsdp=*,tp=2", "got 'fsdp=*,tp=2' for 1 ranks, wanted a number of ranks that 2 divides"),
        ("--config_mesh=fsdp=*,tp=*", "wanted one axis with a *"),
        ("--config_mesh=tp=2,tp=2", "got 'tp=2'"),
        ("--config_steps=0", "steps: got 0, wanted 1 or more"),
        ("steps=3", "wanted flags only"),
    ],
)
def test_bad_flags(flag, words):
    with pytest.raises(UsageError) as error:
        parsed(flag)
    assert words in str(error.value)


def test_two_experiments_do_not_meet():
    """Both have a flag config_lr; neither knows of the other's values."""

    @dataclass(frozen=True)
    class Other:
        lr: float = 3.0

    assert parsed("--config_lr=1").lr == 1.0
    assert parse(["prog"], Other).lr == 3.0


def test_help(capsys):
    with pytest.raises(SystemExit) as stopped:
        parsed("--help")
    assert stopped.value.code == 0
    text = capsys.readouterr().out
    assert "--config_lr=0.001   # peak learning rate" in text and "--config_model.dim=64" in text
    assert text.strip() == usage(Config)


def test_a_field_without_default_is_named():
    @dataclass(frozen=True)
    class Bare:
        lr: float

    with pytest.raises(ValueError, match="Bare.lr: got no default"):
        parse(["prog"], Bare)
