"""The settings of a run as JSON, beside its checkpoints and in them; a resume names what has changed, or refuses it."""

import dataclasses
import enum
import json
import math
import os
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import xxhash

from fmegatron import checkpoint, tree
from fmegatron.layout import Mesh
from fmegatron.loop.config import CLASSES
from fmegatron.loop.flags import PREFIX, UsageError, mesh_text

_ABSENT = object()
_SHOWN = 64  # elements of an array; of a longer one its digest


@dataclasses.dataclass(frozen=True)
class Changes:
    """What differs between the settings of a checkpoint and those of now, in words: `heads 2 -> 4`.

    refused: these change the function or the order of data, and were not allowed. allowed: as well, by name. named:
    what is meant to be changed. free: what changes no number. unknown: why there is nothing to compare with, or None.
    """

    refused: tuple[str, ...] = ()
    allowed: tuple[str, ...] = ()
    named: tuple[str, ...] = ()
    free: tuple[str, ...] = ()
    unknown: str | None = None

    def __str__(self) -> str:
        """One line for each class that has changes; empty without any."""
        groups = {name: getattr(self, name) for name in ("allowed", *CLASSES)}
        lines = [f"  {name:<10} {', '.join(changes)}" for name, changes in groups.items() if changes]
        return "\n".join(lines if self.unknown is None else [f"  {self.unknown}", *lines])


@dataclasses.dataclass(frozen=True)
class Begun:
    """Where a run begins or goes on. step: updates that `state` has seen. samples: that its data has shown, None if
    the checkpoint does not say. metadata: of the checkpoint, empty for a new run."""

    step: int
    state: Any
    samples: int | None
    metadata: dict[str, Any]


class Settings:
    """The Config of a run and facts that its numbers depend on, as JSON values.

        settings = Settings(config, allow=config.allow, data=data.fingerprint(tokens))
        begun = settings.begin(manager, specs, lambda: tree.init(specs, key=0, rank=world.rank), world)
        batches = batches.after(begun.samples, begun.step)
        ...
        manager.save(step, state, specs, world, metadata=settings.metadata(batches.samples(step)))

    config: a dataclass; what a change of its fields means is said beside them (`loop.field`), and in fields of a
    dataclass beside the fields of that. facts: JSON values, a change of which is refused. allow: names of fields and
    facts whose change is not refused this time; UsageError for a name that there is not.
    """

    def __init__(self, config: Any, *, allow: Sequence[str] = (), **facts: Any):
        self.config, self.facts, self.allow = plain(config), plain(facts), tuple(allow)
        self._classes, self._defaults = _declared(config)
        names = {*_flat(self.config), *self._classes, *self.facts}
        for name in self.allow:
            if name not in names:
                near = tree.did_you_mean(name, sorted(names))
                raise UsageError(f"allow: got {name!r}, wanted names of the Config's fields or of facts{near}")

    def metadata(self, samples: int) -> dict[str, Any]:
        """What a checkpoint says of the run: `config`, `facts`, and `samples`, how many its state has seen."""
        return {"config": self.config, "facts": self.facts, "samples": int(samples)}

    def write(self, path: str | os.PathLike) -> None:
        """Write config and facts as a JSON file for people and programs, in place of one that is there."""
        path = Path(path)
        path.parent.mkdir(parents=True, exist_ok=True)
        beside = path.with_name(f".{path.name}.new")
        beside.write_text(json.dumps({"config": self.config, "facts": self.facts}, indent=2) + "\n")
        os.replace(beside, path)

    def changes(self, metadata: Mapping[str, Any]) -> Changes:
        """What has changed since a checkpoint of this metadata.

        A field that the checkpoint does not know had its default then; one that the Config has no more is named, and
        so is a fact that only one of the two has.
        """
        before = metadata.get("config")
        if not isinstance(before, dict):
            return Changes(unknown="the checkpoint has no configuration: whether anything has changed cannot be said")
        found = {name: [] for name in ("allowed", *CLASSES)}
        old, new = _flat(before), _flat(self.config)
        for name in [*new, *(name for name in old if name not in new)]:
            was, now = old.get(name, _ABSENT), new.get(name, _ABSENT)
            if was == now:
                continue
            kind, text = self._class(name), f"{name} {_text(was)} -> {_text(now)}"
            if now is _ABSENT or was is _ABSENT and now == self._defaults.get(name, _ABSENT):
                kind = "named"
            found["allowed" if kind == "refused" and self._allowed(name) else kind].append(text)
        facts = metadata.get("facts")
        facts = facts if isinstance(facts, dict) else {}
        for name in [*self.facts, *(name for name in facts if name not in self.facts)]:
            was, now = facts.get(name, _ABSENT), self.facts.get(name, _ABSENT)
            if was != now:
                kind = "named" if _ABSENT in (was, now) else "allowed" if name in self.allow else "refused"
                found[kind].append(f"{name} {_text(was)} -> {_text(now)}")
        return Changes(**{name: tuple(texts) for name, texts in found.items()})

    def begin(
        self,
        manager: checkpoint.Manager,
        target_layouts: Any,
        fresh: Callable[[], Any],
        world: Any = None,
        **options: Any,
    ) -> Begun:
        """The newest checkpoint, if its settings are those of now or differ by what may differ; else a new run.

        fresh: makes the state of a new run. options: those of `Manager.restore_latest`. Prints what has changed (rank
        0). All ranks call it.
        Raises UsageError, before more is read than metadata, for changes that are refused; and what `restore_latest`
        raises.
        """
        newest = manager.latest(world)
        if newest is None:
            return Begun(0, fresh(), 0, {})
        before = _metadata(manager, newest, world, options.get("prefer_finite", True))
        changes = None if before is None else self._accepted(before, newest)
        step, state, metadata = manager.restore_latest(target_layouts, world=world, **options)
        if changes is None or metadata != before:  # it walked back past one that is damaged, or not finite
            changes = self._accepted(metadata, step)
        if (world is None or world.rank == 0) and (text := str(changes)):
            print(f"resumed from step {step} with other settings:\n{text}", flush=True)
        samples = metadata.get("samples")
        return Begun(step, state, samples if isinstance(samples, int) else None, metadata)

    def _accepted(self, metadata: dict[str, Any], step: int) -> Changes:
        changes = self.changes(metadata)
        if changes.refused:
            names = ",".join(dict.fromkeys(text.partition(" ")[0] for text in changes.refused))
            raise UsageError(
                f"the checkpoint of step {step} is of a run with other settings: {', '.join(changes.refused)}. These "
                "change the function or the order of data; go on with the old values, begin another run, or allow the "
                f"change by name: --{PREFIX}allow={names} (in a notebook allow={tuple(names.split(','))!r})"
            )
        return changes

    def _class(self, name: str) -> str:
        """The class of a field, or of the nearest that it is a part of."""
        while name not in self._classes and "." in name:
            name = name.rpartition(".")[0]
        return self._classes.get(name, "refused")

    def _allowed(self, name: str) -> bool:
        return any(name == given or name.startswith(f"{given}.") for given in self.allow)


