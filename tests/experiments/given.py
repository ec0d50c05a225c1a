"""Values of an experiment's Config by short names, for tests: `save_every=3` for `run.save.every`."""

import dataclasses

from fmegatron.layout import Mesh
from fmegatron.loop.options import MOVED
from fmegatron.loop.sources import mesh_text


def dotted(values):
    """The same values by the names that their flags have."""
    return {f"run.{MOVED[name]}" if name in MOVED else name: value for name, value in values.items()}


def flags(values):
    """As a command line."""
    texts = {n: mesh_text(v) if isinstance(v, Mesh) else v for n, v in dotted(values).items()}
    return [f"--{name}={value}" for name, value in texts.items()]


def made(config, **values):
    """A Config, or an instance of one, with these values."""
    return _placed(config() if isinstance(config, type) else config, dotted(values))


def _placed(config, values):
    groups, plain = {}, {}
    for name, value in values.items():
        head, dot, rest = name.partition(".")
        if dot:
            groups.setdefault(head, {})[rest] = value
        else:
            plain[head] = str(value) if head in ("folder",) else value
    groups = {name: _placed(getattr(config, name), inner) for name, inner in groups.items()}
    return dataclasses.replace(config, **plain, **groups)
