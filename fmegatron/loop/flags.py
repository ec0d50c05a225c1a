"""Command-line flags made from a frozen dataclass when they are needed, never at import."""

import contextlib
import dataclasses
import inspect
import os
import traceback
import types
import typing
from collections.abc import Iterator, Sequence
from typing import Any, Literal

from absl import flags

from fmegatron.layout import Mesh
from fmegatron.loop.config import Config, check, type_name

PREFIX = "config_"


class UsageError(ValueError):
    """A command line that does not fit the `Config`; the message says what was wrong and names the nearest flag."""


@contextlib.contextmanager
def set_up() -> Iterator[None]:
    """Within this block, in which an experiment makes what its Config asks for, a ValueError is a UsageError.

    For values that only the data, the model or the number of ranks show to be wrong: `launch` ends with one line and
    status 2. The line says where in the experiment it was, and a notebook shows the ValueError as its cause. Errors of
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


def parse(argv: Sequence[str], config: Config) -> Config:
    """Return `config` with the values of the command line `argv` (program name first) in place of its defaults.

    config: a frozen dataclass, or an instance of one, whose fields all have defaults. Each field is a flag
    `--config_NAME=VALUE`; a field that is a dataclass gives one flag for each of its own fields,
    `--config_model.dim=256`. Types: int, float, bool (also `--noconfig_x`), str, Literal, tuples (`1,2,3`),
    Optional (`none`), Mesh (`fsdp=2,tp=2`; empty: one rank).
    Raises UsageError for an unknown flag (with the nearest names), a bad value or a stray argument, and SystemExit(0)
    after printing the flags for `--help`.

    >>> @dataclasses.dataclass(frozen=True)
    ... class Config:
    ...     lr: float = 1e-3
    ...     mesh: Mesh = Mesh()
    >>> parse(["prog", "--config_lr=0.1", "--config_mesh=fsdp=2,tp=2"], Config).mesh["tp"]
    2
    >>> parse(["prog", "--config_lrr=1"], Config)
    Traceback (most recent call last):
    fmegatron.loop.flags.UsageError: Unknown command line flag 'config_lrr'. Did you mean: config_lr ?
    """
    defaults = _instance(config)
    values = flags.FlagValues()
    flags.DEFINE_boolean("help", False, "print these flags and stop", flag_values=values, module_name="launch")
    _define(defaults, PREFIX, values)
    try:
        rest = values(list(argv))[1:]
    except flags.Error as error:
        raise UsageError(str(error)) from None
    if values["help"].value:
        print(usage(defaults))
        raise SystemExit(0)
    if rest:
        raise UsageError(f"got the argument {rest[0]!r}, wanted flags only: --{PREFIX}NAME=VALUE (see --help)")
    return _collect(defaults, PREFIX, values)


def usage(config: Config) -> str:
    """One line for each flag of `config`: name, default, and the comment that stands beside the field."""
    lines = []

    def visit(instance, prefix):
        for field, comment in _fields(instance):
            value = getattr(instance, field.name)
            if _is_nested(value):
                visit(value, f"{prefix}{field.name}.")
            else:
                lines.append(f"  --{prefix}{field.name}={_text(value)}" + (f"   {comment}" if comment else ""))

    visit(_instance(config), PREFIX)
    return "\n".join(["flags, with their defaults:", *lines])


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


def _is_nested(value) -> bool:
    return dataclasses.is_dataclass(value) and not isinstance(value, Mesh)


def _fields(instance):
    """The fields of a dataclass instance, each with the comment at the end of its line in the source."""
    comments = {}
    try:
        for line in inspect.getsource(type(instance)).splitlines():
            code, mark, comment = line.partition("  # ")
            name, colon, _ = code.strip().partition(":")
            if mark and colon and name.isidentifier():
                comments[name] = comment.strip()
    except (OSError, TypeError):  # written at a prompt: there is no source to read
        pass
    return [(field, comments.get(field.name, "")) for field in dataclasses.fields(instance) if field.init]


def _define(instance, prefix, values):
    hints = typing.get_type_hints(type(instance))
    for field, comment in _fields(instance):
        name, default = prefix + field.name, getattr(instance, field.name)
        if _is_nested(default):
            _define(default, name + ".", values)
        elif hints[field.name] is bool:
            flags.DEFINE_boolean(name, default, comment, flag_values=values, module_name="config")
        else:
            flag = flags.Flag(_Parser(hints[field.name]), None, name, None, comment)
            flags.DEFINE_flag(flag, flag_values=values, module_name="config")


def _collect(instance, prefix, values):
    changes = {}
    for field, _ in _fields(instance):
        name, default = prefix + field.name, getattr(instance, field.name)
        if _is_nested(default):
            changes[field.name] = _collect(default, name + ".", values)
        elif values[name].present:
            changes[field.name] = values[name].value
    try:
        made = dataclasses.replace(instance, **changes)
        check(made)  # a Config need not have a __post_init__ that does
    except ValueError as error:
        raise UsageError(str(error)) from error
    return made


class _Parser(flags.ArgumentParser):
    """Text -> a value of one of the supported types."""

    def __init__(self, hint):
        self.hint = hint
        self.syntactic_help = type_name(hint)

    def parse(self, argument):
        return _value(argument, self.hint) if isinstance(argument, str) else argument

    def flag_type(self):
        return type_name(self.hint)


def _value(text: str, hint) -> Any:
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin in (typing.Union, types.UnionType):
        if type(None) in arguments and text.lower() in ("none", ""):
            return None
        errors = []
        for option in arguments:
            if option is not type(None):
                try:
                    return _value(text, option)
                except ValueError as error:
                    errors.append(str(error))
        raise ValueError("; ".join(errors))
    if origin is Literal:
        for option in arguments:
            if text == str(option):
                return option
        raise ValueError(f"got {text!r}, wanted one of {', '.join(map(str, arguments))}")
    if origin is tuple:
        parts = [part for part in text.strip("()").split(",") if part.strip()]
        if len(arguments) == 2 and arguments[1] is Ellipsis:
            arguments = (arguments[0],) * len(parts)
        if len(parts) != len(arguments):
            raise ValueError(f"got {len(parts)} values in {text!r}, wanted {len(arguments)} separated by commas")
        return tuple(_value(part.strip(), part_hint) for part, part_hint in zip(parts, arguments, strict=True))
    if hint is Mesh:
        return _mesh(text)
    if hint is bool:
        if text.lower() in ("true", "false", "1", "0"):
            return text.lower() in ("true", "1")
        raise ValueError(f"got {text!r}, wanted true or false")
    if hint is int:
        return int(text.replace("_", ""), 0)
    if hint in (float, str):
        return hint(text)
    raise ValueError(
        f"got a field of type {type_name(hint)}, wanted one that text can give; change it in a copy of the experiment"
    )


def _mesh(text: str) -> Mesh:
    axes = {}
    for part in filter(None, text.replace(" ", "").split(",")):
        name, equals, size = part.partition("=")
        if not (equals and name.isidentifier() and size.isdigit() and int(size) > 0) or name in axes:
            raise ValueError(f"got {part!r}, wanted axes and their sizes, major first, such as fsdp=2,tp=2")
        axes[name] = int(size)
    return Mesh(**axes)


def mesh_text(mesh: Mesh) -> str:
    """A mesh as a flag says it: `fsdp=2,tp=2`, nothing for one rank."""
    return ",".join(f"{name}={size}" for name, size in zip(mesh.names, mesh.sizes, strict=True))


def _text(value) -> str:
    if isinstance(value, Mesh):
        return mesh_text(value)
    return ",".join(map(_text, value)) if isinstance(value, tuple) else str(value)
