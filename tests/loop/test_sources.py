"""Values of a Config from files and flags: the later one wins, each is named, and texts read back."""

import json
import os
import random
import shlex
import string
import sys
from dataclasses import dataclass, fields
from typing import Literal

import pytest

from fmegatron.layout import Mesh
from fmegatron.loop import Settings, check, field, launch
from fmegatron.loop.config import UsageError
from fmegatron.loop.flags import parse, usage
from fmegatron.loop.sources import as_toml, text_of, value_of
from tests.house import ROOT
from tests.sampling import seeds


@dataclass(frozen=True)
class Optim:
    lr: float = field(1e-3, resume="named", above=0)
    betas: tuple[float, float] = (0.9, 0.95)
    name: Literal["adamw", "muon"] = "adamw"

    __post_init__ = check


@dataclass(frozen=True)
class Config:
    steps: int = field(100, resume="named", least=0)  # updates
    place: str = "runs/a b"
    prompts: tuple[str, ...] = ("ROMEO:\n", 'a, "b"', "")
    limit: int | None = None
    note: str | None = None
    level: int | str = 3
    rate: Literal["auto"] | float = "auto"
    bf16: bool = False
    sizes: tuple[int, ...] = ()
    pair: tuple[str, int] = ("none", 1)
    mesh: Mesh = Mesh(fsdp=2, tp=2)
    optim: Optim = Optim()

    __post_init__ = check


def parsed(*flags):
    return parse(["prog", *flags], Config)


@pytest.fixture
def toml(tmp_path):
    def write(text, name="a.toml"):
        (tmp_path / name).write_text(text)
        return str(tmp_path / name)

    return write


def test_later_ones_win(toml):
    first = toml('steps = 1\nplace = "first"\n[optim]\nlr = 0.1\nname = "muon"')
    second = toml("steps = 2e0\nmesh = {fsdp = 4}", "b.toml")
    got = parsed(f"--config={first}", f"--config={second}", "--optim.lr=0.3", "--bf16")
    assert got == Config(steps=2, place="first", bf16=True, mesh=Mesh(fsdp=4), optim=Optim(lr=0.3, name="muon"))
    assert parsed(f"--config={first}", f"--config={second}").optim.lr == 0.1
    assert parsed("--steps=7", f"--config={first}").steps == 7  # wherever it is on the line


def test_flags():
    assert parsed("--steps=5", "--optim.lr", "0.5", "--bf16") == Config(steps=5, bf16=True, optim=Optim(lr=0.5))
    assert parsed("--nobf16").bf16 is False and parsed("-steps=1e3").steps == 1000
    with pytest.raises(UsageError, match=r"'stepss'. Did you mean: steps"):
        parsed("--stepss=5")


def test_print_config_is_a_file_that_gives_the_same(toml, capsys):
    path = toml("steps = 3")
    with pytest.raises(SystemExit) as left:
        parsed(f"--config={path}", "--print_config", "--note=none", "--limit=4")
    text = capsys.readouterr().out
    assert left.value.code == 0
    assert f"steps = 3  # {path}\n" in text and "limit = 4  # --limit\n" in text
    assert 'note = "none"  # --note\n' in text and "bf16 = false  # default\n" in text and "[optim]\n" in text
    assert parsed(f"--config={toml(text, 'b.toml')}") == Config(steps=3, limit=4)


def test_the_json_of_a_run_gives_its_config(tmp_path):
    config = Config(steps=9, note='"none', optim=Optim(lr=1e-5), rate=float("inf"), level="3", sizes=(1, 2))
    Settings(config).write(tmp_path / "config.json")
    assert parsed(f"--config={tmp_path / 'config.json'}") == config
    assert json.loads((tmp_path / "config.json").read_text())["config"]["optim"]["class"] == "Optim"


