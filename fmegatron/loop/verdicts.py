"""What the loop makes of the losses of its updates: seen at log points, agreed by all ranks, then acted on."""

import warnings
from collections import deque
from collections.abc import Mapping
from typing import Any

import torch

from fmegatron import tree
from fmegatron.loop.losses import ACTIONS, BadLoss, BadLossError, Finding, LossWatch, RollBack, RunAgain
from fmegatron.loop.metrics import COUNT, fetch
from fmegatron.loop.nonfinite import WATCHED, broken, judge
from fmegatron.step import donation
from fmegatron.tree import structure

_NEVER = 1 << 62


class Verdicts:
    """Of one call of `train`. skips: whether updates may be taken back, each judged at once."""

    def __init__(self, bad: BadLoss, world):
        self.nonfinite, self.watch, self.world = bad.nonfinite, LossWatch(bad.spike, bad.stuck), world
        self.skips = bad.nonfinite == "skip" or (bad.spike is not None and bad.spike.then == "skip")
        self._all = bool(self.watch) or bad.nonfinite in ("roll back", "rerun")
        self._recent: list[tuple[int, dict[str, Any]]] = []  # since the last log point: updates and what is watched
        self._shown: dict[int, Mapping[str, float]] = {}  # of the last log points: what is not finite
        self._finite: deque[int] = deque(maxlen=3)  # the last log points where all was
        self._first_broken: int | None = None
        self._found: Finding | None = None
        self._counts: list[dict[str, Any]] = []  # since the last log point: of each update, how much counted
        self._logged = False  # whether there was a log point
        self._told: set[str] = set()  # parts, and "grad_norm", that were warned of

    def see(self, number: int, metrics: Any, logs: bool) -> tuple[dict[str, float], tuple[bool, bool]]:
        """(metrics as floats, empty between log points; whether they are not finite, whether a loss is bad)."""
        if self._all and not self.skips and isinstance(metrics, Mapping):
            self._recent.append((number, {name: metrics[name] for name in WATCHED if name in metrics}))
        if isinstance(metrics, Mapping):
            counts = {name.removesuffix(COUNT): x for name, x in metrics.items() if str(name).endswith(COUNT)}
            self._counts.append({name: x for name, x in counts.items() if name in metrics})
        if not logs:
            return {}, (False, False)
        many = {f"\0{n} {name}": value for n, some in self._recent for name, value in some.items()}
        values = fetch({**metrics, **many} if isinstance(metrics, Mapping) else metrics)  # one transfer for all of it
        losses = {key: values.pop(key) for key in many}
        for n, some in self._recent:
            found = {name: losses[f"\0{n} {name}"] for name in some}
            if self._first_broken is None and broken(found):
                # A loss is that of the parameters before the update: without a norm, the update before may be the bad.
                self._first_broken = n if "grad_norm" in found else max(1, n - 1)
            if self.watch and self._found is None and "loss" in found:
                self._found = self.watch.see(n, found["loss"])
        self._recent.clear()
        self._count(number, values)
        shown = broken(values)
        self._shown = {n: some for n, some in self._shown.items() if n == number - 1} | {number: shown}
        if not shown:
            self._finite.append(number)
            self._first_broken = None
        return values, (bool(shown), self._found is not None)

    def _count(self, number: int, values: Mapping[str, float]) -> None:
        """Warns at a log point where nothing has counted since the last one, once for each part of the loss; where
        nothing has counted in any, and it is not the first log point, that is a bad loss. Counts are equal on all
        ranks."""
        recent, first = self._counts, not self._logged
        self._counts, self._logged = [], True
        silent = [name for name in (recent[-1] if recent else ()) if values[name + COUNT] == 0]
        if silent:  # of the updates before: a second transfer, only then
            each = fetch(
                {f"{n} {name}": some[name] for n, some in enumerate(recent) for name in silent if name in some}
            )
            silent = [name for name in silent if not any(each.get(f"{n} {name}") for n in range(len(recent)))]
        if silent and len(silent) == len(recent[-1]):
            text = f"nothing has counted in the loss ({', '.join(name + COUNT for name in silent)} is 0)"
            fix = "look at masks and labels (of chats: data.Chats.unanswered)"
            if not first:
                self._found = Finding(number, f"{text} since the last log point; {fix}", "raise")
            else:
                self._warn(f"step {number}: {text}; {fix}")
        elif new := [name for name in silent if name not in self._told]:
            names = ", ".join(name + COUNT for name in new)
            self._warn(f"step {number}: {names} is 0 since the last log point: nothing of it is learned")
        elif values.get("grad_norm") == 0 and "grad_norm" not in self._told:
            self._told.add("grad_norm")
            self._warn(
                f"step {number}: grad_norm is exactly 0: nothing is learned; look for .detach(), for masks that leave "
                "nothing, and for parameters that the loss does not use"
            )
        self._told |= set(silent)

    def judge(self, state: structure.Tree, number: int, about: int, not_finite: bool, bad: bool) -> None:
        """What follows on what some rank has seen when update `about` was done. All ranks call it.

        number: updates that `state` has seen.
        """
        if not_finite:
            first = self._agreed(self._first_broken or about) if self._all else about
            action = "raise" if self.nonfinite == "skip" else self.nonfinite
            before = max((n for n in self._finite if n < about), default=None)
            try:
                judge(state, about, self._shown.get(about, {}), before, self.world, action, first)
            except RunAgain as again:
                again.state, again.last = state, number
                raise
            self._first_broken = None
        if bad:
            found, self._found = self._found, None
            worst = 0 if found is None else ACTIONS.index(found.then)
            row = torch.tensor([_NEVER if found is None else found.step, -worst])
            first, worst = (row if self.world is None else self.world.minimum(row)).tolist()
            what = "another rank has found a bad loss" if found is None else found.text
            self._act(state, f"step {first}: {what}", ACTIONS[-worst], first, number)

    def _act(self, state: structure.Tree, text: str, then: str, first: int, number: int) -> None:
        """The same on all ranks: the severest of what they want."""
        if then == "roll back":
            raise RollBack(f"{text}: wants a checkpoint; `Run` goes back, a loop by hand does it itself", first, first)
        if then == "rerun":
            again = RunAgain(f"{text}: wants a rerun; `Run` does it, a loop by hand does it itself", first, number)
            again.state = state
            raise again
        if then == "raise":
            raise BadLossError(
                f"{text}: training ends; look at data and rate, or go back to a checkpoint", first, number
            )
        self._warn(f"{text}; training goes on")

    def _agreed(self, step: int) -> int:
        """The earliest on any rank."""
        return step if self.world is None else int(self.world.minimum(torch.tensor([step])))

    # ---- skip: judged at once
    def skip(self, number: int, before: structure.Tree, after: structure.Tree, metrics: Any) -> structure.Tree:
        """The state to go on with: `before` when the losses of this update are bad on any rank, else `after`."""
        for path, x in zip(tree.paths(before), tree.leaves(before), strict=True):
            if isinstance(x, donation.Donated):
                raise ValueError(
                    f"train: skip: got a step that donates {path!r}, wanted one that leaves the state before as it is; "
                    "jit(..., donate=()), or skip within the step, which costs nothing: optim.skip_nonfinite"
                )
        values = fetch({name: metrics[name] for name in WATCHED if name in metrics})
        shown, found = broken(values) if self.nonfinite == "skip" else {}, None
        if self.watch and not shown and "loss" in values:
            found = self.watch.see(number, values["loss"])
        takes_back = bool(shown) or (found is not None and found.then == "skip")
        if self._agreed(0 if takes_back else 1):
            self._found = self._found or found
            return after
        text = found.text if found else ", ".join(f"{name} is {value}" for name, value in shown.items())
        self._warn(f"step {number}: {text or 'bad on another rank'}; its update is skipped")
        return before

    def _warn(self, text: str) -> None:
        if self.world is None or self.world.rank == 0:
            warnings.warn(text, RuntimeWarning, stacklevel=4)
