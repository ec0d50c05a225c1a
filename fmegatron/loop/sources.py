"""Values of a Config from TOML files, the config.json of runs and texts, and the text of a value that reads back."""

from __future__ import annotations

import dataclasses
import json
import math
import os
import re
import tomllib
import types
import typing
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Literal, NamedTuple

from fmegatron.layout import Mesh
from fmegatron.loop.config import Config, type_name
from fmegatron.tree import structure

_WHOLE = re.compile(r"[+-]?(\d[\d_]*)(\.[\d_]*)?[eE][+-]?\d+|[+-]?\d[\d_]*\.0*")
_MOST_BYTES = 1 << 20  # of a file with values
_MOST_DIGITS = 400  # of a whole number in text


class SourceError(ValueError):
    """A file that gives no values of a Config; the message states which and why."""


# ---- fields ----------------------------------------------------------------------------------------------------------
class Field(NamedTuple):
    """A field of a Config that can be given: its dotted name, its type, its value, and the dataclass that it is of."""

    name: str
    hint: Any
    value: Any
    owner: Any

    @property
    def nested(self) -> bool:
        """Whether it is a dataclass with fields of its own."""
        return dataclasses.is_dataclass(self.value) and not isinstance(self.value, type | Mesh)


def walk(config: Config, prefix: str = "") -> Iterator[Field]:
    """All fields of a Config; before a field that is a dataclass those of its own fields."""
    hints = typing.get_type_hints(type(config))
    for item in dataclasses.fields(config):
        if item.init:
            found = Field(prefix + item.name, hints[item.name], getattr(config, item.name), config)
            if found.nested:
                yield from walk(found.value, f"{found.name}.")
            yield found


def fields_of(config: Config) -> list[Field]:
    """The fields of a Config that have a value; of a field that is a dataclass those of its own fields."""
    return [field for field in walk(config) if not field.nested]


# ---- files -----------------------------------------------------------------------------------------------------------
def of_file(path: str, config: Config, older: Callable[[Mapping, Config], Mapping]) -> dict[str, Any]:
    """The values of a TOML file, or of the `config.json` that a run has written, by dotted names.

    Tables are fields that are dataclasses. A value is of the field's type: an array is a tuple, a text a Mesh
    ("fsdp=2,tp=2"), `1e3` a whole number. Where TOML has no value for what a field may be, it is the text of a flag
    ("none"); JSON has null. older: (values, config) -> those of an older run as this Config has them.
    Raises SourceError: not readable, neither TOML nor of a run, a name that the Config does not have, a value of
    another type.
    """
    if path.endswith((".yaml", ".yml")):
        raise SourceError(
            f"{path}: got YAML, wanted TOML; --print_config prints the values as a TOML file that --config reads: "
            "lines such as lr = 0.1, and groups as [run.save]"
        )
    try:
        with open(path, "rb") as file:
            data = file.read(_MOST_BYTES + 1)
        if len(data) > _MOST_BYTES:
            raise SourceError(f"{path}: got more than {_MOST_BYTES} bytes, wanted the values of a Config as TOML")
        text = data.decode("utf-8-sig")  # editors put a byte order mark in front
        is_json = path.endswith(".json")
        values = json.loads(text) if is_json else tomllib.loads(text)
    except OSError as error:
        raise SourceError(
            f"{path or '--config='}: got no file to read ({error.strerror}), wanted the values of a Config"
        ) from error
    except (ValueError, RecursionError) as error:  # of both formats, and of what is no UTF-8
        if isinstance(error, SourceError):
            raise
        kind = "JSON" if path.endswith(".json") else "TOML"
        raise SourceError(f"{path}: got what is no {kind} ({error}), wanted lines such as lr = 0.1") from error
    if is_json:
        if not isinstance(values, dict) or not isinstance(values.get("config"), dict):
            raise SourceError(
                f"{path}: got JSON that no run has written, wanted TOML, or the config.json of a run; --print_config "
                "prints what a TOML file holds"
            )
        values = older(values["config"], config)  # as Settings.write has it
    known = {field.name: field.hint for field in fields_of(config)}
    found = {}
    for name, value in _flat(values, known):
        if name not in known:
            raise SourceError(f"{path}: {name}: got a name that {_no_field(name, known)}")
        try:
            found[name] = _read(value, known[name], texts=not is_json)
        except ValueError as error:
            raise SourceError(f"{path}: {name}: {error}") from None
    return found