@pytest.mark.parametrize(
    "text, words",
    [
        (
            "stepss = 1",
            "a.toml: stepss: got a name that the Config does not have, wanted one of its fields (did you mean steps",
        ),
        ("[optim]\nlrr = 1", "optim.lrr: got a name"),
        ("[optimm]\nlr = 1", "optimm: got a name"),
        ("optim = 3", "optim: got a name"),
        ('steps = "many"', "steps: got 'many' of type str, wanted int"),
        ("steps = 1.5", "steps: got 1.5 of type float, wanted int"),
        ("steps = true", "steps: got True of type bool, wanted int"),
        ("steps = -1", "Config.steps: got -1, wanted at least 0 (values of"),
        ("place = 1979-05-27", "wanted str"),
        ("prompts = 'one'", "prompts: got 'one' of type str, wanted tuple[str, ...]"),
        ("pair = ['a']", "pair: got 1 values, wanted 2"),
        ("mesh = 'fsdp'", "mesh: got 'fsdp', wanted axes and their sizes"),
        ("mesh = {fsdp = 0}", "mesh: got 'fsdp=0'"),
        ("[optim]\nlr = 0", "Optim.lr: got 0.0, wanted a number above 0"),
        ("[optim]\nname = 'sgd'", "wanted typing.Literal['adamw', 'muon']"),
        ("steps = ", "got what is no TOML"),
        ("steps = 1\nsteps = 2", "got what is no TOML"),
    ],
)
def test_wrong_files(toml, text, words):
    with pytest.raises(UsageError) as raised:
        parsed(f"--config={toml(text)}")
    assert words in str(raised.value)


def test_a_byte_order_mark_is_no_text(tmp_path):
    path = tmp_path / "marked.toml"
    path.write_bytes(b"\xef\xbb\xbfsteps = 7\n")
    assert parsed(f"--config={path}").steps == 7


def test_no_file(tmp_path):
    with pytest.raises(UsageError, match=r"got no file to read \(No such file"):
        parsed(f"--config={tmp_path / 'none.toml'}")
    for text in ("[1]", '{"steps": 3}', '{"config": 3}'):
        (tmp_path / "own.json").write_text(text)
        with pytest.raises(UsageError, match="own.json: got JSON that no run has written, wanted TOML"):
            parsed(f"--config={tmp_path / 'own.json'}")
    (tmp_path / "big.toml").write_bytes(b"#" * (1 << 20) + b"\n")
    with pytest.raises(UsageError, match="got more than 1048576 bytes"):
        parsed(f"--config={tmp_path / 'big.toml'}")
    (tmp_path / "bytes.toml").write_bytes(b"\xff\xfe")
    with pytest.raises(UsageError, match="got what is no TOML"):
        parsed(f"--config={tmp_path / 'bytes.toml'}")


@pytest.mark.parametrize(
    "text, value", [("1e3", 1000), ("2.0", 2), ("1_000", 1000), ("0x10", 16), ("-1E2", -100), ("+5", 5)]
)
def test_whole_numbers(text, value):
    got = value_of(text, int)
    assert got == value and type(got) is int


@pytest.mark.parametrize("text", ["1.5", "1e-1", "1e999", "ten", "", "1e", "9" * 5000, "nan", "0x", "1,2"])
def test_no_whole_numbers(text):
    with pytest.raises(ValueError, match="wanted a whole number"):
        value_of(text, int)


# ---- random ones -----------------------------------------------------------------------------------------------------
ALPHABET = string.ascii_letters + string.digits + "\"'\\,=()[]{}#$ \t\n\x00\x7fé漢😀-_./:;`!*"


def a_text(rng):
    return (
        rng.choice(["none", "None", "", "3", "1e3", "true", "auto", '"', "inf", *["x"] * 6])
        if rng.random() < 0.3
        else ("".join(rng.choice(ALPHABET) for _ in range(rng.randrange(12))))
    )


def a_number(rng):
    return rng.choice([0.0, -0.0, 1e-300, 1e300, 0.1, rng.random(), -rng.random() * 10 ** rng.randrange(20), 1e16])


def a_config(rng):
    def some(make):
        return tuple(make(rng) for _ in range(rng.randrange(4)))

    return Config(
        steps=rng.choice([0, 1, 10**18, rng.randrange(1000)]),
        place=a_text(rng),
        prompts=some(a_text),
        limit=rng.choice([None, 0, -5, rng.randrange(10**9)]),
        note=rng.choice([None, a_text(rng)]),
        level=rng.choice([rng.randrange(10), a_text(rng)]),
        rate=rng.choice(["auto", a_number(rng), float("inf")]),
        bf16=rng.random() < 0.5,
        sizes=some(lambda r: r.randrange(-5, 10**6)),
        pair=(a_text(rng), rng.randrange(9)),
        mesh=rng.choice([Mesh(), Mesh(dp=2), Mesh(fsdp=2, tp=4), Mesh(a=1, b=3)]),
        optim=Optim(abs(a_number(rng)) + 1e-9, (a_number(rng), 0.5), rng.choice(["adamw", "muon"])),
    )


