"""The settings of a run as JSON, beside its checkpoints and in them; a resume names what has changed, or refuses it."""

import contextlib
import copy
import dataclasses
import json
import os
import re
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Self

import torch

from fmegatron import checkpoint, tree
from fmegatron.files import whole
from fmegatron.layout import Mesh
from fmegatron.loop.config import CLASSES, Config
from fmegatron.loop.flags import UsageError
from fmegatron.loop.onlookers import Onlooker
from fmegatron.loop.options import FIELD, of_before, options_of
from fmegatron.loop.plain import fields, plain
from fmegatron.tree import structure

_ABSENT = object()
_BY_DIMS = "by_dims"  # of metadata: saved since dims decide what decays, and layouts what Muon takes apart
_KNOWN = ("data", "tokenizer")  # facts that are there without a word: of the batches, and of `kept`


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
    the checkpoint does not state it. metadata: of the checkpoint, empty for a new run."""

    step: int
    state: structure.Tree
    samples: int | None
    metadata: dict[str, Any]


class Settings:
    """The Config of a run and facts that its numbers depend on, as JSON values.

        settings = Settings(config).about(data=batches.describe())
        begun = settings.begin(manager, specs, lambda: tree.init(specs, key=0, rank=world.rank))
        batches = batches.after(begun.samples, begun.step)
        ...
        manager.save(step, state, specs, metadata=settings.metadata(batches.samples(step)))

    config: a dataclass; what a change of its fields means is stated beside them (`loop.field`), and in fields of a
    dataclass beside the fields of that. facts: JSON values, a change of which is refused. allow: names of fields (of
    those in groups dotted: "run.seed") and facts whose change is not refused this time; None: those of the Config's
    field `run`, where it is `Options`. kept: JSON values that a checkpoint has as well, by name:
    `model.kept(decoder, tokenizer)`, so that it can be opened without the program; of these only "tokenizer" is
    compared, as a fact, where both have one.
    Raises UsageError for an allowed name that there is not; ValueError for values whose change could not be seen (a
    lambda, an object without a repr of its own; see `plain`) in what is not declared free, and for arguments of another
    kind.
    """

    def __init__(
        self,
        config: Config,
        *,
        allow: Sequence[str] | None = None,
        kept: Mapping[str, Any] | None = None,
        **facts: object,
    ):
        if not dataclasses.is_dataclass(config) or isinstance(config, type):
            made = f"make one: {config.__name__}()" if isinstance(config, type) else "write its fields in a dataclass"
            raise ValueError(f"Settings: config: got {config!r:.80}, wanted an instance of a dataclass; {made}")
        self._of, self.options = config, options_of(config)
        if allow is None:
            allow = () if self.options is None else self.options.allow
        if isinstance(allow, str) or not isinstance(allow, Iterable):
            raise ValueError(
                f"Settings: allow: got {allow!r:.80}, wanted names; pass a tuple of them: ({allow!r:.80},)"
            )
        self.config, self.allow = fields(config, type(config).__name__), tuple(allow)
        self.facts = {name: plain(value, name) for name, value in facts.items()}
        self.kept = dict(kept or {})
        self._classes, self._defaults, self._nested = _declared(config)
        names = {*self._classes, *_names(self.config, self._nested), *self.facts, *_KNOWN}
        for name in self.allow:
            if not isinstance(name, str) or name not in names:
                near = structure.did_you_mean(name, sorted(names)) if isinstance(name, str) else ""
                raise UsageError(f"allow: got {name!r}, wanted names of the Config's fields or of facts{near}")

    def about(self, **facts: object) -> Self:
        """These settings with more facts; one that they have stays what it is. `Run` adds `data=batches.describe()`."""
        found = copy.copy(self)
        found.facts = {name: plain(value, name) for name, value in facts.items()} | self.facts
        return found

    def metadata(self, samples: int | None) -> dict[str, Any]:
        """What a checkpoint holds about the run: `config`, `facts`, `samples`, how many its state has seen, and `kept`.

        samples: None for data that is not counted in samples.
        """
        own = {"config": self.config, "facts": self.facts, "samples": None if samples is None else int(samples)}
        return {**self.kept, **own, _BY_DIMS: True}

    def write(self, path: str | os.PathLike) -> None:
        """Write config and facts as a JSON file for people and programs, in place of one that is there."""
        path = Path(path)
        path.parent.mkdir(parents=True, exist_ok=True)
        text = json.dumps({"config": self.config, "facts": self.facts}, indent=2) + "\n"
        whole.write_whole(path, text.encode())

    def changes(self, metadata: Mapping[str, Any]) -> Changes:
        """What has changed since a checkpoint of this metadata.

        A field that the checkpoint does not know had its default then; one that the Config has no more is named, and
        so is a fact that only one of the two has.
        """
        before = metadata.get("config")
        if not isinstance(before, dict):
            return Changes(unknown="the checkpoint has no configuration: whether anything has changed cannot be said")
        before = of_before(before, self._of)
        found: dict[str, list[str]] = {name: [] for name in ("allowed", *CLASSES)}
        changed = {}
        for name, was, now in self._pairs(before, self.config):
            if _same(was, now):
                continue
            changed[name] = was, now
            kind = self._class(name)
            if now is _ABSENT or was is _ABSENT and _same(now, self._defaults.get(name, _ABSENT)):
                kind = "named"
            found["allowed" if kind == "refused" and self._allowed(name) else kind].append(_change(name, was, now))
        facts = metadata.get("facts")
        facts, own = facts if isinstance(facts, dict) else {}, self.facts
        if "tokenizer" in metadata and "tokenizer" in self.kept and not {"tokenizer"} & (facts.keys() | own.keys()):
            facts, own = ({**of, "tokenizer": x["tokenizer"]} for of, x in ((facts, metadata), (own, self.kept)))
        for name in [*own, *(name for name in facts if name not in own)]:
            was, now = _without(changed, facts.get(name, _ABSENT), own.get(name, _ABSENT))
            if name == "data" and _is_function(was) and _is_function(now):
                was, now, one_sided = _of_functions(was, now, metadata.get("written", ()))
                found["named"] += [_change(name, *pair) for pair in one_sided]
            if not _same(was, now):
                one = was is _ABSENT or now is _ABSENT
                kind = "named" if one else "allowed" if name in self.allow else "refused"
                found[kind].append(_change(name, was, now))
        refused, allowed, named, free = (tuple(found[name]) for name in ("refused", "allowed", "named", "free"))
        return Changes(refused, allowed, named, free)

    def begin(
        self,
        manager: checkpoint.Manager,
        target_layouts: structure.Tree,
        fresh: Callable[[], structure.Tree],
        *,
        local: checkpoint.LocalReplicas | None = None,
        step: int | None = None,
        prefer_finite: bool = True,
        read: str = "own",
    ) -> Begun:
        """The newest checkpoint, if its settings are those of now or differ by what may differ; else a new run.

        fresh: makes the state of a new run. local: replicas on the nodes, which are preferred where they are as new.
        step: this checkpoint and no other; 0: a new run. prefer_finite: as of `Manager.restore_latest`, where step is
        None. read: as of `checkpoint.restore`. Prints what has changed (rank 0). All ranks call it.
        Raises UsageError, before more is read than metadata, for changes that are refused; and what `restore_latest`
        raises.
        """
        if step == 0:
            manager.rewind(0)
            return Begun(0, fresh(), 0, {})
        if step is not None:
            state, metadata = manager.restore(step, target_layouts, read=read)
            return self._begun(step, state, metadata)
        newest = manager.latest()
        if local is not None and int(manager.world.minimum(torch.tensor([-max(local.steps(), default=0)]))):
            found = local.restore_latest(target_layouts, fallback=manager)
            self._accepted(found[2], found[0])
            return self._begun(*found)
        if newest is None:
            return Begun(0, fresh(), 0, {})
        before = _metadata(manager, newest, prefer_finite)
        changes = None if before is None else self._accepted(before, newest)
        step, state, metadata = manager.restore_latest(target_layouts, prefer_finite=prefer_finite, read=read)
        if changes is None or metadata != before:  # it walked back past one that is damaged, or not finite
            changes = self._accepted(metadata, step)
        if _BY_DIMS not in metadata and (since := _by_dims_now(target_layouts)):
            changes = dataclasses.replace(changes, named=(*changes.named, *since))
        if manager.world.rank == 0 and (text := str(changes)):
            told = f"resumed from step {step} with other settings:\n{text}"
            Onlooker("what a run shows of itself")(print, told, flush=True)
        return self._begun(step, state, metadata)

    @staticmethod
    def _begun(step: int, state: structure.Tree, metadata: dict[str, Any]) -> Begun:
        samples = metadata.get("samples")
        return Begun(step, state, samples if isinstance(samples, int) else None, metadata)

    def _accepted(self, metadata: dict[str, Any], step: int) -> Changes:
        changes = self.changes(metadata)
        if changes.refused:
            names = ",".join(dict.fromkeys(text.partition(" ")[0] for text in changes.refused))
            how = f"--{FIELD}.allow={names} (in a notebook Options(allow={tuple(names.split(','))!r}))"
            if self.options is None:
                how = (
                    f"Settings(config, allow={tuple(names.split(','))!r}), or give the Config a field "
                    '`run: loop.Options = loop.Options("runs/a")` and its flag; what may always change, '
                    'such as a rate, is declared: loop.field(1e-3, resume="named")'
                )
            raise UsageError(
                f"the checkpoint of step {step} is of a run with other settings: {', '.join(changes.refused)}. These "
                "change the function or the order of data; go on with the old values, begin another run, or allow the "
                f"change by name: {how}"
            )
        return changes

    def _pairs(
        self, before: Mapping[str, Any], now: Mapping[str, Any], prefix: str = ""
    ) -> Iterator[tuple[str, Any, Any]]:
        """(dotted name, value before, value now) of all fields; those of a field that is a dataclass one by one."""
        for key in [*now, *(key for key in before if key not in now)]:
            name, was, new = prefix + key, before.get(key, _ABSENT), now.get(key, _ABSENT)
            known = self._defaults.get(name) if was is _ABSENT else was
            if name in self._nested and isinstance(known, dict):
                yield from self._pairs({} if was is _ABSENT else was, new, f"{name}.")
            else:
                yield name, was, new

    def _class(self, name: str) -> str:
        """The class of a field, or of the nearest that it is a part of."""
        while name not in self._classes and "." in name:
            name = name.rpartition(".")[0]
        return self._classes.get(name, "refused")

    def _allowed(self, name: str) -> bool:
        return any(name == given or name.startswith(f"{given}.") for given in self.allow)


def _declared(config: Any, prefix: str = "") -> tuple[dict[str, str], dict[str, Any], set[str]]:
    """(class of each field that has one, default of each that has one, the fields that have fields), by dotted names.

    A default that no text distinguishes from others is left out: nothing is known to be equal to it.
    """
    classes, defaults, nested = {}, {}, set()
    for item in dataclasses.fields(config):
        if not item.init:
            continue
        name, value = prefix + item.name, getattr(config, item.name)
        classes[name] = item.metadata.get("resume") or ("named" if _is_mesh(value) else None if prefix else "refused")
        if dataclasses.is_dataclass(value) and not isinstance(value, type) and not _is_mesh(value):
            nested.add(name)
            inner, inner_defaults, inner_nested = _declared(value, f"{name}.")
            classes, defaults, nested = classes | inner, defaults | inner_defaults, nested | inner_nested
        default = item.default_factory() if item.default_factory is not dataclasses.MISSING else item.default
        if default is not dataclasses.MISSING:
            with contextlib.suppress(ValueError):
                defaults.update(_each_level(name, plain(default)) if name in nested else {name: plain(default)})
    return {name: kind for name, kind in classes.items() if kind is not None}, defaults, nested


def _by_dims_now(specs: structure.Tree) -> tuple[str, ...]:
    """What optimizers do in another way by default than when the letters "norm" and "bias" decided, in words."""
    leaves = zip(tree.paths(specs), tree.leaves(tree.layouts(specs)), strict=True)
    params = {p.partition("/")[2]: layout for p, layout in leaves if p.startswith("params/")}
    found = []
    if other := [p for p, x in params.items() if x.is_matrix == bool(re.search("norm|bias", p, re.IGNORECASE))]:
        what = "what decays, and travels in 16 bits, where the optimizer (decay=) does not say it"
        found.append(f"{what}: by names -> by dims, other for {', '.join(other)}")
    state = [p for p in tree.paths(specs) if p.startswith("opt/") and "muon/" in p]
    if apart := [p for p, x in params.items() if x.beside and any(q.endswith(f"/{p}") for q in state)]:
        found.append(
            f"muon's parts, where they are not given (parts=() as before): one -> apart for {', '.join(apart)}"
        )
    return tuple(found)


def _is_mesh(value: Any) -> bool:
    """Where a run is computed, and not what: any mesh gives the same state."""
    return isinstance(value, Mesh)


def _names(config: Mapping[str, Any], nested: Collection[str], prefix: str = "") -> Iterator[str]:
    """Dotted names of all fields, and of those of fields that have fields."""
    for key, value in config.items():
        yield prefix + key
        if prefix + key in nested:
            yield from _names(value, nested, f"{prefix}{key}.")


def _each_level(name: str, value: Any) -> dict[str, Any]:
    """A nested value and its parts, by dotted names."""
    levels = {name: value}
    for key, part in value.items() if isinstance(value, dict) else ():
        levels.update(_each_level(f"{name}.{key}", part))
    return levels


def _same(a: Any, b: Any) -> bool:
    """Whether two JSON values are equal; other than Python's ==, true is not 1. (1 and 1.0 are one number.)"""
    if isinstance(a, dict) and isinstance(b, dict):
        return a.keys() == b.keys() and all(_same(value, b[key]) for key, value in a.items())
    if isinstance(a, list) and isinstance(b, list):
        return len(a) == len(b) and all(map(_same, a, b))
    return isinstance(a, bool) == isinstance(b, bool) and a == b


