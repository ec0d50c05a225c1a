"""Command-line flags made from a frozen dataclass when they are needed, never at import."""

import collections
import contextlib
import dataclasses
import inspect
import os
import shlex
import traceback
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from absl import flags

from fmegatron import tree
from fmegatron.loop.config import Config, check, type_name
from fmegatron.loop.sources import (
    SourceError,
    as_toml,
    fields_of,
    of_environment,
    of_file,
    text_of,
    value_of,
    walk,
)

PREFIX = "config_"
FILES = "config"
_OWN = (
    ("help", "print these flags and stop"),
    ("print_config", "print the value of each field, and where it is from, as a TOML file, and stop"),
    (FILES, "values of a TOML file, or of a run's config.json; variables and flags win over them"),
)


class UsageError(ValueError):
    """A command line that does not fit the `Config`; the message states what was wrong and names the nearest flag."""


@contextlib.contextmanager
def set_up() -> Iterator[None]:
    """Within this block, in which an experiment makes what its Config asks for, a ValueError is a UsageError.

    For values that only the data, the model or the number of ranks show to be wrong: `launch` ends with one line and
    status 2. The line names where in the experiment it was, and a notebook shows the ValueError as its cause. Errors of
    other types, those with a type of their own (a damaged checkpoint, another run in the folder) among them, pass. To
    end before anything is written, and before the first step: no ValueError of a step is about the command line.

    >>> with set_up():
    ...     raise ValueError("windows: got 9, the text has 1 to 6 of them")
    Traceback (most recent call last):
    fmegatron.loop.flags.UsageError: windows: got 9, the text has 1 to 6 of them (...)
    """
    try:
        yield
    except ValueError as error:
        if type(error) is not ValueError:
            raise
        frames = traceback.extract_tb(error.__traceback__)
        where = f" ({os.path.basename(frames[1].filename)}:{frames[1].lineno})" if len(frames) > 1 else ""
        raise UsageError(f"{error}{where}") from error


def parse(argv: Sequence[str], config: Config, environment: Mapping[str, str] | None = None) -> Config:
    """Return `config` with values of files, the environment and the command line in place of its defaults.

    Later ones win: the defaults; `--config=FILE` (TOML, or the `config.json` of a run; may be given several times);
    variables such as FMEGATRON_CONFIG_LR, FMEGATRON_CONFIG_MODEL__DIM; flags. Each field is a flag
    `--config_NAME=VALUE`, or short `--NAME=VALUE`; a field that is a dataclass gives one flag for each of its own
    fields, `--config_model.dim=256`. Types: int (also `1e3`), float, bool (also `--noconfig_x`), str, Literal, tuples
    (`1,2,3`; a text with commas in double quotes), Optional (`none`), Mesh (`fsdp=2,tp=2`; empty: one rank;
    `fsdp=*,tp=2`: as many as are left).
    `--print_config` prints the values, and where each is from, as a TOML file; `--help` the flags.

    Args:
        argv: program name and flags.
        config: a frozen dataclass, or an instance of one, whose fields all have defaults.
        environment: variables; None: those of this process.

    Raises:
        UsageError: an unknown flag, name or variable (with the nearest names), a bad value or a stray argument.
        SystemExit: with status 0, after `--help` and `--print_config`.

    >>> @dataclasses.dataclass(frozen=True)
    ... class Config:
    ...     lr: float = 1e-3
    ...     steps: int = 100
    >>> parse(["prog", "--config_lr=0.1", "--steps=1e3"], Config, {}).steps
    1000
    >>> parse(["prog", "--config_lrr=1"], Config, {})
    Traceback (most recent call last):
    fmegatron.loop.flags.UsageError: Unknown command line flag 'config_lrr'. Did you mean: config_lr ?
    """
    defaults = _instance(config)
    values = flags.FlagValues()
    for name, text in _OWN:
        if name == FILES:
            flags.DEFINE_multi_string(name, [], text, flag_values=values, module_name="launch")
        else:
            flags.DEFINE_boolean(name, False, text, flag_values=values, module_name="launch")
    _define(defaults, values)
    try:
        rest = values(_full_names(argv, values))[1:]
    except flags.UnrecognizedFlagError as error:
        short = tree.did_you_mean(error.flagname, [field.name for field in fields_of(defaults)])
        raise UsageError(f"{error}{'' if error.flagname.startswith(PREFIX) else short}") from None
    except (flags.Error, ValueError) as error:  # the second of absl, too: a value behind --noNAME
        raise UsageError(str(error)) from None
    if values["help"].value:
        print(usage(defaults))
        raise SystemExit(0)
    if rest:
        raise UsageError(f"got the argument {rest[0]!r}, wanted flags only: --{PREFIX}NAME=VALUE (see --help)")
    given: dict[str, Any] = {}
    origins: dict[str, str] = {}
    try:
        for path in values[FILES].value or ():
            for name, value in of_file(path, defaults).items():
                given[name], origins[name] = value, path
        for name, (variable, value) in of_environment(
            defaults, os.environ if environment is None else environment
        ).items():
            given[name], origins[name] = value, variable
    except SourceError as error:
        raise UsageError(str(error)) from error
    for name in (field.name for field in fields_of(defaults)):
        if values[PREFIX + name].present:
            given[name], origins[name] = values[PREFIX + name].value, f"--{PREFIX}{name}"
    made = _with_values(defaults, given, origins)
    if values["print_config"].value:
        print(as_toml(made, lambda name: origins.get(name, "default")))
        raise SystemExit(0)
    return made


