"""Modules and optimizers inside a state dict, and the state that an optimizer has not made yet, before its first step.

torch's optimizers make moments at their first step, so the state dict of a fresh one asks for none of those that a
checkpoint holds. What is stored states which there are; the parameters have a layout, as torch makes them: a moment of
the parameter's shape has its layout. Nothing is stepped, so parameters, gradients and hooks are not touched.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from fmegatron.interop.flat import put

_STEP_FIRST = "let it take one step, with gradients and a learning rate of 0, and load then"
Stored = Mapping[str, tuple[tuple[int, ...], torch.dtype] | None]  # path -> shape and dtype; None for a value


def is_stateful(value: Any) -> bool:
    """Whether a value has a state dict of its own: modules, optimizers, schedulers, whatever torch calls Stateful."""
    return not isinstance(value, type) and all(
        callable(getattr(value, name, None)) for name in ("state_dict", "load_state_dict")
    )


def opened(state: Any, above: frozenset[int] = frozenset()) -> tuple[Any, list[tuple[Any, dict[str, Any]]]]:
    """The state with the state dicts of stateful values in their places, and the pairs (value, its state dict).

    Dicts, lists and tuples are looked through; what holds no such value is the same object, not a copy.
    """
    if is_stateful(state):
        inner = state.state_dict()
        return inner, [(state, inner)]
    if not isinstance(state, dict | list | tuple) or id(state) in above:  # (one that contains itself is refused later)
        return state, []
    found = [(key, *opened(value, above | {id(state)})) for key, value in _items(state)]
    pairs = [pair for _, _, below in found for pair in below]
    if not pairs:
        return state, []
    return ({key: x for key, x, _ in found} if isinstance(state, dict) else [x for _, x, _ in found]), pairs


def give_back(state: Any, into: Any) -> None:
    """Put the values of an opened state into the one that it was made of, in place."""
    for key, value in _items(into):
        if is_stateful(value):
            continue
        if isinstance(value, dict | list | tuple) and value is not state[key]:
            give_back(state[key], value)
        elif value is not state[key]:
            put(into, (key,), state[key])


def _items(state: Any) -> list[tuple[Any, Any]]:
    return list(state.items() if isinstance(state, dict) else enumerate(state))


class Unmade:
    """The entries of optimizers' state that are stored, and that an optimizer has not made before its first step.

    They are put into the state dicts by `make`, and taken out by `undo`, for another try.
    """

    def __init__(self, state: Any, pairs: Sequence[tuple[Any, dict[str, Any]]]):
        self._optimizers = list(_optimizers(state, (), {id(inner): value for value, inner in pairs}))
        self._has_dtensors = any(isinstance(x, DTensor) for x in _tensors(state))
        self._made: list[tuple[dict, Any]] = []

    def make(self, stored: Stored, are_sharded: Callable[[str], bool], ranks: int) -> None:
        """Give each parameter without state the entries that are stored for it, as tensors to be filled.

        are_sharded: whether the ranks that wrote a path held parts of it.  Raises ValueError where nothing states how
        they are split: a state dict does not hold the parameters, so several ranks must give the optimizer itself.
        """
        for keys, state, parameters in self._optimizers:
            start = "/".join(map(str, (*keys, "state", "")))
            missing = {str(number): number for number in parameters if number not in state["state"]}
            for path, kind in stored.items():
                text, _, name = path.removeprefix(start).partition("/")
                if not path.startswith(start) or text not in missing:
                    continue
                number, like = missing[text], parameters[missing[text]]
                if like is None and kind and (self._has_dtensors or (ranks > 1 and are_sharded(path))):
                    raise ValueError(
                        f"{path}: got the state dict of an optimizer before its first step, wanted the layouts of its"
                        " tensors too; pass the optimizer itself in its place"
                    )
                if "/" in name:
                    raise ValueError(
                        f"{path}: got a list or dict inside the state of a parameter, wanted tensors before the"
                        f" optimizer's first step; {_STEP_FIRST}"
                    )
                if number not in state["state"]:
                    state["state"][number] = {}
                    self._made.append((state["state"], number))
                if name:
                    state["state"][number][name] = kind and _empty(path, *kind, like)

    def undo(self) -> None:
        """Take out what `make` has put in."""
        while self._made:
            state, number = self._made.pop()
            del state[number]


# ---- parameters by name


def with_names(state: Any, pairs: Sequence[tuple[Any, dict[str, Any]]], containers: Mapping[str, Any]) -> dict:
    """`containers`, in which the state of an optimizer has the names of its parameters, by number, where the modules
    of the state dict have all of them."""
    found = dict(containers)
    for keys, _, names in _named(state, pairs):
        path = "/".join(map(str, (*keys, "state")))
        if names is not None and isinstance(found.get(path), dict):
            found[path] = {**found[path], "names": {str(number): some[0] for number, some in names.items()}}
    return found


class Renumbered:
    """The state dicts of optimizers with the numbers that a checkpoint gives to parameters of these names.

    Two programs may register the same parameters in another order; torch's state dicts number them. `finish` gives each
    group its own parameters back, when values have been filled.

    containers: what a save of ours notes. values: what is stored beside tensors: of an optimizer that was given names
    (`model.named_parameters()`) they are among its groups.
    """

    def __init__(
        self,
        state: Any,
        pairs: Sequence[tuple[Any, dict[str, Any]]],
        containers: Mapping[str, Any],
        values: Mapping[str, Any],
    ):
        self._undo: list[tuple[dict, dict, list[list]]] = []
        self._groups: list[tuple[dict, list, Any]] = []
        self._lent: list[tuple[dict, Any]] = []
        for keys, inner, names in _named(state, pairs):
            path = "/".join(map(str, (*keys, "state")))
            kind = containers.get(path)
            stored = kind.get("names") if isinstance(kind, dict) else None
            if stored is None:
                stored = _names_in(values, "/".join(map(str, (*keys, "param_groups"))))
            if names is None or not isinstance(stored, dict):
                continue
            numbers = {name: int(number) for number, name in stored.items() if str(number).isdecimal()}
            own = {number: next((one for one in some if one in numbers), some[0]) for number, some in names.items()}
            if set(numbers) != set(own.values()):
                lost = sorted(set(numbers) ^ set(own.values()))
                raise ValueError(
                    f"{path}: got an optimizer of other parameters than the checkpoint's, wanted the same names: "
                    f"{', '.join(map(str, lost[:5]))}; give the optimizer the parameters that were saved"
                )
            self._lend(inner, "/".join(map(str, (*keys, "param_groups"))), values)
            new = {number: numbers[name] for number, name in own.items()}
            if all(a == b for a, b in new.items()):
                continue
            old = [list(group["params"]) for group in inner["param_groups"]]
            self._undo.append((inner, inner["state"], old))
            inner["state"] = {new[number]: x for number, x in inner["state"].items()}
            for group, own in zip(inner["param_groups"], old, strict=True):
                group["params"] = [new[number] for number in own]
                self._groups.append((group, group["params"], group.get("param_names")))

    def _lend(self, inner: dict, path: str, values: Mapping[str, Any]) -> None:
        """Give groups "param_names" where the checkpoint has them, and nowhere else: what is whose is known without."""
        for i, group in enumerate(inner["param_groups"]):
            own, stored = group.get("param_names"), values.get(f"{path}/{i}/param_names")
            if (own is None) == (stored is None):
                continue
            self._lent.append((group, own))
            group.pop("param_names", None)
            if stored is not None:
                group["param_names"] = list(stored)

    def _take_back(self) -> None:
        for group, own in self._lent:
            group.pop("param_names", None)
            if own is not None:
                group["param_names"] = own
        self._lent = []

    def finish(self) -> None:
        """The numbers of each group's own parameters, in their order, which torch loads by."""
        for group, numbers, names in self._groups:
            if sorted(group["params"]) != sorted(numbers):
                raise ValueError(
                    "param_groups: got other parameters in a group than the checkpoint has there, wanted the same; "
                    "give the groups the parameters that they were saved with"
                )
            group["params"] = numbers
            if names is not None:
                group["param_names"] = names
        self._take_back()

    def undo(self) -> None:
        """As the state dicts were."""
        for inner, state, old in self._undo:
            inner["state"] = state
            for group, own in zip(inner["param_groups"], old, strict=True):
                group["params"] = own
        self._take_back()
        self._undo, self._groups = [], []


