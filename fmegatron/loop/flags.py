"""Command-line flags made from a frozen dataclass when they are needed, never at import."""

import collections
import contextlib
import dataclasses
import difflib
import inspect
import os
import re
import shlex
import traceback
import types
import typing
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from absl import flags

from fmegatron.loop.config import Config, UsageError, check, type_name
from fmegatron.loop.options import FIELD, MOVED, of_before, options_of
from fmegatron.loop.sources import SourceError, as_toml, fields_of, of_file, text_of, value_of, walk

FILES = "config"
_LIBRARY = os.path.dirname(os.path.dirname(os.path.abspath(__file__))) + os.sep
_OWN = (
    ("help", "print these flags and stop"),
    ("print_config", "print the value of each field, and where it is from, as a TOML file, and stop"),
    (FILES, "values of a TOML file, or of a run's config.json; flags win over them"),
)


# Flags of absl, which reads them itself, or which a program of absl has (`app.run`).
_ABSL = (
    *("flagfile", "undefok", "helpfull", "helpshort", "helpxml", "v", "verbosity", "log_dir", "logger_levels"),
    *("logtostderr", "alsologtostderr", "stderrthreshold", "showprefixforinfo", "only_check_args", "pdb"),
    *("pdb_post_mortem", "run_with_pdb", "run_with_profiling", "profile_file", "use_cprofile_for_profiling"),
)
# Flags of torchrun, which refuses what more than one of them begins with, wherever on the command line it is.
_TORCHRUN = (
    *("nnodes", "nproc-per-node", "rdzv-backend", "rdzv-endpoint", "rdzv-id", "rdzv-conf", "standalone", "module"),
    *("max-restarts", "monitor-interval", "start-method", "event-log-handler", "role", "no-python", "run-path", "tee"),
    *("log-dir", "redirects", "local-ranks-filter", "duplicate-stdout-filters", "duplicate-stderr-filters"),
    *("node-rank", "master-addr", "master-port", "local-addr", "logs-specs", "numa-binding", "signals-to-handle"),
    *("shutdown-timeout", "virtual-local-rank"),
)
_SPELLED = tuple(dict.fromkeys(text for name in _TORCHRUN for text in (name, name.replace("-", "_"))))


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
    fmegatron.loop.config.UsageError: windows: got 9, the text has 1 to 6 of them (...)
    """
    try:
        yield
    except ValueError as error:
        if type(error) is not ValueError:
            raise
        own = [x for x in traceback.extract_tb(error.__traceback__)[1:] if not x.filename.startswith(_LIBRARY)]
        where = f" ({os.path.basename(own[0].filename)}:{own[0].lineno})" if own else ""
        raise UsageError(f"{error}{where}") from error


def parse(argv: Sequence[str], config: Config) -> Config:
    """Return `config` with values of files and the command line in place of its defaults.

    Later ones win: the defaults; `--config=FILE` (TOML, or the `config.json` of a run; may be given several times);
    flags. Each plain field is a flag `--NAME=VALUE`; a field that is a dataclass, a group, gives one flag for each of
    its own fields, `--run.save.every=100`. Types: int (also `1e3`), float, bool (also `--noNAME`,
    `--norun.save.in_background`), str, Literal, tuples (`1,2,3`; a text with commas in double quotes), Optional
    (`none`), Mesh (`fsdp=2,tp=2`; empty: one rank; `fsdp=*,tp=2`: as many as are left).
    `--print_config` prints the values, and where each is from, as a TOML file that `--config` reads back; `--help` the
    flags.

    Args:
        argv: program name and flags.
        config: a frozen dataclass, or an instance of one, whose fields all have defaults.

    Raises:
        UsageError: an unknown flag or name (with the nearest names), a bad value or a stray argument.
        ValueError: a Config that cannot have flags: a field without a default, or with the name of a flag of
            absl, or a name that torchrun takes for a beginning of its own.
        SystemExit: with status 0, after `--help` and `--print_config`.

    >>> @dataclasses.dataclass(frozen=True)
    ... class Config:
    ...     lr: float = 1e-3
    ...     steps: int = 100
    >>> parse(["prog", "--lr=0.1", "--steps=1e3"], Config).steps
    1000
    >>> parse(["prog", "--lrr=1"], Config)
    Traceback (most recent call last):
    fmegatron.loop.config.UsageError: Unknown command line flag 'lrr'. Did you mean: lr ?
    """
    defaults = _instance(config)
    values = flags.FlagValues()
    _define(defaults, values)
    try:
        rest = values(argv)[1:]
    except flags.UnrecognizedFlagError as error:
        raise UsageError(_unknown(error.flagname, error.flagvalue.partition("=")[2], defaults)) from None
    except (flags.Error, ValueError) as error:  # the second of absl, too: a value behind --noNAME
        raise UsageError(str(error)) from None
    if values["help"].value:
        print(usage(defaults))
        raise SystemExit(0)
    if rest:
        raise UsageError(f"got the argument {rest[0]!r}, wanted flags only: --NAME=VALUE (see --help)")
    given: dict[str, Any] = {}
    origins: dict[str, str] = {}
    try:
        for path in values[FILES].value or ():
            for name, value in of_file(path, defaults, of_before).items():
                given[name], origins[name] = value, path
    except SourceError as error:
        raise UsageError(str(error)) from error
    for name in (field.name for field in fields_of(defaults)):
        if values[name].present:
            given[name], origins[name] = values[name].value, f"--{name}"
    made = _with_values(defaults, given, origins)
    if values["print_config"].value:
        print(as_toml(made, lambda name: origins.get(name, "default")))
        raise SystemExit(0)
    return made


def _unknown(name: str, value: str, config: Config) -> str:
    """The message for a flag that there is not, with the flags of a group of this name, names of the same end, or the
    nearest."""
    fields = fields_of(config)
    names = [*(field.name for field in fields), *(own for own, _ in _OWN)]
    bare = name.removeprefix("config_")  # as all flags of before 2026-11
    groups = [one.name for one in walk(config) if one.nested]
    group = next((one for one in groups if one == bare), None) or next(iter(_same_end(bare, groups)), None)
    if group is not None and bare not in MOVED:
        inside = [one for one in fields if one.name.rpartition(".")[0] == group]
        fitting = [one.name for one in inside if _takes(value, one.hint)] or [one.name for one in inside]
        flags_of_it = ", ".join(f"--{one}={value or '...'}" for one in fitting)
        return f"Unknown command line flag '{name}': {group} is a group of flags. Did you mean: {flags_of_it} ?"
    wanted = [bare] if bare in names and bare != name else []
    if options_of(config) is not None and bare in MOVED:
        place = f"{FIELD}.{MOVED[bare]}"
        wanted += [one for one in names if one == place or one.startswith(f"{place}.")]
    wanted = wanted or [one for one in names if one.startswith(f"{bare}.")] or _same_end(bare, names)
    wanted = wanted or difflib.get_close_matches(bare, names)
    if not wanted:  # of names in groups the last part, too
        ends = {one.rpartition(".")[2]: one for one in names}
        wanted = [ends[end] for end in difflib.get_close_matches(bare.rpartition(".")[2], list(ends))]
    return f"Unknown command line flag '{name}'." + (f" Did you mean: {', '.join(wanted)} ?" if wanted else "")


def _same_end(name: str, names: Sequence[str]) -> list[str]:
    """The names that end with most of the last parts of this one; [] where not even the last is the same."""
    parts = name.split(".")
    ends = (".".join(parts[start:]) for start in range(len(parts)))
    return next(filter(None, ([one for one in names if f".{one}".endswith(f".{end}")] for end in ends)), [])


def _takes(value: str, hint: Any) -> bool:
    """Whether a field of this type can have the value of this text, and is not made of any text."""
    try:
        found = value_of(value, hint) if value else ""
        return not (isinstance(found, str) or isinstance(found, tuple) and all(isinstance(x, str) for x in found))
    except ValueError:
        return False


def usage(config: Config) -> str:
    """One line for each flag of `config`: name and default, as a shell reads them, the field's comment, and the
    values of one that takes few."""
    lines, comments = [], {}
    for field in fields_of(_instance(config)):
        if type(field.owner) not in comments:
            comments[type(field.owner)] = _comments(field.owner)
        comment = comments[type(field.owner)].get(field.name.rpartition(".")[2])
        if values := _literals(field.hint):
            comment = f"{comment or ''} ({', '.join(values)})".strip()
        flag = shlex.quote(f"--{field.name}={text_of(field.value, field.hint)}")
        lines.append(f"  {flag}" + (f"   # {comment}" if comment else ""))
    own = [f"  --{name}" + ("=FILE" if name == FILES else "") + f"   # {text}" for name, text in _OWN]
    return "\n".join(["flags, with their defaults:", *lines, *own])


def _literals(hint: Any) -> list[str]:
    """The texts of a field that takes some alone."""
    if typing.get_origin(hint) in (typing.Union, types.UnionType):
        return [text for option in typing.get_args(hint) for text in _literals(option)]
    return [str(value) for value in typing.get_args(hint)] if typing.get_origin(hint) is typing.Literal else []


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
    for name, text in _OWN:
        if name == FILES:
            flags.DEFINE_multi_string(name, [], text, flag_values=values, module_name="launch")
        else:
            flags.DEFINE_boolean(name, False, text, flag_values=values, module_name="launch")
    found = fields_of(config)
    taken = dict.fromkeys(_ABSL, "the name of a flag of absl")
    taken |= dict.fromkeys((name for name, _ in _OWN), "the name of a flag of every experiment")
    taken |= {f"no{field.name}": f"the name of --{field.name}=false" for field in found if field.hint is bool}
    for field in found:
        begun = [name for name in _SPELLED if name.startswith(field.name)]
        if len(begun) > 1 and field.name not in begun:
            taken.setdefault(field.name, f"a beginning of torchrun's --{begun[0]}, which it refuses")
        if field.name in taken:
            raise ValueError(
                f"{type(field.owner).__name__}.{field.name}: got {taken[field.name]}, wanted another name, as "
                f"each field is a flag; such as {field.name}_, or a field of a group (a dataclass)"
            )
        if field.hint is bool:
            flag = flags.BooleanFlag(field.name, field.value, "")
            flag.parser = _BooleanParser()
            flags.DEFINE_flag(flag, flag_values=values, module_name="config")
        else:
            flag = flags.Flag(_Parser(field.hint), None, field.name, None, "")
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
        # The defaults are right, so it is one of those given: by its name in the error, or any of them.
        given = [prefix + name for name in changes if prefix + name in origins]
        named = [one for one in given if re.search(rf"\b{one.rpartition('.')[2]}\b", str(error))] or given
        hints = {field.name: field.hint for field in walk(instance)}
        flag = [one for one in named if origins[one].startswith("--")]
        shown = [f"{origins[one]}={text_of(changes[one.removeprefix(prefix)], hints[one.removeprefix(prefix)])}"
                 for one in flag]  # fmt: skip
        elsewhere = sorted({origins[one] for one in named if one not in flag})
        from_ = f" (values of {', '.join(elsewhere)})" if elsewhere else ""
        raise UsageError(f"{' '.join(shown)}{': ' if shown else ''}{error}{from_}") from error
    return made


def with_flags(text: str, argv: Sequence[str]) -> str:
    """The text of a UsageError, with the flags of the command line where it names none: it may be about any of them."""
    given = [flag for flag in argv[1:] if flag.startswith("-")]
    return text if "--" in text or not given else f"{text} (given: {shlex.join(given)})"


class _BooleanParser(flags.BooleanParser):
    """absl's, whose error is one text."""

    def parse(self, argument):
        try:
            return super().parse(argument)
        except (ValueError, TypeError):
            raise ValueError(f"got {argument!r}, wanted true or false") from None


class _Parser(flags.ArgumentParser):
    """Text -> a value of one of the supported types."""

    def __init__(self, hint):
        self.hint = hint
        self.syntactic_help = type_name(hint)

    def parse(self, argument):
        return value_of(argument, self.hint) if isinstance(argument, str) else argument

    def flag_type(self):
        return type_name(self.hint)