def _full_names(argv: Sequence[str], values: flags.FlagValues) -> list[str]:
    """The command line with `--config_steps` for `--steps`, `--noconfig_x` for `--nox`; other names stay."""
    found = list(argv)
    for i, argument in enumerate(found[1:], 1):
        if argument == "--":
            break
        dashes = argument[: len(argument) - len(argument.lstrip("-"))]
        name, equals, value = argument[len(dashes) :].partition("=")
        if len(dashes) not in (1, 2) or name in values:
            continue
        if PREFIX + name in values:
            found[i] = f"--{PREFIX}{name}{equals}{value}"
        elif name.startswith("no") and PREFIX + name[2:] in values:
            found[i] = f"--no{PREFIX}{name[2:]}{equals}{value}"
    return found


def usage(config: Config) -> str:
    """One line for each flag of `config`: name and default, as a shell reads them, and the field's comment."""
    lines, comments = [], {}
    for field in fields_of(_instance(config)):
        if type(field.owner) not in comments:
            comments[type(field.owner)] = _comments(field.owner)
        comment = comments[type(field.owner)].get(field.name.rpartition(".")[2])
        flag = shlex.quote(f"--{PREFIX}{field.name}={text_of(field.value, field.hint)}")
        lines.append(f"  {flag}" + (f"   # {comment}" if comment else ""))
    own = [f"  --{name}" + ("=FILE" if name == FILES else "") + f"   # {text}" for name, text in _OWN]
    return "\n".join([f"flags, with their defaults (--{PREFIX}NAME may be --NAME):", *lines, *own])


def _instance(config):
    if not isinstance(config, type):
        return config
    missing = [
        f.name
        for f in dataclasses.fields(config)
        if f.default is dataclasses.MISSING and f.default_factory is dataclasses.MISSING
    ]
    if missing:
        raise ValueError(f"{config.__name__}.{missing[0]}: got no default, wanted one for every field of a Config")
    return config()


def _comments(instance) -> dict[str, str]:
    """The comments at the end of the lines of fields in the source, by their names."""
    comments = {}
    try:
        for line in inspect.getsource(type(instance)).splitlines():
            code, mark, comment = line.partition("  # ")
            name, colon, _ = code.strip().partition(":")
            if mark and colon and name.isidentifier():
                comments[name] = comment.strip()
    except (OSError, TypeError):  # written at a prompt: there is no source to read
        pass
    return comments


def _define(config: Config, values: flags.FlagValues) -> None:
    for field in fields_of(config):
        name = PREFIX + field.name
        if field.hint is bool:
            flags.DEFINE_boolean(name, field.value, "", flag_values=values, module_name="config")
        else:
            flag = flags.Flag(_Parser(field.hint), None, name, None, "")
            flags.DEFINE_flag(flag, flag_values=values, module_name="config")


def _with_values(config: Config, given: Mapping[str, Any], origins: Mapping[str, str]) -> Config:
    """The Config with values by dotted names, dataclasses inside of it first."""
    changes: dict[str, dict[str, Any]] = collections.defaultdict(dict)
    for field in walk(config):
        table, _, name = field.name.rpartition(".")
        if field.nested:
            changes[table][name] = _replaced(field.value, field.name + ".", changes[field.name], origins)
        elif field.name in given:
            changes[table][name] = given[field.name]
    return _replaced(config, "", changes[""], origins)


def _replaced(instance, prefix: str, changes: dict[str, Any], origins: Mapping[str, str]):
    try:
        made = dataclasses.replace(instance, **changes)
        check(made)  # a Config need not have a __post_init__ that does
    except ValueError as error:
        where = sorted({origins[prefix + name] for name in changes if prefix + name in origins})
        elsewhere = [one for one in where if not one.startswith("--")]
        from_ = f" (values of {', '.join(elsewhere)})" if elsewhere else ""
        raise UsageError(str(error) + from_) from error
    return made


class _Parser(flags.ArgumentParser):
    """Text -> a value of one of the supported types."""

    def __init__(self, hint):
        self.hint = hint
        self.syntactic_help = type_name(hint)

    def parse(self, argument):
        return value_of(argument, self.hint) if isinstance(argument, str) else argument

    def flag_type(self):
        return type_name(self.hint)