def plain(value: Any) -> Any:
    """A value as JSON has it: what is no number, text, list or dict becomes text that is the same in every process.

    >>> plain({"mesh": Mesh(fsdp=2, tp=2), "dtype": np.float32, "rate": float("inf"), "sizes": (1, 2)})
    {'mesh': 'fsdp=2,tp=2', 'dtype': 'numpy.float32', 'rate': 'inf', 'sizes': [1, 2]}
    """
    if isinstance(value, np.generic | np.ndarray | torch.Tensor):  # whose text leaves out most of a long one
        value = _elements(value)
    if isinstance(value, enum.Enum):
        return value.name
    if value is None or isinstance(value, bool | int | str):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else str(value)
    if isinstance(value, Mesh):
        return mesh_text(value)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {item.name: plain(getattr(value, item.name)) for item in dataclasses.fields(value) if item.init}
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, set | frozenset):
        return sorted(map(str, value))
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    if isinstance(value, os.PathLike):
        return os.fspath(value)
    if hasattr(value, "__qualname__"):
        return f"{value.__module__}.{value.__qualname__}"
    return re.sub(r" at 0x[0-9a-f]+", "", str(value))


def _elements(value: np.generic | np.ndarray | torch.Tensor) -> Any:
    """An array as nested lists or one number; a long one as a text that tells one from another."""
    values = value.detach().cpu() if isinstance(value, torch.Tensor) else value
    if values.dtype != object and math.prod(values.shape) > _SHOWN:
        flat = values.reshape(-1)
        data = flat.contiguous().view(torch.uint8).numpy() if isinstance(flat, torch.Tensor) else flat
        return f"{values.dtype} {list(values.shape)}, xxh3 {xxhash.xxh3_64(data.tobytes()).hexdigest()}"
    return values.tolist()


def _declared(config: Any, prefix: str = "") -> tuple[dict[str, str], dict[str, Any]]:
    """(class of each field that says one, default of each that has one), by dotted names where fields have fields."""
    classes, defaults = {}, {}
    for item in dataclasses.fields(config):
        if not item.init:
            continue
        name, value = prefix + item.name, getattr(config, item.name)
        classes[name] = item.metadata.get("resume") or ("refused" if not prefix else None)
        if item.default is not dataclasses.MISSING:
            defaults.update(_flat({name: plain(item.default)}))
        elif item.default_factory is not dataclasses.MISSING:
            defaults.update(_flat({name: plain(item.default_factory())}))
        if dataclasses.is_dataclass(value) and not isinstance(value, type | Mesh):
            inner, inner_defaults = _declared(value, f"{name}.")
            classes, defaults = classes | inner, inner_defaults | defaults
    return {name: kind for name, kind in classes.items() if kind is not None}, defaults


def _flat(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested dicts as one, by dotted names."""
    flat = {}
    for name, value in values.items():
        flat.update(_flat(value, f"{prefix}{name}.") if isinstance(value, dict) and value else {prefix + name: value})
    return flat


def _text(value: Any) -> str:
    return "(not there)" if value is _ABSENT else json.dumps(value, ensure_ascii=False)


def _metadata(manager: checkpoint.Manager, step: int, world: Any, prefer_finite: bool) -> dict[str, Any] | None:
    """Metadata of a step as rank 0 reads it, on all ranks; None where it cannot be read, or another step is better."""
    text = ""
    if world is None or world.rank == 0:
        try:
            if not (prefer_finite and manager.finite(step) is False):
                text = json.dumps(checkpoint.metadata(manager.path(step)))
        except (OSError, checkpoint.CheckpointError):
            pass  # a temporary step, or a damaged one: restore_latest finds another, or raises
    text = text if world is None else world.broadcast_text(text)
    return json.loads(text) if text else None