def _without(changed: Mapping[str, tuple[Any, Any]], was: Any, now: Any) -> tuple[Any, Any]:
    """Two dicts without entries that changed as a field of the same name did, also one of a group: a seed is named
    once."""
    if not (isinstance(was, dict) and isinstance(now, dict)):
        return was, now
    pairs = {name.rpartition(".")[2]: pair for name, pair in changed.items()}
    twice = {key for key in was.keys() & now.keys() if key in pairs and _same([was[key], now[key]], [*pairs[key]])}
    was, now = ({key: value for key, value in side.items() if key not in twice} for side in (was, now))
    return was, now


def _is_function(fact: Any) -> bool:
    """Whether a description of data is that of a function (`data.source`)."""
    return isinstance(fact, dict) and fact.get("kind") == "function" and isinstance(fact.get("uses", {}), dict)


def _of_functions(was: dict, now: dict, written: Collection[str]) -> tuple[dict, dict, list[tuple[dict, dict]]]:
    """Of what two functions of data use: what is left to compare, and what is named, a pair of what one alone has.

    written: names of arrays that the first has written to, whose elements are of no account. A name that only one has
    is no other value: an argument with a default was added, or a number taken out. Names that changed keep their
    values; where some went and others came with values of their own, that is another value under another name.
    """
    one, other = ({name: str(x) for name, x in of.get("uses", {}).items()} for of in (was, now))
    for name in written:
        one, other = ({**of, **{name: of[name].rpartition(" ")[0]}} if name in of else of for of in (one, other))
    gone, come = ({name: x for name, x in a.items() if name not in b} for a, b in ((one, other), (other, one)))
    before, after = Counter(gone.values()), Counter(come.values())
    named = (gone or come) and (before <= after or after <= before)
    if named:
        one, other = ({name: x for name, x in a.items() if name in b} for a, b in ((one, other), (other, one)))
    kept = {**was, "uses": one}, {**now, "uses": other}
    return *kept, [({"uses": gone}, {"uses": come})] if named else []