def flags_of(config, prefix="--"):
    for one in fields(config):
        value = getattr(config, one.name)
        if isinstance(value, Optim):
            yield from flags_of(value, f"{prefix}{one.name}.")
        else:
            hints = {"note": str | None, "level": int | str, "rate": Literal["auto"] | float}
            yield f"{prefix}{one.name}={text_of(value, hints.get(one.name, type(value)))}"


@pytest.mark.long
@pytest.mark.parametrize("seed", seeds("configs", 2, 2))
def test_every_config_reads_back_from_flags_help_and_files(seed, tmp_path):
    rng = random.Random(seed)
    for _ in range(20):
        config = a_config(rng)
        assert parsed(*flags_of(config)) == config
        shown = usage(config).partition("\n")[2].partition("  --help")[0]
        assert parsed(*shlex.split(shown, comments=True)) == config
        path = tmp_path / "a.toml"
        path.write_bytes(as_toml(config).encode())
        assert parsed(f"--config={path}") == config
        Settings(config).write(tmp_path / "config.json")
        assert parsed(f"--config={tmp_path / 'config.json'}") == config


def a_line(rng):
    if rng.random() < 0.2:  # one that is right, whatever else is drawn
        return rng.choice(["--steps=12", "--steps=1e3", "--optim.lr=1e-3", "--place=a", "--nobf16"])
    names = [
        "steps",
        "place",
        "prompts",
        "limit",
        "mesh",
        "optim.lr",
        "optim",
        "bf16",
        "rate",
        "x",
        "config",
        "",
        "help ",
    ]
    name = rng.choice(names) + rng.choice(["", "", "", "s", "."])
    start = rng.choice(["--", "--", "-", "--no", "", "--config_", "---"])
    return start + name + rng.choice(["=", "", "=="]) + rng.choice([a_text(rng), str(a_number(rng)), "fsdp=2", "1e3"])


def lines_are_configs_or_errors(seed, count, folder):
    rng, valid = random.Random(seed), 0
    for _ in range(count):
        argv = ["prog", *(a_line(rng).replace("-help", "-h") for _ in range(rng.randrange(1, 4)))]
        if rng.random() < 0.3:
            path = folder / "x.toml"
            path.write_text(as_toml(a_config(rng))[rng.randrange(200) :][: rng.randrange(1, 400)])
            argv.append(f"--config={path}")
        try:
            made = parse(argv, Config)
        except UsageError as error:
            assert str(error)
        else:
            assert type(made) is Config and parse(["prog", *flags_of(made)], Config) == made
            valid += 1
    return valid


@pytest.mark.medium
@pytest.mark.parametrize("seed", seeds("lines", 1, 1))
def test_random_lines_and_files_end_in_an_error_or_a_config(seed, tmp_path):
    lines_are_configs_or_errors(seed, 300, tmp_path)  # so few are all errors on one day of five


@pytest.mark.slow
def test_ten_thousand_of_them(tmp_path):
    assert lines_are_configs_or_errors(seeds("many lines", 0, 1)[0], 10_000, tmp_path) > 50


# ---- with others -----------------------------------------------------------------------------------------------------
APP = """
from absl import app, flags
from fmegatron import loop
from tests.loop.test_sources import Config

flags.DEFINE_string("own", "", "a flag of the program")

def main(argv):
    loop.launch(lambda config: print(config.steps, flags.FLAGS.own), Config, argv)

app.run(main, flags_parser=lambda argv: flags.FLAGS(argv, known_only=True))
"""


@pytest.mark.long
def test_under_absl_app(python):
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-c", APP, "--own=mine", "--steps=1e3", "--verbosity=-1"]
    done = python.run(command, env=environment, timeout=300)
    assert done.stdout == "1000 mine\n", done.stderr


def test_launch_reads_them(toml):
    assert launch(lambda config: config.steps, Config, ["prog", f"--config={toml('steps = 3')}"]) == 3


def test_yaml_is_refused_with_the_way(tmp_path):
    path = tmp_path / "run.yaml"
    path.write_text("steps: 3\n")
    with pytest.raises(UsageError, match=r"run.yaml: got YAML, wanted TOML; --print_config prints the values as a"):
        parse(["prog", f"--config={path}"], Config)