def _named(state: Any, pairs: Sequence[tuple[Any, dict[str, Any]]]) -> Iterator[tuple[tuple, dict, dict | None]]:
    """(keys, state dict, {number: names of the parameter, of a tied one several}) of every optimizer; None where a name
    is not known, or is another's, too. Names are those of the modules, else those that the optimizer was given."""
    known: dict[int, list[str]] = {}
    for value, _ in pairs:
        if isinstance(value, torch.nn.Module):
            for name, x in value.named_parameters(remove_duplicate=False):
                known.setdefault(id(x), []).append(name)
    for keys, inner, parameters in _optimizers(state, (), {id(inner): value for value, inner in pairs}):
        given = _given(inner)
        names = {n: known.get(id(x)) or given.get(n, []) for n, x in parameters.items() if type(n) is int}
        every = [name for some in names.values() for name in some]
        whole = len(names) == len(parameters) and all(names.values()) and len(every) == len(set(every))
        yield keys, inner, names if whole else None


def _given(inner: Mapping[str, Any]) -> dict[Any, list[str]]:
    """{number: [name]} of the groups of an optimizer that was given names."""
    found = {}
    for group in inner["param_groups"]:
        if not isinstance(group, dict):
            continue
        numbers, names = group.get("params") or (), group.get("param_names")
        if isinstance(names, list | tuple) and len(names) == len(numbers):
            found |= {n: [name] for n, name in zip(numbers, names, strict=True)}
    return found


