"""A Config that cannot be meant is refused when it is made, in words; what means the same is taken."""

import dataclasses
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest

from fmegatron.layout import Mesh
from fmegatron.loop import check, field, launch
from fmegatron.loop.config import UsageError
from fmegatron.loop.flags import parse


@dataclass(frozen=True)
class Part:
    width: int = field(8, least=1)

    __post_init__ = check


@dataclass(frozen=True)
class Config:
    mesh: Mesh = Mesh()
    place: str = field("runs/a", resume="free")
    steps: int = field(10, resume="named", least=0)
    every: int = field(5, resume="free", least=1)
    lr: float = field(1e-3, resume="named", above=0)
    bf16: bool = False
    kind: Literal["a", "b", 3] = "a"
    limit: int | None = field(None, resume="free", least=1)
    prompts: tuple[str, ...] = ("a",)
    pair: tuple[int, float] = (1, 2.0)
    part: Part = Part()
    anything: Any = None
    folder: str = field("runs", resume="free", least=1)
    layers: tuple[int, ...] = field((1, 2), above=1)

    __post_init__ = check


@pytest.mark.parametrize(
    "wrong, words",
    [
        ({"every": 0}, "Config.every: got 0, wanted at least 1"),
        ({"every": True}, "Config.every: got True of type bool, wanted int"),
        ({"every": 2.0}, "Config.every: got 2.0 of type float, wanted int"),
        ({"steps": "500"}, "Config.steps: got '500' of type str, wanted int"),
        ({"steps": None}, "Config.steps: got None of type NoneType, wanted int"),
        ({"steps": -1}, "Config.steps: got -1, wanted at least 0"),
        ({"lr": "1e-3"}, "Config.lr: got '1e-3' of type str, wanted float"),
        ({"lr": 0}, "Config.lr: got 0.0, wanted a number above 0"),
        ({"lr": float("nan")}, "Config.lr: got nan, wanted a number above 0"),
        ({"bf16": 1}, "Config.bf16: got 1 of type int, wanted bool"),
        ({"kind": "c"}, "Config.kind: got 'c' of type str, wanted typing.Literal['a', 'b', 3]"),
        ({"kind": 3.0}, "Config.kind: got 3.0"),
        ({"limit": 0}, "Config.limit: got 0, wanted at least 1"),
        ({"limit": "no"}, "Config.limit: got 'no' of type str, wanted int | None"),
        ({"prompts": "ROMEO:"}, "Config.prompts: got 'ROMEO:' of type str, wanted tuple[str, ...]"),
        ({"prompts": (1,)}, "Config.prompts: got (1,) of type tuple"),
        ({"pair": (1,)}, "Config.pair: got (1,)"),
        ({"mesh": "fsdp=2"}, "Config.mesh: got 'fsdp=2' of type str, wanted Mesh"),
        ({"folder": ""}, "Config.folder: got '', wanted at least 1 characters"),
        ({"layers": (3,)}, "Config.layers: got (3,), wanted a number of values above 1"),
        ({"place": 3}, "Config.place: got 3 of type int, wanted str"),
        ({"part": {"width": 3}}, "Config.part: got {'width': 3} of type dict, wanted Part"),
    ],
)
def test_wrong_values(wrong, words):
    with pytest.raises(ValueError) as raised:
        Config(**wrong)
    assert str(raised.value).startswith(words)


def test_a_part_checks_itself():
    with pytest.raises(ValueError, match="Part.width: got 0, wanted at least 1"):
        Config(part=Part(width=0))


@pytest.mark.parametrize(
    "given, taken",
    [
        ({"steps": np.int64(3)}, {"steps": 3}),
        ({"lr": 1}, {"lr": 1.0}),
        ({"lr": np.float32(0.5)}, {"lr": 0.5}),
        ({"bf16": np.bool_(True)}, {"bf16": True}),
        ({"place": Path("runs/b")}, {"place": "runs/b"}),
        ({"prompts": ["a", "b"]}, {"prompts": ("a", "b")}),
        ({"pair": [np.int32(1), 2]}, {"pair": (1, 2.0)}),
        ({"kind": 3}, {"kind": 3}),
        ({"place": "", "folder": Path("a")}, {"place": "", "folder": "a"}),
        ({"limit": None, "anything": object}, {"limit": None, "anything": object}),
    ],
)
def test_values_that_mean_the_same_are_taken(given, taken):
    """And make the same Config: the same values of the same types."""
    got, wanted = Config(**given), Config(**taken)
    assert got == wanted and hash(got) == hash(wanted)
    for item in dataclasses.fields(Config):
        assert type(getattr(got, item.name)) is type(getattr(wanted, item.name)), item.name


def test_on_a_command_line_it_is_one_line_and_status_2(capsys):
    for flags in (["--every=0"], ["--lr=0"], ["--part.width=0"]):
        with pytest.raises(SystemExit) as ended:
            launch(lambda config: config, Config, ["prog", *flags])
        assert ended.value.code == 2
    assert capsys.readouterr().err.splitlines()[::2] == [
        "prog: --every=0: Config.every: got 0, wanted at least 1",
        "prog: --lr=0.0: Config.lr: got 0.0, wanted a number above 0",
        "prog: --part.width=0: Part.width: got 0, wanted at least 1",
    ]


def test_a_config_that_does_not_check_itself_is_checked_by_flags():
    @dataclass(frozen=True)
    class Plain:
        steps: int = field(3, least=1)

    assert parse(["prog", "--steps=1"], Plain).steps == 1
    with pytest.raises(UsageError, match="Plain.steps: got 0, wanted at least 1"):
        parse(["prog", "--steps=0"], Plain)
    with pytest.raises(ValueError, match="resume: got 'never', wanted one of refused, named, free"):
        field(3, resume="never")