def _change(name: str, was: Any, now: Any) -> str:
    """`heads 2 -> 4`; of two dicts those entries that differ."""
    return f"{name} {_text(_differing(was, now))} -> {_text(_differing(now, was))}"


def _differing(one: Any, other: Any) -> Any:
    """Of two dicts, and of dicts in both, the entries of the first that the other has not."""
    if not (isinstance(one, dict) and isinstance(other, dict)):
        return one
    pairs = {key: (x, other.get(key, _ABSENT)) for key, x in one.items()}
    return {key: _differing(*pair) for key, pair in pairs.items() if not _same(*pair)}


def _text(value: Any) -> str:
    return "(not there)" if value is _ABSENT else json.dumps(value, ensure_ascii=False)


def _metadata(manager: checkpoint.Manager, step: int, prefer_finite: bool) -> dict[str, Any] | None:
    """Metadata of a step as rank 0 reads it, on all ranks; None where it cannot be read, or another step is better."""
    text = ""
    if manager.world.rank == 0:
        try:
            if not (prefer_finite and manager.finite(step) is False):
                text = json.dumps(checkpoint.metadata(manager.path(step)))
        except (OSError, checkpoint.CheckpointError):
            pass  # damaged: restore_latest finds another, or raises
    text = manager.world.broadcast_text(text)
    return json.loads(text) if text else None