def _names_in(values: Mapping[str, Any], path: str) -> dict[str, str] | None:
    """{number: name} as `with_names` notes them, of stored groups; None where one has no names."""
    found, i = {}, 0
    while (numbers := values.get(f"{path}/{i}/params")) is not None:
        names = values.get(f"{path}/{i}/param_names")
        if not isinstance(numbers, list) or not isinstance(names, list) or len(names) != len(numbers):
            return None
        found |= {str(n): str(name) for n, name in zip(numbers, names, strict=True)}
        i += 1
    return found or None


def _optimizers(state: Any, keys: tuple, owners: Mapping[int, Any]) -> Iterator[tuple[tuple, dict, dict]]:
    """(keys, state dict, {number: parameter, or None where it is not known}) of every optimizer's state dict."""
    if isinstance(state, dict) and isinstance(state.get("state"), dict) and isinstance(state.get("param_groups"), list):
        owner = owners.get(id(state))
        numbers = [n for g in state["param_groups"] if isinstance(g, dict) for n in g.get("params", ())]
        known = [None] * len(numbers)
        if isinstance(owner, torch.optim.Optimizer):
            known = [x for group in owner.param_groups for x in group["params"]]
        if len(known) == len(numbers) and all(type(n) in (int, str) for n in numbers):
            yield keys, state, dict(zip(numbers, known, strict=True))
    elif isinstance(state, dict | list | tuple):
        for key, value in _items(state):
            yield from _optimizers(value, (*keys, key), owners)


def _tensors(state: Any) -> Iterator[torch.Tensor]:
    if isinstance(state, torch.Tensor):
        yield state
    for _, value in _items(state) if isinstance(state, dict | list | tuple) else ():
        yield from _tensors(value)


def _empty(path: str, shape: tuple[int, ...], dtype: torch.dtype, like: torch.Tensor | None) -> torch.Tensor:
    """Zeros to be filled: like the parameter where they have its shape, else in full on every rank."""
    if like is None:
        return torch.zeros(shape, dtype=dtype)
    if tuple(like.shape) == shape:
        return torch.zeros_like(like, dtype=dtype, requires_grad=False)
    if isinstance(like, DTensor) and shape:
        raise ValueError(
            f"{path}: got a stored shape {shape}, wanted that of its parameter, {tuple(like.shape)}, for its layout "
            f"is not known before the optimizer's first step; {_STEP_FIRST}"
        )
    return torch.zeros(shape, dtype=dtype)