def _flat(values: Mapping[str, Any], known: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in values.items():
        name = prefix + key
        if isinstance(value, dict) and name not in known and any(one.startswith(f"{name}.") for one in known):
            yield from _flat({k: v for k, v in value.items() if k != "class"}, known, f"{name}.")
        else:
            yield name, value


def _no_field(name: str, known: Mapping[str, Any]) -> str:
    near = structure.did_you_mean(name, sorted(known))
    return f"the Config does not have, wanted one of its fields{near or ': ' + ', '.join(sorted(known))}"


def _read(value: Any, hint: Any, texts: bool) -> Any:
    """A value of TOML or JSON as the type of a field, as far as these formats have no such type; ValueError.

    texts: of several types, a text is read as that of a flag is.
    """
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin in (typing.Union, types.UnionType):
        options = [option for option in arguments if option is not type(None)]
        if type(None) in arguments and value is None:
            return None
        if texts and isinstance(value, str):
            return value_of(value, hint)
        errors = []
        for option in options:
            try:
                return _read(value, option, texts)
            except ValueError as error:
                errors.append(str(error))
        raise ValueError(errors[0] if len(errors) == 1 else f"got {value!r:.60}, wanted {type_name(hint)}")
    if origin is tuple and isinstance(value, list):
        if len(arguments) == 2 and arguments[1] is Ellipsis:
            arguments = (arguments[0],) * len(value)
        if len(arguments) != len(value):
            raise ValueError(f"got {len(value)} values, wanted {len(arguments)}")
        return tuple(_read(item, wanted, texts) for item, wanted in zip(value, arguments, strict=True))
    if hint is Mesh and isinstance(value, dict):
        return mesh_of(",".join(f"{axis}={size}" for axis, size in value.items()))
    if hint is Mesh and isinstance(value, str):
        return mesh_of(value)
    if hint is int and isinstance(value, float) and value.is_integer():
        return int(value)
    if hint is float and isinstance(value, str) and value in ("inf", "-inf", "nan"):  # JSON has no such numbers
        return float(value)
    if hint is float and isinstance(value, int) and not isinstance(value, bool):
        return _float(value)
    kinds = {int: int, float: float, str: str, bool: bool}
    right = value in arguments if origin is Literal else type(value) is kinds.get(hint, object)
    if not right:
        raise ValueError(f"got {value!r:.60} of type {type(value).__name__}, wanted {type_name(hint)}")
    return value


def _float(value: int) -> float:
    try:
        return float(value)
    except OverflowError:
        raise ValueError("got a number with too many digits, wanted one that a float can hold") from None


# ---- text ------------------------------------------------------------------------------------------------------------
def value_of(text: str, hint: Any) -> Any:
    """A value of the type of a field from a text of a flag; `text_of` is the way back.

    >>> value_of('1e3', int), value_of('"a, b",c', tuple[str, ...]), value_of("none", int | None)
    (1000, ('a, b', 'c'), None)
    """
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin in (typing.Union, types.UnionType):
        if type(None) in arguments and text.lower() in ("none", ""):
            return None
        errors = []
        for option in arguments:
            if option is not type(None):
                try:
                    return value_of(_unquoted(text) if option is str else text, option)
                except ValueError as error:
                    errors.append(str(error))
        raise ValueError("; ".join(errors))
    if origin is Literal:
        for option in arguments:
            if text == str(option):
                return option
        raise ValueError(f"got {text!r}, wanted one of {', '.join(map(str, arguments))}")
    if origin is tuple:
        parts = _split(text)
        if len(arguments) == 2 and arguments[1] is Ellipsis:
            arguments = (arguments[0],) * len(parts)
        if len(parts) != len(arguments):
            raise ValueError(f"got {len(parts)} values in {text!r}, wanted {len(arguments)} separated by commas")
        pairs = zip(parts, arguments, strict=True)
        return tuple(value_of(_unquoted(part) if wanted is str else part, wanted) for part, wanted in pairs)
    if hint is Mesh:
        return mesh_of(text)
    if hint is bool:
        if text.lower() in ("true", "false", "1", "0"):
            return text.lower() in ("true", "1")
        raise ValueError(f"got {text!r}, wanted true or false")
    if hint is int:
        return _whole(text)
    if hint is float:
        return _number(text)
    if hint is str:
        return text
    raise ValueError(
        f"got a field of type {type_name(hint)}, wanted one that text can give; change it in a copy of the experiment"
    )


def _whole(text: str) -> int:
    """`100`, `2_000`, `0x10`, and `1e3` or `2.0`, which are whole numbers too."""
    text = text.strip()
    if len(text) <= _MOST_DIGITS and _WHOLE.fullmatch(text):
        number = float(text.replace("_", ""))
        if math.isfinite(number) and number.is_integer():
            return int(number)
        raise ValueError(f"got {text!r}, wanted a whole number")
    try:
        return int(text.replace("_", ""), 0) if len(text) <= _MOST_DIGITS else int("-")
    except ValueError:
        raise ValueError(f"got {text!r:.60}, wanted a whole number, such as 1000, 1_000 or 1e3") from None


def _number(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise ValueError(f"got {text!r:.60}, wanted a number, such as 0.1, 3 or 1e-3") from None


def _split(text: str) -> list[str]:
    """The parts of a tuple: between commas that are in no quotes; nothing at all has none."""
    inner = text.strip()
    if inner.startswith("(") and inner.endswith(")"):
        inner = inner[1:-1]
    parts, at = [], 0
    while at < len(inner):
        here = len(inner[at:]) - len(inner[at:].lstrip())
        if inner[at + here : at + here + 1] == '"':
            _, end = _quoted(inner, at + here)
            rest = inner[end:].partition(",")[0]
            if rest.strip():
                raise ValueError(
                    f'got {rest!r:.60} behind a text in quotes, wanted a comma; write \\" for a quote in it'
                )
            parts.append(inner[at + here : end])
            at = end + len(rest) + 1
        else:
            part = inner[at:].partition(",")[0]
            parts += [part.strip()] if part.strip() else []
            at += len(part) + 1
    return parts


def _quoted(text: str, start: int) -> tuple[str, int]:
    try:
        return json.JSONDecoder(strict=False).raw_decode(text, start)
    except ValueError:
        raise ValueError(
            f'got {text[start:]!r:.60}, wanted a quote that ends the text; write \\" for one in it'
        ) from None


def _unquoted(text: str) -> str:
    if not text.startswith('"'):
        return text
    found, end = _quoted(text, 0)
    if end != len(text):
        raise ValueError(f"got {text[end:]!r:.60} behind a text in quotes, wanted nothing there")
    return found


def text_of(value: Any, hint: Any = str) -> str:
    """A value as a flag has it: what `value_of` makes of this text is the value.

    >>> text_of(("a, b", "c"), tuple[str, ...]), text_of(Mesh(fsdp=2)), text_of("none", str | None)
    ('"a, b",c', 'fsdp=2', '"none"')
    """
    if isinstance(value, Mesh):
        return mesh_text(value)
    if isinstance(value, tuple):
        return ",".join(_quote(item, item.strip() != item or not item or bool(re.search(r'[",()]', item)))
                        if isinstance(item, str) else text_of(item) for item in value)  # fmt: skip
    if isinstance(value, str) and typing.get_origin(hint) in (typing.Union, types.UnionType):
        return _quote(value, not _reads_back(value, hint))
    return str(value)


def _reads_back(text: str, hint: Any) -> bool:
    try:
        found = value_of(text, hint)
    except ValueError:
        return False
    return isinstance(found, str) and found == text


def _quote(text: str, needed: bool) -> str:
    return json.dumps(text, ensure_ascii=False) if needed else text


def mesh_of(text: str, ranks: int | None = None) -> Mesh:
    """`fsdp=2,tp=2` -> a mesh, major axis first; nothing: one rank. The axis of `fsdp=*,tp=2` takes the ranks that are
    left, so that a job that is started again with fewer of them gets a mesh.

    ranks: that were started; None: as the environment states it (WORLD_SIZE), else one.

    >>> mesh_of("fsdp=*,tp=2", ranks=8)
    Mesh(fsdp=4, tp=2)
    """
    axes = {}
    for part in filter(None, text.replace(" ", "").split(",")):
        name, equals, size = part.partition("=")
        number = int(size) if re.fullmatch(r"[0-9]{1,12}", size) else 0
        if not (equals and name.isidentifier() and (number > 0 or size == "*")) or name in axes:
            raise ValueError(f"got {part!r}, wanted axes and their sizes, major first, such as fsdp=2,tp=2")
        axes[name] = number
    free = [name for name, size in axes.items() if not size]
    if free:
        ranks = int(os.environ.get("WORLD_SIZE", "1")) if ranks is None else ranks
        given = math.prod(size for size in axes.values() if size)
        if len(free) > 1 or ranks % given:
            wanted = "one axis with a *" if len(free) > 1 else f"a number of ranks that {given} divides"
            raise ValueError(f"got {text!r} for {ranks} ranks, wanted {wanted}")
        axes[free[0]] = ranks // given
    return Mesh(**axes)


def mesh_text(mesh: Mesh) -> str:
    """A mesh as a flag has it: `fsdp=2,tp=2`, nothing for one rank."""
    return ",".join(f"{name}={size}" for name, size in zip(mesh.names, mesh.sizes, strict=True))


# ---- what a Config is, and from where --------------------------------------------------------------------------------
def as_toml(config: Config, origin: Callable[[str], str] = lambda name: "") -> str:
    """A Config as a TOML file that `of_file` reads back; behind each value from where it is: `origin(dotted name)`."""
    tables: dict[str, list[str]] = {"": []}
    for field in fields_of(config):
        table, _, key = field.name.rpartition(".")
        said = origin(field.name)
        line = f"{key} = {_toml(field.value, field.hint)}"
        tables.setdefault(table, []).append(line + (f"  # {said}" if said else ""))
    parts = ["\n".join([f"[{table}]"] * bool(table) + lines) for table, lines in tables.items()]
    return "\n\n".join(part for part in parts if part)


def _toml(value: Any, hint: Any) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, int | float):
        return repr(value)
    if isinstance(value, tuple):
        return "[" + ", ".join(_toml(item, type(item)) for item in value) + "]"
    if value is None:
        return '"none"'
    return '"' + "".join(map(_character, text_of(value, hint))) + '"'


def _character(c: str) -> str:
    if c in '"\\':
        return "\\" + c
    return c if c.isprintable() else f"\\u{ord(c):04x}" if ord(c) < 1 << 16 else f"\\U{ord(c):08x}"
